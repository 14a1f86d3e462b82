package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/probe"
	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// inBubble runs f in fake time.
func inBubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// open starts a pool over f that leaves f open when it is closed, for a successor.
func open(t *testing.T, f *fake.Provider, change func(*Config), proxies ...Proxy) *Pool {
	t.Helper()
	return started(t, f, func(c *Config) {
		c.Providers = []provider.Provider{provider.Shared(f)}
		if change != nil {
			change(c)
		}
	}, proxies...)
}

// probedOverTheNetwork hides that a fake can tell whether its proxies work.
type probedOverTheNetwork struct{ provider.Provider }

func mustClose(t *testing.T, p *Pool) {
	t.Helper()
	if err := p.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// status returns the status of a proxy by name.
func status(t *testing.T, p *Pool, name string) ProxyStatus {
	t.Helper()
	for _, s := range p.Proxies() {
		if s.Name == name && s.Wanted {
			return s
		}
	}
	t.Fatalf("no proxy %s", name)
	return ProxyStatus{}
}

// exactly asserts that the backend has one instance for each of n proxies and nothing else of ours.
func exactly(t *testing.T, f *fake.Provider, n int) {
	t.Helper()
	of := map[string]int{}
	for _, x := range f.Instances() {
		if x.Mark.Owner == "test" {
			of[x.Mark.Proxy]++
		}
	}
	total := 0
	for name, k := range of {
		total += k
		if k > 1 {
			t.Errorf("%d instances of %s", k, name)
		}
	}
	if total != n {
		t.Errorf("%d instances, want %d: %v", total, n, of)
	}
}

func TestAListThatLagsMakesNoDuplicates(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{ListLag: 25 * time.Second, BootTime: 10 * time.Second})
		p := started(t, f, nil, fleet(4)...)
		waitReady(t, p, 4)
		time.Sleep(5 * time.Minute)
		exactly(t, f, 4)
		if most := f.MostInstances(); most != 4 {
			t.Errorf("%d instances at once, want 4", most)
		}
		// Deleted ones are not believed to be back either.
		if err := p.Apply(t.Context(), fleet(1)...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		exactly(t, f, 1)
		if n := len(p.Proxies()); n != 1 {
			t.Errorf("%d proxies known, want 1", n)
		}
		if s := p.Stats(); s.Adopted != 0 {
			t.Errorf("%d instances that were gone were taken for new ones", s.Adopted)
		}
	})
}

// odd is a provider whose List returns what it should not.
type odd struct{ *fake.Provider }

func (o odd) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	all, err := o.Provider.List(ctx, owner)
	if len(all) > 0 {
		all = append(all, all[0])
	}
	mark := provider.Mark{Owner: "somebody-else", Proxy: "p-001", Generation: 9, HashVersion: 1, Hash: "x"}
	return append(all,
		provider.Instance{ID: "", Name: "no id", Mark: provider.Mark{Owner: owner, Proxy: "p-001", Generation: 5}},
		provider.Instance{ID: "foreign", Name: "foreign", State: provider.StateRunning, Address: "192.0.2.9", Mark: mark},
		provider.Instance{ID: "unmarked", Name: "unmarked", State: provider.StateRunning, Mark: provider.Mark{Owner: owner}},
	), err
}

func TestAListThatHoldsWhatItShouldNotIsToldOfAndChangesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var log lockedBuffer
		f := fake.New(fake.Config{})
		p := started(t, f, func(c *Config) {
			c.Providers = []provider.Provider{odd{f}}
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		}, fleet(2)...)
		waitReady(t, p, 2)
		time.Sleep(time.Hour)
		if s := p.Stats(); s.Ready != 2 || s.Instances != 2 || s.Created != 2 || s.Deleted != 0 {
			t.Errorf("got %+v", s)
		}
		for _, c := range f.Calls("") {
			if c.Instance == "foreign" || c.Instance == "unmarked" || c.Op == fake.OpDelete {
				t.Errorf("%s of %q", c.Op, c.Instance)
			}
		}
		for _, what := range []string{"without an id", "twice", "another owner", "without a proxy"} {
			if n := strings.Count(log.String(), what); n < 1 || n > 2 {
				t.Errorf("the log says %q %d times", what, n)
			}
		}
	})
}

// slowList is a provider whose List takes a while.
type slowList struct{ *fake.Provider }

func (s slowList) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	time.Sleep(20 * time.Second)
	return s.Provider.List(ctx, owner)
}

func TestAfterAnUnknownOutcomeTheProviderIsListedFirst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		f.FailNext(fake.OpCreate, provider.ErrOutcomeUnknown, 5)
		p := started(t, f, func(c *Config) {
			c.ListInterval = time.Hour
			c.Providers = []provider.Provider{slowList{f}}
		}, fleet(1)...)
		waitReady(t, p, 1)
		listed := true
		for _, c := range f.Calls("") {
			switch c.Op {
			case fake.OpList:
				listed = true
			case fake.OpCreate:
				if !listed {
					t.Error("created again without a list in between")
				}
				listed = false
			}
		}
		if n := len(f.Calls(fake.OpCreate)); n != 6 {
			t.Errorf("%d creates, want 6", n)
		}
	})
}

func TestWhatNeverBootsIsRemovedAndMadeAnewWithBackoff(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 1000 * time.Hour})
		p := started(t, f, nil, fleet(1)...)
		time.Sleep(25 * time.Minute)
		exactly(t, f, 1)
		s := status(t, p, "p-001")
		if s.Generation < 2 || s.Phase != PhaseBooting {
			t.Errorf("got %+v", s)
		}
		f.Set(func(c *fake.Config) { c.BootTime = time.Second })
		time.Sleep(30 * time.Minute)
		waitReady(t, p, 1)
		exactly(t, f, 1)
	})
}

func TestEveryInstancePastItsAgeAtOnceIsReplacedWithoutAGap(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 30 * time.Second})
		proxies := fleet(5)
		for i := range proxies {
			proxies[i].MaxAge = 2 * time.Hour
		}
		p := open(t, f, nil, proxies...)
		waitReady(t, p, 5)
		mustClose(t, p)
		time.Sleep(1000 * time.Hour) // all are far past their age when we are back
		p = open(t, f, nil, proxies...)
		waitReady(t, p, 5)
		for range 600 {
			time.Sleep(time.Second)
			if ready := p.Stats().Ready; ready < 5 {
				t.Fatalf("only %d ready", ready)
			}
		}
		for _, s := range p.Proxies() {
			if s.Generation != 2 {
				t.Errorf("%s is of generation %d", s.Name, s.Generation)
			}
		}
		exactly(t, f, 5)
		mustClose(t, p)
	})
}

func TestOneFailedProbeRemovesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(5)...)
		waitReady(t, p, 5)
		time.Sleep(time.Minute)
		for _, x := range f.Instances() {
			f.Kill(x.ID)
		}
		time.Sleep(35 * time.Second) // a tick or two of every probe
		for _, x := range f.Instances() {
			f.Revive(x.ID)
		}
		time.Sleep(10 * time.Minute)
		if s := p.Stats(); s.Ready != 5 || s.Created != 5 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestABadProbeSiteReplacesNothingAndTheFleetGoesOnServing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		var down atomic.Bool
		alive := aliveProber(f)
		config := Config{Name: "test", Providers: []provider.Provider{probedOverTheNetwork{f}}}
		var suspects atomic.Int32
		config.Observer = func(e Event) {
			if e.Kind == EventSuspect {
				suspects.Add(1)
			}
		}
		p, err := newPool(config, func(ctx context.Context, e upstream.Endpoint, c probe.Check) probe.Result {
			if down.Load() {
				return probe.Result{Reason: probe.ReasonWrongStatus, Message: "answered 503, want 204"}
			}
			return alive(ctx, e, c)
		})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		p.Apply(t.Context(), fleet(5)...)
		p.Start(t.Context())
		waitReady(t, p, 5)
		time.Sleep(time.Minute)
		down.Store(true)
		for i := range 14 * 60 {
			time.Sleep(time.Second)
			l, err := p.TryAcquire(Request{})
			if err == nil {
				l.Release()
			} else if i > 180 {
				t.Fatalf("after %d s: %v", i, err)
			}
		}
		if s := p.Stats(); s.Created != 5 || !s.Suspect {
			t.Errorf("got %+v", s)
		}
		if suspects.Load() != 1 {
			t.Errorf("said %d times, want once", suspects.Load())
		}
		down.Store(false)
		time.Sleep(5 * time.Minute)
		if s := p.Stats(); s.Created != 5 || s.Suspect || s.Ready != 5 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestABrokenProxyIsReplacedAfterItsGrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 5 * time.Second})
		p := started(t, f, nil, fleet(5)...)
		waitReady(t, p, 5)
		f.Kill(f.Instances()[0].ID)
		time.Sleep(20 * time.Minute)
		if s := p.Stats(); s.Ready != 5 || s.Created != 6 {
			t.Errorf("got %+v", s)
		}
		exactly(t, f, 5)
	})
}

func TestACreateThatSucceededButSaidOtherwiseMakesOneInstance(t *testing.T) {
	for _, late := range []error{provider.ErrOutcomeUnknown, context.DeadlineExceeded, errors.New("strange"), provider.ErrAlreadyExists} {
		t.Run(late.Error(), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				f := fake.New(fake.Config{ListLag: 15 * time.Second})
				f.CreateThenFail(late, 3)
				p := started(t, f, nil, fleet(3)...)
				waitReady(t, p, 3)
				time.Sleep(10 * time.Minute)
				exactly(t, f, 3)
				if most := f.MostInstances(); most != 3 {
					t.Errorf("%d at once", most)
				}
			})
		})
	}
}

func TestADeleteThatLiesIsAskedForUntilItIsTrue(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(2)...)
		waitReady(t, p, 2)
		f.SetDeleteLies(true)
		if err := p.Apply(t.Context(), fleet(1)...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if n := len(f.Calls(fake.OpDelete)); n < 5 || n > 100 {
			t.Errorf("%d deletes in an hour", n)
		}
		found := false
		for _, s := range p.Proxies() {
			found = found || s.Name == "p-002" && s.Phase == PhaseDeleting && !s.Wanted
		}
		if !found {
			t.Errorf("the status does not show what is left: %+v", p.Proxies())
		}
		f.SetDeleteLies(false)
		time.Sleep(10 * time.Minute)
		exactly(t, f, 1)
	})
}

func TestARowStuckInDeletingIsNoCapacity(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(3)...)
		waitReady(t, p, 3)
		f.SetDeleteSticks(true)
		if err := p.Refresh("p-001"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if s := status(t, p, "p-001"); s.Phase != PhaseReady || s.Generation != 2 {
			t.Errorf("got %+v", s)
		}
		if p.Stats().Ready != 3 {
			t.Errorf("got %+v", p.Stats())
		}
	})
}

func TestAnAddressUsedAgainByAnotherInstanceIsNotDeletedWithTheOldOne(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{Addresses: []string{"10.0.0.1"}, DeleteTime: 5 * time.Minute})
		p := started(t, f, nil, managed("a"))
		waitReady(t, p, 1)
		if err := p.Refresh("a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Minute)
		if s := status(t, p, "a"); s.Phase != PhaseReady || s.Generation != 2 {
			t.Errorf("got %+v", s)
		}
		exactly(t, f, 1)
	})
}

func TestAnOutageOfAnHourCostsOnlyTheProvidersOwnMembers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		bad, good := fake.New(fake.Config{Name: "bad"}), fake.New(fake.Config{Name: "good"})
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{bad, good}}, aliveProber(bad, good))
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		declare := func(memory int) {
			t.Helper()
			var all []Proxy
			for i := range 6 {
				x := managed(fmt.Sprintf("p-%d", i))
				x.Provider, x.MemoryMiB, x.MaxAge = []string{"bad", "good"}[i%2], memory, 30*time.Minute
				all = append(all, x)
			}
			if err := p.Apply(t.Context(), all...); err != nil {
				t.Fatal(err)
			}
		}
		declare(512)
		p.Start(t.Context())
		waitReady(t, p, 6)
		for _, op := range []fake.Op{fake.OpList, fake.OpCreate, fake.OpGet, fake.OpDelete} {
			defer bad.Hang(op)()
		}
		declare(1024)
		time.Sleep(time.Hour)
		for _, s := range p.Proxies() {
			if s.Phase != PhaseReady {
				t.Errorf("%s is %s", s.Name, s.Phase)
			}
			if want := s.Provider == "bad"; (s.Generation == 1) != want {
				t.Errorf("%s on %s is of generation %d", s.Name, s.Provider, s.Generation)
			}
		}
	})
}

func TestAfterAnOutageTheFleetComesBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		proxies := fleet(3)
		for i := range proxies {
			proxies[i].MaxAge = 40 * time.Minute
		}
		p := started(t, f, nil, proxies...)
		waitReady(t, p, 3)
		f.FailNext(fake.OpList, provider.ErrUnavailable, 1000)
		time.Sleep(time.Hour)
		if s := p.Stats(); s.Ready != 3 || s.Created != 3 {
			t.Errorf("during the outage: %+v", s)
		}
		calls := len(f.Calls(fake.OpList))
		if calls > 400 {
			t.Errorf("%d lists during an outage of an hour", calls)
		}
		f.FailNext(fake.OpList, nil, 0)
		for len(f.Calls(fake.OpList)) > 0 && p.Stats().Created == 3 {
			time.Sleep(time.Minute)
			if time.Since(f.Calls(fake.OpList)[0].Began) > 100*time.Hour {
				t.Fatal("the ages were never acted on")
			}
		}
	})
}

func TestRevokedCredentialsStopCreatesAndNothingElse(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(2)...)
		waitReady(t, p, 2)
		f.SetDenied(true)
		if err := p.Apply(t.Context(), fleet(4)...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if s := p.Stats(); s.Ready != 2 || s.Created != 2 {
			t.Errorf("got %+v", s)
		}
		l, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
		if n := len(f.Calls("")); n > 1500 {
			t.Errorf("%d calls in an hour of refused credentials", n)
		}
		f.SetDenied(false)
		time.Sleep(10 * time.Minute)
		if s := p.Stats(); s.Ready != 4 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestADeniedCreateStopsCreatesOfTheProvider(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		f.FailNext(fake.OpCreate, provider.ErrDenied, 10)
		p := started(t, f, func(c *Config) { c.MaxParallel = 1 }, fleet(20)...)
		time.Sleep(20 * time.Second)
		if n := len(f.Calls(fake.OpCreate)); n > 4 {
			t.Errorf("%d creates with refused credentials", n)
		}
		time.Sleep(2 * time.Hour)
		waitReady(t, p, 20)
	})
}

func TestAQuotaReachedAtHalfTheFleetBlocksNoOtherProvider(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		small, large := fake.New(fake.Config{Name: "small", Capacity: 3}), fake.New(fake.Config{Name: "large"})
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{small, large}}, aliveProber(small, large))
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		var all []Proxy
		for i := range 12 {
			x := managed(fmt.Sprintf("p-%02d", i))
			x.Provider = []string{"small", "large"}[i%2]
			all = append(all, x)
		}
		p.Apply(t.Context(), all...)
		p.Start(t.Context())
		waitReady(t, p, 9)
		time.Sleep(time.Hour)
		if n := len(small.Calls(fake.OpCreate)); n > 150 {
			t.Errorf("%d creates in an hour without capacity", n)
		}
		pending := 0
		for _, s := range p.Proxies() {
			if s.Phase == PhasePending {
				pending++
				if s.Reason == "" || !strings.Contains(s.Message, "no capacity") {
					t.Errorf("got %+v", s)
				}
			}
		}
		if pending != 3 {
			t.Errorf("%d are pending, want 3", pending)
		}
		// A changed spec still rolls where there is no room for a surge.
		for i := range all {
			all[i].MemoryMiB = 2048
		}
		p.Apply(t.Context(), all...)
		time.Sleep(2 * time.Hour)
		wanted := map[string]string{}
		for _, s := range p.Proxies() {
			wanted[s.Name] = s.SpecHash
		}
		for _, x := range append(small.Instances(), large.Instances()...) {
			if x.Mark.Hash != wanted[x.Mark.Proxy] {
				t.Errorf("%s was not replaced", x.Name)
			}
		}
		if most := small.MostInstances(); most > 3 {
			t.Errorf("%d at once", most)
		}
	})
}

func TestAPermanentErrorStopsUntilTheSpecChanges(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		f.FailNext(fake.OpCreate, fmt.Errorf("%w: digest mismatch", provider.ErrPermanent), 1)
		p := started(t, f, nil, managed("a"))
		time.Sleep(time.Hour)
		s := status(t, p, "a")
		if s.Phase != PhaseFailed || !strings.Contains(s.Message, "digest mismatch") || len(f.Calls(fake.OpCreate)) != 1 {
			t.Fatalf("got %+v after %d creates", s, len(f.Calls(fake.OpCreate)))
		}
		x := managed("a")
		x.Labels = map[string]string{"not": "in the hash"}
		p.Apply(t.Context(), x)
		time.Sleep(time.Minute)
		if len(f.Calls(fake.OpCreate)) != 1 {
			t.Fatal("a changed label made it try again")
		}
		x.Image = "better"
		p.Apply(t.Context(), x)
		waitReady(t, p, 1)
	})
}

func TestAProviderThatPanicsIsNamedAndTheOthersGoOn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var log lockedBuffer
		f, good := fake.New(fake.Config{Name: "fake"}), fake.New(fake.Config{Name: "good"})
		for _, op := range []fake.Op{fake.OpList, fake.OpGet, fake.OpDelete} {
			f.PanicNext(op, 1)
		}
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{f, good}, Logger: slog.New(slog.NewTextHandler(&log, nil))}, aliveProber(f, good))
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		other := managed("b")
		other.Provider = "good"
		p.Apply(t.Context(), managed("a"), other)
		p.Start(t.Context())
		waitReady(t, p, 2)
		f.PanicNext(fake.OpCreate, 1)
		p.Apply(t.Context(), managed("a"), managed("c"), other)
		time.Sleep(time.Minute)
		if s := status(t, p, "c"); s.Phase != PhaseFailed || !strings.Contains(s.Message, "panic") {
			t.Errorf("got %+v", s)
		}
		if !strings.Contains(log.String(), "provider panicked") || !strings.Contains(log.String(), "provider=fake") {
			t.Errorf("the log does not name the provider")
		}
	})
}

func TestForeignInstancesAreNeverTouched(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		foreign := []string{
			f.AddForeign("stranger", provider.Mark{}),
			f.AddForeign("other--p-001--1", provider.Mark{Owner: "other", Proxy: "p-001", Generation: 1, HashVersion: 1, Hash: "x"}),
			f.AddForeign("test--p-001--9", provider.Mark{Owner: "Test", Proxy: "p-001", Generation: 9, HashVersion: 1, Hash: "x"}),
		}
		p := started(t, f, func(c *Config) { c.DestroyOnClose = true }, fleet(2)...)
		waitReady(t, p, 2)
		time.Sleep(time.Hour)
		p.Apply(t.Context())
		time.Sleep(time.Hour)
		mustClose(t, p)
		left := map[string]bool{}
		for _, x := range f.Instances() {
			left[x.ID] = true
		}
		for _, id := range foreign {
			if !left[id] {
				t.Errorf("%s is gone", id)
			}
		}
		if len(left) != len(foreign) {
			t.Errorf("%d instances left, want the foreign ones alone", len(left))
		}
		for _, c := range f.Calls("") {
			for _, id := range foreign {
				if c.Instance == id {
					t.Errorf("%s of a foreign instance", c.Op)
				}
			}
		}
	})
}

func TestAtStartOursAreAdoptedAndOrphansGoAfterTheirGrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := open(t, f, nil, fleet(5)...)
		waitReady(t, p, 5)
		mustClose(t, p)
		exactly(t, f, 5)
		p = open(t, f, nil, fleet(3)...)
		defer mustClose(t, p)
		waitReady(t, p, 3)
		if s := p.Stats(); s.Created != 0 || s.Adopted != 5 {
			t.Errorf("got %+v", s)
		}
		time.Sleep(DefaultOrphanGrace - 10*time.Second)
		exactly(t, f, 5)
		time.Sleep(20 * time.Second)
		exactly(t, f, 3)
	})
}

func TestADuplicateOfAnInstanceIsRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(1)...)
		waitReady(t, p, 1)
		m := f.Instances()[0].Mark
		m.Generation = 7
		f.AddForeign("test--p-001--7", m)
		time.Sleep(5 * time.Minute)
		exactly(t, f, 1)
		if s := status(t, p, "p-001"); s.Phase != PhaseReady || s.Generation != 7 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestPreemptedAndVanishedInstancesAreReplaced(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(3)...)
		waitReady(t, p, 3)
		all := f.Instances()
		f.Preempt(all[0].ID)
		f.Vanish(all[1].ID)
		l, err := p.Acquire(t.Context(), Request{Exclude: []string{"p-001", "p-003"}})
		if err != nil {
			t.Fatal(err)
		}
		ctx := l.Context()
		time.Sleep(3 * time.Minute)
		waitReady(t, p, 3)
		exactly(t, f, 3)
		if s := p.Stats(); s.Created != 5 {
			t.Errorf("got %+v", s)
		}
		revoked, ok := errors.AsType[*RevokedError](context.Cause(ctx))
		if !ok || revoked.Reason != "gone" {
			t.Errorf("the lease on what vanished: %v", context.Cause(ctx))
		}
	})
}

func TestADeadHostsProxiesMoveAndItsStraysAreRemovedWhenItIsBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{Hosts: []string{"a", "b", "c"}})
		p := started(t, f, nil, fleet(6)...)
		waitReady(t, p, 6)
		// The host and all that is on it are gone from the network.
		f.SetHostDown("a", true)
		lost := map[string]bool{}
		for _, x := range f.Instances() {
			if x.Host == "a" {
				f.Kill(x.ID)
				lost[x.ID] = true
			}
		}
		time.Sleep(15 * time.Minute)
		waitReady(t, p, 6)
		for _, s := range p.Proxies() {
			if s.Wanted && s.Host == "a" {
				t.Errorf("got %+v", s)
			}
		}
		if n := len(f.Instances()); n != 8 {
			t.Errorf("%d instances, want the two lost ones and six", n)
		}
		// An hour later it is back with what was replaced meanwhile.
		time.Sleep(time.Hour)
		f.SetHostDown("a", false)
		for id := range lost {
			f.Revive(id)
		}
		granted := map[string]bool{}
		for range 120 {
			time.Sleep(time.Second)
			for range 6 {
				if l, err := p.TryAcquire(Request{}); err == nil {
					granted[l.Instance()] = true
					l.Release()
				}
			}
		}
		for _, x := range f.Instances() {
			if lost[x.ID] {
				t.Errorf("the stray %s is still there", x.ID)
			}
		}
		for name := range granted {
			if strings.HasSuffix(name, "--1") && strings.Contains(fmt.Sprint(lost), name) {
				t.Errorf("the stray %s was leased", name)
			}
		}
		exactly(t, f, 6)
	})
}

func TestASilentHostWhoseProxiesWorkChangesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{Hosts: []string{"a", "b"}})
		p := started(t, f, nil, fleet(4)...)
		waitReady(t, p, 4)
		f.SetHostDown("a", true)
		time.Sleep(time.Hour)
		if s := p.Stats(); s.Ready != 4 || s.Created != 4 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestAFlappingProxyCostsFewReplacements(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 10 * time.Second})
		p := started(t, f, nil, fleet(5)...)
		waitReady(t, p, 5)
		for range 24 * 6 { // a day in steps of ten minutes
			for _, x := range f.Instances() {
				if x.Mark.Proxy == "p-001" {
					f.Kill(x.ID)
				}
			}
			time.Sleep(3 * time.Minute)
			for _, x := range f.Instances() {
				f.Revive(x.ID)
			}
			time.Sleep(7 * time.Minute)
		}
		if s := p.Stats(); s.Created > 5+24*6 {
			t.Errorf("%d instances made", s.Created)
		}
		exactly(t, f, 5)
	})
}

func TestFiveHundredDriftingProxiesRollUnderFullLoad(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const n = 500
		f := fake.New(fake.Config{BootTime: 5 * time.Second})
		surge := 50
		p := started(t, f, func(c *Config) { c.Surge, c.MaxParallel = &surge, 50 }, fleet(n)...)
		waitReady(t, p, n)
		ctx, cancel := context.WithCancel(t.Context())
		var workers sync.WaitGroup
		var failed, leased atomic.Int64
		for range 100 {
			workers.Go(func() {
				for ctx.Err() == nil {
					l, err := p.TryAcquire(Request{})
					if err != nil {
						failed.Add(1)
					} else {
						leased.Add(1)
					}
					time.Sleep(time.Duration(100+rand.IntN(900)) * time.Millisecond)
					if err == nil {
						if l.Context().Err() != nil {
							failed.Add(1)
						}
						l.Release()
					}
				}
			})
		}
		proxies := fleet(n)
		for i := range proxies {
			proxies[i].Image = "next"
		}
		if err := p.Apply(t.Context(), proxies...); err != nil {
			t.Fatal(err)
		}
		for p.Stats().Replaced < n {
			time.Sleep(time.Second)
			if s := p.Stats(); s.Ready < n {
				t.Fatalf("%d of %d ready", s.Ready, n)
			}
		}
		cancel()
		workers.Wait()
		if failed.Load() != 0 {
			t.Errorf("%d of %d acquires failed", failed.Load(), leased.Load())
		}
		if most := f.MostInstances(); most > n+surge {
			t.Errorf("%d instances at once, want at most %d", most, n+surge)
		}
	})
}

func TestLeasesOfADrainingInstanceFinishOrAreRevokedAtTheDeadline(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, func(c *Config) { c.DrainDeadline = time.Minute }, managed("a"))
		waitReady(t, p, 1)
		quick, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		slow, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		p.Refresh("a")
		time.Sleep(10 * time.Second)
		if quick.Context().Err() != nil || slow.Context().Err() != nil {
			t.Fatal("revoked before the deadline")
		}
		l, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		if l.Instance() == slow.Instance() {
			t.Error("the draining instance was leased")
		}
		l.Release()
		quick.Release()
		time.Sleep(time.Minute)
		revoked, ok := errors.AsType[*RevokedError](context.Cause(slow.Context()))
		if !ok || revoked.Reason != "drain deadline" || revoked.Proxy != "a" {
			t.Errorf("got %v", context.Cause(slow.Context()))
		}
		exactly(t, f, 1)
	})
}

func TestMaxUnavailableRollsWithoutASurge(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 10 * time.Second})
		p := started(t, f, func(c *Config) { c.Surge, c.MaxUnavailable = ptr(0), ptr(2) }, fleet(6)...)
		waitReady(t, p, 6)
		if err := p.Refresh("p-001", "p-002", "p-003", "p-004", "p-005", "p-006"); err != nil {
			t.Fatal(err)
		}
		for range 600 {
			time.Sleep(time.Second)
			if ready := p.Stats().Ready; ready < 4 {
				t.Fatalf("%d ready, want at least 4", ready)
			}
		}
		for _, s := range p.Proxies() {
			if s.Generation != 2 || s.Phase != PhaseReady {
				t.Errorf("got %+v", s)
			}
		}
		if most := f.MostInstances(); most > 6 {
			t.Errorf("%d at once", most)
		}
	})
}

// secretMap is a source of secrets that can be changed.
type secretMap struct {
	mu     sync.Mutex // guards values
	values map[string]string
}

func (s *secretMap) set(ref, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.values == nil {
		s.values = map[string]string{}
	}
	s.values[ref] = value
}

func (s *secretMap) Secret(_ context.Context, ref string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.values[ref]
	if !ok {
		return nil, fmt.Errorf("%w: %q", ErrSecretNotFound, ref)
	}
	return []byte(v), nil
}

func TestAChangedSecretRollsAndAMissingOneIsAReason(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var log lockedBuffer
		f := fake.New(fake.Config{})
		secrets := &secretMap{}
		secrets.set("squid.yaml", "#cloud-config\n# planted-one\n")
		x := managed("a")
		x.CloudInit = CloudInit{Secret: "squid.yaml"}
		y := managed("b")
		y.CloudInit = CloudInit{Secret: "missing.yaml"}
		p := started(t, f, func(c *Config) {
			c.Secrets = secrets
			c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		}, x, y, managed("c"))
		waitReady(t, p, 2)
		s := status(t, p, "b")
		if s.Phase != PhasePending || s.Reason != "spec not ready" || !strings.Contains(s.Message, "missing.yaml") {
			t.Errorf("got %+v", s)
		}
		time.Sleep(10 * time.Minute)
		if got := status(t, p, "a"); got.Generation != 1 {
			t.Errorf("an unchanged secret rolled: %+v", got)
		}
		secrets.set("squid.yaml", "#cloud-config\n# planted-two\n")
		secrets.set("missing.yaml", "#cloud-config\n")
		time.Sleep(5 * time.Minute)
		waitReady(t, p, 3)
		if got := status(t, p, "a"); got.Generation != 2 {
			t.Errorf("a changed secret did not roll: %+v", got)
		}
		// One that vanishes keeps what runs.
		secrets.mu.Lock()
		secrets.values = nil
		secrets.mu.Unlock()
		time.Sleep(10 * time.Minute)
		if got := p.Stats(); got.Ready != 3 || got.Created != 4 {
			t.Errorf("got %+v", got)
		}
		if strings.Contains(log.String(), "planted") {
			t.Error("the log holds a secret")
		}
	})
}

func TestChangedCredentialsAreNoticedAndMissingOnesKeepTheLast(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		secrets := &secretMap{}
		secrets.set("auth", "user:first\n")
		var mu sync.Mutex
		var password string
		p, err := newPool(Config{Name: "test", Secrets: secrets}, func(_ context.Context, e upstream.Endpoint, _ probe.Check) probe.Result {
			mu.Lock()
			defer mu.Unlock()
			password = e.Password
			return probe.Result{OK: true, Reason: probe.ReasonOK}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		x := Proxy{Name: "a", Mode: External, Endpoint: "192.0.2.1", Auth: Credentials{Secret: "auth"}}
		if err := p.Apply(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		p.Start(t.Context())
		waitReady(t, p, 1)
		check := func(want string) {
			t.Helper()
			l, err := p.TryAcquire(Request{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release()
			mu.Lock()
			defer mu.Unlock()
			if password != want || !strings.Contains(l.ProxyURL(), want) {
				t.Errorf("probed with %q, leased with %s, want %q", password, l.ProxyURL(), want)
			}
		}
		check("first")
		secrets.set("auth", "user:second")
		time.Sleep(5 * time.Minute)
		check("second")
		if n := p.Stats().Instances; n != 1 {
			t.Errorf("%d instances of one external proxy", n)
		}
		secrets.mu.Lock()
		secrets.values = nil
		secrets.mu.Unlock()
		time.Sleep(5 * time.Minute)
		check("second")
		x.Labels = map[string]string{"now": "labelled"}
		if err := p.Apply(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		check("second")
	})
}

func TestNamesThatAreLongGoneAreForgotten(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil)
		p.mu.Lock()
		for i := range manyGenerations + 100 {
			p.generations[fmt.Sprint(i)] = 1
		}
		p.mu.Unlock()
		if err := p.Apply(t.Context(), fleet(2)...); err != nil {
			t.Fatal(err)
		}
		waitReady(t, p, 2)
		p.mu.Lock()
		defer p.mu.Unlock()
		if n := len(p.generations); n != 2 {
			t.Errorf("%d names are remembered", n)
		}
	})
}

func TestTheHashOfASecretIsKeyed(t *testing.T) {
	secrets := &secretMap{}
	secrets.set("doc", "#cloud-config\n")
	hash := func(change func(*Config), x Proxy) string {
		t.Helper()
		config := Config{Name: "test", Providers: []provider.Provider{fake.New(fake.Config{})}, Secrets: secrets}
		change(&config)
		p, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Apply(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		mustClose(t, p)
		return p.Proxies()[0].SpecHash
	}
	inline, secret := managed("a"), managed("a")
	secret.CloudInit = CloudInit{Secret: "doc"}
	plain := hash(func(*Config) {}, inline)
	derived := hash(func(*Config) {}, secret)
	keyed := hash(func(c *Config) { c.HashKey = []byte("key") }, secret)
	if plain == derived || plain == keyed || derived == keyed {
		t.Errorf("hashes %s, %s, %s; want three different ones", plain, derived, keyed)
	}
	if again := hash(func(*Config) {}, secret); again != derived {
		t.Error("the derived key is not the same after a restart")
	}
	inline.Labels, inline.MaxLeases, inline.Probe.URL = map[string]string{"a": "b"}, ptr(1), "http://site.example/"
	if got := hash(func(*Config) {}, inline); got != plain {
		t.Error("labels, limit or probe are in the hash")
	}
}

func TestTwoProxiesWithOneEgressAddressAreToldOf(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		alive := aliveProber(f)
		var events atomic.Int32
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{probedOverTheNetwork{f}}, Observer: func(e Event) {
			if e.Kind == EventSameEgress {
				events.Add(1)
			}
		}}, func(ctx context.Context, e upstream.Endpoint, c probe.Check) probe.Result {
			r := alive(ctx, e, c)
			r.EgressIP = netip.MustParseAddr("198.51.100.7")
			return r
		})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		p.Apply(t.Context(), fleet(2)...)
		p.Start(t.Context())
		waitReady(t, p, 2)
		time.Sleep(10 * time.Minute)
		if events.Load() != 1 {
			t.Errorf("told %d times, want once", events.Load())
		}
		if s := status(t, p, "p-001"); s.EgressIP.String() != "198.51.100.7" {
			t.Errorf("got %+v", s)
		}
	})
}

func TestProbesOfALargeFleetAreSpreadAndBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const n = 5000
		f := fake.New(fake.Config{})
		var under, most, total atomic.Int64
		perSecond := map[int64]int{}
		var mu sync.Mutex
		p, err := newPool(Config{Name: "test", ProbeParallel: 100}, func(context.Context, upstream.Endpoint, probe.Check) probe.Result {
			if k := under.Add(1); k > most.Load() {
				most.Store(k)
			}
			defer under.Add(-1)
			total.Add(1)
			mu.Lock()
			perSecond[time.Now().Unix()]++
			mu.Unlock()
			time.Sleep(50 * time.Millisecond)
			return probe.Result{OK: true, Reason: probe.ReasonOK}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		_ = f
		var all []Proxy
		for i := range n {
			all = append(all, Proxy{Name: fmt.Sprintf("p-%d", i), Mode: External, Endpoint: fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)})
		}
		if err := p.Apply(t.Context(), all...); err != nil {
			t.Fatal(err)
		}
		p.Start(t.Context())
		waitReady(t, p, n)
		time.Sleep(time.Minute)
		mu.Lock()
		clear(perSecond)
		mu.Unlock()
		time.Sleep(5 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for second, k := range perSecond {
			// 5,000 in 30 s are 167 a second.
			if k > 260 {
				t.Errorf("%d probes in second %d", k, second)
			}
		}
		if most.Load() > 100 {
			t.Errorf("%d probes at once", most.Load())
		}
	})
}

func TestRiseAndFallAreCounted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var ok atomic.Bool
		var probes atomic.Int32
		p, err := newPool(Config{Name: "test"}, func(context.Context, upstream.Endpoint, probe.Check) probe.Result {
			probes.Add(1)
			if ok.Load() {
				return probe.Result{OK: true, Reason: probe.ReasonOK}
			}
			return probe.Result{Reason: probe.ReasonTimeout, Message: "no answer"}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, p)
		x := Proxy{Name: "a", Mode: External, Endpoint: "192.0.2.1", Probe: Probe{Rise: 3, Fall: 2, Interval: 10 * time.Second, Timeout: time.Second}}
		p.Apply(t.Context(), x)
		p.Start(t.Context())
		time.Sleep(time.Minute)
		if s := status(t, p, "a"); s.Phase == PhaseReady || s.LastProbe.Reason != "Timeout" {
			t.Fatalf("got %+v", s)
		}
		ok.Store(true)
		before := probes.Load()
		waitReady(t, p, 1)
		if got := probes.Load() - before; got != 3 {
			t.Errorf("fit after %d good probes, want 3", got)
		}
		ok.Store(false)
		before = probes.Load()
		for p.Stats().Ready == 1 {
			time.Sleep(time.Second)
		}
		if got := probes.Load() - before; got != 2 {
			t.Errorf("unfit after %d bad probes, want 2", got)
		}
	})
}

func TestEventsOfAProxyComeInOrder(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: time.Second})
		var mu sync.Mutex
		var kinds []string
		p := open(t, f, func(c *Config) {
			c.Observer = func(e Event) {
				mu.Lock()
				defer mu.Unlock()
				if e.Kind == EventPhase {
					kinds = append(kinds, string(e.Phase))
				} else if e.Proxy == "a" {
					kinds = append(kinds, string(e.Kind))
				}
			}
			c.DestroyOnClose = true
		}, managed("a"))
		waitReady(t, p, 1)
		mustClose(t, p)
		want := "Provisioning create Booting fit Ready delete gone"
		if got := strings.Join(kinds, " "); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
}

func TestThirtyDaysOfChurn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 40 * time.Second, CreateTime: 5 * time.Second, DeleteTime: 20 * time.Second, ListLag: 5 * time.Second, Hosts: []string{"a", "b", "c"}})
		proxies := fleet(12)
		for i := range proxies {
			proxies[i].MaxAge = 20 * time.Hour
			proxies[i].Probe.Interval = 4 * time.Minute
		}
		p := started(t, f, func(c *Config) { c.ListInterval, c.Surge = 2*time.Minute, ptr(2) }, proxies...)
		waitReady(t, p, 12)
		r := rand.New(rand.NewPCG(1, 2))
		served, asked := 0, 0
		for hour := range 30 * 24 {
			all := f.Instances()
			switch x := all[r.IntN(len(all))]; r.IntN(8) {
			case 0:
				f.Kill(x.ID)
			case 1:
				f.Vanish(x.ID)
			case 2:
				f.Preempt(x.ID)
			case 3:
				f.FailNext(fake.OpCreate, provider.ErrUnavailable, r.IntN(4))
				f.FailNext(fake.OpList, provider.ErrUnavailable, r.IntN(4))
			case 4:
				f.CreateThenFail(provider.ErrOutcomeUnknown, 1)
			case 5:
				host := []string{"a", "b", "c"}[r.IntN(3)]
				f.SetHostDown(host, true)
				time.Sleep(time.Duration(r.IntN(20)) * time.Minute)
				f.SetHostDown(host, false)
			case 6:
				proxies[r.IntN(len(proxies))].Image = fmt.Sprint(hour)
				if err := p.Apply(t.Context(), proxies...); err != nil {
					t.Fatal(err)
				}
			}
			for range 60 {
				time.Sleep(time.Minute)
				asked++
				if l, err := p.TryAcquire(Request{}); err == nil {
					served++
					l.Release()
				}
			}
		}
		time.Sleep(2 * time.Hour)
		waitReady(t, p, 12)
		exactly(t, f, 12)
		if served != asked {
			t.Errorf("%d of %d requests found a proxy", served, asked)
		}
		if s := p.Stats(); s.Leases != 0 || s.Leaked != 0 {
			t.Errorf("got %+v", s)
		}
		t.Logf("%+v", p.Stats())
	})
}

func TestAHostIsEmptiedWithoutAProxyTooFew(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 20 * time.Second, Hosts: []string{"a", "b"}})
		p := started(t, f, nil, fleet(6)...)
		waitReady(t, p, 6)
		f.SetDraining("a", true)
		for range 600 {
			time.Sleep(time.Second)
			if ready := p.Stats().Ready; ready < 6 {
				t.Fatalf("%d of 6 ready", ready)
			}
		}
		for _, x := range f.Instances() {
			if x.Host != "b" {
				t.Errorf("%s is still on %s", x.Name, x.Host)
			}
		}
		if n := len(f.Instances()); n != 6 {
			t.Errorf("%d instances", n)
		}
	})
}

func TestAHostThatComesBackLateBringsNothingThatIsLeased(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 20 * time.Second, Hosts: []string{"a", "b"}})
		p := started(t, f, nil, fleet(4)...)
		waitReady(t, p, 4)
		dead, names := map[string]bool{}, map[string]bool{}
		for _, x := range f.Instances() {
			if x.Host == "a" {
				dead[x.ID], names[x.Name] = true, true
				if err := f.Kill(x.ID); err != nil {
					t.Fatal(err)
				}
			}
		}
		if len(dead) == 0 {
			t.Fatal("nothing is on host a")
		}
		f.SetHostDown("a", true)
		time.Sleep(time.Hour)
		if ready := p.Stats().Ready; ready != 4 {
			t.Fatalf("%d of 4 ready with one host gone", ready)
		}
		for id := range dead {
			if err := f.Revive(id); err != nil {
				t.Fatal(err)
			}
		}
		f.SetHostDown("a", false)
		for range 600 {
			time.Sleep(time.Second)
			for _, s := range p.Proxies() {
				if names[s.Instance] {
					t.Fatalf("%+v", s)
				}
			}
		}
		left := f.Instances()
		for _, x := range left {
			if dead[x.ID] {
				t.Errorf("the stray %s is still there", x.Name)
			}
		}
		if len(left) != 4 || p.Stats().Ready != 4 {
			t.Errorf("%d instances, %d ready", len(left), p.Stats().Ready)
		}
	})
}

func TestWhatIsHeldOnALostHostIsRevokedAndTheRestIsNot(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 20 * time.Second, Hosts: []string{"a", "b"}})
		one := 1
		wanted := fleet(4)
		for i := range wanted {
			wanted[i].MaxLeases = &one
		}
		p := started(t, f, nil, wanted...)
		waitReady(t, p, 4)
		held := map[string]*Lease{}
		for range 4 {
			lease, err := p.Acquire(t.Context(), Request{})
			if err != nil {
				t.Fatal(err)
			}
			held[lease.Proxy()] = lease
		}
		lost := map[string]bool{}
		for _, x := range f.Instances() {
			if x.Host == "a" {
				lost[x.Mark.Proxy] = true
				if err := f.Kill(x.ID); err != nil {
					t.Fatal(err)
				}
			}
		}
		if len(lost) == 0 || len(lost) == 4 {
			t.Fatalf("%d of 4 are on host a", len(lost))
		}
		f.SetHostDown("a", true)
		time.Sleep(DefaultLostGrace + DefaultDrainDeadline + 2*time.Minute)
		for name, lease := range held {
			err := context.Cause(lease.Context())
			if _, revoked := errors.AsType[*RevokedError](err); revoked != lost[name] {
				t.Errorf("the lease on %s, lost %t: %v", name, lost[name], err)
			}
			lease.Release()
		}
		if ready := p.Stats().Ready; ready != 4 {
			t.Errorf("%d of 4 ready", ready)
		}
	})
}
