package egress

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/internal/leases"
	"crawl.example.com/egress/internal/plan"
	"crawl.example.com/egress/provider"
)

// Phase is where a proxy is in its life.
type Phase string

// The phases of a proxy.
const (
	PhasePending      = Phase(plan.PhasePending)      // nothing is there yet
	PhaseProvisioning = Phase(plan.PhaseProvisioning) // a create is under way
	PhaseBooting      = Phase(plan.PhaseBooting)      // it exists and has not worked yet
	PhaseReady        = Phase(plan.PhaseReady)        // it may be leased
	PhaseUnhealthy    = Phase(plan.PhaseUnhealthy)    // it worked and does not now
	PhaseDraining     = Phase(plan.PhaseDraining)     // its leases are running out
	PhaseDeleting     = Phase(plan.PhaseDeleting)     // it is being deleted
	PhaseFailed       = Phase(plan.PhaseFailed)       // it needs a new spec
)

// ProxyStatus is how one proxy is.
type ProxyStatus struct {
	// Name, Mode, Provider and Labels are as declared.
	Name     string
	Mode     Mode
	Provider string
	Labels   map[string]string
	// Wanted is false for a proxy that was removed and whose instance is on its way out.
	Wanted bool
	// Phase is where it is in its life, since Since.
	Phase Phase
	Since time.Time
	// Reason is a short phrase for why it is in that phase, stable enough for alerts; empty when there is
	// nothing to say. Message says more, in a sentence.
	Reason  string
	Message string
	// Instance is the instance that serves, or is meant to; empty when there is none.
	Instance string
	// Generation counts its instances.
	Generation int64
	// Address is host:port of the proxy; empty while it is not known.
	Address string
	// Host is where the provider runs it.
	Host string
	// SpecHash is the hash of the spec that is wanted; empty for an external proxy and while a secret
	// is missing.
	SpecHash string
	// Leases are held now, of MaxLeases at most. Granted and Failures count since the instance was
	// first fit.
	Leases, MaxLeases int
	Granted, Failures uint64
	// Cooling lists the targets that the proxy is banned for, and until when.
	Cooling map[string]time.Time
	// LastProbe is the newest probe; its Time is zero when there was none.
	LastProbe ProbeResult
	// EgressIP is the address that the echo URL saw; invalid when it was not asked.
	EgressIP netip.Addr
}

// ProbeResult is the outcome of one probe.
type ProbeResult struct {
	// Time is when it ended.
	Time time.Time
	// OK is whether the proxy did its work.
	OK bool
	// Reason is OK, Refused, Unreachable, Timeout, ProxyAuth, TLS, DNSAtProxy, ProxyError, WrongStatus,
	// WrongBody, Interrupted or Unknown.
	Reason string
	// Message says it in a sentence.
	Message string
	// Duration is how long it took.
	Duration time.Duration
}

// Stats are a pool's counters since it was made, and its gauges.
type Stats struct {
	// Proxies are wanted; Ready of them may be leased. Instances are known, whatever their state.
	Proxies, Ready, Instances int
	// Leases are held and callers are Waiting now.
	Leases, Waiting int
	// Granted counts leases, Waited those granted after waiting, Exhausted requests that ended without
	// one, Revoked leases taken back, Leaked leases dropped without Release.
	Granted, Waited, Exhausted, Revoked, Leaked uint64
	// WaitTotal and WaitMax are the time spent waiting for leases that were granted.
	WaitTotal, WaitMax time.Duration
	// Created, CreateErrors, Deleted and Adopted count instances; Replaced those deleted for a newer one.
	Created, CreateErrors, Deleted, Adopted, Replaced uint64
	// Probes and ProbeErrors count probes.
	Probes, ProbeErrors uint64
	// ProviderCalls counts calls of providers, without checks.
	ProviderCalls uint64
	// Suspect is true while most proxies fail at once and nothing unhealthy is replaced.
	Suspect bool
}

// TargetStatus is what is known of one target of a provider.
type TargetStatus struct {
	provider.TargetHealth
	// Provider is the entry name.
	Provider string
	// Since is when Ready took the value it has.
	Since time.Time
}

// Stats returns the counters and gauges now. It does not block.
func (p *Pool) Stats() Stats {
	t := p.table.Stats()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.counters
	s.Proxies = len(p.order)
	for _, m := range p.order {
		if m.status.Phase == plan.PhaseReady {
			s.Ready++
		}
	}
	s.Instances = len(p.instances)
	s.Leases, s.Waiting = t.Held, t.Waiting
	s.Granted, s.Waited, s.Exhausted, s.Revoked, s.Leaked = t.Granted, t.Waited, t.Exhausted, t.Revoked, t.Leaked
	s.WaitTotal, s.WaitMax = t.WaitTotal, t.WaitMax
	s.Suspect = !p.suspectSince.IsZero()
	return s
}

// ProviderHealth returns the newest results of the provider checks, sorted by provider. It does not block. It is
// empty before the first round and for providers that are no [provider.Checker].
func (p *Pool) ProviderHealth() []TargetStatus {
	var all []TargetStatus
	for _, t := range p.checks.Snapshot() {
		all = append(all, TargetStatus{TargetHealth: t.TargetHealth, Provider: t.Provider, Since: t.Since})
	}
	return all
}

// Proxies returns the status of every proxy, sorted by name, those that are on their way out included. It does not
// block. The maps in the result must not be changed.
func (p *Pool) Proxies() []ProxyStatus {
	p.mu.Lock()
	all := make([]ProxyStatus, 0, len(p.order))
	entries := make([]*leases.Entry, 0, len(p.order))
	for _, m := range p.order {
		s, x := p.statusLocked(m)
		all = append(all, s)
		entries = append(entries, entryOf(x))
	}
	for _, x := range p.instances {
		if x.member == nil {
			all = append(all, p.leavingLocked(x))
			entries = append(entries, x.entry)
		}
	}
	p.mu.Unlock()
	for i, e := range entries {
		if e != nil {
			u := e.Usage()
			all[i].Leases, all[i].Granted, all[i].Failures = u.Leases, u.Granted, u.Failures
			all[i].Cooling = e.Cooling()
		}
	}
	slices.SortFunc(all, func(a, b ProxyStatus) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.Instance, b.Instance)
	})
	return all
}

func entryOf(x *instance) *leases.Entry {
	if x == nil {
		return nil
	}
	return x.entry
}

// statusLocked describes a wanted proxy and returns the instance that it is about.
func (p *Pool) statusLocked(m *member) (ProxyStatus, *instance) {
	s := ProxyStatus{
		Name: m.decl.Name, Mode: m.decl.Mode, Provider: m.decl.Provider, Labels: m.decl.Labels, Wanted: true,
		Phase: Phase(m.status.Phase), Since: m.since, Reason: string(m.status.Why), Message: m.message(),
		SpecHash: m.hash, MaxLeases: m.decl.maxLeases,
	}
	x := m.shown
	if x != nil {
		x.describe(&s)
	}
	return s, x
}

// leavingLocked describes an instance that no proxy wants.
func (p *Pool) leavingLocked(x *instance) ProxyStatus {
	s := ProxyStatus{Name: x.proxy, Phase: PhasePending, Since: x.unwantedSince, Reason: string(plan.WhyRemoved)}
	if x.source != nil {
		s.Provider = x.source.name
	} else {
		s.Mode = External
	}
	switch {
	case x.deleting != nil:
		s.Phase, s.Since = PhaseDeleting, x.deleting.since
	case !x.drainingSince.IsZero():
		s.Phase, s.Since = PhaseDraining, x.drainingSince
	}
	if x.lastErr != nil {
		s.Message = x.lastErr.Error()
	}
	x.describe(&s)
	return s
}

func (x *instance) describe(s *ProxyStatus) {
	s.Instance, s.Generation, s.Host = x.name, x.generation, x.host
	if x.endpoint != nil {
		s.Address = x.endpoint.Addr()
	}
	s.LastProbe, s.EgressIP = x.lastProbe, x.egressIP
	if s.Message == "" {
		s.Message = x.message
	}
}
