package vmhost

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/internal/memconn"
	"crawl.example.com/egress/provider"
)

// imageBytes is the size of both images.
const imageBytes = 24 << 10

// raceDetector reports whether the tests run with it. What goes through each of many steps then takes every third, since it
// finds the same and takes ten times as long.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-race" && s.Value == "true" })
}

// rig is a Host with all that it talks to, in a bubble.
type rig struct {
	*Host
	peer *libvirttest.Host
	web  *web
	log  *bytes.Buffer
}

// inBubble runs f with a host whose images are disk.qcow2 (name "debian") and disk.raw ("raw").
func inBubble(t *testing.T, change func(*Config, *libvirttest.Config), f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWeb()
		defer w.close()
		w.serve("/disk.qcow2", qcow2(1<<30, imageBytes))
		w.serve("/disk.raw", bytes.Repeat([]byte("raw disk"), imageBytes/8))
		r := &rig{web: w, log: &bytes.Buffer{}}
		var there libvirttest.Config
		config := Config{
			Entry: "home", Target: "attic", URI: "qemu:///system", Maker: "kvm", BasePrefix: "base-",
			Images: map[string]Image{
				"debian": {URL: "https://images.example/disk.qcow2", SHA256: sum(qcow2(1<<30, imageBytes))},
				"raw":    {URL: "https://images.example/disk.raw", Format: "raw", Firmware: "bios"},
			},
			HTTP: w.client, Uploads: make(chan struct{}, 2), Logger: slog.New(slog.NewTextHandler(&locked{w: r.log}, nil)),
			Dial: func(ctx context.Context) (net.Conn, error) { return r.peer.Dial(ctx) },
		}
		if change != nil {
			change(&config, &there)
		}
		r.peer = libvirttest.New(there)
		defer r.peer.Close()
		h, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		r.Host = h
		f(t, r)
	})
}

// locked serialises writes.
type locked struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// qcow2 returns what begins like an image of version 3 for a disk of that size, and is size bytes long.
func qcow2(disk uint64, size int) []byte {
	b := bytes.Repeat([]byte("cluster "), size/8+1)[:size]
	copy(b, make([]byte, headerBytes))
	copy(b, "QFI\xfb")
	binary.BigEndian.PutUint32(b[4:], 3)
	binary.BigEndian.PutUint32(b[20:], 16)
	binary.BigEndian.PutUint64(b[24:], disk)
	binary.BigEndian.PutUint32(b[100:], headerBytes)
	return b
}

// web is an HTTP server in memory for every name there is.
type web struct {
	client *http.Client
	mux    *http.ServeMux
	server *http.Server
	conns  chan net.Conn
	done   chan struct{}

	// mu guards requests.
	mu       sync.Mutex
	requests []*http.Request
}

func newWeb() *web {
	w := &web{mux: http.NewServeMux(), conns: make(chan net.Conn), done: make(chan struct{})}
	dial := func(ctx context.Context, _, address string) (net.Conn, error) {
		ours, theirs := memconn.Pair(address, "client")
		select {
		case w.conns <- ours:
			return theirs, nil
		case <-w.done:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	w.client = imageClient()
	transport := w.client.Transport.(*http.Transport)
	transport.Proxy, transport.DialContext = nil, dial
	// TLS is not what is tested here: https is spoken in the clear.
	transport.DialTLSContext = dial
	w.server = &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.requests = append(w.requests, r.Clone(context.Background()))
		w.mu.Unlock()
		w.mux.ServeHTTP(rw, r)
	})}
	go func() { _ = w.server.Serve(w) }() // ends with close
	return w
}

func (w *web) Accept() (net.Conn, error) {
	select {
	case c := <-w.conns:
		return c, nil
	case <-w.done:
		return nil, net.ErrClosed
	}
}

func (w *web) Close() error   { return nil }
func (w *web) Addr() net.Addr { return &net.UnixAddr{Name: "web", Net: "mem"} }

func (w *web) close() {
	w.client.CloseIdleConnections()
	close(w.done)
	_ = w.server.Close()
}

func (w *web) serve(path string, content []byte) {
	w.mux.HandleFunc(path, func(rw http.ResponseWriter, r *http.Request) {
		http.ServeContent(rw, r, "", time.Unix(1, 0), bytes.NewReader(content))
	})
}

// asked returns how often a path was asked for.
func (w *web) asked(path string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, r := range w.requests {
		if r.URL.Path == path {
			n++
		}
	}
	return n
}

func userData() provider.CloudInit {
	return provider.CloudInit{UserData: []byte("#cloud-config\n# a secret that nobody may see\n{}\n"), InstallGuestAgent: true}
}

func spec() provider.Spec {
	return provider.Spec{Provider: "home", Image: "debian", CPUs: 2, MemoryMiB: 256, DiskGiB: 3, Port: 3128, CloudInit: userData()}
}

func request(proxy string, s provider.Spec) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName("own", proxy, 1), Spec: s,
		Mark: provider.Mark{Owner: "own", Proxy: proxy, Generation: 1, HashVersion: provider.HashVersion, Hash: s.Hash(nil)},
	}
}

// create makes an instance or fails the test.
func (r *rig) create(t *testing.T, proxy string, s provider.Spec) provider.Instance {
	t.Helper()
	x, err := r.Create(t.Context(), request(proxy, s), "because")
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// left returns what is on the host, but for bases.
func (r *rig) left() []string {
	var left []string
	for _, d := range r.peer.Domains() {
		left = append(left, d.XML.Name)
	}
	for _, v := range r.peer.Volumes() {
		if !strings.HasPrefix(v.Name, "base-") {
			left = append(left, v.Name)
		}
	}
	return left
}
