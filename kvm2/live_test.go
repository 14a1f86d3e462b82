//go:build live

package kvm2_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm2"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
)

// room are the hosts that the tests share, which leave them as they found them.
var room struct {
	once  sync.Once
	hosts []*testhost.Host
	err   error
}

var names = []string{"alpha", "beta", "gamma"}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, h := range room.hosts {
		_ = h.Close() // always nil
		_ = os.RemoveAll(h.Folder)
	}
	os.Exit(code)
}

func shared(t *testing.T) []*testhost.Host {
	t.Helper()
	testhost.Require(t)
	room.once.Do(func() {
		for range names {
			folder, err := os.MkdirTemp("", "testhost")
			if err != nil {
				room.err = err
				return
			}
			h, err := testhost.New(testhost.Options{Folder: folder, PoolMiB: 512})
			if err != nil {
				room.err = err
				return
			}
			room.hosts = append(room.hosts, h)
		}
	})
	if room.err != nil {
		t.Fatal(room.err)
	}
	return room.hosts
}

func hostOf(name string) *testhost.Host { return room.hosts[slices.Index(names, name)] }

// image serves an image that does nothing. before is called before each 64 KiB.
func image(t *testing.T, hosts []*testhost.Host, mib int, before func(offset int)) kvm2.Image {
	t.Helper()
	content := make([]byte, mib<<20)
	_, _ = rand.NewChaCha8([32]byte{byte(mib)}).Read(content) // never fails, and the same each time: bases are not overwritten
	copy(content, testhost.IdleImage()[:512])
	sum := sha256.Sum256(content)
	url := hosts[0].Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		for offset := 0; offset < len(content); offset += 64 << 10 {
			if before != nil {
				before(offset)
			}
			if _, err := w.Write(content[offset : offset+64<<10]); err != nil {
				return
			}
		}
	}))
	return kvm2.Image{URL: url + "/idle.img", SHA256: hex.EncodeToString(sum[:]), Format: "raw", Firmware: kvm2.FirmwareBIOS}
}

func configOf(t *testing.T, hosts []*testhost.Host) kvm2.Config {
	config := kvm2.Config{
		Name: "fleet", AllowEmulation: true, ListTimeout: 2 * time.Second, HostBackoff: 5 * time.Second,
		Images: map[string]kvm2.Image{"idle": image(t, hosts, 1, nil)},
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for i, h := range hosts {
		config.Hosts = append(config.Hosts, kvm2.Host{
			Name: names[i], URI: h.URI(), MinFreeGiB: -1, Labels: map[string]string{"rack": fmt.Sprint(i / 2)},
			SSH: &kvm2.SSH{KnownHosts: []string{h.KnownHosts()}, KeyFiles: []string{h.KeyFile()}, KeepaliveInterval: 2 * time.Second},
		})
	}
	return config
}

func open(t *testing.T, config kvm2.Config) *kvm2.Provider {
	t.Helper()
	p, err := kvm2.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func idleSpec() provider.Spec {
	return provider.Spec{Provider: "fleet", Image: "idle", MemoryMiB: 64, Port: 3128, CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n# a secret that nobody may see\n{}\n")}}
}

func request(proxy string, spec provider.Spec) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName("own", proxy, 1), Spec: spec,
		Mark: provider.Mark{Owner: "own", Proxy: proxy, Generation: 1, HashVersion: provider.HashVersion, Hash: spec.Hash(nil)},
	}
}

// nothingLeft checks that no host has a domain or a volume, but for bases.
func nothingLeft(t *testing.T, hosts []*testhost.Host) {
	t.Helper()
	for i, h := range hosts {
		h.Virsh(t, "pool-refresh", "default")
		left := strings.Fields(h.Virsh(t, "list", "--all", "--name"))
		for line := range strings.Lines(h.Virsh(t, "vol-list", "default")) {
			if fields := strings.Fields(line); len(fields) > 0 && !strings.HasPrefix(fields[0], "base-") {
				left = append(left, fields[0])
			}
		}
		if len(left) > 0 {
			t.Errorf("left on %s: %q", names[i], left)
		}
	}
}

func evict(t *testing.T, config kvm2.Config) {
	t.Helper()
	config.Images = nil
	p := open(t, config)
	defer p.Close()
	if _, err := p.EvictImages(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); <-time.After(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within two minutes: %s", what)
		}
	}
}

func ready(t *testing.T, p *kvm2.Provider) {
	t.Helper()
	until(t, "every host is ready", func() bool {
		for _, h := range p.Check(t.Context()) {
			if !h.Ready {
				return false
			}
		}
		return true
	})
}

// restartWhen kills and starts the daemon of the host on which a file of that pattern appears.
func restartWhen(t *testing.T, hosts []*testhost.Host, pattern func(h *testhost.Host) string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	for _, h := range hosts {
		watching.Go(func() {
			for ctx.Err() == nil {
				if found, _ := filepath.Glob(pattern(h)); len(found) > 0 {
					h.Must(t, "kill")
					h.Must(t, "start")
					return
				}
				<-time.After(time.Millisecond)
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		watching.Wait()
	})
}

func TestLiveConformanceWithSeveralHosts(t *testing.T) {
	hosts := shared(t)[:2]
	providertest.Run(t, providertest.Config{
		Live: true, Skip: map[string]string{"boot": "idle guests have no network; examples/kvm2 boots real ones"},
		Patience: 20 * time.Second, Parallel: 6,
		New: func(t *testing.T) providertest.Harness {
			t.Cleanup(func() { nothingLeft(t, hosts) })
			config := configOf(t, hosts)
			config.ListTimeout = 8 * time.Second // a daemon that was restarted takes its time
			p := open(t, config)
			invalid := idleSpec()
			invalid.Placement.Host = "no-such-host"
			each := func(t *testing.T, command string) {
				for _, h := range hosts {
					h.Must(t, command)
				}
			}
			return providertest.Harness{
				Provider: p, Owner: "own", Spec: idleSpec(), Invalid: &invalid, NoBoot: true,
				AddForeign: func(t *testing.T, name string) string {
					file := filepath.Join(hosts[0].Folder, "foreign.xml")
					xml := fmt.Sprintf("<domain type='qemu'><name>%s</name><memory unit='MiB'>64</memory><os><type arch='x86_64' machine='q35'>hvm</type></os></domain>", name)
					if err := os.WriteFile(file, []byte(xml), 0o600); err != nil {
						t.Fatal(err)
					}
					hosts[0].Virsh(t, "define", file)
					id := hosts[0].Virsh(t, "domuuid", name)
					t.Cleanup(func() { hosts[0].Virsh(t, "undefine", id) })
					return names[0] + "/" + id
				},
				Exists: func(t *testing.T, id string) bool {
					host, id, _ := strings.Cut(id, "/")
					return strings.Contains(hostOf(host).Virsh(t, "list", "--all", "--uuid"), id)
				},
				LoseAnswer: func(t *testing.T) {
					restartWhen(t, hosts, func(h *testhost.Host) string { return filepath.Join(h.Folder, "etc", "qemu", "*--a--*.xml") })
				},
				LeaveHalf: func(t *testing.T) {
					stale := map[string]bool{}
					for _, h := range hosts {
						found, _ := filepath.Glob("/proc/" + h.Init() + "/root/var/lib/libvirt/images/own--*.seed.iso")
						for _, f := range found {
							stale[f] = true
						}
					}
					ctx, cancel := context.WithCancel(context.Background())
					var watching sync.WaitGroup
					var once sync.Once
					for _, h := range hosts {
						watching.Go(func() {
							for ctx.Err() == nil {
								found, _ := filepath.Glob("/proc/" + h.Init() + "/root/var/lib/libvirt/images/own--*.seed.iso")
								if slices.ContainsFunc(found, func(f string) bool { return !stale[f] }) {
									once.Do(func() {
										h.Must(t, "kill")
										h.Must(t, "start")
										cancel()
									})
								}
								<-time.After(time.Millisecond)
							}
						})
					}
					t.Cleanup(func() {
						cancel()
						watching.Wait()
					})
				},
				Break: func(t *testing.T, host string) func() {
					if host != "" {
						hostOf(host).Must(t, "cut")
						return func() {
							hostOf(host).Must(t, "mend")
							ready(t, p)
						}
					}
					each(t, "cut")
					return func() {
						each(t, "mend")
						ready(t, p)
					}
				},
				Deny: func(t *testing.T) func() {
					each(t, "deny")
					p.Check(t.Context()) // so that the sessions that were cut are known to be gone
					return func() {
						each(t, "allow")
						ready(t, p)
					}
				},
				Fill: func(t *testing.T) func() {
					for i := range hosts {
						spec := idleSpec()
						spec.Placement.Host = names[i] // so that the image is there already
						made, err := p.Create(t.Context(), request("z", spec))
						if err != nil {
							t.Fatal(err)
						}
						if err := p.Delete(t.Context(), made.ID); err != nil {
							t.Fatal(err)
						}
					}
					each(t, "fill")
					return func() { each(t, "empty") }
				},
			}
		},
	})
}

func TestLiveInstancesAreSpreadAndPlacedWhereTheyMayBe(t *testing.T) {
	hosts := shared(t)
	config := configOf(t, hosts)
	for i := range config.Hosts {
		config.Hosts[i].MaxInstances = 4
	}
	p := open(t, config)
	defer nothingLeft(t, hosts)
	on := map[string]int{}
	var ids []string
	create := func(proxy string, placement provider.Placement) (provider.Instance, error) {
		spec := idleSpec()
		spec.Placement = placement
		x, err := p.Create(t.Context(), request(proxy, spec))
		if err == nil {
			ids = append(ids, x.ID)
			on[x.Host]++
			t.Log(x.Message)
			if !strings.HasPrefix(x.Message, "on "+x.Host+" of ") || !strings.HasPrefix(x.ID, x.Host+"/") {
				t.Errorf("%+v does not say why it is there", x)
			}
		}
		return x, err
	}
	for i := range 6 {
		if _, err := create(fmt.Sprintf("free%d", i), provider.Placement{}); err != nil {
			t.Fatal(err)
		}
	}
	if on["alpha"] != 2 || on["beta"] != 2 || on["gamma"] != 2 {
		t.Errorf("six instances are on %v", on)
	}
	if x, err := create("byhost", provider.Placement{Host: "beta"}); err != nil || x.Host != "beta" {
		t.Errorf("%s, %v", x.Host, err)
	}
	if x, err := create("bylabel", provider.Placement{Labels: map[string]string{"rack": "1"}}); err != nil || x.Host != "gamma" {
		t.Errorf("%s, %v", x.Host, err)
	}
	groups := map[string]bool{}
	for i := range 3 {
		x, err := create(fmt.Sprintf("group%d", i), provider.Placement{Group: "g"})
		if err != nil {
			t.Fatal(err)
		}
		groups[x.Host] = true
	}
	if len(groups) != 3 {
		t.Errorf("three of a group are on %v", groups)
	}
	if _, err := create("last", provider.Placement{}); err != nil {
		t.Error(err)
	}
	_, err := create("toomany", provider.Placement{})
	if !errors.Is(err, provider.ErrNoCapacity) || !strings.Contains(err.Error(), "alpha: 4 of MaxInstances 4") || !strings.Contains(err.Error(), "gamma") {
		t.Errorf("with every host full: %v", err)
	}
	// Another process sees the same, and Cordoned hosts get nothing.
	config.Hosts[0].MaxInstances, config.Hosts[1].MaxInstances = 9, 9
	config.Hosts[0].Cordoned = true
	if err := p.SetHosts(config.Hosts); err != nil {
		t.Fatal(err)
	}
	if x, err := create("cordoned", provider.Placement{}); err != nil || x.Host != "beta" {
		t.Errorf("%s, %v", x.Host, err)
	}
	var all sync.WaitGroup
	for _, id := range ids {
		all.Go(func() {
			if err := p.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// judged is a provider whose guests, which do nothing, are taken for working proxies as long as their host is there.
type judged struct {
	*kvm2.Provider
	cut atomic.Pointer[string]
}

func (j *judged) Probe(_ context.Context, x provider.Instance) error {
	if cut := j.cut.Load(); cut != nil && x.Host == *cut {
		return errors.New("its host is cut off")
	}
	return nil
}

func pool(t *testing.T, p provider.Provider, n int) *egress.Pool {
	t.Helper()
	pool, err := egress.New(egress.Config{
		Name: "own", Providers: []provider.Provider{provider.Shared(p)}, DestroyOnClose: true, ListInterval: time.Second, ListTimeout: 10 * time.Second,
		UnhealthyGrace: 2 * time.Second, LostGrace: 5 * time.Second, OrphanGrace: 3 * time.Second, StoppedGrace: 2 * time.Second,
		DrainDeadline: 5 * time.Second,
		Logger:        slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := pool.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	one := 1
	network := &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("10.99.0.2/24")}}
	err = pool.Apply(t.Context(), egress.Replicate(n, "p-%02d", egress.Proxy{
		Provider: "fleet", Image: "idle", MemoryMiB: 64, MaxLeases: &one,
		CloudInit: egress.CloudInit{Inline: "#cloud-config\n{}\n", Network: network},
		Probe:     egress.Probe{URL: "http://site.example/", Interval: time.Second},
	})...)
	if err != nil {
		t.Fatal(err)
	}
	if err := pool.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := pool.WaitReady(ctx, n); err != nil {
		t.Fatal(err)
	}
	return pool
}

func hostsOf(pool *egress.Pool) map[string]int {
	on := map[string]int{}
	for _, s := range pool.Proxies() {
		on[s.Host]++
	}
	return on
}

func TestLiveAHostThatIsCutOffTakesNobodyAlongAndItsStraysGoWhenItIsBack(t *testing.T) {
	hosts := shared(t)
	p := open(t, configOf(t, hosts))
	j := &judged{Provider: p}
	fleet := pool(t, j, 6)
	if on := hostsOf(fleet); on["beta"] != 2 {
		t.Fatalf("spread over %v", on)
	}
	leases := map[string]*egress.Lease{}
	for range 6 {
		lease, err := fleet.Acquire(t.Context(), egress.Request{})
		if err != nil {
			t.Fatal(err)
		}
		leases[lease.Proxy()] = lease
	}
	var lost []string
	for _, s := range fleet.Proxies() {
		if s.Host == "beta" {
			lost = append(lost, s.Name)
		}
	}
	victim := "beta"
	hostOf(victim).Must(t, "cut")
	t.Cleanup(func() { hostOf(victim).Must(t, "mend") })
	j.cut.Store(&victim)
	begin := time.Now()
	for _, name := range lost {
		select {
		case <-leases[name].Context().Done():
		case <-time.After(time.Minute):
			t.Fatalf("the lease on %s is still good a minute after its host has gone", name)
		}
	}
	t.Logf("leases on the host were revoked after %s", time.Since(begin).Round(100*time.Millisecond))
	// The others are listed all the while.
	listing := time.Now()
	all, err := p.List(t.Context(), "own")
	if partial, ok := errors.AsType[*provider.PartialError](err); !ok || !partial.Missing("beta") || len(all) < 4 {
		t.Errorf("%d instances, %v", len(all), err)
	}
	if took := time.Since(listing); took > 5*time.Second {
		t.Errorf("a list took %s with a host cut off", took)
	}
	until(t, "six are ready without the host", func() bool { return fleet.Stats().Ready == 6 && hostsOf(fleet)["beta"] == 0 })
	t.Logf("replaced elsewhere after %s", time.Since(begin).Round(100*time.Millisecond))
	for name, lease := range leases {
		if err := lease.Context().Err(); err != nil && !slices.Contains(lost, name) {
			t.Errorf("the lease on %s, on another host, was revoked: %v", name, context.Cause(lease.Context()))
		}
		lease.Release()
	}
	hostOf(victim).Must(t, "mend")
	j.cut.Store(nil)
	until(t, "the strays are gone", func() bool {
		for _, s := range fleet.Proxies() {
			if s.Host == victim {
				t.Fatalf("a stray serves: %+v", s)
			}
		}
		all, err := p.List(t.Context(), "own")
		return err == nil && len(all) == 6
	})
	if out := hostOf(victim).Virsh(t, "list", "--all", "--name"); strings.TrimSpace(out) != "" {
		t.Errorf("on %s: %s", victim, out)
	}
}

func TestLiveAHostIsDrainedWithoutAProxyTooFewAndUnderNewConfiguration(t *testing.T) {
	hosts := shared(t)
	config := configOf(t, hosts)
	p := open(t, config)
	fleet := pool(t, &judged{Provider: p}, 6)
	config.Hosts[1].Drained = true
	if err := p.SetHosts(config.Hosts); err != nil {
		t.Fatal(err)
	}
	until(t, "the host is empty", func() bool {
		if n := fleet.Stats().Ready; n < 6 {
			t.Fatalf("%d of 6 ready while a host is drained", n)
		}
		all, err := p.List(t.Context(), "own")
		return err == nil && len(all) == 6 && !slices.ContainsFunc(all, func(x provider.Instance) bool { return x.Host == "beta" })
	})
	if out := hostOf("beta").Virsh(t, "list", "--all", "--name"); strings.TrimSpace(out) != "" {
		t.Errorf("on beta: %s", out)
	}
}

func TestLiveADaemonThatIsKilledKeepsNobodyElseWaiting(t *testing.T) {
	hosts := shared(t)
	p := open(t, configOf(t, hosts))
	fleet := pool(t, &judged{Provider: p}, 6)
	hostOf("gamma").Must(t, "kill")
	spec := idleSpec()
	begin := time.Now()
	made, err := p.Create(t.Context(), request("extra", spec))
	if err != nil || made.Host == "gamma" {
		t.Fatalf("%+v, %v", made, err)
	}
	t.Logf("a create beside a dead daemon took %s", time.Since(begin).Round(time.Millisecond))
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	if n := fleet.Stats().Ready; n != 6 {
		t.Errorf("%d of 6 ready: guests outlive the daemon", n)
	}
	hostOf("gamma").Must(t, "start")
	ready(t, p)
	all, err := p.List(t.Context(), "own")
	if err != nil || len(all) != 6 {
		t.Errorf("%d instances, %v", len(all), err)
	}
}

func TestLiveAHostCutOffInTheMiddleOfAnUploadOrACreateIsReplacedByAnother(t *testing.T) {
	hosts := shared(t)
	evict(t, configOf(t, hosts))
	half, on := make(chan struct{}), make(chan struct{})
	var once sync.Once
	config := configOf(t, hosts)
	config.Images["idle"] = image(t, hosts, 8, func(offset int) {
		if offset == 4<<20 {
			once.Do(func() { close(half) })
			<-on
		}
	})
	for i := range config.Hosts[1:] {
		config.Hosts[i+1].Weight = 0.01 // so that alpha is first
	}
	config.HostBackoff = time.Millisecond // it is to be tried again at once
	p := open(t, config)
	type result struct {
		provider.Instance
		error
	}
	made := make(chan result, 1)
	go func() {
		x, err := p.Create(t.Context(), request("cut", idleSpec()))
		made <- result{x, err}
	}()
	<-half
	hostOf("alpha").Must(t, "cut")
	close(on)
	begin := time.Now()
	r := <-made
	t.Logf("after %s: on %s, %v", time.Since(begin).Round(time.Millisecond), r.Host, r.error)
	if r.error != nil || r.Host == "alpha" {
		t.Errorf("the create in the middle of whose upload the host went: %+v, %v", r.Instance, r.error)
	}
	hostOf("alpha").Must(t, "mend")
	ready(t, p)
	if err := p.Delete(t.Context(), r.ID); err != nil {
		t.Error(err)
	}
	// A create that is cut in the middle may have been carried out, so it is not tried elsewhere unasked.
	cut := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(cut)
		for ctx.Err() == nil {
			if found, _ := filepath.Glob(filepath.Join(hostOf("alpha").Folder, "etc", "qemu", "*--mid--*.xml")); len(found) > 0 {
				hostOf("alpha").Must(t, "cut")
				return
			}
			<-time.After(time.Millisecond)
		}
	}()
	spec := idleSpec()
	_, err := p.Create(t.Context(), request("mid", spec))
	cancel()
	<-cut
	t.Logf("the create that was cut: %v", err)
	if err != nil && !errors.Is(err, provider.ErrOutcomeUnknown) {
		t.Errorf("got %v", err)
	}
	again, err := p.Create(t.Context(), request("mid", spec))
	if err != nil || again.Host == "alpha" {
		t.Errorf("the next try: %+v, %v", again, err)
	}
	hostOf("alpha").Must(t, "mend")
	ready(t, p)
	until(t, "the half of it on the host that was cut is listed as failed, or gone", func() bool {
		all, err := p.List(t.Context(), "own")
		if err != nil {
			return false
		}
		for _, x := range all {
			if x.ID == again.ID {
				continue
			}
			if x.State == provider.StateRunning {
				t.Fatalf("two of one name: %+v", all)
			}
			if err := p.Delete(t.Context(), x.ID); err != nil && !errors.Is(err, provider.ErrNotFound) {
				t.Log(err)
			}
			return false
		}
		return true
	})
	if err := p.Delete(t.Context(), again.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, hosts)
	evict(t, config)
}
