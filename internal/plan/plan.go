// Package plan decides what to do next about a fleet. Next is a pure function: it looks at what is wanted and what
// was observed, and says what to do, what may be leased and when to look again. Carrying it out is the caller's.
//
// It is level triggered: nothing is remembered between two calls but what the caller passes back in, so a decision
// that was lost, or carried out twice, is mended by the next call.
package plan

import (
	"hash/fnv"
	"math"
	"time"

	"crawl.example.com/egress/provider"
)

// Proxy is one wanted proxy.
type Proxy struct {
	// Name is used for nothing but a stable order of ties.
	Name string
	// Provider is an index into Input.Providers; negative for an external proxy.
	Provider int
	// SpecReady is false while the spec can't be made, for want of a secret. Nothing is created then, and
	// what exists is not compared.
	SpecReady bool
	// Hash and HashVersion are the spec's.
	Hash        string
	HashVersion int
	// SpecChanged is true when the spec has changed while this process looked on, which makes instances
	// whose hash can't be compared drift too.
	SpecChanged bool
	// MaxAge is when an instance is replaced for its age; 0 is never.
	MaxAge time.Duration
	// RefreshBelow is the generation below which instances are to be replaced.
	RefreshBelow int64
	// LastGeneration is the highest generation ever observed.
	LastGeneration int64
	// NotBefore holds creates back.
	NotBefore time.Time
	// Permanent stops creates until the spec changes.
	Permanent bool
	// Creating is true while a create is under way.
	Creating bool
}

// Instance is one observed instance of ours. What is not ours must not be passed in.
type Instance struct {
	// Proxy is an index into Input.Proxies; negative when its proxy is not wanted.
	Proxy int
	// Provider is an index into Input.Providers; negative for an external proxy's.
	Provider int
	// ID spreads ages.
	ID string
	// Generation, Hash and HashVersion are those of its mark.
	Generation  int64
	Hash        string
	HashVersion int
	// State is the backend's, and StateSince when it took it.
	State      provider.State
	StateSince time.Time
	// Created is when it was made, or first seen.
	Created time.Time
	// FirstSeen is when this process first saw it.
	FirstSeen time.Time
	// Addressed is true when its address is known.
	Addressed bool
	// Unlisted is true when the newest complete list does not have it.
	Unlisted bool
	// Evacuate is true while its backend wants it to be somewhere else.
	Evacuate bool
	// MissingSince is since when its host could not be asked; zero while it can.
	MissingSince time.Time
	// LookedAt is when it was last asked for by itself.
	LookedAt time.Time
	// Fit is true while probes say that it works.
	Fit bool
	// EverFit is true once it has been fit.
	EverFit bool
	// FailingSince is when its probes began to fail; zero while they do not.
	FailingSince time.Time
	// Soft is true when its probes fail in a way that may be the probe site's fault.
	Soft bool
	// Broken is true when a holder said that it does not work and no probe has succeeded since.
	Broken bool
	// Leases is how many are held.
	Leases int
	// DrainingSince is when it got its last new lease; zero while it may get more.
	DrainingSince time.Time
	// Deleting is true once a delete was asked for. DeleteNotBefore holds the next try back.
	Deleting        bool
	DeleteNotBefore time.Time
	// UnwantedSince is since when its proxy is not wanted; zero while it is.
	UnwantedSince time.Time
	// Dismissed is true when this process saw its proxy being removed, so that no grace is needed.
	Dismissed bool
	// Busy is true while an operation on it is under way.
	Busy bool
}

// Provider is the state of one provider.
type Provider struct {
	// Fresh is true when its newest list succeeded, at least in part. Otherwise nothing is created or
	// deleted there.
	Fresh bool
	// NotBefore holds creates back.
	NotBefore time.Time
	// Full is true while creates are held back for want of capacity.
	Full bool
	// Denied is true while its credentials are refused.
	Denied bool
	// Creating counts the creates under way for proxies that are not wanted any more.
	Creating int
}

// Limits are the rules of the pool. All are set.
type Limits struct {
	Surge          int           // instances above the wanted number, for each provider
	MaxUnavailable int           // proxies that may be without a fit instance because of us
	MaxParallel    int           // instances between create and first fit, for each provider
	DrainDeadline  time.Duration // from draining to revoking
	BootTimeout    time.Duration // from create to first fit
	UnhealthyGrace time.Duration // from the first failed probe to replacing
	StoppedGrace   time.Duration // from being seen stopped to replacing
	LostGrace      time.Duration // from a host's silence to replacing what is on it and not fit
	OrphanGrace    time.Duration // from first seeing an instance that nobody wants to deleting it
	SuspectDelay   time.Duration // from suspecting the probe site to replacing one unhealthy proxy at a time
	SuspectWindow  time.Duration // how long before the suspicion a failure still counts as part of it
}

// Input is everything Next looks at.
type Input struct {
	Now       time.Time
	Proxies   []Proxy
	Instances []Instance
	Providers []Provider
	Limits    Limits
	// SuspectSince is Output.SuspectSince of the last call.
	SuspectSince time.Time
}

// ActionKind is what to do.
type ActionKind int

// The kinds of action.
const (
	Create ActionKind = iota // make generation Generation of Proxy
	Look                     // ask the provider for Instance
	Drain                    // no more leases on Instance
	Delete                   // revoke what is held on Instance and ask for its removal
	Revoke                   // revoke what is held on Instance; its removal has to wait
)

// Action is one thing to do.
type Action struct {
	Kind       ActionKind
	Proxy      int // of Create
	Instance   int // of the others
	Generation int64
	Why        Why
}

// Why is the reason of an action or of a phase.
type Why string

// The reasons.
const (
	WhyNone        Why = ""
	WhyMissing     Why = "missing"      // there is no instance
	WhyDrift       Why = "drift"        // the spec is another one
	WhyAge         Why = "age"          // older than MaxAge
	WhyRefresh     Why = "refresh"      // asked for
	WhyEvacuate    Why = "evacuate"     // its host is to be emptied
	WhyUnhealthy   Why = "unhealthy"    // probes fail for too long
	WhyBootTimeout Why = "boot timeout" // never became fit
	WhyStopped     Why = "stopped"      // switched off behind our back
	WhyFailed      Why = "failed"       // the backend says it is broken
	WhyReplaced    Why = "replaced"     // a newer instance is fit
	WhyRemoved     Why = "removed"      // its proxy is not wanted
	WhyLost        Why = "lost"         // its host does not answer
	WhyMoved       Why = "moved"        // it is on another provider
	WhyWaiting     Why = "waiting"      // replacement waits for its turn
	WhySuspect     Why = "probe site suspect"
	WhySpec        Why = "spec not ready"
	WhyBackoff     Why = "back-off"
	WhyPermanent   Why = "permanent error"
	WhyDenied      Why = "denied"
	WhyNoCapacity  Why = "no capacity"
	WhyNotListed   Why = "provider not listed"
)

// Phase is where a proxy is in its life.
type Phase string

// The phases.
const (
	PhasePending      Phase = "Pending"
	PhaseProvisioning Phase = "Provisioning"
	PhaseBooting      Phase = "Booting"
	PhaseReady        Phase = "Ready"
	PhaseUnhealthy    Phase = "Unhealthy"
	PhaseDraining     Phase = "Draining"
	PhaseDeleting     Phase = "Deleting"
	PhaseFailed       Phase = "Failed"
)

// Status is how a proxy is.
type Status struct {
	Phase Phase
	Why   Why
	// Instance is the index of the instance that the status is about; negative when there is none.
	Instance int
}

// Output is what Next decided.
type Output struct {
	// Actions are to be carried out in order.
	Actions []Action
	// Serve says for each instance whether it may be leased.
	Serve []bool
	// Status is each proxy's.
	Status []Status
	// Wake is when to look again if nothing happens before; zero is never.
	Wake time.Time
	// SuspectSince is since when most proxies fail at once; zero when they do not. When it becomes zero the
	// caller must set FailingSince of what still fails to now.
	SuspectSince time.Time
}

// Next decides. It takes time linear in the size of its input, changes nothing of it, and gives the same output
// for the same input.
func Next(in Input) Output {
	p := planner{Input: in, out: Output{
		Serve:  make([]bool, len(in.Instances)),
		Status: make([]Status, len(in.Proxies)),
	}}
	p.touched = make([]bool, len(in.Instances))
	p.group()
	p.suspect()
	p.count()
	for i := range in.Proxies {
		p.settle(i)
	}
	p.create()
	p.orphans()
	p.look()
	return p.out
}

type planner struct {
	Input
	out Output

	// order holds the instances of proxy i, the newest generation first, from first[i] to first[i+1].
	order []int
	first []int

	load     []load // by provider
	unfit    int    // wanted proxies that serve nothing, but for those without room
	serving  int    // wanted proxies that serve
	canary   bool   // an unhealthy proxy is being replaced while the probe site is suspect
	requests []request
	touched  []bool // instances that have an action already
}

// load is what a provider bears.
type load struct {
	size    int // wanted proxies
	live    int // instances of theirs, creates under way included
	booting int // of those, not fit yet
}

// request is a proxy that wants a new instance.
type request struct {
	proxy    int
	priority int
	why      Why
	old      int // the instance to replace; negative when there is none
}

// group sorts the instances by proxy with a counting sort, and those of one proxy by generation.
func (p *planner) group() {
	p.first = make([]int, len(p.Proxies)+1)
	for i := range p.Instances {
		if x := p.Instances[i].Proxy; x >= 0 {
			p.first[x+1]++
		}
	}
	for i := range p.Proxies {
		p.first[i+1] += p.first[i]
	}
	p.order = make([]int, p.first[len(p.Proxies)])
	next := make([]int, len(p.Proxies))
	for i := range p.Instances {
		x := p.Instances[i].Proxy
		if x < 0 {
			continue
		}
		// Insertion keeps the few instances of a proxy in order: newest first, then by ID.
		at := p.first[x] + next[x]
		for ; at > p.first[x] && p.newer(i, p.order[at-1]); at-- {
			p.order[at] = p.order[at-1]
		}
		p.order[at] = i
		next[x]++
	}
}

func (p *planner) newer(a, b int) bool {
	x, y := &p.Instances[a], &p.Instances[b]
	if x.Generation != y.Generation {
		return x.Generation > y.Generation
	}
	// A host that was away may bring back what was made again elsewhere under the same name. What has worked stays.
	if x.EverFit != y.EverFit {
		return x.EverFit
	}
	return x.ID < y.ID
}

func (p *planner) instancesOf(proxy int) []int { return p.order[p.first[proxy]:p.first[proxy+1]] }

// suspect finds out whether most of what worked fails at once, which says more about the probe site, or about our
// own network, than about the proxies.
func (p *planner) suspect() {
	good, failing := 0, 0
	for i := range p.Proxies {
		for _, k := range p.instancesOf(i) {
			x := &p.Instances[k]
			if !x.EverFit || x.Deleting || !x.DrainingSince.IsZero() || x.State == provider.StateStopped || x.State == provider.StateFailed {
				continue
			}
			if x.FailingSince.IsZero() {
				good++
			} else {
				failing++
			}
			break // the newest that ever worked speaks for its proxy
		}
	}
	if good+failing >= 2 && failing > good {
		p.out.SuspectSince = p.SuspectSince
		if p.out.SuspectSince.IsZero() {
			p.out.SuspectSince = p.Now
		}
	}
}

func (p *planner) suspected() bool { return !p.out.SuspectSince.IsZero() }

// count adds up what each provider bears.
func (p *planner) count() {
	p.load = make([]load, len(p.Providers))
	for i := range p.Providers {
		p.load[i] = load{live: p.Providers[i].Creating, booting: p.Providers[i].Creating}
	}
	for i := range p.Proxies {
		want := &p.Proxies[i]
		if want.Provider < 0 {
			continue
		}
		l := &p.load[want.Provider]
		l.size++
		if want.Creating {
			l.live++
			l.booting++
		}
	}
	for i := range p.Instances {
		x := &p.Instances[i]
		if x.Proxy < 0 || x.Provider < 0 || !p.counts(x) {
			continue
		}
		l := &p.load[x.Provider]
		l.live++
		if !x.EverFit {
			l.booting++
		}
	}
}

// counts reports whether x takes up room. What is on its way out, or on a host that is lost, does not: a row that
// is stuck there must not keep its replacement away.
func (p *planner) counts(x *Instance) bool {
	return !x.Deleting && x.State != provider.StateDeleting && x.State != provider.StateFailed && !p.lost(x)
}

func (p *planner) lost(x *Instance) bool {
	return !x.MissingSince.IsZero() && !x.Fit && p.after(x.MissingSince.Add(p.Limits.LostGrace))
}

// doomed says why x has to go whatever else there is, or WhyNone.
func (p *planner) doomed(x *Instance) Why {
	if !x.MissingSince.IsZero() {
		return WhyNone // what is known of it is old; see lost
	}
	switch x.State {
	case provider.StateFailed:
		return WhyFailed
	case provider.StateStopped:
		if p.after(x.StateSince.Add(p.Limits.StoppedGrace)) {
			return WhyStopped
		}
	case provider.StateDeleting:
		return WhyRemoved
	}
	if x.Provider >= 0 && !x.EverFit && p.after(x.Created.Add(p.Limits.BootTimeout)) && p.after(x.FirstSeen.Add(p.Limits.BootTimeout)) {
		return WhyBootTimeout
	}
	return WhyNone
}

// stale says why x should be replaced, or WhyNone.
func (p *planner) stale(want *Proxy, x *Instance) Why {
	if want.SpecReady {
		if x.HashVersion == want.HashVersion && x.Hash != want.Hash || x.HashVersion != want.HashVersion && want.SpecChanged {
			return WhyDrift
		}
	}
	if x.Generation < want.RefreshBelow {
		return WhyRefresh
	}
	if x.Evacuate && x.MissingSince.IsZero() {
		return WhyEvacuate
	}
	if want.MaxAge > 0 && p.after(x.Created.Add(want.MaxAge-ageJitter(x.ID, want.MaxAge))) {
		return WhyAge
	}
	// In the pass that lifts a suspicion some have not been probed again yet; the caller gives them a new grace.
	lifted := !p.SuspectSince.IsZero() && !p.suspected()
	if x.EverFit && !x.FailingSince.IsZero() && !lifted && p.after(x.FailingSince.Add(p.Limits.UnhealthyGrace)) {
		return WhyUnhealthy
	}
	return WhyNone
}

// ageJitter returns up to a tenth of maxAge, the same for the same ID.
func ageJitter(id string, maxAge time.Duration) time.Duration {
	h := fnv.New64a()
	h.Write([]byte(id))
	return time.Duration(float64(maxAge) / 10 * (float64(h.Sum64()>>11) / (1 << 53)))
}

// after reports whether the moment t has come, and has Next called again when it will.
func (p *planner) after(t time.Time) bool {
	if !p.Now.Before(t) {
		return true
	}
	p.wakeAt(t)
	return false
}

func (p *planner) wakeAt(t time.Time) {
	if p.out.Wake.IsZero() || t.Before(p.out.Wake) {
		p.out.Wake = t
	}
}

// leasable reports whether x works well enough to be leased.
func (p *planner) leasable(x *Instance) bool {
	if x.Deleting || !x.DrainingSince.IsZero() || x.Broken || !x.Addressed {
		return false
	}
	if x.State != provider.StateRunning && x.State != provider.StateUnknown && x.MissingSince.IsZero() {
		return false
	}
	if x.Fit {
		return true
	}
	// While the probe site is suspect the last good set goes on serving.
	return p.suspected() && x.EverFit && x.Soft && !x.FailingSince.Before(p.out.SuspectSince.Add(-p.Limits.SuspectWindow))
}

// settle decides about the instances that proxy i has, and notes what it wants.
func (p *planner) settle(i int) {
	want := &p.Proxies[i]
	target, serve := -1, -1
	for _, k := range p.instancesOf(i) {
		x := &p.Instances[k]
		if target < 0 && x.Provider == want.Provider && !x.Deleting && x.DrainingSince.IsZero() &&
			!p.lost(x) && p.doomed(x) == WhyNone {
			target = k
		}
		if serve < 0 && p.leasable(x) {
			serve = k
		}
	}
	if target >= 0 && p.leasable(&p.Instances[target]) {
		serve = target
	}
	if serve >= 0 {
		p.out.Serve[serve] = true
		p.serving++
	} else if !p.starved(i) {
		p.unfit++
	}
	stale := WhyNone
	if target >= 0 {
		stale = p.stale(want, &p.Instances[target])
	}
	p.retire(i, target, serve)
	p.out.Status[i] = p.status(i, target, serve, stale)
	switch {
	case want.Provider < 0 || want.Creating:
	case target < 0:
		p.requests = append(p.requests, request{proxy: i, priority: 0, why: WhyMissing, old: -1})
	case stale == WhyUnhealthy:
		p.requests = append(p.requests, request{proxy: i, priority: 1, why: stale, old: target})
	case stale != WhyNone:
		p.requests = append(p.requests, request{proxy: i, priority: 2, why: stale, old: target})
	}
	if target >= 0 && p.suspected() && !p.Instances[target].EverFit {
		p.canary = true
	}
}

// starved reports whether proxy i has nothing because its provider has no room. That is not of our making, and must
// not keep the others from being replaced.
func (p *planner) starved(i int) bool {
	want := &p.Proxies[i]
	return want.Provider >= 0 && p.Providers[want.Provider].Full && !want.Creating && len(p.instancesOf(i)) == 0
}

// retire moves the instances of proxy i that are not its target towards their end.
func (p *planner) retire(i, target, serve int) {
	targetServes := target >= 0 && serve == target && p.Instances[target].Fit
	for _, k := range p.instancesOf(i) {
		x := &p.Instances[k]
		if x.Provider < 0 && x.DrainingSince.IsZero() {
			continue // an external proxy's only ends when its endpoint has changed
		}
		doomed := p.doomed(x)
		switch {
		case x.Deleting || !x.DrainingSince.IsZero():
			p.finish(k, WhyReplaced)
		case doomed != WhyNone:
			p.finish(k, doomed)
		case p.lost(x):
			// Its replacement does not help who holds it.
			if x.Leases > 0 && k != serve {
				p.finish(k, WhyLost)
			}
		case k == target:
		case targetServes:
			p.finish(k, WhyReplaced)
		case k == serve:
		case target >= 0 || !x.EverFit:
			// It neither serves nor is awaited.
			if x.Provider != p.Proxies[i].Provider {
				p.finish(k, WhyMoved)
			} else {
				p.finish(k, WhyReplaced)
			}
		}
	}
}

// finish takes one step towards the end of instance k: no more leases, then the delete.
func (p *planner) finish(k int, why Why) {
	if p.touched[k] {
		return
	}
	x := &p.Instances[k]
	p.out.Serve[k] = false
	switch {
	case x.Deleting:
		if !x.Busy && p.fresh(x.Provider) && p.after(x.DeleteNotBefore) {
			p.act(Action{Kind: Delete, Instance: k, Why: why})
		}
	case x.Leases > 0 && x.DrainingSince.IsZero():
		p.act(Action{Kind: Drain, Instance: k, Why: why})
		p.wakeAt(p.Now.Add(p.Limits.DrainDeadline))
	case x.Leases > 0 && !p.after(x.DrainingSince.Add(p.Limits.DrainDeadline)):
	case !x.Busy && p.fresh(x.Provider) && x.MissingSince.IsZero():
		p.act(Action{Kind: Delete, Instance: k, Why: why})
	case x.Leases > 0:
		p.act(Action{Kind: Revoke, Instance: k, Why: why})
	}
}

func (p *planner) act(a Action) {
	p.out.Actions = append(p.out.Actions, a)
	if a.Kind != Create {
		p.touched[a.Instance] = true
	}
}

func (p *planner) fresh(provider int) bool { return provider < 0 || p.Providers[provider].Fresh }

// create serves the requests for new instances, the most urgent first.
func (p *planner) create() {
	if p.suspected() && !p.after(p.out.SuspectSince.Add(p.Limits.SuspectDelay)) {
		p.canary = true // as if the one place were taken
	}
	for priority := range 3 {
		for _, r := range p.requests {
			if r.priority == priority {
				p.serveRequest(r)
			}
		}
	}
}

func (p *planner) serveRequest(r request) {
	want := &p.Proxies[r.proxy]
	if r.why == WhyUnhealthy && p.suspected() {
		if p.canary {
			p.hold(r, WhySuspect)
			return
		}
		p.canary = true
	}
	source := &p.Providers[want.Provider]
	switch {
	case want.Permanent:
		p.hold(r, WhyPermanent)
		return
	case !want.SpecReady:
		p.hold(r, WhySpec)
		return
	case !source.Fresh:
		p.hold(r, WhyNotListed)
		return
	case !p.after(want.NotBefore):
		p.hold(r, WhyBackoff)
		return
	case !p.after(source.NotBefore):
		switch {
		case source.Denied:
			p.hold(r, WhyDenied)
		case source.Full && p.deleteFirst(r):
		case source.Full:
			p.hold(r, WhyNoCapacity)
		default:
			p.hold(r, WhyBackoff)
		}
		return
	}
	l := &p.load[want.Provider]
	if l.booting >= p.Limits.MaxParallel {
		p.hold(r, WhyWaiting)
		return
	}
	if l.live >= l.size+p.Limits.Surge {
		if !p.deleteFirst(r) {
			p.hold(r, WhyWaiting)
		}
		return
	}
	l.live++
	l.booting++
	p.act(Action{Kind: Create, Proxy: r.proxy, Generation: want.LastGeneration + 1, Why: r.why})
	if p.out.Status[r.proxy].Phase == PhasePending {
		p.out.Status[r.proxy].Phase = PhaseProvisioning
	}
}

// deleteFirst makes room for a replacement by taking the old instance away, if that leaves enough.
func (p *planner) deleteFirst(r request) bool {
	if r.old < 0 {
		return false
	}
	if !p.out.Serve[r.old] {
		// It serves nothing, so nothing is lost.
		p.finish(r.old, r.why)
		return true
	}
	// The last one that works is not given up for one that may not, unless it is the only one there is and
	// the operator allowed for that.
	if p.serving-1 < min(1, len(p.Proxies)-1) || p.unfit >= p.Limits.MaxUnavailable {
		return false
	}
	if p.Limits.Surge > 0 && !p.Providers[p.Proxies[r.proxy].Provider].Full {
		return false // room will come: somebody else's replacement has it now
	}
	p.serving--
	p.unfit++
	p.finish(r.old, r.why)
	return true
}

// hold notes why a proxy does not get what it wants.
func (p *planner) hold(r request, why Why) {
	s := &p.out.Status[r.proxy]
	if s.Phase == PhasePending || s.Phase == PhaseUnhealthy || s.Phase == PhaseReady && s.Why == r.why {
		s.Why = why
	}
	if why == WhyPermanent && s.Phase == PhasePending {
		s.Phase = PhaseFailed
	}
}

// status says how proxy i is.
func (p *planner) status(i, target, serve int, stale Why) Status {
	want := &p.Proxies[i]
	if serve >= 0 {
		why := stale
		if serve != target {
			why = WhyWaiting
		}
		if !p.Instances[serve].Fit {
			why = WhySuspect
		}
		return Status{Phase: PhaseReady, Why: why, Instance: serve}
	}
	if target >= 0 {
		x := &p.Instances[target]
		switch {
		case x.EverFit || x.Provider < 0 && !x.FailingSince.IsZero():
			return Status{Phase: PhaseUnhealthy, Why: stale, Instance: target}
		case x.Provider < 0:
			return Status{Phase: PhasePending, Instance: target}
		default:
			return Status{Phase: PhaseBooting, Why: stale, Instance: target}
		}
	}
	if want.Creating {
		return Status{Phase: PhaseProvisioning, Instance: -1}
	}
	for _, k := range p.instancesOf(i) {
		x := &p.Instances[k]
		switch {
		case p.lost(x):
			return Status{Phase: PhasePending, Why: WhyLost, Instance: -1}
		case x.Deleting || p.doomed(x) != WhyNone:
			return Status{Phase: PhasePending, Why: WhyMissing, Instance: -1}
		case !x.DrainingSince.IsZero():
			return Status{Phase: PhaseDraining, Why: WhyReplaced, Instance: k}
		}
	}
	return Status{Phase: PhasePending, Why: WhyMissing, Instance: -1}
}

// orphans removes instances that nobody wants, after a grace period: a list may lag behind, and so may the
// process that declares the proxies.
func (p *planner) orphans() {
	for k := range p.Instances {
		x := &p.Instances[k]
		if x.Proxy >= 0 {
			continue
		}
		if x.Deleting || !x.DrainingSince.IsZero() || x.Dismissed ||
			!x.UnwantedSince.IsZero() && p.after(x.UnwantedSince.Add(p.Limits.OrphanGrace)) {
			if x.Provider >= 0 && !x.MissingSince.IsZero() && !x.Deleting && !x.Fit && x.Leases == 0 {
				continue // its host does not answer; when it does, this is decided again
			}
			p.finish(k, WhyRemoved)
		}
	}
}

// look asks for instances that the list says too little about.
func (p *planner) look() {
	for k := range p.Instances {
		x := &p.Instances[k]
		if x.Provider < 0 || x.Busy || !p.fresh(x.Provider) || !x.MissingSince.IsZero() {
			continue
		}
		if x.Deleting || !x.Unlisted && x.Addressed && x.State == provider.StateRunning {
			continue // a delete is asked for again until it is sure
		}
		if !p.touched[k] && p.after(x.LookedAt.Add(LookInterval(p.Now.Sub(x.FirstSeen)))) {
			p.act(Action{Kind: Look, Instance: k})
		}
	}
}

// LookInterval is the time between two looks at an instance that has been known for age: a fortieth of it, so that
// a boot is noticed within a fortieth of its length, but at least 50 ms and at most 5 s.
func LookInterval(age time.Duration) time.Duration {
	return time.Duration(math.Min(math.Max(float64(age)/40, float64(50*time.Millisecond)), float64(5*time.Second)))
}
