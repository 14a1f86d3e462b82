package proxmox

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"crawl.example.com/egress/cloudinit"
	"crawl.example.com/egress/provider"
)

// maxUserData is the most user data that is taken, in bytes. Proxmox sets no limit to an image; this one keeps an
// upload within a request's timeout on a slow link.
const maxUserData = 8 << 20

// Bounds of what Proxmox takes for a VM.
const (
	maxCPUs      = 512
	leastMemory  = 16
	maxDiskGiB   = 1 << 17
	maxMemoryMiB = 4 << 20
)

// plan is a spec in Proxmox's terms.
type plan struct {
	image        string
	cores        int
	memoryMiB    int
	diskGiB      int
	host, group  string
	labels       map[string]string
	cloud        provider.CloudInit
	vendor       []byte
	address      string
	network      *cloudinit.Network
	installAgent bool
}

// Validate implements provider.Provider. All faults are joined.
func (p *Provider) Validate(spec provider.Spec) error {
	_, err := p.plan(spec)
	if err == nil {
		return nil
	}
	return &provider.Error{Provider: p.config.Name, Op: "validate", Kind: provider.ErrPermanent, Reason: provider.ReasonUnsupported, Err: err}
}

func (p *Provider) plan(spec provider.Spec) (*plan, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("proxmox: "+format, args...)) }
	s := &plan{image: spec.Image, cores: spec.CPUs, memoryMiB: spec.MemoryMiB, diskGiB: spec.DiskGiB, host: spec.Placement.Host,
		group: spec.Placement.Group, labels: spec.Placement.Labels, cloud: spec.CloudInit, installAgent: spec.CloudInit.InstallGuestAgent}
	if spec.Provider != "" && spec.Provider != p.config.Name {
		fault("Provider %q, this one is %q", spec.Provider, p.config.Name)
	}
	names := slices.Sorted(maps.Keys(p.config.Templates))
	if s.image == "" && len(names) == 1 {
		s.image = names[0]
	}
	if _, ok := p.config.Templates[s.image]; !ok {
		fault("Image %q is not among Templates, want one of %s", spec.Image, strings.Join(names, ", "))
	}
	if spec.CPUs < 0 || spec.CPUs > maxCPUs {
		fault("CPUs %d, want 0 to %d", spec.CPUs, maxCPUs)
	}
	if spec.MemoryMiB != 0 && (spec.MemoryMiB < leastMemory || spec.MemoryMiB > maxMemoryMiB) {
		fault("MemoryMiB %d, want 0 or %d to %d", spec.MemoryMiB, leastMemory, maxMemoryMiB)
	}
	if spec.DiskGiB < 0 || spec.DiskGiB > maxDiskGiB {
		fault("DiskGiB %d, want 0 to %d", spec.DiskGiB, maxDiskGiB)
	}
	if spec.Port < 0 || spec.Port > 65535 {
		fault("Port %d, want 1 to 65535", spec.Port)
	}
	if len(p.allowed(s)) == 0 {
		fault("Placement: no node among Nodes has the name %q and the labels %v and takes new instances", s.host, s.labels)
	}
	if len(spec.CloudInit.UserData) > 0 {
		if err := cloudinit.CheckUserData(spec.CloudInit.UserData, maxUserData); err != nil {
			fault("CloudInit.UserData: %w", err)
		}
	}
	vendor, err := cloudinit.VendorData(cloudinit.Vendor{Document: spec.CloudInit.VendorData, InstallGuestAgent: spec.CloudInit.InstallGuestAgent})
	if err != nil {
		fault("CloudInit.VendorData: %w", err)
	}
	s.vendor = vendor
	if spec.CloudInit.Network != nil {
		n := cloudinit.Network(*spec.CloudInit.Network)
		s.network = &n
		if err := n.Validate(); err != nil {
			fault("CloudInit.Network: %w", err)
		} else {
			s.address = n.Addresses[0].Addr().String()
		}
	}
	for _, k := range slices.Sorted(maps.Keys(spec.Options)) {
		fault("Options has unknown key %q, there are none", k)
	}
	return s, errors.Join(faults...)
}

// allowed returns the nodes that the placement permits.
func (p *Provider) allowed(s *plan) []Node {
	var nodes []Node
	for _, n := range p.config.Nodes {
		ok := !n.Drain && (s.host == "" || s.host == n.Name)
		for k, v := range s.labels {
			got, has := n.Labels[k]
			ok = ok && has && got == v
		}
		if ok {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

func warnings(spec provider.Spec) []string { return cloudinit.Warnings(spec.CloudInit.UserData) }

// seed returns the image for an instance whose first interface has the given hardware address.
func (s *plan) seed(name, hash, mac string) ([]byte, error) {
	meta, err := cloudinit.MetaData{InstanceID: cloudinit.InstanceID(name, hash), LocalHostname: name}.Render()
	if err != nil {
		return nil, err
	}
	seed := cloudinit.Seed{UserData: s.cloud.UserData, MetaData: meta, VendorData: s.vendor}
	if s.network != nil {
		hardware, err := net.ParseMAC(mac)
		if err != nil {
			return nil, err
		}
		if seed.NetworkConfig, err = s.network.Render(hardware); err != nil {
			return nil, err
		}
	}
	return seed.ISO()
}
