// Proxmox crawls through proxies that it makes on a Proxmox VE cluster.
//
//	go run ./examples/proxmox
//	go run ./examples/proxmox -node pve1=https://192.0.2.10:8006 -node pve2=https://192.0.2.11:8006 -ca pve-root-ca.pem \
//	    -token egress@pve!crawl -secret token.txt -template debian-13 -user-data squid.yaml -url https://example.com/
//
// Without -node it starts a cluster of three nodes in memory, with real proxies on loopback addresses in the place of guests.
//
// The proxies outlive the program unless -destroy is given, which a cluster in memory implies; the next run takes them over.
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
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/proxmox"
)

type options struct {
	config   proxmox.Config
	userData string
	url      string
	proxies  int
	pages    int
	memory   int
	port     int
	destroy  bool
}

func main() {
	var o options
	var nodes []proxmox.Node
	var secretFile, template, userData string
	verbose := flag.Bool("v", false, "log each request")
	flag.Func("node", "NAME=URL of the API on a node, with /SHA256 of its certificate behind it unless -ca is given; may be repeated", func(v string) error {
		name, endpoint, ok := strings.Cut(v, "=")
		if !ok {
			return fmt.Errorf("%q, want NAME=URL", v)
		}
		base, fingerprint, _ := strings.Cut(strings.TrimPrefix(endpoint, "https://"), "/")
		nodes = append(nodes, proxmox.Node{Name: name, Endpoint: "https://" + base, Fingerprint: fingerprint})
		return nil
	})
	flag.StringVar(&o.config.CAFile, "ca", "", "copy of /etc/pve/pve-root-ca.pem")
	flag.StringVar(&o.config.TokenID, "token", "", "API token, such as egress@pve!crawl")
	flag.StringVar(&secretFile, "secret", "", "file with the token's secret")
	flag.StringVar(&template, "template", "", "name of the templates")
	flag.StringVar(&o.config.SeedStorage, "seeds", "local", "storage for the seeds")
	flag.StringVar(&o.config.Pool, "pool", "", "resource pool")
	flag.StringVar(&userData, "user-data", "", "file with the cloud-init document that sets up the proxy on port 3128")
	flag.StringVar(&o.url, "url", "", "page to fetch, and to probe the proxies with")
	flag.IntVar(&o.proxies, "proxies", 3, "proxies")
	flag.IntVar(&o.memory, "memory", 512, "memory of each, in MiB")
	flag.IntVar(&o.port, "port", 3128, "port of the proxies")
	flag.IntVar(&o.pages, "n", 30, "requests")
	flag.BoolVar(&o.destroy, "destroy", false, "delete the proxies in the end")
	flag.Parse()
	level := slog.LevelWarn
	if *verbose {
		level = slog.LevelDebug
	}
	o.config.Name = "home"
	o.config.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	o.config.Nodes = nodes
	o.config.Templates = map[string]proxmox.Template{"image": {Name: template}}
	o.config.Secret = func(context.Context) ([]byte, error) { return os.ReadFile(secretFile) }
	o.userData = "#cloud-config\n{}\n"
	if userData != "" {
		text, err := os.ReadFile(userData)
		if err != nil {
			fmt.Fprintln(os.Stderr, "proxmox:", err)
			os.Exit(1)
		}
		o.userData = string(text)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxmox:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	var d *demo
	if len(o.config.Nodes) == 0 {
		if d, err = startDemo(&o); err != nil {
			return err
		}
		defer func() { d.close(out) }()
	}
	home, err := proxmox.New(o.config)
	if err != nil {
		return err
	}
	backend := provider.Provider(home)
	if d != nil {
		backend = guests{home, d}
	}
	for _, h := range home.Check(ctx) {
		fmt.Fprintf(out, "%s: %s %s\n", h.Target, h.Reason, h.Message)
	}
	pool, err := egress.New(egress.Config{
		Name: "example", Providers: []provider.Provider{backend}, Logger: o.config.Logger, DestroyOnClose: o.destroy, ListInterval: time.Second, MaxParallel: 8,
	})
	if err != nil {
		return err
	}
	defer func() {
		// Deleting goes on although the crawl was interrupted.
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, pool.Close(closing))
	}()
	proxies := egress.Replicate(o.proxies, "crawl-%02d", egress.Proxy{
		Provider: "home", Image: "image", MemoryMiB: o.memory, Port: o.port, Placement: provider.Placement{Group: "crawl"},
		CloudInit: egress.CloudInit{Inline: o.userData},
		Probe:     egress.Probe{URL: o.url, Interval: 2 * time.Second},
	})
	if err := pool.Apply(ctx, proxies...); err != nil {
		return err
	}
	if err := pool.Start(ctx); err != nil {
		return err
	}
	if err := pool.WaitReady(ctx, o.proxies); err != nil {
		for _, p := range pool.Proxies() {
			err = errors.Join(err, fmt.Errorf("%s: %s: %s %s", p.Name, p.Phase, p.Reason, p.Message))
		}
		return err
	}
	for _, p := range pool.Proxies() {
		fmt.Fprintf(out, "%s: %s at %s on %s\n", p.Name, p.Phase, p.Address, p.Host)
	}
	client := pool.Client(egress.Request{})
	client.Timeout = time.Minute
	for i := range o.pages {
		if err := fetch(ctx, client, o.url); err != nil {
			return fmt.Errorf("page %d: %w", i+1, err)
		}
	}
	fmt.Fprintf(out, "%d pages through %d proxies\n", o.pages, o.proxies)
	return nil
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
