package leases

import (
	"context"
	"slices"
	"time"
)

// Request says which entry a lease may be on.
type Request struct {
	// Labels must all be on the entry.
	Labels map[string]string
	// Key asks for the entry that the key got before, while that is fit.
	Key string
	// Exclude names proxies not to use.
	Exclude []string
	// Target is the site that the lease is for. Entries cooling down for it are left out.
	Target string
	// TTL is how long the lease may be held. Zero means for ever.
	TTL time.Duration
}

// waiter is a caller that waits for a lease.
type waiter struct {
	req        Request // a copy, so that the requests of those who need not wait stay on their stacks
	lease      *Lease
	shape      *shape
	seq        uint64
	done       chan error // gets one value: nil with the lease granted, or why there will be none
	prev, next *waiter
	queued     bool
}

// waiterList is a queue in order of seq.
type waiterList struct{ head, tail *waiter }

func (l *waiterList) push(w *waiter) {
	w.prev, w.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = w
	} else {
		l.head = w
	}
	l.tail = w
}

func (l *waiterList) remove(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.tail = w.prev
	}
	w.prev, w.next = nil, nil
}

// Acquire grants l, which must be new, on an entry that req selects. It blocks until there is one or ctx ends,
// first come, first served among those that an entry suits. A context that has ended always loses. pc is the
// caller's program counter, for the report of a leak.
func (t *Table) Acquire(ctx context.Context, req *Request, l *Lease, pc uintptr) error {
	if ctx == nil {
		return ErrNilContext
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	t.mu.Lock()
	s, err := t.tryLocked(req, l, pc)
	if err == nil {
		t.mu.Unlock()
		return nil
	}
	if s == nil {
		t.mu.Unlock()
		return err
	}
	t.seq++
	l.pc = pc
	w := &waiter{req: *req, lease: l, shape: s, seq: t.seq, done: make(chan error, 1), queued: true}
	s.queue.push(w)
	t.stats.Waiting++
	t.mu.Unlock()
	return t.wait(ctx, w)
}

// wait blocks until w is served or ctx ends.
func (t *Table) wait(ctx context.Context, w *waiter) error {
	start := time.Now()
	var err error
	select {
	case err = <-w.done:
	case <-ctx.Done():
	}
	t.mu.Lock()
	if ctx.Err() != nil {
		return t.loseLocked(ctx, w)
	}
	defer t.mu.Unlock()
	if err != nil {
		t.stats.Exhausted++
		return err
	}
	waited := time.Since(start)
	t.stats.Waited++
	t.stats.WaitTotal += waited
	t.stats.WaitMax = max(t.stats.WaitMax, waited)
	return nil
}

// loseLocked ends the wait of w because its context has ended, even if it was served meanwhile. It unlocks.
func (t *Table) loseLocked(ctx context.Context, w *waiter) error {
	why := t.exhaustedLocked(&w.req, w.shape)
	why.Err = context.Cause(ctx)
	t.stats.Exhausted++
	var back ended
	if w.queued {
		t.unqueueLocked(w)
	} else if w.lease.entry != nil && !w.lease.endedLocked() {
		back = ended{t.endLocked(w.lease, nil)}
	}
	t.mu.Unlock()
	back.finish(ErrReleased)
	return why
}

// TryAcquire is Acquire without waiting.
func (t *Table) TryAcquire(req *Request, l *Lease, pc uintptr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.tryLocked(req, l, pc)
	if err != nil && s != nil {
		t.stats.Exhausted++
	}
	return err
}

// tryLocked grants l at once, or says why not. With a shape beside the error the request may be queued there.
func (t *Table) tryLocked(req *Request, l *Lease, pc uintptr) (*shape, error) {
	if t.refused != nil {
		return nil, t.refused
	}
	if t.stats.Waiting > 0 && len(t.cooling.ends) > 0 {
		t.warmLocked(time.Now()) // those who wait for the end of a cool-down come first
	}
	s := t.shapeLocked(req.Labels)
	var e *Entry
	if req.Key == "" && req.Target == "" && len(req.Exclude) == 0 {
		e = s.first()
	} else {
		e = t.chooseLocked(req, s)
	}
	if e != nil {
		t.grantLocked(e, req, l, pc)
		return s, nil
	}
	if !t.possibleLocked(req, s) {
		return nil, &NoMatchError{Labels: req.Labels, Exclude: req.Exclude}
	}
	return s, t.exhaustedLocked(req, s)
}

// chooseLocked returns the entry for a request that is more than its labels, or nil.
func (t *Table) chooseLocked(req *Request, s *shape) *Entry {
	if req.Key != "" {
		if b := t.keys.find(req.Key); b != nil && t.bindsLocked(b, req, s) {
			if b.entry.load < b.entry.max {
				return b.entry
			}
			return nil
		}
	}
	if e := s.first(); e == nil || t.suitsLocked(e, req) {
		return e
	}
	return s.firstThat(func(e *Entry) bool { return t.suitsLocked(e, req) })
}

// bindsLocked reports whether b holds its key's requests on its entry, be that full or not.
func (t *Table) bindsLocked(b *binding, req *Request, s *shape) bool {
	e := b.entry
	return e != nil && e.fit && e.max > 0 && s.matches(e.member.Labels) && t.suitsLocked(e, req)
}

// suitsLocked reports whether neither Exclude nor a cool-down keeps e from req.
func (t *Table) suitsLocked(e *Entry, req *Request) bool {
	if len(req.Exclude) > 0 && slices.Contains(req.Exclude, e.member.Proxy) {
		return false
	}
	if len(e.cool) > 0 {
		if until, ok := e.cool[req.Target]; ok && time.Now().Before(until) {
			return false
		}
	}
	return true
}

// possibleLocked reports whether some declared proxy could ever serve req, or some entry before SetWanted.
func (t *Table) possibleLocked(req *Request, s *shape) bool {
	usable := func(proxy string, labels map[string]string, maxLeases int) bool {
		return maxLeases > 0 && s.matches(labels) && !slices.Contains(req.Exclude, proxy)
	}
	if t.wanted == nil {
		for _, e := range t.entries {
			if m := &e.member; !e.draining && usable(m.Proxy, m.Labels, m.MaxLeases) {
				return true
			}
		}
	}
	for i := range t.wanted {
		if w := &t.wanted[i]; usable(w.Proxy, w.Labels, w.MaxLeases) {
			return true
		}
	}
	return false
}

func (t *Table) exhaustedLocked(req *Request, s *shape) *ExhaustedError {
	why := &ExhaustedError{Waiting: t.stats.Waiting}
	for _, e := range t.entries {
		switch {
		case !s.matches(e.member.Labels):
		case slices.Contains(req.Exclude, e.member.Proxy):
			why.Excluded++
		case !e.fit:
			why.Unfit++
		case !t.suitsLocked(e, req):
			why.Cooling++
		case e.load >= e.max:
			why.Full++
		default:
			why.Ready++
		}
	}
	return why
}

// dispatchLocked hands the room that e has to those who have waited longest for it.
func (t *Table) dispatchLocked(e *Entry) {
	if t.stats.Waiting == 0 {
		return
	}
	for e.roomy {
		var next *waiter
		for _, x := range e.slots {
			if w := t.firstWaiterLocked(x.shape, e); w != nil && (next == nil || w.seq < next.seq) {
				next = w
			}
		}
		if next == nil {
			return
		}
		t.unqueueLocked(next)
		t.grantLocked(e, &next.req, next.lease, next.lease.pc)
		next.done <- nil
	}
}

// firstWaiterLocked returns the first waiter of s that e would be given to.
func (t *Table) firstWaiterLocked(s *shape, e *Entry) *waiter {
	for w := s.queue.head; w != nil; w = w.next {
		if !t.suitsLocked(e, &w.req) {
			continue
		}
		if w.req.Key != "" {
			if b := t.keys.find(w.req.Key); b != nil && b.entry != e && t.bindsLocked(b, &w.req, s) {
				continue
			}
		}
		return w
	}
	return nil
}

// freeKeyedLocked is called when e can no longer be leased: those who waited for it because of their key may go
// elsewhere now, where there may be room already.
func (t *Table) freeKeyedLocked(e *Entry) {
	if t.stats.Waiting == 0 || t.keys.empty() {
		return
	}
	for _, other := range t.entries {
		if other != e {
			t.dispatchLocked(other)
		}
	}
}

func (t *Table) unqueueLocked(w *waiter) {
	w.shape.queue.remove(w)
	w.queued = false
	t.stats.Waiting--
}

func (t *Table) eachWaiterLocked(f func(*waiter)) {
	for _, s := range append(t.shapesLocked(), t.all) {
		for w := s.queue.head; w != nil; {
			next := w.next
			f(w)
			w = next
		}
	}
}
