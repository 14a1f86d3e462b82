package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"crawl.example.com/egress/examples/internal/guestsite"
	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm2"
)

// useTestHosts starts two hosts on this machine, and a site that the guests of both can reach, and has the first host drained.
func useTestHosts(o *options, out io.Writer) (stop func(), err error) {
	if why := testhost.Missing(); why != "" {
		return nil, fmt.Errorf("-testhost %s", why)
	}
	_, _ = fmt.Fprintln(out, "building the guests' image, unless it is there already")
	image, err := testhost.Image()
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "egress-kvm2")
	if err != nil {
		return nil, err
	}
	var ends []func() error
	stop = func() {
		for _, end := range ends {
			_ = end() // a host and a server have nothing to say at their end
		}
		_ = os.RemoveAll(folder)
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	_, _ = fmt.Fprintln(out, "starting two hosts")
	var first *testhost.Host
	for _, name := range []string{"alpha", "beta"} {
		if err := os.Mkdir(filepath.Join(folder, name), 0o755); err != nil {
			return nil, err
		}
		h, err := testhost.New(testhost.Options{Folder: filepath.Join(folder, name), PoolMiB: 2048})
		if err != nil {
			return nil, err
		}
		ends = append(ends, h.Close)
		if first == nil {
			first = h
		}
		o.hosts = append(o.hosts, kvm2.Host{Name: name, URI: h.URI(), SSH: &kvm2.SSH{KnownHosts: []string{h.KnownHosts()}, KeyFiles: []string{h.KeyFile()}}})
	}
	url, end, err := guestsite.Serve(first.Outside, image)
	if err != nil {
		return nil, err
	}
	ends = append(ends, end)
	o.userData = filepath.Join(folder, "squid.yaml")
	if err := os.WriteFile(o.userData, []byte(guestsite.Squid), 0o600); err != nil {
		return nil, err
	}
	o.image, o.url, o.drain = url+"/image.qcow2", url+"/page", "alpha"
	o.emulate, o.destroy = true, true
	o.sha256, err = guestsite.Digest(image)
	return stop, err
}
