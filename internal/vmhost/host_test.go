package vmhost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/provider"
)

func wantKind(t *testing.T, err, kind error, reason provider.Reason, text string) {
	t.Helper()
	if !errors.Is(err, kind) || provider.ReasonOf(err) != reason || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v (%v, %s), want %v, %s and %q", err, provider.Kind(err), provider.ReasonOf(err), kind, reason, text)
	}
}

func TestAnInstanceIsMadeFoundAndDeletedWithAllThatBelongsToIt(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.Autostart = true }, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		if x.State != provider.StateRunning || x.Host != "attic" || x.Name != "own--a--1" || x.Message != "because" || x.Created.IsZero() {
			t.Errorf("made %+v", x)
		}
		all, err := r.List(t.Context(), "own")
		if err != nil || len(all) != 1 || all[0].ID != x.ID || all[0].Mark != x.Mark || all[0].State != provider.StateRunning {
			t.Errorf("listed %+v, %v", all, err)
		}
		if others, err := r.List(t.Context(), "other"); err != nil || len(others) != 0 {
			t.Errorf("another owner sees %+v, %v", others, err)
		}
		d := r.peer.Domains()[0]
		if d.State != golibvirt.DomainRunning || !d.Autostart || d.XML.Type != "kvm" {
			t.Errorf("the domain: %+v", d)
		}
		volumes := map[string]libvirttest.Volume{}
		for _, v := range r.peer.Volumes() {
			volumes[v.Name] = v
		}
		prefix := d.XML.Devices.Disks[0].Source.File.File
		prefix = strings.TrimSuffix(strings.TrimPrefix(prefix, "/var/lib/libvirt/images/"), "qcow2")
		disk, seed, base := volumes[diskName(prefix)], volumes[seedName(prefix)], volumes["base-debian.qcow2"]
		if disk.Capacity != 3<<30 || disk.BackingFormat != "qcow2" || disk.Backing != "/var/lib/libvirt/images/base-debian.qcow2" {
			t.Errorf("disk: %+v", disk)
		}
		if seed.Mode != "0600" || !strings.Contains(string(seed.Content), "a secret that nobody may see") {
			t.Errorf("the seed has mode %s and %d bytes", seed.Mode, len(seed.Content))
		}
		data := volumes[strings.TrimPrefix(base.Backing, "/var/lib/libvirt/images/")]
		if base.Capacity != 1<<30 || base.BackingFormat != "qcow2" || sum(data.Content) != r.config.Images["debian"].SHA256 || data.Mode != "0600" {
			t.Errorf("base: %+v on %s", base, data.Name)
		}
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		if left := r.left(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		_, err = r.Get(t.Context(), x.ID)
		wantKind(t, err, provider.ErrNotFound, provider.ReasonUnknown, "there is no domain")
		wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrNotFound, provider.ReasonUnknown, "there is no domain")
		wantKind(t, r.Delete(t.Context(), "x"), provider.ErrNotFound, provider.ReasonUnknown, `id "x" was never given`)
		if strings.Contains(r.log.String(), "nobody may see") {
			t.Error("a secret is in the log")
		}
	})
}

func TestANameIsTakenByWhoeverHasIt(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrAlreadyExists, provider.ReasonUnknown, "the domain own--a--1 is there")
		other := request("a", spec())
		other.Mark.Owner = "somebody"
		_, err = r.Create(t.Context(), other, "")
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnknown, "carries another mark")
		r.peer.AddDomain("own--b--1")
		_, err = r.Create(t.Context(), request("b", spec()), "")
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
		foreign := r.peer.AddDomain("theirs")
		wantKind(t, r.Delete(t.Context(), formatUUID(foreign)), provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
		_, err = r.Get(t.Context(), formatUUID(foreign))
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
		if all, err := r.List(t.Context(), "own"); err != nil || len(all) != 1 || all[0].ID != x.ID {
			t.Errorf("listed %+v, %v", all, err)
		}
		bad := request("c", spec())
		bad.Mark.Owner = "two words"
		_, err = r.Create(t.Context(), bad, "")
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnsupported, "can't be stored")
		bad = request("c", spec())
		bad.Spec.CPUs = -1
		_, err = r.Create(t.Context(), bad, "")
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnsupported, "spec: CPUs -1")
	})
}

// A copy made by hand, with our mark in it, is somebody else's, and so are the files of the original.
func TestACloneOfAnInstanceIsNotOurs(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		original := r.peer.Domains()[0]
		clone := r.peer.AddDomain("copy")
		r.peer.ChangeDomain("copy", func(d *libvirttest.Domain) { d.Metadata = original.Metadata })
		if all, err := r.List(t.Context(), "own"); err != nil || len(all) != 1 || all[0].ID != x.ID {
			t.Errorf("listed %+v, %v", all, err)
		}
		wantKind(t, r.Delete(t.Context(), formatUUID(clone)), provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
		if left := r.left(); len(left) != 5 { // two domains, disk, seed and log
			t.Errorf("left: %q", left)
		}
	})
}

// An operator keeps an instance by taking our mark away.
func TestADomainThatHasLostOurMarkIsNotTouched(t *testing.T) {
	for _, grace := range []time.Duration{0, time.Minute} {
		inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = grace }, func(t *testing.T, r *rig) {
			x := r.create(t, "a", spec())
			if all, err := r.List(t.Context(), "own"); err != nil || len(all) != 1 {
				t.Fatalf("listed %+v, %v", all, err)
			}
			r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.Metadata, d.ShutsDown = map[string]string{}, true })
			wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
			if d := r.peer.Domains(); len(d) != 1 || d[0].State != golibvirt.DomainRunning || len(r.left()) != 4 {
				t.Errorf("left %q of %+v", r.left(), d)
			}
			if all, err := r.List(t.Context(), "own"); err != nil || len(all) != 0 {
				t.Errorf("listed %+v, %v", all, err)
			}
		})
	}
}

// procedures returns the calls of f in their order.
func (r *rig) procedures(f func()) []string {
	before := r.peer.History()
	f()
	return r.peer.History()[len(before):]
}

// Whatever call of a create fails, however, the next one finds the ground clean or the instance made, and nothing is left when
// it is deleted.
func TestACreateMayFailAtEachCall(t *testing.T) {
	for how, f := range map[string]libvirttest.Fault{
		"refused": {Code: golibvirt.ErrInternalError, Message: "internal error: refused"}, "cut": {Cut: true}, "answer lost": {Lose: true}, "hung": {Hang: true},
	} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(c *Config, _ *libvirttest.Config) { c.Autostart = true }, func(t *testing.T, r *rig) {
				first := r.create(t, "first", spec()) // so that the image is there
				if err := r.Delete(t.Context(), first.ID); err != nil {
					t.Fatal(err)
				}
				var x provider.Instance
				calls := r.procedures(func() { x = r.create(t, "a", spec()) })
				if err := r.Delete(t.Context(), x.ID); err != nil {
					t.Fatal(err)
				}
				failed := 0
				for i, name := range calls {
					if raceDetector() && i%3 != len(how)%3 {
						continue
					}
					f := f
					f.Skip, f.Times = i, 1
					mend := r.peer.Inject(f)
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					x, err := r.Create(ctx, request("a", spec()), "")
					cancel()
					mend()
					if err != nil {
						failed++
						if kind := provider.Kind(err); !errors.Is(kind, provider.ErrUnavailable) && !errors.Is(kind, provider.ErrOutcomeUnknown) {
							t.Errorf("call %d, %s: %v is %v", i, name, err, kind)
						}
						if len(r.left()) > 0 && errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) {
							t.Errorf("call %d, %s: left %q, and the error says that it is safe to ask elsewhere: %v", i, name, r.left(), err)
						}
						time.Sleep(time.Minute) // of fake time: what goes on without the caller has its end
						if x, err = r.Create(t.Context(), request("a", spec()), ""); err != nil && !errors.Is(err, provider.ErrAlreadyExists) {
							t.Fatalf("call %d, %s: again: %v", i, name, err)
						}
					}
					all, err := r.List(t.Context(), "own")
					if err != nil || len(all) != 1 || all[0].State != provider.StateRunning || x.ID != "" && all[0].ID != x.ID {
						t.Fatalf("call %d, %s: listed %+v, %v", i, name, all, err)
					}
					if err := r.Delete(t.Context(), all[0].ID); err != nil {
						t.Fatalf("call %d, %s: %v", i, name, err)
					}
					if left := r.left(); len(left) > 0 {
						t.Fatalf("call %d, %s: left %q", i, name, left)
					}
				}
				if failed < len(calls)/6 {
					t.Errorf("%d of %d calls fail a create", failed, len(calls))
				}
			})
		})
	}
}

func TestADeleteMayFailAtEachCall(t *testing.T) {
	for how, f := range map[string]libvirttest.Fault{
		"refused": {Code: golibvirt.ErrInternalError, Message: "internal error: refused"}, "cut": {Cut: true}, "answer lost": {Lose: true}, "hung": {Hang: true},
	} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, r *rig) {
				x := r.create(t, "a", spec())
				calls := r.procedures(func() {
					if err := r.Delete(t.Context(), x.ID); err != nil {
						t.Fatal(err)
					}
				})
				for i, name := range calls {
					if raceDetector() && i%3 != len(how)%3 {
						continue
					}
					x := r.create(t, "a", spec())
					f := f
					f.Skip, f.Times = i, 1
					mend := r.peer.Inject(f)
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					err := r.Delete(ctx, x.ID)
					cancel()
					mend()
					time.Sleep(time.Minute) // of fake time
					all, listErr := r.List(t.Context(), "own")
					if listErr != nil || err == nil && len(all) > 0 || len(all) == 0 && len(r.left()) > 0 {
						t.Fatalf("call %d, %s: after %v listed %+v, %v; left %q", i, name, err, all, listErr, r.left())
					}
					if err := r.Delete(t.Context(), x.ID); err != nil && !errors.Is(err, provider.ErrNotFound) {
						t.Fatalf("call %d, %s: again: %v", i, name, err)
					}
					if left := r.left(); len(left) > 0 {
						t.Fatalf("call %d, %s: left %q", i, name, left)
					}
				}
			})
		})
	}
}

// startedMeanwhile has somebody start the domain of x right before a call of that name. QEMU makes its log anew.
func (r *rig) startedMeanwhile(x provider.Instance, call string) {
	r.peer.Inject(libvirttest.Fault{Procedure: call, Times: 1, Do: func() {
		r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.State = golibvirt.DomainRunning })
		id, _ := parseUUID(x.ID)
		r.peer.AddVolume(libvirttest.Volume{Name: logName(prefixOf(x.Name, id)), Unseen: true})
	}})
}

// again returns what a process that starts now makes of the same host.
func (r *rig) again(t *testing.T) *Host {
	t.Helper()
	h, err := New(r.config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() }) // always nil
	return h
}

func TestWhatSomebodyStartsWhileItIsDeletedIsDeletedToo(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		for _, call := range []string{"StoragePoolLookupByName", "StoragePoolListAllVolumes", "StorageVolDelete", "DomainUndefineFlags"} {
			x := r.create(t, "a", spec())
			r.startedMeanwhile(x, call)
			if err := r.Delete(t.Context(), x.ID); err != nil {
				t.Errorf("before %s: %v", call, err)
			}
			if left := r.left(); len(left) > 0 {
				t.Errorf("before %s: left %q", call, left)
			}
			r.peer.Mend()
		}
		// An ordinary one costs one question more.
		x := r.create(t, "a", spec())
		calls := r.procedures(func() {
			if err := r.Delete(t.Context(), x.ID); err != nil {
				t.Error(err)
			}
		})
		if i := slices.Index(calls, "DomainUndefineFlags"); !slices.Equal(calls[i:], []string{"DomainUndefineFlags", "DomainGetState"}) {
			t.Errorf("an ordinary delete ends with %q", calls[i:])
		}
	})
}

// Another process may have undefined it in between, or somebody have put a definition back.
func TestADomainThatIsUndefinedBySomebodyElseTooIsDeleted(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		refusal := libvirttest.Fault{
			Procedure: "DomainUndefineFlags", Times: 1, Code: golibvirt.ErrOperationInvalid, Message: "Requested operation is not valid: cannot undefine transient domain",
		}
		x := r.create(t, "a", spec())
		refusal.Do = func() {
			r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.State, d.Transient = golibvirt.DomainRunning, true })
		}
		r.peer.Inject(refusal)
		if err := r.Delete(t.Context(), x.ID); err != nil || len(r.left()) > 0 {
			t.Errorf("%v, left %q", err, r.left())
		}
		x = r.create(t, "a", spec())
		refusal.Do = nil // it was undefined, refused that, and defined anew
		r.peer.Inject(refusal)
		if err := r.Delete(t.Context(), x.ID); err != nil || len(r.left()) > 0 {
			t.Errorf("%v, left %q", err, r.left())
		}
		// What libvirt will not undefine at all is said.
		x = r.create(t, "a", spec())
		refusal.Times, refusal.Message = 0, "Requested operation is not valid: cannot undefine it"
		mend := r.peer.Inject(refusal)
		wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrUnavailable, provider.ReasonUnknown, "cannot undefine it")
		mend()
		if err := r.Delete(t.Context(), x.ID); err != nil || len(r.left()) > 0 {
			t.Errorf("%v, left %q", err, r.left())
		}
	})
}

// A delete that is cut short right after the undefine leaves a domain that runs without a definition. The next process, which
// knows nothing of it, finds it by what its running state says.
func TestADomainWithoutDefinitionIsListedAsFailedAndDeleted(t *testing.T) {
	for how, f := range map[string]libvirttest.Fault{
		"answer lost": {Procedure: "DomainUndefineFlags", Lose: true}, "cut after": {Procedure: "DomainGetState", Cut: true},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			r.create(t, "other", spec())
			x := r.create(t, "a", spec())
			r.startedMeanwhile(x, "StoragePoolLookupByName")
			r.peer.Inject(f)
			wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrOutcomeUnknown, provider.ReasonUnreachable, "")
			r.peer.Mend()
			next := r.again(t)
			for _, h := range []*Host{next, next, r.Host} {
				all, err := h.List(t.Context(), "own")
				if err != nil || len(all) != 2 || all[0].ID != x.ID || all[0].State != provider.StateFailed || !strings.Contains(all[0].Message, "without a definition") {
					t.Fatalf("%s: listed %+v, %v", how, all, err)
				}
				if got, err := h.Get(t.Context(), x.ID); err != nil || got != all[0] || !h.HalfMade(x.ID) {
					t.Errorf("%s: got %+v, %v", how, got, err)
				}
			}
			if err := next.Delete(t.Context(), x.ID); err != nil {
				t.Errorf("%s: %v", how, err)
			}
			if left := r.left(); len(left) != 4 { // the other, with its three files
				t.Errorf("%s: left %q", how, left)
			}
		})
	}
}

// Its domain is gone with the first switching off, whoever does that, and then nothing tells of its files.
func TestADeleteOfADomainWithoutDefinitionMayFailAtEachCall(t *testing.T) {
	for how, f := range map[string]libvirttest.Fault{
		"refused": {Code: golibvirt.ErrInternalError, Message: "internal error: refused"}, "cut": {Cut: true}, "answer lost": {Lose: true},
	} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = time.Minute }, func(t *testing.T, r *rig) {
				undefined := func() provider.Instance {
					x := r.create(t, "a", spec())
					r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.Transient, d.ShutsDown = true, true })
					return x
				}
				x := undefined()
				calls := r.procedures(func() {
					if err := r.Delete(t.Context(), x.ID); err != nil || len(r.left()) > 0 {
						t.Fatalf("%v, left %q", err, r.left())
					}
				})
				for i, name := range calls {
					if raceDetector() && i%3 != len(how)%3 {
						continue
					}
					x := undefined()
					f := f
					f.Skip, f.Times = i, 1
					mend := r.peer.Inject(f)
					err := r.Delete(t.Context(), x.ID)
					mend()
					all, listErr := r.List(t.Context(), "own")
					if listErr != nil || len(all) == 0 && len(r.left()) > 0 {
						t.Fatalf("call %d, %s: after %v listed %+v, %v; left %q", i, name, err, all, listErr, r.left())
					}
					if err := r.Delete(t.Context(), x.ID); err != nil && !errors.Is(err, provider.ErrNotFound) {
						t.Fatalf("call %d, %s: again: %v", i, name, err)
					}
					if left := r.left(); len(left) > 0 {
						t.Fatalf("call %d, %s: left %q", i, name, left)
					}
				}
			})
		})
	}
}

func TestTheFilesOfADomainThatSomebodyUndefinesWhileItShutsDownAreDeleted(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = time.Minute }, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainShutdownFlags", Do: func() {
			r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.Transient, d.ShutsDown = true, true })
		}})
		if err := r.Delete(t.Context(), x.ID); err != nil && !errors.Is(err, provider.ErrNotFound) {
			t.Error(err)
		}
		if left := r.left(); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	})
}

func TestTheFilesOfADomainThatIsGoneBeforeItsDeleteGetsToItAreDeleted(t *testing.T) {
	for _, grace := range []time.Duration{0, time.Minute} {
		for _, procedure := range []string{"DomainLookupByUUID", "DomainGetMetadata"} {
			for skip := 1; skip < 3; skip++ {
				inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = grace }, func(t *testing.T, r *rig) {
					x := r.create(t, "a", spec())
					r.peer.Inject(libvirttest.Fault{Procedure: procedure, Skip: skip, Times: 1, Do: func() { r.peer.RemoveDomain(x.Name) }})
					if err := r.Delete(t.Context(), x.ID); err != nil && !errors.Is(err, provider.ErrNotFound) {
						t.Errorf("grace %s, gone at %s %d: %v", grace, procedure, skip+1, err)
					}
					if left := r.left(); len(left) > 0 {
						t.Errorf("grace %s, gone at %s %d: left %q", grace, procedure, skip+1, left)
					}
				})
			}
		}
	}
}

func TestNothingIsDeletedOfWhatLostOurMarkSinceItWasSeen(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { clear(d.Metadata) })
		// It becomes another domain with the same disk.
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainLookupByUUID", Skip: 1, Times: 1, Do: func() { r.peer.RemoveDomain(x.Name) }})
		before := r.left()
		wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrPermanent, provider.ReasonUnknown, "does not carry our mark")
		if left := r.left(); !slices.Equal(left, before) {
			t.Errorf("left %q of %q", left, before)
		}
	})
}

func TestOnlyWhatRunsWithoutADefinitionIsKnownByItsRunningState(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		transient := func(d *libvirttest.Domain) { d.Transient = true }
		listed := func(what string, want int) {
			t.Helper()
			next := r.again(t)
			for range 2 {
				if all, err := next.List(t.Context(), "own"); err != nil || len(all) != want {
					t.Errorf("%s: listed %+v, %v", what, all, err)
				}
			}
		}
		listed("as it was made", 1)
		r.peer.ChangeDomain(x.Name, transient)
		listed("without a definition", 1)
		paused := func(reason golibvirt.DomainPausedReason) func(*libvirttest.Domain) {
			return func(d *libvirttest.Domain) { d.State, d.Reason = golibvirt.DomainPaused, int32(reason) }
		}
		r.peer.ChangeDomain(x.Name, paused(golibvirt.DomainPausedIoerror))
		listed("paused on a full pool", 1)
		r.peer.ChangeDomain(x.Name, paused(golibvirt.DomainPausedMigration))
		listed("on its way here by a migration", 0)
		mark := r.peer.Domains()[0].Metadata
		r.peer.AddDomain("own--copy--1")
		r.peer.ChangeDomain("own--copy--1", func(d *libvirttest.Domain) { d.State, d.Transient, d.Metadata = golibvirt.DomainRunning, true, mark })
		r.peer.AddDomain("own--theirs--1")
		r.peer.ChangeDomain("own--theirs--1", func(d *libvirttest.Domain) { d.State, d.Transient = golibvirt.DomainRunning, true })
		r.peer.AddDomain("own--adopted--1")
		r.peer.ChangeDomain("own--adopted--1", func(d *libvirttest.Domain) { d.State = golibvirt.DomainRunning })
		r.peer.AddDomain("theirs")
		r.peer.ChangeDomain("theirs", func(d *libvirttest.Domain) { d.State, d.Transient = golibvirt.DomainRunning, true })
		listed("others'", 0)
		r.peer.ChangeDomain(x.Name, func(d *libvirttest.Domain) { d.State, d.Transient = golibvirt.DomainRunning, false })
		if all, err := r.again(t).List(t.Context(), "own"); err != nil || len(all) != 1 || all[0].State != provider.StateRunning {
			t.Errorf("defined anew, it is listed as %+v, %v", all, err)
		}
	})
}

func TestWhatACrashLeavesHalfMadeIsListedAsFailedAndMadeAnew(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "first", spec())
		// The answer to the start is lost, and the daemon stays away for as long as the clean-up tries.
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainCreateWithFlags", Times: 1, Lose: true, Do: func() { go r.peer.SetDown(true) }})
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrOutcomeUnknown, provider.ReasonUnreachable, "")
		time.Sleep(2 * time.Minute)
		r.peer.SetDown(false)
		time.Sleep(time.Minute)
		all, err := r.List(t.Context(), "own")
		i := slices.IndexFunc(all, func(x provider.Instance) bool { return x.Name == "own--a--1" })
		if err != nil || i < 0 || all[i].State != provider.StateFailed || !strings.Contains(all[i].Message, "half made") {
			t.Fatalf("listed %+v, %v", all, err)
		}
		x := r.create(t, "a", spec())
		if x.ID == all[i].ID {
			t.Error("it has the UUID of the one before")
		}
	})
}

func TestAnInstanceOfWhichOnlyTheLastAnswerWasLostStays(t *testing.T) {
	for _, f := range []libvirttest.Fault{{Lose: true}, {Delay: time.Minute}} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			f.Procedure, f.Times = "DomainSetMetadata", 1
			r.peer.Inject(f)
			ctx, cancel := context.WithTimeout(t.Context(), 59*time.Second)
			defer cancel()
			if f.Lose {
				_, err := r.Create(ctx, request("a", spec()), "")
				wantKind(t, err, provider.ErrOutcomeUnknown, provider.ReasonUnreachable, "")
				all, err := r.List(t.Context(), "own")
				if err != nil || len(all) != 1 || all[0].State != provider.StateRunning {
					t.Fatalf("listed %+v, %v", all, err)
				}
				time.Sleep(2 * time.Minute) // of fake time
				if again, err := r.List(t.Context(), "own"); err != nil || len(again) != 1 || again[0] != all[0] {
					t.Errorf("listed %+v and then %+v, %v", all, again, err)
				}
				return
			}
			// When it was not carried out, the rest goes.
			_, err := r.Create(ctx, request("a", spec()), "")
			wantKind(t, err, provider.ErrOutcomeUnknown, provider.ReasonTimeout, "")
			time.Sleep(2 * time.Minute) // of fake time
			if left := r.left(); len(left) > 0 {
				t.Errorf("left %q", left)
			}
		})
	}
}

func TestAnInstanceBeingMadeIsPendingAndOneBeingDeletedIsDeleting(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "first", spec())
		state := func(want provider.State) {
			t.Helper()
			all, err := r.List(t.Context(), "own")
			i := slices.IndexFunc(all, func(x provider.Instance) bool { return x.Name == "own--a--1" })
			if err != nil || i < 0 || all[i].State != want {
				t.Errorf("listed %+v, %v, want %v", all, err, want)
			}
		}
		mend := r.peer.Inject(libvirttest.Fault{Procedure: "DomainCreateWithFlags", Delay: 5 * time.Second})
		made := make(chan provider.Instance)
		go func() { made <- r.create(t, "a", spec()) }()
		time.Sleep(time.Second)
		state(provider.StatePending)
		x := <-made
		mend()
		state(provider.StateRunning)
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainUndefineFlags", Delay: 5 * time.Second})
		deleted := make(chan error)
		go func() { deleted <- r.Delete(t.Context(), x.ID) }()
		time.Sleep(time.Second)
		state(provider.StateDeleting)
		if err := <-deleted; err != nil {
			t.Error(err)
		}
	})
}

// Of an answer that was given before a create ended, and is read after, nothing is believed that would have the pool delete what
// was just made.
func TestAnInstanceIsNotTakenForHalfMadeByAnAnswerOfBefore(t *testing.T) {
	for _, call := range []string{"ConnectGetAllDomainStats", "DomainGetMetadata"} {
		for _, later := range []string{"DomainCreateWithFlags", "DomainSetMetadata"} {
			inBubble(t, nil, func(t *testing.T, r *rig) {
				r.create(t, "first", spec())
				r.peer.Inject(libvirttest.Fault{Procedure: later, Times: 1, Delay: 5 * time.Second})
				made := make(chan error, 1)
				go func() {
					_, err := r.Create(t.Context(), request("a", spec()), "")
					made <- err
				}()
				time.Sleep(time.Second)
				mend := r.peer.Inject(libvirttest.Fault{Procedure: call, Late: 10 * time.Second})
				all, err := r.List(t.Context(), "own")
				i := slices.IndexFunc(all, func(x provider.Instance) bool { return x.Name == "own--a--1" })
				if err != nil || i < 0 || all[i].State != provider.StatePending && all[i].State != provider.StateRunning {
					t.Errorf("late %s before %s: listed %+v, %v", call, later, all, err)
				}
				if err := <-made; err != nil {
					t.Error(err)
				}
				mend()
				if all, err = r.List(t.Context(), "own"); err != nil || len(all) != 2 || all[0].State != provider.StateRunning {
					t.Errorf("late %s: then listed %+v, %v", call, all, err)
				}
			})
		}
	}
}

func TestADeleteWaitsForTheCreateOfItsName(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "first", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainCreateWithFlags", Times: 1, Delay: time.Minute})
		made := make(chan provider.Instance, 1)
		go func() { made <- r.create(t, "a", spec()) }()
		time.Sleep(time.Second)
		all, err := r.List(t.Context(), "own")
		i := slices.IndexFunc(all, func(x provider.Instance) bool { return x.Name == "own--a--1" })
		if err != nil || i < 0 {
			t.Fatalf("listed %+v, %v", all, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := r.Delete(ctx, all[i].ID); !errors.Is(err, provider.ErrUnavailable) || provider.ReasonOf(err) != provider.ReasonTimeout {
			t.Errorf("a delete that can't wait: %v", err)
		}
		if err := r.Delete(t.Context(), all[i].ID); err != nil {
			t.Error(err)
		}
		if x := <-made; x.ID != all[i].ID {
			t.Errorf("made %+v, listed %+v", x, all[i])
		}
		if left := r.left(); len(left) != 4 { // the first with its three files
			t.Errorf("left %q", left)
		}
	})
}

func TestCallsThatHangEndWithTheirContextAndKeepNobodyElseWaiting(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "ConnectGetAllDomainStats", Hang: true})
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := r.List(ctx, "own")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "")
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("it took %s", took)
		}
		begin = time.Now()
		if _, err := r.Get(t.Context(), x.ID); err != nil || time.Since(begin) > 0 {
			t.Errorf("beside it: %v after %s", err, time.Since(begin))
		}
		ctx, stop := context.WithCancel(t.Context())
		stop()
		_, err = r.List(ctx, "own")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "")
	})
}

func TestCloseEndsWhatHangs(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "a", spec())
		r.peer.Inject(libvirttest.Fault{Hang: true})
		failed := make(chan error)
		go func() {
			_, err := r.List(context.Background(), "own")
			failed <- err
		}()
		synctest.Wait()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		wantKind(t, <-failed, provider.ErrUnavailable, provider.ReasonUnreachable, "closed")
		_, err := r.Create(t.Context(), request("b", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonUnreachable, "the provider is closed")
		synctest.Wait()
		if n := r.peer.Conns(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
	})
}

func TestErrorsOfLibvirtSayWhatToDo(t *testing.T) {
	for _, c := range []struct {
		what   string
		fault  libvirttest.Fault
		kind   error
		reason provider.Reason
		text   string
	}{
		{"no right", libvirttest.Fault{Procedure: "ConnectOpen", Code: golibvirt.ErrAuthFailed, Message: "authentication failed: access denied by policy"}, provider.ErrDenied, provider.ReasonPermissionDenied, "the group libvirt or a polkit rule"},
		{"no polkit", libvirttest.Fault{Procedure: "ConnectOpen", Code: golibvirt.ErrInternalError, Message: "internal error: unable to connect to the system bus"}, provider.ErrDenied, provider.ReasonPermissionDenied, "polkit"},
		{"read only", libvirttest.Fault{Procedure: "DomainDefineXMLFlags", Code: golibvirt.ErrOperationDenied, Message: "operation forbidden: read only access"}, provider.ErrDenied, provider.ReasonPermissionDenied, "read only"},
		{"full at the disk", libvirttest.Fault{Procedure: "StorageVolCreateXML", Skip: 3, Code: golibvirt.ErrSystemError, Message: "cannot allocate: No space left on device"}, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool is full"},
		{"quota", libvirttest.Fault{Procedure: "StorageVolCreateXML", Code: golibvirt.ErrOperationFailed, Message: "Disk quota exceeded"}, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool is full"},
		{"unknown procedure", libvirttest.Fault{Procedure: "NodeGetMemoryStats", Code: golibvirt.ErrRPC, Message: "unknown procedure: 228"}, provider.ErrPermanent, provider.ReasonUnsupported, "too old"},
		{"bad domain", libvirttest.Fault{Procedure: "DomainDefineXMLFlags", Code: golibvirt.ErrXMLInvalidSchema, Message: "XML document failed to validate"}, provider.ErrPermanent, provider.ReasonUnsupported, "failed to validate"},
		{"defined by somebody else", libvirttest.Fault{Procedure: "DomainDefineXMLFlags", Code: golibvirt.ErrOperationFailed, Message: "operation failed: domain 'own--a--1' already exists with uuid 1"}, provider.ErrUnavailable, provider.ReasonUnknown, "somebody else has just defined"},
		{"no memory", libvirttest.Fault{Procedure: "DomainCreateWithFlags", Code: golibvirt.ErrInternalError, Message: "internal error: qemu unexpectedly closed: cannot set up guest memory: Cannot allocate memory"}, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "out of memory"},
		{"no firmware at the start", libvirttest.Fault{Procedure: "DomainCreateWithFlags", Code: golibvirt.ErrOperationFailed, Message: "operation failed: Unable to find any firmware to satisfy 'efi'"}, provider.ErrUnavailable, provider.ReasonUnsupported, "Debian: ovmf"},
		{"lock", libvirttest.Fault{Procedure: "DomainCreateWithFlags", Code: golibvirt.ErrOperationTimeout, Message: "Timed out during operation: cannot acquire state change lock"}, provider.ErrUnavailable, provider.ReasonTimeout, "state change lock"},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			r.peer.Inject(c.fault)
			x, err := r.Create(t.Context(), request("a", spec()), "")
			if err == nil {
				t.Errorf("%s: made %+v", c.what, x)
				return
			}
			wantKind(t, err, c.kind, c.reason, c.text)
			e, ok := errors.AsType[*provider.Error](err)
			if !ok || e.Provider != "home" || e.Target != "attic" || e.Op != "create" || e.Instance != "own--a--1" {
				t.Errorf("%s: %+v", c.what, e)
			}
			if left := r.left(); len(left) > 0 {
				t.Errorf("%s: left %q", c.what, left)
			}
		})
	}
}

func TestWhereKVMDoesNotWorkInstancesAreEmulatedIfThatIsAllowed(t *testing.T) {
	noKVM := func(allowed bool) func(*Config, *libvirttest.Config) {
		return func(c *Config, there *libvirttest.Config) { c.AllowEmulation, there.NoKVM = allowed, true }
	}
	inBubble(t, noKVM(false), func(t *testing.T, r *rig) {
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonUnsupported, "KVM does not work on this host, and AllowEmulation is not set")
		if left := r.left(); len(left) > 0 {
			t.Errorf("left %q", left)
		}
		if health := r.Check(t.Context()); health.Ready || health.Reason != provider.ReasonUnsupported || !strings.Contains(health.Message, "AllowEmulation is false") {
			t.Errorf("%+v", health)
		}
	})
	inBubble(t, noKVM(true), func(t *testing.T, r *rig) {
		r.create(t, "a", spec())
		r.create(t, "b", spec())
		for _, d := range r.peer.Domains() {
			if d.XML.Type != "qemu" || d.XML.CPU.Mode != "maximum" {
				t.Errorf("%s has type %s and %+v", d.XML.Name, d.XML.Type, d.XML.CPU)
			}
		}
		if n := r.peer.Calls()["DomainCreateWithFlags"]; n != 3 {
			t.Errorf("%d starts: KVM is tried once", n)
		}
		if n := strings.Count(r.log.String(), "KVM does not work"); n != 1 {
			t.Errorf("it is said %d times", n)
		}
		if health := r.Check(t.Context()); !health.Ready || !strings.HasSuffix(health.Message, ", qemu") {
			t.Errorf("%+v", health)
		}
	})
}

func TestRoomIsKeptForOthersAndForCreatesUnderWay(t *testing.T) {
	inBubble(t, func(c *Config, there *libvirttest.Config) {
		c.MaxInstances, c.MaxCPUs, there.MemoryMiB = 4, 5, 512+1024
	}, func(t *testing.T, r *rig) {
		s := spec()
		s.CPUs = 1
		r.create(t, "a", s)
		plan, err := r.Plan(s)
		if err != nil {
			t.Fatal(err)
		}
		used, why, err := r.Room(t.Context(), plan)
		if err != nil || why != "" || used.Instances != 1 || used.MemoryMiB != 256 || used.CPUs != 1 || used.TotalMemoryMiB != 1024 || used.TotalCPUs != 5 {
			t.Errorf("%+v, %q, %v", used, why, err)
		}
		full := func(change func(*provider.Spec), want string) {
			t.Helper()
			s := s
			change(&s)
			_, err := r.Create(t.Context(), request("full", s), "")
			wantKind(t, err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, want)
		}
		full(func(s *provider.Spec) { s.MemoryMiB = 800 }, "256 of 1024 MiB of memory are spoken for, and 800 are wanted")
		full(func(s *provider.Spec) { s.CPUs = 5 }, "1 of MaxCPUs 5 are spoken for, and 5 are wanted")
		r.peer.ChangeDomain("own--a--1", func(d *libvirttest.Domain) { d.State = golibvirt.DomainShutoff })
		full(func(s *provider.Spec) { s.MemoryMiB = 800 }, "256 of 1024 MiB") // it may be started again

		// Eight at once: three fit, whatever the order.
		errs := make(chan error)
		for i := range 8 {
			go func() {
				_, err := r.Create(t.Context(), request(fmt.Sprintf("p%d", i), s), "")
				errs <- err
			}()
		}
		made := 0
		for range 8 {
			if err := <-errs; err == nil {
				made++
			} else if !errors.Is(err, provider.ErrNoCapacity) {
				t.Error(err)
			}
		}
		if made != 3 {
			t.Errorf("%d were made beside one, of at most 4", made)
		}
	})
}

func TestTheStoragePoolKeepsItsReserve(t *testing.T) {
	inBubble(t, func(c *Config, there *libvirttest.Config) { c.MinFreeGiB, there.PoolBytes = 2, 2<<30 }, func(t *testing.T, r *rig) {
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "no more than the 2048 MiB free that are kept (MinFreeGiB)")
		r.peer.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 2<<30 + 10<<10 })
		_, err = r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "of which 2048 MiB are kept")
		if health := r.Check(t.Context()); !health.Ready || !strings.Contains(health.Message, "2 GiB free in default") {
			t.Errorf("%+v", health)
		}
	})
}

func TestACheckSaysWhatIsMissing(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(r *rig)
		reason provider.Reason
		text   string
	}{
		{"nothing", func(*rig) {}, provider.ReasonReady, "libvirt 9.0.0, 1024 GiB free in default, kvm"},
		{"old", func(r *rig) { r.peer.SetConfig(func(c *libvirttest.Config) { c.Version = 7_001_000 }) }, provider.ReasonUnsupported, "libvirt 7.1.0, want 7.2.0"},
		{"pool", func(r *rig) { r.peer.RemovePool("default") }, provider.ReasonStorageNotFound, "there is no storage pool default"},
		{"pool off", func(r *rig) {
			r.peer.SetPool(libvirttest.Pool{Name: "default", Type: "dir", Path: "/p", Inactive: true})
		}, provider.ReasonStorageNotFound, "virsh pool-start default"},
		{"pool type", func(r *rig) { r.peer.SetPool(libvirttest.Pool{Name: "default", Type: "logical", Path: "/dev/vg"}) }, provider.ReasonUnsupported, "has type logical"},
		{"pool without folder", func(r *rig) { r.peer.SetPool(libvirttest.Pool{Name: "default", Type: "rbd"}) }, provider.ReasonUnsupported, "is no folder"},
		{"pool full", func(r *rig) { r.peer.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1 << 20 }) }, provider.ReasonInsufficientCapacity, "has 1 MiB free, want MinFreeGiB 1"},
		{"network", func(r *rig) { r.peer.RemoveNetwork("default") }, provider.ReasonNetworkNotFound, "there is no network default"},
		{"network off", func(r *rig) { r.peer.SetNetwork(libvirttest.Network{Name: "default", Inactive: true}) }, provider.ReasonNetworkNotFound, "virsh net-start default"},
		{"firmware", func(r *rig) { r.peer.SetConfig(func(c *libvirttest.Config) { c.NoUEFI = true }) }, provider.ReasonUnsupported, "Debian: ovmf"},
		{"KVM", func(r *rig) { r.peer.SetConfig(func(c *libvirttest.Config) { c.NoKVM = true }) }, provider.ReasonUnsupported, "no KVM for x86_64"},
		{"daemon", func(r *rig) { r.peer.SetDown(true) }, provider.ReasonUnreachable, "connection refused"},
		{"pool busy", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StoragePoolRefresh", Code: golibvirt.ErrInternalError, Message: "internal error: pool 'default' has asynchronous jobs running."})
		}, provider.ReasonReady, "kvm"},
		{"denied", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Code: golibvirt.ErrAuthCancelled, Message: "authentication cancelled"})
		}, provider.ReasonPermissionDenied, "the group libvirt"},
		{"silent", func(r *rig) { r.peer.Inject(libvirttest.Fault{Hang: true}) }, provider.ReasonTimeout, ""},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			c.change(r)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			begin := time.Now()
			health := r.Check(ctx)
			if health.Ready != (c.reason == provider.ReasonReady) || health.Reason != c.reason || !strings.Contains(health.Message, c.text) || health.Target != "attic" {
				t.Errorf("%s: %+v, want %s and %q", c.what, health, c.reason, c.text)
			}
			if took := time.Since(begin); health.Duration != took || took > 5*time.Second || !health.CheckedAt.Equal(time.Now()) {
				t.Errorf("%s: it took %s and says %s", c.what, took, health.Duration)
			}
		})
	}
}

func TestACheckGoesAroundWhatHangs(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "a", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "ConnectGetAllDomainStats", Hang: true})
		for range 30 { // more than there are sessions
			go func() { _, _ = r.List(context.Background(), "own") }()
		}
		synctest.Wait()
		if health := r.Check(t.Context()); !health.Ready {
			t.Errorf("%+v", health)
		}
	})
}

func TestStatesAreTranslated(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		for _, c := range []struct {
			state  golibvirt.DomainState
			reason int32
			want   provider.State
			text   string
		}{
			{golibvirt.DomainRunning, 1, provider.StateRunning, "because"},
			{golibvirt.DomainBlocked, 0, provider.StateRunning, "because"},
			{golibvirt.DomainPaused, int32(golibvirt.DomainPausedUser), provider.StateStopped, "virsh resume"},
			{golibvirt.DomainPaused, int32(golibvirt.DomainPausedIoerror), provider.StateStopped, "is the storage pool full?"},
			{golibvirt.DomainPaused, int32(golibvirt.DomainPausedStartingUp), provider.StatePending, "starting"},
			{golibvirt.DomainPaused, int32(golibvirt.DomainPausedCrashed), provider.StateFailed, "crashed"},
			{golibvirt.DomainShutdown, 0, provider.StateStopped, "shutting down"},
			{golibvirt.DomainShutoff, int32(golibvirt.DomainShutoffShutdown), provider.StateStopped, "switched off"},
			{golibvirt.DomainShutoff, int32(golibvirt.DomainShutoffFailed), provider.StateFailed, "did not start"},
			{golibvirt.DomainShutoff, int32(golibvirt.DomainShutoffSaved), provider.StateStopped, "hibernated"},
			{golibvirt.DomainCrashed, 0, provider.StateFailed, "crashed"},
			{golibvirt.DomainPmsuspended, 0, provider.StateStopped, "suspended"},
			{golibvirt.DomainNostate, 0, provider.StateUnknown, "because"},
		} {
			r.peer.ChangeDomain("own--a--1", func(d *libvirttest.Domain) { d.State, d.Reason = c.state, c.reason })
			got, err := r.Get(t.Context(), x.ID)
			all, listErr := r.List(t.Context(), "own")
			if err != nil || listErr != nil || len(all) != 1 || got.State != c.want || all[0].State != c.want || !strings.Contains(got.Message, c.text) {
				t.Errorf("%v %d: %+v, %v; listed %+v, %v", c.state, c.reason, got, err, all, listErr)
			}
		}
		r.peer.ChangeDomain("own--a--1", func(d *libvirttest.Domain) { d.State, d.Reason, d.Saved = golibvirt.DomainShutoff, 0, true })
		if got, err := r.Get(t.Context(), x.ID); err != nil || !strings.Contains(got.Message, "hibernated") {
			t.Errorf("%+v, %v", got, err)
		}
		if err := r.Delete(t.Context(), x.ID); err != nil || len(r.left()) > 0 {
			t.Errorf("%v, left %q", err, r.left())
		}
	})
}

func TestAGuestHasItsGraceToShutDown(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = 20 * time.Second }, func(t *testing.T, r *rig) {
		took := func(heeds bool) time.Duration {
			x := r.create(t, "a", spec())
			r.peer.ChangeDomain("own--a--1", func(d *libvirttest.Domain) { d.ShutsDown = heeds })
			begin := time.Now()
			if err := r.Delete(t.Context(), x.ID); err != nil {
				t.Fatal(err)
			}
			return time.Since(begin)
		}
		if d := took(true); d > time.Second {
			t.Errorf("a guest that shuts down was waited for %s", d)
		}
		if d := took(false); d != 20*time.Second {
			t.Errorf("a guest that does not was given %s", d)
		}
	})
}

func TestGuestsThatAreWaitedForKeepNobodyElseWaiting(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = time.Minute }, func(t *testing.T, r *rig) {
		var ids []string
		for i := range 20 {
			ids = append(ids, r.create(t, fmt.Sprintf("p%d", i), spec()).ID)
		}
		var all sync.WaitGroup
		for _, id := range ids {
			all.Go(func() {
				if err := r.Delete(t.Context(), id); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(time.Second) // of fake time
		begin := time.Now()
		if list, err := r.List(t.Context(), "own"); err != nil || len(list) != len(ids) || time.Since(begin) > time.Second {
			t.Errorf("%d instances, %v, after %s", len(list), err, time.Since(begin))
		}
		all.Wait()
		if took := time.Since(begin); took > time.Minute {
			t.Errorf("the guests were waited for one after the other: %s", took)
		}
	})
}
