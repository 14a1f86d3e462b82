package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"crawl.example.com/egress/internal/plan"
	"crawl.example.com/egress/provider"
)

// listForever lists one provider again and again. Nothing else lists it, so a list that hangs costs this provider
// alone.
func (p *Pool) listForever(s *source) {
	for {
		wait := p.list(s)
		timer := time.NewTimer(wait)
		select {
		case <-p.running.Done():
			timer.Stop()
			return
		case <-s.relist:
			timer.Stop()
		case <-timer.C:
			continue
		}
		// A wish to list at once may follow others closely.
		select {
		case <-p.running.Done():
			return
		case <-time.After(min(passGap, wait)):
		}
	}
}

// relistLocked has a provider listed at once.
func (s *source) relistNow() {
	select {
	case s.relist <- struct{}{}:
	default:
	}
}

// broken reports whether the newest list failed.
func (s *source) broken() bool { return s.listErr != nil }

// list lists once and returns when to list again.
func (p *Pool) list(s *source) time.Duration {
	began := time.Now()
	var found []provider.Instance
	err := p.call(s, "list", p.config.ListTimeout, func(ctx context.Context) (err error) {
		found, err = s.provider.List(ctx, p.config.Name)
		return err
	})
	if p.running.Err() != nil {
		return p.config.ListInterval
	}
	p.mu.Lock()
	defer p.unlock()
	defer p.wake()
	partial, isPartial := errors.AsType[*provider.PartialError](err)
	if err != nil && !isPartial {
		s.listFailures++
		if s.listErr == nil {
			p.emit(Event{Kind: EventProvider, Provider: s.name, Err: err})
			p.later(func() { p.logger.Error("provider can't be listed", "provider", s.name, "error", err) })
		}
		s.listErr = err
		wait := p.backoff(s.listFailures)
		if errors.Is(err, provider.ErrDenied) {
			wait = max(wait, p.config.ListInterval)
		}
		return max(wait, retryAfter(err))
	}
	if s.listErr != nil || s.listedAt.IsZero() && !s.listBegan.IsZero() {
		p.emit(Event{Kind: EventProvider, Provider: s.name})
		p.later(func() { p.logger.Info("provider can be listed again", "provider", s.name) })
	}
	s.listErr, s.listFailures = nil, 0
	s.listedAt, s.listBegan = time.Now(), began
	p.takeListLocked(s, found, partial, began)
	return p.config.ListInterval
}

// retryAfter returns how long a provider asked to be left alone.
func retryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*provider.Error](err); ok {
		return e.RetryAfter
	}
	return 0
}

// takeListLocked compares what a list found with what is known.
func (p *Pool) takeListLocked(s *source, found []provider.Instance, partial *provider.PartialError, began time.Time) {
	now := time.Now()
	seen := make(map[string]bool, len(found))
	for i := range found {
		f := &found[i]
		switch {
		case f.ID == "":
			p.oddLocked(s, "list holds an instance without an id", f.Name)
			continue
		case seen[f.ID]:
			p.oddLocked(s, "list holds an instance twice", f.ID)
			continue
		case f.Mark.Owner != p.config.Name:
			p.oddLocked(s, "list holds an instance of another owner", f.ID)
			continue
		case f.Mark.Proxy == "":
			p.oddLocked(s, "list holds an instance without a proxy", f.ID)
			continue
		}
		seen[f.ID] = true
		key := instanceKey{s, f.ID}
		x := p.instances[key]
		if x == nil {
			if at, ok := s.gone[f.ID]; ok && now.Sub(at) < goneFor {
				continue // a list that lags still has what is gone for sure
			}
			x = p.adoptLocked(s, f, now)
			if c, ok := p.creates[x.proxy]; !ok || c.generation != x.generation {
				p.counters.Adopted++
				p.emit(Event{Kind: EventAdopt, Proxy: x.proxy, Instance: x.name, Provider: s.name})
				p.later(func() { p.logger.Info("instance adopted", "proxy", x.proxy, "instance", x.name, "provider", s.name) })
			}
		}
		x.unlisted, x.missingSince = false, time.Time{}
		p.observeLocked(x, f, now)
	}
	for id, at := range s.gone {
		if now.Sub(at) >= goneFor {
			delete(s.gone, id)
		}
	}
	for _, x := range p.instances {
		if x.source != s || seen[x.id] || !x.firstSeen.Before(began) {
			continue
		}
		if partial != nil && (x.host == "" || partial.Missing(x.host)) {
			if x.missingSince.IsZero() {
				x.missingSince = now
				p.later(func() {
					p.logger.Warn("instance's host does not answer", "proxy", x.proxy, "instance", x.name, "host", x.host)
				})
			}
			continue
		}
		x.missingSince = time.Time{}
		x.unlisted = true
	}
}

// goneFor is how long an id that was gone for sure is not believed to be back. Lists lag; Scrapoxy's peers were seen
// 25 s behind, and this is many times that.
const goneFor = 15 * time.Minute

// oddLocked logs once what a provider should not do.
func (p *Pool) oddLocked(s *source, what, id string) {
	if key := what + id; !s.odd[key] && len(s.odd) < 1000 {
		s.odd[key] = true
		p.later(func() { p.logger.Warn(what, "provider", s.name, "id", id) })
	}
}

// adoptLocked starts to know an instance.
func (p *Pool) adoptLocked(s *source, f *provider.Instance, now time.Time) *instance {
	x := &instance{
		source: s, id: f.ID, proxy: f.Mark.Proxy, name: f.Name, generation: f.Mark.Generation,
		hash: f.Mark.Hash, hashVersion: f.Mark.HashVersion, created: f.Created, firstSeen: now, stateSince: now,
		probeIndex: -1,
	}
	if x.name == "" {
		x.name = provider.InstanceName(f.Mark.Owner, f.Mark.Proxy, f.Mark.Generation)
	}
	if x.created.IsZero() {
		x.created = now
	}
	if m := p.members[x.proxy]; m != nil && m.decl.Mode == Managed {
		x.member = m
	} else {
		x.unwantedSince = now
	}
	p.generations[x.proxy] = max(p.generations[x.proxy], x.generation)
	p.instances[x.key()] = x
	return x
}

// observeLocked takes over what a provider says about an instance.
func (p *Pool) observeLocked(x *instance, f *provider.Instance, now time.Time) {
	if f.State != x.state {
		x.state, x.stateSince = f.State, now
	}
	x.host, x.message, x.evacuate = f.Host, f.Message, f.Evacuate
	if f.Address != "" && (f.Address != x.address || f.Port != x.port) {
		x.address, x.port = f.Address, f.Port
		p.refreshEndpointLocked(x)
	}
	if x.state == provider.StateRunning && x.address != "" && x.probeIndex < 0 && !x.probing && x.deleting == nil {
		p.probeNowLocked(x)
	}
}

// createLocked starts a create.
func (p *Pool) createLocked(m *member, generation int64) {
	s := p.sources[m.decl.provider]
	spec, _, err := m.decl.spec(p.secrets)
	if err != nil {
		return // it was readable a moment ago; the next pass sees what changed
	}
	name := m.decl.Name
	if _, under := p.creates[name]; under {
		return
	}
	p.creates[name] = create{s, generation}
	req := provider.CreateRequest{
		Name: provider.InstanceName(p.config.Name, name, generation),
		Mark: provider.Mark{
			Owner: p.config.Name, Proxy: name, Generation: generation, HashVersion: provider.HashVersion, Hash: m.hash,
		},
		Spec: spec,
	}
	req.Spec.Options = maps.Clone(spec.Options)
	p.spawn(func() {
		began := time.Now()
		var made provider.Instance
		err := p.call(s, "create", p.config.CreateTimeout, func(ctx context.Context) (err error) {
			made, err = s.provider.Create(ctx, req)
			return err
		})
		if err == nil && (made.ID == "" || made.Mark != req.Mark) {
			err = &provider.Error{Provider: s.name, Op: "create", Instance: req.Name, Kind: provider.ErrOutcomeUnknown,
				Err: errors.New("the provider returned an instance without an id or with another mark")}
		}
		p.created(s, name, req, made, err, began)
	})
}

// created takes the outcome of a create.
func (p *Pool) created(s *source, name string, req provider.CreateRequest, made provider.Instance, err error, began time.Time) {
	p.mu.Lock()
	defer p.unlock()
	defer p.wake()
	delete(p.creates, name)
	m := p.members[name]
	if m != nil && m.decl.provider != s.index {
		m = nil
	}
	now := time.Now()
	if err == nil {
		s.full, s.denied, s.notBefore, s.createFailures = false, false, time.Time{}, 0
		p.counters.Created++
		key := instanceKey{s, made.ID}
		x := p.instances[key]
		if x == nil {
			x = p.adoptLocked(s, &made, now)
		}
		if x.member == nil {
			x.dismissed = true // removed while it was being made
		}
		p.observeLocked(x, &made, now)
		p.emit(Event{Kind: EventCreate, Proxy: name, Instance: x.name, Provider: s.name, Message: made.Message})
		p.later(func() {
			p.logger.Info("instance created", "proxy", name, "instance", x.name, "provider", s.name, "host", made.Host, "took", now.Sub(began))
		})
		return
	}
	switch kind := kindOf(err); {
	case errors.Is(kind, provider.ErrAlreadyExists), errors.Is(kind, provider.ErrOutcomeUnknown):
		s.unsure = now
		s.relistNow()
		if m != nil {
			m.relistAfter = now
		}
	}
	if p.closingDown(err) {
		return
	}
	p.counters.CreateErrors++
	p.emit(Event{Kind: EventCreateError, Proxy: name, Instance: req.Name, Provider: s.name, Err: err})
	p.later(func() {
		p.logger.Error("create failed", "proxy", name, "instance", req.Name, "provider", s.name, "error", err)
	})
	if m == nil || m.hash != req.Mark.Hash {
		s.relistNow()
		return
	}
	m.lastErr = err
	m.failures++
	wait := max(p.backoff(int(m.failures)), retryAfter(err))
	switch kind := kindOf(err); {
	case errors.Is(kind, provider.ErrPermanent):
		m.permanent = err
	case errors.Is(kind, provider.ErrNoCapacity):
		// The provider waits, not the proxy: who gets the next free place is the planner's choice.
		m.failures--
		wait = 0
		s.createFailures++
		s.full = true
		s.notBefore = now.Add(max(p.backoff(s.createFailures), retryAfter(err)))
	case errors.Is(kind, provider.ErrDenied):
		s.createFailures++
		s.denied = true
		s.notBefore = now.Add(max(p.backoff(s.createFailures), p.config.ListInterval, retryAfter(err)))
	}
	m.notBefore = now.Add(wait)
}

// lookLocked asks the provider for one instance.
func (p *Pool) lookLocked(x *instance, now time.Time) {
	x.busy, x.lookedAt = true, now
	s, id := x.source, x.id
	p.spawn(func() {
		var found provider.Instance
		err := p.call(s, "get", p.config.CallTimeout, func(ctx context.Context) (err error) {
			found, err = s.provider.Get(ctx, id)
			return err
		})
		p.mu.Lock()
		defer p.unlock()
		x.busy, x.lookedAt = false, time.Now()
		switch {
		case err == nil:
			x.lastErr = nil
			if m := found.Mark; m.Owner != p.config.Name || m.Proxy != x.proxy || m.Generation != x.generation {
				p.goneLocked(x, "its id is another instance's now")
				break
			}
			p.observeLocked(x, &found, time.Now())
		case errors.Is(err, provider.ErrNotFound):
			p.goneLocked(x, "the provider does not have it any more")
		case p.closingDown(err):
			return
		default:
			x.lastErr = err
		}
		p.wake()
	})
}

// deleteLocked revokes what is held on x and asks for its removal.
func (p *Pool) deleteLocked(x *instance, why plan.Why, now time.Time) {
	first := x.deleting == nil
	if first {
		x.deleting = &deletion{since: now}
		p.unprobeLocked(x)
		if why == plan.WhyReplaced || why == plan.WhyDrift || why == plan.WhyAge || why == plan.WhyRefresh || why == plan.WhyEvacuate {
			p.counters.Replaced++
		}
		if m := x.member; m != nil && (why == plan.WhyBootTimeout || why == plan.WhyFailed || why == plan.WhyUnhealthy) {
			// What did not come up may not come up the next time either.
			m.failures++
			m.notBefore = now.Add(p.backoff(int(m.failures)))
			m.lastErr = fmt.Errorf("egress: instance %s was given up: %s", x.name, why)
		}
		p.emit(Event{Kind: EventDelete, Proxy: x.proxy, Instance: x.name, Message: string(why)})
		p.later(func() { p.logger.Info("deleting", "proxy", x.proxy, "instance", x.name, "why", string(why)) })
	}
	reason := string(why)
	if !x.drainingSince.IsZero() {
		reason = "drain deadline"
	}
	p.unleaseLocked(x, reason, nil)
	if x.source == nil {
		p.forgetLocked(x)
		return
	}
	x.busy = true
	s, id := x.source, x.id
	mark := provider.Mark{Owner: p.config.Name, Proxy: x.proxy, Generation: x.generation}
	p.spawn(func() {
		if first && p.anothers(s, id, mark) {
			p.mu.Lock()
			defer p.unlock()
			defer p.wake()
			x.busy = false
			p.goneLocked(x, "its id is another instance's now")
			return
		}
		err := p.call(s, "delete", p.config.CreateTimeout, func(ctx context.Context) error { return s.provider.Delete(ctx, id) })
		if err == nil {
			// Accepted is not gone, but a quick backend may be done already.
			err = p.call(s, "get", p.config.CallTimeout, func(ctx context.Context) error {
				_, err := s.provider.Get(ctx, id)
				if errors.Is(err, provider.ErrNotFound) {
					return err
				}
				return nil
			})
		}
		p.mu.Lock()
		defer p.unlock()
		defer p.wake()
		x.busy = false
		d := x.deleting
		d.tries++
		d.notBefore = time.Now().Add(max(p.backoff(d.tries), retryAfter(err)))
		switch {
		case err == nil:
			x.lastErr = nil
		case errors.Is(err, provider.ErrNotFound):
			p.goneLocked(x, "deleted")
		case p.closingDown(err):
		default:
			if errors.Is(err, provider.ErrPermanent) {
				d.notBefore = time.Now().Add(p.config.BackoffMax)
			}
			if x.lastErr == nil || x.lastErr.Error() != err.Error() {
				p.emit(Event{Kind: EventDeleteError, Proxy: x.proxy, Instance: x.name, Provider: s.name, Err: err})
				p.later(func() {
					p.logger.Error("delete failed", "proxy", x.proxy, "instance", x.name, "provider", s.name, "error", err)
				})
			}
			x.lastErr = err
		}
	})
}

// anothers reports whether an id is for certain not the instance's that it was: one more look before a delete, which can't
// be taken back.
func (p *Pool) anothers(s *source, id string, mark provider.Mark) bool {
	var found provider.Instance
	err := p.call(s, "get", p.config.CallTimeout, func(ctx context.Context) (err error) {
		found, err = s.provider.Get(ctx, id)
		return err
	})
	m := found.Mark
	return err == nil && (m.Owner != mark.Owner || m.Proxy != mark.Proxy || m.Generation != mark.Generation)
}

// goneLocked forgets an instance that is gone for sure.
func (p *Pool) goneLocked(x *instance, how string) {
	if p.instances[x.key()] != x {
		return
	}
	if x.deleting != nil {
		p.counters.Deleted++
	}
	x.source.gone[x.id] = time.Now()
	if x.source.full {
		x.source.full, x.source.notBefore = false, time.Time{} // there is room now
	}
	p.unleaseLocked(x, "gone", nil)
	p.forgetLocked(x)
	p.emit(Event{Kind: EventGone, Proxy: x.proxy, Instance: x.name, Message: how})
	p.later(func() { p.logger.Info("instance is gone", "proxy", x.proxy, "instance", x.name, "how", how) })
}

func (p *Pool) forgetLocked(x *instance) {
	p.unprobeLocked(x)
	delete(p.instances, x.key())
	if m := x.member; m != nil && m.shown == x {
		m.shown = nil
	}
}
