package egress

import (
	"errors"
	"fmt"
	"time"

	"crawl.example.com/egress/internal/leases"
)

// The sentinels of the pool. Test for them with errors.Is.
var (
	// ErrNotStarted: the pool has not been started.
	ErrNotStarted = errors.New("egress: pool is not started")
	// ErrStarted: Start was called twice.
	ErrStarted = errors.New("egress: pool is started already")
	// ErrClosed: the pool is closed or closing.
	ErrClosed = errors.New("egress: pool is closed")
	// ErrExhausted: no proxy is free for the request. The error is an *[ExhaustedError] that says why.
	ErrExhausted = errors.New("egress: no proxy is free")
	// ErrNoMatch: no declared proxy can ever satisfy the request. The error is a *[NoMatchError].
	ErrNoMatch = errors.New("egress: no declared proxy matches")
	// ErrReleased: the lease has been released.
	ErrReleased = leases.ErrReleased
	// ErrUnknownProxy: there is no proxy of that name.
	ErrUnknownProxy = errors.New("egress: unknown proxy")
)

// ExhaustedError says why no proxy was free. It matches [ErrExhausted], and the context's cause when a wait was
// given up.
type ExhaustedError struct {
	// Full proxies are fit and have MaxLeases leases.
	Full int
	// Cooling proxies are fit and banned for the request's target for a while.
	Cooling int
	// Excluded proxies are named in the request.
	Excluded int
	// Unfit proxies are starting, failing or draining.
	Unfit int
	// Held is how many proxies had room, but the request's key holds it to another one.
	Held int
	// Waiting is how many callers were waiting.
	Waiting int
	// Err is why the wait ended. Nil from TryAcquire.
	Err error
}

// Error lists the counts.
func (e *ExhaustedError) Error() string {
	text := fmt.Sprintf("%v: %d full, %d cooling down, %d excluded, %d unfit, %d out of reach because of the key, %d callers waiting",
		ErrExhausted, e.Full, e.Cooling, e.Excluded, e.Unfit, e.Held, e.Waiting)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Is makes the error match ErrExhausted.
func (e *ExhaustedError) Is(target error) bool { return target == ErrExhausted }

// Unwrap returns why the wait ended.
func (e *ExhaustedError) Unwrap() error { return e.Err }

// NoMatchError names the selection that no declared proxy can ever satisfy. It matches [ErrNoMatch].
type NoMatchError struct {
	// Labels and Exclude are the request's.
	Labels  map[string]string
	Exclude []string
	text    string
}

// Error names the labels and the excluded proxies.
func (e *NoMatchError) Error() string { return "egress: " + e.text }

// Is makes the error match ErrNoMatch.
func (e *NoMatchError) Is(target error) bool { return target == ErrNoMatch }

// RevokedError is the cause of a lease's context when the pool took the lease back, and the error of the requests
// that were under way.
type RevokedError struct {
	// Proxy and Instance say what the lease was on.
	Proxy, Instance string
	// Reason says why: "ttl", "drain deadline", "gone", "closed", or "address or credentials changed".
	// A lease that was granted in the moment that its instance was given up has the reason for that,
	// such as "removed", "replaced", "unhealthy", "stopped", "failed" or "drift".
	Reason string
	// Err is ErrClosed when the pool was closed, else nil.
	Err error
}

// Error names the proxy and the reason.
func (e *RevokedError) Error() string {
	return fmt.Sprintf("egress: lease on proxy %s (%s) was revoked: %s", e.Proxy, e.Instance, e.Reason)
}

// Unwrap returns Err.
func (e *RevokedError) Unwrap() error { return e.Err }

// ProxyError says that a request failed at the proxy, not at its target. It holds no credentials.
type ProxyError struct {
	// Proxy and Instance say which.
	Proxy, Instance string
	// Reason is a word such as refused, unreachable, timeout, auth, tls, target-dns or proxy-status.
	Reason string
	// Err is the cause.
	Err error

	sent    bool // something may have reached the target
	certain bool // the next request would fail too
}

// Error names the proxy, the reason and the cause.
func (e *ProxyError) Error() string {
	return fmt.Sprintf("egress: proxy %s (%s): %s: %v", e.Proxy, e.Instance, e.Reason, e.Err)
}

// Unwrap returns the cause.
func (e *ProxyError) Unwrap() error { return e.Err }

// publicError turns the lease table's errors into the pool's.
func publicError(err error) error {
	if full, ok := errors.AsType[*leases.ExhaustedError](err); ok {
		return &ExhaustedError{
			Full: full.Full, Cooling: full.Cooling, Excluded: full.Excluded, Unfit: full.Unfit, Held: full.Ready,
			Waiting: full.Waiting, Err: full.Err,
		}
	}
	if none, ok := errors.AsType[*leases.NoMatchError](err); ok {
		return &NoMatchError{Labels: none.Labels, Exclude: none.Exclude, text: none.Error()}
	}
	if errors.Is(err, leases.ErrNilContext) {
		return errors.New("egress: the context is nil, want context.Background() at least")
	}
	return err
}

// Feedback is what the holder of a lease learned about the proxy. See [Lease.Report].
type Feedback struct{ report leases.Report }

// OK is the feedback that the proxy did its work.
var OK = Feedback{leases.Report{Kind: leases.OK}}

// Failed is the feedback that a request failed in a way that may be the proxy's fault. One failure is no verdict:
// it is counted, and the proxy is probed soon.
func Failed(err error) Feedback { return Feedback{leases.Report{Kind: leases.Failed, Err: err}} }

// Broken is the feedback that the proxy does not work. It gets no more leases until a probe has succeeded.
func Broken(err error) Feedback { return Feedback{leases.Report{Kind: leases.Broken, Err: err}} }

// Banned is the feedback that the target of the lease has had enough of this proxy. It gets no more leases for
// that target for d, and goes on for all others. A lease without a Target cools the proxy down for the other
// requests without one.
func Banned(d time.Duration) Feedback { return Feedback{leases.Report{Kind: leases.Banned, Cool: d}} }
