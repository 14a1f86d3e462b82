// Kvm2 crawls through proxies that are spread over several libvirt hosts, and empties one of the hosts meanwhile.
//
//	go run ./examples/kvm2 -host rack1=qemu+ssh://root@kvm1/system -host rack2=qemu+ssh://root@kvm2/system \
//	    -image https://example.com/debian-13.qcow2 -sha256 … -user-data squid.yaml -url https://example.com/ -drain rack1
//	go run ./examples/kvm2 -testhost
//
// With -testhost it needs root and Debian's packages for libvirt, which internal/live/run installs: it starts two hosts in
// namespaces on this machine and boots real guests there, emulated. That takes some minutes.
//
// The proxies outlive the program unless -destroy is given, and the next run takes them over.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/kvm2"
	"crawl.example.com/egress/provider"
)

type options struct {
	hosts                        []kvm2.Host
	image, sha256, userData, url string
	drain                        string
	proxies, pages, memory       int
	emulate, destroy, testhost   bool
}

func main() {
	var o options
	flag.Func("host", "NAME=URI of a libvirt host; may be repeated", func(v string) error {
		name, uri, ok := strings.Cut(v, "=")
		if !ok {
			return fmt.Errorf("%q, want NAME=URI", v)
		}
		o.hosts = append(o.hosts, kvm2.Host{Name: name, URI: uri})
		return nil
	})
	flag.StringVar(&o.image, "image", "", "URL of a cloud image in qcow2")
	flag.StringVar(&o.sha256, "sha256", "", "its digest")
	flag.StringVar(&o.userData, "user-data", "", "file with the cloud-init document that sets up the proxy on port 3128")
	flag.StringVar(&o.url, "url", "", "page to fetch, and to probe the proxies with")
	flag.StringVar(&o.drain, "drain", "", "host to empty after the first half of the pages")
	flag.IntVar(&o.proxies, "proxies", 2, "proxies")
	flag.IntVar(&o.memory, "memory", 1024, "memory of each, in MiB")
	flag.IntVar(&o.pages, "n", 20, "requests")
	flag.BoolVar(&o.emulate, "emulate", false, "go without KVM where it does not work")
	flag.BoolVar(&o.destroy, "destroy", false, "delete the proxies and their image in the end")
	flag.BoolVar(&o.testhost, "testhost", false, "start two hosts on this machine and use those; needs root")
	flag.Parse()
	if !o.testhost && (len(o.hosts) == 0 || o.image == "" || o.userData == "" || o.url == "") {
		fmt.Fprintln(os.Stderr, "kvm2: want -host, -image, -user-data and -url, or -testhost")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvm2:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.testhost {
		stop, err := useTestHosts(&o, out)
		if err != nil {
			return err
		}
		defer stop()
	}
	userData, err := os.ReadFile(o.userData)
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	config := kvm2.Config{
		Name: "fleet", Hosts: o.hosts, AllowEmulation: o.emulate, Logger: logger,
		Images: map[string]kvm2.Image{"image": {URL: o.image, SHA256: o.sha256}},
	}
	fleet, err := kvm2.New(config)
	if err != nil {
		return err
	}
	for _, h := range fleet.Check(ctx) {
		fmt.Fprintf(out, "%s: %s: %s\n", h.Target, h.Reason, h.Message)
	}
	pool, err := egress.New(egress.Config{
		Name: "example", Providers: []provider.Provider{provider.Shared(fleet)}, Logger: logger, DestroyOnClose: o.destroy,
		BootTimeout: 10 * time.Minute, CreateTimeout: 10 * time.Minute,
	})
	if err != nil {
		return err
	}
	defer func() {
		// Deleting goes on although the crawl was interrupted.
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, pool.Close(closing))
		if err == nil && o.destroy {
			err = evict(closing, config, out)
		}
		err = errors.Join(err, fleet.Close())
	}()
	err = pool.Apply(ctx, egress.Replicate(o.proxies, "crawl-%02d", egress.Proxy{
		Provider: "fleet", Image: "image", MemoryMiB: o.memory, Placement: provider.Placement{Group: "crawl"},
		CloudInit: egress.CloudInit{Inline: string(userData)},
		Probe:     egress.Probe{URL: o.url, Interval: 5 * time.Second, Timeout: 5 * time.Second},
	})...)
	if err != nil {
		return err
	}
	if err := pool.Start(ctx); err != nil {
		return err
	}
	if err := pool.WaitReady(ctx, o.proxies); err != nil {
		return err
	}
	client := pool.Client(egress.Request{})
	client.Timeout = time.Minute
	fetched := 0
	page := func() error {
		fetched++
		if err := fetch(ctx, client, o.url); err != nil {
			return fmt.Errorf("page %d: %w", fetched, err)
		}
		return nil
	}
	for range (o.pages + 1) / 2 {
		if err := page(); err != nil {
			return err
		}
	}
	show(pool, fetched, out)
	if o.drain != "" {
		i := slices.IndexFunc(o.hosts, func(h kvm2.Host) bool { return h.Name == o.drain })
		if i < 0 {
			return fmt.Errorf("-drain %s: no such host", o.drain)
		}
		o.hosts[i].Drained = true
		if err := fleet.SetHosts(o.hosts); err != nil {
			return err
		}
		// Pages go on all the while.
		for used(pool, o.drain) || pool.Stats().Ready < o.proxies {
			if err := page(); err != nil {
				return err
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		fmt.Fprintf(out, "%s is empty\n", o.drain)
	}
	for range o.pages / 2 {
		if err := page(); err != nil {
			return err
		}
	}
	show(pool, fetched, out)
	return nil
}

// used reports whether a proxy is on the host.
func used(pool *egress.Pool, host string) bool {
	return slices.ContainsFunc(pool.Proxies(), func(p egress.ProxyStatus) bool { return p.Host == host })
}

func show(pool *egress.Pool, fetched int, out io.Writer) {
	where := make([]string, 0, 8)
	for _, p := range pool.Proxies() {
		where = append(where, fmt.Sprintf("%s generation %d at %s on %s", p.Name, p.Generation, p.Address, p.Host))
	}
	fmt.Fprintf(out, "%d pages; %s\n", fetched, strings.Join(where, ", "))
}

func fetch(ctx context.Context, client *http.Client, url string) (err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	_, err = io.Copy(io.Discard, resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return err
}

// evict deletes the image, which nothing stands on any more.
func evict(ctx context.Context, config kvm2.Config, out io.Writer) error {
	config.Images = nil
	fleet, err := kvm2.New(config)
	if err != nil {
		return err
	}
	defer func() { _ = fleet.Close() }() // always nil
	gone, err := fleet.EvictImages(ctx)
	fmt.Fprintf(out, "images deleted: %v\n", gone)
	return err
}
