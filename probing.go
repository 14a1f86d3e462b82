package egress

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"crawl.example.com/egress/internal/leases"
	"crawl.example.com/egress/internal/plan"
	"crawl.example.com/egress/internal/probe"
	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
)

// probeForever starts probes when they are due, at most Config.ProbeParallel at once.
func (p *Pool) probeForever() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(p.startProbes())
		select {
		case <-p.running.Done():
			return
		case <-p.reprobe:
		case <-timer.C:
		}
	}
}

// startProbes starts what is due and returns the time until something will be.
func (p *Pool) startProbes() time.Duration {
	p.mu.Lock()
	defer p.unlock()
	now := time.Now()
	for len(p.probes) > 0 && p.probing < p.config.ProbeParallel {
		x := p.probes[0]
		if wait := x.probeDue.Sub(now); wait > 0 {
			return wait
		}
		heap.Pop(&p.probes)
		if x.member == nil {
			continue
		}
		p.probing++
		x.probing = true
		endpoint := *x.endpoint
		check := probeCheck(&x.member.decl.Probe)
		seen := provider.Instance{
			ID: x.id, Name: x.name, State: x.state, Address: x.address, Port: x.port, Host: x.host, Created: x.created,
			Mark: provider.Mark{Owner: p.config.Name, Proxy: x.proxy, Generation: x.generation, HashVersion: x.hashVersion, Hash: x.hash},
		}
		p.spawn(func() { p.probed(x, now, endpoint.Addr(), p.probeOnce(x.source, seen, endpoint, check)) })
	}
	return time.Hour // a full house or an empty queue: somebody will say when to look again
}

// probeOnce probes an instance: by its provider when that can, else over the network.
func (p *Pool) probeOnce(s *source, x provider.Instance, endpoint upstream.Endpoint, check probe.Check) probe.Result {
	if s == nil || s.prober == nil {
		return p.probe(p.running, endpoint, check)
	}
	begin := time.Now()
	ctx, cancel := context.WithTimeout(p.running, check.Timeout)
	defer cancel()
	err := func() (err error) {
		defer p.recovered(s, "probe", &err)
		return s.prober.Probe(ctx, x)
	}()
	r := probe.Result{Reason: probe.ReasonUnknown, Duration: time.Since(begin)}
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return p.probe(p.running, endpoint, check)
	case err == nil:
		r.OK, r.Reason, r.Message = true, probe.ReasonOK, "the provider says that it works"
	case p.running.Err() != nil:
		r.Reason = probe.ReasonCanceled
	case ctx.Err() != nil:
		r.Reason, r.Message = probe.ReasonTimeout, "the provider did not answer in time"
	default:
		r.Message = err.Error()
	}
	return r
}

func probeCheck(c *Probe) probe.Check {
	return probe.Check{URL: c.URL, Method: c.Method, Status: c.Status, Body: c.Body, EchoURL: c.EchoURL, Timeout: c.Timeout}
}

// probeNowLocked has x probed as soon as there is room.
func (p *Pool) probeNowLocked(x *instance) { p.probeAtLocked(x, time.Now()) }

// probeAtLocked has x probed at t, or earlier when that was planned already.
func (p *Pool) probeAtLocked(x *instance, t time.Time) {
	if x.probing || x.deleting != nil || p.instances[x.key()] != x {
		return
	}
	switch {
	case x.probeIndex < 0:
		x.probeDue = t
		heap.Push(&p.probes, x)
	case t.Before(x.probeDue):
		x.probeDue = t
		heap.Fix(&p.probes, x.probeIndex)
	default:
		return
	}
	if p.probes[0] == x {
		p.proberLocked()
	}
}

// proberLocked has the prober look again.
func (p *Pool) proberLocked() {
	select {
	case p.reprobe <- struct{}{}:
	default:
	}
}

func (p *Pool) unprobeLocked(x *instance) {
	if x.probeIndex >= 0 {
		heap.Remove(&p.probes, x.probeIndex)
	}
}

// softReasons are failures that may as well be the probe site's. The others are the proxy's for certain.
var softReasons = map[probe.Reason]bool{
	probe.ReasonTimeout: true, probe.ReasonTLS: true, probe.ReasonDNSAtProxy: true, probe.ReasonProxyError: true,
	probe.ReasonWrongStatus: true, probe.ReasonWrongBody: true, probe.ReasonInterrupted: true, probe.ReasonUnknown: true,
}

// probed takes the outcome of a probe that began at began, of what was x's address then.
func (p *Pool) probed(x *instance, began time.Time, address string, r probe.Result) {
	p.mu.Lock()
	defer p.unlock()
	p.probing--
	x.probing = false
	p.proberLocked()
	if r.Reason == probe.ReasonCanceled || x.member == nil || x.deleting != nil || p.instances[x.key()] != x {
		return
	}
	now := time.Now()
	if address != x.endpoint.Addr() || r.OK && began.Before(x.brokenAt) {
		p.probeAtLocked(x, now) // it moved, or was reported broken, meanwhile
		return
	}
	p.counters.Probes++
	x.lastProbe = ProbeResult{Time: now, OK: r.OK, Reason: string(r.Reason), Message: r.Message, Duration: r.Duration}
	check := &x.member.decl.Probe
	if r.OK {
		p.succeededLocked(x, r, check, now)
	} else {
		p.failedLocked(x, r, check, now)
	}
	p.probeAtLocked(x, now.Add(p.probePause(x, check, now)))
}

// probePause is the time to the next probe.
func (p *Pool) probePause(x *instance, check *Probe, now time.Time) time.Duration {
	switch {
	case !x.fit && x.streak > 0:
		return min(time.Second, check.Interval) // it is about to rise
	case !x.everFit:
		return min(plan.LookInterval(now.Sub(x.firstSeen)), check.Interval)
	case !x.fit || x.broken():
		// It worked before; ask sooner at first, so that a short trouble costs little.
		return min(time.Second<<min(-min(x.streak, 0), 10), check.Interval)
	case x.fit && now.Sub(x.fitSince) < time.Second && x.streak > 0:
		// The first one after it became fit falls anywhere in the interval, so that a fleet that came up
		// together is not probed together.
		return rand.N(check.Interval) + time.Millisecond
	}
	tenth := check.Interval / 10
	return check.Interval - tenth + rand.N(2*tenth+1)
}

func (p *Pool) succeededLocked(x *instance, r probe.Result, check *Probe, now time.Time) {
	x.streak = max(x.streak, 0) + 1
	x.failingSince = time.Time{}
	if r.EgressIP.IsValid() {
		p.learnEgressLocked(x, r.EgressIP)
	}
	if x.fit && !x.broken() || x.streak < check.Rise {
		return
	}
	x.fit, x.everFit, x.brokenAt = true, true, time.Time{}
	x.fitSince = now
	m := x.member
	m.failures, m.lastErr = 0, nil
	p.emit(Event{Kind: EventFit, Proxy: x.proxy, Instance: x.name})
	p.later(func() { p.logger.Info("proxy works", "proxy", x.proxy, "instance", x.name, "message", r.Message) })
	p.wake()
}

func (p *Pool) failedLocked(x *instance, r probe.Result, check *Probe, now time.Time) {
	p.counters.ProbeErrors++
	x.streak = min(x.streak, 0) - 1
	x.soft = softReasons[r.Reason]
	if !x.everFit && x.source != nil {
		return // it is still booting
	}
	if x.failingSince.IsZero() && -x.streak >= check.Fall {
		x.failingSince = now
		p.wake()
	}
	if !x.fit || -x.streak < check.Fall {
		return
	}
	x.fit = false
	p.emit(Event{Kind: EventUnfit, Proxy: x.proxy, Instance: x.name, Message: string(r.Reason) + ": " + r.Message})
	p.later(func() {
		p.logger.Warn("proxy does not work", "proxy", x.proxy, "instance", x.name, "reason", string(r.Reason), "message", r.Message)
	})
	p.wake()
}

// learnEgressLocked notes the address that a proxy is seen with, and warns when another one has it too.
func (p *Pool) learnEgressLocked(x *instance, ip netip.Addr) {
	if x.egressIP == ip {
		return
	}
	x.egressIP = ip
	for _, other := range p.instances {
		if other == x || other.member == nil || other.member == x.member || other.egressIP != ip {
			continue
		}
		message := fmt.Sprintf("%s and %s are both seen as %s", min(x.proxy, other.proxy), max(x.proxy, other.proxy), ip)
		p.emit(Event{Kind: EventSameEgress, Proxy: x.proxy, Instance: x.name, Message: message})
		p.later(func() { p.logger.Warn("two proxies have one egress address", "proxies", message, "address", ip) })
		return
	}
}

// reported takes what the holder of a lease said about a proxy.
func (p *Pool) reported(e *leases.Entry, r leases.Report) {
	if r.Kind != leases.Failed && r.Kind != leases.Broken {
		return
	}
	p.mu.Lock()
	defer p.unlock()
	if x := e.Data().(*forwarder).owner; x.entry == e {
		p.doubtLocked(x, r)
	}
}

// doubtLocked has x probed soon. Many reports about one proxy are one doubt.
func (p *Pool) doubtLocked(x *instance, r leases.Report) {
	now := time.Now()
	if r.Kind == leases.Broken {
		x.brokenAt = now
		p.later(func() {
			p.logger.Warn("proxy was reported broken", "proxy", x.proxy, "instance", x.name, "error", r.Err)
		})
		p.wake()
	}
	p.probeAtLocked(x, later(now, x.lastProbe.Time.Add(doubtPause)))
}

// doubtPause is the least time between a probe and one that is due to a report.
const doubtPause = time.Second

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// probeQueue is a heap of instances by probeDue.
type probeQueue []*instance

func (q probeQueue) Len() int           { return len(q) }
func (q probeQueue) Less(i, j int) bool { return q[i].probeDue.Before(q[j].probeDue) }
func (q probeQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].probeIndex, q[j].probeIndex = i, j
}

func (q *probeQueue) Push(x any) {
	i := x.(*instance)
	i.probeIndex = len(*q)
	*q = append(*q, i)
}

func (q *probeQueue) Pop() any {
	old := *q
	x := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	x.probeIndex = -1
	return x
}
