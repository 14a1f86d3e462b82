// Nethttp crawls a thousand pages through five proxies with nothing but net/http on top of the pool.
//
//	go run ./examples/nethttp
//
// How to put the pool under a client:
//
//   - One that takes an http.RoundTripper gets pool.Transport(request). Every request leases a proxy for as long as its
//     response is read, so the response's body has to be closed. Nothing is ever sent without a proxy.
//   - One that takes an *http.Client gets pool.Client(request), or a copy with a cookie jar and a timeout, as here. The
//     timeout counts the wait for a free proxy too.
//   - A site that ties its sessions to an address wants one proxy a session: set Request.Key, or hold a lease from
//     pool.Acquire and use lease.Client().
//   - One that takes a proxy's URL only, such as a browser, gets lease.ProxyURL(), which may hold a password. Its
//     connections do not end with the lease: end them before lease.Release, and when lease.Context() ends.
//
// Look at examples/colly for the same crawl in a crawling framework.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"os"
	"os/signal"
	"regexp"
	"sync"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/examples/internal/site"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func main() {
	pages := flag.Int("n", 1000, "pages of the demo site")
	flag.Parse()
	if *pages < 100 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "nethttp: want -n of at least 100, and no other arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	report, err := run(ctx, *pages)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nethttp:", err)
		os.Exit(1)
	}
	fmt.Printf("%d pages, %d of them at the second try\n", len(report.Served), len(report.Busy))
	for proxy, n := range report.Proxies {
		fmt.Printf("%s: %d requests\n", proxy, n)
	}
}

const proxies, workers = 5, 20

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

	client := pool.Client(egress.Request{Retries: 2})
	if client.Jar, err = cookiejar.New(nil); err != nil {
		return report, err
	}
	client.Timeout = time.Minute
	if err := crawl(ctx, client, origin.URL, "/page/1"); err != nil {
		return report, err
	}
	return origin.Check(proxies)
}

// crawl fetches every page that can be reached from the first one, level by level.
func crawl(ctx context.Context, client *http.Client, base, first string) error {
	seen := map[string]bool{first: true}
	for level := []string{first}; len(level) > 0; {
		found, err := fetchAll(ctx, client, base, level)
		if err != nil {
			return err
		}
		level = nil
		for _, link := range found {
			if !seen[link] {
				seen[link] = true
				level = append(level, link)
			}
		}
	}
	return nil
}

// fetchAll fetches pages with all workers and returns their links.
func fetchAll(ctx context.Context, client *http.Client, base string, pages []string) ([]string, error) {
	var mu sync.Mutex // guards the two below
	var links []string
	var errs []error
	var all sync.WaitGroup
	queue := make(chan string)
	for range workers {
		all.Go(func() {
			for page := range queue {
				found, err := fetch(ctx, client, base+page)
				mu.Lock()
				links, errs = append(links, found...), append(errs, err)
				mu.Unlock()
			}
		})
	}
	for _, page := range pages {
		queue <- page
	}
	close(queue)
	all.Wait()
	return links, errors.Join(errs...)
}

var link = regexp.MustCompile(`href="(/[^"]*)"`)

// fetch gets one page, with three more tries while the site is busy. What fails at a proxy, the pool has tried again.
func fetch(ctx context.Context, client *http.Client, url string) ([]string, error) {
	for tries := 1; ; tries++ {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return nil, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close() // gives the proxy back
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode == http.StatusServiceUnavailable && tries <= 3:
			continue
		case resp.StatusCode != http.StatusOK:
			return nil, fmt.Errorf("%s: %s", url, resp.Status)
		}
		var links []string
		for _, m := range link.FindAllStringSubmatch(string(body), -1) {
			links = append(links, m[1])
		}
		return links, nil
	}
}
