package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/internal/probe"
	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func TestDestroyOnCloseWaitsForCreatesUnderWay(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: 30 * time.Second})
		p := started(t, f, func(c *Config) { c.DestroyOnClose = true }, fleet(2)...)
		time.Sleep(5 * time.Second) // creates are under way, next list at 10 s
		if err := p.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if n := len(f.Instances()); n != 0 {
			t.Errorf("Close returned nil and %d instances are left: %+v", n, f.Instances())
		}
	})
}

func TestDestroyOnCloseFindsWhatAnUnknownOutcomeLeft(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{ListLag: 25 * time.Second})
		f.CreateThenFail(provider.ErrOutcomeUnknown, 1)
		p := started(t, f, func(c *Config) { c.DestroyOnClose = true }, fleet(1)...)
		time.Sleep(5 * time.Second)
		if err := p.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		if n := len(f.Instances()); n != 0 {
			t.Errorf("Close returned nil and %d instances are left", n)
		}
	})
}

func TestASiteThatAnswers407PutsNoProxyOutOfService(t *testing.T) {
	site := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusProxyAuthRequired) }))
	defer site.Close()
	a, b := proxyServer(t, forwardproxy.Config{}), proxyServer(t, forwardproxy.Config{})
	p := externalPool(t, nil, external("a", a), external("b", b))
	p.mu.Lock()
	roots := site.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	for _, x := range p.instances {
		x.forward.transport().TLSClientConfig = &tls.Config{RootCAs: roots}
	}
	p.mu.Unlock()
	_, err := p.Client(Request{Retries: 1}).Get(site.URL)
	t.Logf("err %v", err)
	if _, err := p.TryAcquire(Request{}); err != nil {
		t.Errorf("one https page that answers 407 inside the tunnel took every proxy out of service: %v", err)
	}
}

func TestAWaiterIsToldWhenNothingCanMatchAnyMore(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		a, b := managed("a"), managed("b")
		a.Labels = map[string]string{"c": "a"}
		a.MaxLeases = ptr(1)
		p := started(t, f, nil, a, b)
		waitReady(t, p, 2)
		req := Request{Labels: map[string]string{"c": "a"}}
		l, err := p.Acquire(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		go func() { _, err := p.Acquire(ctx, req); got <- err }()
		time.Sleep(time.Second)
		if err := p.Apply(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		l.Release()
		time.Sleep(time.Minute)
		_, now := p.TryAcquire(req)
		t.Logf("a newcomer: %v", now)
		if err := <-got; !errors.Is(err, ErrNoMatch) {
			t.Errorf("waited a day and got %v", err)
		}
	})
}

func TestAKeyedWaiterMovesWhenItsProxyBearsNoLeasesAnyMore(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		ps := fleet(2)
		ps[0].MaxLeases, ps[1].MaxLeases = ptr(1), ptr(1)
		p := started(t, f, nil, ps...)
		waitReady(t, p, 2)
		l, _ := p.Acquire(t.Context(), Request{Key: "k"})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		got := make(chan error, 1)
		go func() { _, err := p.Acquire(ctx, Request{Key: "k"}); got <- err }()
		time.Sleep(time.Second)
		for i := range ps {
			if ps[i].Name == l.Proxy() {
				ps[i].MaxLeases = ptr(0)
			}
		}
		if err := p.Apply(t.Context(), ps...); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		err := <-got
		if time.Since(begin) > time.Second {
			t.Errorf("waited %s beside a free proxy: %v", time.Since(begin), err)
		}
		l.Release()
	})
}

func TestARetryThatFindsNoProxyTellsTheFirstFailure(t *testing.T) {
	a := proxyServer(t, forwardproxy.Config{})
	p := externalPool(t, nil, external("a", a))
	a.SetFaults(forwardproxy.Faults{Refuse: true})
	_, err := p.Client(Request{Retries: 2}).Get("http://192.0.2.1/")
	if _, ok := errors.AsType[*ProxyError](err); !ok {
		t.Errorf("got %v", err)
	}
}

func TestASecretSourceThatHangsBlocksNoApply(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		n := 0
		x := managed("a")
		x.CloudInit = CloudInit{Secret: "s"}
		p := started(t, f, func(c *Config) {
			c.Secrets = SecretFunc(func(ctx context.Context, _ string) ([]byte, error) {
				n++
				if n > 1 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return []byte("x"), nil
			})
		}, x)
		time.Sleep(2 * time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begin := time.Now()
		err := p.Apply(ctx, managed("b"))
		if err != nil {
			t.Errorf("Apply of a proxy without secrets: %v after %s", err, time.Since(begin))
		}
	})
}

func TestALeaseDroppedWithItsBodyOpenIsReclaimed(t *testing.T) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write(make([]byte, 1<<20))
	}))
	defer site.Close()
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	func() {
		l, err := p.Acquire(t.Context(), Request{})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := l.Client().Get(site.URL)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp
	}()
	for range 60 {
		time.Sleep(100 * time.Millisecond)
		runtime.GC()
	}
	if s := p.Stats(); s.Leaked != 1 || s.Leases != 0 {
		t.Errorf("leaked %d, held %d", s.Leaked, s.Leases)
	}
}

func TestOwnCreatesAreNotAdopted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: 25 * time.Second})
		var kinds []string
		p := started(t, f, func(c *Config) {
			c.Observer = func(e Event) { kinds = append(kinds, string(e.Kind)) }
		}, fleet(1)...)
		waitReady(t, p, 1)
		if s := p.Stats(); s.Adopted != 0 || s.Created != 1 {
			t.Errorf("adopted %d created %d; events %v", s.Adopted, s.Created, kinds)
		}
	})
}

func TestNeitherAHashKeyNorAnOddEndpointIsShown(t *testing.T) {
	for _, e := range []string{"http://user:hunter2/x@host:3128", "user:123/hunter2@host:3128"} {
		x := Proxy{Mode: External, Endpoint: e}
		if s := x.String(); strings.Contains(s, "hunter2") || strings.Contains(s, "123") || strings.Contains(s, "user") {
			t.Errorf("%s", s)
		}
	}
	c := Config{HashKey: []byte("hunter2")}
	if s := fmt.Sprint(c); strings.Contains(s, "104 117 110") {
		t.Errorf("%.300s", s)
	}
}

func TestWhatApplyWasGivenMayBeChangedAfterwards(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		var got *provider.Network
		x := managed("a")
		n := &provider.Network{}
		x.CloudInit.Network = n
		var s provider.Provider = seeing{f, &got}
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{s}}, aliveProber(f))
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close(context.Background())
		if err := p.Apply(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		waitReady(t, p, 1)
		if got == n {
			t.Errorf("the provider gets the caller's own pointer")
		}
	})
}

type seeing struct {
	*fake.Provider
	n **provider.Network
}

func (s seeing) Create(ctx context.Context, r provider.CreateRequest) (provider.Instance, error) {
	*s.n = r.Spec.CloudInit.Network
	return s.Provider.Create(ctx, r)
}

// External: removed and declared again while leased, and changed credentials.
func TestChangedCredentialsOfOneServerDoNotDoubleItsLimit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, err := newPool(Config{Name: "test"}, func(context.Context, upstream.Endpoint, probe.Check) probe.Result {
			return probe.Result{OK: true, Reason: probe.ReasonOK}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close(context.Background())
		x := Proxy{Name: "x", Mode: External, Endpoint: "10.0.0.1:3128", MaxLeases: ptr(1)}
		p.Apply(t.Context(), x)
		p.Start(t.Context())
		waitReady(t, p, 1)
		l, err := p.Acquire(t.Context(), Request{})
		if err != nil {
			t.Fatal(err)
		}
		x.Auth = Credentials{Username: "u", Password: "new"}
		p.Apply(t.Context(), x)
		time.Sleep(10 * time.Second)
		l2, err := p.TryAcquire(Request{})
		if err == nil && l.Context().Err() == nil {
			t.Errorf("two holders on one server with MaxLeases 1: %s %s", l, l2)
		}
		if l2 != nil {
			l2.Release()
		}
		l.Release()
	})
}

func TestAnUnknownOutcomeIsListedFirstAlsoWhenTheSpecHasChanged(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: 15 * time.Second})
		f.CreateThenFail(provider.ErrOutcomeUnknown, 1)
		ps := fleet(1)
		p := started(t, f, nil, ps...)
		time.Sleep(5 * time.Second)
		ps[0].Image = "other"
		p.Apply(t.Context(), ps...)
		time.Sleep(5 * time.Minute)
		exactly(t, f, 1)
		for _, c := range f.Calls("") {
			if c.Began.Sub(f.Calls("")[0].Began) < 40*time.Second {
				t.Logf("%v %s %s %v", c.Began.Sub(f.Calls("")[0].Began), c.Op, c.Instance, c.Err)
			}
		}
	})
}

func TestTheDrainDeadlineHoldsWhileTheProviderIsDown(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(1)...)
		waitReady(t, p, 1)
		l, _ := p.Acquire(t.Context(), Request{})
		defer l.Release()
		f.FailNext(fake.OpList, provider.ErrUnavailable, 2000)
		time.Sleep(30 * time.Second)
		p.Apply(t.Context())
		time.Sleep(30 * time.Minute)
		if l.Context().Err() == nil {
			t.Errorf("held 30 m after the removal, with a DrainDeadline of 5 m")
		}
	})
}

func TestAProxyThatIsDeclaredAgainIsNotCreatedTwiceAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: time.Minute})
		p := started(t, f, nil, fleet(1)...)
		time.Sleep(time.Second)
		p.Apply(t.Context())
		p.Apply(t.Context(), fleet(1)...)
		time.Sleep(5 * time.Second)
		if c := f.Calls(fake.OpCreate); len(c) != 1 {
			t.Errorf("%d creates of one name in the first 6 s of a create that takes 60: %+v", len(c), c)
		}
	})
}

func TestCreatesOfRemovedProxiesCountAgainstTheSurge(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: time.Minute})
		p := started(t, f, nil, fleet(3)...)
		for i := range 5 {
			time.Sleep(time.Second)
			p.Apply(t.Context(), Replicate(3, string(rune('a'+i))+"-%d", managed(""))...)
		}
		time.Sleep(10 * time.Second)
		if n := len(f.Instances()); n > 4 {
			t.Errorf("%d instances on the backend, wanted 3 + surge 1", n)
		}
	})
}

// A stale probe, begun before the report, ends Broken.
func TestAProbeFromBeforeTheReportDoesNotMendABrokenProxy(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var n atomic.Int32
		p, _ := newPool(Config{Name: "test"}, func(context.Context, upstream.Endpoint, probe.Check) probe.Result {
			if n.Add(1) > 1 {
				time.Sleep(5 * time.Second)
			}
			return probe.Result{OK: true, Reason: probe.ReasonOK}
		})
		defer p.Close(context.Background())
		p.Apply(t.Context(), Proxy{Name: "x", Mode: External, Endpoint: "10.0.0.1:3128"})
		p.Start(t.Context())
		waitReady(t, p, 1)
		l, _ := p.Acquire(t.Context(), Request{})
		for n.Load() < 2 {
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(4 * time.Second) // this probe has been under way for 4 s
		l.Report(Broken(nil))
		l.Release()
		begin := n.Load()
		time.Sleep(1500 * time.Millisecond)
		if l2, err := p.TryAcquire(Request{}); err == nil {
			l2.Release()
			t.Errorf("leased again without any probe begun after the report (began %d then, %d now)", begin, n.Load())
		}
	})
}

// An id that belongs to another owner now.
type reused struct {
	*fake.Provider
	on      atomic.Bool
	deletes atomic.Int32
}

func (r *reused) List(ctx context.Context, o string) ([]provider.Instance, error) {
	if r.on.Load() {
		return nil, nil
	}
	return r.Provider.List(ctx, o)
}

func (r *reused) Get(ctx context.Context, id string) (provider.Instance, error) {
	x, err := r.Provider.Get(ctx, id)
	if r.on.Load() {
		x.Mark.Owner = "somebody-else"
	}
	return x, err
}

func (r *reused) Delete(ctx context.Context, id string) error {
	if r.on.Load() {
		r.deletes.Add(1)
		return nil
	}
	return r.Provider.Delete(ctx, id)
}

func TestAnInstanceWhoseIDIsSomebodyElsesNowIsNotDeleted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := &reused{Provider: fake.New(fake.Config{})}
		p, _ := newPool(Config{Name: "test", Providers: []provider.Provider{r}}, aliveProber(r.Provider))
		defer p.Close(context.Background())
		p.Apply(t.Context(), fleet(1)...)
		p.Start(t.Context())
		waitReady(t, p, 1)
		r.on.Store(true)
		time.Sleep(time.Minute) // many Gets have said whose it is
		t.Logf("%+v", status(t, p, "p-001"))
		p.Apply(t.Context())
		time.Sleep(time.Minute)
		if n := r.deletes.Load(); n > 0 {
			t.Errorf("%d deletes of an instance that Get says is somebody else's", n)
		}
	})
}

func TestANewcomerDoesNotOvertakeAtTheEndOfACoolDown(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		ps := fleet(1)
		ps[0].MaxLeases = ptr(1)
		p := started(t, f, nil, ps...)
		waitReady(t, p, 1)
		// This timer is older than the cool-down's, so it may run first at the same instant.
		begin := time.Now()
		newcomer := make(chan error, 1)
		go func() {
			time.Sleep(time.Until(begin.Add(time.Minute)))
			l, err := p.TryAcquire(Request{Target: "s"})
			if err == nil {
				defer l.Release()
			}
			newcomer <- err
		}()
		l, _ := p.Acquire(t.Context(), Request{Target: "s"})
		l.Report(Banned(time.Minute))
		l.Release()
		go func() {
			l, err := p.Acquire(t.Context(), Request{Target: "s"})
			if err == nil {
				time.Sleep(500 * time.Millisecond)
				l.Release()
			}
		}()
		if err := <-newcomer; err == nil {
			t.Errorf("a newcomer overtook one that has waited a minute")
		}
		time.Sleep(time.Second)
	})
}

func TestAnUnknownOutcomeIsNotRepeatedBeforeAList(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{CreateTime: 15 * time.Second})
		f.CreateThenFail(provider.ErrOutcomeUnknown, 1)
		ps := fleet(1)
		p := started(t, f, nil, ps...)
		time.Sleep(9 * time.Second)
		release := f.Hang(fake.OpList)
		defer release()
		time.Sleep(time.Second)
		ps[0].Image = "other" // the create's outcome comes under another hash
		p.Apply(t.Context(), ps...)
		time.Sleep(25 * time.Second)
		lists, creates := 0, 0
		for _, c := range f.Calls("") {
			if c.Op == fake.OpCreate {
				creates++
			}
			if c.Op == fake.OpList && c.Err == nil {
				lists++
			}
		}
		if creates > 1 {
			t.Errorf("%d creates though no list has come back since the first one's outcome was unknown", creates)
		}
		for _, c := range f.Calls("") {
			t.Logf("%v %s %s %v", c.Began, c.Op, c.Instance, c.Err)
		}
	})
}
