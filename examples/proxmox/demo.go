package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/internal/fakepve"
	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/proxmox"
)

// demo is a cluster in memory. In the place of a guest's proxy there is one on a loopback address of its own.
type demo struct {
	cluster *fakepve.Cluster
	proxy   *forwardproxy.Server
	site    *httptest.Server
	port    string
	before  []string // volumes, of the templates

	// mu guards guests.
	mu     sync.Mutex
	guests map[string]*http.Server // by address
}

// startDemo starts the cluster and has the options use it. The token has the least privileges that package proxmox names.
func startDemo(o *options) (*demo, error) {
	const token, secret = "egress@pve!crawl", "00000000-0000-0000-0000-000000000000"
	d := &demo{guests: map[string]*http.Server{}}
	var err error
	if d.proxy, err = forwardproxy.Start(forwardproxy.Config{Name: "demo"}); err != nil {
		return nil, err
	}
	o.port = d.proxy.Port() // which nobody else has, unlike 3128
	d.port = strconv.Itoa(o.port)
	d.site = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "a page, via %s\n", r.Header.Get("Via"))
	}))
	c := fakepve.New(fakepve.Config{CloneTime: time.Second, TaskTime: 200 * time.Millisecond, BootTime: time.Second})
	d.cluster = c
	c.AddToken(token, secret)
	c.Grant(token, "/vms", "VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit",
		"VM.Config.Disk", "VM.Config.Memory", "VM.Config.Options", "VM.PowerMgmt", "VM.GuestAgent.Audit")
	c.Grant(token, "/nodes", "Sys.Audit")
	c.Grant(token, "/storage/local", "Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.Audit")
	c.Grant(token, "/storage/local-lvm", "Datastore.AllocateSpace")
	c.Grant(token, "/sdn/zones/localnetwork", "SDN.Use")
	for i, node := range []string{"pve1", "pve2", "pve3"} {
		c.AddTemplate(node, 9000+i, "debian-13", fakepve.Template{})
		o.config.Nodes = append(o.config.Nodes, proxmox.Node{Name: node, Endpoint: c.URL(node)})
	}
	d.before = c.Volumes()
	o.config.TokenID, o.config.CA, o.config.DialContext = token, c.CA(), c.Dial
	o.config.Secret = func(context.Context) ([]byte, error) { return []byte(secret), nil }
	o.config.Templates = map[string]proxmox.Template{"image": {Name: "debian-13"}}
	o.url, o.destroy = d.site.URL, true
	return d, nil
}

// guests is a provider whose instances are reached at loopback addresses instead of those that their agents give.
type guests struct {
	*proxmox.Provider
	demo *demo
}

// Get implements provider.Provider.
func (g guests) Get(ctx context.Context, id string) (provider.Instance, error) {
	x, err := g.Provider.Get(ctx, id)
	if rest, ok := strings.CutPrefix(x.Address, "10."); ok {
		x.Address = "127." + rest
		if err := g.demo.serve(x.Address); err != nil {
			return x, &provider.Error{Provider: g.Name(), Op: "get", Kind: provider.ErrUnavailable, Err: err}
		}
	}
	return x, err
}

// serve starts the proxy of a guest unless it runs already.
func (d *demo) serve(address string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.guests[address] != nil {
		return nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(address, d.port))
	if err != nil {
		return fmt.Errorf("a system with more loopback addresses than 127.0.0.1 is needed, such as Linux: %w", err)
	}
	s := &http.Server{Handler: d.proxy, ReadHeaderTimeout: time.Minute}
	d.guests[address] = s
	go func() { _ = s.Serve(l) }() // ends with close
	return nil
}

func (d *demo) close(out io.Writer) {
	left := slices.DeleteFunc(d.cluster.Volumes(), func(v string) bool { return slices.Contains(d.before, v) })
	_, _ = fmt.Fprintf(out, "left in the cluster: %d VMs and %d volumes besides the templates'\n", len(d.cluster.VMs()), len(left))
	d.mu.Lock()
	defer d.mu.Unlock()
	errs := []error{d.proxy.Close()}
	for _, s := range d.guests {
		errs = append(errs, s.Close())
	}
	d.site.Close()
	d.cluster.Close()
	if err := errors.Join(errs...); err != nil {
		_, _ = fmt.Fprintln(out, err)
	}
}
