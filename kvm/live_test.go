//go:build live

package kvm_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
)

// host is the host that tests share which leave it as they found it.
var host struct {
	once sync.Once
	*testhost.Host
	err error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if host.Host != nil {
		_ = host.Close() // always nil
		_ = os.RemoveAll(host.Folder)
	}
	os.Exit(code)
}

func shared(t *testing.T) *testhost.Host {
	t.Helper()
	testhost.Require(t)
	host.once.Do(func() {
		folder, err := os.MkdirTemp("", "testhost")
		if err != nil {
			host.err = err
			return
		}
		host.Host, host.err = testhost.New(testhost.Options{Folder: folder})
	})
	if host.err != nil {
		t.Fatal(host.err)
	}
	return host.Host
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// serve serves bytes.
func serve(t *testing.T, h *testhost.Host, content []byte) string {
	t.Helper()
	return h.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Unix(1, 0), strings.NewReader(string(content)))
	})) + "/idle.img"
}

// keepalive is short, and long enough for a busy machine.
const keepalive = 4 * time.Second

// configOf is a provider of idle guests on h.
func configOf(t *testing.T, h *testhost.Host) kvm.Config {
	idle := testhost.IdleImage()
	return kvm.Config{
		Name: "home", URI: h.URI(), SSH: kvm.SSH{KnownHosts: []string{h.KnownHosts()}, KeyFiles: []string{h.KeyFile()}, KeepaliveInterval: keepalive},
		Images: map[string]kvm.Image{"idle": {URL: serve(t, h, idle), SHA256: sum(idle), Format: "raw", Firmware: kvm.FirmwareBIOS}}, AllowEmulation: true,
		MinFreeGiB: -1,
		Logger:     slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func open(t *testing.T, config kvm.Config) *kvm.Provider {
	t.Helper()
	p, err := kvm.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func idleSpec() provider.Spec {
	return provider.Spec{
		Provider: "home", Image: "idle", MemoryMiB: 64, Port: 3128,
		CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n# a secret that nobody may see\n{}\n")},
	}
}

func request(owner, proxy string, spec provider.Spec) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName(owner, proxy, 1), Spec: spec,
		Mark: provider.Mark{Owner: owner, Proxy: proxy, Generation: 1, HashVersion: provider.HashVersion, Hash: spec.Hash(nil)},
	}
}

// leftovers is what the host has besides bases: domains, volumes and NVRAM files.
func leftovers(t *testing.T, h *testhost.Host, bases bool) []string {
	t.Helper()
	h.Virsh(t, "pool-refresh", "default")
	var left []string
	for _, line := range strings.Fields(h.Virsh(t, "list", "--all", "--name")) {
		left = append(left, "domain "+line)
	}
	for line := range strings.Lines(h.Virsh(t, "vol-list", "default")) {
		if fields := strings.Fields(line); len(fields) > 0 && (bases || !strings.HasPrefix(fields[0], "base-")) {
			left = append(left, "volume "+fields[0])
		}
	}
	out, err := h.Run("find", "/var/lib/libvirt/qemu/nvram", "/var/lib/libvirt/qemu/save", "-type", "f")
	if err == nil {
		for _, line := range strings.Fields(out) {
			left = append(left, "file "+line)
		}
	}
	return left
}

func nothingLeft(t *testing.T, h *testhost.Host) {
	t.Helper()
	if left := leftovers(t, h, false); len(left) > 0 {
		t.Errorf("left on the host: %q", left)
	}
}

// whenDefined calls f as soon as the host knows a domain whose name contains part.
func whenDefined(t *testing.T, h *testhost.Host, part string, f func()) {
	t.Helper()
	whenFile(t, filepath.Join(h.Folder, "etc", "qemu", "*"+part+"*.xml"), f)
}

// whenFile calls f as soon as a file matches pattern, in a goroutine that the test waits for.
func whenFile(t *testing.T, pattern string, f func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	old, _ := filepath.Glob(pattern)
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if found, _ := filepath.Glob(pattern); len(found) > len(old) {
				f()
				return
			}
			<-time.After(time.Millisecond)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// ready waits until the provider is on speaking terms with its host again.
func ready(t *testing.T, p *kvm.Provider) {
	t.Helper()
	until(t, "the host is ready", func() bool { return p.Check(t.Context())[0].Ready })
}

// until waits for something to come about.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); <-time.After(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within two minutes: %s", what)
		}
	}
}

func TestLiveConformance(t *testing.T) {
	h := shared(t)
	providertest.Run(t, providertest.Config{
		Live: true, Skip: map[string]string{"boot": "idle guests have no network; examples/kvm boots a real one", "one host down": "there is one host"},
		Patience: time.Minute, Parallel: 6,
		New: func(t *testing.T) providertest.Harness {
			t.Cleanup(func() { nothingLeft(t, h) })
			p := open(t, configOf(t, h))
			invalid := idleSpec()
			invalid.Image = "no-such-image"
			restart := func() {
				h.Must(t, "kill")
				h.Must(t, "start")
			}
			return providertest.Harness{
				Provider: p, Spec: idleSpec(), Invalid: &invalid, NoBoot: true,
				AddForeign: func(t *testing.T, name string) string {
					file := filepath.Join(h.Folder, "foreign.xml")
					xml := fmt.Sprintf("<domain type='qemu'><name>%s</name><memory unit='MiB'>64</memory><os><type arch='x86_64' machine='q35'>hvm</type></os></domain>", name)
					if err := os.WriteFile(file, []byte(xml), 0o600); err != nil {
						t.Fatal(err)
					}
					h.Virsh(t, "define", file)
					id := h.Virsh(t, "domuuid", name)
					t.Cleanup(func() { h.Virsh(t, "undefine", id) })
					return id
				},
				Exists:     func(t *testing.T, id string) bool { return strings.Contains(h.Virsh(t, "list", "--all", "--uuid"), id) },
				LoseAnswer: func(t *testing.T) { whenDefined(t, h, "--a--", restart) },
				LeaveHalf: func(t *testing.T) {
					whenFile(t, "/proc/"+h.Init()+"/root/var/lib/libvirt/images/conform--*.seed.iso", restart)
				},
				Break: func(t *testing.T, _ string) func() {
					h.Must(t, "cut")
					return func() {
						h.Must(t, "mend")
						ready(t, p)
					}
				},
				Deny: func(t *testing.T) func() {
					h.Must(t, "deny")
					p.Check(t.Context()) // so that the sessions that were cut are known to be gone
					return func() {
						h.Must(t, "allow")
						ready(t, p)
					}
				},
				Fill: func(t *testing.T) func() {
					// The image has to be there already: what does not fit is the disk.
					made, err := p.Create(t.Context(), request("conform", "z", idleSpec()))
					if err != nil {
						t.Fatal(err)
					}
					if err := p.Delete(t.Context(), made.ID); err != nil {
						t.Fatal(err)
					}
					h.Must(t, "fill")
					return func() { h.Must(t, "empty") }
				},
			}
		},
	})
}

func TestLiveWhatOneProcessMadeAnotherFindsAndDeletes(t *testing.T) {
	h := shared(t)
	first := open(t, configOf(t, h))
	made, err := first.Create(t.Context(), request("adopt", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	_ = first.Close() // always nil
	second := open(t, configOf(t, h))
	all, err := second.List(t.Context(), "adopt")
	if err != nil || len(all) != 1 || all[0].ID != made.ID || all[0].Mark != made.Mark || all[0].State != provider.StateRunning {
		t.Fatalf("%+v, %v; want %+v", all, err, made)
	}
	if _, err := second.Create(t.Context(), request("adopt", "a", idleSpec())); !errors.Is(err, provider.ErrAlreadyExists) {
		t.Errorf("create: %v", err)
	}
	if err := second.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, h)
}
