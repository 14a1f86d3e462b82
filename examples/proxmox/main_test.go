package main

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/proxmox"
)

func TestTheExampleCrawlsThroughAClusterInMemoryAndLeavesNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.64.1.1:0")
	if err != nil {
		t.Skipf("this system has no loopback address but 127.0.0.1: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	o := options{
		config:   proxmox.Config{Name: "home", Logger: slog.New(slog.NewTextHandler(t.Output(), nil))},
		userData: "#cloud-config\n{}\n", proxies: 3, pages: 9, memory: 512,
	}
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := run(ctx, o, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"on pve1", "on pve2", "on pve3", "9 pages through 3 proxies", "left in the cluster: 0 VMs and 0 volumes"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, &out)
		}
	}
}
