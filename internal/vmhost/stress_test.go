package vmhost

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/provider"
)

// chains returns what is wrong with the disks of domains that run: each must stand on files that are there.
func (r *rig) chains() (broken []string) {
	volumes := map[string]libvirttest.Volume{}
	for _, v := range r.peer.Volumes() {
		volumes[folder+v.Name] = v
	}
	for _, d := range r.peer.Domains() {
		if d.State != golibvirt.DomainRunning {
			continue
		}
		for _, disk := range d.XML.Devices.Disks {
			for file := disk.Source.File.File; file != ""; {
				v, ok := volumes[file]
				if !ok {
					broken = append(broken, d.XML.Name+" stands on "+file+", which is gone")
				}
				file = v.Backing
			}
		}
	}
	return broken
}

// Creates, deletes, lists and evictions of few names at once, on a host that fails now and then: what runs stands on files that
// are there, and in the end everything can be removed.
func TestManyAtOnceOnAHostThatFailsNowAndThen(t *testing.T) {
	rounds := 3
	if raceDetector() {
		rounds = 1
	}
	for round := range rounds {
		seed := rand.Uint64()
		inBubble(t, func(c *Config, _ *libvirttest.Config) { c.MinFreeGiB = -1 }, func(t *testing.T, r *rig) {
			t.Logf("round %d, seed %d", round, seed)
			random := rand.New(rand.NewPCG(seed, 0))
			var mu sync.Mutex // guards random
			pick := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return random.IntN(n)
			}
			stop := make(chan struct{})
			var troubles sync.WaitGroup
			troubles.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Duration(pick(3000)) * time.Millisecond):
					}
					f := []libvirttest.Fault{
						{Cut: true}, {Lose: true}, {Hang: true}, {Delay: 2 * time.Second}, {Late: 2 * time.Second},
						{Code: golibvirt.ErrInternalError, Message: "internal error: chance"}, {Code: golibvirt.ErrSystemError, Message: "write: No space left on device"},
					}[pick(7)]
					f.Times, f.Skip = 1, pick(20)
					r.peer.Inject(f)
				}
			})
			r.peer.SetConfig(func(c *libvirttest.Config) { c.Latency = 10 * time.Millisecond })
			var workers sync.WaitGroup
			for w := range 5 {
				workers.Go(func() {
					for range 30 {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+pick(20))*time.Second)
						s := spec()
						if pick(2) == 0 {
							s.Image, s.DiskGiB = "raw", 0
						}
						switch pick(8) {
						case 0, 1, 2, 3:
							_, err := r.Create(ctx, request(fmt.Sprintf("p%d", pick(4)), s), "")
							if errors.Is(err, provider.ErrPermanent) {
								t.Errorf("worker %d: %v", w, err)
							}
						case 4, 5, 6:
							all, err := r.List(ctx, "own")
							if err == nil && len(all) > 0 {
								_ = r.Delete(ctx, all[pick(len(all))].ID) // it may fail
							}
						case 7:
							_, _ = r.Evict(ctx, func(string) bool { return false }) // it may fail
						}
						cancel()
					}
				})
			}
			workers.Wait()
			close(stop)
			troubles.Wait()
			r.peer.Mend()
			time.Sleep(20 * time.Minute) // of fake time: what goes on without a caller has its end, and what is stale is old
			if broken := r.chains(); len(broken) > 0 {
				t.Errorf("%q", broken)
			}
			all, err := r.List(t.Context(), "own")
			if err != nil {
				t.Fatal(err)
			}
			if n := len(r.peer.Domains()); n != len(all) {
				t.Errorf("%d are listed of %d domains", len(all), n)
			}
			for _, x := range all {
				if err := r.Delete(t.Context(), x.ID); err != nil {
					t.Error(err)
				}
			}
			if left := r.left(); len(left) > 0 {
				t.Errorf("left %q", left)
			}
			// Every image can be used, and what earlier attempts left of it is swept by the next that fetches it.
			for i, image := range []string{"debian", "raw"} {
				s := spec()
				s.Image, s.DiskGiB = image, 0
				if err := r.Delete(t.Context(), r.create(t, fmt.Sprintf("end%d", i), s).ID); err != nil {
					t.Error(err)
				}
			}
			if _, err := r.Evict(t.Context(), func(string) bool { return false }); err != nil {
				t.Error(err)
			}
			for _, name := range r.bases() {
				if strings.HasSuffix(name, ".qcow2") {
					t.Errorf("%s can't be evicted", name)
				}
			}
		})
		if t.Failed() {
			return
		}
	}
}
