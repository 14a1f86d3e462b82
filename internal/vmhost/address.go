package vmhost

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
)

const (
	// maxAgents bounds the questions to guest agents under way on a host. A guest whose agent hangs holds a worker of
	// libvirtd, of which there are 20.
	maxAgents = 4
	// agentTimeout is how long libvirt waits for an agent, once it has been told. Without that it waits for ever.
	agentTimeout = 3
	// agentPause is how long an agent that did not answer is left alone.
	agentPause = 30 * time.Second
)

// agentRecord is how the guest agent of a domain did.
type agentRecord struct {
	asking bool      // a question is under way
	failed time.Time // when it did not answer
}

// address finds where the guest can be reached, or nothing when that is not known yet. The agent knows best; a lease may
// be an earlier guest's, and the neighbour table knows only who has spoken.
func (h *Host) address(ctx context.Context, dom golibvirt.Domain, who identity) (string, error) {
	if who.Address != "" {
		return who.Address, nil
	}
	mac := macOf(dom.Name).String()
	if addr, err := h.askAgent(ctx, dom, mac); addr != "" || err != nil {
		return addr, err
	}
	var found string
	err := h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		if who.Network != "" {
			network, err := s.NetworkLookupByName(who.Network)
			if err == nil {
				var leases []golibvirt.NetworkDhcpLease
				leases, _, err = s.NetworkGetDhcpLeases(network, golibvirt.OptString{mac}, 1, 0)
				found = newestLease(leases, who.Stale, h.config.IPv6)
			}
			if err != nil && libvirt.Code(err) == 0 {
				return err
			}
		}
		if found != "" {
			return nil
		}
		interfaces, err := s.DomainInterfaceAddresses(dom, uint32(golibvirt.DomainInterfaceAddressesSrcArp), 0)
		if err != nil && libvirt.Code(err) == 0 {
			return err
		}
		found = addressOf(interfaces, mac, h.config.IPv6)
		return nil
	})
	return found, err
}

// askAgent asks the guest agent, one question at a time for each guest. No answer is no error.
func (h *Host) askAgent(ctx context.Context, dom golibvirt.Domain, mac string) (string, error) {
	h.mu.Lock()
	r := h.agent[dom.UUID]
	if r.asking || !r.failed.IsZero() && time.Since(r.failed) < agentPause {
		h.mu.Unlock()
		return "", nil
	}
	select {
	case h.agents <- struct{}{}:
	default:
		h.mu.Unlock()
		return "", nil // enough agents keep us waiting
	}
	r.asking = true
	h.agent[dom.UUID] = r
	h.mu.Unlock()
	defer func() { <-h.agents }()

	var found string
	err := h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		if _, err := s.DomainAgentSetResponseTimeout(dom, agentTimeout, 0); err != nil {
			return err
		}
		interfaces, err := s.DomainInterfaceAddresses(dom, uint32(golibvirt.DomainInterfaceAddressesSrcAgent), 0)
		found = addressOf(interfaces, mac, h.config.IPv6)
		return err
	})
	h.mu.Lock()
	r = agentRecord{}
	// An agent that isn't there says so at once, and is asked again at once.
	if libvirt.Code(err) == golibvirt.ErrOperationTimeout || err != nil && strings.Contains(err.Error(), "not available") || libvirt.Code(err) == 0 && err != nil {
		r.failed = time.Now()
	}
	h.agent[dom.UUID] = r
	h.mu.Unlock()
	if err != nil && libvirt.Code(err) == 0 && !errors.Is(err, golibvirt.ErrUnsupported) {
		return "", err
	}
	return found, nil
}

// addressOf picks the first address that is reachable from elsewhere.
func addressOf(interfaces []golibvirt.DomainInterface, mac string, ipv6 bool) string {
	for _, i := range interfaces {
		if !slices.ContainsFunc(i.Hwaddr, func(a string) bool { return strings.EqualFold(a, mac) }) {
			continue
		}
		for _, a := range i.Addrs {
			if usable(a.Addr, ipv6) {
				return a.Addr
			}
		}
	}
	return ""
}

func usable(text string, ipv6 bool) bool {
	a, err := netip.ParseAddr(text)
	return err == nil && a.Is6() == ipv6 && a.IsGlobalUnicast()
}

// newestLease returns the address that was given out last and not before the instance was made.
func newestLease(leases []golibvirt.NetworkDhcpLease, stale []staleLease, ipv6 bool) string {
	var best golibvirt.NetworkDhcpLease
	for _, l := range leases {
		old := slices.ContainsFunc(stale, func(s staleLease) bool { return s.IP == l.Ipaddr && l.Expirytime <= s.Expires })
		if !old && usable(l.Ipaddr, ipv6) && (best.Ipaddr == "" || l.Expirytime > best.Expirytime) {
			best = l
		}
	}
	return best.Ipaddr
}
