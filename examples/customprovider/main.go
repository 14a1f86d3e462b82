// Customprovider shows how a backend of one's own is written, in local.go, and fetches a page through a proxy that it made.
// Its test runs the conformance suite that says whether a backend is right.
//
//	go run ./examples/customprovider
//	go test -v ./examples/customprovider
//
// A backend is the six methods of provider.Provider. It makes one attempt at what it is asked for, tells the truth about it
// with one of the error kinds of package provider, and stores a provider.Mark with each machine. When to create, to
// retry, to replace and to delete is the pool's business.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	page, err := run(ctx)
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "customprovider:", err)
		os.Exit(1)
	}
	fmt.Println(page)
}

func run(ctx context.Context) (page string, err error) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello to somebody who comes via %q", r.Header.Get("Via"))
	}))
	defer site.Close()

	pool, err := egress.New(egress.Config{
		Name:           "demo",
		Providers:      []provider.Provider{NewLocal("here", 4)},
		DestroyOnClose: true,
	})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, pool.Close(ctx)) }()
	if err := pool.Apply(ctx, egress.Replicate(2, "proxy-%d", egress.Proxy{
		Provider: "here", CloudInit: egress.CloudInit{Inline: "#cloud-config\n"}, Probe: egress.Probe{URL: site.URL},
	})...); err != nil {
		return "", err
	}
	if err := pool.Start(ctx); err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, site.URL, nil)
	if err != nil {
		return "", err
	}
	resp, err := pool.Client(egress.Request{}).Do(req) // waits until a proxy is ready
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}
