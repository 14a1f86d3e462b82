// Kvm crawls through proxies that it makes on a libvirt host.
//
//	go run ./examples/kvm -uri qemu+ssh://root@kvm1/system -image https://example.com/debian-13.qcow2 -sha256 … \
//	    -user-data squid.yaml -url https://example.com/
//	go run ./examples/kvm -testhost
//
// With -testhost it needs root and Debian's packages for libvirt, which internal/live/run installs: it starts a host in
// namespaces on this machine and boots real guests there, emulated. That takes a few minutes.
//
// The proxies outlive the program unless -destroy is given, and the next run takes them over. On SIGHUP all of them are
// replaced, one after the other, while the crawl goes on.
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
	"strings"
	"syscall"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/kvm"
	"crawl.example.com/egress/provider"
)

type options struct {
	uri, image, sha256, userData, url, knownHosts, keyFile, pool, network, bridge, firmware string
	proxies, pages, memory, cpus                                                            int
	pause                                                                                   time.Duration
	emulate, destroy, testhost, verbose                                                     bool
}

func main() {
	var o options
	flag.StringVar(&o.uri, "uri", "", "libvirt host, such as qemu+ssh://root@kvm1/system or qemu:///system")
	flag.StringVar(&o.image, "image", "", "URL of a cloud image in qcow2")
	flag.StringVar(&o.sha256, "sha256", "", "its digest")
	flag.StringVar(&o.userData, "user-data", "", "file with the cloud-init document that sets up the proxy on port 3128")
	flag.StringVar(&o.url, "url", "", "page to fetch, and to probe the proxies with")
	flag.StringVar(&o.knownHosts, "known-hosts", "", "known_hosts file; empty means the user's")
	flag.StringVar(&o.keyFile, "key", "", "private key; empty means the SSH agent's")
	flag.StringVar(&o.pool, "pool", "default", "storage pool")
	flag.StringVar(&o.network, "network", "", "libvirt network; empty means default")
	flag.StringVar(&o.bridge, "bridge", "", "bridge of the host, instead of a network")
	flag.StringVar(&o.firmware, "firmware", "uefi", "uefi or bios")
	flag.IntVar(&o.proxies, "proxies", 1, "proxies")
	flag.IntVar(&o.memory, "memory", 1024, "memory of each, in MiB")
	flag.IntVar(&o.cpus, "cpus", 1, "processors of each")
	flag.IntVar(&o.pages, "n", 20, "requests; 0 goes on until it is interrupted")
	flag.DurationVar(&o.pause, "pause", 0, "pause between requests")
	flag.BoolVar(&o.emulate, "emulate", false, "go without KVM where it does not work")
	flag.BoolVar(&o.destroy, "destroy", false, "delete the proxies and their image in the end")
	flag.BoolVar(&o.testhost, "testhost", false, "start a host on this machine and use that; needs root")
	flag.BoolVar(&o.verbose, "v", false, "log more")
	flag.Parse()
	if !o.testhost && (o.uri == "" || o.image == "" || o.userData == "" || o.url == "") {
		fmt.Fprintln(os.Stderr, "kvm: want -uri, -image, -user-data and -url, or -testhost")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.testhost {
		stop, err := useTestHost(ctx, &o, out)
		if err != nil {
			return err
		}
		defer stop()
	}
	userData, err := os.ReadFile(o.userData)
	if err != nil {
		return err
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	config := kvm.Config{
		Name: "home", URI: o.uri, StoragePool: o.pool, Network: o.network, Bridge: o.bridge, AllowEmulation: o.emulate,
		Images: map[string]kvm.Image{"image": {URL: o.image, SHA256: o.sha256, Firmware: o.firmware}},
		Logger: logger,
		Progress: func(p kvm.Progress) {
			fmt.Fprintf(out, "image on %s: %d of %d MiB\n", p.Host, p.Bytes>>20, p.Total>>20)
		},
	}
	if o.knownHosts != "" {
		config.SSH.KnownHosts = []string{o.knownHosts}
	}
	if o.keyFile != "" {
		config.SSH.KeyFiles = []string{o.keyFile}
	}
	home, err := kvm.New(config)
	if err != nil {
		return err
	}
	for _, h := range home.Check(ctx) {
		fmt.Fprintf(out, "%s: %s: %s\n", h.Target, h.Reason, h.Message)
	}
	pool, err := egress.New(egress.Config{
		Name: "example", Providers: []provider.Provider{provider.Shared(home)}, Logger: logger, DestroyOnClose: o.destroy,
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
		err = errors.Join(err, home.Close())
	}()
	proxies := egress.Replicate(o.proxies, "crawl-%02d", egress.Proxy{
		Provider: "home", Image: "image", CPUs: o.cpus, MemoryMiB: o.memory,
		CloudInit: egress.CloudInit{Inline: string(userData)},
		Probe:     egress.Probe{URL: o.url, Interval: 5 * time.Second, Timeout: 5 * time.Second},
	})
	if err := pool.Apply(ctx, proxies...); err != nil {
		return err
	}
	if err := pool.Start(ctx); err != nil {
		return err
	}
	if err := pool.WaitReady(ctx, o.proxies); err != nil {
		return err
	}
	return crawl(ctx, pool, o, out)
}

// crawl fetches the page again and again, each time through some proxy. SIGHUP replaces the proxies meanwhile.
func crawl(ctx context.Context, pool *egress.Pool, o options, out io.Writer) error {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	client := pool.Client(egress.Request{})
	client.Timeout = time.Minute
	for i := 0; o.pages == 0 || i < o.pages; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-hangup:
			for _, p := range pool.Proxies() {
				if err := pool.Refresh(p.Name); err != nil {
					return err
				}
			}
			fmt.Fprintln(out, "replacing every proxy")
		case <-time.After(o.pause):
		}
		status, size, err := fetch(ctx, client, o.url)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		through := make([]string, 0, o.proxies)
		for _, p := range pool.Proxies() {
			through = append(through, fmt.Sprintf("%s generation %d %s at %s", p.Name, p.Generation, p.Phase, p.Address))
		}
		fmt.Fprintf(out, "page %d: %s, %d bytes; %s\n", i+1, status, size, strings.Join(through, ", "))
	}
	return nil
}

func fetch(ctx context.Context, client *http.Client, url string) (status string, size int64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", 0, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	size, err = io.Copy(io.Discard, resp.Body)
	return resp.Status, size, err
}

// evict deletes the image, which nothing stands on any more.
func evict(ctx context.Context, config kvm.Config, out io.Writer) error {
	config.Images = nil
	home, err := kvm.New(config)
	if err != nil {
		return err
	}
	defer func() { _ = home.Close() }() // always nil
	gone, err := home.EvictImages(ctx)
	fmt.Fprintf(out, "images deleted: %q\n", gone)
	return err
}
