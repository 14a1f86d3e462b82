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
	hiccup  time.Duration // the same of the first question and of every 100th
	release chan struct{}
	flying  atomic.Int64 // questions that have no answer
	asked   atomic.Int64
}

func (d *daemon) ask() {
	late := d.late
	if d.asked.Add(1)%100 == 1 && d.hiccup > 0 {
		late = d.hiccup
	}
	d.flying.Add(1)
	defer d.flying.Add(-1)
	select {
	case <-time.After(late):
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
		const late = paceSpan * paceLimit * 3 / 4
		d := &daemon{late: late}
		p := newPace(&packets{source: bytes.NewReader(make([]byte, 10))}, d.ask)
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
		time.Sleep(late)
		synctest.Wait()
		if given.Load() != 2*maxFlying {
			t.Errorf("after the answers %d packets have been given out, want %d", given.Load(), 2*maxFlying)
		}
		time.Sleep(time.Minute)
		p.answered()
	})
}

func TestAPaceStopsWhereAnswersAreLate(t *testing.T) {
	for name, test := range map[string]struct {
		late, hiccup, source time.Duration
		stops                bool
	}{
		"a host nearby":           {time.Millisecond, 0, 0, false},
		"a host nearby, and busy": {time.Millisecond, 150 * time.Millisecond, 0, false},
		"a host far away":         {30 * time.Millisecond, 0, 0, true},
		"answers held back":       {44 * time.Millisecond, 0, 0, true},
		"answers that never come": {24 * time.Hour, 0, 0, true},
		"a source that stands":    {time.Millisecond, 0, time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 300
				d := &daemon{late: test.late, hiccup: test.hiccup}
				p := newPace(&packets{source: &slow{bytes.NewReader(make([]byte, n)), test.source}}, d.ask)
				begin := time.Now()
				pull(t, p, n)
				took := time.Since(begin)
				p.answered()
				if asked := d.asked.Load(); test.stops != (asked < n-20) {
					t.Errorf("%d questions for %d packets", asked, n)
				}
				// Nothing is lost but what it takes to see that it does not pay.
				if most := n*(test.source+test.late) + 3*test.hiccup; took > most || test.stops && took > paceTries*paceSpan*paceLimit {
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

func TestAPaceWaitsForItsQuestionsAndAsksNothingBehindTheLastPacket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		for name, test := range map[string]struct {
			source io.Reader
			size   int
			n      int
			end    error
			asked  int64
		}{
			"a seed":                     {bytes.NewReader(make([]byte, 10)), 4 << 20, 1, io.EOF, 0},
			"two packets":                {bytes.NewReader(make([]byte, firstPacket+10)), 4 << 20, 2, io.EOF, 1},
			"an end that is not seen":    {bytes.NewReader(make([]byte, 2)), 1, 2, io.EOF, 2},
			"a source that fails":        {io.MultiReader(bytes.NewReader(make([]byte, 2)), &failing{boom}), 1, 2, boom, 2},
			"a source that fails inside": {io.MultiReader(bytes.NewReader(make([]byte, firstPacket+10)), &failing{boom}), 4 << 20, 2, boom, 1},
		} {
			d := &daemon{late: time.Hour, release: make(chan struct{})}
			p := newPace(&packets{source: test.source}, d.ask)
			b := make([]byte, test.size)
			for range test.n {
				if _, err := p.Read(b); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			for range 2 * maxFlying { // go-libvirt stops at the first
				if n, err := p.Read(b); n != 0 || !errors.Is(err, test.end) {
					t.Errorf("%s: %d bytes at the end, %v", name, n, err)
				}
			}
			synctest.Wait()
			if asked := d.asked.Load(); asked != test.asked {
				t.Errorf("%s: %d questions, want %d", name, asked, test.asked)
			}
			begin := time.Now()
			time.AfterFunc(time.Second, func() { close(d.release) }) // the session ends
			p.answered()
			want := time.Second
			if test.asked == 0 {
				want = 0
			}
			if took := time.Since(begin); took != want || d.flying.Load() != 0 {
				t.Errorf("%s: it ended after %s with %d questions", name, took, d.flying.Load())
			}
			time.Sleep(time.Second)
		}
	})
}
