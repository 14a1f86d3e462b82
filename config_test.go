package egress

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// untouchable is a provider that fails the test when it is asked for anything but its name.
type untouchable struct {
	provider.Provider
	t *testing.T
}

func (u untouchable) Name() string { return "untouchable" }

func (u untouchable) List(context.Context, string) ([]provider.Instance, error) {
	u.t.Error("New listed")
	return nil, provider.ErrUnavailable
}

func TestNewIsPure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if _, err := New(Config{Name: "test", Providers: []provider.Provider{untouchable{t: t}}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the bubble would not end with a goroutine left
	})
}

func TestABadConfigNamesEveryFieldAtOnce(t *testing.T) {
	f := fake.New(fake.Config{})
	_, err := New(Config{
		Name: "No Name", Providers: []provider.Provider{f, f, nil}, Surge: ptr(0), MaxUnavailable: ptr(0), MaxParallel: -1,
		ProbeParallel: -2, DrainDeadline: -time.Second, BackoffMin: time.Hour, BackoffMax: time.Minute,
		CheckInterval: ptr(9 * time.Second),
	})
	for _, want := range []string{
		`Name "No Name" is no DNS label`, `Providers[1] is the second one named "fake"`, "Providers[2] is nil",
		"Surge and MaxUnavailable are both 0", "MaxParallel is -1, want at least 1", "ProbeParallel is -2", "DrainDeadline is -1s",
		"BackoffMax is 1m0s, want at least BackoffMin", "CheckInterval is 9s, want 0 for none or at least 10s",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{Name: "a", CheckTimeout: 2 * time.Minute}, "CheckTimeout is 2m0s, want 0 or at most CheckInterval, which is 1m0s"},
		{Config{Name: strings.Repeat("a", 50)}, "want at most 49"},
		{Config{}, "Name is empty"},
	} {
		if _, err := New(c.config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	if _, err := New(Config{Name: "a", CheckInterval: ptr(time.Duration(0))}); err != nil {
		t.Errorf("checks turned off: %v", err)
	}
}

func TestOneInvalidProxyChangesNothingAndEveryFaultIsNamed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(2)...)
		waitReady(t, p, 2)
		ok := managed("ok")
		bad := func(change func(*Proxy)) Proxy {
			x := managed("bad")
			change(&x)
			return x
		}
		ext := func(change func(*Proxy)) Proxy {
			x := Proxy{Name: "ext", Mode: External, Endpoint: "192.0.2.1:3128"}
			change(&x)
			return x
		}
		cases := []struct {
			proxy Proxy
			want  string
		}{
			{bad(func(x *Proxy) { x.Name = "" }), "Name is empty"},
			{bad(func(x *Proxy) { x.Name = "Upper" }), `Name "Upper" is no DNS label`},
			{bad(func(x *Proxy) { x.Name = "a--b" }), "double hyphen"},
			{bad(func(x *Proxy) { x.Name = "a-" }), "ends with a hyphen"},
			{bad(func(x *Proxy) { x.Name = strings.Repeat("a", 60) }), "want at most 50"},
			{bad(func(x *Proxy) { x.Name = strings.Repeat("a", 48) }), "Name and the pool's name have 52 characters"},
			{bad(func(x *Proxy) { x.Provider = "nowhere" }), `Provider "nowhere" is unknown, want one of "fake"`},
			{bad(func(x *Proxy) { x.Provider = "" }), "Provider is empty"},
			{bad(func(x *Proxy) { x.Endpoint = "192.0.2.1:1" }), "Endpoint is set"},
			{bad(func(x *Proxy) { x.CloudInit = CloudInit{} }), "neither source"},
			{bad(func(x *Proxy) { x.CloudInit.Secret = "s" }), "both sources"},
			{bad(func(x *Proxy) { x.CloudInit = CloudInit{Secret: "a/../b"} }), ".. element"},
			{bad(func(x *Proxy) { x.CloudInit = CloudInit{Secret: "s"} }), "Config.Secrets is nil"},
			{bad(func(x *Proxy) { x.CloudInit.Vendor, x.CloudInit.VendorSecret = "a", "b" }), "both Vendor and VendorSecret"},
			{bad(func(x *Proxy) { x.CPUs, x.MemoryMiB, x.DiskGiB = -1, -2, -3 }), "CPUs is -1"},
			{bad(func(x *Proxy) { x.MemoryMiB = -2 }), "MemoryMiB is -2"},
			{bad(func(x *Proxy) { x.DiskGiB = -3 }), "DiskGiB is -3"},
			{bad(func(x *Proxy) { x.MaxAge = -time.Hour }), "MaxAge is -1h0m0s"},
			{bad(func(x *Proxy) { x.MaxLeases = ptr(-1) }), "MaxLeases is -1"},
			{bad(func(x *Proxy) { x.Port = 70000 }), "Port is 70000"},
			{bad(func(x *Proxy) { x.Scheme = "ftp" }), `Scheme is "ftp"`},
			{bad(func(x *Proxy) { x.Mode = 7 }), "Mode is 7"},
			{bad(func(x *Proxy) { x.Options = map[string]string{"speed": "9"} }), `unknown key "speed"`},
			{bad(func(x *Proxy) { x.Labels = map[string]string{"": "x"} }), "empty key"},
			{bad(func(x *Proxy) { x.Auth = Credentials{Secret: "s", Username: "u"} }), "both a Secret and a user name"},
			{bad(func(x *Proxy) { x.Auth = Credentials{Username: "a:b"} }), "colon"},
			{bad(func(x *Proxy) { x.TLS.RootsPEM = []byte("x") }), "RootsPEM holds no certificate"},
			{bad(func(x *Proxy) { x.Probe.URL = "ftp://x" }), "Probe.URL is no http or https URL"},
			{bad(func(x *Proxy) { x.Probe.EchoURL = "nothing" }), "Probe.EchoURL"},
			{bad(func(x *Proxy) { x.Probe.Status = 204 }), "no URL to ask"},
			{bad(func(x *Proxy) { x.Probe = Probe{URL: "http://x", Status: 99} }), "Probe.Status is 99"},
			{bad(func(x *Proxy) { x.Probe = Probe{URL: "http://x", Method: "get"} }), `Probe.Method is "get"`},
			{bad(func(x *Proxy) { x.Probe = Probe{Interval: time.Second, Timeout: 2 * time.Second} }), "Probe.Interval is 1s, want at least Probe.Timeout"},
			{bad(func(x *Proxy) { x.Probe.Fall = -1 }), "Probe.Fall -1"},
			{ext(func(x *Proxy) { x.Endpoint = "" }), "Endpoint is empty"},
			{ext(func(x *Proxy) { x.Endpoint = "http://host:port" }), "can't be read"},
			{ext(func(x *Proxy) { x.Endpoint = "host:0" }), `port "0"`},
			{ext(func(x *Proxy) { x.Endpoint = "http://host/path" }), "more than a host and a port"},
			{ext(func(x *Proxy) { x.Port = 1 }), "Port is 1 and Endpoint says 3128"},
			{ext(func(x *Proxy) { x.Scheme, x.Endpoint = SchemeHTTP, "socks5://h" }), `Endpoint says "socks5"`},
			{ext(func(x *Proxy) { x.Endpoint, x.Auth.Username = "http://u:p@h", "v" }), "credentials too"},
			{ext(func(x *Proxy) { x.Provider = "fake" }), "Provider is set"},
			{ext(func(x *Proxy) { x.CloudInit.Inline = "x" }), "CloudInit is set"},
			{ext(func(x *Proxy) { x.Image = "x" }), "Image is set"},
			{managed("ok"), "used twice"},
		}
		all := []Proxy{ok}
		for _, c := range cases {
			before := p.Proxies()
			err := p.Apply(t.Context(), ok, c.proxy)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if !reflect.DeepEqual(before, p.Proxies()) {
				t.Fatalf("an invalid input changed something: %v", err)
			}
			if c.proxy.Name != "ok" {
				c.proxy.Name = fmt.Sprintf("bad-%d", len(all))
				all = append(all, c.proxy)
			}
		}
		// All at once: each proxy with a fault that does not depend on its name is named.
		err := p.Apply(t.Context(), all...)
		for i := 7; i < len(all); i++ {
			if name := fmt.Sprintf("%q", all[i].Name); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("the error does not name %s", name)
			}
		}
		time.Sleep(time.Minute)
		exactly(t, f, 2)
	})
}

func TestModeAndProviderOfALiveNameCanNotBeChanged(t *testing.T) {
	a, b := fake.New(fake.Config{Name: "a"}), fake.New(fake.Config{Name: "b"})
	p, err := New(Config{Name: "test", Providers: []provider.Provider{a, b}})
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, p)
	x := managed("x")
	x.Provider = "a"
	if err := p.Apply(t.Context(), x); err != nil {
		t.Fatal(err)
	}
	x.Provider = "b"
	if err := p.Apply(t.Context(), x); err == nil || !strings.Contains(err.Error(), `Provider is "b" and was "a"`) {
		t.Errorf("got %v", err)
	}
	if err := p.Apply(t.Context(), Proxy{Name: "x", Mode: External, Endpoint: "192.0.2.1"}); err == nil || !strings.Contains(err.Error(), "Mode is external and was managed") {
		t.Errorf("got %v", err)
	}
	if err := p.Apply(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Apply(t.Context(), x); err != nil {
		t.Errorf("after its removal: %v", err)
	}
}

func TestALimitOfZeroKeepsTheProxyAndLeasesItToNobody(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		zero, other := managed("zero"), managed("other")
		zero.MaxLeases = ptr(0)
		other.MaxLeases = ptr(1)
		p := started(t, f, nil, zero, other)
		waitReady(t, p, 2)
		exactly(t, f, 2)
		if _, err := p.TryAcquire(Request{Exclude: []string{"other"}}); !errors.Is(err, ErrNoMatch) {
			t.Errorf("got %v", err)
		}
		l, err := p.TryAcquire(Request{})
		if err != nil || l.Proxy() != "other" {
			t.Fatalf("got %v, %v", l, err)
		}
		l.Release()
		zero.MaxLeases = nil
		if err := p.Apply(t.Context(), zero, other); err != nil {
			t.Fatal(err)
		}
		if got := status(t, p, "zero").MaxLeases; got != DefaultMaxLeases {
			t.Errorf("nil gives %d", got)
		}
		l, err = p.TryAcquire(Request{Exclude: []string{"other"}})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	})
}

func TestEveryStateAnswersAsItShould(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p, err := New(Config{Name: "test"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Acquire(t.Context(), Request{}); !errors.Is(err, ErrNotStarted) {
			t.Errorf("Acquire before Start: %v", err)
		}
		if _, err := p.TryAcquire(Request{}); !errors.Is(err, ErrNotStarted) {
			t.Errorf("TryAcquire before Start: %v", err)
		}
		if err := p.WaitReady(t.Context(), 0); !errors.Is(err, ErrNotStarted) {
			t.Errorf("WaitReady before Start: %v", err)
		}
		if _, err := p.Client(Request{}).Get("http://192.0.2.1/"); !errors.Is(err, ErrNotStarted) {
			t.Errorf("a request before Start: %v", err)
		}
		var none context.Context
		if err := p.Start(none); err == nil {
			t.Error("Start with a nil context")
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.Start(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Start with an ended context: %v", err)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(t.Context()); !errors.Is(err, ErrStarted) {
			t.Errorf("Start twice: %v", err)
		}
		if _, err := p.Acquire(none, Request{}); err == nil || !strings.Contains(err.Error(), "nil") {
			t.Errorf("Acquire with a nil context: %v", err)
		}
		if err := p.Apply(none); err == nil {
			t.Error("Apply with a nil context")
		}
		if err := p.WaitReady(none, 0); err == nil {
			t.Error("WaitReady with a nil context")
		}
		if _, err := p.Acquire(t.Context(), Request{Labels: map[string]string{"a": "b"}}); !errors.Is(err, ErrNoMatch) {
			t.Errorf("a selector that can never match: %v", err)
		}
		if err := p.WaitReady(t.Context(), 1); err == nil {
			t.Error("WaitReady for more than are declared")
		}
		if err := p.Refresh("nobody"); !errors.Is(err, ErrUnknownProxy) {
			t.Errorf("Refresh of nobody: %v", err)
		}
		for range 2 {
			mustClose(t, p)
			select {
			case <-p.Done():
			default:
				t.Error("Done is open after Close")
			}
		}
		if err := p.Start(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("Start after Close: %v", err)
		}
		if err := p.Apply(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("Apply after Close: %v", err)
		}
		if _, err := p.Acquire(t.Context(), Request{}); !errors.Is(err, ErrClosed) {
			t.Errorf("Acquire after Close: %v", err)
		}
		if err := p.WaitReady(t.Context(), 0); !errors.Is(err, ErrClosed) {
			t.Errorf("WaitReady after Close: %v", err)
		}
		unstarted, err := New(Config{Name: "test"})
		if err != nil {
			t.Fatal(err)
		}
		mustClose(t, unstarted)
	})
}

func TestCloseWaitsForLeasesAndThenRevokesThem(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		proxies := fleet(2)
		for i := range proxies {
			proxies[i].MaxLeases = ptr(1)
		}
		p := open(t, f, nil, proxies...)
		waitReady(t, p, 2)
		polite, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		stubborn, err := p.TryAcquire(Request{})
		if err != nil {
			t.Fatal(err)
		}
		go func() { time.Sleep(10 * time.Second); polite.Release() }()
		waiting := make(chan error, 1)
		go func() {
			_, err := p.Acquire(t.Context(), Request{})
			waiting <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin := time.Now()
		if err := p.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < time.Minute || took > time.Minute+closeGrace {
			t.Errorf("Close took %s", took)
		}
		if err := <-waiting; !errors.Is(err, ErrClosed) {
			t.Errorf("the caller that waited: %v", err)
		}
		if !errors.Is(context.Cause(polite.Context()), ErrReleased) {
			t.Errorf("the polite lease: %v", context.Cause(polite.Context()))
		}
		if !errors.Is(context.Cause(stubborn.Context()), ErrClosed) || !errors.As(context.Cause(stubborn.Context()), new(*RevokedError)) {
			t.Errorf("the stubborn lease: %v", context.Cause(stubborn.Context()))
		}
		stubborn.Release()
		exactly(t, f, 2)
	})
}

func TestCloseThatRanOutOfTimeCanBeCalledAgain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{DeleteTime: 10 * time.Minute})
		p := open(t, f, func(c *Config) { c.DestroyOnClose = true }, fleet(3)...)
		waitReady(t, p, 3)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "call it again") {
			t.Fatalf("got %v", err)
		}
		select {
		case <-p.Done():
			t.Fatal("Done is closed")
		default:
		}
		mustClose(t, p)
		exactly(t, f, 0)
	})
}

// stubborn is a provider whose List ignores its context.
type stubborn struct {
	*fake.Provider
	release chan struct{}
}

func (s stubborn) List(context.Context, string) ([]provider.Instance, error) {
	<-s.release
	return nil, provider.ErrUnavailable
}

func TestCloseSaysWhenAProviderDoesNotComeBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s := stubborn{fake.New(fake.Config{}), make(chan struct{})}
		p, err := New(Config{Name: "test", Providers: []provider.Provider{s}})
		if err != nil {
			t.Fatal(err)
		}
		p.Start(t.Context())
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Close(ctx); err == nil || !strings.Contains(err.Error(), "still under way") {
			t.Fatalf("got %v", err)
		}
		close(s.release)
		mustClose(t, p)
	})
}

// closable counts its Close calls.
type closable struct {
	*fake.Provider
	closed *int
}

func (c closable) Close() error { *c.closed++; return nil }

func TestProvidersAreClosedOnceUnlessTheyAreShared(t *testing.T) {
	own, shared := 0, 0
	p, err := New(Config{Name: "test", Providers: []provider.Provider{
		closable{fake.New(fake.Config{Name: "own"}), &own}, provider.Shared(closable{fake.New(fake.Config{Name: "shared"}), &shared}),
	}})
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, p)
	mustClose(t, p)
	if own != 1 || shared != 0 {
		t.Errorf("closed %d and %d times, want 1 and 0", own, shared)
	}
}

func TestStartAndCloseFromManyGoroutines(t *testing.T) {
	for range 50 {
		inBubble(t, func(t *testing.T) {
			p, err := New(Config{Name: "test", Providers: []provider.Provider{fake.New(fake.Config{})}, Observer: func(Event) {}})
			if err != nil {
				t.Fatal(err)
			}
			p.Apply(t.Context(), fleet(2)...)
			var all sync.WaitGroup
			for i := range 10 {
				all.Go(func() {
					if i%2 == 0 {
						p.Start(t.Context())
					}
					if l, err := p.TryAcquire(Request{}); err == nil {
						l.Release()
					}
					p.Proxies()
					p.Stats()
					if err := p.Close(context.Background()); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			mustClose(t, p)
		})
	}
}

func TestEveryFieldOfTheConfigsSaysItsDefault(t *testing.T) {
	// The comments are checked where they are read: in the source.
	for file, types := range map[string][]string{"config.go": {"Config"}, "egress.go": {"Proxy", "CloudInit", "Credentials", "ProxyTLS", "Probe"}, "lease.go": {"Request"}} {
		for _, missing := range undocumentedDefaults(t, file, types) {
			t.Errorf("%s: %s says neither Required nor Default", file, missing)
		}
	}
}

func TestReplicateNumbersItsCopies(t *testing.T) {
	var names []string
	for _, x := range Replicate(3, "crawl-%02d", Proxy{Provider: "home"}) {
		names = append(names, x.Name+x.Provider)
	}
	if want := []string{"crawl-01home", "crawl-02home", "crawl-03home"}; !slices.Equal(names, want) {
		t.Errorf("got %v", names)
	}
	if Replicate(0, "x", Proxy{}) != nil || Replicate(-1, "x", Proxy{}) != nil {
		t.Error("no copies, want nil")
	}
}

func TestEndpointsAreRead(t *testing.T) {
	c := Config{Name: "test"}
	for endpoint, want := range map[string]string{
		"192.0.2.1":                      "http://192.0.2.1:3128",
		"192.0.2.1:8080":                 "http://192.0.2.1:8080",
		"proxy.example":                  "http://proxy.example:3128",
		"2001:db8::1":                    "http://[2001:db8::1]:3128",
		"[2001:db8::1]:1080":             "http://[2001:db8::1]:1080",
		"socks5://proxy.example:1080":    "socks5://proxy.example:1080",
		"https://u:p%40w@proxy.example/": "https://proxy.example:3128",
		"http://u@proxy.example:99":      "http://proxy.example:99",
	} {
		all, err := c.declare([]Proxy{{Name: "x", Mode: External, Endpoint: endpoint}})
		if err != nil {
			t.Errorf("%s: %v", endpoint, err)
			continue
		}
		e := endpointOf(&all[0], all[0].Auth, &instance{address: all[0].host})
		if e.String() != want {
			t.Errorf("%s gives %s, want %s", endpoint, e, want)
		}
		if strings.Contains(endpoint, "p%40w") && e.Password != "p@w" {
			t.Errorf("%s gives password %q", endpoint, e.Password)
		}
	}
}

func FuzzEndpoint(f *testing.F) {
	for _, s := range []string{"a", "http://u:p@h:1", "[::1]:2", "socks5://h", "://", "http://%zz@h"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c := Config{Name: "test"}
		_, err := c.declare([]Proxy{{Name: "x", Mode: External, Endpoint: s}})
		if err != nil && len(s) > 12 && strings.Contains(err.Error(), s) {
			t.Errorf("the error shows the endpoint: %v", err)
		}
	})
}
