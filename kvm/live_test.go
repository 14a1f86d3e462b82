//go:build live

package kvm_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"os"
	"testing"
	"time"

	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm"
	"crawl.example.com/egress/provider"
)

// fileOf serves one file and returns its digest.
func serveFile(t *testing.T, h *testhost.Host, file string) (url, digest string) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	base := h.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, file) }))
	return base + "/image.qcow2", hex.EncodeToString(sum.Sum(nil))
}

func TestLiveSmoke(t *testing.T) {
	h := testhost.Start(t, testhost.Options{})
	image, err := testhost.Image()
	if err != nil {
		t.Fatal(err)
	}
	url, digest := serveFile(t, h, image)
	p, err := kvm.New(kvm.Config{
		Name: "home", URI: h.URI(), SSH: kvm.SSH{KnownHosts: []string{h.KnownHosts()}, KeyFiles: []string{h.KeyFile()}},
		Images: map[string]kvm.Image{"debian": {URL: url, SHA256: digest}}, AllowEmulation: true,
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	t.Logf("%+v", p.Check(ctx))
	spec := provider.Spec{Provider: "home", Image: "debian", MemoryMiB: 1024, CPUs: 2, Port: 3128, CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n{}\n")}}
	req := provider.CreateRequest{Name: provider.InstanceName("own", "a", 1), Mark: provider.Mark{Owner: "own", Proxy: "a", Generation: 1, HashVersion: 1, Hash: spec.Hash(nil)}, Spec: spec}
	begin := time.Now()
	made, err := p.Create(ctx, req)
	t.Logf("%+v %v %s", made, err, time.Since(begin))
	if err != nil {
		t.Fatal(err)
	}
	t.Log(h.Virsh(t, "vol-list", "default"))
	for ctx.Err() == nil {
		x, err := p.Get(ctx, made.ID)
		t.Logf("%s %+v %v", time.Since(begin), x, err)
		if x.Address != "" {
			break
		}
		time.Sleep(3 * time.Second)
	}
	all, err := p.List(ctx, "own")
	t.Logf("%+v %v", all, err)
	begin = time.Now()
	t.Log(p.Delete(ctx, made.ID), time.Since(begin))
	t.Log(h.Virsh(t, "vol-list", "default"), h.Virsh(t, "list", "--all"))
	t.Log(p.EvictImages(ctx))
}
