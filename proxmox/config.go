package proxmox

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/provider"
)

// Config is one Proxmox VE cluster, or a single node, used as a provider.
type Config struct {
	// Name is the entry name that a proxy's Provider field refers to. Required.
	Name string
	// Nodes are the nodes that may carry instances. What happens to be on other nodes of the cluster is
	// still found and deleted. Required.
	Nodes []Node
	// TokenID is an API token's id, as in "egress@pve!crawl". Required.
	TokenID string
	// Secret returns the token's secret. It is called at the first use and again after Proxmox refused
	// the last one, never concurrently, with the context of the call that needs it. Required.
	Secret func(ctx context.Context) ([]byte, error)
	// CA holds the certificates, in PEM, that the nodes' certificates must be signed by: the cluster's
	// own is in /etc/pve/pve-root-ca.pem. Defaults to CAFile's, else to the system's.
	CA []byte
	// CAFile is a file with CA's content. It is read by New. Defaults to none.
	CAFile string

	// Templates are what a spec's Image may name. Required.
	Templates map[string]Template
	// FullClone copies the template's disks instead of linking to them. A linked clone is made in
	// seconds and keeps its template from being deleted. Defaults to false.
	FullClone bool
	// DiskStorage is the storage for the disks of full clones. Defaults to the template's.
	DiskStorage string
	// SeedStorage is the storage for the cloud-init seeds. It must have the content type iso on every
	// node. Defaults to "local".
	SeedStorage string
	// VMIDMin and VMIDMax bound the VMIDs of instances, both included. Give the range to nobody else.
	// Default to 50000 and 59999.
	VMIDMin, VMIDMax int
	// Pool is the resource pool that instances are put into. Defaults to none.
	Pool string
	// Tags replace the template's on instances. Defaults to keeping the template's.
	Tags []string
	// Bridge is the bridge of the first network interface. Defaults to the template's.
	Bridge string
	// VLAN is the VLAN tag of the first network interface, 1 to 4094. Defaults to the template's.
	VLAN int

	// ClonesPerNode bounds the clones that run at once on a node. Defaults to 2.
	ClonesPerNode int
	// RequestTimeout bounds one request. Defaults to 35 seconds, since Proxmox itself gives up on
	// another node after 30.
	RequestTimeout time.Duration
	// TaskTimeout bounds the wait for a task that is no clone. Defaults to 2 minutes.
	TaskTimeout time.Duration
	// CloneTimeout bounds the wait for a clone. A clone whose lock is still there after that is taken
	// for dead. Defaults to 10 minutes.
	CloneTimeout time.Duration
	// DialContext makes connections to the endpoints. Defaults to a net.Dialer's.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)

	// Logger gets one debug record for each request and a warning for what an operator should look at.
	// Defaults to discarding.
	Logger *slog.Logger
}

// Node is one node of the cluster.
type Node struct {
	// Name is the node's name in the cluster. Required.
	Name string
	// Endpoint is the URL of the API on this very node, as in "https://192.0.2.10:8006". Required.
	Endpoint string
	// Fingerprint is the SHA-256 of the node's certificate in hexadecimal, with or without colons. It
	// replaces the verification by CA. Defaults to none.
	Fingerprint string
	// Labels are matched by a spec's Placement.Labels. Defaults to none.
	Labels map[string]string
	// Drain lets no new instances onto the node and asks the pool to replace those that are there.
	// Defaults to false.
	Drain bool
}

// Template says which template an image is cloned from. Exactly one of Name and VMID is needed, unless every node is in
// Nodes.
type Template struct {
	// Name is the template's name. On each node the template of that name is used, else one on another
	// node, which takes shared storage. Defaults to none.
	Name string
	// VMID is the template's VMID. Defaults to none.
	VMID int
	// Nodes are VMIDs for single nodes. Defaults to none.
	Nodes map[string]int
}

var (
	nodePattern    = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)
	storagePattern = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9._-]*[a-zA-Z0-9]$`)
	poolPattern    = regexp.MustCompile(`^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+){0,2}$`)
	tagPattern     = regexp.MustCompile(`^[a-z0-9_][a-z0-9_.+-]*$`)
	bridgePattern  = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.-]{0,14}$`)
	tokenPattern   = regexp.MustCompile(`^[^\s:/!=;%]+@[A-Za-z][A-Za-z0-9._-]+![A-Za-z][A-Za-z0-9._-]+$`)
	secretPattern  = regexp.MustCompile(`^[A-Za-z0-9._~-]{8,128}$`)
	imagePattern   = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$`)
	namePattern    = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

// Proxmox's bounds for VMIDs.
const (
	lowestVMID  = 100
	highestVMID = 999999999
)

// filled returns c with its defaults, or every fault of it.
func (c Config) filled() (Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("proxmox: "+format, args...)) }
	if err := provider.CheckName(c.Name); err != nil {
		fault("Name %w", err)
	}
	c.Nodes = slices.Clone(c.Nodes)
	if len(c.Nodes) == 0 {
		fault("Nodes is empty, want at least one")
	}
	seen := map[string]bool{}
	for i, n := range c.Nodes {
		if !nodePattern.MatchString(n.Name) || seen[n.Name] {
			fault("Nodes[%d].Name %q, want each node's name once", i, n.Name)
		}
		seen[n.Name] = true
		u, err := url.Parse(n.Endpoint)
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
			fault("Nodes[%d].Endpoint is no plain https URL, want one such as https://192.0.2.10:8006", i)
		} else {
			c.Nodes[i].Endpoint = "https://" + u.Host
		}
		fingerprint, err := hex.DecodeString(strings.ReplaceAll(n.Fingerprint, ":", ""))
		if err != nil || len(fingerprint) != 0 && len(fingerprint) != 32 {
			fault("Nodes[%d].Fingerprint %q is no SHA-256, want 64 hexadecimal digits", i, n.Fingerprint)
		}
		c.Nodes[i].Fingerprint = hex.EncodeToString(fingerprint)
		c.Nodes[i].Labels = maps.Clone(n.Labels)
	}
	if !tokenPattern.MatchString(c.TokenID) {
		fault("TokenID %q is no token's id, want one such as egress@pve!crawl", c.TokenID)
	}
	if c.Secret == nil {
		fault("Secret is nil, want a function that returns the token's secret")
	}
	if c.CAFile != "" {
		read, err := os.ReadFile(c.CAFile)
		if err != nil {
			fault("CAFile: %w", err)
		}
		if c.CA != nil {
			fault("CA and CAFile are both set, want one")
		}
		c.CA = read
	}
	if c.CA != nil && !x509.NewCertPool().AppendCertsFromPEM(c.CA) {
		fault("CA holds no certificate in PEM")
	}
	c.checkTemplates(seen, fault)
	c.SeedStorage = or(c.SeedStorage, "local")
	for field, v := range map[string]string{"SeedStorage": c.SeedStorage, "DiskStorage": or(c.DiskStorage, "local")} {
		if !storagePattern.MatchString(v) {
			fault("%s %q is no storage's name", field, v)
		}
	}
	if c.DiskStorage != "" && !c.FullClone {
		fault("DiskStorage %q needs FullClone: a linked clone is where its template is", c.DiskStorage)
	}
	if c.VMIDMin == 0 && c.VMIDMax == 0 {
		c.VMIDMin, c.VMIDMax = 50000, 59999
	}
	if c.VMIDMin < lowestVMID || c.VMIDMax > highestVMID || c.VMIDMin > c.VMIDMax {
		fault("VMIDMin %d and VMIDMax %d, want a range within %d to %d", c.VMIDMin, c.VMIDMax, lowestVMID, highestVMID)
	}
	if c.Pool != "" && !poolPattern.MatchString(c.Pool) {
		fault("Pool %q is no pool's name", c.Pool)
	}
	for _, t := range c.Tags {
		if !tagPattern.MatchString(t) {
			fault("Tags has %q, want lower-case letters, digits, _, -, + and .", t)
		}
	}
	c.Tags = slices.Clone(c.Tags)
	if c.Bridge != "" && !bridgePattern.MatchString(c.Bridge) {
		fault("Bridge %q is no bridge's name, want one such as vmbr0", c.Bridge)
	}
	if c.VLAN < 0 || c.VLAN > 4094 {
		fault("VLAN %d, want 1 to 4094", c.VLAN)
	}
	if c.ClonesPerNode < 0 || c.RequestTimeout < 0 || c.TaskTimeout < 0 || c.CloneTimeout < 0 {
		fault("ClonesPerNode %d, RequestTimeout %s, TaskTimeout %s and CloneTimeout %s must not be negative", c.ClonesPerNode, c.RequestTimeout, c.TaskTimeout, c.CloneTimeout)
	}
	if c.ClonesPerNode == 0 {
		c.ClonesPerNode = 2
	}
	for d, instead := range map[*time.Duration]time.Duration{&c.RequestTimeout: 35 * time.Second, &c.TaskTimeout: 2 * time.Minute, &c.CloneTimeout: 10 * time.Minute} {
		if *d == 0 {
			*d = instead
		}
	}
	if c.DialContext == nil {
		c.DialContext = (&net.Dialer{}).DialContext
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(faults...)
}

func (c *Config) checkTemplates(nodes map[string]bool, fault func(string, ...any)) {
	if len(c.Templates) == 0 {
		fault("Templates is empty, want at least one")
	}
	templates := map[string]Template{}
	for _, image := range slices.Sorted(maps.Keys(c.Templates)) {
		t := c.Templates[image]
		if !imagePattern.MatchString(image) {
			fault("Templates has %q, want letters, digits, hyphens and dots", image)
		}
		if t.Name != "" && t.VMID != 0 || t.Name == "" && t.VMID == 0 && len(t.Nodes) == 0 {
			fault("Templates[%s] has the name %q and the VMID %d, want one of them", image, t.Name, t.VMID)
		}
		ids := map[string]int{"VMID": or(t.VMID, lowestVMID)}
		for n, id := range t.Nodes {
			if !nodes[n] {
				fault("Templates[%s].Nodes has %q, which is not among Nodes", image, n)
			}
			ids["Nodes["+n+"]"] = id
		}
		for field, id := range ids {
			if id < lowestVMID || id > highestVMID {
				fault("Templates[%s].%s is %d, want %d to %d", image, field, id, lowestVMID, highestVMID)
			}
		}
		t.Nodes = maps.Clone(t.Nodes)
		templates[image] = t
	}
	c.Templates = templates
}

func or[T comparable](value, instead T) T {
	var none T
	if value == none {
		return instead
	}
	return value
}
