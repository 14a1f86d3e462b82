package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"crawl.example.com/egress/internal/testhost"
)

// squid is what makes a proxy of the test host's guests. They have squid installed already. It takes its time to look for
// its own name, which no server here knows, unless it is told.
const squid = `#cloud-config
write_files:
  - path: /etc/squid/squid.conf
    content: |
      http_port 3128
      visible_hostname proxy
      shutdown_lifetime 1 seconds
      acl crawler src 10.231.0.0/16
      http_access allow crawler
      http_access deny all
      cache deny all
runcmd:
  - systemctl restart --no-block squid
`

// useTestHost starts a host on this machine with a site that its guests can reach.
func useTestHost(ctx context.Context, o *options, out io.Writer) (stop func(), err error) {
	if why := testhost.Missing(); why != "" {
		return nil, fmt.Errorf("-testhost %s", why)
	}
	fmt.Fprintln(out, "building the guests' image, unless it is there already")
	image, err := testhost.Image()
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "egress-kvm")
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(out, "starting a host")
	host, err := testhost.New(testhost.Options{Folder: folder, PoolMiB: 3072})
	if err != nil {
		return nil, err
	}
	site, err := serve(host, image)
	if err != nil {
		return nil, err
	}
	stop = func() {
		_ = site.server.Close() // it is over
		_ = host.Close()        // always nil
		_ = os.RemoveAll(folder)
	}
	o.userData = filepath.Join(folder, "squid.yaml")
	if err := os.WriteFile(o.userData, []byte(squid), 0o600); err != nil {
		stop()
		return nil, err
	}
	if o.sha256, err = digest(image); err != nil {
		stop()
		return nil, err
	}
	o.uri, o.knownHosts, o.keyFile, o.emulate, o.destroy = host.URI(), host.KnownHosts(), host.KeyFile(), true, true
	o.image, o.url = site.url+"/image.qcow2", site.url+"/page"
	return stop, ctx.Err()
}

type site struct {
	server *http.Server
	url    string
}

// serve serves the image and a page on the address that this machine has towards the host.
func serve(host *testhost.Host, image string) (*site, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host.Outside, "0"))
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/image.qcow2", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, image) })
	mux.HandleFunc("/page", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello %s, by way of %q\n", r.RemoteAddr, r.Header.Get("Via"))
	})
	s := &site{&http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}, "http://" + l.Addr().String()}
	go func() { _ = s.server.Serve(l) }() // until Close
	return s, nil
}

func digest(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // it was read
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
