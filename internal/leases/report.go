package leases

import (
	"container/heap"
	"slices"
	"time"
)

// Report says how it went with an entry.
type Report struct {
	// Kind says what happened.
	Kind ReportKind
	// Err is why, for Failed and Broken.
	Err error
	// Cool is how long the entry is left alone for the lease's target, for Banned.
	Cool time.Duration
	// Target is the lease's target. Set by Lease.Report.
	Target string
}

// ReportKind is what a Report says.
type ReportKind int

// The kinds of report.
const (
	OK     ReportKind = iota // it worked
	Failed                   // it failed; one failure is no verdict
	Banned                   // the target has had enough of this entry
	Broken                   // the entry does not work: no more leases until it is fit again
)

// Report records how it went. It may be called at any time, several times, and after Release. It does not block
// on anything but the table's lock and Hooks.Reported.
func (l *Lease) Report(r Report) {
	e := l.entry
	t := e.table
	r.Target = l.target
	t.mu.Lock()
	if e.index < 0 {
		t.mu.Unlock()
		return
	}
	switch r.Kind {
	case Banned:
		t.coolLocked(e, r.Target, r.Cool)
	case Failed:
		e.failures++
	case Broken:
		e.failures++
		if e.fit {
			e.fit = false
			t.stats.Fit--
			t.placeLocked(e)
			t.freeKeyedLocked(e)
		}
	}
	t.mu.Unlock()
	if t.hooks.Reported != nil {
		t.hooks.Reported(e, r)
	}
}

// coolings are the ends of all cool-downs, the next one first.
type coolings struct {
	ends  coolHeap
	timer *time.Timer
}

type coolEnd struct {
	at     time.Time
	entry  *Entry
	target string
}

// coolLocked keeps e from target for d. A shorter cool-down does not end a longer one.
func (t *Table) coolLocked(e *Entry, target string, d time.Duration) {
	if d <= 0 || t.closed {
		return
	}
	until := time.Now().Add(d)
	if !until.After(e.cool[target]) {
		return
	}
	if e.cool == nil {
		e.cool = map[string]time.Time{}
	}
	_, again := e.cool[target]
	e.cool[target] = until
	if !again { // else the end that is in the heap is put off when its time comes
		heap.Push(&t.cooling.ends, coolEnd{until, e, target})
		if t.cooling.ends[0].at.Equal(until) {
			t.armCoolingLocked(d)
		}
	}
	// Who waited for this entry because of a key may go elsewhere now.
	t.freeKeyedLocked(e)
}

func (t *Table) armCoolingLocked(d time.Duration) {
	if t.cooling.timer == nil {
		t.cooling.timer = time.AfterFunc(d, t.warm)
	} else {
		t.cooling.timer.Reset(d)
	}
}

// warm ends the cool-downs whose time has come.
func (t *Table) warm() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.warmLocked(now)
	if len(t.cooling.ends) > 0 && !t.closed {
		t.armCoolingLocked(t.cooling.ends[0].at.Sub(now))
	}
}

func (t *Table) warmLocked(now time.Time) {
	for len(t.cooling.ends) > 0 && !now.Before(t.cooling.ends[0].at) {
		end := heap.Pop(&t.cooling.ends).(coolEnd)
		until := end.entry.cool[end.target]
		if now.Before(until) { // a longer cool-down was set since
			end.at = until
			heap.Push(&t.cooling.ends, end)
			continue
		}
		delete(end.entry.cool, end.target)
		t.dispatchLocked(end.entry)
	}
}

// forgetCoolingLocked drops the cool-downs of an entry that is gone.
func (t *Table) forgetCoolingLocked(e *Entry) {
	if len(e.cool) == 0 {
		return
	}
	e.cool = nil
	t.cooling.ends = slices.DeleteFunc(t.cooling.ends, func(end coolEnd) bool { return end.entry == e })
	heap.Init(&t.cooling.ends)
}

// Cooling returns the targets that e is cooling down for and until when.
func (e *Entry) Cooling() map[string]time.Time {
	e.table.mu.Lock()
	defer e.table.mu.Unlock()
	if len(e.cool) == 0 {
		return nil
	}
	now := time.Now()
	targets := map[string]time.Time{}
	for target, until := range e.cool {
		if now.Before(until) {
			targets[target] = until
		}
	}
	return targets
}

type coolHeap []coolEnd

func (h coolHeap) Len() int           { return len(h) }
func (h coolHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h coolHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *coolHeap) Push(x any)        { *h = append(*h, x.(coolEnd)) }
func (h *coolHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = coolEnd{}
	*h = old[:len(old)-1]
	return last
}
