package leases

import (
	"runtime"
	"time"
)

// youth is the time between two looks for leases that have been held for long. The table keeps a young lease
// alive, so a lease dropped without Release is noticed by the first garbage collection after one to two youths.
// Most leases are released long before and never pay for being watched.
const youth = time.Second

// armLocked starts the timer that ages leases.
func (t *Table) armLocked() {
	t.armed = true
	if t.aging == nil {
		t.aging = time.AfterFunc(youth, t.age)
	} else {
		t.aging.Reset(youth)
	}
}

// age lets go of the leases that were granted before the last call. It gives up the lock now and then, so that a
// large table does not hold up its callers.
func (t *Table) age() {
	const stride = 1024
	t.reclaimDropped()
	t.mu.Lock()
	defer t.mu.Unlock()
	epoch := t.epoch
	t.epoch++
	for i := 0; i < len(t.entries) && t.young > 0; i++ {
		for l := t.entries[i].young; l != nil; {
			next := l.next
			if l.epoch != epoch && l.epoch != t.epoch {
				t.letGoLocked(l)
			}
			l = next
		}
		if i%stride == stride-1 {
			t.mu.Unlock()
			t.mu.Lock()
		}
	}
	t.armed = false
	if t.young+t.aged > 0 && !t.closed {
		t.armLocked()
	}
}

// letGoLocked replaces l in its entry by a record, and has the collector tell when l is dropped.
func (t *Table) letGoLocked(l *Lease) {
	e := l.entry
	t.unlinkLocked(l)
	r := l.recordLocked()
	r.aged = true
	t.aged++
	if r.next = e.aged; r.next != nil {
		r.next.prev = r
	}
	e.aged = r
	r.leak = runtime.AddCleanup(l, t.drop, r)
}

// drop is called by the collector for a lease that nobody can release any more. It only takes a note: the collector's
// goroutine belongs to no bubble of testing/synctest, and what ends a lease may close a channel that does.
func (t *Table) drop(r *record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !r.over {
		t.dropped = append(t.dropped, r)
	}
}

// reclaimDropped takes back the leases that were dropped.
func (t *Table) reclaimDropped() {
	t.mu.Lock()
	dropped := t.dropped
	t.dropped = nil
	var leaks []Leak
	var list ended
	for _, r := range dropped {
		if r.over {
			continue
		}
		t.stats.Leaked++
		list = append(list, t.endRecordLocked(r, nil))
		leaks = append(leaks, Leak{Member: r.entry.member, PC: r.pc, Stack: r.stack})
	}
	t.mu.Unlock()
	list.finish(ErrReleased)
	if t.hooks.Leaked != nil {
		for _, leak := range leaks {
			t.hooks.Leaked(leak)
		}
	}
}

// Close stops the table's timers. Leases still held stay held, and are no longer watched.
func (t *Table) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.aging != nil {
		t.aging.Stop()
	}
	if t.cooling.timer != nil {
		t.cooling.timer.Stop()
	}
}
