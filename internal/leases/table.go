// Package leases is the table of who holds which proxy. It grants, queues, revokes and reclaims; it knows
// nothing of networks.
//
// One mutex guards everything. Nothing that can block, and no code of others, runs while it is held: hooks,
// cancellations and timers are called after it is released.
package leases

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// Member is what an entry stands for.
type Member struct {
	// Proxy is the proxy's name; Request.Exclude refers to it.
	Proxy string
	// Instance names the incarnation.
	Instance string
	// Labels are what Request.Labels select by.
	Labels map[string]string
	// MaxLeases is how many leases may be held at once.
	MaxLeases int
	// Data is the caller's and not looked at.
	Data any
}

// Hooks are called without the table's lock, and may call the table. Nil ones are left out.
type Hooks struct {
	// Idle is called when an entry that drains has lost its last lease.
	Idle func(*Entry)
	// Reported is called for every Report.
	Reported func(*Entry, Report)
	// Leaked is called for every lease that was collected unreleased.
	Leaked func(Leak)
	// Expired makes the cause for a lease whose TTL is over. Required when TTLs are used.
	Expired func(Member) error
}

// Leak is a lease that nobody could release any more.
type Leak struct {
	Member Member
	// PC is the program counter that the lease was acquired with.
	PC uintptr
	// Stack is what Lease.Trace kept.
	Stack []uintptr
}

// Table holds entries and grants leases on them. It is safe for concurrent use.
type Table struct {
	hooks Hooks

	// mu guards everything below, and all entries, shapes, waiters and leases of the table.
	mu      sync.Mutex
	entries []*Entry // no order; Entry.index is the place
	all     *shape   // the shape without labels
	single  map[label]*shape
	multi   map[string]*shape
	wanted  []Wanted
	keys    bindings
	cooling coolings
	refused error
	onEmpty []chan struct{} // closed when no lease is held any more
	seq     uint64
	epoch   uint32
	young   int       // leases that the table keeps alive
	aged    int       // leases that the collector watches
	dropped []*record // aged leases that were collected
	aging   *time.Timer
	armed   bool // aging will fire
	closed  bool
	stats   Stats
}

// Stats are a table's counters since it was made, and its gauges.
type Stats struct {
	Entries int // in the table, fit or not
	Fit     int // that may be leased
	Held    int // leases now
	Waiting int // callers now

	Granted   uint64        // leases granted
	Waited    uint64        // of those, after waiting
	Exhausted uint64        // requests that ended without a lease
	Revoked   uint64        // leases taken back
	Leaked    uint64        // leases collected unreleased
	WaitTotal time.Duration // time waited for granted leases
	WaitMax   time.Duration // the longest of those
}

// NewTable returns an empty table.
func NewTable(hooks Hooks) *Table {
	t := &Table{hooks: hooks, single: map[label]*shape{}, multi: map[string]*shape{}}
	t.all = &shape{}
	t.keys.init()
	return t
}

// Entry is one proxy instance in the table. What every lease touches comes first, so that it shares few cache lines.
type Entry struct {
	table    *Table
	load     int // leases held
	max      int
	young    *Lease  // the leases on it, the newest first
	aged     *record // those held for longer, in no order
	granted  uint64
	slots    []*slot // one for each shape it matches; the first is table.all's
	first    slot    // storage of slots[0]
	fit      bool
	draining bool
	roomy    bool // in the buckets of its shapes
	index    int  // in table.entries; -1 when removed
	failures uint64
	cool     map[string]time.Time
	member   Member // Labels and MaxLeases may change
}

// Add puts a member into the table. It gets no leases until SetFit. Its labels must not be changed any more.
func (t *Table) Add(m Member) *Entry {
	e := &Entry{table: t, member: m, max: m.MaxLeases}
	t.mu.Lock()
	defer t.mu.Unlock()
	e.index = len(t.entries)
	t.entries = append(t.entries, e)
	e.first = slot{entry: e, shape: t.all}
	e.slots = append(e.slots, &e.first)
	t.all.size++
	t.joinShapesLocked(e)
	return e
}

// Member returns what the entry stands for. The labels must not be changed.
func (e *Entry) Member() Member {
	e.table.mu.Lock()
	defer e.table.mu.Unlock()
	return e.member
}

// Proxy returns the proxy's name.
func (e *Entry) Proxy() string { return e.member.Proxy }

// Instance returns the incarnation's name.
func (e *Entry) Instance() string { return e.member.Instance }

// Data returns the member's Data.
func (e *Entry) Data() any { return e.member.Data }

// Usage is what an entry has to do.
type Usage struct {
	Leases   int
	Granted  uint64 // leases since it was added
	Failures uint64 // Failed and Broken reports since it was added
}

// Usage returns the entry's counters.
func (e *Entry) Usage() Usage {
	e.table.mu.Lock()
	defer e.table.mu.Unlock()
	return Usage{Leases: e.load, Granted: e.granted, Failures: e.failures}
}

// Leases returns how many leases are held on the entry.
func (e *Entry) Leases() int { return e.Usage().Leases }

// SetFit says whether the entry may be leased. Leases that are held stay.
func (e *Entry) SetFit(fit bool) {
	t := e.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.fit == fit || e.index < 0 || fit && e.draining {
		return
	}
	e.fit = fit
	if fit {
		t.stats.Fit++
	} else {
		t.stats.Fit--
	}
	t.placeLocked(e)
	if fit {
		t.dispatchLocked(e)
	} else {
		t.freeKeyedLocked(e)
	}
}

// Update changes the labels, which must not be changed any more, and the limit. Leases above a lowered limit stay; none is
// granted until the number is below it.
func (e *Entry) Update(labels map[string]string, maxLeases int) {
	t := e.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.index < 0 {
		return
	}
	unbound := maxLeases == 0 && e.max > 0
	e.max = maxLeases
	e.member.MaxLeases = maxLeases
	if !maps.Equal(labels, e.member.Labels) {
		e.member.Labels = labels
		t.leaveShapesLocked(e)
		t.joinShapesLocked(e)
		unbound = true
	}
	t.placeLocked(e)
	t.dispatchLocked(e)
	if unbound {
		t.freeKeyedLocked(e)
	}
}

// Drain ends new leases for good. Those held go on; Hooks.Idle is called when the last is gone, or at once.
func (e *Entry) Drain() {
	t := e.table
	t.mu.Lock()
	if e.draining || e.index < 0 {
		t.mu.Unlock()
		return
	}
	e.draining = true
	if e.fit {
		t.stats.Fit--
		e.fit = false
	}
	t.placeLocked(e)
	t.freeKeyedLocked(e)
	idle := e.load == 0
	t.mu.Unlock()
	if idle {
		t.idle(e)
	}
}

// Remove takes the entry out of the table and revokes what is held on it with cause.
func (e *Entry) Remove(cause error) {
	t := e.table
	t.mu.Lock()
	if e.index < 0 {
		t.mu.Unlock()
		return
	}
	if e.fit {
		t.stats.Fit--
		e.fit = false
	}
	t.placeLocked(e)
	last := len(t.entries) - 1
	t.entries[e.index] = t.entries[last]
	t.entries[e.index].index = e.index
	t.entries[last] = nil
	t.entries = t.entries[:last]
	e.index = -1
	t.leaveShapesLocked(e)
	t.all.size--
	t.forgetCoolingLocked(e)
	t.keys.forget(e)
	revoked := t.revokeAllLocked(e, cause, nil)
	t.freeKeyedLocked(e)
	t.mu.Unlock()
	revoked.finish(cause)
}

// Wanted is a declared proxy.
type Wanted struct {
	Proxy     string
	Labels    map[string]string
	MaxLeases int
}

// SetWanted tells the table which proxies are declared, whether they have an entry yet or not. A request that
// none of them can ever satisfy fails with ErrNoMatch instead of waiting; so do those that wait already.
func (t *Table) SetWanted(wanted []Wanted) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wanted = append(make([]Wanted, 0, len(wanted)), wanted...) // not nil, even when empty
	var hopeless []*waiter
	t.eachWaiterLocked(func(w *waiter) {
		if !t.possibleLocked(&w.req, w.shape) {
			hopeless = append(hopeless, w)
		}
	})
	for _, w := range hopeless {
		t.unqueueLocked(w)
		w.done <- &NoMatchError{Labels: w.req.Labels, Exclude: w.req.Exclude}
	}
}

// Refuse makes every Acquire fail with cause from now on, those that wait included.
func (t *Table) Refuse(cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refused != nil {
		return
	}
	t.refused = cause
	var all []*waiter
	t.eachWaiterLocked(func(w *waiter) { all = append(all, w) })
	for _, w := range all {
		t.unqueueLocked(w)
		w.done <- cause
	}
}

// WaitIdle blocks until no lease is held, or ctx ends; then it returns the context's cause.
func (t *Table) WaitIdle(ctx context.Context) error {
	t.mu.Lock()
	if t.stats.Held == 0 {
		t.mu.Unlock()
		return nil
	}
	empty := make(chan struct{})
	t.onEmpty = append(t.onEmpty, empty)
	t.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// RevokeAll takes every lease back, with the cause that f gives for its member. Call Refuse before, or waiters get what
// is taken back.
func (t *Table) RevokeAll(f func(Member) error) {
	t.mu.Lock()
	entries := slices.Clone(t.entries)
	t.mu.Unlock()
	for _, e := range entries {
		cause := f(e.Member())
		t.mu.Lock()
		revoked := t.revokeAllLocked(e, cause, nil)
		t.mu.Unlock()
		revoked.finish(cause)
	}
}

// Stats returns the counters and gauges now.
func (t *Table) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stats
	s.Entries = len(t.entries)
	return s
}

func (t *Table) idle(e *Entry) {
	if t.hooks.Idle != nil {
		t.hooks.Idle(e)
	}
}
