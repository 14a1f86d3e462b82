package egress_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

const squid = "#cloud-config\npackages: [squid]\n"

// started returns a pool with these proxies, all of them ready.
func started(config egress.Config, proxies ...egress.Proxy) *egress.Pool {
	config.DestroyOnClose = true
	pool, err := egress.New(config)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := errors.Join(pool.Apply(ctx, proxies...), pool.Start(ctx), pool.WaitReady(ctx, len(proxies))); err != nil {
		panic(err)
	}
	return pool
}

// demo returns a pool of two loopback proxies, both ready, and a site to crawl.
func demo() (*egress.Pool, *httptest.Server) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "you asked for %s", r.URL.Path)
	}))
	home := fake.New(fake.Config{Name: "home", Serve: true})
	return started(egress.Config{Name: "demo", Providers: []provider.Provider{home}}, egress.Replicate(2, "proxy-%d", egress.Proxy{
		Provider: "home", CloudInit: egress.CloudInit{Inline: squid}, Labels: map[string]string{"country": "cz"},
	})...), site
}

// fleet returns a pool of proxies in memory, enough to lease and not to send requests through. All are ready.
func fleet(proxies ...egress.Proxy) *egress.Pool {
	for i := range proxies {
		proxies[i].Provider, proxies[i].CloudInit.Inline = "fake", squid
	}
	return started(egress.Config{Name: "demo", Providers: []provider.Provider{fake.New(fake.Config{})}}, proxies...)
}

// must is for steps that don't fail here.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func end(pool *egress.Pool, site *httptest.Server) {
	if err := pool.Close(context.Background()); err != nil {
		panic(err)
	}
	if site != nil {
		site.Close()
	}
}

func Example() {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))
	defer site.Close()
	ctx := context.Background()

	pool, err := egress.New(egress.Config{
		Name:           "crawl",
		Providers:      []provider.Provider{fake.New(fake.Config{Name: "home", Serve: true})}, // a real backend here
		DestroyOnClose: true,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close(ctx)
	err = pool.Apply(ctx, egress.Replicate(2, "crawl-%02d", egress.Proxy{
		Provider:  "home",
		CloudInit: egress.CloudInit{Inline: "#cloud-config\npackages: [squid]\n"},
	})...)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := pool.Start(ctx); err != nil {
		fmt.Println(err)
		return
	}
	resp, err := pool.Client(egress.Request{Retries: 2}).Get(site.URL) // waits until a proxy is ready
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close() // gives the proxy back
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: hello <nil>
}

func ExampleNew() {
	_, err := egress.New(egress.Config{Name: "My Crawl", MaxParallel: -1})
	fmt.Println(err)
	// Output:
	// egress: config: Name "My Crawl" is no DNS label, want lower-case letters, digits and hyphens, a letter first
	// egress: config: MaxParallel is -1, want at least 1
}

func ExamplePool_Client() {
	pool, site := demo()
	defer end(pool, site)

	client := pool.Client(egress.Request{Labels: map[string]string{"country": "cz"}, Retries: 2})
	resp, err := client.Get(site.URL + "/page")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close() // gives the proxy back
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: you asked for /page <nil>
}

func ExamplePool_Acquire() {
	pool, site := demo()
	defer end(pool, site)

	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	lease, err := pool.Acquire(ctx, egress.Request{Key: "session-42", Target: "shop.example"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Release()
	resp, err := lease.Client().Get(site.URL)
	if err != nil {
		lease.Report(egress.Failed(err))
		return
	}
	resp.Body.Close()
	lease.Report(egress.OK)
	fmt.Println(resp.StatusCode, lease.Moved())
	// Output: 200 false
}

func ExamplePool_TryAcquire() {
	pool, site := demo()
	defer end(pool, site)

	request := egress.Request{Exclude: []string{"proxy-1"}}
	for range egress.DefaultMaxLeases {
		lease, err := pool.TryAcquire(request)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer lease.Release()
	}
	_, err := pool.TryAcquire(request)
	fmt.Println(errors.Is(err, egress.ErrExhausted))
	// Output: true
}

func ExampleLease_Report() {
	pool, site := demo()
	defer end(pool, site)

	for range 2 {
		lease, err := pool.TryAcquire(egress.Request{Target: "shop.example"})
		if err != nil {
			fmt.Println(err)
			return
		}
		lease.Report(egress.Banned(time.Hour)) // the shop has had enough of this address
		lease.Release()
	}
	_, err := pool.TryAcquire(egress.Request{Target: "shop.example"})
	exhausted, _ := errors.AsType[*egress.ExhaustedError](err)
	fmt.Println("cooling down:", exhausted.Cooling)
	lease, err := pool.TryAcquire(egress.Request{Target: "blog.example"})
	fmt.Println("for another site:", err)
	lease.Release()
	// Output:
	// cooling down: 2
	// for another site: <nil>
}

func ExamplePool_Do() {
	pool, site := demo()
	defer end(pool, site)

	err := pool.Do(context.Background(), egress.Request{}, func(ctx context.Context, lease *egress.Lease) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodHead, site.URL, nil)
		if err != nil {
			return err
		}
		resp, err := lease.Client().Do(req)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	})
	fmt.Println(err, pool.Stats().Leases)
	// Output: <nil> 0
}

func ExamplePool_Apply() {
	pool, site := demo()
	defer end(pool, site)

	err := pool.Apply(context.Background(), egress.Proxy{
		Name: "theirs", Mode: egress.External, Endpoint: "http://user:password@192.0.2.7:8080", Labels: map[string]string{"country": "de"},
	}, egress.Proxy{Name: "wrong", Provider: "nowhere"})
	fmt.Println(err)
	// Output:
	// egress: proxy "wrong": Provider "nowhere" is unknown, want one of "home"
	// egress: proxy "wrong": CloudInit has neither source, want exactly one of Inline and Secret
}

func ExamplePool_Proxies() {
	pool, site := demo()
	defer end(pool, site)

	for _, s := range pool.Proxies() {
		fmt.Println(s.Name, s.Phase, s.Instance, s.Leases, "of", s.MaxLeases)
	}
	// Output:
	// proxy-1 Ready demo--proxy-1--1 0 of 5
	// proxy-2 Ready demo--proxy-2--1 0 of 5
}

func ExampleReplicate() {
	for _, p := range egress.Replicate(3, "crawl-%02d", egress.Proxy{Provider: "home", Image: "debian-13"}) {
		fmt.Println(p)
	}
	// Output:
	// proxy crawl-01 (managed, provider home, image debian-13)
	// proxy crawl-02 (managed, provider home, image debian-13)
	// proxy crawl-03 (managed, provider home, image debian-13)
}

// Proxies that somebody else runs are declared by their address. The pool probes and leases them and touches nothing.
func ExamplePool_Apply_external() {
	theirs := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(*httputil.ProxyRequest) {}}) // a plain forward proxy
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") }))
	pool := started(egress.Config{Name: "demo"}, egress.Proxy{
		Name: "theirs", Mode: egress.External, Endpoint: theirs.URL, Labels: map[string]string{"country": "de"},
	})
	defer theirs.Close()
	defer end(pool, site)

	resp, err := pool.Client(egress.Request{Labels: map[string]string{"country": "de"}}).Get(site.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: hello <nil>
}

func ExamplePool_Refresh() {
	gone := make(chan string, 1)
	pool := started(egress.Config{
		Name: "demo", Providers: []provider.Provider{fake.New(fake.Config{})},
		Observer: func(e egress.Event) {
			if e.Kind == egress.EventGone && e.Proxy == "b" {
				gone <- e.Instance
			}
		},
	},
		egress.Proxy{Name: "a", Provider: "fake", CloudInit: egress.CloudInit{Inline: squid}},
		egress.Proxy{Name: "b", Provider: "fake", CloudInit: egress.CloudInit{Inline: squid}},
	)

	if err := pool.Refresh("b"); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(<-gone, "is gone")
	for _, s := range pool.Proxies() {
		fmt.Println(s.Name, s.Phase, s.Instance)
	}
	fmt.Println(pool.Refresh("c"))
	end(pool, nil)
	// Output:
	// demo--b--1 is gone
	// a Ready demo--a--1
	// b Ready demo--b--2
	// egress: unknown proxy: "c" is not a managed proxy of this pool
}

func ExamplePool_Stats() {
	pool := fleet(egress.Proxy{Name: "a"}, egress.Proxy{Name: "b"})
	defer end(pool, nil)

	lease := must(pool.TryAcquire(egress.Request{}))
	s := pool.Stats()
	fmt.Println(s.Ready, "of", s.Proxies, "ready,", s.Leases, "lease held")
	lease.Release()
	s = pool.Stats()
	fmt.Println(s.Granted, "granted,", s.Leases, "held")
	// Output:
	// 2 of 2 ready, 1 lease held
	// 1 granted, 0 held
}

func ExamplePool_ProviderHealth() {
	home := fake.New(fake.Config{Name: "home", Hosts: []string{"rack-1", "rack-2"}})
	home.SetHostDown("rack-2", true)
	checked := make(chan string, 2)
	pool := started(egress.Config{
		Name: "demo", Providers: []provider.Provider{home},
		Observer: func(e egress.Event) {
			if e.Kind == egress.EventTarget { // of each target at first, then whenever it changes
				checked <- e.Message
			}
		},
	})
	defer end(pool, nil)

	<-checked
	<-checked
	for _, t := range pool.ProviderHealth() {
		fmt.Println(t.Provider, t.Target, t.Ready, t.Reason)
	}
	// Output:
	// home rack-1 true Ready
	// home rack-2 false Unreachable
}

func ExamplePool_Handler() {
	pool := fleet(egress.Proxy{Name: "a"}, egress.Proxy{Name: "b"})
	defer end(pool, nil)

	mux := http.NewServeMux()
	mux.Handle("/egress/", http.StripPrefix("/egress", pool.Handler()))
	server := httptest.NewServer(mux)
	defer server.Close()

	resp, err := http.Get(server.URL + "/egress/healthz")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(body), err)
	// Output:
	// 200 ok: 2 of 2 proxies are ready
	//  <nil>
}

// Close waits for leases as long as its context lives, and then revokes them. Their contexts say so.
func ExamplePool_Close() {
	pool, err := egress.New(egress.Config{Name: "demo", Providers: []provider.Provider{fake.New(fake.Config{})}})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	err = errors.Join(
		pool.Apply(ctx, egress.Proxy{Name: "a", Provider: "fake", CloudInit: egress.CloudInit{Inline: squid}}),
		pool.Start(ctx),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	lease, err := pool.Acquire(ctx, egress.Request{})
	if err != nil {
		fmt.Println(err)
		return
	}

	closing, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	fmt.Println(pool.Close(closing))
	fmt.Println(context.Cause(lease.Context()))
	_, err = pool.TryAcquire(egress.Request{})
	fmt.Println(err)
	// Output:
	// <nil>
	// egress: lease on proxy a (demo--a--1) was revoked: closed
	// egress: pool is closed
}

func ExampleRequest_key() {
	pool := fleet(egress.Replicate(3, "proxy-%d", egress.Proxy{})...)
	defer end(pool, nil)

	request := egress.Request{Key: "session-42"}
	first := must(pool.TryAcquire(request))
	defer first.Release()
	second := must(pool.TryAcquire(request)) // the same one, although others have less to do
	defer second.Release()
	fmt.Println(first.Instance() == second.Instance(), second.Moved())

	request.Exclude = []string{first.Proxy()} // what binds the key must not be used, so the session moves
	third := must(pool.TryAcquire(request))
	defer third.Release()
	fmt.Println(first.Instance() == third.Instance(), third.Moved())
	// Output:
	// true false
	// false true
}

func ExampleRequest_labels() {
	pool := fleet(
		egress.Proxy{Name: "prague", Labels: map[string]string{"country": "cz", "kind": "home"}},
		egress.Proxy{Name: "berlin", Labels: map[string]string{"country": "de", "kind": "home"}},
	)
	defer end(pool, nil)

	lease := must(pool.TryAcquire(egress.Request{Labels: map[string]string{"country": "de"}}))
	defer lease.Release()
	fmt.Println(lease.Proxy())
	_, err := pool.TryAcquire(egress.Request{Labels: map[string]string{"country": "fr"}}) // Acquire would not wait either
	fmt.Println(errors.Is(err, egress.ErrNoMatch), err)
	// Output:
	// berlin
	// true egress: no declared proxy can be leased with labels country=fr
}

func ExampleRequest_exclude() {
	pool := fleet(egress.Replicate(2, "proxy-%d", egress.Proxy{})...)
	defer end(pool, nil)

	lease := must(pool.TryAcquire(egress.Request{Exclude: []string{"proxy-1"}}))
	defer lease.Release()
	fmt.Println(lease.Proxy())
	// Output: proxy-2
}

func ExampleRequest_target() {
	pool := fleet(egress.Proxy{Name: "a"})
	defer end(pool, nil)

	shop := egress.Request{Target: "shop.example"}
	lease := must(pool.TryAcquire(shop))
	lease.Report(egress.Banned(time.Hour))
	lease.Release()

	_, err := pool.TryAcquire(shop)
	fmt.Println(errors.Is(err, egress.ErrExhausted))
	lease = must(pool.TryAcquire(egress.Request{Target: "blog.example"}))
	defer lease.Release()
	fmt.Println(lease.Proxy())
	// Output:
	// true
	// a
}

func ExampleBroken() {
	home := fake.New(fake.Config{Name: "home", Serve: true})
	pool := started(egress.Config{Name: "demo", Providers: []provider.Provider{home}}, egress.Replicate(2, "proxy-%d", egress.Proxy{
		Provider: "home", CloudInit: egress.CloudInit{Inline: squid},
	})...)
	defer end(pool, nil)

	lease := must(pool.TryAcquire(egress.Request{}))
	for _, x := range home.Instances() {
		if x.Name == lease.Instance() {
			_ = home.Kill(x.ID) // its squid has crashed
		}
	}
	_, err := lease.Client().Get("http://shop.example/") // reports a closed port as Broken by itself
	lease.Report(egress.Broken(err))
	lease.Release()

	for range 3 {
		other := must(pool.TryAcquire(egress.Request{}))
		defer other.Release()
		fmt.Println(other.Proxy() != lease.Proxy())
	}
	// Output:
	// true
	// true
	// true
}

// Clients that take a proxy's address, such as a browser or a program in another language, get it from a lease.
func ExampleLease_ProxyURL() {
	pool, site := demo()
	defer end(pool, site)

	lease := must(pool.TryAcquire(egress.Request{}))
	defer lease.Release()
	proxy := must(url.Parse(lease.ProxyURL()))
	other := &http.Client{Transport: &http.Transport{Proxy: http.ProxyURL(proxy), DisableKeepAlives: true}}
	resp, err := other.Get(site.URL + "/elsewhere")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: you asked for /elsewhere <nil>
}

func ExampleSecretDir() {
	dir := must(os.MkdirTemp("", ""))
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "squid.yaml"), []byte(squid), 0o600); err != nil {
		fmt.Println(err)
		return
	}
	pool := started(egress.Config{
		Name: "demo", Providers: []provider.Provider{fake.New(fake.Config{})}, Secrets: egress.SecretDir(dir),
	}, egress.Proxy{Name: "a", Provider: "fake", CloudInit: egress.CloudInit{Secret: "squid.yaml"}})
	defer end(pool, nil)

	fmt.Println(pool.Proxies()[0].Phase)
	_, err := egress.SecretDir(dir).Secret(context.Background(), "elsewhere.yaml")
	fmt.Println(errors.Is(err, egress.ErrSecretNotFound), err)
	// Output:
	// Ready
	// true egress: secret not found: "elsewhere.yaml"
}

// A crawler's own test needs neither a network nor real time: with a fake in memory, hours pass in milliseconds.
func Example_testing() {
	// In a test, the body of synctest.Test(t, func(t *testing.T) { … }).
	backend := fake.New(fake.Config{BootTime: 10 * time.Millisecond})
	pool, err := egress.New(egress.Config{Name: "test", Providers: []provider.Provider{backend}, DestroyOnClose: true})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	err = errors.Join(
		pool.Apply(ctx, egress.Proxy{Name: "a", Provider: "fake", CloudInit: egress.CloudInit{Inline: "#cloud-config\n"}}),
		pool.Start(ctx),
		pool.WaitReady(ctx, 1),
	)
	fmt.Println(err, pool.Stats().Ready, "of", pool.Stats().Proxies)
	fmt.Println(pool.Close(ctx), len(backend.Instances()), "instances left")
	// Output:
	// <nil> 1 of 1
	// <nil> 0 instances left
}
