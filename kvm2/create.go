package kvm2

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/internal/vmhost"
	"crawl.example.com/egress/provider"
)

// Create implements provider.Provider. It asks every host for the name first, and hosts that don't answer are passed over: should
// one of them have the instance after all, the pool deletes one of the two when the host is back. Then it tries the hosts that the
// placement allows, best first, until one has made the instance. A host on which that fails comes after the others for a
// while.
//
// A create that may have been carried out is not tried elsewhere: the error then matches provider.ErrOutcomeUnknown.
func (p *Provider) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	if err := p.Validate(req.Spec); err != nil {
		return provider.Instance{}, err
	}
	hosts := p.all()
	if len(hosts) == 0 {
		return provider.Instance{}, p.fail("create", req.Name, "", provider.ErrUnavailable, provider.ReasonUnknown, "there are no hosts")
	}
	release, taken := p.place(req)
	if taken {
		return provider.Instance{}, p.fail("create", req.Name, "", provider.ErrAlreadyExists, provider.ReasonUnknown, "a create of that name is under way")
	}
	defer release()
	plan, err := hosts[0].vm.Plan(req.Spec) // every host has the same images
	if err != nil {
		return provider.Instance{}, p.fail("create", req.Name, "", provider.ErrPermanent, provider.ReasonUnsupported, "%w", err)
	}
	candidates, against, err := p.survey(ctx, hosts, req, plan)
	if err != nil {
		return provider.Instance{}, err
	}
	fits := len(candidates)
	for len(candidates) > 0 {
		best := p.choose(candidates, req)
		candidates = candidates[1:]
		name := best.host.vm.Target()
		made, err := best.host.vm.Create(ctx, req, best.explain(req.Spec.Placement.Group, fits))
		if err == nil {
			best.host.worked(made)
			return best.host.finish(made), nil
		}
		if final(ctx, err) {
			return provider.Instance{}, err
		}
		against = append(against, refusal{name, err.Error(), provider.Kind(err), provider.ReasonOf(err)})
		if !errors.Is(err, provider.ErrNoCapacity) {
			best.host.failed(p.config.HostBackoff)
			p.config.Logger.Warn("a create failed on a host, and others are tried", "provider", p.config.Name, "host", name, "instance", req.Name, "error", err)
		}
	}
	return provider.Instance{}, p.nowhere(req, against)
}

// final reports whether err of one host is the end of the create. What one host does not support, such as an older libvirt the
// domain, another may.
func final(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, provider.ErrOutcomeUnknown) || errors.Is(err, provider.ErrAlreadyExists) ||
		errors.Is(err, provider.ErrPermanent) && provider.ReasonOf(err) != provider.ReasonUnsupported
}

// refusal is why a host did not get the instance.
type refusal struct {
	host, why string
	kind      error
	reason    provider.Reason
}

// nowhere is the error of a create that no host could carry out. Only when each of them is full is it one of capacity, and only
// when each of them says so is it permanent.
func (p *Provider) nowhere(req provider.CreateRequest, against []refusal) error {
	var words []string
	kind, reason := provider.ErrNoCapacity, provider.ReasonInsufficientCapacity
	denied, permanent := 0, 0
	for _, r := range against {
		words = append(words, r.host+": "+r.why)
		if !errors.Is(r.kind, provider.ErrNoCapacity) {
			kind, reason = provider.ErrUnavailable, r.reason
		}
		if errors.Is(r.kind, provider.ErrDenied) {
			denied++
		}
		if errors.Is(r.kind, provider.ErrPermanent) {
			permanent++
		}
	}
	switch {
	case denied > 0 && denied == len(against):
		kind = provider.ErrDenied
	case permanent > 0 && permanent == len(against):
		kind = provider.ErrPermanent
	}
	return p.fail("create", req.Name, "", kind, reason, "no host can take it: %s", strings.Join(words, "; "))
}

// survey asks every host for the name, and those that the placement allows how much room they have.
func (p *Provider) survey(ctx context.Context, hosts []*host, req provider.CreateRequest, plan *vmhost.Plan) ([]candidate, []refusal, error) {
	type answer struct {
		usage vmhost.Usage
		full  string
		err   error
		has   bool
		other bool   // somebody else's has the name
		half  string // the id of what an earlier attempt left half made
	}
	answers := make([]answer, len(hosts))
	p.each(ctx, hosts, func(ctx context.Context, i int) error {
		a := &answers[i]
		var list []provider.Instance
		if list, a.err = p.listHost(ctx, hosts[i], req.Mark.Owner); a.err != nil {
			return a.err
		}
		for _, x := range list {
			switch {
			case x.Name != req.Name:
			case x.Mark.Proxy != req.Mark.Proxy || x.Mark.Generation != req.Mark.Generation:
				a.other = true
			case x.State == provider.StateFailed && hosts[i].vm.HalfMade(x.ID):
				a.half = x.ID
			default: // also when it has crashed since: what was finished is the pool's to delete
				a.has = true
			}
		}
		if a.half != "" && !a.has && !a.other {
			if err := hosts[i].vm.Delete(ctx, a.half); err != nil && !errors.Is(err, provider.ErrNotFound) {
				a.err = err
				return err
			}
		}
		c := hosts[i].is()
		if !a.has && !a.other && !c.Cordoned && !c.Drained && vmhost.Allowed(req.Spec.Placement, c.Name, c.Labels) == nil {
			a.usage, a.full, a.err = hosts[i].vm.Room(ctx, plan)
		}
		return a.err
	})
	if ctx.Err() != nil {
		return nil, nil, p.fail("create", req.Name, "", provider.ErrUnavailable, provider.ReasonTimeout, "%w", context.Cause(ctx))
	}
	var candidates []candidate
	var against []refusal
	for i, h := range hosts {
		a, c := answers[i], h.is()
		allowed := vmhost.Allowed(req.Spec.Placement, c.Name, c.Labels)
		switch {
		case a.has:
			return nil, nil, p.fail("create", req.Name, c.Name, provider.ErrAlreadyExists, provider.ReasonUnknown, "the instance is there")
		case a.other:
			return nil, nil, p.fail("create", req.Name, c.Name, provider.ErrPermanent, provider.ReasonUnknown, "another instance has the name")
		case allowed != nil:
		case a.err != nil:
			against = append(against, refusal{c.Name, a.err.Error(), provider.Kind(a.err), provider.ReasonOf(a.err)})
		case c.Drained || c.Cordoned:
			against = append(against, refusal{c.Name, map[bool]string{true: "drained", false: "cordoned"}[c.Drained], provider.ErrNoCapacity, provider.ReasonInsufficientCapacity})
		case a.full != "":
			against = append(against, refusal{c.Name, a.full, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity})
		default:
			candidates = append(candidates, candidate{host: h, room: roomOf(a.usage, plan, c.weight()), resting: h.resting(), usage: a.usage})
		}
	}
	return candidates, against, nil
}

// choose sorts candidates, best first, and notes that the first is going to be tried. Others are placed meanwhile, so
// each choice is made anew, and one at a time.
func (p *Provider) choose(candidates []candidate, req provider.CreateRequest) candidate {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countAlikeLocked(candidates, req)
	order(candidates, req.Name)
	at := p.placed[req.Name]
	at.host = candidates[0].host.vm.Target()
	p.placed[req.Name] = at
	return candidates[0]
}

// countAlikeLocked counts what is on each host of what should be spread, and of creates under way.
func (p *Provider) countAlikeLocked(candidates []candidate, req provider.CreateRequest) {
	group := req.Spec.Placement.Group
	for i := range candidates {
		c := &candidates[i]
		c.alike, c.sameProxy = 0, 0
		target := c.host.vm.Target()
		here := map[string]bool{}
		c.host.mu.Lock()
		for _, x := range c.host.seen {
			here[x.Name] = true
			if x.Mark.Owner == req.Mark.Owner && (group == "" || c.host.vm.GroupOf(x.ID) == group) {
				c.alike++
			}
			if x.Mark.Owner == req.Mark.Owner && x.Mark.Proxy == req.Mark.Proxy {
				c.sameProxy++
			}
		}
		c.host.mu.Unlock()
		for name, at := range p.placed {
			if at.host == target && !here[name] && name != req.Name && at.owner == req.Mark.Owner && (group == "" || at.group == group) {
				c.alike++
			}
		}
	}
}

// place notes a create that is under way. It reports whether there is one of that name already.
func (p *Provider) place(req provider.CreateRequest) (release func(), taken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, taken := p.placed[req.Name]; taken {
		return nil, true
	}
	p.placed[req.Name] = placement{group: req.Spec.Placement.Group, owner: req.Mark.Owner}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.placed, req.Name)
	}, false
}

func (h *host) resting() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Before(h.restful)
}

func (h *host) failed(base time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures++
	h.restful = time.Now().Add(rest(h.failures, base))
}

func (h *host) worked(made provider.Instance) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures, h.restful = 0, time.Time{}
	h.seen = append(slices.Clone(h.seen), made)
}
