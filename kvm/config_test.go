package kvm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
)

func wantTexts(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
}

func TestABadConfigNamesEveryFieldAtOnce(t *testing.T) {
	_, err := New(Config{
		Name: "No Name", URI: "xen:///system", SSH: SSH{KeepaliveInterval: -time.Second}, StoragePool: "a/b", Network: "n", Bridge: "b", Firmware: "coreboot",
		Images:        map[string]Image{"Big": {URL: "ftp://images.example/a", SHA256: "12", SHA512: "34", Format: "vmdk", Compression: "xz", Firmware: "ofw"}},
		ShutdownGrace: -time.Second, MaxInstances: -1, MaxMemoryMiB: -2, MaxCPUs: -3, FetchOnHost: true,
	})
	wantTexts(t, err, "kvm: Name ", `kvm: URI has scheme "xen"`, "SSH.KeepaliveInterval -1s", `StoragePool "a/b"`, `Network "n" and Bridge "b" are both set`, `Firmware "coreboot"`,
		`Images has "Big"`, "Images Big: URL is no http or https URL", `SHA256 "12"`, `SHA512 "34"`, "SHA256 and SHA512 are both set", `Format "vmdk"`, `Compression "xz"`, `Firmware "ofw"`,
		"ShutdownGrace -1s", "MaxInstances -1", "MaxMemoryMiB -2", "MaxCPUs -3", "FetchOnHost needs a host that is reached over SSH")
	_, err = New(Config{})
	wantTexts(t, err, "kvm: Name is empty", "kvm: URI ")
	_, err = New(Config{Name: "home", URI: "qemu+ssh://root@host/system", SSH: SSH{PinnedKeys: []string{"nonsense"}}})
	wantTexts(t, err, "kvm: SSH: ")
	_, err = New(Config{Name: "home", URI: "qemu+ssh://root:hunter2@host/system"})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a password in the URI: %v", err)
	}
}

func TestTheHostIsNamedAsTheEntryUnlessItHasItsOwnName(t *testing.T) {
	for host, want := range map[string]string{"": "home", "attic": "attic"} {
		p, err := New(Config{Name: "home", Host: host, URI: "qemu:///system"})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if p.Name() != "home" || p.host.Target() != want {
			t.Errorf("%s, %s", p.Name(), p.host.Target())
		}
	}
}

func TestAnInvalidSpecNamesEveryFieldAtOnce(t *testing.T) {
	p, err := New(Config{Name: "home", Host: "attic", Labels: map[string]string{"country": "cz"}, URI: "qemu:///system", Images: map[string]Image{"debian": {URL: "https://images.example/a"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	err = p.Validate(provider.Spec{
		Provider: "other", Image: "ubuntu", CPUs: -1, MemoryMiB: 1, DiskGiB: -1, Port: -1, Options: map[string]string{"x": "y"},
		Placement: provider.Placement{Host: "cellar"}, CloudInit: provider.CloudInit{UserData: []byte("plain")},
	})
	wantTexts(t, err, `Provider "other", this one is "home"`, `Image "ubuntu", want one of debian`, "CPUs -1", "MemoryMiB 1", "DiskGiB -1", "Port -1", `unknown key "x"`,
		`Placement.Host "cellar", want "attic"`, "CloudInit.UserData")
	if !errors.Is(err, provider.ErrPermanent) || provider.ReasonOf(err) != provider.ReasonUnsupported {
		t.Errorf("%v is %v, %s", err, provider.Kind(err), provider.ReasonOf(err))
	}
	for _, placement := range []provider.Placement{{}, {Host: "attic"}, {Labels: map[string]string{"country": "cz"}}} {
		if err := p.Validate(provider.Spec{Provider: "home", Image: "debian", Placement: placement}); err != nil {
			t.Errorf("%+v: %v", placement, err)
		}
	}
	wantTexts(t, p.Validate(provider.Spec{Image: "debian", Placement: provider.Placement{Labels: map[string]string{"country": "at"}}}), "Placement.Labels country=at, which attic has not")
	if _, err := p.Create(t.Context(), provider.CreateRequest{Name: "a", Spec: provider.Spec{Image: "ubuntu"}}); !errors.Is(err, provider.ErrPermanent) {
		t.Errorf("a create of an invalid spec: %v", err)
	}
}

// daemon is a host that listens at a socket, and a provider of small instances on it.
func daemon(t *testing.T) (host *libvirttest.Host, socket string, p *Provider) {
	t.Helper()
	folder, err := os.MkdirTemp("", "kvm") // t.TempDir is too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	content := bytes.Repeat([]byte("raw disk"), 1<<10)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Unix(1, 0), bytes.NewReader(content))
	}))
	t.Cleanup(web.Close)
	host, socket = libvirttest.New(libvirttest.Config{Address: addressOf}), filepath.Join(folder, "s")
	t.Cleanup(host.Close)
	if err := host.Listen(socket); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	p, err = New(Config{
		Name: "home", Host: "attic", URI: "qemu:///system?socket=" + socket, MinFreeGiB: -1, SSH: SSH{KeepaliveInterval: time.Second},
		Images: map[string]Image{"raw": {URL: web.URL + "/disk.raw", SHA256: hex.EncodeToString(sum[:]), Format: "raw", Firmware: FirmwareBIOS}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return host, socket, p
}

func rawSpec() provider.Spec {
	return provider.Spec{Provider: "home", Image: "raw", MemoryMiB: 64, Port: 3128, CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n# a secret that nobody may see\n{}\n")}}
}

func idOf(u golibvirt.UUID) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// addressOf is a guest's address, by its hardware address.
func addressOf(mac string) string {
	b, err := net.ParseMAC(mac)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("10.%d.%d.%d", b[3], b[4], b[5])
}

func ready(t *testing.T, p *Provider) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !p.Check(t.Context())[0].Ready; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the host is not ready within a minute")
		}
	}
}

func TestConformanceWithADaemonInMemory(t *testing.T) {
	skip := map[string]string{"one host down": "there is one host, see package kvm2"}
	providertest.Run(t, providertest.Config{Skip: skip, New: func(t *testing.T) providertest.Harness {
		host, socket, p := daemon(t)
		invalid := rawSpec()
		invalid.Image = "nothing"
		return providertest.Harness{
			Provider: p, Owner: "own", Spec: rawSpec(), Invalid: &invalid,
			AddForeign: func(_ *testing.T, name string) string { return idOf(host.AddDomain(name)) },
			Exists: func(_ *testing.T, id string) bool {
				return slices.ContainsFunc(host.Domains(), func(d libvirttest.Domain) bool { return idOf(d.UUID) == id })
			},
			LoseAnswer: func(*testing.T) {
				host.Inject(libvirttest.Fault{Procedure: "DomainSetMetadata", Times: 1, Lose: true})
			},
			LeaveHalf: func(*testing.T) {
				host.Inject(libvirttest.Fault{Procedure: "DomainCreateWithFlags", Times: 1, Cut: true})
				host.Inject(libvirttest.Fault{Procedure: "DomainDestroyFlags", Times: 1, Code: golibvirt.ErrInternalError, Message: "internal error: busy"})
			},
			Break: func(t *testing.T, _ string) func() {
				host.SetDown(true)
				return func() {
					host.SetDown(false)
					if err := host.Listen(socket); err != nil {
						t.Fatal(err)
					}
					ready(t, p)
				}
			},
			Deny: func(*testing.T) func() {
				return host.Inject(libvirttest.Fault{Code: golibvirt.ErrAuthFailed, Message: "authentication failed: access denied by policy"})
			},
			Fill: func(*testing.T) func() {
				host.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1 })
				return func() { host.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1 << 40 }) }
			},
		}
	}})
}

func TestImagesThatNobodyNamesAreEvicted(t *testing.T) {
	host, _, p := daemon(t)
	request := provider.CreateRequest{
		Name: provider.InstanceName("own", "a", 1), Spec: rawSpec(), Mark: provider.Mark{Owner: "own", Proxy: "a", Generation: 1, HashVersion: provider.HashVersion, Hash: "h"},
	}
	x, err := p.Create(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), x.ID); err != nil {
		t.Fatal(err)
	}
	if gone, err := p.EvictImages(t.Context()); err != nil || len(gone) > 0 {
		t.Errorf("evicted %q, which Images names: %v", gone, err)
	}
	p.config.Images = nil
	if gone, err := p.EvictImages(t.Context()); err != nil || !slices.Equal(gone, []string{"base-raw"}) || len(host.Volumes()) > 0 {
		t.Errorf("evicted %q, %v; left %+v", gone, err, host.Volumes())
	}
}

func TestWarningsAreThoseOfTheDocument(t *testing.T) {
	_, _, p := daemon(t)
	if w := p.Warnings(rawSpec()); len(w) > 0 {
		t.Errorf("%q", w)
	}
}
