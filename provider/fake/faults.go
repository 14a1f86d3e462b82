package fake

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/provider"
)

// Set changes the configuration by f. Name, Store and Serve stay as they are.
func (p *Provider) Set(f func(*Config)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.config)
	p.config.Hosts = slices.Clone(p.config.Hosts)
}

// FailNext makes the next n calls of op fail with err and do nothing.
func (p *Provider) FailNext(op Op, err error, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range n {
		p.fails[op] = append(p.fails[op], err)
	}
}

// CreateThenFail makes the next n creates succeed and return err.
func (p *Provider) CreateThenFail(err error, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range n {
		p.lateFail = append(p.lateFail, err)
	}
}

// FailHalfway makes the next n creates stop after they have left something behind.
func (p *Provider) FailHalfway(n int) { p.set(func() { p.halfway += n }) }

// PanicNext makes the next n calls of op panic.
func (p *Provider) PanicNext(op Op, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.panics[op] += n
}

// Hang makes every call of op wait until release is called or its context ends.
func (p *Provider) Hang(op Op) (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.hangs[op]; old != nil {
		close(old)
	}
	c := make(chan struct{})
	p.hangs[op] = c
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.hangs[op] == c {
			delete(p.hangs, op)
			close(c)
		}
	}
}

// SetDenied makes every call fail with provider.ErrDenied, as with revoked credentials.
func (p *Provider) SetDenied(denied bool) { p.set(func() { p.denied = denied }) }

// SetDeleteLies makes Delete say yes and do nothing.
func (p *Provider) SetDeleteLies(lies bool) { p.set(func() { p.lies = lies }) }

// SetDeleteSticks leaves instances whose Delete is asked for from now on in provider.StateDeleting for ever.
func (p *Provider) SetDeleteSticks(sticks bool) { p.set(func() { p.stuck = sticks }) }

// SetHostDown makes a host stop to answer, or answer again. What is on it goes on running.
func (p *Provider) SetHostDown(host string, down bool) { p.set(func() { p.down[host] = down }) }

// SetDraining has a host emptied: it gets nothing new, and the pool is asked to replace what is on it.
func (p *Provider) SetDraining(host string, draining bool) {
	p.set(func() { p.draining[host] = draining })
}

// SetHealth makes Check return what f returns. Nil ends that.
func (p *Provider) SetHealth(f func(context.Context) []provider.TargetHealth) {
	p.set(func() { p.health = f })
}

func (p *Provider) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// Kill makes the proxy on an instance stop answering while the instance goes on running. The error is
// provider.ErrNotFound when there is no such instance.
func (p *Provider) Kill(id string) error {
	if s := p.server(id); s != nil {
		if err := s.SetFaults(forwardproxy.Faults{Refuse: true}); err != nil {
			return err
		}
	}
	return p.store.change(id, func(r *row) { r.Killed = true })
}

// Revive ends Kill.
func (p *Provider) Revive(id string) error {
	if s := p.server(id); s != nil {
		f := s.Faults()
		f.Refuse = false
		if err := s.SetFaults(f); err != nil {
			return err
		}
	}
	return p.store.change(id, func(r *row) { r.Killed = false })
}

// Preempt switches an instance off, as clouds do with cheap ones. It stays listed.
func (p *Provider) Preempt(id string) error {
	if s := p.server(id); s != nil {
		if err := s.SetFaults(forwardproxy.Faults{Refuse: true}); err != nil {
			return err
		}
	}
	return p.store.change(id, func(r *row) { r.Stopped = time.Now() })
}

// Vanish removes an instance behind everybody's back.
func (p *Provider) Vanish(id string) error {
	p.mu.Lock()
	server := p.servers[id]
	delete(p.servers, id)
	p.mu.Unlock()
	if server != nil {
		server.Close()
	}
	return p.store.change(id, func(r *row) { r.Gone = time.Now() })
}

// AddForeign adds a running instance that nobody asked this provider for, with any mark, and returns its id.
func (p *Provider) AddForeign(name string, mark provider.Mark) string {
	p.mu.Lock()
	host := p.config.Hosts[0]
	p.mu.Unlock()
	s := p.store
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	r := row{
		ID: name + "." + strings.ToLower(rand.Text()[:8]), Name: name, Mark: mark, Host: host, Created: time.Now(),
		Address: fmt.Sprintf("192.0.2.%d", len(s.all)%250+1),
	}
	if err := s.putLocked(r); err != nil {
		panic(err)
	}
	return r.ID
}

// Faults are what the proxy on an instance of a provider with Config.Serve does wrong. The zero value is a good proxy.
type Faults struct {
	// Delay is waited before each request is looked at.
	Delay time.Duration
	// Refuse closes the port and all connections.
	Refuse bool
	// CutAfter ends a connection once so many bytes were written to its client. Zero is never.
	CutAfter int64
	// Deny answers every request with 407.
	Deny bool
	// Status answers every request with this status, and Body, instead of passing it on. Zero is off.
	Status int
	Body   string
	// NoDNS answers as squid does when it can't resolve the target's name.
	NoDNS bool
}

// Counters count what the proxy on an instance of a provider with Config.Serve has done.
type Counters struct {
	Requests  int64 // requests in absolute form
	Connects  int64 // CONNECT requests
	AuthFails int64 // requests with wrong or no credentials
	Bytes     int64 // written to clients
	Active    int64 // requests and tunnels now
}

// SetFaults switches the faults of the proxy on an instance on and off. The error is provider.ErrNotFound when there is
// no such instance, or the provider does not serve.
func (p *Provider) SetFaults(id string, f Faults) error {
	s := p.server(id)
	if s == nil {
		return provider.ErrNotFound
	}
	return s.SetFaults(forwardproxy.Faults(f))
}

// Counters returns what the proxy on an instance has done. It is zero where SetFaults would fail.
func (p *Provider) Counters(id string) Counters {
	s := p.server(id)
	if s == nil {
		return Counters{}
	}
	return Counters(s.Counters())
}

func (p *Provider) server(id string) *forwardproxy.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.servers[id]
}

// Instances returns everything that is really there now, with the addresses of served proxies.
func (p *Provider) Instances() []provider.Instance {
	now := time.Now()
	var all []provider.Instance
	for _, r := range p.store.rows(now) {
		all = append(all, p.instance(r, now))
	}
	return all
}

// Calls returns the calls of op so far, or of every method when op is empty.
func (p *Provider) Calls(op Op) []Call {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Call
	for _, c := range p.calls {
		if op == "" || c.Op == op {
			all = append(all, c)
		}
	}
	return all
}

// MostInstances returns the highest number of instances that were there at once after a create.
func (p *Provider) MostInstances() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.most
}
