// Gcp fetches pages through proxies on Google Cloud. Without flags it runs against a fake Compute API in this process,
// with a proxy on loopback behind every instance, and costs nothing.
//
//	cd gcp && go run ./examples/gcp
//	go run ./examples/gcp -project my-crawler-123 -zones europe-west3-a,europe-west3-b -user-data squid.yaml -spot
//
// Against the real thing it makes instances that cost money and deletes them when it ends. It uses Application Default
// Credentials, or -credentials. The project needs a firewall rule that lets this machine, and nobody else, to the
// proxies' port; see the documentation of package gcp.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"strings"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/gcp"
	"crawl.example.com/egress/gcp/internal/fakecompute"
	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/provider"
)

type options struct {
	project, zones, tags, userData, credentials, url string
	port, proxies, pages                             int
	spot, verbose                                    bool
}

func main() {
	var o options
	flag.StringVar(&o.project, "project", "", "Google Cloud project; empty runs against the fake")
	flag.StringVar(&o.zones, "zones", "europe-west3-a,europe-west3-b", "zones, most wanted first")
	flag.StringVar(&o.tags, "tags", "", "network tags, comma-separated")
	flag.StringVar(&o.userData, "user-data", "", "file with the cloud-init document that installs the proxy; required with -project")
	flag.StringVar(&o.credentials, "credentials", "", "credentials file; empty means Application Default Credentials")
	flag.StringVar(&o.url, "url", "", "page to fetch; required with -project")
	flag.IntVar(&o.port, "port", 3128, "port that the proxies listen on")
	flag.IntVar(&o.proxies, "proxies", 3, "proxies")
	flag.IntVar(&o.pages, "n", 20, "requests")
	flag.BoolVar(&o.spot, "spot", false, "use Spot instances")
	flag.BoolVar(&o.verbose, "v", false, "log every request to Google")
	flag.Parse()
	if o.project != "" && (o.userData == "" || o.url == "") {
		fmt.Fprintln(os.Stderr, "gcp: -project wants -user-data and -url too")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gcp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	config := gcp.Config{
		Name: "gce", Project: o.project, Zones: strings.Split(o.zones, ","), Spread: true, Spot: o.spot,
		CredentialsFile: o.credentials, Logger: logger,
	}
	if o.tags != "" {
		config.Tags = strings.Split(o.tags, ",")
	}
	userData := []byte("#cloud-config\npackages: [squid]\n")
	if o.userData != "" {
		if userData, err = os.ReadFile(o.userData); err != nil {
			return err
		}
	}
	interval, listInterval, patience := 30*time.Second, 10*time.Second, 10*time.Minute
	if o.project == "" {
		stop, err := useFake(&config, &o)
		if err != nil {
			return err
		}
		defer stop()
		interval, listInterval, patience = time.Second, 200*time.Millisecond, 30*time.Second
	}
	google, err := gcp.New(config)
	if err != nil {
		return err
	}
	for _, h := range google.Check(ctx) {
		fmt.Fprintf(out, "%s: %s: %s\n", h.Target, h.Reason, h.Message)
	}
	pool, err := egress.New(egress.Config{
		Name: "example", Providers: []provider.Provider{google}, Logger: logger, ListInterval: listInterval, DestroyOnClose: true,
	})
	if err != nil {
		return err
	}
	defer func() {
		// Deleting goes on although the crawl was interrupted, or instances would stay and cost money.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, pool.Close(ctx))
	}()
	err = pool.Apply(ctx, egress.Replicate(o.proxies, "crawl-%02d", egress.Proxy{
		Provider: "gce", Port: o.port, CloudInit: egress.CloudInit{Inline: string(userData)},
		Probe: egress.Probe{URL: o.url, Interval: interval},
	})...)
	if err != nil {
		return err
	}
	if err := pool.Start(ctx); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := pool.WaitReady(waiting, o.proxies); err != nil {
		return err
	}
	for _, s := range pool.Proxies() {
		fmt.Fprintf(out, "%s is %s at %s\n", s.Name, s.Phase, s.Address)
	}
	client := pool.Client(egress.Request{})
	for range o.pages {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, o.url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(request)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", o.url, resp.Status)
		}
	}
	fmt.Fprintf(out, "%d pages through %d proxies\n", o.pages, o.proxies)
	return nil
}

// useFake starts a site, a proxy and a fake Compute whose instances all have the proxy's address.
func useFake(config *gcp.Config, o *options) (stop func(), err error) {
	proxy, err := forwardproxy.Start(forwardproxy.Config{Name: "example"})
	if err != nil {
		return nil, err
	}
	config.Project = "fake-project"
	compute := httptest.NewServer(fakecompute.New(fakecompute.Config{
		Project: config.Project, Zones: config.Zones, OperationTime: 300 * time.Millisecond, BootTime: 200 * time.Millisecond,
		Address: func(int) string { return "127.0.0.1" },
	}))
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello\n") }))
	config.Endpoint, config.WithoutAuthentication, config.CredentialsFile = compute.URL, true, ""
	config.RequestsPerSecond = 100 // the list is asked for far more often than against the real thing
	o.url, o.port = site.URL, proxy.Port()
	return func() {
		site.Close()
		compute.Close()
		proxy.Close()
	}, nil
}
