package proxmox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/fakepve"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
	"crawl.example.com/egress/proxmox"
)

const (
	tokenID = "egress@pve!crawl"
	secret  = "0b1c2d3e-planted-secret-of-the-token"
	planted = "planted-in-the-user-data"
)

// bench is a cluster of three nodes, or two, with a template on each, a token with the least privileges, and a provider for it.
type bench struct {
	testing.TB
	*fakepve.Cluster
	p      *proxmox.Provider
	config proxmox.Config
	logs   *bytes.Buffer
	before []string // volumes
}

// grant gives the token what the package comment says that it needs.
func grant(c *fakepve.Cluster, id string, version int) {
	agent := "VM.GuestAgent.Audit"
	if version == 8 {
		agent = "VM.Monitor"
	}
	c.Grant(id, "/vms", "VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk", "VM.Config.Memory",
		"VM.Config.Options", "VM.PowerMgmt", agent)
	c.Grant(id, "/nodes", "Sys.Audit")
	c.Grant(id, "/storage/local", "Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.Audit")
	c.Grant(id, "/storage/local-lvm", "Datastore.AllocateSpace")
	c.Grant(id, "/sdn/zones/localnetwork", "SDN.Use")
}

func open(t testing.TB, fake fakepve.Config, change func(c *fakepve.Cluster, config *proxmox.Config)) *bench {
	t.Helper()
	c := fakepve.New(fake)
	c.AddToken(tokenID, secret)
	grant(c, tokenID, fake.Version)
	nodes := 3
	if len(fake.Nodes) == 2 {
		nodes = 2
	}
	for i := range nodes {
		c.AddTemplate(fmt.Sprintf("pve%d", i+1), 9000+i, "debian", fakepve.Template{})
	}
	b := &bench{TB: t, Cluster: c, logs: &bytes.Buffer{}, before: c.Volumes()}
	b.config = proxmox.Config{
		Name: "home", TokenID: tokenID, CA: c.CA(), DialContext: c.Dial, Templates: map[string]proxmox.Template{"debian-13": {Name: "debian"}},
		Secret: func(context.Context) ([]byte, error) { return []byte(secret + "\n"), nil },
		Logger: slog.New(slog.NewTextHandler(&locked{w: io.MultiWriter(b.logs, t.Output())}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for i := range nodes {
		n := fmt.Sprintf("pve%d", i+1)
		b.config.Nodes = append(b.config.Nodes, proxmox.Node{Name: n, Endpoint: c.URL(n), Labels: map[string]string{"rack": fmt.Sprint(i)}})
	}
	if change != nil {
		change(c, &b.config)
	}
	b.p = b.another()
	return b
}

// locked is a writer for several goroutines.
type locked struct {
	mu sync.Mutex // guards w
	w  io.Writer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// silent is for tests of so many steps that logging takes most of their time.
func silent(_ *fakepve.Cluster, config *proxmox.Config) { config.Logger = nil }

// another is a provider as a new process would have it.
func (b *bench) another() *proxmox.Provider {
	b.Helper()
	p, err := proxmox.New(b.config)
	if err != nil {
		b.Fatal(err)
	}
	return p
}

// run runs f in a bubble.
func run(t *testing.T, fake fakepve.Config, change func(c *fakepve.Cluster, config *proxmox.Config), f func(b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := open(t, fake, change)
		defer b.Close()
		defer b.p.Close()
		f(b)
		if strings.Contains(b.logs.String(), secret) || strings.Contains(b.logs.String(), planted) {
			t.Error("a secret is in the log")
		}
	})
}

func spec() provider.Spec {
	return provider.Spec{
		Provider: "home", Image: "debian-13", MemoryMiB: 512, Port: 3128,
		CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\npassword: " + planted + "\n"), InstallGuestAgent: true},
	}
}

func request(proxy string, generation int64, s provider.Spec) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName("crawl", proxy, generation), Spec: s,
		Mark: provider.Mark{Owner: "crawl", Proxy: proxy, Generation: generation, HashVersion: provider.HashVersion, Hash: s.Hash(nil)},
	}
}

func (b *bench) create(proxy string) provider.Instance {
	b.Helper()
	x, err := b.p.Create(b.Context(), request(proxy, 1, spec()))
	if err != nil {
		b.Fatal(err)
	}
	return x
}

func (b *bench) list() []provider.Instance {
	b.Helper()
	all, err := b.p.List(b.Context(), "crawl")
	if err != nil {
		b.Fatal(err)
	}
	return all
}

func vmidOf(x provider.Instance) int {
	var id int
	fmt.Sscan(strings.SplitN(x.ID, "/", 2)[0], &id)
	return id
}

// remove deletes until the instance is gone for sure.
func (b *bench) remove(p *proxmox.Provider, id string) {
	b.Helper()
	for range 20 {
		err := p.Delete(b.Context(), id)
		if errors.Is(err, provider.ErrNotFound) {
			return
		}
		if err != nil {
			b.Log(err)
		}
		time.Sleep(time.Second)
	}
	b.Fatalf("%s is not gone", id)
}

// nothingLeft checks that the cluster has no VM and no volume more than in the beginning.
func (b *bench) nothingLeft() {
	b.Helper()
	if vms := b.VMs(); len(vms) > 0 {
		b.Errorf("VMs are left: %+v", vms)
	}
	if now := b.Volumes(); !slices.Equal(now, b.before) {
		b.Errorf("volumes: %q, were %q", now, b.before)
	}
}

func TestConformance(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		b := open(t, fakepve.Config{CloneTime: 60 * time.Millisecond, TaskTime: 10 * time.Millisecond, BootTime: 50 * time.Millisecond, AuthDelay: 50 * time.Millisecond},
			func(_ *fakepve.Cluster, config *proxmox.Config) { config.RequestTimeout = 3 * time.Second })
		t.Cleanup(func() {
			b.p.Close()
			b.Close()
		})
		invalid := spec()
		invalid.Image = "nothing"
		foreign := 100
		return providertest.Harness{
			Provider: b.p, Spec: spec(), Invalid: &invalid,
			AddForeign: func(_ *testing.T, name string) string {
				foreign++
				b.AddVM("pve1", foreign, name, "", map[string]string{"description": "made by hand"})
				return fmt.Sprintf("%d/00000000/%s", foreign, name)
			},
			Exists: func(_ *testing.T, id string) bool {
				var vmid int
				fmt.Sscan(strings.SplitN(id, "/", 2)[0], &vmid)
				_, ok := b.VM(vmid)
				return ok
			},
			LoseAnswer: func(*testing.T) {
				b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/qemu/*/status/start", Times: 1, Carry: true, Drop: true})
				remove := b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/*/qemu/*/status/current", Status: 596, Reason: "Connection timed out"})
				time.AfterFunc(1500*time.Millisecond, remove)
			},
			LeaveHalf: func(*testing.T) {
				b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/storage/*/upload", Times: 1, Status: 403, Reason: "Permission check failed"})
			},
			Break: func(_ *testing.T, host string) func() {
				hosts := []string{"pve1", "pve2", "pve3"}
				if host != "" {
					hosts = []string{host}
				}
				for _, h := range hosts {
					b.SetNode(h, fakepve.NodeRefuses)
				}
				return func() {
					for _, h := range hosts {
						b.SetNode(h, fakepve.NodeUp)
					}
				}
			},
			Deny: func(*testing.T) func() {
				b.SetSecret(tokenID, "another")
				return func() { b.SetSecret(tokenID, secret) }
			},
			Fill: func(*testing.T) func() {
				for i := range 3 {
					b.SetMemoryUsed(fmt.Sprintf("pve%d", i+1), 65536-300)
				}
				return func() {
					for i := range 3 {
						b.SetMemoryUsed(fmt.Sprintf("pve%d", i+1), 0)
					}
				}
			},
		}
	}})
}

func TestAnInstanceIsMadeAsTheSpecSaysAndFoundByItsMark(t *testing.T) {
	for _, version := range []int{8, 9} {
		run(t, fakepve.Config{Version: version}, func(c *fakepve.Cluster, config *proxmox.Config) {
			config.Pool, config.Tags, config.Bridge, config.VLAN = "egress", []string{"proxy", "egress"}, "vmbr1", 17
			c.Grant(tokenID, "/pool/egress", "VM.Allocate", "VM.Audit", "VM.Config.Network", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk",
				"VM.Config.Memory", "VM.Config.Options", "VM.PowerMgmt", map[int]string{8: "VM.Monitor", 9: "VM.GuestAgent.Audit"}[version])
		}, func(b *bench) {
			for _, h := range b.p.Check(b.Context()) {
				if !h.Ready {
					b.Fatalf("%+v", h)
				}
			}
			s := spec()
			s.CPUs, s.DiskGiB = 2, 10
			x, err := b.p.Create(b.Context(), request("a", 1, s))
			if err != nil {
				b.Fatal(err)
			}
			v, _ := b.VM(vmidOf(x))
			c := v.Config
			seed := fmt.Sprintf("local:iso/egress-home-%s-%s.iso", x.Name, strings.Split(x.ID, "/")[1])
			if !v.Running || v.Pool != "egress" || c["cores"] != "2" || c["sockets"] != "1" || c["memory"] != "512" || c["tags"] != "egress;proxy" ||
				c["ide2"] != seed+",media=cdrom" || c["ide0"] != "" || !strings.Contains(c["scsi0"], "size=10G") ||
				!strings.Contains(c["net0"], "bridge=vmbr1") || !strings.Contains(c["net0"], "tag=17") || v.ID < 50000 || v.ID > 59999 {
				b.Errorf("version %d: %+v", version, v)
			}
			if image := b.Volume(v.Node + ":" + seed); !bytes.Contains(image, []byte(planted)) {
				b.Errorf("the seed has %d bytes and not the user data", len(image))
			}
			time.Sleep(10 * time.Second)
			got, err := b.p.Get(b.Context(), x.ID)
			if err != nil || got.State != provider.StateRunning || got.Address == "" || strings.HasPrefix(got.Address, "169.254.") {
				b.Errorf("%+v, %v", got, err)
			}
			b.remove(b.p, x.ID)
			b.nothingLeft()
		})
	}
}

func TestAStaticAddressIsInTheSeedAndKnownAtOnce(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		s := spec()
		s.CloudInit.Network = &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.7/24")}}
		x, err := b.p.Create(b.Context(), request("a", 1, s))
		if err != nil || x.Address != "192.0.2.7" {
			b.Fatalf("%+v, %v", x, err)
		}
		v, _ := b.VM(vmidOf(x))
		mac := strings.ToLower(v.Config["net0"][len("virtio=") : len("virtio=")+17])
		image := b.Volume(v.Node + ":" + strings.TrimSuffix(v.Config["ide2"], ",media=cdrom"))
		if !bytes.Contains(image, []byte("192.0.2.7/24")) || !bytes.Contains(image, []byte(mac)) {
			b.Errorf("the seed does not have the address for %s", mac)
		}
		if all := b.list(); len(all) != 1 || all[0].Address != "192.0.2.7" {
			b.Errorf("%+v", all)
		}
	})
}

func TestPlacementIsByNameByLabelByRoomAndSpreadsGroups(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.SetMemoryUsed("pve1", 40000)
		place := func(proxy string, placement provider.Placement) (provider.Instance, error) {
			s := spec()
			s.Placement = placement
			return b.p.Create(b.Context(), request(proxy, 1, s))
		}
		if x, err := place("named", provider.Placement{Host: "pve1"}); err != nil || x.Host != "pve1" {
			b.Errorf("%+v, %v", x, err)
		}
		if x, err := place("labelled", provider.Placement{Labels: map[string]string{"rack": "2"}}); err != nil || x.Host != "pve3" {
			b.Errorf("%+v, %v", x, err)
		}
		if x, err := place("free", provider.Placement{}); err != nil || x.Host != "pve2" || !strings.Contains(x.Message, "pve2") {
			b.Errorf("%+v, %v", x, err)
		}
		on := map[string]int{}
		for i := range 6 {
			x, err := place(fmt.Sprintf("g%d", i), provider.Placement{Group: "shop"})
			if err != nil {
				b.Fatal(err)
			}
			on[x.Host]++
		}
		if on["pve1"] != 2 || on["pve2"] != 2 || on["pve3"] != 2 {
			b.Errorf("the group is on %v", on)
		}
		for i := range 3 {
			b.SetMemoryUsed(fmt.Sprintf("pve%d", i+1), 65500)
		}
		_, err := place("none", provider.Placement{})
		if !errors.Is(err, provider.ErrNoCapacity) || !strings.Contains(err.Error(), "pve1") || !strings.Contains(err.Error(), "pve3") || !strings.Contains(err.Error(), "want 512") {
			b.Errorf("%v", err)
		}
	})
}

func TestANodeThatIsDownStopsNeitherCreatesNorListsNorDeletesOnOthers(t *testing.T) {
	for _, mode := range []fakepve.NodeMode{fakepve.NodeRefuses, fakepve.NodeSilent} {
		run(t, fakepve.Config{}, nil, func(b *bench) {
			var on1 provider.Instance
			s := spec()
			s.Placement.Host = "pve1"
			on1, err := b.p.Create(b.Context(), request("one", 1, s))
			if err != nil {
				b.Fatal(err)
			}
			s.Placement.Host = "pve2"
			on2, err := b.p.Create(b.Context(), request("two", 1, s))
			if err != nil {
				b.Fatal(err)
			}
			b.SetNode("pve1", mode)
			begin := time.Now()
			x := b.create("three")
			if x.Host == "pve1" {
				b.Errorf("%+v", x)
			}
			b.Logf("a create beside a node that is down took %s", time.Since(begin))
			begin = time.Now()
			all, err := b.p.List(b.Context(), "crawl")
			partial, ok := errors.AsType[*provider.PartialError](err)
			if !ok || !partial.Missing("pve1") || len(partial.Targets) != 1 || len(all) != 2 {
				b.Errorf("%+v, %v", all, err)
			}
			if took := time.Since(begin); took > 12*time.Second {
				b.Errorf("a list took %s", took)
			}
			if err := b.p.Delete(b.Context(), on2.ID); err != nil {
				b.Error(err)
			}
			if _, err := b.p.Get(b.Context(), on1.ID); err == nil || errors.Is(err, provider.ErrNotFound) {
				b.Errorf("Get on the node that is down: %v", err)
			}
			health := b.p.Check(b.Context())
			if health[0].Ready || !health[1].Ready || !health[2].Ready || health[0].Reason != provider.ReasonUnreachable && health[0].Reason != provider.ReasonTimeout {
				b.Errorf("%+v", health)
			}
			b.SetNode("pve1", fakepve.NodeUp)
			if all := b.list(); len(all) != 2 {
				b.Errorf("%+v", all)
			}
		})
	}
}

func TestADrainedNodeGetsNothingAndAsksForReplacements(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		s := spec()
		s.Placement.Host = "pve1"
		if _, err := b.p.Create(b.Context(), request("a", 1, s)); err != nil {
			b.Fatal(err)
		}
		b.config.Nodes[0].Drain = true
		p := b.another()
		all, err := p.List(b.Context(), "crawl")
		if err != nil || len(all) != 1 || !all[0].Evacuate {
			b.Errorf("%+v, %v", all, err)
		}
		for i := range 4 {
			if x, err := p.Create(b.Context(), request(fmt.Sprintf("n%d", i), 1, spec())); err != nil || x.Host == "pve1" {
				b.Errorf("%+v, %v", x, err)
			}
		}
		if err := p.Validate(s); err == nil || !strings.Contains(err.Error(), "pve1") {
			b.Errorf("%v", err)
		}
	})
}

func TestFiftyCreatesAtOnceOnThreeNodesMakeFiftyInstances(t *testing.T) {
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) {
		config.VMIDMin, config.VMIDMax, config.Logger = 50000, 50063, nil
	}, func(b *bench) {
		// Two processes pick from the same few VMIDs and don't know of each other.
		second := b.config
		second.Name = "other"
		other, err := proxmox.New(second)
		if err != nil {
			b.Fatal(err)
		}
		defer other.Close()
		begin := time.Now()
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				p, s := b.p, spec()
				if i%2 == 1 {
					p, s.Provider = other, "other"
				}
				for {
					_, err := p.Create(b.Context(), request(fmt.Sprintf("p-%02d", i), 1, s))
					if err == nil || errors.Is(err, provider.ErrAlreadyExists) {
						return
					}
					if !errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) {
						b.Error(err)
						return
					}
					time.Sleep(time.Second)
				}
			})
		}
		all.Wait()
		b.Logf("50 creates took %s", time.Since(begin))
		collisions := 0
		for _, r := range b.Requests() {
			if strings.HasSuffix(r.Path, "/clone") && r.Status == 500 {
				collisions++
			}
		}
		if collisions == 0 {
			b.Error("no two picked the same VMID, so nothing was tested")
		}
		b.Logf("%d clones were refused for a VMID that was taken", collisions)
		names := map[string]int{}
		for _, v := range b.VMs() {
			names[v.Config["name"]]++
			if !v.Running || v.Config["lock"] != "" {
				b.Errorf("%+v", v)
			}
		}
		if len(names) != 50 {
			b.Errorf("%d instances", len(names))
		}
		for name, n := range names {
			if n != 1 {
				b.Errorf("%d are called %s", n, name)
			}
		}
		for i := range 3 {
			if n := b.MaxClones(fmt.Sprintf("pve%d", i+1)); n > 4 {
				b.Errorf("%d clones at once on node %d: each process may have 2", n, i+1)
			}
		}
	})
}

// TestAProcessThatIsKilledAtAnyStepLeaksNothing ends a create, and a delete, with its nth request: with any that is not carried
// out, and with each that changes something and is.
func TestAProcessThatIsKilledAtAnyStepLeaksNothing(t *testing.T) {
	for _, f := range []fakepve.Fault{{}, {Method: "POST", Carry: true}, {Method: "PUT", Carry: true}, {Method: "DELETE", Carry: true}} {
		for _, what := range []string{"create", "create again", "delete"} {
			n := 0
			for done := false; !done; n++ {
				run(t, fakepve.Config{CloneTime: 300 * time.Millisecond, TaskTime: 40 * time.Millisecond}, silent, func(b *bench) {
					f.Skip = n
					done = b.killed(f, what)
				})
				if n > 100 {
					t.Fatalf("a %s never ends", what)
				}
			}
			if f.Method == "" && n < 10 {
				t.Errorf("a %s takes %d requests only, so nothing was tested", what, n)
			}
		}
	}
}

// killed kills a process at a request and clears up after it with another. It reports whether there was no such request.
func (b *bench) killed(f fakepve.Fault, what string) bool {
	ctx, kill := context.WithCancel(b.Context())
	defer kill()
	s := spec()
	s.DiskGiB = 10
	var id string
	if what == "delete" {
		id = b.create("a").ID
	}
	f.Drop, f.Do = true, kill
	remove := b.Fault(f)
	if what == "delete" {
		_ = b.p.Delete(ctx, id)
	} else {
		_, _ = b.p.Create(ctx, request("a", 1, s))
	}
	remove()
	fresh := b.another()
	defer fresh.Close()
	if what == "create again" {
		b.until(func() bool {
			_, err := fresh.Create(b.Context(), request("a", 1, s))
			return err == nil || errors.Is(err, provider.ErrAlreadyExists)
		})
		if vms := b.VMs(); len(vms) != 1 || !vms[0].Running || !strings.Contains(vms[0].Config["scsi0"], "size=10G") {
			b.Errorf("%+v: %+v", f, vms)
		}
	}
	b.until(func() bool {
		all, err := fresh.List(b.Context(), "crawl")
		if err != nil {
			b.Fatal(err)
		}
		for _, x := range all {
			_ = fresh.Delete(b.Context(), x.ID)
		}
		return len(all) == 0 && len(b.VMs()) == 0
	})
	if now := b.Volumes(); !slices.Equal(now, b.before) {
		b.Errorf("a %s that ended at %+v: volumes %q, were %q", what, f, now, b.before)
	}
	return ctx.Err() == nil
}

func (b *bench) until(f func() bool) {
	b.Helper()
	for range 60 {
		if f() {
			return
		}
		time.Sleep(2 * time.Second)
	}
	b.Fatalf("not within two minutes; there are %+v", b.VMs())
}

func TestSecretsAreInNoErrorAndNoLogAtAnyLevel(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		var texts []string
		note := func(err error) {
			if err != nil {
				texts = append(texts, fmt.Sprintf("%v %+v", err, err))
			}
		}
		x := b.create("a")
		for _, f := range []fakepve.Fault{
			{Times: 6, Status: 401, Reason: "authentication failure"}, {Times: 6, HTML: true}, {Times: 6, Drop: true}, {Times: 6, Status: 500, Reason: "oops"},
			{Times: 6, Status: 596, Reason: "Connection timed out"}, {Method: "POST", Times: 3, Status: 400, Reason: "Parameter verification failed."},
		} {
			remove := b.Fault(f)
			_, err := b.p.Create(b.Context(), request("b", 1, spec()))
			note(err)
			_, err = b.p.Get(b.Context(), x.ID)
			note(err)
			_, err = b.p.List(b.Context(), "crawl")
			note(err)
			note(b.p.Delete(b.Context(), x.ID))
			for _, h := range b.p.Check(b.Context()) {
				asJSON, _ := json.Marshal(h)
				texts = append(texts, string(asJSON))
			}
			remove()
		}
		if len(texts) < 10 || b.logs.Len() == 0 {
			b.Fatalf("%d texts and %d bytes of log: nothing was tested", len(texts), b.logs.Len())
		}
		for _, text := range append(texts, b.logs.String()) {
			if strings.Contains(text, secret) || strings.Contains(text, planted) || strings.Contains(text, "PVEAPIToken") {
				b.Errorf("a secret shows in %.300s", text)
			}
		}
	})
}

func TestValidateAndNewNameEveryFault(t *testing.T) {
	b := open(t, fakepve.Config{}, nil)
	defer b.Close()
	s := spec()
	s.Image, s.CPUs, s.MemoryMiB, s.DiskGiB, s.Port, s.Placement.Host = "none", -1, 3, -1, 70000, "pve9"
	s.Options = map[string]string{"color": "red"}
	s.CloudInit.UserData = []byte("just text " + planted)
	err := b.p.Validate(s)
	for _, want := range []string{"Image", "debian-13", "CPUs", "MemoryMiB", "DiskGiB", "Port", "pve9", "color", "UserData"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named: %v", want, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), planted) {
		t.Error("the document shows")
	}
	_, err = proxmox.New(proxmox.Config{
		Name: "Bad", TokenID: "root@pam", Nodes: []proxmox.Node{{Name: "../x", Endpoint: "http://u:secret@x", Fingerprint: "abc"}}, CAFile: "/nonexistent",
		Templates: map[string]proxmox.Template{"a b": {Name: "x", VMID: 1}}, SeedStorage: "a/b", DiskStorage: "x y", VMIDMin: 5, VMIDMax: 4, Pool: "a b",
		Tags: []string{"A"}, Bridge: "a b", VLAN: 5000, ClonesPerNode: -1,
	})
	for _, want := range []string{"Name", "TokenID", "Nodes[0].Name", "Nodes[0].Endpoint", "Fingerprint", "Secret", "CAFile", "Templates", "SeedStorage", "DiskStorage",
		"VMIDMin", "Pool", "Tags", "Bridge", "VLAN", "ClonesPerNode"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named: %v", want, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), "secret@") {
		t.Error("a password shows")
	}
}

func TestCheckTellsWhatIsWrong(t *testing.T) {
	good := func(*fakepve.Cluster, *proxmox.Config) {}
	for name, c := range map[string]struct {
		config func(c *fakepve.Cluster, config *proxmox.Config)
		spoil  func(b *bench)
		reason provider.Reason
		text   string
		limit  time.Duration
	}{
		"fine":           {good, func(*bench) {}, provider.ReasonReady, "", 0},
		"a wrong secret": {good, func(b *bench) { b.SetSecret(tokenID, "x") }, provider.ReasonAuthenticationFailed, "TokenID", 0},
		"no secret": {func(_ *fakepve.Cluster, c *proxmox.Config) {
			c.Secret = func(context.Context) ([]byte, error) { return nil, errors.New("vault is sealed") }
		}, func(*bench) {}, provider.ReasonCredentialsUnavailable, "vault is sealed", 0},
		"nodes refuse":     {good, func(b *bench) { each(b, fakepve.NodeRefuses) }, provider.ReasonUnreachable, "refused", 0},
		"nodes are silent": {good, func(b *bench) { each(b, fakepve.NodeSilent) }, provider.ReasonTimeout, "", 15 * time.Second},
		"nodes are slower": {good, func(b *bench) { b.Fault(fakepve.Fault{Delay: time.Minute}) }, provider.ReasonTimeout, "", 15 * time.Second},
		"another certificate": {func(_ *fakepve.Cluster, c *proxmox.Config) {
			other := fakepve.New(fakepve.Config{Nodes: []string{"other"}})
			c.CA = other.CA()
			other.Close()
		}, func(*bench) {}, provider.ReasonCertificateInvalid, "certificate", 0},
		"another fingerprint": {func(_ *fakepve.Cluster, c *proxmox.Config) {
			for i := range c.Nodes {
				c.Nodes[i].Fingerprint = strings.Repeat("AB:", 31) + "AB"
			}
		}, func(*bench) {}, provider.ReasonCertificateInvalid, "fingerprint", 0},
		"the right fingerprint": {func(f *fakepve.Cluster, c *proxmox.Config) {
			c.CA = nil
			for i := range c.Nodes {
				c.Nodes[i].Fingerprint = f.Fingerprint(c.Nodes[i].Name)
			}
		}, func(*bench) {}, provider.ReasonReady, "", 0},
		"no VM.Audit": {good, func(b *bench) { b.Grant(tokenID, "/vms", "VM.Clone") }, provider.ReasonPermissionDenied, "VM.Audit on /vms", 0},
		"no VM.Clone": {good, func(b *bench) {
			b.Grant(tokenID, "/vms/9001", "VM.Audit")
			b.Grant(tokenID, "/vms/9000", "VM.Audit")
			b.Grant(tokenID, "/vms/9002", "VM.Audit")
		}, provider.ReasonPermissionDenied, "VM.Clone on /vms/900", 0},
		"no right to delete seed": {good, func(b *bench) { b.Grant(tokenID, "/storage/local", "Datastore.AllocateTemplate", "Datastore.Audit") }, provider.ReasonPermissionDenied, "Datastore.Allocate on /storage/local", 0},
		"no space right":          {good, func(b *bench) { b.Grant(tokenID, "/storage/local-lvm", "Datastore.Audit") }, provider.ReasonPermissionDenied, "Datastore.AllocateSpace on /storage/local-lvm", 0},
		"no Sys.Audit":            {good, func(b *bench) { b.Revoke(tokenID, "/nodes") }, provider.ReasonPermissionDenied, "Sys.Audit on /nodes/pve", 0},
		"no storage":              {good, func(b *bench) { b.RemoveStorage("local") }, provider.ReasonStorageNotFound, "", 0},
		"storage without iso": {good, func(b *bench) {
			b.AddStorage(fakepve.Storage{ID: "local", Type: "dir", Content: []string{"vztmpl"}, Size: 1 << 40})
		}, provider.ReasonStorageNotFound, "iso", 0},
		"storage is off": {good, func(b *bench) {
			b.AddStorage(fakepve.Storage{ID: "local", Type: "dir", Content: []string{"iso"}, Size: 1 << 40, Inactive: true})
		}, provider.ReasonStorageNotFound, "not active", 0},
		"storage is full": {good, func(b *bench) {
			b.AddStorage(fakepve.Storage{ID: "local", Type: "dir", Content: []string{"iso"}, Size: 1 << 30, Used: 1 << 30})
		}, provider.ReasonInsufficientCapacity, "free", 0},
		"no template": {func(_ *fakepve.Cluster, c *proxmox.Config) {
			c.Templates = map[string]proxmox.Template{"x": {VMID: 8000}}
		}, func(*bench) {}, provider.ReasonTemplateNotFound, "8000", 0},
		"not a template": {func(f *fakepve.Cluster, c *proxmox.Config) {
			f.AddVM("pve1", 7000, "x", "", nil)
			f.AddVM("pve2", 7001, "x", "", nil)
			f.AddVM("pve3", 7002, "x", "", nil)
			c.Templates = map[string]proxmox.Template{"x": {Nodes: map[string]int{"pve1": 7000, "pve2": 7001, "pve3": 7002}}}
		}, func(*bench) {}, provider.ReasonTemplateNotFound, "is no template", 0},
		"not Proxmox":  {good, func(b *bench) { b.Fault(fakepve.Fault{HTML: true}) }, provider.ReasonUnsupported, "not the API of Proxmox", 0},
		"another path": {good, func(b *bench) { b.Fault(fakepve.Fault{Status: 501, Reason: "Method 'GET /version' not implemented"}) }, provider.ReasonUnsupported, "not implemented", 0},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, fakepve.Config{}, c.config, func(b *bench) {
				c.spoil(b)
				requests := len(b.Requests())
				ctx := b.Context()
				if c.limit > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.limit)
					defer cancel()
				}
				begin := time.Now()
				health := b.p.Check(ctx)
				if took := time.Since(begin); took > 16*time.Second {
					b.Errorf("it took %s", took)
				}
				if len(health) != 3 {
					b.Fatalf("%+v", health)
				}
				for i, h := range health {
					if h.Target != fmt.Sprintf("pve%d", i+1) || h.Reason != c.reason || h.Ready != (c.reason == provider.ReasonReady) || !strings.Contains(h.Message, c.text) {
						b.Errorf("%+v, want %s with %q", h, c.reason, c.text)
					}
				}
				for _, r := range b.Requests()[requests:] {
					if r.Method != http.MethodGet {
						b.Errorf("a check sent %+v", r)
					}
				}
			})
		})
	}
}

func each(b *bench, mode fakepve.NodeMode) {
	for i := range 3 {
		b.SetNode(fmt.Sprintf("pve%d", i+1), mode)
	}
}
