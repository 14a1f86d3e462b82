//go:build live

package kvm_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm"
	"crawl.example.com/egress/provider"
)

// bootPatience bounds an emulated boot on a busy machine.
const bootPatience = 8 * time.Minute

// guest is a real guest that asks over HTTP what it is to do, so that it can be told to stop its agent.
type guest struct {
	commands, answers chan string
	userData          chan []byte
	image             string
}

func (g *guest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := func() []byte {
		b, _ := io.ReadAll(r.Body) // what is missing is noticed
		return b
	}
	switch r.URL.Path {
	case "/image.qcow2":
		http.ServeFile(w, r, g.image)
	case "/next":
		select {
		case command := <-g.commands:
			_, _ = io.WriteString(w, command+"\n")
		case <-r.Context().Done():
		}
	case "/answer":
		g.answers <- string(body())
	case "/user-data":
		g.userData <- body()
	default:
		http.NotFound(w, r)
	}
}

// run runs a shell command in the guest, as root.
func (g *guest) run(t *testing.T, command string) string {
	t.Helper()
	after := time.After(2 * time.Minute)
	select {
	case g.commands <- command:
	case <-after:
		t.Fatalf("the guest does not ask for %q", command)
	}
	select {
	case answer := <-g.answers:
		return strings.TrimSpace(answer)
	case <-after:
		t.Fatalf("the guest has no answer to %q", command)
	}
	return ""
}

// obedient makes a guest do what it is told. The rest is what a careless copy would change.
const obedient = `#cloud-config
# Grüße, 日本語, a tab	and two blanks at the end  
write_files:
  - path: /root/obey
    content: |
      while :; do
        if curl -sf -m 900 URL/next -o /run/next; then
          sh /run/next >/run/answer 2>&1
          curl -sf --data-binary @/run/answer URL/answer
        else
          sleep 1
        fi
      done
runcmd:
  - curl -sf --retry 20 --retry-connrefused --data-binary @/var/lib/cloud/instance/user-data.txt URL/user-data
  - systemd-run --unit obey /bin/sh /root/obey
# no newline at the end`

// withIPv6 gives the host's network an IPv6 prefix too, and returns why that is not possible.
func withIPv6(t *testing.T, h *testhost.Host) string {
	t.Helper()
	before := h.Virsh(t, "net-dumpxml", "default")
	part := strings.Split(h.Address, ".")[2]
	dual := strings.Replace(before, "</network>", "<ip family='ipv6' address='fd00:10:232:"+part+"::1' prefix='64'/></network>", 1)
	define := func(xml string) error {
		file := filepath.Join(h.Folder, "net.xml")
		if err := os.WriteFile(file, []byte(xml), 0o600); err != nil {
			t.Fatal(err)
		}
		h.Virsh(t, "net-define", file)
		_, err := h.Run("virsh", "-q", "net-start", "default")
		return err
	}
	h.Virsh(t, "net-destroy", "default")
	if err := define(dual); err != nil {
		if err := define(before); err != nil {
			t.Fatal(err)
		}
		return err.Error()
	}
	return ""
}

// within calls f, which must not take longer than limit.
func within(t *testing.T, what string, limit time.Duration, f func()) {
	t.Helper()
	begin := time.Now()
	f()
	took := time.Since(begin)
	t.Logf("%s: %s", what, took.Round(time.Millisecond))
	if took > limit {
		t.Errorf("%s took %s, want at most %s", what, took, limit)
	}
}

func TestLiveARealGuestIsFoundWhateverBecomesOfItsAgent(t *testing.T) {
	h := testhost.Start(t, testhost.Options{})
	image, err := testhost.Image()
	if err != nil {
		t.Fatal(err)
	}
	digest := digestOf(t, image)
	noIPv6 := withIPv6(t, h)
	g := &guest{commands: make(chan string), answers: make(chan string, 1), userData: make(chan []byte, 1), image: image}
	url := h.Serve(t, g)
	config := configOf(t, h)
	config.Images = map[string]kvm.Image{"debian": {URL: url + "/image.qcow2", SHA256: digest}}
	p := open(t, config)
	config.IPv6 = true
	p6 := open(t, config)

	userData := []byte(strings.ReplaceAll(obedient, "URL", url))
	spec := provider.Spec{
		Provider: "home", Image: "debian", MemoryMiB: 768, CPUs: 2, Port: 3128, CloudInit: provider.CloudInit{UserData: userData},
	}
	begin := time.Now()
	made, err := p.Create(t.Context(), request("guest", "a", spec))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("made after %s", time.Since(begin).Round(time.Second))
	deleted := false
	t.Cleanup(func() {
		if !deleted {
			log, _ := h.Run("sh", "-c", "tail -c 3000 "+poolDir+"/*.log")
			t.Logf("the guest's console:\n%s", log)
		}
	})
	address := func(t *testing.T, p *kvm.Provider) string {
		t.Helper()
		x, err := p.Get(t.Context(), made.ID)
		if err != nil || x.State != provider.StateRunning {
			t.Fatalf("%+v, %v", x, err)
		}
		return x.Address
	}
	t.Run("its user data is what was given, byte for byte", func(t *testing.T) {
		select {
		case got := <-g.userData:
			if !bytes.Equal(got, userData) {
				t.Errorf("got %q\nwant %q", got, userData)
			}
		case <-time.After(bootPatience):
			t.Fatalf("not heard of the guest within %s", bootPatience)
		}
		t.Logf("up after %s", time.Since(begin).Round(time.Second))
	})
	if t.Failed() {
		return
	}
	want := g.run(t, "ip -4 -o addr show dev eth0 | awk '{print $4}' | cut -d/ -f1")
	leases := "/proc/" + h.Init() + "/root/var/lib/libvirt/dnsmasq/virbr0.status"
	// withoutLeases has libvirt know of none, as on a bridge.
	withoutLeases := func(t *testing.T) {
		t.Helper()
		hidden := leases + ".hidden"
		if err := os.Rename(leases, hidden); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Rename(hidden, leases); err != nil {
				t.Error(err)
			}
		})
		if out := h.Virsh(t, "net-dhcp-leases", "default"); strings.Contains(out, want) {
			t.Fatalf("there are leases still: %s", out)
		}
	}
	t.Run("the agent says the address", func(t *testing.T) {
		withoutLeases(t)
		until(t, "the agent answers", func() bool { return strings.Contains(try(h, "domifaddr", made.Name, "--source", "agent"), want) })
		if got := address(t, p); got != want {
			t.Errorf("got %q, want %s", got, want)
		}
	})
	t.Run("IPv6 is used where it is wanted", func(t *testing.T) {
		if noIPv6 != "" {
			t.Skip("the test host's network can't have IPv6: " + noIPv6)
		}
		until(t, "the guest has a global IPv6 address", func() bool {
			return g.run(t, "ip -6 -o addr show dev eth0 scope global -tentative") != ""
		})
		got, err := netip.ParseAddr(address(t, p6))
		if err != nil || !got.Is6() || !strings.Contains(g.run(t, "ip -6 -o addr show dev eth0 scope global"), got.String()) {
			t.Errorf("with IPv6: %s, %v", got, err)
		}
		if got := address(t, p); got != want {
			t.Errorf("without: %q, want %s", got, want)
		}
	})
	t.Run("without an agent the lease says the address", func(t *testing.T) {
		g.run(t, "systemctl stop qemu-guest-agent")
		until(t, "the agent is gone", func() bool { return !strings.Contains(try(h, "domifaddr", made.Name, "--source", "agent"), want) })
		within(t, "Get", 2*time.Second, func() {
			if got := address(t, p); got != want {
				t.Errorf("got %q, want %s", got, want)
			}
		})
	})
	t.Run("without an agent and a lease the neighbour table says the address", func(t *testing.T) {
		withoutLeases(t)
		if out, err := h.Run("virsh", "domifaddr", made.Name, "--source", "arp"); err != nil {
			if got := address(t, p); got != "" {
				t.Errorf("got %q, and nobody can say", got)
			}
			t.Skip("this libvirt can't read this kernel's neighbour table: " + out)
		}
		if got := address(t, p); got != want {
			t.Errorf("got %q, want %s", got, want)
		}
	})
	t.Run("an agent that hangs holds nothing up", func(t *testing.T) {
		g.run(t, "systemctl start qemu-guest-agent")
		until(t, "the agent answers", func() bool { return strings.Contains(try(h, "domifaddr", made.Name, "--source", "agent"), want) })
		g.run(t, "kill -STOP $(pidof qemu-ga)")
		// A provider that has not met the guest before waits for its agent once, and leaves it alone for a while after that.
		fresh := open(t, configOf(t, h))
		ready(t, fresh)
		for i, limit := range []time.Duration{10 * time.Second, 2 * time.Second, 2 * time.Second} {
			within(t, fmt.Sprintf("Get %d", i+1), limit, func() {
				if got := address(t, fresh); got != want {
					t.Errorf("got %q, want %s", got, want)
				}
			})
		}
		asked := make(chan time.Duration, 6)
		for range cap(asked) {
			go func() {
				begin := time.Now()
				if _, err := p.Get(t.Context(), made.ID); err != nil {
					t.Error(err)
				}
				asked <- time.Since(begin)
			}()
		}
		within(t, "List beside six Gets", 2*time.Second, func() {
			all, err := p.List(t.Context(), "guest")
			if err != nil || len(all) != 1 || all[0].State != provider.StateRunning {
				t.Errorf("%+v, %v", all, err)
			}
		})
		for range cap(asked) {
			if took := <-asked; took > 10*time.Second {
				t.Errorf("one of six Gets took %s", took)
			}
		}
		within(t, "Delete", 15*time.Second, func() {
			if err := p.Delete(t.Context(), made.ID); err != nil {
				t.Error(err)
			}
		})
		deleted = true
		nothingLeft(t, h)
	})
}

// try is what virsh on the host says, even if that is an error.
func try(h *testhost.Host, args ...string) string {
	out, _ := h.Run("timeout", append([]string{"20", "virsh", "-q"}, args...)...) // an error is an answer too
	return out
}

func digestOf(t *testing.T, file string) string {
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
	return hex.EncodeToString(sum.Sum(nil))
}
