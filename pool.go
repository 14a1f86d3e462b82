package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"crawl.example.com/egress/internal/checks"
	"crawl.example.com/egress/internal/leases"
	"crawl.example.com/egress/internal/plan"
	"crawl.example.com/egress/internal/probe"
	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
)

// Pool keeps a fleet of proxies as it was declared and leases them. All methods are safe for concurrent use.
//
// Lock order: mu, then the lease table's own. No provider, observer, secret source or logger is called while mu is
// held.
type Pool struct {
	config Config
	logger *slog.Logger
	table  *leases.Table
	checks *checks.Checks
	events events
	probe  func(context.Context, upstream.Endpoint, probe.Check) probe.Result

	state   atomic.Int32 // one of the states below
	running context.Context
	stop    context.CancelCauseFunc
	tasks   sync.WaitGroup // every goroutine but the observer's
	watcher sync.WaitGroup // the observer's
	kick    chan struct{}  // holds a token while the loop should look again
	reprobe chan struct{}  // holds a token while the prober should look again
	done    chan struct{}  // closed when the pool is closed for good

	// applying holds a token while an Apply is under way, so that two do not interleave.
	applying chan struct{}
	// closing holds a token while a Close is under way.
	closing chan struct{}

	// mu guards everything below and all members, instances and sources.
	mu           sync.Mutex
	members      map[string]*member
	order        []*member // sorted by name
	instances    map[instanceKey]*instance
	creates      map[string]create // under way, by proxy, wanted or not
	sources      []*source
	generations  map[string]int64 // the highest generation seen of each name, wanted or not
	secrets      map[string]secret
	probes       probeQueue
	probing      int
	suspectSince time.Time
	destroying   bool
	closers      []io.Closer // not closed yet
	counters     Stats
	turn         chan struct{} // closed and made anew whenever something may have become ready
	logs         []func()      // to run without the lock
}

// The states of a pool.
const (
	stateNew int32 = iota
	stateStarted
	stateClosing
	stateClosed
)

// member is one wanted proxy.
type member struct {
	decl declaration
	auth Credentials // for the proxy, resolved; the last good ones
	// index is its place in Pool.order.
	index int

	hash      string // of the spec; empty while it can't be made
	specErr   error  // why the spec can't be made, or was refused
	permanent error  // stops creates until the hash changes

	relistAfter  time.Time // creates wait for a list that began after it
	notBefore    time.Time
	lastErr      error
	failures     int32 // in a row
	changed      bool  // the hash has changed since the first one
	refreshBelow int64

	status plan.Status
	since  time.Time
	shown  *instance // what the status is about
}

func (m *member) message() string {
	switch {
	case m.specErr != nil:
		return m.specErr.Error()
	case m.permanent != nil:
		return m.permanent.Error()
	case m.status.Phase != plan.PhaseReady && m.lastErr != nil:
		return m.lastErr.Error()
	}
	return ""
}

// create is a create under way.
type create struct {
	source     *source
	generation int64
}

// instanceKey tells instances of different providers apart.
type instanceKey struct {
	source *source // nil for external
	id     string
}

// instance is one incarnation of a proxy.
type instance struct {
	source *source // nil for external
	id     string  // the provider's, or the proxy's name for external
	member *member // nil when its proxy is not wanted
	index  int     // in the planner's input of the current pass

	proxy, name string
	generation  int64
	hash        string
	hashVersion int
	state       provider.State
	stateSince  time.Time
	created     time.Time
	firstSeen   time.Time
	address     string
	port        int
	host        string
	message     string

	missingSince time.Time
	lookedAt     time.Time
	lastErr      error

	endpoint *upstream.Endpoint // nil while the address is not known; never changed, only replaced
	entry    *leases.Entry      // nil until it is first leased
	forward  *forwarder

	// What probes say.
	brokenAt     time.Time // when a holder said so; zero once a probe has shown otherwise
	streak       int       // of successes when positive, of failures when negative
	failingSince time.Time
	fitSince     time.Time
	lastProbe    ProbeResult
	egressIP     netip.Addr
	probeDue     time.Time
	probeIndex   int // in Pool.probes; -1 when it is not there

	drainingSince time.Time
	unwantedSince time.Time
	deleting      *deletion // nil until it is asked for

	// The flags stand together, because each would take a word by itself.
	unlisted  bool
	evacuate  bool
	busy      bool // a call to the provider is under way
	fit       bool
	everFit   bool
	soft      bool // the last failure may as well be the probe site's
	probing   bool
	dismissed bool
}

func (x *instance) key() instanceKey { return instanceKey{x.source, x.id} }

func (x *instance) broken() bool { return !x.brokenAt.IsZero() }

// deletion is how far the removal of an instance is.
type deletion struct {
	since     time.Time
	tries     int
	notBefore time.Time // the next try
}

// source is one provider.
type source struct {
	provider provider.Provider
	name     string
	warner   provider.Warner
	prober   provider.Prober // nil: over the network
	index    int

	listedAt  time.Time // when the newest good list ended
	listBegan time.Time // when it began
	listErr   error
	unsure    time.Time // when a create last ended in a way that a list has yet to clear up

	listFailures   int       // in a row
	createFailures int       // in a row, of those that are the provider's
	notBefore      time.Time // holds creates back
	full           bool
	denied         bool
	relist         chan struct{} // holds a token while it should list at once
	odd            map[string]bool
	gone           map[string]time.Time // ids that were gone for sure, and when
}

// New checks config and returns a pool that does nothing yet: it starts no goroutine and does no I/O. The error
// holds every fault of the config.
func New(config Config) (*Pool, error) { return newPool(config, probe.Do) }

// newPool is New with the prober of its caller, so that time-bound behaviour can be tested without a network.
func newPool(config Config, prober func(context.Context, upstream.Endpoint, probe.Check) probe.Result) (*Pool, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		config: config, logger: config.Logger.With("pool", config.Name), probe: prober,
		kick: make(chan struct{}, 1), reprobe: make(chan struct{}, 1), done: make(chan struct{}),
		applying: make(chan struct{}, 1), closing: make(chan struct{}, 1),
		members: map[string]*member{}, instances: map[instanceKey]*instance{}, generations: map[string]int64{}, creates: map[string]create{},
		secrets: map[string]secret{}, turn: make(chan struct{}),
	}
	p.events.more = make(chan struct{}, 1)
	p.running, p.stop = context.WithCancelCause(context.Background())
	for i, backend := range config.Providers {
		s := &source{
			provider: backend, name: backend.Name(), index: i, relist: make(chan struct{}, 1),
			odd: map[string]bool{}, gone: map[string]time.Time{},
		}
		s.warner, _ = provider.As[provider.Warner](backend)
		s.prober, _ = provider.As[provider.Prober](backend)
		p.sources = append(p.sources, s)
		if c := provider.Closer(backend); c != nil {
			p.closers = append(p.closers, c)
		}
	}
	p.table = leases.NewTable(leases.Hooks{
		Idle:     func(*leases.Entry) { p.wake() },
		Reported: p.reported,
		Leaked:   p.leaked,
		Expired: func(m leases.Member) error {
			return &RevokedError{Proxy: m.Proxy, Instance: m.Instance, Reason: "ttl"}
		},
	})
	p.checks = checks.New(checks.Config{
		Providers: config.Providers, Interval: *config.CheckInterval, Timeout: config.CheckTimeout, Logger: p.logger,
		Changed: func(t checks.Target) {
			p.emit(Event{Kind: EventTarget, Provider: t.Provider, Message: fmt.Sprintf("%s: %s: %s", t.Target, t.Reason, t.Message)})
		},
	})
	return p, nil
}

// ready returns nil while leases may be granted.
func (p *Pool) ready() error {
	switch p.state.Load() {
	case stateStarted:
		return nil
	case stateNew:
		return ErrNotStarted
	}
	return ErrClosed
}

// wake has the loop look again soon. It never blocks.
func (p *Pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// spawn runs f in a goroutine that Close waits for.
func (p *Pool) spawn(f func()) { p.tasks.Go(f) }

// unlock releases mu and then runs what could not be done under it.
func (p *Pool) unlock() {
	logs := p.logs
	p.logs = nil
	p.mu.Unlock()
	for _, f := range logs {
		f()
	}
}

// later has f run once mu is released.
func (p *Pool) later(f func()) { p.logs = append(p.logs, f) }

// Apply declares the whole set of proxies that is wanted from now on. Proxies that are no longer in it are drained and
// deleted; those whose spec has changed are replaced; others keep their instances. An input with any fault changes
// nothing, and the error holds every fault.
//
// Apply may be called before Start and at any time until Close. It reads the secrets that the proxies refer to, for
// which it blocks at most until ctx ends; a secret that can't be read is no error but the reason of its proxies'
// phase. It does not wait for the instances.
func (p *Pool) Apply(ctx context.Context, proxies ...Proxy) error {
	if ctx == nil {
		return errors.New("egress: the context is nil, want context.Background() at least")
	}
	select {
	case p.applying <- struct{}{}:
		defer func() { <-p.applying }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := p.state.Load(); err >= stateClosing {
		return ErrClosed
	}
	declarations, err := p.config.declare(proxies)
	err = errors.Join(err, p.checkImmutable(declarations))
	values := p.readSecrets(ctx, declarations)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	made := make([]madeSpec, len(declarations))
	f := faults{}
	for i := range declarations {
		if declarations[i].faulty {
			continue
		}
		made[i] = p.makeSpec(&declarations[i], values)
		if made[i].refused {
			f.add("egress: proxy %q: %w", declarations[i].Name, made[i].err)
		}
	}
	if err := errors.Join(err, f.err()); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.unlock()
	if p.destroying {
		return ErrClosed
	}
	p.adoptDeclarationsLocked(declarations, values, made)
	p.wake()
	return nil
}

// checkImmutable refuses a changed Mode or Provider of a name that is declared already.
func (p *Pool) checkImmutable(declarations []declaration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := faults{}
	for i := range declarations {
		d := &declarations[i]
		m := p.members[d.Name]
		if m == nil {
			continue
		}
		f.prefix = fmt.Sprintf("egress: proxy %q: ", d.Name)
		if m.decl.Mode != d.Mode {
			f.add("Mode is %s and was %s, want it unchanged; use another name", d.Mode, m.decl.Mode)
		} else if m.decl.Provider != d.Provider {
			f.add("Provider is %q and was %q, want it unchanged; use another name", d.Provider, m.decl.Provider)
		}
	}
	return f.err()
}

// adoptDeclarationsLocked makes declarations the wanted set.
func (p *Pool) adoptDeclarationsLocked(declarations []declaration, values map[string]secret, made []madeSpec) {
	now := time.Now()
	p.secrets = values
	members := make(map[string]*member, len(declarations))
	order := make([]*member, 0, len(declarations))
	for i := range declarations {
		d := &declarations[i]
		m := p.members[d.Name]
		if m == nil {
			m = &member{since: now, status: plan.Status{Phase: plan.PhasePending, Why: plan.WhyMissing, Instance: -1}}
		}
		m.decl = *d
		p.setSpecLocked(m, made[i])
		members[d.Name] = m
		order = append(order, m)
	}
	slices.SortFunc(order, func(a, b *member) int { return strings.Compare(a.decl.Name, b.decl.Name) })
	for i, m := range order {
		m.index = i
	}
	p.members, p.order = members, order
	for _, x := range p.instances {
		m := members[x.proxy]
		switch {
		case m != nil && (x.source == nil) == (m.decl.Mode == External):
			x.member, x.unwantedSince = m, time.Time{}
		case x.member != nil:
			x.member, x.unwantedSince, x.dismissed = nil, now, true
		}
	}
	p.externalsLocked(now)
	for _, x := range p.instances {
		p.refreshEndpointLocked(x)
	}
	p.forgetGenerationsLocked()
	wanted := make([]leases.Wanted, len(order))
	for i, m := range order {
		wanted[i] = leases.Wanted{Proxy: m.decl.Name, Labels: m.decl.Labels, MaxLeases: m.decl.maxLeases}
	}
	p.table.SetWanted(wanted)
}

// manyGenerations is how many names are remembered beyond those in use. A crawler that names its proxies by the day
// would fill the memory with them otherwise.
const manyGenerations = 10_000

// forgetGenerationsLocked forgets the generations of names that nothing is known of any more, once there are many.
func (p *Pool) forgetGenerationsLocked() {
	if len(p.generations) <= len(p.members)+len(p.instances)+manyGenerations {
		return
	}
	used := map[string]bool{}
	for _, x := range p.instances {
		used[x.proxy] = true
	}
	for name := range p.generations {
		if p.members[name] == nil && !used[name] {
			delete(p.generations, name)
		}
	}
}

// Start begins to look after the fleet. It returns at once; ctx only has to be alive then. Use [Pool.WaitReady] to
// wait for proxies. What exists already and carries the pool's name is adopted by the first list of each provider,
// before which nothing is created there; a provider that does not answer holds up nobody else. The errors are
// [ErrStarted] and [ErrClosed].
func (p *Pool) Start(ctx context.Context) error {
	if ctx == nil {
		return errors.New("egress: the context is nil, want context.Background() at least")
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.state.CompareAndSwap(stateNew, stateStarted) {
		if p.state.Load() == stateStarted {
			return ErrStarted
		}
		return ErrClosed
	}
	if p.config.Observer != nil {
		p.watcher.Go(p.observe)
	}
	for _, s := range p.sources {
		p.spawn(func() { p.listForever(s) })
	}
	p.spawn(p.reconcileForever)
	p.spawn(p.probeForever)
	p.spawn(func() { p.checks.Run(p.running) })
	p.spawn(p.refreshSecretsForever)
	return nil
}

// WaitReady blocks until at least n proxies may be leased, or ctx ends. It fails at once when fewer are declared, and
// with [ErrClosed] when the pool is closed.
func (p *Pool) WaitReady(ctx context.Context, n int) error {
	if ctx == nil {
		return errors.New("egress: the context is nil, want context.Background() at least")
	}
	for {
		p.mu.Lock()
		ready, changed, wanted := 0, p.turn, len(p.order)
		for _, m := range p.order {
			if m.status.Phase == plan.PhaseReady {
				ready++
			}
		}
		p.mu.Unlock()
		switch {
		case p.state.Load() >= stateClosing:
			return ErrClosed
		case p.state.Load() == stateNew:
			return ErrNotStarted
		case ready >= n:
			return nil
		case wanted < n:
			return fmt.Errorf("egress: WaitReady: %d proxies are declared, want %d of them ready", wanted, n)
		}
		select {
		case <-changed:
		case <-p.running.Done():
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("egress: WaitReady: %d of %d proxies are ready, want %d: %w", ready, wanted, n, context.Cause(ctx))
		}
	}
}

// Refresh has the instances of the named managed proxies replaced, in the way a changed spec has them replaced. It
// does not wait. A name that is not declared, or is external, is an error that matches [ErrUnknownProxy], and then
// nothing is replaced.
func (p *Pool) Refresh(names ...string) error {
	p.mu.Lock()
	defer p.unlock()
	f := faults{}
	for _, name := range names {
		if m := p.members[name]; m == nil || m.decl.Mode == External {
			f.add("%w: %q is not a managed proxy of this pool", ErrUnknownProxy, name)
		}
	}
	if err := f.err(); err != nil {
		return err
	}
	for _, name := range names {
		m := p.members[name]
		m.refreshBelow = p.generations[name] + 1
		m.permanent, m.notBefore, m.failures = nil, time.Time{}, 0
	}
	p.wake()
	return nil
}

// Done returns a channel that is closed when Close has finished.
func (p *Pool) Done() <-chan struct{} { return p.done }

// closeGrace is what Close gives its goroutines to end after its context has.
const closeGrace = 2 * time.Second

// Close ends the pool: no new leases, then it waits for those held until ctx ends and revokes the rest, with
// [ErrClosed] in the cause. With Config.DestroyOnClose it then deletes all instances. It ends every goroutine and
// closes the providers. It may be called at any time, before Start too, by several callers, and again when it has
// failed: it fails with the context's cause when ctx ended before everything was done.
func (p *Pool) Close(ctx context.Context) error {
	if ctx == nil {
		ctx = context.Background()
	}
	select {
	case p.closing <- struct{}{}:
		defer func() { <-p.closing }()
	case <-p.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if p.state.Load() == stateClosed {
		return nil
	}
	p.mu.Lock()
	started := !p.state.CompareAndSwap(stateNew, stateClosing)
	p.state.Store(stateClosing)
	p.mu.Unlock()
	p.table.Refuse(ErrClosed)
	if p.table.WaitIdle(ctx) != nil {
		held := p.table.Stats().Held
		p.logger.Warn("leases are revoked because the pool is closed", "leases", held)
		p.table.RevokeAll(func(m leases.Member) error {
			return &RevokedError{Proxy: m.Proxy, Instance: m.Instance, Reason: "closed", Err: ErrClosed}
		})
	}
	if p.config.DestroyOnClose && started {
		if err := p.destroy(ctx); err != nil {
			return err
		}
	}
	p.stop(ErrClosed)
	if err := wait(ctx, &p.tasks); err != nil {
		return fmt.Errorf("egress: Close: provider calls are still under way, call it again: %w", err)
	}
	p.removeEntries()
	p.closeEvents()
	if err := wait(ctx, &p.watcher); err != nil {
		return fmt.Errorf("egress: Close: the observer has not returned, call it again: %w", err)
	}
	p.table.Close()
	err := p.closeProviders()
	p.state.Store(stateClosed)
	close(p.done)
	return err
}

// destroy waits until every instance is gone.
func (p *Pool) destroy(ctx context.Context) error {
	p.mu.Lock()
	if !p.destroying {
		p.destroying = true
		p.adoptDeclarationsLocked(nil, map[string]secret{}, nil)
	}
	p.mu.Unlock()
	p.wake()
	for {
		p.mu.Lock()
		left, changed := p.leftLocked(), p.turn
		p.mu.Unlock()
		if left == "" {
			return nil
		}
		select {
		case <-changed:
		case <-time.After(time.Second):
		case <-ctx.Done():
			return fmt.Errorf("egress: Close: %s, call it again: %w", left, context.Cause(ctx))
		}
	}
}

// leftLocked says what keeps a pool that destroys its instances from being done; empty when nothing does.
func (p *Pool) leftLocked() string {
	if n := len(p.instances); n > 0 {
		return fmt.Sprintf("%d instances are not gone yet", n)
	}
	if n := len(p.creates); n > 0 {
		return fmt.Sprintf("%d creates are under way", n)
	}
	for _, s := range p.sources {
		if s.listedAt.IsZero() {
			return fmt.Sprintf("provider %s has not been listed yet", s.name)
		}
		// A list may lag, so the first one after a create of unknown outcome is no proof.
		if sure := s.unsure.Add(p.config.OrphanGrace); !s.unsure.IsZero() && !s.listBegan.After(sure) {
			if time.Now().After(sure) {
				s.relistNow()
			}
			return fmt.Sprintf("provider %s has to be listed again after a create of unknown outcome", s.name)
		}
	}
	return ""
}

// wait waits for a group until ctx ends and closeGrace after it.
func wait(ctx context.Context, group *sync.WaitGroup) error {
	joined := make(chan struct{})
	go func() { group.Wait(); close(joined) }()
	select {
	case <-joined:
		return nil
	case <-ctx.Done():
	}
	grace := time.NewTimer(closeGrace)
	defer grace.Stop()
	select {
	case <-joined:
		return nil
	case <-grace.C:
		return context.Cause(ctx)
	}
}

// removeEntries ends all connections.
func (p *Pool) removeEntries() {
	p.mu.Lock()
	defer p.unlock()
	for _, x := range p.instances {
		p.unleaseLocked(x, "closed", ErrClosed)
	}
}

// closeProviders closes what has not been closed yet.
func (p *Pool) closeProviders() error {
	var errs []error
	for _, c := range p.closers {
		if err := c.Close(); err != nil {
			errs = append(errs, err)
		}
	}
	p.closers = nil
	return errors.Join(errs...)
}
