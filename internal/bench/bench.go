// Bench measures the pool beside its peers, in one process and one run, and prints a table of medians and ratios:
//
//	go run ./internal/bench
//
// It is a module of its own, so that the peers are in nobody's go.mod. The same measurements are Go benchmarks, for
// benchstat: go test -bench . ./internal/bench.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
	"github.com/gocolly/colly/v2/proxy"
	"github.com/jackc/puddle/v2"
)

// must ends a measurement that can't be made.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// pool returns a started pool of n external proxies that all are one real proxy, every other one with the label
// country=cz.
func pool(n, maxLeases int) (p *egress.Pool, target string, done func()) {
	server := must(forwardproxy.Start(forwardproxy.Config{}))
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	proxies := make([]egress.Proxy, n)
	for i := range proxies {
		proxies[i] = egress.Proxy{
			Name: fmt.Sprintf("p-%d", i), Mode: egress.External, Endpoint: fmt.Sprintf("127.0.0.1:%d", server.Port()),
			MaxLeases: &maxLeases, Labels: map[string]string{"country": []string{"cz", "de"}[i%2]},
			Probe: egress.Probe{Interval: time.Hour},
		}
	}
	p = must(egress.New(egress.Config{Name: "bench"}))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, err := range []error{p.Apply(ctx, proxies...), p.Start(ctx), p.WaitReady(ctx, n)} {
		must(0, err)
	}
	return p, origin.URL, func() {
		must(0, p.Close(context.Background()))
		server.Close()
		origin.Close()
	}
}

// leases measures Acquire and Release in one goroutine.
func leases(n int, request func(i int) egress.Request) func(*testing.B) {
	return func(b *testing.B) {
		p, _, done := pool(n, 5)
		defer done()
		ctx := context.Background()
		b.ReportAllocs()
		b.ResetTimer()
		for i := range b.N {
			l, err := p.Acquire(ctx, request(i))
			if err != nil {
				b.Fatal(err)
			}
			l.Release()
		}
		b.StopTimer()
	}
}

func plain(int) egress.Request { return egress.Request{} }

var selector = map[string]string{"country": "cz"}

func labelled(int) egress.Request { return egress.Request{Labels: selector} }

var keys = func() (k [10_000]string) {
	for i := range k {
		k[i] = fmt.Sprintf("session-%d", i)
	}
	return k
}()

func sticky(i int) egress.Request { return egress.Request{Key: keys[i%len(keys)]} }

func contended(b *testing.B) {
	p, _, done := pool(10, 5)
	defer done()
	ctx := context.Background()
	b.SetParallelism(8)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l, err := p.Acquire(ctx, egress.Request{})
			if err != nil {
				b.Error(err)
				return
			}
			l.Release()
		}
	})
	b.StopTimer()
}

func puddlePool(n int32) *puddle.Pool[int] {
	return must(puddle.NewPool(&puddle.Config[int]{
		Constructor: func(context.Context) (int, error) { return 1, nil }, Destructor: func(int) {}, MaxSize: n,
	}))
}

func puddleOne(b *testing.B) {
	p := puddlePool(50)
	defer p.Close()
	ctx := context.Background()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		r, err := p.Acquire(ctx)
		if err != nil {
			b.Fatal(err)
		}
		r.Release()
	}
}

func puddleContended(b *testing.B) {
	p := puddlePool(50)
	defer p.Close()
	ctx := context.Background()
	b.SetParallelism(8)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			r, err := p.Acquire(ctx)
			if err != nil {
				b.Error(err)
				return
			}
			r.Release()
		}
	})
}

// collySwitcher measures what colly does for each request: it picks a URL, holds nothing and gives nothing back.
func collySwitcher(b *testing.B) {
	choose := must(proxy.RoundRobinProxySwitcher("http://192.0.2.1:3128", "http://192.0.2.2:3128"))
	r := must(http.NewRequestWithContext(context.Background(), http.MethodGet, "http://site.example/", nil))
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		must(choose(r))
	}
}

func fetch(b *testing.B, c *http.Client, target string) {
	if err := fetchOnce(c, target); err != nil {
		b.Fatal(err)
	}
}

func fetchOnce(c *http.Client, target string) error {
	resp, err := c.Get(target)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// requests measures whole requests through one proxy with the pool's client.
func requests(b *testing.B) {
	p, target, done := pool(1, 100)
	defer done()
	c := p.Client(egress.Request{})
	fetch(b, c, target)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		fetch(b, c, target)
	}
	b.StopTimer()
}

// bareRequests measures the same with a bare transport.
func bareRequests(b *testing.B) {
	server := must(forwardproxy.Start(forwardproxy.Config{}))
	defer server.Close()
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	defer origin.Close()
	transport := &http.Transport{Proxy: http.ProxyURL(must(url.Parse(fmt.Sprintf("http://127.0.0.1:%d", server.Port()))))}
	defer transport.CloseIdleConnections()
	c := &http.Client{Transport: transport}
	fetch(b, c, origin.URL)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		fetch(b, c, origin.URL)
	}
	b.StopTimer()
}

// pairedRequests measures both against the same proxy and site in short turns, so that whatever else the machine does
// falls on both alike, and returns the median times of one request.
func pairedRequests() (pooled, bare float64) {
	const turns, each = 40, 300
	p, target, done := pool(1, 100)
	defer done()
	l := must(p.Acquire(context.Background(), egress.Request{}))
	transport := &http.Transport{Proxy: http.ProxyURL(must(url.Parse(l.ProxyURL())))}
	l.Release()
	defer transport.CloseIdleConnections()
	clients := []*http.Client{p.Client(egress.Request{}), {Transport: transport}}
	times := make([][]float64, 2)
	for turn := range turns {
		for k := range clients {
			c := clients[(k+turn)%2]
			begin := time.Now()
			for range each {
				must(0, fetchOnce(c, target))
			}
			times[(k+turn)%2] = append(times[(k+turn)%2], float64(time.Since(begin))/each)
		}
	}
	return median(times[0]), median(times[1])
}

// firstLease measures the time from Start to the first lease on a backend that takes 2 s to boot.
func firstLease() time.Duration {
	backend := fake.New(fake.Config{BootTime: 2 * time.Second, Serve: true})
	p := must(egress.New(egress.Config{Name: "bench", Providers: []provider.Provider{backend}, DestroyOnClose: true}))
	ctx := context.Background()
	must(0, p.Apply(ctx, egress.Replicate(5, "p-%d", egress.Proxy{Provider: "fake", CloudInit: egress.CloudInit{Inline: "#cloud-config\n"}})...))
	begin := time.Now()
	must(0, p.Start(ctx))
	l := must(p.Acquire(ctx, egress.Request{}))
	took := time.Since(begin)
	l.Release()
	must(0, p.Close(ctx))
	return took
}

// memoryEach measures the heap that a ready proxy takes, in bytes, in a pool of n.
func memoryEach(n int) uint64 {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	_, _, done := pool(1, 1) // makes what is made once
	done()
	before := heap()
	_, _, done = pool(n, 1)
	after := heap()
	done()
	return (after - before) / uint64(n)
}

// overlap counts the most holders of one proxy that bears a single lease, under 30 workers.
func overlap() int64 {
	p, _, done := pool(10, 1)
	defer done()
	var holders [10]atomic.Int64
	var most atomic.Int64
	ended := make(chan struct{})
	for range 30 {
		go func() {
			defer func() { ended <- struct{}{} }()
			for range 20 {
				l := must(p.Acquire(context.Background(), egress.Request{}))
				var i int
				must(fmt.Sscanf(l.Proxy(), "p-%d", &i))
				if n := holders[i].Add(1); n > most.Load() {
					most.Store(n)
				}
				runtime.Gosched()
				holders[i].Add(-1)
				l.Release()
			}
		}()
	}
	for range 30 {
		<-ended
	}
	return most.Load()
}
