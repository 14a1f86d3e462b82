package vmhost

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/provider"
)

// interfaceOf is what libvirt says of a guest's network interface.
func interfaceOf(mac string, addresses ...string) golibvirt.DomainInterface {
	i := golibvirt.DomainInterface{Name: "eth0"}
	if mac != "" {
		i.Hwaddr = golibvirt.OptString{mac}
	}
	for _, a := range addresses {
		i.Addrs = append(i.Addrs, golibvirt.DomainIPAddr{Addr: a, Prefix: 24})
	}
	return i
}

func (r *rig) answer(proxy string, source golibvirt.DomainInterfaceAddressesSource, interfaces ...golibvirt.DomainInterface) {
	r.peer.ChangeDomain("own--"+proxy+"--1", func(d *libvirttest.Domain) {
		all := map[golibvirt.DomainInterfaceAddressesSource][]golibvirt.DomainInterface{source: interfaces}
		for s, i := range d.Addresses {
			if s != source {
				all[s] = i
			}
		}
		d.Addresses = all
	})
}

func leaseOf(mac, ip string, expires time.Time) golibvirt.NetworkDhcpLease {
	return golibvirt.NetworkDhcpLease{Iface: "virbr0", Expirytime: expires.Unix(), Mac: golibvirt.OptString{mac}, Ipaddr: ip, Prefix: 24}
}

func (r *rig) wantAddress(t *testing.T, id, want string) {
	t.Helper()
	if x, err := r.Get(t.Context(), id); err != nil || x.Address != want {
		t.Errorf("the address is %q, want %q: %v", x.Address, want, err)
	}
}

func TestTheAddressComesFromTheAgentThenALeaseThenTheNeighbours(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x, mac := r.create(t, "a", spec()), macOf("own--a--1").String()
		r.wantAddress(t, x.ID, "")
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcArp, interfaceOf(mac, "10.0.0.3"))
		r.wantAddress(t, x.ID, "10.0.0.3")
		r.peer.SetNetwork(libvirttest.Network{Name: "default", Leases: []golibvirt.NetworkDhcpLease{
			leaseOf(mac, "10.0.0.4", time.Now().Add(time.Hour)), leaseOf(mac, "10.0.0.5", time.Now().Add(2*time.Hour)),
			leaseOf(mac, "fe80::1", time.Now().Add(9*time.Hour)), leaseOf("52:00:00:00:00:01", "10.0.0.6", time.Now().Add(9*time.Hour)),
		}})
		r.wantAddress(t, x.ID, "10.0.0.5")
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcAgent, interfaceOf("", "127.0.0.1"), interfaceOf("02:42:00:00:00:01", "172.17.0.1"), interfaceOf(mac))
		r.wantAddress(t, x.ID, "10.0.0.5") // the agent has none yet
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcAgent, interfaceOf("", "127.0.0.1"), interfaceOf("02:42:00:00:00:01", "172.17.0.1"),
			interfaceOf(mac, "fe80::5054:ff:fe00:1", "169.254.1.1", "2001:db8::1", "10.0.0.7"))
		r.wantAddress(t, x.ID, "10.0.0.7")
	})
}

func TestWithIPv6TheAddressIsOne(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.IPv6 = true }, func(t *testing.T, r *rig) {
		x, mac := r.create(t, "a", spec()), macOf("own--a--1").String()
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcAgent, interfaceOf(mac, "10.0.0.7", "fe80::1", "2001:db8::1"))
		r.wantAddress(t, x.ID, "2001:db8::1")
	})
}

func TestALeaseFromBeforeTheInstanceIsNotItsAddress(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		mac := macOf("own--a--1").String()
		old := leaseOf(mac, "10.0.0.4", time.Now().Add(time.Hour))
		r.peer.SetNetwork(libvirttest.Network{Name: "default", Leases: []golibvirt.NetworkDhcpLease{old}})
		x := r.create(t, "a", spec())
		r.wantAddress(t, x.ID, "")
		renewed := leaseOf(mac, "10.0.0.4", time.Now().Add(2*time.Hour))
		r.peer.SetNetwork(libvirttest.Network{Name: "default", Leases: []golibvirt.NetworkDhcpLease{renewed}})
		r.wantAddress(t, x.ID, "10.0.0.4")
	})
}

func TestAStaticAddressIsNotAskedFor(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.CloudInit.Network = &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("2001:db8::9/64"), netip.MustParsePrefix("10.1.2.3/24")}}
		x := r.create(t, "a", s)
		r.wantAddress(t, x.ID, "10.1.2.3")
		if n := r.peer.Calls()["DomainInterfaceAddresses"]; n != 0 {
			t.Errorf("it was asked for %d times", n)
		}
	})
}

func TestAnAgentThatDoesNotAnswerIsLeftAloneForAWhile(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x, mac := r.create(t, "a", spec()), macOf("own--a--1").String()
		asked := func() int { return r.peer.Calls()["DomainAgentSetResponseTimeout"] }
		// One that is not connected says so at once and is asked each time.
		r.wantAddress(t, x.ID, "")
		r.wantAddress(t, x.ID, "")
		if n := asked(); n != 2 {
			t.Errorf("asked %d times", n)
		}
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcAgent, interfaceOf(mac, "10.0.0.7"))
		r.answer("a", golibvirt.DomainInterfaceAddressesSrcArp, interfaceOf(mac, "10.0.0.3"))
		mend := r.peer.Inject(libvirttest.Fault{
			Procedure: "DomainInterfaceAddresses", Times: 1, Delay: 3 * time.Second,
			Code: golibvirt.ErrAgentUnresponsive, Message: "Guest agent is not responding: Guest agent not available for now",
		})
		r.wantAddress(t, x.ID, "10.0.0.3")
		mend()
		r.wantAddress(t, x.ID, "10.0.0.3") // without asking it
		if n := asked(); n != 3 {
			t.Errorf("asked %d times", n)
		}
		time.Sleep(agentPause)
		r.wantAddress(t, x.ID, "10.0.0.7")
	})
}

func TestAnAgentIsAskedOneQuestionAtATimeAndAFewAgentsAtOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		const guests = 8
		var ids []string
		for i := range guests {
			proxy := fmt.Sprintf("p%d", i)
			ids = append(ids, r.create(t, proxy, spec()).ID)
			r.answer(proxy, golibvirt.DomainInterfaceAddressesSrcArp, interfaceOf(macOf("own--"+proxy+"--1").String(), fmt.Sprintf("10.0.0.%d", i+1)))
		}
		var mu sync.Mutex
		now, most := 0, 0
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainAgentSetResponseTimeout", Do: func() {
			mu.Lock()
			now++
			most = max(most, now)
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			now--
			mu.Unlock()
		}})
		begin := time.Now()
		var all sync.WaitGroup
		for range 3 {
			for i, id := range ids {
				all.Go(func() { r.wantAddress(t, id, fmt.Sprintf("10.0.0.%d", i+1)) })
			}
		}
		all.Wait()
		if most > maxAgents {
			t.Errorf("%d agents were asked at once", most)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("it took %s", took)
		}
	})
}

func TestAnAgentThatHangsTakesNobodyAlong(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x, y := r.create(t, "a", spec()), r.create(t, "b", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainInterfaceAddresses", Times: 1, Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := r.Get(ctx, x.ID)
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "")
		r.answer("b", golibvirt.DomainInterfaceAddressesSrcAgent, interfaceOf(macOf("own--b--1").String(), "10.0.0.8"))
		r.wantAddress(t, y.ID, "10.0.0.8")
		r.wantAddress(t, x.ID, "")
	})
}
