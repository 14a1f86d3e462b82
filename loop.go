package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"crawl.example.com/egress/internal/leases"
	"crawl.example.com/egress/internal/plan"
	"crawl.example.com/egress/provider"
)

// passGap is the least time between two passes of the loop, so that a burst of news costs one pass; passGapEach is
// added for every instance, so that a large fleet does not spend its time on planning.
const (
	passGap     = 10 * time.Millisecond
	passGapEach = 20 * time.Microsecond
)

// reconcileForever brings what exists closer to what is wanted, pass by pass.
func (p *Pool) reconcileForever() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-p.running.Done():
			return
		case <-p.kick:
		case <-timer.C:
		}
		wake, fleet := p.pass(time.Now())
		select {
		case <-p.running.Done():
			return
		case <-time.After(passGap + time.Duration(fleet)*passGapEach):
		}
		if wake.IsZero() {
			wake = time.Now().Add(time.Minute)
		}
		timer.Reset(max(0, time.Until(wake)))
	}
}

// pass plans once and starts what was decided. It returns when to look again at the latest, and the number of
// instances.
func (p *Pool) pass(now time.Time) (time.Time, int) {
	p.mu.Lock()
	defer p.unlock()
	in, list := p.inputLocked(now)
	out := plan.Next(in)
	p.noteSuspectLocked(out.SuspectSince)
	for i, x := range list {
		p.serveLocked(x, out.Serve[i])
	}
	for _, a := range out.Actions {
		if a.Kind == plan.Create {
			p.createLocked(p.order[a.Proxy], a.Generation)
			continue
		}
		x := list[a.Instance]
		switch a.Kind {
		case plan.Look:
			p.lookLocked(x, now)
		case plan.Drain:
			p.drainLocked(x, string(a.Why), now)
		case plan.Delete:
			p.deleteLocked(x, a.Why, now)
		case plan.Revoke:
			p.unleaseLocked(x, "drain deadline", nil)
		}
	}
	for i, m := range p.order {
		p.noteStatusLocked(m, out.Status[i], list, now)
	}
	close(p.turn)
	p.turn = make(chan struct{})
	return out.Wake, len(list)
}

// freshFor is how many list intervals a provider's list stays the truth.
const freshFor = 3

// inputLocked describes the fleet to the planner. list gives the instances their numbers.
func (p *Pool) inputLocked(now time.Time) (plan.Input, []*instance) {
	c := &p.config
	in := plan.Input{
		Now: now, SuspectSince: p.suspectSince,
		Proxies:   make([]plan.Proxy, len(p.order)),
		Instances: make([]plan.Instance, 0, len(p.instances)),
		Providers: make([]plan.Provider, len(p.sources)),
		Limits: plan.Limits{
			Surge: *c.Surge, MaxUnavailable: *c.MaxUnavailable, MaxParallel: c.MaxParallel,
			DrainDeadline: c.DrainDeadline, BootTimeout: c.BootTimeout, UnhealthyGrace: c.UnhealthyGrace,
			StoppedGrace: c.StoppedGrace, LostGrace: c.LostGrace, OrphanGrace: c.OrphanGrace,
			SuspectDelay: c.SuspectDelay, SuspectWindow: c.UnhealthyGrace,
		},
	}
	for i, s := range p.sources {
		fresh := !s.listedAt.IsZero() && now.Sub(s.listedAt) < freshFor*c.ListInterval+c.ListTimeout && !s.broken()
		in.Providers[i] = plan.Provider{Fresh: fresh, NotBefore: s.notBefore, Full: s.full, Denied: s.denied}
	}
	for i, m := range p.order {
		want := plan.Proxy{
			Name: m.decl.Name, Provider: m.decl.provider, SpecReady: m.hash != "", Hash: m.hash,
			HashVersion: provider.HashVersion, SpecChanged: m.changed, MaxAge: m.decl.MaxAge,
			RefreshBelow: m.refreshBelow, LastGeneration: p.generations[m.decl.Name], NotBefore: m.notBefore,
			Permanent: m.permanent != nil,
		}
		if want.Provider >= 0 && !m.relistAfter.IsZero() && !p.sources[want.Provider].listBegan.After(m.relistAfter) {
			want.NotBefore = now.Add(p.config.ListInterval) // the outcome of the last create is not known yet
		}
		if c, ok := p.creates[m.decl.Name]; ok && want.Provider == c.source.index {
			want.Creating = true
		}
		in.Proxies[i] = want
	}
	for name, c := range p.creates {
		if m := p.members[name]; m == nil || m.decl.provider != c.source.index {
			in.Providers[c.source.index].Creating++
		}
	}
	list := make([]*instance, 0, len(p.instances))
	for _, x := range p.instances {
		list = append(list, x)
	}
	// The order of a map is random and the planner's ties must not be.
	slices.SortFunc(list, func(a, b *instance) int {
		return cmp.Or(cmp.Compare(a.proxy, b.proxy), cmp.Compare(a.generation, b.generation), cmp.Compare(a.id, b.id))
	})
	for i, x := range list {
		x.index = i
		in.Instances = append(in.Instances, x.forPlan())
	}
	return in, list
}

func (x *instance) forPlan() plan.Instance {
	v := plan.Instance{
		Proxy: -1, Provider: -1, ID: x.id, Generation: x.generation, Hash: x.hash, HashVersion: x.hashVersion,
		State: x.state, StateSince: x.stateSince, Created: x.created, FirstSeen: x.firstSeen,
		Addressed: x.address != "", Unlisted: x.unlisted, MissingSince: x.missingSince, LookedAt: x.lookedAt,
		Fit: x.fit, EverFit: x.everFit, FailingSince: x.failingSince, Soft: x.soft, Broken: x.broken(), Evacuate: x.evacuate,
		DrainingSince: x.drainingSince,
		UnwantedSince: x.unwantedSince, Dismissed: x.dismissed, Busy: x.busy,
	}
	if x.deleting != nil {
		v.Deleting, v.DeleteNotBefore = true, x.deleting.notBefore
	}
	if x.member != nil {
		v.Proxy = x.member.index
	}
	if x.source != nil {
		v.Provider = x.source.index
	}
	if x.entry != nil {
		v.Leases = x.entry.Leases()
	}
	return v
}

// serveLocked puts x into the lease table or takes it out of service there.
func (p *Pool) serveLocked(x *instance, serve bool) {
	if serve && x.member != nil && x.entry == nil {
		d := &x.member.decl
		x.forward = newForwarder(x)
		x.entry = p.table.Add(leases.Member{
			Proxy: x.proxy, Instance: x.name, Labels: d.Labels, MaxLeases: d.maxLeases, Data: x.forward,
		})
	}
	if x.entry != nil {
		x.entry.SetFit(serve)
	}
}

// unleaseLocked takes x out of the lease table and revokes what is held on it.
func (p *Pool) unleaseLocked(x *instance, reason string, cause error) {
	if x.entry == nil {
		return
	}
	entry, forward := x.entry, x.forward
	x.entry, x.forward = nil, nil
	p.later(func() {
		entry.Remove(&RevokedError{Proxy: entry.Proxy(), Instance: entry.Instance(), Reason: reason, Err: cause})
		forward.close()
	})
}

func (p *Pool) drainLocked(x *instance, why string, now time.Time) {
	x.drainingSince = now
	if x.entry != nil {
		x.entry.Drain()
	}
	p.emit(Event{Kind: EventDrain, Proxy: x.proxy, Instance: x.name, Message: why})
	p.later(func() { p.logger.Info("draining", "proxy", x.proxy, "instance", x.name, "why", why) })
}

// noteSuspectLocked says once that most proxies fail at once, and once that they do no longer.
func (p *Pool) noteSuspectLocked(since time.Time) {
	was := !p.suspectSince.IsZero()
	p.suspectSince = since
	switch is := !since.IsZero(); {
	case is && !was:
		p.emit(Event{Kind: EventSuspect, Message: "most proxies fail at once"})
		p.later(func() {
			p.logger.Error("most proxies fail at once; the probe site or our own network is suspect, nothing unhealthy is replaced")
		})
	case was && !is:
		// Those that have not been probed again yet get their whole grace anew.
		for _, x := range p.instances {
			if !x.failingSince.IsZero() {
				x.failingSince = time.Now()
				p.probeNowLocked(x)
			}
		}
		p.emit(Event{Kind: EventUnsuspect})
		p.later(func() { p.logger.Info("most proxies work again") })
	}
}

// noteStatusLocked keeps m's status and says when its phase has changed.
func (p *Pool) noteStatusLocked(m *member, s plan.Status, list []*instance, now time.Time) {
	m.shown = nil
	if s.Instance >= 0 {
		m.shown = list[s.Instance]
	}
	if s.Phase != m.status.Phase {
		m.since = now
		name, was, why := m.decl.Name, m.status.Phase, s.Why
		p.emit(Event{Kind: EventPhase, Proxy: name, Phase: Phase(s.Phase), Message: string(why)})
		p.later(func() {
			p.logger.Info("phase changed", "proxy", name, "phase", string(s.Phase), "was", string(was), "why", string(why))
		})
		if s.Phase == plan.PhaseFailed {
			err := m.permanent
			p.later(func() { p.logger.Error("proxy has failed and needs a new spec", "proxy", name, "error", err) })
		}
	}
	m.status = s
}

// externalsLocked keeps the one instance that each external proxy has.
func (p *Pool) externalsLocked(now time.Time) {
	of := map[string][]*instance{} // by proxy, so that many of them are not looked through for each
	for _, x := range p.instances {
		if x.source == nil {
			of[x.proxy] = append(of[x.proxy], x)
		}
	}
	for _, m := range p.order {
		if m.decl.Mode == External {
			p.externalLocked(m, of[m.decl.Name], now)
		}
	}
}

// externalLocked keeps m's one instance. A changed endpoint is a new instance; the old one drains. known are those of
// its name, m's or not.
func (p *Pool) externalLocked(m *member, known []*instance, now time.Time) {
	d := &m.decl
	port := d.Port
	endpoint := endpointOf(d, m.auth, &instance{address: d.host, port: port})
	for _, x := range known {
		if x.member != m || !x.drainingSince.IsZero() {
			continue
		}
		if sameEndpoint(*x.endpoint, endpoint) {
			return
		}
		p.drainLocked(x, string(plan.WhyDrift), now)
	}
	for _, x := range known {
		// Two entries of one server would each grant its whole limit.
		if x.endpoint.Addr() == endpoint.Addr() {
			p.unleaseLocked(x, "address or credentials changed", nil)
		}
	}
	p.generations[d.Name]++
	g := p.generations[d.Name]
	name := provider.InstanceName(p.config.Name, d.Name, g)
	x := &instance{
		id: name, member: m, proxy: d.Name, name: name, generation: g, hashVersion: provider.HashVersion,
		state: provider.StateRunning, stateSince: now, created: now, firstSeen: now,
		address: d.host, port: port, endpoint: &endpoint, probeIndex: -1,
	}
	p.instances[x.key()] = x
	p.probeNowLocked(x)
}

// backoff returns a random wait of up to BackoffMin doubled with every failure, at most BackoffMax. It is never
// under a tenth of that, so that a lucky draw does not make a hot loop.
func (p *Pool) backoff(failures int) time.Duration {
	limit := p.config.BackoffMin
	for i := 1; i < failures && limit < p.config.BackoffMax; i++ {
		limit *= 2
	}
	limit = min(limit, p.config.BackoffMax)
	return limit/10 + rand.N(max(1, limit-limit/10))
}

// recovered turns a panic of a provider into an error that names it, so that one bad backend does not end the crawler.
func (p *Pool) recovered(s *source, op string, err *error) {
	v := recover()
	if v == nil {
		return
	}
	p.logger.Error("provider panicked", "provider", s.name, "op", op, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
	*err = &provider.Error{Provider: s.name, Op: op, Kind: provider.ErrPermanent, Err: fmt.Errorf("panic: %v", v)}
}

// call runs one call of a provider with a deadline of its own. Its context ends when the pool is closed.
func (p *Pool) call(s *source, op string, timeout time.Duration, f func(ctx context.Context) error) (err error) {
	ctx, cancel := context.WithTimeoutCause(p.running, timeout, fmt.Errorf("egress: %s took longer than %s: %w", op, timeout, context.DeadlineExceeded))
	defer cancel()
	defer p.recovered(s, op, &err)
	p.mu.Lock()
	p.counters.ProviderCalls++
	p.mu.Unlock()
	return f(ctx)
}

// kindOf classifies an error of a call that may have changed something.
func kindOf(err error) error { return cmpErr(provider.Kind(err), provider.ErrOutcomeUnknown) }

func cmpErr(err, def error) error {
	if err != nil {
		return err
	}
	return def
}

// closing reports whether err only says that the pool is being closed.
func (p *Pool) closingDown(err error) bool {
	return err != nil && p.running.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, ErrClosed))
}
