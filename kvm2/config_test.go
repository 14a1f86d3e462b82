package kvm2

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/internal/vmhost"
	"crawl.example.com/egress/provider"
)

func wantTexts(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
}

func TestABadConfigNamesEveryFieldAtOnce(t *testing.T) {
	_, err := New(Config{
		Name: "Fleet-1", MaxUploads: -1, ListTimeout: -time.Second, HostBackoff: -2 * time.Second,
		Hosts: []Host{{Name: "UPPER", URI: "qemu:///system"}, {Name: "twin", URI: "qemu:///system"}, {Name: "twin", URI: "qemu:///system", Weight: -1}, {Name: "odd", URI: "xen:///system", Weight: math.NaN()}},
	})
	wantTexts(t, err, `kvm2: Name "Fleet-1", want at most 20`, "host odd: Weight NaN", "kvm2: host odd: URI", "MaxUploads -1, ListTimeout -1s and HostBackoff -2s", `Hosts has the Name "UPPER"`,
		`Hosts has the Name "twin" twice`, "host twin: Weight -1")

	_, err = New(Config{
		Name: "fleet", Firmware: "coreboot", ShutdownGrace: -time.Second, FetchOnHost: true,
		SSH:    SSH{KeepaliveInterval: -time.Second},
		Images: map[string]Image{"Big": {URL: "ftp://images.example/a", SHA256: "12", Format: "vmdk", Compression: "xz", Firmware: "ofw"}},
		Hosts: []Host{
			{Name: "one", URI: "xen:///system", StoragePool: "a/b", Network: "n", Bridge: "b", MaxInstances: -1, MaxMemoryMiB: -2, MaxCPUs: -3},
			{Name: "two", URI: "qemu:///session", SSH: &SSH{}},
		},
	})
	wantTexts(t, err, `kvm2: host one: URI has scheme "xen"`, `StoragePool "a/b"`, `Network "n" and Bridge "b" are both set`, "MaxInstances -1", "MaxMemoryMiB -2",
		"MaxCPUs -3", `Firmware "coreboot"`, "ShutdownGrace -1s", "FetchOnHost needs a host that is reached over SSH", "SSH.KeepaliveInterval -1s",
		`Images has "Big"`, "Images Big: URL is no http or https URL", `SHA256 "12"`, `Format "vmdk"`, `Compression "xz"`, `Firmware "ofw"`,
		`kvm2: host two: URI has path "/session"`)

	for _, name := range []string{"", "-a", "1a", "a.b", strings.Repeat("a", 21)} {
		if _, err := New(Config{Name: name, Hosts: []Host{{Name: "a", URI: "qemu:///system"}}}); err == nil {
			t.Errorf("the Name %q is taken", name)
		}
	}
	if _, err := New(Config{Name: "fleet"}); err == nil || !strings.Contains(err.Error(), "Hosts is empty") {
		t.Errorf("no hosts: %v", err)
	}
}

func TestTheSmallestConfigIsFilledWithTheDefaultsThatItsCommentsPromise(t *testing.T) {
	p := opened(t, Config{Name: "fleet", Hosts: []Host{{Name: "a", URI: "qemu:///system"}}})
	if c := p.config; c.MaxUploads != 2 || c.ListTimeout != 5*time.Second || c.HostBackoff != 30*time.Second || cap(p.uploads) != 2 {
		t.Errorf("filled: %+v", c)
	}
	if p.Name() != "fleet" || p.hosts[0].is().weight() != 1 {
		t.Errorf("%s, weight %v", p.Name(), p.hosts[0].is().weight())
	}
}

func TestHostsThatStayKeepTheirConnectionAndABadListChangesNothing(t *testing.T) {
	a, b := Host{Name: "a", URI: "qemu:///system"}, Host{SSH: &SSH{KnownHosts: []string{"/k"}}, Name: "b", URI: "qemu:///system", Labels: map[string]string{"rack": "1"}}
	p := opened(t, Config{Name: "fleet", Hosts: []Host{a, b}})
	before := p.all()
	err := p.SetHosts([]Host{a, {Name: "c", URI: "xen:///"}, {Name: "d", URI: "qemu:///session"}})
	wantTexts(t, err, "kvm2: host c: URI", "kvm2: host d: URI")
	if after := p.all(); !slices.Equal(before, after) || after[1].is().Labels["rack"] != "1" {
		t.Error("a list with a fault changed something")
	}
	b.Labels, b.SSH = map[string]string{"rack": "2"}, &SSH{KnownHosts: []string{"/k"}}
	b.Cordoned, b.Weight, a.MaxInstances = true, 3, 7
	if err := p.SetHosts([]Host{b, a}); err != nil {
		t.Fatal(err)
	}
	b.Labels["rack"] = "3" // which is the caller's own by now
	after := p.all()
	if after[0] != before[1] || after[0].is().Labels["rack"] != "2" || !after[0].is().Cordoned {
		t.Errorf("b is not the same host with new labels: %+v", after[0].is())
	}
	if after[1] == before[0] || after[1].is().MaxInstances != 7 {
		t.Errorf("a has other limits and needs another host: %+v", after[1].is())
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	wantTexts(t, p.SetHosts([]Host{a}), "the provider is closed")
}

func TestASpecThatNoHostAllowsIsInvalidAndEachHostSaysWhy(t *testing.T) {
	p := opened(t, Config{Name: "fleet", Hosts: []Host{
		{Name: "a", URI: "qemu:///system", Labels: map[string]string{"rack": "1"}}, {Name: "b", URI: "qemu:///system"},
	}})
	err := p.Validate(provider.Spec{Provider: "other", Image: "none", CPUs: -1, Options: map[string]string{"x": "y"}, Placement: provider.Placement{Labels: map[string]string{"rack": "9"}}})
	wantTexts(t, err, `Provider "other", this one is "fleet"`, `Image "none"`, "CPUs -1", `unknown key "x"`, "no host is allowed", "a: Placement.Labels rack=9", "b: Placement.Labels rack=9")
	if !errors.Is(err, provider.ErrPermanent) || provider.ReasonOf(err) != provider.ReasonUnsupported {
		t.Errorf("%v is %v, %s", err, provider.Kind(err), provider.ReasonOf(err))
	}
	image := "https://images.example/a.qcow2"
	for _, placement := range []provider.Placement{{}, {Host: "b"}, {Labels: map[string]string{"rack": "1"}}, {Host: "a", Labels: map[string]string{"rack": "1"}}} {
		if err := p.Validate(provider.Spec{Image: image, Placement: placement}); err != nil {
			t.Errorf("%+v: %v", placement, err)
		}
	}
	wantTexts(t, p.Validate(provider.Spec{Image: image, Placement: provider.Placement{Host: "b", Labels: map[string]string{"rack": "1"}}}), `b: Placement.Labels rack=1`)
}

func TestIdsNameTheirHostAndOthersAreRefused(t *testing.T) {
	p := opened(t, Config{Name: "fleet", Hosts: []Host{{Name: "a", URI: "qemu:///system"}}})
	for id, kind := range map[string]error{
		"": provider.ErrNotFound, "a": provider.ErrNotFound, "a/": provider.ErrNotFound, "/x": provider.ErrNotFound, "A/x": provider.ErrNotFound, "a/x": provider.ErrNotFound,
		"gone/00000000-0000-4000-8000-000000000000": provider.ErrUnavailable,
	} {
		if _, err := p.Get(t.Context(), id); !errors.Is(err, kind) {
			t.Errorf("get %q: %v", id, err)
		}
		if err := p.Delete(t.Context(), id); !errors.Is(err, kind) {
			t.Errorf("delete %q: %v", id, err)
		}
	}
}

// candidateOf is a host to be sorted.
func candidateOf(name string, change func(*candidate)) candidate {
	c := candidate{host: &host{config: Host{Name: name}}, room: 0.5}
	if change != nil {
		change(&c)
	}
	return c
}

func TestCandidatesAreSortedByRestThenSpreadThenProxyThenRoom(t *testing.T) {
	want := []string{"room", "plain", "sameproxy", "alike", "resting"}
	candidates := []candidate{
		candidateOf("resting", func(c *candidate) { c.resting, c.room = true, 1 }),
		candidateOf("alike", func(c *candidate) { c.alike, c.room = 1, 1 }),
		candidateOf("sameproxy", func(c *candidate) { c.sameProxy, c.room = 1, 1 }),
		candidateOf("plain", nil),
		candidateOf("room", func(c *candidate) { c.room = 0.6 }),
	}
	for range 20 {
		rand.Shuffle(len(candidates), func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
		order(candidates, "own--a--1")
		var got []string
		for _, c := range candidates {
			got = append(got, c.host.config.Name)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("sorted as %q, want %q", got, want)
		}
	}
}

func TestTiesAreBrokenTheSameWayEachTimeAndDifferentlyForEachName(t *testing.T) {
	var candidates []candidate
	for i := range 5 {
		candidates = append(candidates, candidateOf(hostName(i), nil))
	}
	first := map[string]int{}
	for i := range 200 {
		name := fmt.Sprintf("own--p%d--1", i)
		order(candidates, name)
		best := candidates[0].host.config.Name
		first[best]++
		rand.Shuffle(len(candidates), func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
		order(candidates, name)
		if again := candidates[0].host.config.Name; again != best {
			t.Fatalf("%s is put on %s and then on %s", name, best, again)
		}
	}
	for i := range candidates {
		if n := first[hostName(i)]; n < 20 || n > 60 {
			t.Errorf("%s comes first %d times of 200", hostName(i), n)
		}
	}
}

func TestRoomIsWhatIsLeftOfTheScarcestTimesTheWeight(t *testing.T) {
	plan := &vmhost.Plan{CPUs: 1, MemoryMiB: 512}
	for _, c := range []struct {
		what   string
		usage  vmhost.Usage
		weight float64
		want   float64
	}{
		{"nothing known", vmhost.Usage{}, 1, 1},
		{"half of the memory", vmhost.Usage{TotalMemoryMiB: 4096, MemoryMiB: 1536}, 1, 0.5},
		{"all of it", vmhost.Usage{TotalMemoryMiB: 1024, MemoryMiB: 512}, 1, 0},
		{"as many CPUs promised as there are", vmhost.Usage{TotalCPUs: 4, CPUs: 4}, 1, 0.5},
		{"twice as many", vmhost.Usage{TotalCPUs: 4, CPUs: 8}, 1, 0.333},
		{"weight", vmhost.Usage{TotalMemoryMiB: 4096, MemoryMiB: 1536}, 3, 1.5},
		{"a few MiB more", vmhost.Usage{TotalMemoryMiB: 1 << 20, MemoryMiB: 10}, 1, 0.999},
		{"a few MiB less", vmhost.Usage{TotalMemoryMiB: 1 << 20, MemoryMiB: 20}, 1, 0.999},
	} {
		if got := roomOf(c.usage, plan, c.weight); got != c.want {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
}

func TestAHostRestsLongerWithEachFailureUpToSixteenTimes(t *testing.T) {
	for failures, want := range map[int]time.Duration{1: 30 * time.Second, 2: time.Minute, 5: 8 * time.Minute, 6: 8 * time.Minute, 1000: 8 * time.Minute} {
		if got := rest(failures, 30*time.Second); got != want {
			t.Errorf("after %d failures %s, want %s", failures, got, want)
		}
	}
}

func TestInstancesGoWherePlacementAndRoomSay(t *testing.T) {
	change := func(c *Config) {
		c.Hosts[0].Labels = map[string]string{"rack": "1"}
		c.Hosts[1].Labels = map[string]string{"rack": "2"}
		c.Hosts[2].MaxInstances = 2
		c.Hosts[3].Cordoned = true
	}
	inBubble(t, 4, change, func(t *testing.T, p *Provider, _ []*libvirttest.Host) {
		n := 0
		create := func(placement provider.Placement) (provider.Instance, error) {
			n++
			s := rawSpec()
			s.Placement = placement
			return p.Create(t.Context(), requestOf(fmt.Sprintf("p%d", n), s))
		}
		place := func(placement provider.Placement, want ...string) {
			t.Helper()
			x, err := create(placement)
			if err != nil || !slices.Contains(want, x.Host) {
				t.Errorf("%+v is on %q, want one of %q: %v", placement, x.Host, want, err)
			}
			if err == nil && (!strings.HasPrefix(x.ID, x.Host+"/") || !strings.HasPrefix(x.Message, "on "+x.Host+" of ")) {
				t.Errorf("%+v does not say why it is there", x)
			}
		}
		place(provider.Placement{Host: hostName(1)}, hostName(1))
		place(provider.Placement{Labels: map[string]string{"rack": "1"}}, hostName(0))
		place(provider.Placement{}, hostName(2)) // which has none
		place(provider.Placement{Group: "g"}, hostName(0), hostName(1), hostName(2))
		place(provider.Placement{Group: "g"}, hostName(0), hostName(1), hostName(2))
		place(provider.Placement{Group: "g"}, hostName(0), hostName(1), hostName(2))
		all, err := p.List(t.Context(), "own")
		if err != nil {
			t.Fatal(err)
		}
		on := map[string]int{}
		for _, x := range all {
			on[x.Host]++
		}
		if on[hostName(0)] != 2 || on[hostName(1)] != 2 || on[hostName(2)] != 2 {
			t.Errorf("a group is not spread: %v", on)
		}
		_, err = create(provider.Placement{Host: hostName(2)})
		if !errors.Is(err, provider.ErrNoCapacity) {
			t.Errorf("on a full host: %v", err)
		}
		wantTexts(t, err, "2 of MaxInstances 2 are there")
		_, err = create(provider.Placement{Host: hostName(3)})
		if !errors.Is(err, provider.ErrNoCapacity) {
			t.Errorf("on a cordoned host: %v", err)
		}
		wantTexts(t, err, hostName(3)+": cordoned")
	})
}

func TestAHostOfMoreWeightOrRoomIsPreferredAmongThoseThatHaveAsMany(t *testing.T) {
	change := func(c *Config) {
		c.Hosts[0].MaxMemoryMiB, c.Hosts[1].MaxMemoryMiB, c.Hosts[2].MaxMemoryMiB = 1024, 2048, 1024
		c.Hosts[2].Weight = 2
	}
	inBubble(t, 3, change, func(t *testing.T, p *Provider, _ []*libvirttest.Host) {
		var got []string
		for i := range 3 {
			s := rawSpec()
			s.MemoryMiB = 512
			x, err := p.Create(t.Context(), requestOf(fmt.Sprintf("p%d", i), s))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, x.Host)
		}
		if want := []string{hostName(2), hostName(1), hostName(0)}; !slices.Equal(got, want) {
			t.Errorf("placed on %q, want %q", got, want)
		}
	})
}

func TestAHostOnWhichACreateFailedComesLastForAWhileAndOthersAreTried(t *testing.T) {
	inBubble(t, 2, nil, func(t *testing.T, p *Provider, hosts []*libvirttest.Host) {
		mend := hosts[0].Inject(libvirttest.Fault{Procedure: "DomainCreateWithFlags", Code: 1, Message: "internal error: no tap device"})
		for i := range 4 {
			if x, err := p.Create(t.Context(), requestOf(fmt.Sprintf("p%d", i), rawSpec())); err != nil || x.Host != hostName(1) {
				t.Fatalf("%+v, %v", x, err)
			}
		}
		if n := hosts[0].Calls()["DomainCreateWithFlags"]; n != 1 {
			t.Errorf("the host that failed was tried %d times", n)
		}
		if d := hosts[0].Domains(); len(d) > 0 {
			t.Errorf("left there: %+v", d)
		}
		mend()
		time.Sleep(p.config.HostBackoff + time.Second)
		if x, err := p.Create(t.Context(), requestOf("late", rawSpec())); err != nil || x.Host != hostName(0) {
			t.Errorf("%+v, %v", x, err)
		}
	})
}

func TestOneNameIsMadeOnceInTheFleet(t *testing.T) {
	inBubble(t, 3, nil, func(t *testing.T, p *Provider, hosts []*libvirttest.Host) {
		errs := make(chan error, 4)
		for range cap(errs) {
			go func() {
				_, err := p.Create(t.Context(), requestOf("a", rawSpec()))
				errs <- err
			}()
		}
		made := 0
		for range cap(errs) {
			if err := <-errs; err == nil {
				made++
			} else if !errors.Is(err, provider.ErrAlreadyExists) {
				t.Error(err)
			}
		}
		domains := 0
		for _, h := range hosts {
			domains += len(h.Domains())
		}
		if made != 1 || domains != 1 {
			t.Errorf("%d were made, and there are %d domains", made, domains)
		}
		if _, err := p.Create(t.Context(), requestOf("a", rawSpec())); !errors.Is(err, provider.ErrAlreadyExists) {
			t.Errorf("once more: %v", err)
		}
	})
}

func TestADrainedHostHasItsInstancesEvacuatedAndGetsNothing(t *testing.T) {
	inBubble(t, 2, nil, func(t *testing.T, p *Provider, _ []*libvirttest.Host) {
		createAll(t, p, "p", 4, 1)
		for _, h := range p.all() {
			if h.is().Name == hostName(1) {
				h.config.Drained = true
			}
		}
		all, err := p.List(t.Context(), "own")
		if err != nil || len(all) != 4 {
			t.Fatalf("%+v, %v", all, err)
		}
		for _, x := range all {
			if x.Evacuate != (x.Host == hostName(1)) {
				t.Errorf("%+v", x)
			}
		}
		for name, x := range createAll(t, p, "q", 3, 1) {
			if x.Host != hostName(0) {
				t.Errorf("%s is on %s", name, x.Host)
			}
		}
		for _, h := range p.Check(t.Context()) {
			if !h.Ready || strings.HasSuffix(h.Message, ", drained") != (h.Target == hostName(1)) {
				t.Errorf("%+v", h)
			}
		}
	})
}
