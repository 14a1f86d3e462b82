// Status serves the status page of a fleet in which something is always going on: proxies are leased, banned by their target,
// killed and replaced, and one of the hosts is ill. All of it is on loopback.
//
//	go run ./examples/status                   # then look at http://127.0.0.1:8080/
//	go run ./examples/status -for 2s
//
// The page has no authentication, so it listens on loopback. With -for the program asks its own page in the end, as a
// supervisor would, and fails when that is not well.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "address of the status page")
	duration := flag.Duration("for", 0, "end after so long; 0 goes on until it is interrupted")
	flag.Parse()
	if *duration < 0 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "status: want -for of 0 or more, and no other arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	if *duration > 0 {
		ctx, stop = context.WithTimeout(ctx, *duration)
	}
	err := run(ctx, *listen, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "status:", err)
		os.Exit(1)
	}
}

// run serves the page until ctx ends, and then looks at it once more.
func run(ctx context.Context, listen string, out io.Writer) (err error) {
	backend := fake.New(fake.Config{
		Name: "home", Hosts: []string{"rack-1", "rack-2", "rack-3"}, BootTime: 300 * time.Millisecond, Serve: true,
	})
	backend.SetHealth(health)
	pool, err := egress.New(egress.Config{
		Name:           "demo",
		Providers:      []provider.Provider{backend},
		Logger:         slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		DestroyOnClose: true,
		ListInterval:   time.Second,
		UnhealthyGrace: 5 * time.Second,
		StoppedGrace:   3 * time.Second,
	})
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err = errors.Join(err, pool.Close(closing))
	}()
	if err := pool.Apply(ctx, fleet()...); err != nil {
		return err
	}
	if err := pool.Start(ctx); err != nil {
		return err
	}

	// A real crawler mounts this beside its own pages.
	mux := http.NewServeMux()
	mux.Handle("/", pool.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	url := "http://" + listener.Addr().String() + "/"
	fmt.Fprintln(out, "status page:", url)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer server.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tasks.Go(func() { _ = server.Serve(listener) })

	tasks.Go(func() { trouble(ctx, backend) })
	for range 8 {
		tasks.Go(func() { work(ctx, pool) })
	}
	if err := pool.WaitReady(ctx, 1); err != nil {
		return err
	}
	<-ctx.Done()
	return look(url, out)
}

// fleet is six proxies of our own, and one of somebody else's that has been switched off.
func fleet() []egress.Proxy {
	probe := egress.Probe{Interval: time.Second}
	proxies := egress.Replicate(6, "crawl-%02d", egress.Proxy{
		Provider: "home", Image: "debian-13", CloudInit: egress.CloudInit{Inline: "#cloud-config\npackages: [squid]\n"},
		Labels: map[string]string{"country": "cz"}, Probe: probe,
	})
	return append(proxies, egress.Proxy{
		Name: "theirs", Mode: egress.External, Endpoint: "http://user:password@127.0.0.1:1",
		Labels: map[string]string{"country": "de"}, Probe: probe,
	})
}

// health is what the backend says of its hosts.
func health(context.Context) []provider.TargetHealth {
	now := time.Now()
	return []provider.TargetHealth{
		{Target: "rack-1", Ready: true, Reason: provider.ReasonReady, Duration: 4 * time.Millisecond, CheckedAt: now},
		{Target: "rack-2", Ready: true, Reason: provider.ReasonReady, Duration: 5 * time.Millisecond, CheckedAt: now},
		{Target: "rack-3", Reason: provider.ReasonStorageNotFound, Duration: 31 * time.Millisecond, CheckedAt: now,
			Message: "storage pool \"images\" is not there; start it with virsh pool-start images"},
	}
}

// work holds a lease for a moment, again and again, as a crawler's worker does. Now and then a shop bans it.
func work(ctx context.Context, pool *egress.Pool) {
	for ctx.Err() == nil {
		target := []string{"shop.example", "blog.example", "news.example"}[rand.IntN(3)]
		patience, cancel := context.WithTimeout(ctx, 2*time.Second)
		_ = pool.Do(patience, egress.Request{Target: target}, func(ctx context.Context, lease *egress.Lease) error {
			select {
			case <-time.After(rand.N(400 * time.Millisecond)):
			case <-ctx.Done():
			}
			if target == "shop.example" && rand.IntN(40) == 0 {
				lease.Report(egress.Banned(10*time.Second + rand.N(50*time.Second)))
			} else {
				lease.Report(egress.OK)
			}
			return nil
		})
		cancel()
	}
}

// trouble breaks one instance after the other: half of them stop to answer, the others are switched off.
func trouble(ctx context.Context, backend *fake.Provider) {
	ticker := time.NewTicker(700 * time.Millisecond)
	defer ticker.Stop()
	for n := 0; ; n++ {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		all := backend.Instances()
		if n%8 > 0 || len(all) == 0 {
			continue
		}
		x := all[rand.IntN(len(all))]
		if n%16 == 0 {
			_ = backend.Kill(x.ID)
		} else {
			_ = backend.Preempt(x.ID)
		}
	}
}

// look asks for the three things that are served.
func look(url string, out io.Writer) error {
	health, err := get(url + "healthz")
	if err != nil {
		return err
	}
	fmt.Fprint(out, "healthz: ", health)
	text, err := get(url + "status.json")
	if err != nil {
		return err
	}
	var report egress.StatusReport
	if err := json.Unmarshal([]byte(text), &report); err != nil {
		return fmt.Errorf("status.json: %w", err)
	}
	fmt.Fprintf(out, "status.json: %d proxies, %d leases granted\n", len(report.Proxies), report.Leases.Granted)
	page, err := get(url)
	if err != nil {
		return err
	}
	for _, p := range report.Proxies {
		if !strings.Contains(page, p.Name) {
			return fmt.Errorf("proxy %s is not on the page", p.Name)
		}
	}
	return nil
}

func get(url string) (string, error) {
	client := http.Client{Timeout: 10 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answered %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
	return string(body), err
}
