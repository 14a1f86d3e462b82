// Package hostpool keeps one connection per host and shares it among everything that talks to that host.
//
// A connection is taken to carry many calls at once, as SSH and libvirt's protocol do. So there are three separate
// limits per host, and none of them ever makes one host wait for another:
//
//   - one dial at a time, in the pool's own time: whoever needs the connection waits for the same dial within their
//     own context, and giving up does not end it for the others;
//   - [Config.MaxCalls] calls of [Pool.Do] at a time, so that a flood of creates meets a host's limits in a queue
//     instead of as errors;
//   - one call of [Pool.Probe] at a time, outside that queue, so that uploads which fill it don't make a healthy host
//     look dead.
package hostpool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"
)

// Conn is what a Pool keeps for a host. It must be safe for concurrent use.
type Conn interface {
	// Close ends the connection and fails whatever waits on it. It must not wait for the peer, which may be gone.
	// The Pool calls it exactly once.
	Close() error
	// Done is closed when the connection is dead, whoever ended it. A connection on which an abandoned call leaves a
	// mess behind closes itself, and the Pool learns of it here.
	Done() <-chan struct{}
	// Err says why it died. Nil while it lives.
	Err() error
}

// ErrClosed is what calls get once the Pool is closed, and the cause with which their contexts end.
var ErrClosed = errors.New("hostpool: closed")

// ErrProbePending is what Probe returns while an abandoned probe of the same host has not returned. It is a timeout:
// it matches context.DeadlineExceeded.
var ErrProbePending error = probePending{}

type probePending struct{}

func (probePending) Error() string {
	return "hostpool: no answer yet to an earlier probe of this host, which was abandoned when its time was over"
}
func (probePending) Timeout() bool        { return true }
func (probePending) Is(target error) bool { return target == context.DeadlineExceeded }

// DialError says that a host could not be dialled. Everyone who waited for the dial gets the same one, and so does
// everyone who asks before RetryAt.
type DialError[K comparable] struct {
	// Host is the host's key.
	Host K
	// At is when the dial failed.
	At time.Time
	// RetryAt is when the next call will dial again.
	RetryAt time.Time
	// Err is what the dial returned.
	Err error
}

// Error names the host, the cause and when the next attempt may be made.
func (e *DialError[K]) Error() string {
	return fmt.Sprintf("hostpool: dial %v: %v (not dialled again for %s)", e.Host, e.Err, e.RetryAt.Sub(e.At).Round(time.Millisecond))
}

// Unwrap returns the cause.
func (e *DialError[K]) Unwrap() error { return e.Err }

// Config says how to connect. Hosts are never forgotten, so K should name machines that were configured.
type Config[K comparable, C Conn] struct {
	// Dial connects to a host and logs in. It runs in a goroutine of the Pool with a context of the Pool, which ends
	// after DialTimeout or when the Pool is closed, and must heed it. Required.
	Dial func(ctx context.Context, host K) (C, error)
	// Local reports whether an error of a call is about what was asked and not about the connection, which then stays.
	// Any other error ends the connection for everyone, except one that came after the caller's own context had ended,
	// which proves nothing. A backend gives the test for the provider package's sentinels here, and has its calls
	// return transport errors bare. Defaults to none.
	Local func(error) bool
	// MaxCalls is how many calls of Do may run on one host at a time; further ones wait within their contexts, first
	// come first served. Defaults to 16.
	MaxCalls int
	// DialTimeout bounds one dial. Defaults to 30 s.
	DialTimeout time.Duration
	// MinBackoff is how long a host is left alone after a failed dial. It doubles with each further failure up to
	// MaxBackoff, and each time up to half of it is taken off at random, so that hosts that failed together don't come
	// back together. Defaults to 1 s.
	MinBackoff time.Duration
	// MaxBackoff bounds the backoff. Defaults to 30 s, half the usual interval of checks, so that each check of a dead
	// host asks anew; raised to MinBackoff when smaller.
	MaxBackoff time.Duration
	// IdleTimeout is how long a connection without calls stays open. Negative keeps it. Defaults to 5 m.
	IdleTimeout time.Duration
	// Keepalive asks the peer for a sign of life. It may run beside calls; it runs once at a time for each connection.
	// An error that is not Local, or no return within KeepaliveTimeout, ends the connection. It must return soon after
	// the connection is closed. Defaults to nothing, for connections that look after themselves.
	Keepalive func(ctx context.Context, conn C) error
	// KeepaliveInterval is the time between two calls of Keepalive. Defaults to 15 s.
	KeepaliveInterval time.Duration
	// KeepaliveTimeout bounds one. A dead peer is found within the two together. Defaults to 30 s.
	KeepaliveTimeout time.Duration
	// Logger gets a line when a connection is made, lost or refused. The host's key is in it. Defaults to discarding.
	Logger *slog.Logger
}

// Pool keeps the connections. It is safe for concurrent use.
type Pool[K comparable, C Conn] struct {
	config Config[K, C]
	// ctx ends, with ErrClosed as its cause, when the Pool is closed.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// running counts goroutines and calls. It grows only under mu and while closed is false.
	running sync.WaitGroup

	// mu guards hosts, closed, and the fields of each host and link that say so.
	mu     sync.Mutex
	hosts  map[K]*host[K, C]
	closed bool
}

// host is one entry.
type host[K comparable, C Conn] struct {
	key   K
	calls chan struct{} // a token for each call of Do

	// The fields below are guarded by Pool.mu.
	probing  *probing // nil when none runs
	link     *link[C]
	dialling *dialling[C]
	failure  *DialError[K] // the last dial's, until one succeeds
	backoff  time.Duration // before jitter
}

// probing is a probe under way.
type probing struct {
	done      chan struct{} // closed when it has returned
	abandoned chan struct{} // closed when its caller has left
}

// link is one connection in its life.
type link[C Conn] struct {
	conn C
	// ctx ends when the Pool lets go of the connection, with why as its cause.
	ctx    context.Context
	cancel context.CancelCauseFunc

	// The fields below are guarded by Pool.mu.
	calls     int
	idleSince time.Time
}

// dialling is a dial under way. Its result may be read when done is closed.
type dialling[C Conn] struct {
	done chan struct{}
	link *link[C]
	err  error
}

// New returns a Pool without connections. It does no I/O. It panics when config.Dial is nil.
func New[K comparable, C Conn](config Config[K, C]) *Pool[K, C] {
	if config.Dial == nil {
		panic("hostpool: Config.Dial is nil, want a function that connects to a host")
	}
	if config.Local == nil {
		config.Local = func(error) bool { return false }
	}
	if config.MaxCalls <= 0 {
		config.MaxCalls = 16
	}
	if config.IdleTimeout == 0 {
		config.IdleTimeout = 5 * time.Minute
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	setDefault(&config.DialTimeout, 30*time.Second)
	setDefault(&config.MinBackoff, time.Second)
	setDefault(&config.MaxBackoff, 30*time.Second)
	setDefault(&config.KeepaliveInterval, 15*time.Second)
	setDefault(&config.KeepaliveTimeout, 30*time.Second)
	config.MaxBackoff = max(config.MaxBackoff, config.MinBackoff)
	p := &Pool[K, C]{config: config, hosts: map[K]*host[K, C]{}}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	return p
}

func setDefault(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}

// Do calls f with the connection to host, which is dialled when there is none. It blocks until f returns: the context
// that f gets ends with ctx, when the connection dies and when the Pool is closed, with the cause of each, and f must
// heed it. Before that it waits within ctx for its turn among MaxCalls and for the dial.
//
// It returns f's own error; an error that matches ctx's when ctx ended first; a *DialError; or ErrClosed. f's error
// ends the connection unless Config.Local holds for it or ctx has ended. Do never calls f twice: what became of a call
// whose connection was lost is f's to find out. f must not close the Pool.
func (p *Pool[K, C]) Do(ctx context.Context, key K, f func(ctx context.Context, conn C) error) error {
	h, err := p.enter(ctx, key)
	if err != nil {
		return err
	}
	defer p.running.Done()
	if err := p.take(ctx, h.calls); err != nil {
		return fmt.Errorf("hostpool: %v: waiting while %d calls run there: %w", key, p.config.MaxCalls, err)
	}
	defer func() { <-h.calls }()
	l, err := p.connect(ctx, h)
	if err != nil {
		return err
	}
	return p.call(ctx, h, l, f)
}

// Probe is Do for checks. It doesn't count among MaxCalls, and it returns as soon as ctx ends, whether f has returned
// or not: f is then left to itself, and the connection and the calls on it are not touched. One abandoned f may stay
// behind for each host; until it returns, Probe returns ErrProbePending at once. A second Probe while one runs whose
// caller still waits takes its turn, within ctx. A panic of f becomes an error, since it may have nobody to meet it.
func (p *Pool[K, C]) Probe(ctx context.Context, key K, f func(ctx context.Context, conn C) error) error {
	h, err := p.enter(ctx, key)
	if err != nil {
		return err
	}
	defer p.running.Done()
	pr, err := p.startProbe(ctx, h)
	if err != nil {
		return err
	}
	l, err := p.connect(ctx, h)
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		h.endProbeLocked(pr)
		return err
	}
	result := make(chan error, 1)
	p.running.Go(func() {
		err := p.caught(func() error { return p.call(ctx, h, l, f) })
		p.mu.Lock()
		defer p.mu.Unlock()
		h.endProbeLocked(pr)
		result <- err // has room
	})
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	case <-p.ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case err := <-result:
		return err
	default:
	}
	close(pr.abandoned)
	if ctx.Err() == nil {
		return ErrClosed
	}
	return fmt.Errorf("hostpool: probe of %v abandoned: %w", key, ended(ctx))
}

// startProbe waits within ctx until no probe of h runs, but not for one that is abandoned.
func (p *Pool[K, C]) startProbe(ctx context.Context, h *host[K, C]) (*probing, error) {
	for {
		p.mu.Lock()
		current := h.probing
		if current == nil {
			h.probing = &probing{done: make(chan struct{}), abandoned: make(chan struct{})}
			defer p.mu.Unlock()
			return h.probing, nil
		}
		p.mu.Unlock()
		select {
		case <-current.done:
		case <-current.abandoned:
			return nil, ErrProbePending
		case <-ctx.Done():
			return nil, fmt.Errorf("hostpool: %v: waiting for another probe: %w", h.key, ended(ctx))
		case <-p.ctx.Done():
			return nil, ErrClosed
		}
	}
}

func (h *host[K, C]) endProbeLocked(pr *probing) {
	h.probing = nil
	close(pr.done)
}

// enter counts the caller as running.
func (p *Pool[K, C]) enter(ctx context.Context, key K) (*host[K, C], error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("hostpool: %v: %w", key, ended(ctx))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	p.running.Add(1)
	h := p.hosts[key]
	if h == nil {
		h = &host[K, C]{key: key, calls: make(chan struct{}, p.config.MaxCalls)}
		p.hosts[key] = h
	}
	return h, nil
}

// take puts a token into slot, waiting within ctx. A free slot is taken first of all: a select
// would as soon give up when ctx ends at the same moment.
func (p *Pool[K, C]) take(ctx context.Context, slot chan struct{}) error {
	select {
	case slot <- struct{}{}:
		return nil
	default:
	}
	select {
	case slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ended(ctx)
	case <-p.ctx.Done():
		return ErrClosed
	}
}

// connect returns the host's link with this caller counted on it.
func (p *Pool[K, C]) connect(ctx context.Context, h *host[K, C]) (*link[C], error) {
	p.mu.Lock()
	if l := h.link; l != nil {
		select {
		case <-l.conn.Done():
			h.link = nil // its supervisor is about to say so
		default:
			l.calls++
			p.mu.Unlock()
			return l, nil
		}
	}
	d := h.dialling
	if d == nil {
		if f := h.failure; f != nil && time.Now().Before(f.RetryAt) {
			p.mu.Unlock()
			return nil, f
		}
		d = &dialling[C]{done: make(chan struct{})}
		h.dialling = d
		p.running.Go(func() { p.dial(h, d) })
	}
	p.mu.Unlock()

	select {
	case <-d.done:
	default:
		select {
		case <-d.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("hostpool: waiting for the dial of %v: %w", h.key, ended(ctx))
		case <-p.ctx.Done():
			return nil, ErrClosed
		}
	}
	if d.err != nil {
		return nil, d.err
	}
	// The link may have died since. Then f finds that out: dialling on and on here could turn into a storm.
	p.mu.Lock()
	defer p.mu.Unlock()
	d.link.calls++
	return d.link, nil
}

// dial connects h for everyone who waits, and then looks after the link until it is gone.
func (p *Pool[K, C]) dial(h *host[K, C], d *dialling[C]) {
	ctx, cancel := context.WithTimeoutCause(p.ctx, p.config.DialTimeout,
		fmt.Errorf("%w: no connection within %s", context.DeadlineExceeded, p.config.DialTimeout))
	defer cancel()
	start := time.Now()
	var conn C
	err := p.caught(func() (err error) {
		conn, err = p.config.Dial(ctx, h.key)
		return err
	})
	if err != nil {
		p.dialFailed(h, d, err)
		return
	}
	l := &link[C]{conn: conn, idleSince: time.Now()}
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	p.mu.Lock()
	h.dialling, h.failure, h.backoff = nil, nil, 0
	h.link = l
	d.link = l
	close(d.done)
	p.mu.Unlock()
	p.config.Logger.Info("connected", "host", fmt.Sprint(h.key), "took", time.Since(start))
	p.supervise(h, l)
}

func (p *Pool[K, C]) dialFailed(h *host[K, C], d *dialling[C], err error) {
	now := time.Now()
	p.mu.Lock()
	if p.closed {
		err = ErrClosed
	} else {
		h.backoff = min(max(2*h.backoff, p.config.MinBackoff), p.config.MaxBackoff)
		wait := h.backoff - time.Duration(rand.Int64N(int64(h.backoff)/2+1))
		h.failure = &DialError[K]{Host: h.key, At: now, RetryAt: now.Add(wait), Err: err}
		err = h.failure
	}
	h.dialling = nil
	d.err = err
	close(d.done)
	p.mu.Unlock()
	if !errors.Is(err, ErrClosed) {
		p.config.Logger.Warn("could not connect", "host", fmt.Sprint(h.key), "error", err)
	}
}

// call runs f on the link and judges the link by its error.
func (p *Pool[K, C]) call(ctx context.Context, h *host[K, C], l *link[C], f func(context.Context, C) error) error {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		l.calls--
		l.idleSince = time.Now()
	}()
	callCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(l.ctx, func() { cancel(context.Cause(l.ctx)) })
	defer stop()
	err := f(callCtx, l.conn)
	if err != nil && ctx.Err() == nil && !p.config.Local(err) {
		p.drop(h, l, err)
	}
	return err
}

// drop lets go of the link, once: the next call dials. The supervisor closes the connection.
func (p *Pool[K, C]) drop(h *host[K, C], l *link[C], cause error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(h, l, cause)
}

func (p *Pool[K, C]) dropLocked(h *host[K, C], l *link[C], cause error) {
	if h.link == l {
		h.link = nil
	}
	l.cancel(cause) // the first cause stays
}

var errIdle = errors.New("hostpool: idle")

// supervise waits for whatever ends the link and closes it.
func (p *Pool[K, C]) supervise(h *host[K, C], l *link[C]) {
	var hooks sync.WaitGroup
	if p.config.Keepalive != nil {
		hooks.Go(func() { p.keepalive(h, l, &hooks) })
	}
	idle := time.NewTimer(p.config.IdleTimeout)
	defer idle.Stop()
	if p.config.IdleTimeout < 0 {
		idle.Stop()
	}
	for l.ctx.Err() == nil {
		select {
		case <-l.ctx.Done():
		case <-l.conn.Done():
			err := l.conn.Err()
			if err == nil {
				err = errors.New("no reason given")
			}
			p.drop(h, l, fmt.Errorf("hostpool: connection to %v lost: %w", h.key, err))
		case <-p.ctx.Done():
			p.drop(h, l, ErrClosed)
		case <-idle.C:
			idle.Reset(p.dropIdle(h, l))
		}
	}
	cause := context.Cause(l.ctx)
	if err := l.conn.Close(); err != nil {
		p.config.Logger.Debug("closing the connection", "host", fmt.Sprint(h.key), "error", err)
	}
	hooks.Wait()
	switch {
	case errors.Is(cause, ErrClosed):
	case errors.Is(cause, errIdle):
		p.config.Logger.Debug("closed an idle connection", "host", fmt.Sprint(h.key))
	default:
		p.config.Logger.Warn("connection lost", "host", fmt.Sprint(h.key), "error", cause)
	}
}

// dropIdle drops the link when it has been idle for long enough, and returns when to look again.
func (p *Pool[K, C]) dropIdle(h *host[K, C], l *link[C]) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := p.config.IdleTimeout
	if l.calls == 0 {
		left -= time.Since(l.idleSince)
	}
	if left <= 0 {
		p.dropLocked(h, l, errIdle)
	}
	return left
}

// keepalive asks for signs of life until the link is gone.
func (p *Pool[K, C]) keepalive(h *host[K, C], l *link[C], hooks *sync.WaitGroup) {
	ticker := time.NewTicker(p.config.KeepaliveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-ticker.C:
		}
		err := p.signOfLife(l, hooks)
		switch {
		case l.ctx.Err() != nil:
			return
		case errors.Is(err, errSilent):
			// The hook still waits. Closing the connection frees it.
			p.drop(h, l, fmt.Errorf("hostpool: %v: %w within %s", h.key, err, p.config.KeepaliveTimeout))
			return
		case err != nil && !p.config.Local(err):
			p.drop(h, l, fmt.Errorf("hostpool: keepalive of %v: %w", h.key, err))
			return
		}
	}
}

var errSilent = errors.New("no sign of life")

// signOfLife calls the hook once, in a goroutine of hooks, and returns errSilent when its time is over.
func (p *Pool[K, C]) signOfLife(l *link[C], hooks *sync.WaitGroup) error {
	ctx, cancel := context.WithTimeout(l.ctx, p.config.KeepaliveTimeout)
	defer cancel()
	result := make(chan error, 1)
	hooks.Go(func() {
		result <- p.caught(func() error { return p.config.Keepalive(ctx, l.conn) })
	})
	select {
	case err := <-result:
		if ctx.Err() == nil {
			return err
		}
	case <-ctx.Done():
	}
	return errSilent
}

// Close refuses new calls, closes every connection, which fails the calls that wait on it, ends the contexts of calls
// and dials with ErrClosed, and returns when all of them and every goroutine have ended. It may be called again, and
// from several goroutines. It always returns nil.
func (p *Pool[K, C]) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel(ErrClosed)
	p.running.Wait()
	return nil
}

// ended returns why ctx ended, as an error that matches both ctx.Err and its cause.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// caught calls f and turns a panic into an error: in a goroutine of the Pool it would end the whole program.
func (p *Pool[K, C]) caught(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			p.config.Logger.Error("panic in a call to a host", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = fmt.Errorf("hostpool: panic: %v", v)
		}
	}()
	return f()
}
