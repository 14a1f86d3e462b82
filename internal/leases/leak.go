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
	t.mu.Lock()
	defer t.mu.Unlock()
	epoch := t.epoch
	t.epoch++
	for i := 0; i < len(t.entries) && t.young > 0; i++ {
		for h := t.entries[i].holders; h != nil; h = h.next {
			if h.lease != nil && h.epoch != epoch && h.epoch != t.epoch {
				h = t.letGoLocked(h)
			}
		}
		if i%stride == stride-1 {
			t.mu.Unlock()
			t.mu.Lock()
		}
	}
	t.armed = false
	if t.young > 0 && !t.closed {
		t.armLocked()
	}
}

// letGoLocked moves h out of its lease into memory of its own and returns it there.
func (t *Table) letGoLocked(h *holder) *holder {
	l := h.lease
	own := new(holder)
	*own = *h
	own.lease = nil
	if own.prev != nil {
		own.prev.next = own
	} else {
		own.entry.holders = own
	}
	if own.next != nil {
		own.next.prev = own
	}
	*h = holder{}
	l.h = own
	own.needRare().leak = runtime.AddCleanup(l, t.reclaim, own)
	t.young--
	return own
}

// reclaim takes back a lease that nobody can release any more.
func (t *Table) reclaim(h *holder) {
	t.mu.Lock()
	if h.over {
		t.mu.Unlock()
		return
	}
	t.stats.Leaked++
	t.releaseLocked(h, nil)
	leak := Leak{Member: h.entry.member, PC: h.pc}
	if h.rare != nil {
		leak.Stack = h.rare.stack
	}
	end := endOf(h)
	t.mu.Unlock()
	ended{end}.finish(ErrReleased)
	if t.hooks.Leaked != nil {
		t.hooks.Leaked(leak)
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
