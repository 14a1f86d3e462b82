package cloudinit

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// MetaData says who a guest is.
type MetaData struct {
	// InstanceID tells one life of a guest from the next: with a new one cloud-init runs everything again. See
	// [InstanceID]. Required.
	InstanceID string
	// LocalHostname is the guest's host name, a DNS label. Required.
	LocalHostname string
}

// InstanceID returns the instance-id of the guest name that was made from the spec with the given hash. It holds enough
// of the hash, 80 bits, that another spec gives another id.
func InstanceID(name, specHash string) string { return name + "." + specHash[:min(len(specHash), 16)] }

// Render returns the meta-data document. The error names the field and the value.
func (m MetaData) Render() ([]byte, error) {
	if !plainName(m.InstanceID, ".") || len(m.InstanceID) > 128 {
		return nil, fmt.Errorf("cloudinit: InstanceID is %q, want up to 128 letters, digits, hyphens and dots", m.InstanceID)
	}
	if !plainName(m.LocalHostname, "") || len(m.LocalHostname) > 63 || strings.HasPrefix(m.LocalHostname, "-") || strings.HasSuffix(m.LocalHostname, "-") {
		return nil, fmt.Errorf("cloudinit: LocalHostname is %q, want a DNS label", m.LocalHostname)
	}
	return fmt.Appendf(nil, "instance-id: %q\nlocal-hostname: %q\n", m.InstanceID, m.LocalHostname), nil
}

func plainName(s, more string) bool {
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || strings.IndexByte(more, c) >= 0 {
			continue
		}
		return false
	}
	return s != ""
}

// Network is a static configuration of a guest's only interface. It has the fields of provider.Network, so that one can
// be converted to the other.
type Network struct {
	// Addresses are the interface's addresses with their prefix lengths. Required.
	Addresses []netip.Prefix
	// Gateways are the default gateways, at most one for each address family, inside one of the prefixes or
	// link-local. Defaults to none.
	Gateways []netip.Addr
	// Nameservers are the DNS servers. Defaults to none.
	Nameservers []netip.Addr
	// SearchDomains are the DNS search domains. Defaults to none.
	SearchDomains []string
}

// Validate reports whether a guest can be configured like that. The error names the field and the value.
func (n Network) Validate() error {
	if len(n.Addresses) == 0 {
		return fmt.Errorf("cloudinit: network: Addresses is empty, want at least one address with its prefix length")
	}
	seen := map[netip.Addr]bool{}
	for _, p := range n.Addresses {
		a := p.Addr()
		switch {
		case !p.IsValid() || a.Zone() != "" || a.Is4In6():
			return fmt.Errorf("cloudinit: network: Addresses has %q, want an address and a prefix length such as 192.0.2.5/24", p)
		case a.IsUnspecified() || a.IsMulticast() || a.IsLoopback():
			return fmt.Errorf("cloudinit: network: Addresses has %s, which no host can have", p)
		case p.Bits() < a.BitLen()-1 && a == p.Masked().Addr() && a.Is4():
			return fmt.Errorf("cloudinit: network: Addresses has %s, which is the network's own address", p)
		case seen[a]:
			return fmt.Errorf("cloudinit: network: Addresses has %s twice", a)
		}
		seen[a] = true
	}
	families := map[bool]bool{}
	for _, g := range n.Gateways {
		if !g.IsValid() || g.Is4In6() || g.IsUnspecified() || g.IsMulticast() || seen[g] {
			return fmt.Errorf("cloudinit: network: Gateways has %q, want another host's address", g)
		}
		if families[g.Is4()] {
			return fmt.Errorf("cloudinit: network: Gateways has %s and another one of its family, want one", g)
		}
		families[g.Is4()] = true
		if !g.IsLinkLocalUnicast() && !n.reaches(g) {
			return fmt.Errorf("cloudinit: network: Gateways has %s, which is in none of the prefixes of Addresses", g)
		}
	}
	for _, s := range n.Nameservers {
		if !s.IsValid() || s.IsUnspecified() || s.IsMulticast() || s.Zone() != "" {
			return fmt.Errorf("cloudinit: network: Nameservers has %q, want an address", s)
		}
	}
	for _, d := range n.SearchDomains {
		if !plainName(d, ".") || len(d) > 253 || strings.Contains(d, "..") || strings.HasPrefix(d, ".") || strings.HasPrefix(d, "-") {
			return fmt.Errorf("cloudinit: network: SearchDomains has %q, want a domain name", d)
		}
	}
	return nil
}

func (n Network) reaches(a netip.Addr) bool {
	for _, p := range n.Addresses {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// Render returns the network-config document, version 2, for the interface with the given hardware address.
func (n Network) Render(mac net.HardwareAddr) ([]byte, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if len(mac) != 6 || mac[0]&1 != 0 {
		return nil, fmt.Errorf("cloudinit: network: the hardware address is %q, want six bytes of a single host", mac)
	}
	var b strings.Builder
	// Without set-name the id would become the interface's name on some renderers.
	fmt.Fprintf(&b, "version: 2\nethernets:\n  eth0:\n    match:\n      macaddress: %q\n    set-name: eth0\n    dhcp4: false\n    dhcp6: false\n", mac)
	b.WriteString("    addresses:\n")
	for _, p := range n.Addresses {
		fmt.Fprintf(&b, "      - %q\n", p)
	}
	if len(n.Gateways) > 0 {
		b.WriteString("    routes:\n")
		for _, g := range n.Gateways {
			all := "0.0.0.0/0"
			if g.Is6() {
				all = "::/0"
			}
			fmt.Fprintf(&b, "      - to: %q\n        via: %q\n", all, g.WithZone(""))
		}
	}
	if len(n.Nameservers)+len(n.SearchDomains) > 0 {
		b.WriteString("    nameservers:\n")
	}
	if len(n.Nameservers) > 0 {
		b.WriteString("      addresses:\n")
		for _, s := range n.Nameservers {
			fmt.Fprintf(&b, "        - %q\n", s)
		}
	}
	if len(n.SearchDomains) > 0 {
		b.WriteString("      search:\n")
		for _, d := range n.SearchDomains {
			fmt.Fprintf(&b, "        - %q\n", d)
		}
	}
	return []byte(b.String()), nil
}
