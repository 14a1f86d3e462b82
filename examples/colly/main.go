// Colly crawls a thousand pages with github.com/gocolly/colly through five proxies of a pool. Colly's own limits, retries and
// cookies work as ever. It is a module of its own, so that nobody else pays for colly.
//
//	cd examples/colly && go run .
//
// How to put the pool under colly, or under any other client:
//
//   - Colly and others that take an http.RoundTripper get pool.Transport(request): here by Collector.WithTransport. Every
//     request leases a proxy until its response is read. Nothing is ever sent without a proxy.
//   - Do not call colly's SetProxy, SetProxyFunc or SetClient after it: each of them takes the pool out again.
//   - Colly's timeout of 10 s counts the wait for a free proxy too. SetRequestTimeout makes it longer. LimitRule.Parallelism
//     above the number of leases there are, proxies times MaxLeases, only makes requests wait in the pool.
//   - What fails at a proxy, the pool sends again through another one (Request.Retries); OnError is for what the site refuses.
//   - A site that ties its sessions to an address wants one collector for each session, with a transport of its own whose
//     Request.Key names the session.
//   - A client that takes a proxy's URL only gets lease.ProxyURL() of a lease from pool.Acquire; see examples/nethttp.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/gocolly/colly/v2"

	"crawl.example.com/egress"
	"crawl.example.com/egress/examples/internal/site"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func main() {
	pages := flag.Int("n", 1000, "pages of the demo site")
	flag.Parse()
	if *pages < 100 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "colly: want -n of at least 100, and no other arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	report, err := run(ctx, *pages)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "colly:", err)
		os.Exit(1)
	}
	fmt.Printf("%d pages, %d of them at the second try\n", len(report.Served), len(report.Busy))
	for proxy, n := range report.Proxies {
		fmt.Printf("%s: %d requests\n", proxy, n)
	}
}

const proxies, parallel = 5, 20

func run(ctx context.Context, pages int) (report site.Report, err error) {
	origin := site.New(pages)
	defer origin.Close()
	pool, err := egress.New(egress.Config{
		Name:           "demo",
		Providers:      []provider.Provider{fake.New(fake.Config{Name: "home", Serve: true})}, // a real backend here
		DestroyOnClose: true,
	})
	if err != nil {
		return report, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err = errors.Join(err, pool.Close(closing))
	}()
	if err := pool.Apply(ctx, egress.Replicate(proxies, "crawl-%d", egress.Proxy{
		Provider: "home", CloudInit: egress.CloudInit{Inline: "#cloud-config\npackages: [squid]\n"},
		Probe: egress.Probe{URL: origin.URL + "/204", Status: 204},
	})...); err != nil {
		return report, err
	}
	if err := pool.Start(ctx); err != nil {
		return report, err
	}
	if err := pool.WaitReady(ctx, proxies); err != nil {
		return report, err
	}
	if err := crawl(ctx, pool, origin.URL+"/page/1"); err != nil {
		return report, err
	}
	return origin.Check(proxies)
}

// crawl visits every page that can be reached from the first one.
func crawl(ctx context.Context, pool *egress.Pool, first string) error {
	c := colly.NewCollector(colly.Async(), colly.StdlibContext(ctx))
	c.WithTransport(pool.Transport(egress.Request{Retries: 2}))
	c.SetRequestTimeout(time.Minute)
	if err := c.Limit(&colly.LimitRule{DomainGlob: "*", Parallelism: parallel}); err != nil {
		return err
	}
	var mu sync.Mutex // guards the two below
	var errs []error
	tries := map[string]int{} // by URL; a colly.Context is shared by all pages that were found from one
	fail := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
	}
	c.OnHTML("a[href]", func(e *colly.HTMLElement) {
		err := e.Request.Visit(e.Attr("href"))
		if _, visited := errors.AsType[*colly.AlreadyVisitedError](err); err != nil && !visited {
			fail(err)
		}
	})
	c.OnError(func(r *colly.Response, err error) {
		url := r.Request.URL.String()
		mu.Lock()
		tries[url]++
		again := r.StatusCode == http.StatusServiceUnavailable && tries[url] <= 3
		mu.Unlock()
		if again {
			err = r.Request.Retry()
		}
		if err != nil {
			fail(fmt.Errorf("%s: %w", url, err))
		}
	})
	if err := c.Visit(first); err != nil {
		return err
	}
	c.Wait()
	return errors.Join(errs...)
}
