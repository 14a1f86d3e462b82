// Bench measures the pool beside its peers in one run and prints a table of medians, spreads and ratios:
//
//	go run ./internal/bench                  everything, within 5 minutes
//	go run ./internal/bench -quick           less of it, within a minute
//	go run ./internal/bench -raw new.txt     also each turn as a line for benchstat
//
// benchstat compares two such files, or the peers in one: benchstat -col /by new.txt. Everything is on loopback. squid,
// genisoimage, node and npm are used where they are, else their rows are skipped.
//
// It is a module of its own, so that the peers are in nobody's go.mod. What is in Go is a Go benchmark too:
// go test -bench . ./internal/bench.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/cloudinit"
	"crawl.example.com/egress/internal/plan"
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

// subjects are what is measured in Go, each made anew in the process that measures it.
var subjects = map[string]func(sites) (w work, done func()){
	"puddle":           puddleLeases(leaseLoop),
	"puddle-contended": puddleLeases(contendedLoop),
	"colly":            collySwitcher,
	"lease-10":         leases(10, plain, leaseLoop),
	"lease-1000":       leases(1000, plain, leaseLoop),
	"lease-5000":       leases(5000, plain, leaseLoop),
	"lease-20000":      leases(20_000, plain, leaseLoop),
	"label-10":         leases(10, labelled, leaseLoop),
	"label-5000":       leases(5000, labelled, leaseLoop),
	"label-20000":      leases(20_000, labelled, leaseLoop),
	"key-10":           leases(10, sticky, leaseLoop),
	"key-5000":         leases(5000, sticky, leaseLoop),
	"key-20000":        leases(20_000, sticky, leaseLoop),
	"contended":        leases(10, plain, contendedLoop),

	"bare-1":   throughOne(1, func(s sites) string { return s.Proxies[0] }),
	"bare-16":  throughOne(16, func(s sites) string { return s.Proxies[0] }),
	"squid":    throughOne(16, func(s sites) string { return s.Squid }),
	"chain":    throughOne(16, func(s sites) string { return s.Chain }),
	"pool-1":   throughPool(1, 1),
	"pool-16":  throughPool(16, 1),
	"pool-all": throughPool(16, manyProxies),

	"overlap":     overlap,
	"first-lease": firstLease,
	"memory":      memory,
	"plan":        planPass,
	"seed":        seedISO,
	"genisoimage": genisoimage,
}

// pool returns a started pool of n external proxies, every other one with the label country=cz, that are the given
// addresses in turn.
func pool(n, maxLeases int, addresses []string) (p *egress.Pool, done func()) {
	proxies := make([]egress.Proxy, n)
	for i := range proxies {
		proxies[i] = egress.Proxy{
			Name: fmt.Sprintf("p-%d", i), Mode: egress.External, Endpoint: addresses[i%len(addresses)],
			MaxLeases: &maxLeases, Labels: map[string]string{"country": []string{"cz", "de"}[i%2]},
			Probe: egress.Probe{Interval: time.Hour},
		}
	}
	p = must(egress.New(egress.Config{Name: "bench"}))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(0, p.Apply(ctx, proxies...))
	must(0, p.Start(ctx))
	must(0, p.WaitReady(ctx, n))
	return p, func() { must(0, p.Close(context.Background())) }
}

// A loop calls take n times; what take gets is the number of the call.
type loop func(n int, take func(i int))

func leaseLoop(n int, take func(int)) {
	for i := range n {
		take(i)
	}
}

// perProcessor is how many goroutines contend for each processor.
const perProcessor = 8

func contendedLoop(n int, take func(int)) {
	workers := perProcessor * runtime.GOMAXPROCS(0)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := w; i < n; i += workers {
				take(i)
			}
		})
	}
	all.Wait()
}

// leases measures Acquire and Release.
func leases(n int, request func(i int) egress.Request, each loop) func(sites) (work, func()) {
	return func(s sites) (work, func()) {
		p, done := pool(n, 5, s.Proxies)
		ctx := context.Background()
		return func(n int) map[string]float64 {
			each(n, func(i int) { must(p.Acquire(ctx, request(i))).Release() })
			return nil
		}, done
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

// puddleLeases measures the same on a pool of as many places as 10 proxies have.
func puddleLeases(each loop) func(sites) (work, func()) {
	return func(sites) (work, func()) {
		p := must(puddle.NewPool(&puddle.Config[int]{
			Constructor: func(context.Context) (int, error) { return 1, nil }, Destructor: func(int) {}, MaxSize: 50,
		}))
		ctx := context.Background()
		return func(n int) map[string]float64 {
			each(n, func(int) { must(p.Acquire(ctx)).Release() })
			return nil
		}, p.Close
	}
}

// collySwitcher measures what colly does for each request: it picks a URL, holds nothing and gives nothing back.
func collySwitcher(sites) (work, func()) {
	urls := make([]string, 10)
	for i := range urls {
		urls[i] = fmt.Sprintf("http://192.0.2.%d:3128", i+1)
	}
	choose := must(proxy.RoundRobinProxySwitcher(urls...))
	r := must(http.NewRequestWithContext(context.Background(), http.MethodGet, "http://site.example/", nil))
	return func(n int) map[string]float64 {
		for range n {
			must(choose(r))
		}
		return nil
	}, func() {}
}

// throughOne measures requests of a bare transport through one fixed proxy. It keeps as many idle connections as the
// transports of the pool.
func throughOne(workers int, proxy func(sites) string) func(sites) (work, func()) {
	return func(s sites) (work, func()) {
		transport := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: proxy(s)}), MaxIdleConnsPerHost: 16}
		return requests(&http.Client{Transport: transport}, workers, s.Origin), transport.CloseIdleConnections
	}
}

// throughPool measures requests of the pool's client.
func throughPool(workers, proxies int) func(sites) (work, func()) {
	return func(s sites) (work, func()) {
		p, done := pool(proxies, 16, s.Proxies)
		return requests(p.Client(egress.Request{}), workers, s.Origin), done
	}
}

// requests fetches a small page again and again.
func requests(c *http.Client, workers int, target string) work {
	fetch := func() {
		resp, err := c.Get(target)
		must(0, err)
		defer resp.Body.Close()
		must(io.Copy(io.Discard, resp.Body))
		if resp.StatusCode != http.StatusOK {
			panic(resp.Status)
		}
	}
	return func(n int) map[string]float64 {
		took := make([]time.Duration, n)
		var next atomic.Int64
		var all sync.WaitGroup
		begin := time.Now()
		for range workers {
			all.Go(func() {
				for {
					i := int(next.Add(1)) - 1
					if i >= n {
						return
					}
					begin := time.Now()
					fetch()
					took[i] = time.Since(begin)
				}
			})
		}
		all.Wait()
		rate := float64(n) / time.Since(begin).Seconds()
		slices.Sort(took)
		return map[string]float64{"req/s": rate, "p50-ns": float64(took[n/2]), "p99-ns": float64(took[n*99/100])}
	}
}

// overlap has 30 workers hold one of 10 proxies that bear one lease each for a millisecond, n times in all, and counts
// how often one was given out that somebody held.
func overlap(s sites) (work, func()) {
	p, done := pool(10, 1, s.Proxies)
	return func(n int) map[string]float64 {
		var holders [10]atomic.Int64
		var most, beyond, next atomic.Int64
		var workers sync.WaitGroup
		for range 30 {
			workers.Go(func() {
				for next.Add(1) <= int64(n) {
					l := must(p.Acquire(context.Background(), egress.Request{}))
					var i int
					must(fmt.Sscanf(l.Proxy(), "p-%d", &i))
					now := holders[i].Add(1)
					if now > 1 {
						beyond.Add(1)
					}
					for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
					}
					time.Sleep(time.Millisecond)
					holders[i].Add(-1)
					l.Release()
				}
			})
		}
		workers.Wait()
		return map[string]float64{"overlaps/hold": float64(beyond.Load()) / float64(n), "holders": float64(most.Load())}
	}, done
}

// firstLease measures the time from Start to the first lease on a backend that takes 2 s to boot.
func firstLease(sites) (work, func()) {
	once := func() time.Duration {
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
	return func(n int) map[string]float64 {
		var all time.Duration
		for range n {
			all += once()
		}
		return map[string]float64{"first-ns": float64(all) / float64(n)}
	}, func() {}
}

// memory measures the heap that a ready proxy takes, in a pool of n.
func memory(s sites) (work, func()) {
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	return func(n int) map[string]float64 {
		_, done := pool(1, 1, s.Proxies) // makes what is made once
		done()
		before := heap()
		p, done := pool(n, 1, s.Proxies)
		after := heap()
		runtime.KeepAlive(p)
		done()
		return map[string]float64{"B/proxy": (after - before) / float64(n)}
	}, func() {}
}

// planPass measures a pass of the planner over 10,000 proxies, of which every tenth has a new spec.
func planPass(sites) (work, func()) {
	now := time.Now()
	in := plan.Input{
		Now: now, Providers: []plan.Provider{{Fresh: true}},
		Limits: plan.Limits{
			Surge: 1, MaxUnavailable: 1, MaxParallel: 10, DrainDeadline: time.Minute, BootTimeout: time.Minute, UnhealthyGrace: time.Minute,
			StoppedGrace: time.Minute, LostGrace: time.Minute, OrphanGrace: time.Minute, SuspectDelay: time.Minute, SuspectWindow: time.Minute,
		},
	}
	for i := range 10_000 {
		want := plan.Proxy{
			Name: fmt.Sprintf("p-%05d", i), SpecReady: true, Hash: "h", HashVersion: 1, LastGeneration: 1, MaxAge: 24 * time.Hour,
		}
		if i%10 == 0 {
			want.Hash = "new"
		}
		in.Proxies = append(in.Proxies, want)
		in.Instances = append(in.Instances, plan.Instance{
			Proxy: i, ID: fmt.Sprintf("i-%d", i), Generation: 1, Hash: "h", HashVersion: 1, State: provider.StateRunning,
			StateSince: now.Add(-time.Hour), Created: now.Add(-time.Hour), FirstSeen: now.Add(-time.Hour), Addressed: true, Fit: true, EverFit: true,
		})
	}
	return func(n int) map[string]float64 {
		for range n {
			plan.Next(in)
		}
		return nil
	}, func() {}
}

func theSeed() cloudinit.Seed {
	return cloudinit.Seed{
		UserData: []byte("#cloud-config\npackages: [squid]\n"), MetaData: []byte("instance-id: i\nlocal-hostname: h\n"),
		VendorData: []byte("#!/bin/sh\ntrue\n"), NetworkConfig: []byte("version: 2\n"),
	}
}

// seedISO measures the making of a NoCloud seed image.
func seedISO(sites) (work, func()) {
	s := theSeed()
	return func(n int) map[string]float64 {
		for range n {
			must(s.ISO())
		}
		return nil
	}, func() {}
}

// genisoimage measures the same with the program, files included, as one would without the package.
func genisoimage(sites) (work, func()) {
	dir := must(os.MkdirTemp("", "bench-seed-"))
	s := theSeed()
	files := map[string][]byte{"user-data": s.UserData, "meta-data": s.MetaData, "vendor-data": s.VendorData, "network-config": s.NetworkConfig}
	once := func() {
		for name, content := range files {
			must(0, os.WriteFile(filepath.Join(dir, name), content, 0o600))
		}
		cmd := exec.Command("genisoimage", "-quiet", "-output", "seed.iso", "-volid", "cidata", "-rational-rock", "-joliet",
			"user-data", "meta-data", "vendor-data", "network-config")
		cmd.Dir = dir
		must(cmd.CombinedOutput())
	}
	return func(n int) map[string]float64 {
		for range n {
			once()
		}
		return nil
	}, func() { os.RemoveAll(dir) }
}
