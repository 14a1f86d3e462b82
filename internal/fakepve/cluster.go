// Package fakepve is a Proxmox VE cluster in memory, for tests of what talks to one. It speaks HTTPS as pveproxy does,
// down to reason phrases and closed connections, checks every request against the published schema of the endpoints that
// it has, and keeps permissions, locks, tasks, disks and uploads as the real thing does. Nothing in it uses an operating
// system's socket or anything but the standard clock, so it works in testing/synctest bubbles.
package fakepve

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"crawl.example.com/egress/internal/memconn"
)

// Config says what the cluster is like.
type Config struct {
	// Version is 8 or 9. Defaults to 9.
	Version int
	// Nodes are the names of the nodes. Defaults to pve1, pve2 and pve3.
	Nodes []string
	// NodeMemoryMiB is the memory of each node. Defaults to 65536.
	NodeMemoryMiB int
	// CloneTime is how long a clone takes. Defaults to 2 s.
	CloneTime time.Duration
	// TaskTime is how long every other task takes. Defaults to 1 s.
	TaskTime time.Duration
	// BootTime passes between the start of a VM and the first answer of its agent. Defaults to 5 s.
	BootTime time.Duration
	// AuthDelay is how long a refusal of credentials is held back. Defaults to pveproxy's 3 s.
	AuthDelay time.Duration
	// IdleTimeout is after how long without a request a connection is closed. Defaults to pveproxy's 5 s.
	IdleTimeout time.Duration
	// Stale is by how much name, status and template in /cluster/resources lag. Defaults to 0.
	Stale time.Duration
	// Address gives the IPv4 address of a VM. Defaults to one in 10.0.0.0/8 made of the VMID.
	Address func(vmid int) string
}

// Cluster is the fake. All methods are safe for concurrent use. Close it.
type Cluster struct {
	config  Config
	ca      []byte
	certs   map[string]tls.Certificate
	tls     map[string]*tls.Config // by node; one for all connections, so that sessions are resumed
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup

	// mu guards everything below, and the fields of what is in there.
	mu         sync.Mutex
	closed     bool
	conns      map[net.Conn]bool
	nodes      map[string]*node
	vms        map[int]*vm
	storages   map[string]*Storage
	volumes    map[string]*volume // by volumeKey
	tokens     map[string]*token
	pools      map[string]bool
	tasks      map[string]*task
	taskSerial int
	faults     []*Fault
	taskFaults []*TaskFault
	requests   []Request
	noQuorum   bool
	mayNotTag  bool
	slowUpload time.Duration
	damaged    int            // uploads yet to be
	clones     map[string]int // under way, by node
	maxClones  map[string]int
}

type node struct {
	name    string
	mode    NodeMode
	memUsed int         // MiB, besides the VMs'
	alone   map[int]*vm // what it last knew of the cluster when it was cut off from the others
}

// NodeMode says how a node can be reached.
type NodeMode int

// The modes of a node.
const (
	NodeUp      NodeMode = iota
	NodeRefuses          // connections are refused, and other nodes say 595 about it
	NodeSilent           // connections hang, and other nodes say 596 about it after 30 s
)

// New returns a cluster with the storages local (directory, iso, on every node), local-lvm (images, on every node) and
// shared (iso and images, one for all), the pool egress and no tokens.
func New(config Config) *Cluster {
	set := func(d *time.Duration, instead time.Duration) {
		if *d == 0 {
			*d = instead
		}
	}
	if config.Version == 0 {
		config.Version = 9
	}
	if len(config.Nodes) == 0 {
		config.Nodes = []string{"pve1", "pve2", "pve3"}
	}
	if config.NodeMemoryMiB == 0 {
		config.NodeMemoryMiB = 65536
	}
	set(&config.CloneTime, 2*time.Second)
	set(&config.TaskTime, time.Second)
	set(&config.BootTime, 5*time.Second)
	set(&config.AuthDelay, 3*time.Second)
	set(&config.IdleTimeout, 5*time.Second)
	if config.Address == nil {
		config.Address = func(vmid int) string { return fmt.Sprintf("10.%d.%d.%d", vmid>>16&255, vmid>>8&255, vmid&255) }
	}
	ctx, stop := context.WithCancel(context.Background())
	c := &Cluster{
		config: config, ctx: ctx, stop: stop, tls: map[string]*tls.Config{}, conns: map[net.Conn]bool{},
		nodes: map[string]*node{}, vms: map[int]*vm{}, storages: map[string]*Storage{}, volumes: map[string]*volume{},
		tokens: map[string]*token{}, pools: map[string]bool{"egress": true}, tasks: map[string]*task{},
		clones: map[string]int{}, maxClones: map[string]int{},
	}
	made := certificatesFor(config.Nodes)
	c.ca, c.certs = made.ca, made.leaves
	for _, n := range config.Nodes {
		c.nodes[n] = &node{name: n}
		c.tls[n] = &tls.Config{Certificates: []tls.Certificate{c.certs[n]}, MinVersion: tls.VersionTLS12, CurvePreferences: []tls.CurveID{tls.X25519}}
	}
	for _, s := range []Storage{
		{ID: "local", Type: "dir", Content: []string{"iso", "vztmpl"}, Size: 100 << 30},
		{ID: "local-lvm", Type: "lvmthin", Content: []string{"images"}, Size: 500 << 30},
		{ID: "shared", Type: "nfs", Content: []string{"iso", "images"}, Shared: true, Size: 1000 << 30},
	} {
		c.AddStorage(s)
	}
	return c
}

// Close ends all connections and tasks and waits for them.
func (c *Cluster) Close() {
	c.mu.Lock()
	c.closed = true
	conns := slices.Collect(maps.Keys(c.conns))
	c.mu.Unlock()
	c.stop()
	for _, conn := range conns {
		conn.Close()
	}
	c.running.Wait()
}

// host is the name of a node's endpoint.
func host(node string) string { return node + ".pve.test" }

// URL returns the endpoint of a node, for a client that dials with Dial.
func (c *Cluster) URL(node string) string { return "https://" + host(node) + ":8006" }

// CA returns the certificate that signed those of the nodes, in PEM.
func (c *Cluster) CA() []byte { return c.ca }

// Fingerprint returns the SHA-256 of a node's certificate in hexadecimal with colons, as Proxmox shows it.
func (c *Cluster) Fingerprint(node string) string {
	sum := sha256.Sum256(c.certs[node].Certificate[0])
	parts := make([]string, len(sum))
	for i, b := range sum {
		parts[i] = fmt.Sprintf("%02X", b)
	}
	return strings.Join(parts, ":")
}

// Dial connects to the endpoint of a node. It waits for ctx when the node is silent.
func (c *Cluster) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	name, _, _ := strings.Cut(address, ".pve.test:8006")
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	c.mu.Lock()
	n := c.nodes[name]
	if n == nil {
		c.mu.Unlock()
		return fail(&net.DNSError{Err: "no such host", Name: address, IsNotFound: true})
	}
	if c.closed || n.mode == NodeRefuses {
		c.mu.Unlock()
		return fail(syscall.ECONNREFUSED)
	}
	if n.mode == NodeSilent {
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return fail(context.Cause(ctx))
		case <-c.ctx.Done():
			return fail(syscall.ECONNREFUSED)
		}
	}
	client, server := memconn.Pair("client", address)
	c.conns[server] = true
	c.running.Go(func() { c.serve(n, server) })
	c.mu.Unlock()
	return client, nil
}

// certificates are those of a cluster. Making them takes longer than many a test, so clusters whose nodes have the same names
// share them.
type certificates struct {
	ca     []byte
	leaves map[string]tls.Certificate // by node
}

var (
	certificatesMu   sync.Mutex // guards certificatesMade
	certificatesMade = map[string]certificates{}
)

func certificatesFor(nodes []string) certificates {
	certificatesMu.Lock()
	defer certificatesMu.Unlock()
	key := strings.Join(nodes, " ")
	made, ok := certificatesMade[key]
	if !ok {
		made = makeCertificates(nodes)
		certificatesMade[key] = made
	}
	return made
}

func makeCertificates(nodes []string) certificates {
	// Around any clock, that of a synctest bubble included.
	from, until := time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)
	must := func(err error) {
		if err != nil {
			panic("fakepve: certificate: " + err.Error()) // only crypto/rand could fail here, and that never does
		}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	caTemplate := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Proxmox Virtual Environment"}, NotBefore: from, NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, caTemplate, caTemplate, &caKey.PublicKey, caKey)
	must(err)
	made := certificates{ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), leaves: map[string]tls.Certificate{}}
	for i, n := range nodes {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		must(err)
		leaf := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 2)), Subject: pkix.Name{CommonName: host(n)}, DNSNames: []string{host(n)},
			NotBefore: from, NotAfter: until, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		}
		der, err := x509.CreateCertificate(rand.Reader, leaf, caTemplate, &key.PublicKey, caKey)
		must(err)
		made.leaves[n] = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	}
	return made
}

// sleep waits for d. It reports false when the cluster is closed.
func (c *Cluster) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.ctx.Done():
		return false
	}
}
