package egress

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress/internal/checks"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// TestUnderStressNoInstanceHasMoreHoldersThanAllowed mixes everything a crawler can do with everything that can happen to
// its fleet, from many goroutines, and counts the holders of each instance itself. The bubble ends only when every goroutine
// of the pool has.
func TestUnderStressNoInstanceHasMoreHoldersThanAllowed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const limit = 3
		f := fake.New(fake.Config{BootTime: 3 * time.Second, CreateTime: time.Second, DeleteTime: 2 * time.Second, ListLag: 2 * time.Second, Hosts: []string{"a", "b"}})
		declare := func(n int, image string) []Proxy {
			all := fleet(n)
			for i := range all {
				all[i].MaxLeases, all[i].Image = ptr(limit), image
				all[i].Labels = map[string]string{"half": []string{"x", "y"}[i%2]}
			}
			return all
		}
		p := open(t, f, func(c *Config) {
			c.Surge, c.DrainDeadline, c.UnhealthyGrace, c.DestroyOnClose = ptr(3), 5*time.Second, 10*time.Second, true
			c.OrphanGrace = 10 * time.Second
		}, declare(8, "one")...)
		waitReady(t, p, 8)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		var holders sync.Map // instance to *atomic.Int64
		var all sync.WaitGroup
		var granted atomic.Int64
		for w := range 30 {
			all.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 7))
				for ctx.Err() == nil {
					req := Request{}
					switch r.IntN(5) {
					case 0:
						req.Labels = map[string]string{"half": []string{"x", "y"}[r.IntN(2)]}
					case 1:
						req.Key = string(rune('a' + r.IntN(10)))
					case 2:
						req.Target = string(rune('a' + r.IntN(3)))
					case 3:
						req.Exclude = []string{"p-001"}
					}
					wait, stop := context.WithTimeout(ctx, time.Duration(1+r.IntN(5000))*time.Millisecond)
					l, err := p.Acquire(wait, req)
					stop()
					if err != nil {
						continue
					}
					granted.Add(1)
					counter, _ := holders.LoadOrStore(l.Instance(), new(atomic.Int64))
					if n := counter.(*atomic.Int64).Add(1); n > limit {
						t.Errorf("%d holders of %s", n, l.Instance())
					}
					time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
					switch r.IntN(20) {
					case 0:
						l.Report(Broken(errors.New("stress")))
					case 1:
						l.Report(Banned(time.Duration(r.IntN(20)) * time.Second))
					case 2:
						l.Report(Failed(errors.New("stress")))
					}
					counter.(*atomic.Int64).Add(-1)
					l.Release()
					if r.IntN(3) == 0 {
						l.Release()
					}
				}
			})
		}
		all.Go(func() {
			r := rand.New(rand.NewPCG(1, 1))
			for ctx.Err() == nil {
				time.Sleep(time.Duration(r.IntN(4000)) * time.Millisecond)
				instances := f.Instances()
				switch r.IntN(7) {
				case 0:
					if err := p.Apply(ctx, declare(4+r.IntN(6), []string{"one", "two", "three"}[r.IntN(3)])...); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
				case 1:
					if len(instances) > 0 {
						f.Kill(instances[r.IntN(len(instances))].ID)
					}
				case 2:
					if len(instances) > 0 {
						f.Vanish(instances[r.IntN(len(instances))].ID)
					}
				case 3:
					f.FailNext(fake.OpCreate, provider.ErrUnavailable, 1)
				case 4:
					f.CreateThenFail(provider.ErrOutcomeUnknown, 1)
				case 5:
					p.Refresh("p-001", "p-002")
				case 6:
					p.Proxies()
					p.Stats()
				}
			}
		})
		all.Wait()
		if err := p.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		if s := p.Stats(); s.Leases != 0 || s.Waiting != 0 || s.Leaked != 0 {
			t.Errorf("got %+v", s)
		}
		exactly(t, f, 0)
		if granted.Load() < 1000 {
			t.Errorf("only %d leases were granted", granted.Load())
		}
	})
}

func TestChecksRunBesideEverythingElseAndAreNoProviderCalls(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := fake.New(fake.Config{Hosts: []string{"a", "b"}})
		var kinds sync.Map
		p := started(t, f, func(c *Config) {
			c.CheckInterval = ptr(checks.MinInterval)
			c.ListInterval = time.Hour
			c.Observer = func(e Event) {
				if e.Kind == EventTarget {
					kinds.Store(e.Message, true)
				}
			}
		}, fleet(1)...)
		waitReady(t, p, 1)
		time.Sleep(time.Second)
		before := p.Stats().ProviderCalls
		f.SetHostDown("b", true)
		release := f.Hang(fake.OpList)
		time.Sleep(30 * time.Minute)
		release()
		if n := len(f.Calls(fake.OpCheck)); n < 150 {
			t.Errorf("%d rounds in half an hour", n)
		}
		if calls := p.Stats().ProviderCalls - before; calls > 5 {
			t.Errorf("%d provider calls while nothing but checks ran", calls)
		}
		all := p.ProviderHealth()
		if len(all) != 2 || !all[0].Ready || all[1].Ready || all[1].Target != "b" || all[1].Reason != provider.ReasonUnreachable || time.Since(all[1].Since) < 29*time.Minute {
			t.Errorf("got %+v", all)
		}
		if _, ok := kinds.Load("b: Unreachable: the host does not answer"); !ok {
			t.Error("no event says that b is down")
		}
	})
}
