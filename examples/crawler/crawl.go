package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress"
)

// crawl fetches every page that can be reached from the first one.
type crawl struct {
	pool     *egress.Pool
	site     *site
	options  options
	terminal bool

	// mu guards everything below.
	mu      sync.Mutex
	queue   []task
	more    chan struct{} // closed and made anew when there is more to do, or nothing left
	open    int           // tasks queued or under way
	seen    map[string]bool
	waits   []time.Duration
	result  result
	err     error
	printed time.Time
}

type task struct {
	url   string
	tries int
}

func newCrawl(pool *egress.Pool, site *site, o options) *crawl {
	c := &crawl{pool: pool, site: site, options: o, more: make(chan struct{}), seen: map[string]bool{}}
	c.result.Requests = map[string]int{}
	if info, err := os.Stderr.Stat(); err == nil {
		c.terminal = info.Mode()&os.ModeCharDevice != 0
	}
	return c
}

// run crawls with all workers. trouble is called with the number of pages that have come, once for each.
func (c *crawl) run(ctx context.Context, trouble func(pages int)) (*result, error) {
	begin := time.Now()
	c.add(c.site.url + "/page/1")
	var workers sync.WaitGroup
	for range c.options.workers {
		workers.Go(func() {
			for {
				t, ok := c.next(ctx)
				if !ok {
					return
				}
				c.work(ctx, t, trouble)
			}
		})
	}
	workers.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terminal {
		fmt.Fprintln(os.Stderr)
	}
	r := c.result
	r.Seconds = time.Since(begin).Seconds()
	slices.Sort(c.waits)
	if n := len(c.waits); n > 0 {
		r.WaitP50Millis, r.WaitP99Millis = millis(c.waits[n/2]), millis(c.waits[n*99/100])
		r.WaitMaxMillis = millis(c.waits[n-1])
	}
	if ctx.Err() != nil {
		return &r, context.Cause(ctx)
	}
	return &r, c.err
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// add queues a page that was not seen before.
func (c *crawl) add(url string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen[url] {
		return
	}
	c.seen[url] = true
	c.open++
	c.pushLocked(task{url: url})
}

func (c *crawl) pushLocked(t task) {
	c.queue = append(c.queue, t)
	c.wakeLocked()
}

func (c *crawl) wakeLocked() {
	close(c.more)
	c.more = make(chan struct{})
}

// next waits for a task; it returns false when nothing is left to do.
func (c *crawl) next(ctx context.Context) (task, bool) {
	for {
		c.mu.Lock()
		if len(c.queue) > 0 {
			t := c.queue[0]
			c.queue = c.queue[1:]
			c.mu.Unlock()
			return t, true
		}
		more, open := c.more, c.open
		c.mu.Unlock()
		if open == 0 {
			return task{}, false
		}
		select {
		case <-more:
		case <-ctx.Done():
			return task{}, false
		}
	}
}

// maxTries is how often a page is tried. Each try uses a proxy that the pool holds to be fit.
const maxTries = 20

// work fetches one page and queues what it links to, or the page again when the proxy was at fault.
func (c *crawl) work(ctx context.Context, t task, trouble func(int)) {
	t.tries++
	links, err := c.fetch(ctx, t.url)
	c.mu.Lock()
	c.result.Tries++
	if err != nil && ctx.Err() == nil && t.tries < maxTries {
		c.pushLocked(t)
		c.mu.Unlock()
		return
	}
	if err != nil {
		if t.tries >= maxTries {
			err = fmt.Errorf("%w: %w", errTooManyTries, err)
		}
		c.result.Failed = append(c.result.Failed, t.url+": "+err.Error())
	} else {
		c.result.Pages++
	}
	pages := c.result.Pages
	c.progressLocked()
	c.mu.Unlock()
	if err == nil {
		trouble(pages)
	}
	for _, link := range links {
		c.add(c.site.url + link)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	if c.open == 0 {
		c.wakeLocked()
	}
}

var linkPattern = regexp.MustCompile(`href="([^"]+)"`)

// fetch leases a proxy, gets one page through it and tells the pool how that went.
func (c *crawl) fetch(ctx context.Context, url string) ([]string, error) {
	begin := time.Now()
	lease, err := c.pool.Acquire(ctx, egress.Request{Target: c.site.url})
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	waited := time.Since(begin)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := lease.Client().Do(req)
	if err != nil {
		return nil, err // the pool has heard of it already
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	c.mu.Lock()
	c.waits = append(c.waits, waited)
	c.result.Requests[lease.Instance()]++
	c.mu.Unlock()
	switch {
	case err != nil:
		lease.Report(egress.Failed(err))
		return nil, err
	case resp.StatusCode == http.StatusTooManyRequests:
		lease.Report(egress.Banned(time.Minute))
		return nil, fmt.Errorf("the site bans %s", lease.Proxy())
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("the site answered %s", resp.Status)
	}
	lease.Report(egress.OK)
	var links []string
	for _, m := range linkPattern.FindAllStringSubmatch(string(body), -1) {
		links = append(links, m[1])
	}
	return links, nil
}

// waitReplaced waits until the new spec is everywhere and every proxy works again.
func (c *crawl) waitReplaced(ctx context.Context, proxies int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		left := proxies
		var old []string
		for _, s := range c.pool.Proxies() {
			if s.Phase == egress.PhaseReady && s.Generation > 1 && s.Reason == "" {
				left--
			} else {
				old = append(old, fmt.Sprintf("%s is %s", s.Name, s.Phase))
			}
		}
		if left <= 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not every proxy was replaced: %s", strings.Join(old, ", "))
		}
	}
}

// say prints what is being done to the fleet.
func (c *crawl) say(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terminal {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
	fmt.Fprintf(os.Stderr, "%4d pages: %s\n", c.result.Pages, text)
}

// progressLocked shows how far the crawl is: a line that is rewritten on a terminal, now and then a line elsewhere.
func (c *crawl) progressLocked() {
	pause := 2 * time.Second
	if c.terminal {
		pause = 50 * time.Millisecond
	}
	if c.result.Pages < c.options.pages && time.Since(c.printed) < pause {
		return
	}
	c.printed = time.Now()
	s := c.pool.Stats()
	line := fmt.Sprintf("%4d of %d pages, %d of %d proxies ready, %d leases", c.result.Pages, c.options.pages, s.Ready, s.Proxies, s.Leases)
	if c.terminal {
		fmt.Fprint(os.Stderr, "\r\033[K"+line)
	} else {
		fmt.Fprintln(os.Stderr, line)
	}
}

func (c *crawl) note(f func(*result)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.result)
}

// fail ends the crawl with an error once what is under way is done.
func (c *crawl) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}
