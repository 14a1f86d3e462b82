package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"crawl.example.com/egress/examples/internal/guestsite"
	"crawl.example.com/egress/internal/testhost"
)

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
	url, end, err := guestsite.Serve(host.Outside, image)
	if err != nil {
		return nil, err
	}
	stop = func() {
		_ = end()        // it is over
		_ = host.Close() // always nil
		_ = os.RemoveAll(folder)
	}
	o.userData = filepath.Join(folder, "squid.yaml")
	if err := os.WriteFile(o.userData, []byte(guestsite.Squid), 0o600); err != nil {
		stop()
		return nil, err
	}
	if o.sha256, err = guestsite.Digest(image); err != nil {
		stop()
		return nil, err
	}
	o.uri, o.knownHosts, o.keyFile, o.emulate, o.destroy = host.URI(), host.KnownHosts(), host.KeyFile(), true, true
	o.image, o.url = url+"/image.qcow2", url+"/page"
	return stop, ctx.Err()
}
