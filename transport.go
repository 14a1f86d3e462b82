package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"crawl.example.com/egress/internal/leases"
	"crawl.example.com/egress/internal/upstream"
)

// forwarder sends requests through one instance. It lives and dies with it: an http.Transport that outlived the
// proxy would keep HTTP/2 connections through it (golang/go#25620).
type forwarder struct {
	endpoint *upstream.Endpoint
	owner    *instance // its proxy and name never change
	base     atomic.Pointer[http.Transport]
}

func newForwarder(x *instance) *forwarder { return &forwarder{endpoint: x.endpoint, owner: x} }

// transport makes the http.Transport when it is first needed: it is larger than all else that a proxy takes.
func (f *forwarder) transport() *http.Transport {
	if t := f.base.Load(); t != nil {
		return t
	}
	f.base.CompareAndSwap(nil, upstream.NewTransport(*f.endpoint))
	return f.base.Load()
}

// close ends the idle connections. Those in use end with the leases that use them.
func (f *forwarder) close() {
	if t := f.base.Load(); t != nil {
		t.CloseIdleConnections()
	}
}

// send makes one attempt. r's context must be the lease's.
func (f *forwarder) send(r *http.Request) (*http.Response, error) {
	resp, err := f.transport().RoundTrip(withoutProxyHeaders(r))
	if err != nil {
		return nil, f.explain(r.Context(), err)
	}
	if resp.StatusCode == http.StatusProxyAuthRequired && r.URL.Scheme == "http" && f.endpoint.Scheme != string(SchemeSOCKS5) {
		// A caller must not take the proxy's page for the target's. It is not certain that it is the proxy's: a target
		// may answer 407 too, and must not be able to put proxies out of service by it. Behind TLS it is the target's.
		resp.Body.Close()
		return nil, f.failure(upstream.KindAuth, errors.New("the proxy refused the credentials with 407"), false)
	}
	return resp, nil
}

func (f *forwarder) failure(kind upstream.Kind, err error, certain bool) *ProxyError {
	return &ProxyError{Proxy: f.owner.proxy, Instance: f.owner.name, Reason: string(kind), Err: err, certain: certain}
}

// explain says whose fault err is.
func (f *forwarder) explain(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	kind := upstream.Classify(err)
	_, refusal := errors.AsType[*upstream.StatusError](err)
	switch {
	case upstream.AtProxy(err):
		return f.failure(kind, err, kind != upstream.KindTimeout && kind != upstream.KindInterrupted)
	case refusal:
		return f.failure(kind, err, false)
	case kind == upstream.KindInterrupted || kind == upstream.KindTimeout:
		e := f.failure(kind, err, false)
		e.sent = true
		return e
	}
	return err
}

// withoutProxyHeaders returns r without the headers that are between a client and its proxy. The transport adds
// those for the proxy itself; the caller's would reach the target.
func withoutProxyHeaders(r *http.Request) *http.Request {
	if r.Header.Get("Proxy-Authorization") == "" && r.Header.Get("Proxy-Connection") == "" {
		return r
	}
	clean := *r
	clean.Header = r.Header.Clone()
	clean.Header.Del("Proxy-Authorization")
	clean.Header.Del("Proxy-Connection")
	return &clean
}

// Transport returns a RoundTripper that leases a proxy for every request, as req says, and releases it when the
// response's body has been read to its end or closed, and on every error. Each hop of a redirect is a request of
// its own. It waits for a free proxy until the request's context ends.
//
// A request is never sent without a proxy. What fails at the proxy is a *[ProxyError] and is reported to the pool: as
// [Broken] when the proxy's port is closed or it refuses us, else as [Failed]. Its other errors are Acquire's, the cause of
// a context that ended, a *[RevokedError], and what is the target's fault, as net/http says it.
//
// With req.Retries the request is sent again through other proxies when the proxy failed before anything can have reached
// the target, or when the method is safe (or an Idempotency-Key header is set) and no response came; its body must be
// absent or replayable by GetBody.
//
// It is safe for concurrent use.
func (p *Pool) Transport(req Request) http.RoundTripper {
	req.Exclude = slices.Clone(req.Exclude)
	return &poolTransport{pool: p, request: req}
}

// Client returns an HTTP client with Transport and nothing else set.
func (p *Pool) Client(req Request) *http.Client { return &http.Client{Transport: p.Transport(req)} }

type poolTransport struct {
	pool    *Pool
	request Request
}

// RoundTrip implements http.RoundTripper.
func (t *poolTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		closeBody(r)
		return nil, errors.New("egress: the request has no URL")
	}
	request := t.request.internal()
	if request.Target == "" {
		request.Target = strings.ToLower(r.URL.Hostname())
	}
	var before error
	for attempt := 0; ; attempt++ {
		resp, err := t.try(r, &request)
		if err == nil {
			return resp, nil
		}
		failed, ok := errors.AsType[*ProxyError](err)
		if !ok && before != nil {
			return nil, fmt.Errorf("%w; and then: %w", before, err)
		}
		before = err
		if !ok || attempt >= t.request.Retries || !repeatable(r, failed) {
			return nil, err
		}
		if r.Body != nil && r.Body != http.NoBody {
			body, bodyErr := r.GetBody()
			if bodyErr != nil {
				return nil, errors.Join(err, bodyErr)
			}
			again := *r
			again.Body = body
			r = &again
		}
		request.Exclude = append(slices.Clip(request.Exclude), failed.Proxy)
	}
}

// exchange is one request's lease and the body of its response, in one allocation.
type exchange struct {
	lease Lease // first, as it wants to be
	body  body
}

// try sends r through one leased proxy.
func (t *poolTransport) try(r *http.Request, request *leases.Request) (*http.Response, error) {
	if err := t.pool.ready(); err != nil {
		closeBody(r)
		return nil, err
	}
	x := new(exchange)
	l := &x.lease
	if err := t.pool.table.Acquire(r.Context(), request, &l.core, 0); err != nil {
		closeBody(r)
		return nil, publicError(err)
	}
	var stack [leases.Frames]uintptr
	l.core.Trace(stack[:runtime.Callers(3, stack[:])])
	ctx := l.core.ContextFrom(r.Context())
	resp, err := l.forwarder().send(r.WithContext(ctx))
	if err != nil {
		l.judge(err)
		l.Release()
		return nil, err
	}
	resp.Request = r
	if resp.Body == nil || resp.Body == http.NoBody {
		l.Release()
		resp.Body = http.NoBody
		return resp, nil
	}
	resp.Body = x.body.wrap(ctx, resp, l)
	return resp, nil
}

// judge reports what a failed request says about the proxy. A closed port, or a proxy that refuses us, is certain and
// would fail the next request too; a probe brings the proxy back when it was a short one.
func (l *Lease) judge(err error) {
	failed, ok := errors.AsType[*ProxyError](err)
	switch {
	case !ok:
	case failed.certain:
		l.Report(Broken(err))
	default:
		l.Report(Failed(err))
	}
}

// repeatable reports whether r may be sent again after it failed with err.
func repeatable(r *http.Request, err *ProxyError) bool {
	if r.Body != nil && r.Body != http.NoBody && r.GetBody == nil {
		return false
	}
	if !err.sent {
		return true
	}
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	_, a := r.Header["Idempotency-Key"]
	_, b := r.Header["X-Idempotency-Key"]
	return a || b
}

func closeBody(r *http.Request) {
	if r.Body != nil {
		r.Body.Close()
	}
}

// ender is what ends with a body.
type ender interface{ Release() }

type body struct {
	inner io.ReadCloser
	ctx   context.Context
	end   ender
	over  atomic.Bool
}

// wrap makes b resp's body and returns it, with end released once: at its end, at an error, at Close. When ctx ends
// with a cause the reader is told that cause. The body of a protocol switch can be written to, ends only with Close, and
// is cut off when ctx ends, which net/http does not do.
func (b *body) wrap(ctx context.Context, resp *http.Response, end ender) io.ReadCloser {
	*b = body{inner: resp.Body, ctx: ctx, end: end}
	w, ok := b.inner.(io.Writer)
	if !ok || resp.StatusCode != http.StatusSwitchingProtocols {
		return b
	}
	inner := b.inner // and not b, which the lease is with: it would never be seen to be dropped
	return &upgradedBody{body: b, w: w, stop: context.AfterFunc(ctx, func() { inner.Close() })}
}

func (b *body) finish() {
	if b.over.CompareAndSwap(false, true) {
		b.end.Release()
	}
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err != nil {
		err = b.explain(err)
		b.finish()
	}
	return n, err
}

// explain gives the cause of an ended context in place of what net/http made of it.
func (b *body) explain(err error) error {
	if err == io.EOF || b.over.Load() { //nolint:errorlint // io.Reader returns io.EOF itself
		return err
	}
	if cause := context.Cause(b.ctx); cause != nil {
		return cause
	}
	return err
}

func (b *body) Close() error {
	err := b.inner.Close()
	b.finish()
	return err
}

// upgradedBody is the connection after 101 Switching Protocols.
type upgradedBody struct {
	*body
	w    io.Writer
	stop func() bool // ends the wait for ctx
}

func (b *upgradedBody) Close() error {
	b.stop()
	return b.body.Close()
}

func (b *upgradedBody) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err != nil {
		err = b.explain(err)
	}
	return n, err
}

func (b *upgradedBody) Write(p []byte) (int, error) {
	n, err := b.w.Write(p)
	if err != nil {
		err = b.explain(err)
	}
	return n, err
}

// leaseTransport sends requests through one lease's proxy.
type leaseTransport struct{ lease *Lease }

// RoundTrip implements http.RoundTripper.
func (t leaseTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	held := t.lease.Context()
	if held.Err() != nil {
		closeBody(r)
		return nil, endOf(held, t.lease.String())
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	// What waits for the lease's end must not hold on to the lease, or nobody would notice that it was dropped.
	name := t.lease.String()
	x := &leased{stop: context.AfterFunc(held, func() { cancel(endOf(held, name)) }), cancel: cancel}
	resp, err := t.lease.forwarder().send(r.WithContext(ctx))
	if err != nil {
		t.lease.judge(err)
		x.Release()
		return nil, err
	}
	if resp.Body == nil || resp.Body == http.NoBody {
		x.Release()
	} else {
		resp.Body = x.body.wrap(ctx, resp, x)
	}
	resp.Request = r
	return resp, nil
}

// leased is one request on a lease that goes on after it.
type leased struct {
	body   body
	stop   func() bool // ends the wait for the lease's end
	cancel context.CancelCauseFunc
}

// Release ends the request and not the lease.
func (x *leased) Release() {
	x.stop()
	x.cancel(nil)
}

// endOf says why a lease's context has ended.
func endOf(held context.Context, lease string) error {
	cause := context.Cause(held)
	if errors.Is(cause, leases.ErrReleased) {
		return fmt.Errorf("%w: %s", ErrReleased, lease)
	}
	return cause
}
