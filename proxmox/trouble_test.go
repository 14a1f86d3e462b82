package proxmox_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/internal/fakepve"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/proxmox"
)

// wants checks kind and reason of an error, and that its text names something.
func (b *bench) wants(err, kind error, reason provider.Reason, text string) {
	b.Helper()
	if !errors.Is(err, kind) || provider.ReasonOf(err) != reason || err == nil || !strings.Contains(err.Error(), text) {
		b.Errorf("%v (%s), want %v (%s) with %q", err, provider.ReasonOf(err), kind, reason, text)
	}
}

func (b *bench) try(proxy string) (provider.Instance, error) {
	return b.p.Create(b.Context(), request(proxy, 1, spec()))
}

func TestAVMIDThatBecameSomebodyElsesIsLeftAlone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		// When the clone is ready another one has its place.
		stolen := 0
		b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/*/qemu/5*/config", Times: 1, Do: func() {
			stolen = b.VMs()[0].ID
			b.Remove(stolen)
			b.AddVM("pve1", stolen, "database", "", map[string]string{"description": "of somebody else", "cores": "8"})
		}})
		x := b.create("a")
		if v, ok := b.VM(stolen); !ok || vmidOf(x) == stolen || v.Config["cores"] != "8" || v.Config["ide2"] != "" || v.Running {
			b.Errorf("%+v, made %+v", v, x)
		}
		for _, r := range b.Requests() {
			if r.Method != http.MethodGet && strings.Contains(r.Path, fmt.Sprintf("/qemu/%d", stolen)) {
				b.Errorf("%+v was sent to it", r)
			}
		}
		if err := b.p.Delete(b.Context(), fmt.Sprintf("%d/00000000/database", stolen)); !errors.Is(err, provider.ErrPermanent) {
			b.Errorf("%v", err)
		}
	})
}

func TestTemplatesAreNeverChanged(t *testing.T) {
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		c.AddTemplate("pve1", 9000, "debian", fakepve.Template{Config: map[string]string{"boot": "c", "protection": "1", "vcpus": "1", "balloon": "2048", "agent": "0"}})
		config.Nodes = config.Nodes[:1]
	}, func(b *bench) {
		before, _ := b.VM(9000)
		s := spec()
		s.CPUs = 2
		x, err := b.p.Create(b.Context(), request("a", 1, s))
		if err != nil {
			b.Fatal(err)
		}
		after, _ := b.VM(9000)
		if fmt.Sprint(before) != fmt.Sprint(after) {
			b.Errorf("%v\n%v", before, after)
		}
		v, _ := b.VM(vmidOf(x))
		if c := v.Config; c["boot"] != "c" || c["protection"] != "" || c["vcpus"] != "" || c["balloon"] != "" || c["agent"] != "1" || !v.Running {
			b.Errorf("%+v", v)
		}
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestADeleteEndsWhenTheVMIsGoneAndNotWhenTheTaskBegan(t *testing.T) {
	run(t, fakepve.Config{TaskTime: 20 * time.Second}, nil, func(b *bench) {
		x := b.create("a")
		begin := time.Now()
		if err := b.p.Delete(b.Context(), x.ID); err != nil {
			b.Fatal(err)
		}
		if _, ok := b.VM(vmidOf(x)); ok || time.Since(begin) < time.Minute {
			b.Errorf("there %t, after %s", ok, time.Since(begin))
		}
		b.nothingLeft()
	})
}

func TestSeedsGoThroughTheNodeThatNeedsThem(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		for i := range 6 {
			b.create(fmt.Sprintf("a%d", i))
		}
		n := 0
		for _, r := range b.Requests() {
			if strings.HasSuffix(r.Path, "/upload") {
				n++
				if !strings.HasPrefix(r.Path, "/nodes/"+r.Node+"/") {
					b.Errorf("%+v", r)
				}
			}
		}
		if n != 6 {
			b.Errorf("%d uploads", n)
		}
	})
}

func TestAnUploadWhoseHandlerIsTooSlowFailsAndIsRepeatedLater(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.SlowUploads(6 * time.Second)
		_, err := b.try("a")
		if err == nil || errors.Is(err, provider.ErrPermanent) || errors.Is(err, provider.ErrNoCapacity) {
			b.Fatalf("%v", err)
		}
		b.SlowUploads(0)
		b.until(func() bool {
			_, err := b.try("a")
			return err == nil || errors.Is(err, provider.ErrAlreadyExists)
		})
		if vms := b.VMs(); len(vms) != 1 || !vms[0].Running {
			b.Errorf("%+v", vms)
		}
	})
}

func TestAMissingPrivilegeIsNamed(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(b *bench)
		text  string
	}{
		{"upload", func(b *bench) { b.Grant(tokenID, "/storage/local", "Datastore.Allocate", "Datastore.Audit") }, "403"},
		{"clone", func(b *bench) {
			b.Grant(tokenID, "/vms", "VM.Audit", "VM.Allocate")
		}, "VM.Clone"},
		{"space", func(b *bench) { b.Grant(tokenID, "/storage/local-lvm", "Datastore.Audit") }, "Datastore.AllocateSpace"},
		{"network", func(b *bench) { b.Revoke(tokenID, "/sdn/zones/localnetwork") }, "SDN.Use"},
		{"audit", func(b *bench) { b.Grant(tokenID, "/vms", "VM.Clone") }, "VM.Audit on /vms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			run(t, fakepve.Config{}, nil, func(b *bench) {
				c.spoil(b)
				_, err := b.try("a")
				b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, c.text)
			})
		})
	}
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Grant(tokenID, "/storage/local", "Datastore.AllocateTemplate", "Datastore.Audit")
		b.wants(b.p.Delete(b.Context(), x.ID), provider.ErrDenied, provider.ReasonPermissionDenied, "Datastore.Allocate on /storage/local")
	})
}

func TestAListThatHidesVMsIsNoList(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Grant(tokenID, "/vms", "VM.Clone", "VM.Allocate")
		_, err := b.p.List(b.Context(), "crawl")
		b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, "VM.Audit")
		if _, err := b.p.Get(b.Context(), x.ID); errors.Is(err, provider.ErrNotFound) || err == nil {
			b.Errorf("%v", err)
		}
		if err := b.p.Delete(b.Context(), x.ID); errors.Is(err, provider.ErrNotFound) || err == nil {
			b.Errorf("%v", err)
		}
		if _, err := b.try("a"); !errors.Is(err, provider.ErrDenied) {
			b.Errorf("%v", err)
		}
		if n := len(b.VMs()); n != 1 {
			b.Errorf("%d VMs", n)
		}
	})
}

func TestAnErrorWithoutWordsMakesNothingGone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		remove := b.Fault(fakepve.Fault{Method: "GET", Path: "/nodes/*/qemu/*/config", Status: 500, Reason: "Internal Server Error"})
		if _, err := b.p.Get(b.Context(), x.ID); !errors.Is(err, provider.ErrUnavailable) {
			b.Errorf("%v", err)
		}
		if err := b.p.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) {
			b.Errorf("%v", err)
		}
		remove()
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestACloneThatFailsIsMadeOnAnotherNodeAndLeavesNothing(t *testing.T) {
	for _, exit := range []string{
		"clone failed: can't lock file '/var/lock/pve-manager/pve-storage-local-lvm' - got timeout",
		"clone failed: cfs-lock 'storage-shared' error: got lock request timeout",
		"clone failed: storage 'local-lvm' error: No space left on device",
	} {
		run(t, fakepve.Config{}, nil, func(b *bench) {
			b.TaskFault(fakepve.TaskFault{Type: "qmclone", Times: 1, Exit: exit})
			x := b.create("a")
			if vms := b.VMs(); len(vms) != 1 || x.Host == "pve1" {
				b.Errorf("%+v, %+v", x, vms)
			}
		})
	}
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Exit: "clone failed: No space left on device"})
		_, err := b.try("a")
		b.wants(err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "pve3")
		b.nothingLeft()
	})
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.TaskFault(fakepve.TaskFault{Type: "qmstart", Times: 3, Exit: "start failed: unable to start: Cannot allocate memory"})
		_, err := b.try("a")
		b.wants(err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "memory")
		b.nothingLeft()
	})
}

func TestAVMUnderHAIsStoppedAndPurged(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.SetHA(vmidOf(x), true)
		if err := b.p.Delete(b.Context(), x.ID); err != nil {
			b.Fatal(err)
		}
		b.nothingLeft()
	})
}

func TestAnAgentThatGivesNoAddressIsWaitedForWithoutHangingAnybody(t *testing.T) {
	for mode, text := range map[fakepve.AgentMode]string{
		fakepve.AgentAbsent: "not running", fakepve.AgentHangs: "got timeout", fakepve.AgentDisabled: "refuses the command", fakepve.AgentLinkLocal: "knows of none",
		fakepve.AgentNoList: "knows of none",
	} {
		run(t, fakepve.Config{}, nil, func(b *bench) {
			x := b.create("a")
			b.SetAgent(vmidOf(x), mode)
			time.Sleep(10 * time.Second)
			begin := time.Now()
			got, err := b.p.Get(b.Context(), x.ID)
			if err != nil || got.State != provider.StateRunning || got.Address != "" || !strings.Contains(got.Message, text) || time.Since(begin) > 5*time.Second {
				b.Errorf("%+v, %v", got, err)
			}
			b.SetAgent(vmidOf(x), fakepve.AgentWorks)
			if got, err := b.p.Get(b.Context(), x.ID); err != nil || got.Address == "" {
				b.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func TestTheAgentsPrivilegeIsThatOfTheVersion(t *testing.T) {
	for version, other := range map[int]string{8: "VM.GuestAgent.Audit", 9: "VM.Monitor"} {
		run(t, fakepve.Config{Version: version}, func(c *fakepve.Cluster, _ *proxmox.Config) {
			c.Grant(tokenID, "/vms", "VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk", "VM.Config.Memory",
				"VM.Config.Options", "VM.PowerMgmt", other)
		}, func(b *bench) {
			x := b.create("a")
			time.Sleep(10 * time.Second)
			_, err := b.p.Get(b.Context(), x.ID)
			b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, "VM.GuestAgent.Audit on Proxmox VE 9 and VM.Monitor on 8")
			if h := b.p.Check(b.Context())[0]; h.Reason != provider.ReasonPermissionDenied {
				b.Errorf("%+v", h)
			}
		})
	}
}

func TestALostAnswerIsLookedUpInsteadOfAskedForAgain(t *testing.T) {
	for _, path := range []string{"/nodes/*/qemu/*/clone", "/nodes/*/qemu/*/config", "/nodes/*/qemu/*/status/start", "/nodes/*/storage/*/upload"} {
		for _, f := range []fakepve.Fault{{Drop: true}, {Status: 596, Reason: "Connection timed out"}, {Status: 599, Reason: "Too many redirections"}} {
			run(t, fakepve.Config{}, silent, func(b *bench) {
				f.Method, f.Path, f.Times, f.Carry = "POST", path, 1, true
				b.Fault(f)
				x, err := b.try("a")
				if err != nil {
					b.Fatalf("%s with %+v: %v", path, f, err)
				}
				if vms := b.VMs(); len(vms) != 1 || !vms[0].Running || b.Count("POST", "/nodes/*/qemu/*/clone") != 1 {
					b.Errorf("%s with %+v: %+v, %+v", path, f, x, vms)
				}
			})
		}
	}
}

func TestAWriteThatWasNeverSentChangesTheNode(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.Fault(fakepve.Fault{Method: "POST", Path: "/nodes/*/qemu/*/clone", Times: 1, Status: 595, Reason: "No route to host"})
		if x := b.create("a"); x.Host == "pve1" {
			b.Errorf("%+v", x)
		}
	})
}

func TestTagsAreNothingToGoBy(t *testing.T) {
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) { config.Tags = []string{"z", "a"} }, func(b *bench) {
		x := b.create("a")
		b.Edit(vmidOf(x), "tags", "of;the;operator")
		all := b.list()
		if len(all) != 1 || all[0].Mark != x.Mark {
			b.Errorf("%+v", all)
		}
	})
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		config.Tags = []string{"proxy"}
		c.RestrictTags(true)
	}, func(b *bench) {
		_, err := b.try("a")
		b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, "tag")
	})
}

func TestWarningsAreSuccessAndSaid(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		for _, kind := range []string{"qmclone", "qmstart", "imgcopy", "qmconfig", "qmdestroy"} {
			b.TaskFault(fakepve.TaskFault{Type: kind, Exit: "WARNINGS: 1"})
		}
		x := b.create("a")
		if err := b.p.Delete(b.Context(), x.ID); err != nil {
			b.Fatal(err)
		}
		b.nothingLeft()
		if n := strings.Count(b.logs.String(), "level=WARN"); n < 4 {
			b.Errorf("%d warnings in the log", n)
		}
	})
}

func TestNothingIsUploadedWithCredentialsThatAreRefused(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.SetSecret(tokenID, "x")
		_, err := b.try("a")
		b.wants(err, provider.ErrDenied, provider.ReasonAuthenticationFailed, "TokenID")
		for _, r := range b.Requests() {
			if r.Method != http.MethodGet {
				b.Errorf("%+v", r)
			}
		}
	})
}

func TestASecretIsReadAgainAfterARefusal(t *testing.T) {
	current := secret
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) {
		config.Secret = func(context.Context) ([]byte, error) { return []byte(current), nil }
	}, func(b *bench) {
		b.create("a")
		current = "a-new-secret-of-the-token"
		b.SetSecret(tokenID, current)
		if _, err := b.p.List(b.Context(), "crawl"); !errors.Is(err, provider.ErrDenied) {
			b.Errorf("%v", err)
		}
		if all := b.list(); len(all) != 1 {
			b.Errorf("%+v", all)
		}
	})
}

func TestAVMThatSurvivesItsDeleteDoesNotWaitForASeedThatIsGone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Fault(fakepve.Fault{Method: "DELETE", Path: "/nodes/*/qemu/*", Times: 1, Status: 500, Reason: "unable to destroy"})
		if err := b.p.Delete(b.Context(), x.ID); err == nil {
			b.Fatal("it was destroyed")
		}
		v, ok := b.VM(vmidOf(x))
		if !ok || strings.Contains(fmt.Sprint(v.Config), "egress-home") && v.Config["ide2"] != "" {
			b.Errorf("%+v", v)
		}
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestAMigratedVMIsFoundWhereItIs(t *testing.T) {
	run(t, fakepve.Config{Stale: 10 * time.Second}, func(_ *fakepve.Cluster, config *proxmox.Config) {
		config.Nodes = config.Nodes[:2]
		config.SeedStorage = "shared"
	}, func(b *bench) {
		b.Grant(tokenID, "/storage/shared", "Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.Audit")
		x, y := b.create("a"), b.create("b")
		from := x.Host
		b.Migrate(vmidOf(x), map[string]string{"pve1": "pve2", "pve2": "pve1"}[from])
		b.Migrate(vmidOf(y), "pve3") // which is not among Nodes
		all := b.list()
		if len(all) != 2 || all[0].Host == from && all[1].Host == from {
			b.Errorf("%+v", all)
		}
		for _, z := range all {
			if z.ID == y.ID && (!z.Evacuate || z.State != provider.StateRunning) {
				b.Errorf("on a node that is not configured: %+v", z)
			}
		}
		if got, err := b.p.Get(b.Context(), x.ID); err != nil || got.Host == from {
			b.Errorf("%+v, %v", got, err)
		}
		b.remove(b.p, x.ID)
		b.remove(b.p, y.ID)
		b.nothingLeft()
	})
}

func TestAStorageThatIsSlowMakesOneVMHoweverOftenItIsAskedFor(t *testing.T) {
	run(t, fakepve.Config{CloneTime: 5 * time.Minute}, nil, func(b *bench) {
		for tries := 0; ; tries++ {
			ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
			_, err := b.p.Create(ctx, request("a", 1, spec()))
			cancel()
			if err == nil {
				if tries < 3 {
					b.Errorf("after %d tries: nothing was tested", tries)
				}
				break
			}
			if !errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) || tries > 10 {
				b.Fatalf("%v", err)
			}
		}
		if n := b.Count("POST", "/nodes/*/qemu/*/clone"); n != 1 || len(b.VMs()) != 1 {
			b.Errorf("%d clones, %+v", n, b.VMs())
		}
	})
}

func TestACloneWhoseWorkerWasKilledIsNamedForAnOperator(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Times: 1, Kill: true})
		ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
		defer cancel()
		if _, err := b.p.Create(ctx, request("a", 1, spec())); err == nil {
			b.Fatal("made")
		}
		for range 20 {
			ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
			_, err := b.p.Create(ctx, request("a", 1, spec()))
			cancel()
			if err != nil && strings.Contains(err.Error(), "qm unlock") {
				b.wants(err, provider.ErrUnavailable, provider.ReasonUnknown, fmt.Sprintf("qm unlock %d", b.VMs()[0].ID))
				all := b.list()
				if len(all) != 1 || all[0].State == provider.StateRunning {
					b.Errorf("%+v", all)
				}
				b.create("b") // others go on
				return
			}
			if err == nil {
				b.Fatalf("%+v", b.VMs())
			}
		}
		b.Error("never given up")
	})
}

func TestAHibernatedVMIsNeverStarted(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Hibernate(vmidOf(x))
		starts := b.Count("POST", "/nodes/*/qemu/*/status/start")
		for _, lock := range []string{"suspended", "suspending", ""} {
			b.Edit(vmidOf(x), "lock", lock) // the saved state alone counts too
			_, err := b.try("a")
			b.wants(err, provider.ErrPermanent, provider.ReasonUnsupported, "hibernated")
			if got, err := b.p.Get(b.Context(), x.ID); err != nil || got.State != provider.StateStopped || !strings.Contains(got.Message, "hibernated") {
				b.Errorf("%q: %+v, %v", lock, got, err)
			}
		}
		if n := b.Count("POST", "/nodes/*/qemu/*/status/start"); n != starts {
			b.Error("it was started")
		}
		b.Edit(vmidOf(x), "lock", "suspended")
		if all := b.list(); len(all) != 1 || all[0].State != provider.StateStopped {
			b.Errorf("%+v", all)
		}
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestWhatIsProtectedOrLockedIsNotDeleted(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Edit(vmidOf(x), "protection", "1")
		b.wants(b.p.Delete(b.Context(), x.ID), provider.ErrPermanent, provider.ReasonUnsupported, "--protection 0")
		if v, _ := b.VM(vmidOf(x)); !v.Running {
			b.Error("it was stopped")
		}
		b.Edit(vmidOf(x), "protection", "")
		b.Edit(vmidOf(x), "lock", "backup")
		b.wants(b.p.Delete(b.Context(), x.ID), provider.ErrUnavailable, provider.ReasonUnknown, `"backup"`)
		if v, _ := b.VM(vmidOf(x)); !v.Running {
			b.Error("it was stopped")
		}
		b.Edit(vmidOf(x), "lock", "")
		b.remove(b.p, x.ID)
		b.nothingLeft()
	})
}

func TestADestroyWhoseWorkerWasKilledIsSaidAndNeverTakenForGone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.TaskFault(fakepve.TaskFault{Type: "qmdestroy", Times: 1, Kill: true})
		if err := b.p.Delete(b.Context(), x.ID); err == nil {
			b.Error("accepted")
		}
		err := b.p.Delete(b.Context(), x.ID)
		b.wants(err, provider.ErrUnavailable, provider.ReasonUnknown, "qm unlock")
		if _, err := b.p.Get(b.Context(), x.ID); errors.Is(err, provider.ErrNotFound) {
			b.Errorf("%v", err)
		}
	})
}

func TestAVMThatSomebodyElseDestroyedLeavesNoSeed(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Remove(vmidOf(x))
		if !slices.ContainsFunc(b.Volumes(), func(v string) bool { return strings.HasSuffix(v, ".iso") }) {
			b.Fatal("the seed went with it: nothing is tested")
		}
		if err := b.p.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrNotFound) {
			b.Errorf("%v", err)
		}
		b.nothingLeft()
	})
}

func TestAnotherOwnersAndAnotherEntrysAreNotTouched(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		second := b.config
		second.Name = "second"
		other, err := proxmox.New(second)
		if err != nil {
			b.Fatal(err)
		}
		defer other.Close()
		x := b.create("a")
		s := spec()
		s.Provider = "second"
		if _, err := other.Create(b.Context(), request("a", 1, s)); !errors.Is(err, provider.ErrPermanent) {
			b.Errorf("%v", err)
		}
		if err := other.Delete(b.Context(), x.ID); !errors.Is(err, provider.ErrNotFound) && !errors.Is(err, provider.ErrPermanent) {
			b.Errorf("%v", err)
		}
		if all, err := other.List(b.Context(), "crawl"); err != nil || len(all) != 0 {
			b.Errorf("%+v, %v", all, err)
		}
		if all := b.list(); len(all) != 1 {
			b.Errorf("%+v", all)
		}
	})
}

func TestWithoutQuorumNothingIsMadeAndNothingGone(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		b.SetQuorum(false)
		_, err := b.try("a")
		b.wants(err, provider.ErrUnavailable, provider.ReasonUnreachable, "quorum")
		b.SetQuorum(true)
		b.create("a")
	})
}

func TestLinkedAndFullClonesAndTemplatesByVMID(t *testing.T) {
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		config.FullClone, config.DiskStorage = true, "shared"
		config.Templates = map[string]proxmox.Template{"debian-13": {Nodes: map[string]int{"pve1": 9000, "pve2": 9001, "pve3": 9002}}}
		c.Grant(tokenID, "/storage/shared", "Datastore.AllocateSpace")
	}, func(b *bench) {
		x := b.create("a")
		if v, _ := b.VM(vmidOf(x)); !strings.HasPrefix(v.Config["scsi0"], "shared:vm-") {
			b.Errorf("%+v", v)
		}
	})
	run(t, fakepve.Config{}, func(c *fakepve.Cluster, config *proxmox.Config) {
		c.AddTemplate("pve1", 9100, "only-here", fakepve.Template{Storage: "shared"})
		c.Grant(tokenID, "/storage/shared", "Datastore.AllocateSpace")
		config.Templates = map[string]proxmox.Template{"debian-13": {VMID: 9100}}
	}, func(b *bench) {
		s := spec()
		s.Placement.Host = "pve3"
		if x, err := b.p.Create(b.Context(), request("a", 1, s)); err != nil || x.Host != "pve3" {
			b.Errorf("%+v, %v", x, err)
		}
	})
}
