package leases

import (
	"context"
	"runtime"
	"time"
)

// Lease is the right to use one entry. Its zero value is made by the caller and granted by Acquire, so that one
// allocation serves for the lease and whatever the caller puts around it. It must not be copied, and must be the
// first field of what it is embedded in.
//
// A young lease is in its entry's list itself, which keeps it alive. One that is held for longer is there as a record
// instead, so that the collector can tell when its owner drops it.
type Lease struct {
	entry *Entry

	// The fields below are guarded by Table.mu, but for target and moved, which never change.
	prev, next *Lease // in Entry.young
	record     *record
	pc         uintptr
	target     string
	epoch      uint32
	over       bool // released or revoked; an aged lease's record has its own
	moved      bool
}

// record is what few leases have, kept apart so that a lease stays small. All of it is guarded by Table.mu.
type record struct {
	entry      *Entry
	prev, next *record // in Entry.aged, when aged
	aged       bool
	over       bool
	pc         uintptr
	ctx        context.Context // set with cancel, and never changed after
	cancel     context.CancelCauseFunc
	cause      error // of a revoked lease
	ttl        *time.Timer
	leak       runtime.Cleanup // of an aged lease
	stack      []uintptr       // see Trace
}

// Frames is how much of a stack Trace keeps.
const Frames = 16

// tracedRecord is a record with the stack that Trace keeps, in one allocation.
type tracedRecord struct {
	record
	space [Frames]uintptr
}

// recordLocked returns l's record and makes one when there is none.
func (l *Lease) recordLocked() *record {
	if l.record == nil {
		l.record = &record{entry: l.entry, pc: l.pc, over: l.over}
	}
	return l.record
}

// endedLocked reports whether l is over.
func (l *Lease) endedLocked() bool {
	if l.record != nil && l.record.aged {
		return l.record.over
	}
	return l.over
}

// grantLocked gives l a place on e, which must have room.
func (t *Table) grantLocked(e *Entry, req *Request, l *Lease, pc uintptr) {
	if e.load >= e.max || !e.fit {
		panic("egress: bug: lease granted on an entry without room")
	}
	l.entry = e
	l.pc = pc
	l.epoch = t.epoch
	if e.young != nil {
		l.next = e.young
		e.young.prev = l
	}
	e.young = l
	t.young++
	e.load++
	e.granted++
	t.stats.Granted++
	t.stats.Held++
	t.placeLocked(e)
	if req.Target != "" {
		l.target = req.Target
	}
	if req.Key != "" {
		l.moved = t.keys.bind(req.Key, e)
	}
	if req.TTL > 0 {
		// The timer must not keep the lease alive, so that it is watched from the start.
		t.letGoLocked(l)
		r := l.record
		r.ttl = time.AfterFunc(req.TTL, func() { t.expire(r) })
	}
	if !t.armed {
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
	if l.endedLocked() {
		t.mu.Unlock()
		return
	}
	end := t.endLocked(l, nil)
	idle := e.draining && e.load == 0
	t.mu.Unlock()
	if end.cancel != nil {
		end.cancel(ErrReleased)
	}
	if idle {
		t.idle(e)
	}
}

// endLocked ends l, which must not be over, and hands its place on. The cause is nil for a lease that is given back.
func (t *Table) endLocked(l *Lease, cause error) end {
	if r := l.record; r != nil && r.aged {
		r.leak.Stop()
		return t.endRecordLocked(r, cause)
	}
	e := l.entry
	l.over = true
	t.unlinkLocked(l)
	end := end{entry: e}
	if cause != nil {
		l.recordLocked().cause = cause
	}
	if r := l.record; r != nil {
		r.over = true
		end.cancel = r.cancel
	}
	t.freeLocked(e)
	return end
}

// unlinkLocked takes l out of its entry's young leases. A pointer that is nil already is not written again, which
// would cost a write barrier.
func (t *Table) unlinkLocked(l *Lease) {
	t.young--
	prev, next := l.prev, l.next
	if prev != nil {
		prev.next = next
		l.prev = nil
	} else {
		l.entry.young = next
	}
	if next != nil {
		next.prev = prev
		l.next = nil
	}
}

// endRecordLocked ends an aged lease.
func (t *Table) endRecordLocked(r *record, cause error) end {
	e := r.entry
	r.over = true
	r.cause = cause
	t.aged--
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		e.aged = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
	if r.ttl != nil {
		r.ttl.Stop()
	}
	t.freeLocked(e)
	return end{e, r.cancel}
}

// freeLocked takes one lease off e's load and hands the place on.
func (t *Table) freeLocked(e *Entry) {
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

// Trace keeps the first Frames of the stack that the lease was acquired with, for leases whose caller's program counter
// says little.
func (l *Lease) Trace(stack []uintptr) {
	traced := &tracedRecord{record: record{entry: l.entry}}
	traced.stack = traced.space[:copy(traced.space[:], stack)]
	t := l.entry.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.record != nil { // made for a TTL
		l.record.stack = traced.stack
		return
	}
	traced.pc, traced.over = l.pc, l.over
	l.record = &traced.record
}

// Held reports whether the lease is neither released nor revoked.
func (l *Lease) Held() bool {
	l.entry.table.mu.Lock()
	defer l.entry.table.mu.Unlock()
	return !l.endedLocked()
}

// Context returns a context that ends with the lease: with ErrReleased, or with the cause it was revoked for.
func (l *Lease) Context() context.Context { return l.ContextFrom(context.Background()) }

// ContextFrom is Context with a parent. The first call for a lease decides which; later ones return the same.
func (l *Lease) ContextFrom(parent context.Context) context.Context {
	t := l.entry.table
	t.mu.Lock()
	r := l.recordLocked()
	if r.ctx == nil {
		r.ctx, r.cancel = context.WithCancelCause(parent)
	}
	ctx, cancel, over, cause := r.ctx, r.cancel, l.endedLocked(), r.cause
	t.mu.Unlock()
	if over {
		if cause == nil {
			cause = ErrReleased
		}
		cancel(cause)
	}
	return ctx
}

// end is a lease that is over, for what has to be done about it without the lock.
type end struct {
	entry  *Entry
	cancel context.CancelCauseFunc // nil when nobody asked for the context
}

type ended []end

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
	for e.young != nil {
		t.stats.Revoked++
		list = append(list, t.endLocked(e.young, cause))
	}
	for e.aged != nil {
		t.stats.Revoked++
		list = append(list, t.endRecordLocked(e.aged, cause))
	}
	return list
}

// expire revokes a lease whose TTL is over.
func (t *Table) expire(r *record) {
	t.mu.Lock()
	m := r.entry.member
	over := r.over
	t.mu.Unlock()
	if over {
		return
	}
	cause := t.hooks.Expired(m)
	t.mu.Lock()
	if r.over {
		t.mu.Unlock()
		return
	}
	t.stats.Revoked++
	end := t.endRecordLocked(r, cause)
	t.mu.Unlock()
	ended{end}.finish(cause)
}
