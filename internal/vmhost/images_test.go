package vmhost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
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

const folder = "/var/lib/libvirt/images/"

// bases returns the volumes whose names begin with "base-".
func (r *rig) bases() []string {
	var names []string
	for _, v := range r.peer.Volumes() {
		if strings.HasPrefix(v.Name, "base-") {
			names = append(names, v.Name)
		}
	}
	return names
}

// publish puts a base on the host as somebody made it.
func (r *rig) publish(d dataName, content []byte) {
	r.peer.AddVolume(libvirttest.Volume{Name: d.String(), Content: content, Capacity: uint64(len(content))})
	r.peer.AddVolume(libvirttest.Volume{Name: volumeName(d.base), Format: "qcow2", Capacity: 1 << 30, Backing: folder + d.String(), BackingFormat: "qcow2"})
}

// debianData is the name of data for the base of the image "debian".
func debianData(digest string) dataName {
	return dataName{"base-debian", short("kvm"), digest, "11111111", "22222222"}
}

func TestManyCreatesFetchAnImageOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() { r.create(t, fmt.Sprintf("p%d", i), spec()) })
		}
		all.Wait()
		if n := r.web.asked("/disk.qcow2"); n != 1 {
			t.Errorf("the image was fetched %d times", n)
		}
		if b := r.bases(); len(b) != 2 || b[1] != "base-debian.qcow2" {
			t.Errorf("on the host: %q", b)
		}
	})
}

func TestAnImageThatWasPublishedSinceSomebodyLookedIsNotAskedForAgain(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolLookupByName", Times: 1, Late: time.Minute})
		made := make(chan provider.Instance)
		go func() { made <- r.create(t, "slow", spec()) }()
		time.Sleep(time.Second) // of fake time
		r.create(t, "quick", spec())
		<-made
		if n := r.web.asked("/disk.qcow2"); n != 1 {
			t.Errorf("the image was asked for %d times", n)
		}
	})
}

func TestAnImageGivenAsAURLIsKeptUnderItsOwnName(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.Image, s.DiskGiB = "https://images.example/disk.raw?token=secret", 0
		s.Options = map[string]string{OptionFormat: "raw", OptionFirmware: "bios"}
		r.create(t, "a", s)
		key := sum([]byte(s.Image))[:16]
		b := r.bases()
		if len(b) != 2 || b[1] != "base-"+key+".qcow2" {
			t.Errorf("on the host: %q", b)
		}
		size := uint64(imageBytes)
		for _, v := range r.peer.Volumes() {
			if v.Format == "qcow2" && v.Capacity != size {
				t.Errorf("%s is a disk of %d bytes, want the image's %d", v.Name, v.Capacity, size)
			}
			if v.Name == b[1] && v.BackingFormat != "raw" {
				t.Errorf("the base is on a file of format %q", v.BackingFormat)
			}
		}
		if strings.Contains(r.log.String(), "secret") {
			t.Error("the log holds the URL's secret")
		}
	})
}

func TestWhatIsNoGoodImageIsNeverABase(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(r *rig)
		image  string
		kind   error
		reason provider.Reason
		text   string
	}{
		{"another digest", func(r *rig) {
			r.config.Images["debian"] = Image{URL: "https://images.example/disk.qcow2", SHA256: sum(nil), Format: "qcow2", Firmware: "uefi"}
		}, "debian", provider.ErrPermanent, provider.ReasonImageNotFound, "give it a new name in Images"},
		{"not there", func(r *rig) {
			r.config.Images["debian"] = Image{URL: "https://images.example/nothing", Format: "qcow2", Firmware: "uefi"}
		}, "debian", provider.ErrUnavailable, provider.ReasonImageNotFound, "404"},
		{"cut at the host", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Bytes: 1, Cut: true})
		}, "debian", provider.ErrUnavailable, provider.ReasonUnreachable, ""},
		{"refused at the host", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Bytes: 1, Code: golibvirt.ErrInternalError, Message: "internal error: cannot write"})
		}, "debian", provider.ErrUnavailable, provider.ReasonUnknown, "cannot write"},
		{"full at the host", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Bytes: 1, Code: golibvirt.ErrSystemError, Message: "cannot write to stream: No space left on device"})
		}, "debian", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool is full"},
		{"short at the host", func(r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolGetInfoFlags", Times: 1, Do: func() {
				r.peer.ChangeVolume(r.bases()[0], func(v *libvirttest.Volume) { v.Content = v.Content[:100] })
			}})
		}, "debian", provider.ErrUnavailable, provider.ReasonUnknown, "24576 bytes were sent and the host has 100"},
		{"a small file that unpacks to more than there is room for", func(r *rig) {
			r.peer.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1<<30 + 1<<20 })
			r.web.serve("/bomb.gz", packed(make([]byte, 4<<20)))
			r.config.Images["debian"] = Image{URL: "https://images.example/bomb.gz", Format: "raw", Compression: "gzip", Firmware: "uefi"}
		}, "debian", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the image does not fit into the storage pool"},
		{"larger than there is room for", func(r *rig) {
			r.peer.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1<<30 + 1<<13 })
		}, "debian", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "of which 1024 MiB are kept"},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			good := r.config.Images["debian"]
			c.change(r)
			s := spec()
			s.Image = c.image
			_, err := r.Create(t.Context(), request("a", s), "")
			wantKind(t, err, c.kind, c.reason, c.text)
			if b := r.bases(); slices.ContainsFunc(b, func(name string) bool { return strings.HasSuffix(name, ".qcow2") }) {
				t.Errorf("%s: %q are published", c.what, b)
			}
			if left := r.left(); len(left) > 0 {
				t.Errorf("%s: left %q", c.what, left)
			}
			// When it is mended, the next create brings the image, and nothing of the first is left.
			r.config.Images["debian"] = good
			r.peer.SetConfig(func(c *libvirttest.Config) { c.PoolBytes = 1 << 40 })
			time.Sleep(time.Minute) // of fake time
			r.create(t, "a", spec())
			if b := r.bases(); len(b) != 2 {
				t.Errorf("%s: on the host: %q", c.what, b)
			}
		})
	}
}

// Whatever call of a fetch fails, however, the next create brings the image and leaves nothing of the first.
func TestAFetchMayFailAtEachCall(t *testing.T) {
	for how, f := range map[string]libvirttest.Fault{
		"refused": {Code: golibvirt.ErrInternalError, Message: "internal error: refused"}, "answer lost": {Lose: true}, "cut": {Cut: true},
	} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(c *Config, _ *libvirttest.Config) { c.MinFreeGiB = -1 }, func(t *testing.T, r *rig) {
				evict := func() {
					t.Helper()
					if _, err := r.Evict(t.Context(), func(string) bool { return false }); err != nil {
						t.Fatal(err)
					}
					if b := r.bases(); len(b) > 0 {
						t.Fatalf("after everything was evicted: %q", b)
					}
				}
				plan, err := r.Plan(spec())
				if err != nil {
					t.Fatal(err)
				}
				fetch := func() error {
					b, err := r.base(t.Context(), plan, "own")
					if err == nil {
						b.release()
					}
					return err
				}
				calls := r.procedures(func() {
					if err := fetch(); err != nil {
						t.Fatal(err)
					}
				})
				evict()
				for i, name := range calls {
					if raceDetector() && i%3 != len(how)%3 {
						continue
					}
					f := f
					f.Skip, f.Times = i, 1
					mend := r.peer.Inject(f)
					err := fetch()
					mend()
					time.Sleep(time.Minute) // of fake time
					if again := fetch(); again != nil {
						t.Fatalf("call %d, %s: %v, and again: %v", i, name, err, again)
					}
					if b := r.bases(); len(b) != 2 {
						t.Fatalf("call %d, %s: on the host: %q after %v", i, name, b, err)
					}
					evict()
				}
			})
		})
	}
}

func TestABaseOfAnotherDigestIsNeverUsedNorOverwritten(t *testing.T) {
	wanted := qcow2(1<<30, imageBytes)
	other := []byte("something else")
	for _, c := range []struct {
		what string
		data dataName
		now  []byte // what is in the volume
		want string // empty when it is to be used
	}{
		{"the same", debianData("sha256-" + sum(wanted)), wanted, ""},
		{"another", debianData("sha256-" + sum(other)), other, "was made from sha256:" + sum(other) + " and the configuration wants sha256:" + sum(wanted)},
		{"not said, and the same", debianData(undeclared), wanted, ""},
		{"not said, and another", debianData(undeclared), other, "was made from sha256:" + sum(other)},
		{"said in another way, and the same", debianData("sha512-" + strings.Repeat("a", 64)), wanted, ""},
		{"another provider's", dataName{"base-debian", short("kvm2 fleet"), undeclared, "11111111", "22222222"}, wanted, "belongs to another provider"},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			r.publish(c.data, c.now)
			_, err := r.Create(t.Context(), request("a", spec()), "")
			_, again := r.Create(t.Context(), request("b", spec()), "")
			if c.want == "" {
				if err != nil || again != nil {
					t.Errorf("%s: %v, %v", c.what, err, again)
				}
			} else {
				wantKind(t, err, provider.ErrPermanent, provider.ReasonImageNotFound, c.want)
				wantKind(t, again, provider.ErrPermanent, provider.ReasonImageNotFound, c.want)
			}
			if n := r.web.asked("/disk.qcow2"); n != 0 {
				t.Errorf("%s: it was fetched all the same", c.what)
			}
			if n := r.peer.Calls()["StorageVolDownload"]; n > 1 {
				t.Errorf("%s: the data was read %d times", c.what, n)
			}
			if b := r.bases(); len(b) != 2 || b[0] != c.data.String() {
				t.Errorf("%s: on the host: %q", c.what, b)
			}
		})
	}
}

func TestWhatHasABasesNameAndIsNoneIsLeftAlone(t *testing.T) {
	for _, v := range []libvirttest.Volume{
		{Name: "base-debian.qcow2", Content: []byte("theirs")},
		{Name: "base-debian.qcow2", Format: "qcow2", Backing: folder + "golden.img", BackingFormat: "raw"},
		{Name: "base-debian.qcow2", Format: "qcow2", Backing: folder + dataName{"base-other", short("kvm"), undeclared, "11111111", "22222222"}.String(), BackingFormat: "raw"},
	} {
		inBubble(t, nil, func(t *testing.T, r *rig) {
			r.peer.AddVolume(v)
			_, err := r.Create(t.Context(), request("a", spec()), "")
			wantKind(t, err, provider.ErrPermanent, provider.ReasonImageNotFound, "is no base of ours")
			if gone, err := r.Evict(t.Context(), func(string) bool { return false }); err != nil || len(gone) > 0 || len(r.bases()) != 1 {
				t.Errorf("evicted %q, %v", gone, err)
			}
		})
	}
	inBubble(t, nil, func(t *testing.T, r *rig) {
		d := debianData(undeclared)
		r.publish(d, []byte("data"))
		r.peer.RemoveVolume(d.String())
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonImageNotFound, "is gone: delete the base too")
	})
}

func TestSomebodyElseMayPublishFirst(t *testing.T) {
	theirs := debianData("sha256-" + sum(qcow2(1<<30, imageBytes)))
	inBubble(t, nil, func(t *testing.T, r *rig) {
		// Just before our own base is published, with its file seen by the pool or not yet.
		for i, unseen := range []bool{false, true} {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolCreateXML", Skip: 1, Times: 1, Do: func() {
				r.publish(theirs, qcow2(1<<30, imageBytes))
				r.peer.ChangeVolume("base-debian.qcow2", func(v *libvirttest.Volume) { v.Unseen = unseen })
			}})
			x := r.create(t, fmt.Sprintf("p%d", i), spec())
			if b := r.bases(); len(b) != 2 || b[0] != theirs.String() {
				t.Errorf("on the host: %q", b)
			}
			if err := r.Delete(t.Context(), x.ID); err != nil {
				t.Fatal(err)
			}
			if gone, err := r.Evict(t.Context(), func(string) bool { return false }); err != nil || !slices.Equal(gone, []string{"base-debian"}) {
				t.Fatalf("evicted %q, %v", gone, err)
			}
		}
	})
}

func TestDataThatNobodyPublishedIsSweptWhenItIsOld(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		time.Sleep(time.Hour) // of fake time
		ours := dataName{"base-debian", short("kvm"), undeclared, short("own/home"), "00000001"}
		fresh := dataName{"base-debian", short("kvm"), undeclared, short("else/home"), "00000002"}
		old := dataName{"base-debian", short("kvm"), undeclared, short("else/home"), "00000003"}
		used := dataName{"base-debian", short("kvm"), undeclared, short("else/home"), "00000004"}
		other := dataName{"base-ubuntu", short("kvm"), undeclared, short("own/home"), "00000005"}
		for d, age := range map[dataName]time.Duration{ours: 0, fresh: time.Minute, old: staleAfter + time.Minute, used: time.Hour, other: time.Hour} {
			r.peer.AddVolume(libvirttest.Volume{Name: d.String(), Modified: time.Now().Add(-age), Content: []byte("part")})
		}
		r.peer.AddVolume(libvirttest.Volume{Name: "overlay.qcow2", Format: "qcow2", Backing: folder + used.String(), BackingFormat: "raw"})
		r.create(t, "a", spec())
		b := r.bases()
		for d, want := range map[dataName]bool{ours: false, fresh: true, old: false, used: true, other: true} {
			if slices.Contains(b, d.String()) != want {
				t.Errorf("%s is there: %t, want %t", d, !want, want)
			}
		}
	})
}

func TestAFetchGoesOnWhenItsCallerHasGone(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		content := qcow2(1<<30, imageBytes)
		r.web.mux.HandleFunc("/slow.qcow2", func(rw http.ResponseWriter, req *http.Request) {
			rw.Header().Set("Content-Length", fmt.Sprint(len(content)))
			for part := range slices.Chunk(content, imageBytes/8) {
				select {
				case <-time.After(10 * time.Second):
				case <-req.Context().Done():
					return
				}
				_, _ = rw.Write(part)
				rw.(http.Flusher).Flush()
			}
		})
		r.config.Images["debian"] = Image{URL: "https://images.example/slow.qcow2", SHA256: sum(content), Format: "qcow2", Firmware: "uefi"}
		var told []Progress
		r.config.Progress = func(p Progress) { told = append(told, p) }
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		defer cancel()
		_, err := r.Create(ctx, request("a", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "is still on its way to the host, and goes on")
		begin := time.Now()
		r.create(t, "a", spec())
		if took := time.Since(begin); took > 90*time.Second || r.web.asked("/slow.qcow2") != 1 {
			t.Errorf("it took %s and %d requests", took, r.web.asked("/slow.qcow2"))
		}
		last := told[len(told)-1]
		if len(told) < 5 || !last.Done || last.Err != nil || last.Bytes != int64(len(content)) || last.Total != last.Bytes || last.Host != "attic" || last.Image != "debian" {
			t.Errorf("told %d times, and last %+v", len(told), last)
		}
		for i := 1; i < len(told); i++ {
			if told[i].Bytes < told[i-1].Bytes || told[i-1].Done {
				t.Errorf("told %+v after %+v", told[i], told[i-1])
			}
		}
	})
}

func TestAWrongDigestIsNotHeldAgainstACreateThatDeclaresAnother(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		withDigest := func(digest string) provider.Spec {
			s := spec()
			s.Image, s.Options = "https://images.example/disk.qcow2", map[string]string{OptionSHA256: digest}
			return s
		}
		r.peer.Inject(libvirttest.Fault{Procedure: "StoragePoolRefresh", Times: 1, Delay: time.Minute})
		failed := make(chan error)
		go func() {
			_, err := r.Create(t.Context(), request("wrong", withDigest(sum(nil))), "")
			failed <- err
		}()
		time.Sleep(time.Second) // of fake time
		// The operator has corrected the digest while the image was on its way.
		right := request("right", withDigest(sum(qcow2(1<<30, imageBytes))))
		_, err := r.Create(t.Context(), right, "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonImageNotFound, "as another spec has it")
		wantKind(t, <-failed, provider.ErrPermanent, provider.ReasonImageNotFound, sum(nil))
		if _, err := r.Create(t.Context(), right, ""); err != nil {
			t.Error(err)
		}
	})
}

func TestUploadsAreBounded(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.Uploads = make(chan struct{}, 1) }, func(t *testing.T, r *rig) {
		r.config.Uploads <- struct{}{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := r.Create(ctx, request("a", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "on its way")
		if n := r.web.asked("/disk.qcow2"); n != 0 {
			t.Errorf("fetched %d times", n)
		}
		<-r.config.Uploads
		r.create(t, "a", spec())
	})
}

func TestAnUploadThatTheHostNeverTakesIsGivenUp(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.Uploads = make(chan struct{}, 1) }, func(t *testing.T, r *rig) {
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Hang: true})
		begin := time.Now()
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "does the storage pool default hang?")
		if took := time.Since(begin); took != uploadStall {
			t.Errorf("it was given up after %s", took)
		}
		r.create(t, "a", spec())
		if b := r.bases(); len(b) != 2 {
			t.Errorf("on the host: %q", b)
		}
	})
}

// inBubbleWithManyPackets runs f with a host whose image "debian" is uploaded in several packets.
func inBubbleWithManyPackets(t *testing.T, f func(t *testing.T, r *rig)) {
	t.Helper()
	inBubble(t, nil, func(t *testing.T, r *rig) {
		content := qcow2(1<<30, firstPacket+8*packet+10)
		r.web.serve("/many.qcow2", content)
		r.config.Images["debian"] = Image{URL: "https://images.example/many.qcow2", SHA256: sum(content), Format: "qcow2", Firmware: "uefi"}
		f(t, r)
	})
}

func TestAHostThatHangsAtAnyPacketIsGivenUpInTime(t *testing.T) {
	for _, at := range []int64{firstPacket - 1, firstPacket, firstPacket + packet, firstPacket + 2*packet, firstPacket + 8*packet} {
		inBubbleWithManyPackets(t, func(t *testing.T, r *rig) {
			r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Bytes: at, Hang: true})
			begin := time.Now()
			_, err := r.Create(t.Context(), request("a", spec()), "")
			wantKind(t, err, provider.ErrUnavailable, provider.ReasonTimeout, "does the storage pool default hang?")
			if took := time.Since(begin); took < uploadStall || took > uploadStall+time.Second {
				t.Errorf("after %d bytes: given up after %s", at, took)
			}
			r.create(t, "a", spec())
			if left := r.bases(); len(left) != 2 {
				t.Errorf("after %d bytes: on the host: %q", at, left)
			}
		})
	}
}

func TestARefusedImageSaysSoThoughAQuestionHasNoAnswer(t *testing.T) {
	inBubbleWithManyPackets(t, func(t *testing.T, r *rig) {
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolUpload", Times: 1, Bytes: firstPacket, Code: golibvirt.ErrSystemError, Message: "cannot write to stream: No space left on device"})
		r.peer.Inject(libvirttest.Fault{Procedure: "ConnectGetLibVersion", Times: 1, Hang: true})
		begin := time.Now()
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool is full")
		if took := time.Since(begin); took > time.Second {
			t.Errorf("it took %s to say so", took)
		}
		r.create(t, "a", spec())
	})
}

func TestAnImageArrivesWhateverBecomesOfTheQuestionsBehindItsPackets(t *testing.T) {
	for what, fault := range map[string]libvirttest.Fault{
		"refused": {Code: golibvirt.ErrAccessDenied, Message: "access denied"},
		"late":    {Delay: time.Minute, Times: 5},
		"never":   {Hang: true, Times: maxFlying},
	} {
		inBubbleWithManyPackets(t, func(t *testing.T, r *rig) {
			fault.Procedure = "ConnectGetLibVersion"
			r.peer.Inject(fault)
			begin := time.Now()
			r.create(t, "a", spec())
			if took := time.Since(begin); took > uploadStall+time.Second || !fault.Hang && took > 5*time.Minute/4 {
				t.Errorf("%s: it took %s", what, took)
			}
			// Whoever has the session next meets no question of before.
			begin = time.Now()
			r.create(t, "b", spec())
			if took := time.Since(begin); took > time.Second {
				t.Errorf("%s: the next create took %s", what, took)
			}
		})
	}
}

func TestASeedIsUploadedWithoutAQuestion(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "a", spec())
		if n := r.peer.Calls()["ConnectGetLibVersion"]; n > 0 {
			t.Errorf("a small image and a seed have %d questions", n)
		}
	})
}

func TestWhatIsTriedPatientlyIsTriedOnceWhenThereIsNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		busy := errors.New("busy")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for name, test := range map[string]struct {
			ctx  context.Context
			free int // from which call on
			want int
			err  error
			took time.Duration
		}{
			"at once":       {t.Context(), 1, 1, nil, 0},
			"soon":          {t.Context(), 3, 3, nil, 2 * time.Second},
			"never":         {t.Context(), 99, 11, busy, 10500 * time.Millisecond},
			"no time":       {ended, 99, 1, busy, 0},
			"no time, free": {ended, 1, 1, nil, 0},
		} {
			n, begin := 0, time.Now()
			err := patiently(test.ctx, 10500*time.Millisecond, time.Second, func() (bool, error) {
				if n++; n < test.free {
					return true, busy
				}
				return false, nil
			})
			if took := time.Since(begin); n != test.want || !errors.Is(err, test.err) || took != test.took {
				t.Errorf("%s: %d calls in %s, %v", name, n, took, err)
			}
		}
	})
}

func TestBasesAreEvictedUnlessTheyAreUsedOrKept(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		s := spec()
		s.Image, s.DiskGiB = "raw", 0
		y := r.create(t, "b", s)
		evict := func(keep string, want ...string) {
			t.Helper()
			gone, err := r.Evict(t.Context(), func(image string) bool { return image == keep })
			if err != nil || !slices.Equal(gone, want) {
				t.Errorf("evicted %q, %v, want %q", gone, err, want)
			}
		}
		evict("")
		if err := r.Delete(t.Context(), y.ID); err != nil {
			t.Fatal(err)
		}
		evict("raw")
		evict("", "base-raw")
		if b := r.bases(); len(b) != 2 {
			t.Errorf("on the host: %q", b)
		}
		// A create elsewhere may make a disk in the very moment: then the base is put back as it was.
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolDelete", Times: 1, Do: func() {
			r.peer.AddVolume(libvirttest.Volume{Name: "theirs.qcow2", Format: "qcow2", Backing: folder + "base-debian.qcow2", BackingFormat: "qcow2"})
		}})
		evict("")
		if b := r.bases(); len(b) != 2 || b[1] != "base-debian.qcow2" {
			t.Errorf("on the host: %q", b)
		}
		for _, v := range r.peer.Volumes() {
			if v.Name == "base-debian.qcow2" && (v.Capacity != 1<<30 || v.BackingFormat != "qcow2") {
				t.Errorf("it was put back as %+v", v)
			}
		}
	})
}

func TestABaseIsNotEvictedWhenADiskCantBeRead(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		r.create(t, "a", spec())
		want := r.bases()
		// From one volume on none can be read, among them the disk.
		for skip := range 6 {
			mend := r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolGetXMLDesc", Skip: skip, Code: golibvirt.ErrSystemError, Message: "cannot open volume: Input/output error"})
			_, _ = r.Evict(t.Context(), func(string) bool { return false }) // it may fail
			mend()
			if b := r.bases(); !slices.Equal(b, want) {
				t.Fatalf("volumes from number %d on can't be read: left %q of %q", skip, b, want)
			}
		}
	})
}

func TestABaseIsNotEvictedUnderACreateThatHasFoundIt(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "first", spec())
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		r.peer.Inject(libvirttest.Fault{Procedure: "DomainDefineXMLFlags", Times: 1, Delay: time.Minute})
		made := make(chan provider.Instance)
		go func() { made <- r.create(t, "a", spec()) }()
		time.Sleep(time.Second) // of fake time
		if gone, err := r.Evict(t.Context(), func(string) bool { return false }); err != nil || len(gone) > 0 {
			t.Errorf("evicted %q, %v", gone, err)
		}
		<-made
	})
}

func TestDataThatNoFetchComesForIsEvictedWhenItIsOld(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		evict := func() error {
			_, err := r.Evict(t.Context(), func(string) bool { return false })
			return err
		}
		// An eviction that is cut off after the base's name is gone leaves the data.
		x := r.create(t, "a", spec())
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolDelete", Skip: 1, Times: 1, Cut: true})
		if err := evict(); err == nil {
			t.Error("it was not cut off")
		}
		used := dataName{"base-used", short("kvm"), undeclared, short("else/home"), "00000001"}
		under := dataName{"base-under", short("kvm"), undeclared, short("else/home"), "00000002"}
		theirs := dataName{"base-theirs", short("kvm2 fleet"), undeclared, short("own/home"), "00000003"}
		fresh := dataName{"base-fresh", short("kvm"), undeclared, short("else/home"), "00000004"}
		for _, d := range []dataName{used, under, theirs} {
			r.peer.AddVolume(libvirttest.Volume{Name: d.String(), Content: []byte("part")})
		}
		r.peer.AddVolume(libvirttest.Volume{Name: "used.qcow2", Format: "qcow2", Backing: folder + used.String(), BackingFormat: "raw"})
		r.peer.AddVolume(libvirttest.Volume{Name: "under.qcow2", Format: "qcow2", Backing: folder + volumeName(under.base), BackingFormat: "qcow2"})
		time.Sleep(staleAfter) // of fake time
		r.peer.AddVolume(libvirttest.Volume{Name: fresh.String(), Content: []byte("part")})
		if err := evict(); err != nil {
			t.Error(err)
		}
		want := []string{fresh.String(), theirs.String(), under.String(), used.String()}
		if b := r.bases(); !slices.Equal(b, want) {
			t.Errorf("left %q, want %q", b, want)
		}
	})
}

func TestADiskIsNeverSmallerThanItsImage(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		big := qcow2(5<<30, 4096)
		r.web.serve("/big.qcow2", big)
		r.config.Images["debian"] = Image{URL: "https://images.example/big.qcow2", SHA256: sum(big), Format: "qcow2", Firmware: "uefi"}
		_, err := r.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, provider.ErrPermanent, provider.ReasonUnsupported, "DiskGiB 3 is less than the image's 5368709120 bytes")
		if left := r.left(); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	})
}

func TestPacketsAreFullAndNothingIsGivenOutAfterTheEnd(t *testing.T) {
	source := io.MultiReader(bytes.NewReader(payload[:10]), bytes.NewReader(make([]byte, firstPacket+packet)), bytes.NewReader(payload[:20]))
	p := &packets{source: source}
	b := make([]byte, 4<<20)
	for i, want := range []int{firstPacket, packet} {
		if n, err := p.Read(b); n != want || err != nil {
			t.Errorf("packet %d has %d bytes, %v, want %d", i+1, n, err, want)
		}
	}
	total := 0
	for {
		n, err := p.Read(b)
		total += n
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			break
		}
	}
	if err := p.end(); err != nil || total != 30 {
		t.Errorf("the rest of a source that ended well: %d bytes, %v", total, err)
	}
	boom := errors.New("boom")
	p = &packets{source: io.MultiReader(bytes.NewReader(payload[:10]), &failing{boom})}
	if n, err := p.Read(b); n != 10 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if _, err := p.Read(b); !errors.Is(err, boom) {
		t.Errorf("after that: %v", err)
	}
	if err := p.end(); !errors.Is(err, boom) {
		t.Errorf("the end: %v", err)
	}
	p = &packets{source: bytes.NewReader(payload)}
	if err := p.end(); err != nil {
		t.Error(err)
	}
	if n, err := p.Read(b); n != 0 || err == nil || errors.Is(err, io.EOF) {
		t.Errorf("after the end: %d bytes, %v", n, err)
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

func TestProgressIsToldInTurnAndNothingAfterTheEnd(t *testing.T) {
	var told []Progress
	h := &Host{config: Config{Target: "attic", Progress: func(p Progress) { told = append(told, p) }}}
	report := h.reporter("debian")
	boom := errors.New("boom")
	var reports sync.WaitGroup
	for range 20 {
		reports.Go(func() { report(15, 20, true, boom) })
	}
	reports.Wait()
	if want := (Progress{Host: "attic", Image: "debian", Bytes: 15, Total: 20, Done: true, Err: boom}); len(told) != 1 || told[0] != want {
		t.Errorf("%+v", told)
	}
}
