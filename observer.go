package egress

import (
	"sync"
	"time"
)

// EventKind is what happened.
type EventKind string

// The kinds of event. Others may be added.
const (
	EventPhase       EventKind = "phase"        // a proxy changed its phase; Phase is the new one
	EventCreate      EventKind = "create"       // a create succeeded
	EventCreateError EventKind = "create-error" // a create failed; Err says how
	EventAdopt       EventKind = "adopt"        // an instance from before was recognised
	EventDrain       EventKind = "drain"        // an instance gets no more leases; Message says why
	EventDelete      EventKind = "delete"       // a delete was asked for; Message says why
	EventDeleteError EventKind = "delete-error" // a delete failed; Err says how
	EventGone        EventKind = "gone"         // an instance is gone for sure
	EventFit         EventKind = "fit"          // an instance's probes say that it works
	EventUnfit       EventKind = "unfit"        // an instance's probes say that it does not; Message says why
	EventSpecChanged EventKind = "spec-changed" // a proxy's spec hash changed
	EventSpecError   EventKind = "spec-error"   // a spec can't be made or is refused; Err says why
	EventSuspect     EventKind = "suspect"      // most proxies fail at once; the probe site is suspect
	EventUnsuspect   EventKind = "unsuspect"    // they do no longer
	EventProvider    EventKind = "provider"     // a provider's list failed, or works again; Err is nil then
	EventTarget      EventKind = "target"       // a provider check changed; Message says how
	EventSameEgress  EventKind = "same-egress"  // two proxies have one egress address
	EventLeaseLeaked EventKind = "lease-leaked" // a lease was dropped without Release; Message says where
)

// Event is one thing that happened. It holds no secret.
type Event struct {
	Time     time.Time
	Kind     EventKind
	Proxy    string
	Instance string
	Provider string
	Phase    Phase
	Message  string
	Err      error
}

// events hands events to the observer in order. Whoever emits never waits for it.
type events struct {
	// mu guards the fields below.
	mu     sync.Mutex
	queue  []Event
	more   chan struct{} // holds a token while the queue may hold something
	closed bool
}

// emit queues an event. It never blocks and may be called with the pool's lock held.
func (p *Pool) emit(e Event) {
	if p.config.Observer == nil {
		return
	}
	e.Time = time.Now()
	q := &p.events
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.queue = append(q.queue, e)
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// observe delivers events until the queue is closed and empty.
func (p *Pool) observe() {
	q := &p.events
	for {
		q.mu.Lock()
		batch, closed := q.queue, q.closed
		q.queue = nil
		q.mu.Unlock()
		for _, e := range batch {
			p.config.Observer(e)
		}
		if len(batch) == 0 {
			if closed {
				return
			}
			<-q.more
		}
	}
}

// closeEvents lets observe end once it has delivered what is queued.
func (p *Pool) closeEvents() {
	q := &p.events
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.closed = true
		close(q.more)
	}
}
