package egress

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/probe"
	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// aliveProber is a prober that asks fakes instead of a network.
func aliveProber(fakes ...*fake.Provider) func(context.Context, upstream.Endpoint, probe.Check) probe.Result {
	return func(_ context.Context, e upstream.Endpoint, _ probe.Check) probe.Result {
		for _, f := range fakes {
			if f.Alive(e.Host) {
				return probe.Result{OK: true, Reason: probe.ReasonOK}
			}
		}
		return probe.Result{Reason: probe.ReasonRefused, Message: "connection refused"}
	}
}

func ptr[T any](v T) *T { return &v }

// managed is a proxy of the fake.
func managed(name string) Proxy {
	return Proxy{Name: name, Provider: "fake", CloudInit: CloudInit{Inline: "#cloud-config\n"}}
}

// fleet returns n such proxies.
func fleet(n int) []Proxy { return Replicate(n, "p-%03d", managed("")) }

// started returns a pool over f that is closed when the test ends.
func started(t *testing.T, f *fake.Provider, change func(*Config), proxies ...Proxy) *Pool {
	t.Helper()
	config := Config{Name: "test", Providers: []provider.Provider{f}}
	if change != nil {
		change(&config)
	}
	p, err := newPool(config, aliveProber(f))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	if err := p.Apply(t.Context(), proxies...); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

func waitReady(t *testing.T, p *Pool, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if err := p.WaitReady(ctx, n); err != nil {
		for _, s := range p.Proxies() {
			t.Logf("%+v", s)
		}
		t.Fatal(err)
	}
}

func TestProxiesAreCreatedProvenAndLeased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 2 * time.Second})
		begin := time.Now()
		p := started(t, f, nil, fleet(3)...)
		lease, err := p.Acquire(t.Context(), Request{})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < 2*time.Second || took > 2100*time.Millisecond {
			t.Errorf("the first lease took %s with a boot of 2 s, want at most 2.1 s", took)
		}
		lease.Release()
		waitReady(t, p, 3)
		for _, s := range p.Proxies() {
			if s.Phase != PhaseReady || s.Address == "" || s.Generation != 1 || !s.LastProbe.OK || s.SpecHash == "" {
				t.Errorf("got %+v", s)
			}
		}
		if n := len(f.Instances()); n != 3 {
			t.Errorf("%d instances, want 3", n)
		}
	})
}

func TestAChangedSpecRollsTheFleetOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 30 * time.Second})
		p := started(t, f, nil, fleet(5)...)
		waitReady(t, p, 5)
		proxies := fleet(5)
		for i := range proxies {
			proxies[i].MemoryMiB = 1024
		}
		if err := p.Apply(t.Context(), proxies...); err != nil {
			t.Fatal(err)
		}
		for range 3600 {
			time.Sleep(time.Second)
			if ready := p.Stats().Ready; ready < 5 {
				t.Fatalf("only %d proxies are ready", ready)
			}
		}
		for _, s := range p.Proxies() {
			if s.Generation != 2 {
				t.Errorf("%s is of generation %d, want 2", s.Name, s.Generation)
			}
		}
		if n := len(f.Instances()); n != 5 {
			t.Errorf("%d instances, want 5", n)
		}
		if most := f.MostInstances(); most != 6 {
			t.Errorf("%d instances at once, want 6", most)
		}
	})
}

func TestRemovedProxiesAreDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(4)...)
		waitReady(t, p, 4)
		if err := p.Apply(t.Context(), fleet(1)...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n := len(f.Instances()); n != 1 {
			t.Errorf("%d instances, want 1", n)
		}
		if n := len(p.Proxies()); n != 1 {
			t.Errorf("%d proxies, want 1", n)
		}
	})
}
