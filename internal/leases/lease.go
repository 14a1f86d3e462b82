package leases

import (
	"context"
	"runtime"
	"time"
)

// Lease is the right to use one entry. Its zero value is made by the caller and granted by Acquire, so that one
// allocation serves for the lease and whatever the caller puts around it. It must not be copied, and must be the
// first field of what it is embedded in.
type Lease struct {
	entry  *Entry
	h      *holder
	own    holder
	target string
	moved  bool
}

// holder is a lease as its entry knows it. At first it is part of the Lease, which the table thereby keeps alive;
// a lease that is held for longer gets one of its own, so that the collector can tell when its owner drops it.
// Guarded by Table.mu.
type holder struct {
	entry      *Entry
	prev, next *holder
	lease      *Lease // nil once aged
	pc         uintptr
	rare       *rare
	epoch      uint32
	over       bool // released or revoked
}

// rare is what few leases have, kept apart so that a lease stays small.
type rare struct {
	ctx    context.Context // set with cancel, and never changed after
	cancel context.CancelCauseFunc
	cause  error // of a revoked lease
	ttl    *time.Timer
	leak   runtime.Cleanup // of an aged lease
	stack  []uintptr       // see Trace
}

func (h *holder) needRare() *rare {
	if h.rare == nil {
		h.rare = new(rare)
	}
	return h.rare
}

// grantLocked gives l a place on e, which must have room.
func (t *Table) grantLocked(e *Entry, req *Request, l *Lease, pc uintptr) {
	if e.load >= e.max || !e.fit {
		panic("egress: bug: lease granted on an entry without room")
	}
	l.entry = e
	h := &l.own
	l.h = h
	h.entry = e
	h.lease = l
	h.pc = pc
	h.epoch = t.epoch
	h.prev = nil
	h.next = e.holders
	if h.next != nil {
		h.next.prev = h
	}
	e.holders = h
	e.load++
	e.granted++
	t.stats.Granted++
	t.stats.Held++
	t.young++
	t.placeLocked(e)
	l.target = req.Target
	if req.Key != "" {
		l.moved = t.keys.bind(req.Key, e)
	}
	if req.TTL > 0 {
		// The timer must not keep the lease alive, so that it is watched from the start.
		h = t.letGoLocked(h)
		h.needRare().ttl = time.AfterFunc(req.TTL, func() { t.expire(h) })
	}
	if !t.armed && t.young > 0 {
		t.armLocked()
	}
}

// Release gives the lease back. Only the first call does anything. It is safe from any goroutine and does not
// block on anything but the table's lock.
func (l *Lease) Release() {
	e := l.entry
	if e == nil {
		return
	}
	t := e.table
	t.mu.Lock()
	h := l.h
	if h.over {
		t.mu.Unlock()
		return
	}
	if h.rare != nil && h.lease == nil {
		h.rare.leak.Stop()
	}
	t.releaseLocked(h, nil)
	if h.rare == nil && !e.draining {
		t.mu.Unlock()
		return
	}
	end := endOf(h)
	t.mu.Unlock()
	ended{end}.finish(ErrReleased)
}

// releaseLocked ends h and hands its place on. The cause is nil for a lease that is given back. The caller cancels
// its context after unlocking.
func (t *Table) releaseLocked(h *holder, cause error) {
	e := h.entry
	h.over = true
	if cause != nil {
		h.needRare().cause = cause
	}
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		e.holders = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	}
	h.prev, h.next = nil, nil
	if h.lease != nil {
		h.lease = nil
		t.young--
	}
	if h.rare != nil && h.rare.ttl != nil {
		h.rare.ttl.Stop()
	}
	e.load--
	t.stats.Held--
	t.placeLocked(e)
	if t.stats.Waiting > 0 {
		t.dispatchLocked(e)
	}
	if t.stats.Held == 0 && len(t.onEmpty) > 0 {
		for _, empty := range t.onEmpty {
			close(empty)
		}
		t.onEmpty = nil
	}
}

// Entry returns the entry that the lease is on, also after its release. Nil before it is granted.
func (l *Lease) Entry() *Entry { return l.entry }

// Moved reports whether the lease's key was on another entry before.
func (l *Lease) Moved() bool { return l.moved }

// Trace keeps the stack that the lease was acquired with, for leases whose caller's program counter says little.
func (l *Lease) Trace(stack []uintptr) {
	l.entry.table.mu.Lock()
	defer l.entry.table.mu.Unlock()
	l.h.needRare().stack = stack
}

// Held reports whether the lease is neither released nor revoked.
func (l *Lease) Held() bool {
	l.entry.table.mu.Lock()
	defer l.entry.table.mu.Unlock()
	return !l.h.over
}

// Context returns a context that ends with the lease: with ErrReleased, or with the cause it was revoked for.
func (l *Lease) Context() context.Context { return l.ContextFrom(context.Background()) }

// ContextFrom is Context with a parent. The first call for a lease decides which; later ones return the same.
func (l *Lease) ContextFrom(parent context.Context) context.Context {
	t := l.entry.table
	t.mu.Lock()
	r := l.h.needRare()
	if r.ctx == nil {
		r.ctx, r.cancel = context.WithCancelCause(parent)
	}
	ctx, cancel, over, cause := r.ctx, r.cancel, l.h.over, r.cause
	t.mu.Unlock()
	if over {
		if cause == nil {
			cause = ErrReleased
		}
		cancel(cause)
	}
	return ctx
}

// ended are leases that are over, for what has to be done about them without the lock.
type ended []end

type end struct {
	entry  *Entry
	cancel context.CancelCauseFunc // nil when nobody asked for the context
}

// endOf must be called with Table.mu held.
func endOf(h *holder) end {
	e := end{entry: h.entry}
	if h.rare != nil {
		e.cancel = h.rare.cancel
	}
	return e
}

// finish cancels their contexts and reports the entries that are idle now.
func (list ended) finish(cause error) {
	for _, x := range list {
		if x.cancel != nil {
			x.cancel(cause)
		}
	}
	var last *Entry
	for _, x := range list {
		e := x.entry
		if e == last {
			continue
		}
		last = e
		e.table.mu.Lock()
		idle := e.draining && e.load == 0
		e.table.mu.Unlock()
		if idle {
			e.table.idle(e)
		}
	}
}

// revokeAllLocked ends all leases on e and appends them to list.
func (t *Table) revokeAllLocked(e *Entry, cause error, list ended) ended {
	for e.holders != nil {
		h := e.holders
		t.stats.Revoked++
		t.releaseLocked(h, cause)
		list = append(list, endOf(h))
	}
	return list
}

// expire revokes a lease whose TTL is over.
func (t *Table) expire(h *holder) {
	t.mu.Lock()
	if h.over {
		t.mu.Unlock()
		return
	}
	m := h.entry.member
	t.mu.Unlock()
	cause := t.hooks.Expired(m)
	t.mu.Lock()
	if h.over {
		t.mu.Unlock()
		return
	}
	t.stats.Revoked++
	t.releaseLocked(h, cause)
	end := endOf(h)
	t.mu.Unlock()
	ended{end}.finish(cause)
}
