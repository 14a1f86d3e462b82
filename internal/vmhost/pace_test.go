package vmhost

import (
	"bytes"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// daemon stands for libvirtd behind a link: it answers a question that long after it was asked, or after release.
type daemon struct {
	late    time.Duration
	release chan struct{}
	flying  atomic.Int64 // questions that have no answer
	asked   atomic.Int64
}

func (d *daemon) ask() {
	d.asked.Add(1)
	d.flying.Add(1)
	defer d.flying.Add(-1)
	select {
	case <-time.After(d.late):
	case <-d.release:
	}
}

// pull reads n packets of one byte.
func pull(t *testing.T, p *pace, n int) {
	t.Helper()
	for range n {
		if _, err := p.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNoMorePacketsAreOnTheirWayThanPay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &daemon{late: time.Hour}
		p := newPace(bytes.NewReader(make([]byte, 10)), d.ask)
		var given atomic.Int64
		go func() {
			for range 10 {
				if _, err := p.Read(make([]byte, 1)); err != nil {
					return
				}
				given.Add(1)
			}
		}()
		synctest.Wait()
		if given.Load() != maxFlying || d.flying.Load() != maxFlying {
			t.Errorf("%d packets are on their way and %d questions have no answer, want %d of both", given.Load(), d.flying.Load(), maxFlying)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if given.Load() != 2*maxFlying {
			t.Errorf("after the answers %d packets have been given out, want %d", given.Load(), 2*maxFlying)
		}
		time.Sleep(3 * time.Hour)
		p.end()
	})
}

func TestAPaceStopsWhereAnswersAreLate(t *testing.T) {
	for name, test := range map[string]struct {
		late, source time.Duration
		stops        bool
	}{
		"a host nearby":        {time.Millisecond, 0, false},
		"a host far away":      {30 * time.Millisecond, 0, true},
		"answers held back":    {44 * time.Millisecond, 0, true},
		"a source that stands": {time.Millisecond, time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 4 * paceSpan
				d := &daemon{late: test.late}
				p := newPace(&slow{bytes.NewReader(make([]byte, n)), test.source}, d.ask)
				begin := time.Now()
				pull(t, p, n)
				took := time.Since(begin)
				p.end()
				if asked := d.asked.Load(); test.stops != (asked < n-1) {
					t.Errorf("%d questions for %d packets", asked, n)
				}
				// Nothing is lost but what it takes to see that it does not pay.
				if most := n*test.source + max(n, paceSpan)*test.late; took > most || test.stops && took > paceSpan*test.late {
					t.Errorf("it took %s", took)
				}
			})
		})
	}
}

// slow is a source that takes its time.
type slow struct {
	io.Reader
	takes time.Duration
}

func (s *slow) Read(b []byte) (int, error) {
	time.Sleep(s.takes)
	return s.Reader.Read(b)
}

func TestTheEndOfAPaceIsTheEndOfItsQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &daemon{late: time.Hour, release: make(chan struct{})}
		boom := errors.New("boom")
		p := newPace(io.MultiReader(bytes.NewReader(make([]byte, 2)), &failing{boom}), d.ask)
		pull(t, p, 2)
		if _, err := p.Read(make([]byte, 1)); !errors.Is(err, boom) {
			t.Errorf("a source that fails: %v", err)
		}
		go func() {
			time.Sleep(time.Second)
			close(d.release) // the session ends
		}()
		begin := time.Now()
		p.end()
		if took := time.Since(begin); took != time.Second || d.flying.Load() != 0 {
			t.Errorf("it ended after %s with %d questions", took, d.flying.Load())
		}
		asked := d.asked.Load()
		for range 2 * maxFlying {
			if _, err := p.Read(make([]byte, 1)); !errors.Is(err, boom) {
				t.Errorf("after the end: %v", err)
			}
		}
		if d.asked.Load() != asked {
			t.Error("it asks after its end")
		}
	})
}
