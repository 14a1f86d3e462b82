// Crawler crawls a demo site through a fleet of proxies that it creates itself, all on loopback.
//
// In the middle of the crawl it changes the proxies' spec, so that all of them are replaced one after the other, kills
// one proxy, and has the site ban another one. Not a page may be lost over that.
//
//	go run ./examples/crawler
//	go run ./examples/crawler -n 1000 -workers 50 -proxies 10 -json
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"text/tabwriter"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func main() {
	var o options
	flag.IntVar(&o.pages, "n", 300, "pages of the demo site")
	flag.IntVar(&o.workers, "workers", 20, "crawler workers")
	flag.IntVar(&o.proxies, "proxies", 5, "proxies, at least 3")
	flag.BoolVar(&o.json, "json", false, "print the result as JSON")
	flag.Parse()
	if o.pages < 1 || o.workers < 1 || o.proxies < 3 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "crawler: want -n and -workers above 0, -proxies of at least 3, and no other arguments")
		os.Exit(2)
	}
	os.Exit(crawlAndReport(o))
}

// crawlAndReport returns the exit status.
func crawlAndReport(o options) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	result, err := run(ctx, o)
	if result != nil {
		result.print(o.json)
	}
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "crawler: interrupted, closed cleanly")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "crawler:", err)
		return 1
	}
	return 0
}

type options struct {
	pages, workers, proxies int
	json                    bool
}

// result is what a crawl came to.
type result struct {
	Pages         int            `json:"pages"`
	Failed        []string       `json:"failed"`
	Tries         int            `json:"tries"`
	Seconds       float64        `json:"seconds"`
	Requests      map[string]int `json:"requests_per_proxy"`
	Replaced      int            `json:"replaced"`
	Banned        string         `json:"banned_proxy"`
	Killed        string         `json:"killed_proxy"`
	WaitP50Millis float64        `json:"wait_p50_ms"`
	WaitP99Millis float64        `json:"wait_p99_ms"`
	WaitMaxMillis float64        `json:"wait_max_ms"`
	LeakedLeases  uint64         `json:"leaked_leases"`
}

func run(ctx context.Context, o options) (*result, error) {
	site, err := newSite(o.pages)
	if err != nil {
		return nil, err
	}
	defer site.close(context.Background())

	// A real crawler has kvm.New or gcp.New here.
	backend := fake.New(fake.Config{Name: "home", BootTime: 200 * time.Millisecond, Serve: true})
	pool, err := egress.New(egress.Config{
		Name:           "demo",
		Providers:      []provider.Provider{backend},
		DestroyOnClose: true,
		ListInterval:   time.Second,
		StoppedGrace:   time.Second,
		UnhealthyGrace: time.Second,
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := pool.Close(closing); err != nil {
			fmt.Fprintln(os.Stderr, "crawler: close:", err)
		}
	}()

	proxies := egress.Replicate(o.proxies, "crawl-%02d", egress.Proxy{
		Provider:  "home",
		Image:     "debian-13",
		CloudInit: egress.CloudInit{Inline: "#cloud-config\npackages: [squid]\n"},
		Probe:     egress.Probe{URL: site.url + "/204", Status: 204, Interval: time.Second},
	})
	if err := pool.Apply(ctx, proxies...); err != nil {
		return nil, err
	}
	if err := pool.Start(ctx); err != nil {
		return nil, err
	}
	if err := pool.WaitReady(ctx, o.proxies); err != nil {
		return nil, err
	}

	c := newCrawl(pool, site, o)
	trouble := func(done int) {
		switch done {
		case o.pages / 4:
			for i := range proxies {
				proxies[i].MemoryMiB = 1024
			}
			if err := pool.Apply(ctx, proxies...); err != nil {
				c.fail(fmt.Errorf("the new spec was refused: %w", err))
			}
			c.say("changed the spec: every proxy is replaced, one after the other")
		case o.pages / 2:
			if name, ok := kill(backend, pool, proxies[1].Name); ok {
				c.note(func(r *result) { r.Killed = name })
				c.say("killed the proxy on " + name)
			}
		case o.pages * 2 / 3:
			name := proxies[2].Name
			site.ban(name)
			c.note(func(r *result) { r.Banned = name })
			c.say("the site bans " + name)
		}
	}
	r, err := c.run(ctx, trouble)
	if err == nil {
		err = c.waitReplaced(ctx, o.proxies)
	}
	stats := pool.Stats()
	r.Replaced, r.LeakedLeases = int(stats.Replaced), stats.Leaked
	if err == nil && (len(r.Failed) > 0 || r.Pages != o.pages || r.LeakedLeases > 0) {
		err = fmt.Errorf("%d of %d pages came, %d failed, %d leases leaked", r.Pages, o.pages, len(r.Failed), r.LeakedLeases)
	}
	return r, err
}

// kill ends the proxy process of a proxy's instance; the machine goes on running.
func kill(backend *fake.Provider, pool *egress.Pool, proxy string) (string, bool) {
	for _, s := range pool.Proxies() {
		if s.Name != proxy || s.Phase != egress.PhaseReady {
			continue
		}
		for _, x := range backend.Instances() {
			if x.Name == s.Instance {
				return x.Name, backend.Kill(x.ID) == nil
			}
		}
	}
	return "", false
}

func (r *result) print(asJSON bool) {
	if asJSON {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		if err := out.Encode(r); err != nil {
			fmt.Fprintln(os.Stderr, "crawler:", err)
		}
		return
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t"+format+"\n", append([]any{name}, args...)...)
	}
	fmt.Fprintln(w)
	row("pages", "%d in %.1f s", r.Pages, r.Seconds)
	row("failed pages", "%d", len(r.Failed))
	row("requests", "%d, %d of them again after trouble with a proxy", r.Tries, r.Tries-r.Pages)
	row("instances replaced", "%d", r.Replaced)
	row("killed", "%s", orNone(r.Killed))
	row("banned by the site", "%s", orNone(r.Banned))
	row("wait for a proxy", "p50 %.1f ms, p99 %.1f ms, longest %.1f ms", r.WaitP50Millis, r.WaitP99Millis, r.WaitMaxMillis)
	row("leases leaked", "%d", r.LeakedLeases)
	fmt.Fprintln(w)
	fmt.Fprintln(w, "instance\trequests")
	names := make([]string, 0, len(r.Requests))
	for name := range r.Requests {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(w, "%s\t%d\n", name, r.Requests[name])
	}
	w.Flush()
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

var errTooManyTries = errors.New("given up after too many tries")
