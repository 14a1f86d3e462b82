package proxmox_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"crawl.example.com/egress/internal/fakepve"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/proxmox"
)

// place creates an instance on one node.
func (b *bench) place(proxy, node string) provider.Instance {
	b.Helper()
	s := spec()
	s.Placement.Host = node
	x, err := b.p.Create(b.Context(), request(proxy, 1, s))
	if err != nil {
		b.Fatal(err)
	}
	return x
}

// replace puts somebody else's VM in the place of ours.
func (b *bench) replace(vmid int) {
	v, _ := b.VM(vmid)
	b.Remove(vmid)
	b.AddVM(v.Node, vmid, "database", "", map[string]string{"description": "of somebody else", "scsi0": "local-lvm:vm-1-disk-0,size=4G",
		"ide2": "local:iso/rescue.iso,media=cdrom"})
}

// untouched checks that somebody else's VM is as replace made it.
func (b *bench) untouched(vmid int) {
	b.Helper()
	v, ok := b.VM(vmid)
	if !ok || v.Config["name"] != "database" || v.Config["ide2"] != "local:iso/rescue.iso,media=cdrom" || v.Config["scsi0"] != "local-lvm:vm-1-disk-0,size=4G" || v.Config["agent"] != "" || v.Running {
		b.Errorf("somebody else's VM was touched: %+v", v)
	}
}

func TestANodeThatStopsAnsweringDuringAListIsNamedAndTheOthersAreListed(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		on1, on2 := b.place("a", "pve1"), b.place("b", "pve2")
		for i := range 30 { // VMs whose configurations have to be read
			if _, taken := b.VM(51000 + i); taken {
				continue
			}
			b.AddVM(fmt.Sprintf("pve%d", 1+i%3), 51000+i, fmt.Sprintf("other-%d", i), "", nil)
		}
		b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/pve1/qemu/*/config", Skip: 2, Status: 596, Reason: "Connection timed out"})
		fresh := b.another()
		defer fresh.Close()
		all, err := fresh.List(b.Context(), "crawl")
		partial, ok := errors.AsType[*provider.PartialError](err)
		if !ok || len(partial.Targets) != 1 || !partial.Missing("pve1") || len(all) != 1 || all[0].ID != on2.ID {
			b.Errorf("%+v, %v; %s is on the node that failed", all, err, on1.ID)
		}
	})
}

func TestAVMThatMovesDuringAListIsInTheList(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.place("a", "pve1")
		b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/pve1/qemu/5*/config", Times: 1, Do: func() { b.Migrate(vmidOf(x), "pve3") }})
		fresh := b.another()
		defer fresh.Close()
		if all, err := fresh.List(b.Context(), "crawl"); err != nil || len(all) != 1 || all[0].Host != "pve3" || all[0].State != provider.StateRunning {
			b.Errorf("%+v, %v", all, err)
		}
	})
}

func TestAnAnswerWithoutContentMakesNothingGone(t *testing.T) {
	for _, path := range []string{"/nodes/*/qemu", "/cluster/resources", "/nodes/*/qemu/*/config", "/access/permissions", "/nodes"} {
		for _, body := range []string{`{"data":null}`, `{}`, `{"data":{}}`} {
			run(t, fakepve.Config{}, silent, func(b *bench) {
				x := b.create("a")
				remove := b.Fault(fakepve.Fault{Method: "GET", Path: path, Body: body})
				fresh := b.another()
				defer fresh.Close()
				if all, err := fresh.List(b.Context(), "crawl"); err == nil && len(all) != 1 {
					b.Errorf("%s of %s: the list is whole and has %+v", body, path, all)
				}
				if _, err := fresh.Get(b.Context(), x.ID); errors.Is(err, provider.ErrNotFound) || errors.Is(err, provider.ErrPermanent) {
					b.Errorf("%s of %s: %v", body, path, err)
				}
				if _, err := fresh.Create(b.Context(), request("a", 1, spec())); err == nil || errors.Is(err, provider.ErrPermanent) {
					b.Errorf("%s of %s: %v", body, path, err)
				}
				if err := fresh.Delete(b.Context(), x.ID); errors.Is(err, provider.ErrNotFound) {
					b.Errorf("%s of %s: %v", body, path, err)
				}
				remove()
				if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 1 {
					b.Errorf("%s of %s: %d clones", body, path, n)
				}
			})
		}
	}
}

func TestANodeThatHasLostTheOthersMakesNothingGone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.CutOff("pve1", true) // the endpoint that is asked first
		x := b.place("a", "pve2")
		if health := b.p.Check(b.Context()); health[0].Reason != provider.ReasonUnreachable || !strings.Contains(health[0].Message, "pvecm") || !health[1].Ready {
			b.Errorf("%+v", health)
		}
		fresh := b.another()
		defer fresh.Close()
		if got, err := fresh.Get(b.Context(), x.ID); err != nil || got.Host != "pve2" {
			b.Errorf("%+v, %v", got, err)
		}
		b.SetNode("pve2", fakepve.NodeRefuses)
		b.SetNode("pve3", fakepve.NodeRefuses)
		fresh = b.another()
		if _, err := fresh.Get(b.Context(), x.ID); !errors.Is(err, provider.ErrUnavailable) {
			b.Errorf("%v", err)
		}
		if err := fresh.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrUnavailable) {
			b.Errorf("%v", err)
		}
		b.CutOff("pve1", false)
		b.SetNode("pve2", fakepve.NodeUp)
		b.SetNode("pve3", fakepve.NodeUp)
		b.remove(fresh, x.ID)
		b.nothingLeft()
	})
}

func TestWhatIsGoneIsGoneWhileHalfOfTheNodesAreDown(t *testing.T) {
	run(t, fakepve.Config{Nodes: []string{"pve1", "pve2", "pve3", "pve4"}}, func(_ *fakepve.Cluster, config *proxmox.Config) { config.Nodes = config.Nodes[:2] }, func(b *bench) {
		x := b.place("a", "pve1")
		b.SetNode("pve3", fakepve.NodeRefuses)
		b.SetNode("pve4", fakepve.NodeRefuses)
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestAChangeOnANodeThatIsNotConfiguredIsNotSentTwice(t *testing.T) {
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) { config.Nodes = config.Nodes[:2] }, func(b *bench) {
		x := b.create("a")
		b.Migrate(vmidOf(x), "pve3")
		b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/qemu/*/status/stop", Drop: true})
		_ = b.p.Delete(b.Context(), x.ID)
		if n := b.Count("POST", "/nodes/*/qemu/*/status/stop"); n != 1 {
			b.Errorf("%d stops", n)
		}
	})
}

func TestAnotherSpecUnderTheSameNameFindsWhatIsWholeAndReplacesWhatIsHalf(t *testing.T) {
	other := spec()
	other.CPUs = 2
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.PowerOff(vmidOf(x))
		if _, err := b.p.Create(b.Context(), request("a", 1, other)); !errors.Is(err, provider.ErrAlreadyExists) {
			b.Errorf("%v", err)
		}
		if all := b.list(); len(all) != 1 || all[0].ID != x.ID {
			b.Errorf("%+v", all)
		}
	})
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/storage/*/upload", Times: 1, Status: 403, Reason: "Permission check failed"})
		if _, err := b.try("a"); err == nil || len(b.VMs()) != 1 {
			b.Fatalf("%v, %+v", err, b.VMs())
		}
		if _, err := b.p.Create(b.Context(), request("a", 1, other)); err != nil {
			b.Error(err)
		}
		if all := b.list(); len(all) != 1 || all[0].Mark.Hash != other.Hash(nil) || b.VMs()[0].Config["cores"] != "2" {
			b.Errorf("%+v", all)
		}
	})
}

func TestAContainerWithTheVMIDIsNotTheVM(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.place("a", "pve1")
		b.Remove(vmidOf(x))
		b.AddContainer("pve1", vmidOf(x), "mail")
		if _, err := b.p.Get(b.Context(), x.ID); !errors.Is(err, provider.ErrNotFound) {
			b.Errorf("%v", err)
		}
		if err := b.p.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrNotFound) {
			b.Errorf("%v", err)
		}
		if all := b.list(); len(all) != 0 {
			b.Errorf("%+v", all)
		}
		b.nothingLeft()
	})
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		config.VMIDMin, config.VMIDMax = 50000, 50001
		c.AddContainer("pve1", 50000, "mail")
	}, func(b *bench) {
		if x := b.create("a"); vmidOf(x) != 50001 {
			b.Errorf("%+v", x)
		}
	})
}

func TestDisksOfAStorageWithCloudinitInItsNameStay(t *testing.T) {
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		c.AddStorage(fakepve.Storage{ID: "cloudinit", Type: "lvmthin", Content: []string{"images"}, Size: 1 << 40})
		c.Grant(tokenID, "/storage/cloudinit", "Datastore.AllocateSpace")
		c.AddTemplate("pve1", 9100, "special", fakepve.Template{Storage: "cloudinit"})
		config.Nodes, config.Templates = config.Nodes[:1], map[string]proxmox.Template{"debian-13": {VMID: 9100}}
	}, func(b *bench) {
		x := b.create("a")
		if v, _ := b.VM(vmidOf(x)); !strings.HasPrefix(v.Config["scsi0"], "cloudinit:") || v.Config["ide0"] != "" || v.Config["unused0"] != "" {
			b.Errorf("%+v", v)
		}
	})
}

func TestALockOnTheTemplateIsNoCollisionAndOneOnTheVMIDIs(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Exit: "can't lock file '/var/lock/qemu-server/lock-9000.conf' - got timeout"})
		_, err := b.try("a")
		b.wants(err, provider.ErrUnavailable, provider.ReasonTimeout, "lock-9000.conf")
		if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 3 {
			b.Errorf("%d clones on three nodes", n)
		}
	})
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) {
		config.VMIDMin, config.VMIDMax, config.Nodes = 50000, 50000, config.Nodes[:1]
	}, func(b *bench) {
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Times: 1, Exit: "can't lock file '/var/lock/qemu-server/lock-50000.conf' - got timeout"})
		_, err := b.try("a")
		b.wants(err, provider.ErrNoCapacity, provider.ReasonQuotaExceeded, "50000")
	})
}

func TestAVMThatIsExchangedBeforeAChangeIsNotChanged(t *testing.T) {
	for _, version := range []int{8, 9} {
		for _, f := range []fakepve.Fault{{Method: "POST", Path: "/nodes/*/qemu/5*/config"}, {Method: "PUT", Path: "/nodes/*/qemu/5*/resize"}} {
			run(t, fakepve.Config{Version: version}, nil, func(b *bench) {
				taken := 0
				f.Times, f.Do = 1, func() {
					taken = b.VMs()[0].ID
					b.replace(taken)
				}
				b.Fault(f)
				s := spec()
				s.DiskGiB = 20
				if _, err := b.p.Create(b.Context(), request("a", 1, s)); err == nil || errors.Is(err, provider.ErrPermanent) {
					b.Errorf("%v", err)
				}
				if taken == 0 {
					b.Fatal("nothing was tested")
				}
				b.untouched(taken)
			})
		}
	}
}

func TestAVMThatIsExchangedDuringADeleteIsNotTouched(t *testing.T) {
	for _, f := range []fakepve.Fault{{Method: "POST"}, {Method: "GET", Path: "/nodes/*/qemu/*/config"}, {Method: "DELETE", Path: "/nodes/*/storage/*/content/*/*"}} {
		exchanged := 0
		for n := range 5 {
			run(t, fakepve.Config{}, silent, func(b *bench) {
				x := b.create("a")
				b.PowerOff(vmidOf(x)) // the stop has no digest
				before := exchanged
				f.Skip, f.Times, f.Do = n, 1, func() {
					b.replace(vmidOf(x))
					exchanged++
				}
				b.Fault(f)
				_ = b.p.Delete(b.Context(), x.ID)
				if exchanged > before {
					b.untouched(vmidOf(x))
				}
			})
		}
		if exchanged == 0 {
			t.Errorf("%s %s: nothing was tested", f.Method, f.Path)
		}
	}
}

func TestAVMThatIsHibernatedDuringACreateIsNeitherStartedNorDestroyed(t *testing.T) {
	for n := range 8 {
		run(t, fakepve.Config{}, silent, func(b *bench) {
			vmid := 0
			b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/*/qemu/5*/config", Skip: n, Times: 1, Do: func() {
				vmid = b.VMs()[0].ID
				if v, _ := b.VM(vmid); v.Config["lock"] != "clone" && strings.Contains(v.Config["ide2"], "egress-home") {
					b.Hibernate(vmid)
				} else {
					vmid = 0
				}
			}})
			_, err := b.try("a")
			if vmid == 0 {
				return
			}
			if v, ok := b.VM(vmid); !ok || v.Config["lock"] != "suspended" || v.Running {
				b.Errorf("at read %d: %+v, %v", n, v, err)
			}
			b.wants(err, provider.ErrPermanent, provider.ReasonUnsupported, "hibernated")
		})
	}
}

// TestAVMOfTheSameNameWithAnotherNumberIsNotTouched has our VM become another one, of the same name and mark, at each read of
// its configuration and of its state.
func TestAVMOfTheSameNameWithAnotherNumberIsNotTouched(t *testing.T) {
	for _, deleting := range []bool{false, true} {
		exchanged := 0
		for n := range 7 {
			for _, path := range []string{"/nodes/*/qemu/5*/config", "/nodes/*/qemu/5*/status/current"} {
				run(t, fakepve.Config{}, silent, func(b *bench) {
					var x provider.Instance
					if deleting {
						x = b.create("a")
					}
					vmid, before := 0, 0
					b.Fault(fakepve.Fault{Method: "GET", Path: path, Skip: n, Times: 1, Do: func() {
						if len(b.VMs()) == 0 {
							return
						}
						v := b.VMs()[0]
						vmid, before = v.ID, len(b.Requests())
						b.Edit(vmid, "description", regexp.MustCompile("nonce=[0-9a-f]+").ReplaceAllString(v.Config["description"], "nonce=00000000"))
						exchanged++
					}})
					if deleting {
						_ = b.p.Delete(b.Context(), x.ID)
					} else {
						_, _ = b.p.Create(b.Context(), request("a", 1, spec()))
					}
					for _, r := range b.Requests()[before:] {
						if vmid != 0 && r.Method != http.MethodGet && strings.Contains(r.Path, fmt.Sprintf("/qemu/%d", vmid)) {
							b.Errorf("at read %d of %s, deleting %t: %+v was sent to it", n, path, deleting, r)
						}
					}
				})
			}
		}
		if exchanged < 3 {
			t.Errorf("%d reads, deleting %t: nothing was tested", exchanged, deleting)
		}
	}
}

func TestCreatesAtTheSameTimeSpreadAndShareTheRoom(t *testing.T) {
	for _, group := range []string{"", "shop"} {
		run(t, fakepve.Config{}, silent, func(b *bench) {
			for i := range 3 {
				b.SetMemoryUsed(fmt.Sprintf("pve%d", i+1), map[string]int{"": 65536 - 700, "shop": i * 10000}[group])
			}
			s := spec()
			s.Placement.Group = group
			var all sync.WaitGroup
			full := make([]error, 4)
			for i := range full {
				all.Go(func() { _, full[i] = b.p.Create(b.Context(), request(fmt.Sprintf("p%d", i), 1, s)) })
			}
			all.Wait()
			on := map[string]int{}
			for _, v := range b.VMs() {
				on[v.Node]++
			}
			refused := 0
			for _, err := range full {
				if errors.Is(err, provider.ErrNoCapacity) {
					refused++
				} else if err != nil {
					b.Error(err)
				}
			}
			if len(on) != 3 || group == "" && refused != 1 || group != "" && refused != 0 {
				b.Errorf("group %q: %v, %d refused", group, on, refused)
			}
		})
	}
}

func TestASeedThatIsNotWholeIsSentAgainAndNeverBootedFrom(t *testing.T) {
	short := fakepve.Fault{Method: "GET", Path: "/nodes/*/storage/local/content/*/*", Body: `{"data":{"size":5,"used":5,"format":"raw","path":"/x"}}`}
	run(t, fakepve.Config{}, nil, func(b *bench) {
		short := short
		short.Times = 1
		b.Fault(short)
		b.create("a")
		if n := b.Count("POST", "/nodes/*/storage/*/upload"); n != 2 {
			b.Errorf("%d uploads", n)
		}
	})
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.Fault(short)
		_, err := b.try("a")
		if err == nil || errors.Is(err, provider.ErrPermanent) || b.Count("POST", "/nodes/*/qemu/*/status/start") != 0 {
			b.Errorf("%v", err)
		}
	})
}

func TestADeleteWaitsForUploadsThatAreUnderWayAndForNoLaterOnes(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		// A create is killed while its upload is put into its place.
		b.TaskFault(fakepve.TaskFault{Type: "imgcopy", Times: 1, Delay: 40 * time.Second})
		ctx, kill := context.WithCancel(b.Context())
		time.AfterFunc(10*time.Second, kill)
		s := spec()
		s.Placement.Host = "pve1"
		if _, err := b.p.Create(ctx, request("a", 1, s)); err == nil {
			b.Fatal("made")
		}
		// Others go on uploading to the node, and never is there a moment without one.
		b.TaskFault(fakepve.TaskFault{Type: "imgcopy", Delay: 50 * time.Second})
		var others sync.WaitGroup
		for i := range 8 {
			others.Go(func() {
				time.Sleep(time.Duration(i) * 20 * time.Second)
				_, _ = b.p.Create(b.Context(), request(fmt.Sprintf("o%d", i), 1, s))
			})
		}
		time.Sleep(5 * time.Second)
		begin := time.Now()
		for _, x := range b.list() {
			if x.Mark.Proxy != "a" {
				continue
			}
			if err := b.p.Delete(b.Context(), x.ID); err != nil {
				b.Errorf("after %s: %v", time.Since(begin), err)
			}
		}
		others.Wait()
		for _, x := range b.list() {
			b.remove(b.p, x.ID)
		}
		b.nothingLeft()
	})
}

func TestAVMThatWasRenamedIsNeitherGoneNorTouched(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		volumes := b.Volumes()
		for key, value := range map[string]string{"name": "mine-now", "description": "mine now"} {
			v, _ := b.VM(vmidOf(x))
			b.Edit(vmidOf(x), key, value)
			if _, err := b.p.Get(b.Context(), x.ID); !errors.Is(err, provider.ErrPermanent) {
				b.Errorf("%v", err)
			}
			if err := b.p.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrPermanent) {
				b.Errorf("%v", err)
			}
			b.Edit(vmidOf(x), key, v.Config[key])
		}
		if v, _ := b.VM(vmidOf(x)); !v.Running || !slices.Equal(volumes, b.Volumes()) {
			b.Errorf("%+v, %q", v, b.Volumes())
		}
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestACopyOfAVMIsNotOurs(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		v, _ := b.VM(vmidOf(x))
		for _, id := range []int{105, 59998} { // restored from a backup, for one
			b.AddVM("pve2", id, v.Config["name"], "", map[string]string{"description": v.Config["description"]})
			if all := b.list(); len(all) != 1 || all[0].ID != x.ID {
				b.Errorf("%+v", all)
			}
			_ = b.p.Delete(b.Context(), fmt.Sprintf("%d/%s", id, strings.SplitN(x.ID, "/", 2)[1]))
			if _, ok := b.VM(id); !ok {
				b.Errorf("%d was deleted", id)
			}
			b.Remove(id)
		}
	})
}

func TestInstancesOfAnEarlierRangeOfVMIDsAreStillFound(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.config.VMIDMin, b.config.VMIDMax = 60000, 60010
		p := b.another()
		defer p.Close()
		if all, err := p.List(b.Context(), "crawl"); err != nil || len(all) != 1 || all[0].ID != x.ID {
			b.Errorf("%+v, %v", all, err)
		}
		if _, err := p.Create(b.Context(), request("a", 1, spec())); !errors.Is(err, provider.ErrAlreadyExists) {
			b.Errorf("%v", err)
		}
		b.remove(p, x.ID)
		b.nothingLeft()
	})
}

func TestANameOnANodeThatIsDownIsNotMadeAgainElsewhere(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.place("a", "pve1")
		b.SetNode("pve1", fakepve.NodeRefuses)
		_, err := b.try("a")
		b.wants(err, provider.ErrUnavailable, provider.ReasonUnreachable, "pve1")
		if vms := b.VMs(); len(vms) != 1 {
			b.Errorf("%+v", vms)
		}
	})
	run(t, fakepve.Config{}, nil, func(b *bench) {
		// The node goes down in the middle of the clone.
		b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/pve1/qemu/*/clone", Carry: true, Drop: true, Times: 1})
		time.AfterFunc(100*time.Millisecond, func() { b.SetNode("pve1", fakepve.NodeRefuses) })
		s := spec()
		s.Placement.Host = "pve1"
		_, err := b.p.Create(b.Context(), request("a", 1, s))
		if provider.Kind(err) != provider.ErrOutcomeUnknown { //nolint:errorlint // identity of the sentinel
			b.Errorf("%v", err)
		}
		if _, err := b.try("a"); provider.Kind(err) != provider.ErrUnavailable { //nolint:errorlint // as above
			b.Errorf("%v", err)
		}
		if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 1 {
			b.Errorf("%d clones", n)
		}
	})
}

func TestTheSentinelSaysWhetherSomethingIsThere(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(b *bench)
		kind  error
	}{
		"only reads failed":   {func(b *bench) { b.Fault(fakepve.Fault{Method: "GET", Drop: true}) }, provider.ErrUnavailable},
		"nothing was reached": {func(b *bench) { each(b, fakepve.NodeRefuses) }, provider.ErrUnavailable},
		"no room, and what was made is still there": {func(b *bench) {
			b.TaskFault(fakepve.TaskFault{Type: "qmstart", Exit: "start failed: Cannot allocate memory"})
			b.TaskFault(fakepve.TaskFault{Type: "qmdestroy", Exit: "got no lock"})
		}, provider.ErrOutcomeUnknown},
		"unusable, and what was made is still there": {func(b *bench) {
			b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/storage/*/upload", Status: 500, Reason: "storage 'local' is disabled"})
			b.TaskFault(fakepve.TaskFault{Type: "qmdestroy", Exit: "got no lock"})
		}, provider.ErrOutcomeUnknown},
		"one node may have room later": {func(b *bench) {
			b.SetMemoryUsed("pve1", 65500)
			b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/storage/*/upload", Status: 500, Reason: "storage 'local' is disabled"})
		}, provider.ErrNoCapacity},
		"a worker lacks a privilege": {func(b *bench) {
			b.Grant(tokenID, "/vms", "VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Disk", "VM.Config.Memory", "VM.Config.Options", "VM.PowerMgmt")
		}, provider.ErrDenied},
		"the templates are yet to be made": {func(b *bench) {
			for i := range 3 {
				b.Remove(9000 + i)
			}
		}, provider.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, fakepve.Config{}, nil, func(b *bench) {
				c.spoil(b)
				_, err := b.try("a")
				if provider.Kind(err) != c.kind { //nolint:errorlint // identity of the sentinel
					b.Errorf("%v, want %v", err, c.kind)
				}
				if n := len(b.VMs()); n != 0 && c.kind != provider.ErrOutcomeUnknown && c.kind != provider.ErrDenied || n > 1 { //nolint:errorlint // as above
					b.Errorf("%d VMs are there", n)
				}
			})
		})
	}
}

func TestACloneThatIsOnlySlowIsTakenUpWhenItHasEnded(t *testing.T) {
	run(t, fakepve.Config{CloneTime: 20 * time.Minute}, func(_ *fakepve.Cluster, config *proxmox.Config) { config.CloneTimeout = time.Minute }, func(b *bench) {
		for range 30 {
			ctx, cancel := context.WithTimeout(b.Context(), 2*time.Minute)
			_, err := b.p.Create(ctx, request("a", 1, spec()))
			cancel()
			if err == nil {
				if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 1 {
					b.Errorf("%d clones", n)
				}
				return
			}
			if errors.Is(err, provider.ErrPermanent) {
				b.Fatalf("given up: %v", err)
			}
			time.Sleep(time.Minute)
		}
		b.Error("never made")
	})
}

// TestANodeThatDoesNotAnswerDelaysOthersOnce is with a node that takes no connections, and with one that takes requests and
// never answers them.
func TestANodeThatDoesNotAnswerDelaysOthersOnce(t *testing.T) {
	for name, spoil := range map[string]func(b *bench) (mend func()){
		"silent": func(b *bench) func() {
			b.SetNode("pve1", fakepve.NodeSilent)
			return func() { b.SetNode("pve1", fakepve.NodeUp) }
		},
		"hangs": func(b *bench) func() { return b.Fault(fakepve.Fault{Node: "pve1", Delay: time.Hour}) },
	} {
		t.Run(name, func(t *testing.T) {
			run(t, fakepve.Config{}, nil, func(b *bench) {
				on2, on3 := b.place("a", "pve2"), b.place("b", "pve3")
				timed := func(what string, limit time.Duration, f func()) {
					begin := time.Now()
					f()
					took := time.Since(begin)
					b.Logf("%s: %s took %s", name, what, took)
					if took > limit {
						b.Errorf("%s: %s took %s, want at most %s", name, what, took, limit)
					}
				}
				list := func() {
					all, err := b.p.List(b.Context(), "crawl")
					if partial, ok := errors.AsType[*provider.PartialError](err); !ok || !partial.Missing("pve1") || len(partial.Targets) != 1 || len(all) < 1 {
						b.Errorf("%+v, %v", all, err)
					}
				}
				timed("a create with all nodes up", 10*time.Second, func() { b.create("c") })
				mend := spoil(b)
				timed("the first list", 11*time.Second, list)
				timed("the second list", 2*time.Second, list)
				timed("a create", 12*time.Second, func() { b.create("d") })
				timed("Get", time.Second, func() {
					if _, err := b.p.Get(b.Context(), on3.ID); err != nil {
						b.Error(err)
					}
				})
				timed("a delete", 8*time.Second, func() {
					if err := b.p.Delete(b.Context(), on2.ID); err != nil {
						b.Error(err)
					}
				})
				timed("a delete of what is gone", 12*time.Second, func() {
					if err := b.p.Delete(b.Context(), on2.ID); !errors.Is(err, provider.ErrNotFound) {
						b.Error(err)
					}
				})
				ctx, cancel := context.WithTimeout(b.Context(), 15*time.Second)
				defer cancel()
				timed("a check", 15*time.Second, func() {
					for i, h := range b.p.Check(ctx) {
						if h.Ready != (i != 0) || i != 0 && h.Duration > time.Second {
							b.Errorf("%+v", h)
						}
					}
				})
				mend()
				time.Sleep(time.Minute)
				if _, err := b.p.List(b.Context(), "crawl"); err != nil {
					b.Errorf("after the end: %v", err)
				}
			})
		})
	}
}

func TestANodeThatHasLostItsOwnFileSystemStopsNobody(t *testing.T) {
	for _, f := range []fakepve.Fault{{Status: 401, Reason: "no such token"}, {Status: 500, Reason: "ipcc_send_rec[1] failed: Connection refused"}} {
		run(t, fakepve.Config{}, nil, func(b *bench) {
			b.place("a", "pve2")
			f.Node = "pve1" // the endpoint that is asked first
			b.Fault(f)
			p := b.another()
			defer p.Close()
			_, _ = p.List(b.Context(), "crawl") // may be refused
			all, err := p.List(b.Context(), "crawl")
			partial, ok := errors.AsType[*provider.PartialError](err)
			if !ok || !partial.Missing("pve1") || len(partial.Targets) != 1 || errors.Is(err, provider.ErrDenied) || len(all) != 1 {
				b.Errorf("%+v, %v", all, err)
			}
			if x, err := p.Create(b.Context(), request("b", 1, spec())); err != nil || x.Host == "pve1" {
				b.Errorf("%+v, %v", x, err)
			}
		})
	}
}

func TestADiskGrowsToWhatTheSpecSays(t *testing.T) {
	for size, want := range map[string]string{"3584M": "4G", "4G": "4G", "8G": "8G", "3670016K": "4G", "1T": "1T"} {
		run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
			c.AddTemplate("pve1", 9000, "debian", fakepve.Template{DiskGiB: 1, Config: map[string]string{"scsi0": "local-lvm:base-9000-disk-0,size=" + size + ",ssd=1"}})
			c.AddStorage(fakepve.Storage{ID: "local-lvm", Type: "lvmthin", Content: []string{"images"}, Size: 10 << 40})
			config.Nodes = config.Nodes[:1]
		}, func(b *bench) {
			s := spec()
			s.DiskGiB = 4
			x, err := b.p.Create(b.Context(), request("a", 1, s))
			if err != nil {
				b.Fatal(err)
			}
			if v, _ := b.VM(vmidOf(x)); !strings.Contains(v.Config["scsi0"], "size="+want) {
				b.Errorf("%s became %s", size, v.Config["scsi0"])
			}
		})
	}
}

func TestAVMThatIsNoTemplateIsNotCloned(t *testing.T) {
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		c.AddVM("pve1", 7000, "database", "", map[string]string{"scsi0": "shared:vm-7000-disk-0,size=4G"})
		config.Templates = map[string]proxmox.Template{"debian-13": {VMID: 7000}}
	}, func(b *bench) {
		_, err := b.try("a")
		b.wants(err, provider.ErrUnavailable, provider.ReasonTemplateNotFound, "is no template")
		if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 0 {
			b.Errorf("%d clones", n)
		}
	})
}

func TestATemplateOnANodeThatIsNotConfiguredServesTheOthers(t *testing.T) {
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		c.AddTemplate("pve3", 9100, "only-there", fakepve.Template{Storage: "shared"})
		c.Grant(tokenID, "/storage/shared", "Datastore.AllocateSpace")
		config.Nodes, config.Templates = config.Nodes[:2], map[string]proxmox.Template{"debian-13": {Name: "only-there"}}
	}, func(b *bench) {
		for _, h := range b.p.Check(b.Context()) {
			if !h.Ready {
				b.Errorf("%+v", h)
			}
		}
		b.create("a")
	})
}

func TestCheckNamesEveryPrivilegeThatACreateAndADeleteNeed(t *testing.T) {
	all := map[string][]string{
		"/vms": {"VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk", "VM.Config.Memory",
			"VM.Config.Options", "VM.PowerMgmt", "VM.GuestAgent.Audit"},
		"/nodes": {"Sys.Audit"}, "/storage/local": {"Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.Audit"},
		"/storage/local-lvm": {"Datastore.AllocateSpace"}, "/sdn/zones/localnetwork": {"SDN.Use"},
	}
	for path, privileges := range all {
		for i, lacking := range privileges {
			run(t, fakepve.Config{}, silent, func(b *bench) {
				b.Grant(tokenID, path, append(append([]string{"VM.Console"}, privileges[:i]...), privileges[i+1:]...)...)
				if h := b.p.Check(b.Context())[0]; h.Ready || h.Reason != provider.ReasonPermissionDenied || !strings.Contains(h.Message, lacking) || !strings.Contains(h.Message, path) {
					b.Errorf("without %s: %+v", lacking, h)
				}
				s := spec()
				s.CPUs, s.DiskGiB = 2, 10
				x, err := b.p.Create(b.Context(), request("a", 1, s))
				if err == nil {
					time.Sleep(10 * time.Second)
					if _, err = b.p.Get(b.Context(), x.ID); err == nil {
						err = b.p.Delete(b.Context(), x.ID)
					}
				}
				// Options are changed for templates without agent=1 only.
				if lacking != "Sys.Audit" && lacking != "VM.Config.Options" && provider.Kind(err) != provider.ErrDenied { //nolint:errorlint // identity of the sentinel
					b.Errorf("without %s: %v", lacking, err)
				}
			})
		}
	}
}

// thousand is a cluster with a thousand instances.
func thousand(b *bench) {
	x := b.place("a", "pve1")
	v, _ := b.VM(vmidOf(x))
	for i := range 999 {
		id, name := 50000+i, fmt.Sprintf("crawl--p%d--1", i)
		if id == v.ID {
			continue
		}
		description := strings.NewReplacer("proxy=a", fmt.Sprintf("proxy=p%d", i), fmt.Sprintf("vmid=%d", v.ID), fmt.Sprintf("vmid=%d", id)).Replace(v.Config["description"])
		b.AddVM(fmt.Sprintf("pve%d", 1+i%3), id, name, "", map[string]string{"description": description})
	}
}

func TestAListOfAThousandInstancesTakesFiveRequests(t *testing.T) {
	run(t, fakepve.Config{}, silent, func(b *bench) {
		thousand(b)
		first := len(b.Requests())
		if n := len(b.list()); n < 999 {
			b.Errorf("%d instances", n)
		}
		second := len(b.Requests())
		b.Logf("the first list took %d requests", second-first)
		b.list()
		if n := len(b.Requests()) - second; n != 5 {
			b.Errorf("the second list took %d requests", n)
		}
		// What is known is looked at again now and then, a part at a time.
		time.Sleep(3 * time.Minute)
		third := len(b.Requests())
		b.list()
		if n := len(b.Requests()) - third; n < 50 || n > 900 {
			b.Errorf("after three minutes a list took %d requests", n)
		}
	})
}

// BenchmarkListThousand is a list of a thousand instances that are known already.
func BenchmarkListThousand(b *testing.B) {
	c := open(b, fakepve.Config{CloneTime: 9 * time.Millisecond, TaskTime: time.Millisecond}, silent)
	defer c.Close()
	defer c.p.Close()
	thousand(c)
	c.list()
	before := len(c.Requests())
	for b.Loop() {
		c.list()
	}
	b.ReportMetric(float64(len(c.Requests())-before)/float64(b.N), "requests/op")
}

func TestReadsAreNeverSentAsAnythingElse(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		before := len(b.Requests())
		b.list()
		_, _ = b.p.Get(b.Context(), x.ID)
		b.p.Check(b.Context())
		for _, r := range b.Requests()[before:] {
			if r.Method != http.MethodGet {
				b.Errorf("%+v", r)
			}
		}
	})
}
