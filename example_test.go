package egress_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// demo returns a started pool of two loopback proxies, both ready, and a site to crawl.
func demo() (*egress.Pool, *httptest.Server) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "you asked for %s", r.URL.Path)
	}))
	pool, err := egress.New(egress.Config{
		Name:           "demo",
		Providers:      []provider.Provider{fake.New(fake.Config{Name: "home", Serve: true})},
		DestroyOnClose: true,
	})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err = errors.Join(
		pool.Apply(ctx, egress.Replicate(2, "proxy-%d", egress.Proxy{
			Provider:  "home",
			CloudInit: egress.CloudInit{Inline: "#cloud-config\npackages: [squid]\n"},
			Labels:    map[string]string{"country": "cz"},
		})...),
		pool.Start(ctx),
		pool.WaitReady(ctx, 2),
	)
	if err != nil {
		panic(err)
	}
	return pool, site
}

func end(pool *egress.Pool, site *httptest.Server) {
	if err := pool.Close(context.Background()); err != nil {
		panic(err)
	}
	site.Close()
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
