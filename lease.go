package egress

import (
	"context"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"time"

	"crawl.example.com/egress/internal/callsite"
	"crawl.example.com/egress/internal/leases"
)

// Request says which proxy a lease may be on. The zero value takes any.
type Request struct {
	// Labels must all be on the proxy. Defaults to none.
	Labels map[string]string
	// Key is sticky: requests with the same key get the same instance while it is fit, waiting for it when
	// it is full. When it is gone another takes its place, and the lease says so by Moved. The pool
	// remembers the 100,000 keys used last. Defaults to none.
	Key string
	// Exclude names proxies not to use. Defaults to none.
	Exclude []string
	// Target is the site the lease is for, by which Banned feedback is kept. Defaults to none; the pool's
	// Transport fills in the host name of each request's URL.
	Target string
	// TTL is how long the lease may be held; then it is revoked. Defaults to 0, for ever.
	TTL time.Duration
	// Retries is how often the pool's Transport tries another proxy after a failure at the proxy, where
	// that is safe. Defaults to 0. Leases ignore it.
	Retries int
}

func (r *Request) internal() leases.Request {
	return leases.Request{Labels: r.Labels, Key: r.Key, Exclude: r.Exclude, Target: r.Target, TTL: r.TTL}
}

// Lease is the right to use one proxy until it is released or revoked. All methods are safe for concurrent use.
//
// A lease that is dropped without Release is taken back once the garbage collector has noticed, and logged with
// the place of its Acquire.
type Lease struct {
	core leases.Lease // first, as it wants to be
}

// Acquire leases a proxy that suits req. It blocks until there is one, first come, first served, or until ctx
// ends; a context that has ended always loses. It fails when the pool is not started or closed ([ErrNotStarted],
// [ErrClosed]) and when no declared proxy could ever suit ([ErrNoMatch]): at once, and also while it waits, when Close or
// Apply makes it so. When ctx ends the error matches both [ErrExhausted] and the context's cause; when ctx had ended
// before, it is the cause alone. The lease does not end with ctx.
//
//go:noinline
func (p *Pool) Acquire(ctx context.Context, req Request) (*Lease, error) {
	if err := p.ready(); err != nil {
		return nil, err
	}
	l := new(Lease)
	r := req.internal()
	if err := p.table.Acquire(ctx, &r, &l.core, callsite.Caller()); err != nil {
		return nil, publicError(err)
	}
	return l, nil
}

// TryAcquire is Acquire without waiting: when no suitable proxy is free the error matches [ErrExhausted]. A place that
// somebody waits for is not free.
//
//go:noinline
func (p *Pool) TryAcquire(req Request) (*Lease, error) {
	if err := p.ready(); err != nil {
		return nil, err
	}
	l := new(Lease)
	r := req.internal()
	if err := p.table.TryAcquire(&r, &l.core, callsite.Caller()); err != nil {
		return nil, publicError(err)
	}
	return l, nil
}

// Do leases a proxy as Acquire does, calls f and releases the lease, also when f panics. The context that f gets
// ends with ctx and when the lease is revoked; so does the lease's own. Do returns f's error, or Acquire's.
func (p *Pool) Do(ctx context.Context, req Request, f func(ctx context.Context, lease *Lease) error) error {
	if err := p.ready(); err != nil {
		return err
	}
	l := new(Lease)
	r := req.internal()
	if err := p.table.Acquire(ctx, &r, &l.core, callsite.Caller()); err != nil {
		return publicError(err)
	}
	defer l.Release()
	return f(l.core.ContextFrom(ctx), l)
}

// Release gives the lease back. Only the first call does anything. It never blocks.
func (l *Lease) Release() { l.core.Release() }

// Report tells the pool how it went. It may be called at any time and several times, also after Release. It never
// blocks.
func (l *Lease) Report(f Feedback) { l.core.Report(f.report) }

// Proxy returns the proxy's name.
func (l *Lease) Proxy() string { return l.core.Entry().Proxy() }

// Instance returns the name of the instance, which is another one after each replacement.
func (l *Lease) Instance() string { return l.core.Entry().Instance() }

// Moved reports whether the request's key had another instance before.
func (l *Lease) Moved() bool { return l.core.Moved() }

// Context returns a context that ends when the lease does: its cause is [ErrReleased] or a *[RevokedError].
func (l *Lease) Context() context.Context { return l.core.Context() }

// Transport returns a RoundTripper that sends every request through this lease's proxy. Requests fail once the lease
// has ended, and those under way are cut off when it is revoked. All leases on an instance share its connections.
func (l *Lease) Transport() http.RoundTripper { return leaseTransport{l} }

// Client returns an HTTP client with Transport and nothing else set.
func (l *Lease) Client() *http.Client { return &http.Client{Transport: l.Transport()} }

// ProxyURL returns the proxy's URL for clients that take one, with the credentials in it when there are any: treat
// it as a secret. Connections made with it do not end with the lease.
func (l *Lease) ProxyURL() string { return l.forwarder().endpoint.URL().String() }

// String names the proxy and the instance.
func (l *Lease) String() string { return fmt.Sprintf("lease on %s (%s)", l.Proxy(), l.Instance()) }

func (l *Lease) forwarder() *forwarder { return l.core.Entry().Data().(*forwarder) }

// leaked logs a lease that was collected unreleased.
func (p *Pool) leaked(leak leases.Leak) {
	file, line := callsite.Describe(leak.PC)
	if f, n, ok := firstOutside(leak.Stack); ok {
		file, line = f, n
	}
	p.logger.Error("lease was never released", "proxy", leak.Member.Proxy, "instance", leak.Member.Instance,
		"acquired_at", fmt.Sprintf("%s:%d", file, line))
	p.emit(Event{Kind: EventLeaseLeaked, Proxy: leak.Member.Proxy, Instance: leak.Member.Instance,
		Message: fmt.Sprintf("acquired at %s:%d", file, line)})
}

// firstOutside returns the first place in a stack that is neither in net/http nor in this package.
func firstOutside(stack []uintptr) (file string, line int, ok bool) {
	if len(stack) == 0 {
		return "", 0, false
	}
	frames := runtime.CallersFrames(stack)
	for {
		frame, more := frames.Next()
		inside := strings.HasPrefix(frame.Function, "net/http.") ||
			strings.HasPrefix(frame.Function, "crawl.example.com/egress.") && !strings.HasSuffix(frame.File, "_test.go")
		if !inside && frame.File != "" {
			return frame.File, frame.Line, true
		}
		if !more {
			return "", 0, false
		}
	}
}
