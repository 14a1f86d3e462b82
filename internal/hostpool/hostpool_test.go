package hostpool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/hostpool"
	"crawl.example.com/egress/provider"
)

// conn is a connection that does nothing but live and die.
type conn struct {
	host   string
	done   chan struct{}
	closes atomic.Int64

	mu  sync.Mutex
	err error
}

func newConn(host string) *conn { return &conn{host: host, done: make(chan struct{})} }

func (c *conn) die(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
		close(c.done)
	}
}

func (c *conn) Close() error {
	c.closes.Add(1)
	c.die(errors.New("closed here"))
	return nil
}
func (c *conn) Done() <-chan struct{} { return c.done }
func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// hosts counts dials and remembers connections.
type hosts struct {
	mu    sync.Mutex
	conns []*conn
	dials map[string]int
	fail  map[string]error         // dials of these fail
	slow  map[string]time.Duration // dials of these take so long, or until their context ends
}

func newHosts() *hosts {
	return &hosts{dials: map[string]int{}, fail: map[string]error{}, slow: map[string]time.Duration{}}
}

func (h *hosts) dial(ctx context.Context, host string) (*conn, error) {
	h.mu.Lock()
	h.dials[host]++
	slow, fail := h.slow[host], h.fail[host]
	h.mu.Unlock()
	if slow > 0 {
		timer := time.NewTimer(slow)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	if fail != nil {
		return nil, fail
	}
	c := newConn(host)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conns = append(h.conns, c)
	return c, nil
}

func (h *hosts) conn(i int) *conn {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.conns[i]
}

func (h *hosts) dialled(host string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.dials[host]
}

func (h *hosts) set(host string, fail error, slow time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail[host], h.slow[host] = fail, slow
}

type (
	config = hostpool.Config[string, *conn]
	pool   = hostpool.Pool[string, *conn]
)

// sentinel is the test that backends give as Config.Local.
func sentinel(err error) bool { return provider.Kind(err) != nil }

// inBubble makes a pool in a bubble. That the bubble ends proves that Close leaves no goroutine.
func inBubble(t *testing.T, change func(*config), f func(t *testing.T, p *pool, h *hosts)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHosts()
		c := config{Dial: h.dial, Local: sentinel}
		if change != nil {
			change(&c)
		}
		p := hostpool.New(c)
		defer func() {
			p.Close()
			h.mu.Lock()
			defer h.mu.Unlock()
			for i, c := range h.conns {
				if n := c.closes.Load(); n != 1 {
					t.Errorf("connection %d was closed %d times, want once", i, n)
				}
			}
		}()
		f(t, p, h)
	})
}

func nothing(context.Context, *conn) error { return nil }

// hang waits for its context, as a well-behaved call does.
func hang(ctx context.Context, _ *conn) error { <-ctx.Done(); return context.Cause(ctx) }

func TestEverybodySharesOneConnectionToAHost(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("a", nil, time.Second)
		var wg sync.WaitGroup
		var mu sync.Mutex
		seen := map[*conn]bool{}
		for i := range 20 {
			do := p.Do
			if i%2 == 0 {
				do = p.Probe
			}
			wg.Go(func() {
				err := do(t.Context(), "a", func(_ context.Context, c *conn) error {
					mu.Lock()
					defer mu.Unlock()
					seen[c] = true
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(seen) != 1 || h.dialled("a") != 1 {
			t.Errorf("%d connections by %d dials, want one", len(seen), h.dialled("a"))
		}
		p.Do(t.Context(), "b", func(_ context.Context, c *conn) error {
			if c.host != "b" {
				t.Errorf("got the connection to %s, want b", c.host)
			}
			return nil
		})
	})
}

func TestTwoCallersOfADeadHostDoNotDelayAFastHost(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("dead", nil, time.Hour)
		var wg sync.WaitGroup
		start := time.Now()
		for _, timeout := range []time.Duration{5 * time.Second, 10 * time.Second} {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				err := p.Do(ctx, "dead", nothing)
				if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != timeout {
					t.Errorf("after %s: %v, want the own timeout of %s", time.Since(start), err, timeout)
				}
			})
		}
		synctest.Wait()
		if err := p.Do(t.Context(), "fast", nothing); err != nil || time.Since(start) != 0 {
			t.Errorf("the fast host took %s: %v", time.Since(start), err)
		}
		if err := p.Probe(t.Context(), "fast", nothing); err != nil || time.Since(start) != 0 {
			t.Errorf("a probe of the fast host took %s: %v", time.Since(start), err)
		}
		wg.Wait()
		if h.dialled("dead") != 1 {
			t.Errorf("dialled %d times, want one dial for both", h.dialled("dead"))
		}
	})
}

func TestADialOutlivesTheCallerWhoStartedIt(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("a", nil, 10*time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := p.Do(ctx, "a", nothing); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		synctest.Wait()
		start := time.Now()
		if err := p.Do(t.Context(), "a", nothing); err != nil || time.Since(start) != 10*time.Second {
			t.Errorf("the second caller, after %s: %v", time.Since(start), err)
		}
		wg.Wait()
		if h.dialled("a") != 1 {
			t.Errorf("dialled %d times, want once", h.dialled("a"))
		}
	})
}

func TestACheckOfADeadHostEndsWithItsOwnTimeout(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("dead", nil, time.Hour)
		for range 3 {
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			err := p.Probe(ctx, "dead", nothing)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, hostpool.ErrProbePending) || time.Since(start) != 3*time.Second {
				t.Errorf("after %s: %v", time.Since(start), err)
			}
		}
	})
}

func TestADialThatHangsEndsWithDialTimeout(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("dead", nil, time.Hour)
		start := time.Now()
		err := p.Do(t.Context(), "dead", nothing)
		dial, ok := errors.AsType[*hostpool.DialError[string]](err)
		if !ok || dial.Host != "dead" || !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 30*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
	})
}

func TestEverybodyWhoWaitedSharesOneFailureAndSoDoesWhoeverAsksSoon(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		refused := errors.New("connection refused")
		h.set("a", refused, time.Second)
		var wg sync.WaitGroup
		var mu sync.Mutex
		got := map[error]bool{}
		note := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			got[err] = true
			if !errors.Is(err, refused) {
				t.Errorf("got %v", err)
			}
		}
		for range 10 {
			wg.Go(func() { note(p.Do(t.Context(), "a", nothing)) })
		}
		wg.Wait()
		start := time.Now()
		note(p.Do(t.Context(), "a", nothing))
		note(p.Probe(t.Context(), "a", nothing))
		if time.Since(start) != 0 {
			t.Errorf("a known failure took %s", time.Since(start))
		}
		if len(got) != 1 || h.dialled("a") != 1 {
			t.Errorf("%d errors by %d dials, want one of each", len(got), h.dialled("a"))
		}
	})
}

func TestDialsOfADeadHostBackOffWithJitterAndASuccessForgetsThat(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		h.set("a", io.EOF, 0)
		pauses := map[time.Duration]bool{}
		for i := range 12 {
			dial, ok := errors.AsType[*hostpool.DialError[string]](p.Do(t.Context(), "a", nothing))
			if !ok {
				t.Fatal("the dial succeeded")
			}
			full := min(time.Second<<i, 30*time.Second)
			pause := dial.RetryAt.Sub(dial.At)
			if pause > full || pause < full/2 {
				t.Errorf("pause %d is %s, want %s to %s", i, pause, full/2, full)
			}
			pauses[pause] = true
			time.Sleep(pause - 1)
			p.Do(t.Context(), "a", nothing)
			if h.dialled("a") != i+1 {
				t.Fatalf("dialled %d times, want %d before the pause is over", h.dialled("a"), i+1)
			}
			time.Sleep(time.Nanosecond)
		}
		if len(pauses) < 10 {
			t.Errorf("only %d of 12 pauses differ", len(pauses))
		}
		h.set("a", nil, 0)
		if err := p.Do(t.Context(), "a", nothing); err != nil {
			t.Fatal(err)
		}
		h.set("a", io.EOF, 0)
		p.Do(t.Context(), "a", func(context.Context, *conn) error { return io.EOF })
		if dial, ok := errors.AsType[*hostpool.DialError[string]](p.Do(t.Context(), "a", nothing)); !ok || dial.RetryAt.Sub(dial.At) > time.Second {
			t.Errorf("after a success the backoff is %v, want it to start anew", dial)
		}
	})
}

func TestAFreeSlotIsTakenAlsoWhenTheContextIsNearlyDone(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		if err := p.Do(t.Context(), "a", nothing); err != nil {
			t.Fatal(err)
		}
		for range 200 {
			ctx, cancel := context.WithTimeout(t.Context(), 1)
			if err := p.Do(ctx, "a", nothing); err != nil {
				t.Fatal(err)
			}
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 1)
			if err := p.Probe(ctx, "a", nothing); err != nil {
				t.Fatal(err)
			}
			cancel()
			time.Sleep(time.Nanosecond)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("too late")
		cancel(cause)
		called := false
		err := p.Do(ctx, "b", func(context.Context, *conn) error { called = true; return nil })
		if !errors.Is(err, cause) || !errors.Is(err, context.Canceled) || called || h.dialled("b") != 0 {
			t.Errorf("with a context that is done: %v, called %v, dialled %d times", err, called, h.dialled("b"))
		}
	})
}

func TestCallsBeyondTheLimitWaitWithinTheirContexts(t *testing.T) {
	inBubble(t, func(c *config) { c.MaxCalls = 2 }, func(t *testing.T, p *pool, h *hosts) {
		var now, most atomic.Int64
		var wg sync.WaitGroup
		start := time.Now()
		for range 6 {
			wg.Go(func() {
				p.Do(t.Context(), "a", func(context.Context, *conn) error {
					most.Store(max(most.Load(), now.Add(1)))
					time.Sleep(time.Second)
					now.Add(-1)
					return nil
				})
			})
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		if err := p.Do(ctx, "a", nothing); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "2 calls run") {
			t.Errorf("got %v, want to hear of the two calls that run", err)
		}
		if err := p.Do(t.Context(), "b", nothing); err != nil {
			t.Errorf("another host: %v", err)
		}
		wg.Wait()
		if most.Load() != 2 || time.Since(start) != 3*time.Second {
			t.Errorf("%d calls ran at once and all took %s, want 2 and 3s", most.Load(), time.Since(start))
		}
	})
}

func TestAnErrorWithASentinelKeepsTheConnection(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		for _, kind := range []error{
			provider.ErrPermanent, provider.ErrNotFound, provider.ErrAlreadyExists, provider.ErrNoCapacity,
			provider.ErrUnavailable, provider.ErrDenied, provider.ErrOutcomeUnknown,
		} {
			for _, do := range []func(context.Context, string, func(context.Context, *conn) error) error{p.Do, p.Probe} {
				want := fmt.Errorf("volume: %w", kind)
				if err := do(t.Context(), "a", func(context.Context, *conn) error { return want }); !errors.Is(err, want) {
					t.Errorf("got %v, want %v as it is", err, want)
				}
			}
		}
		synctest.Wait()
		if err := p.Do(t.Context(), "a", nothing); err != nil || h.dialled("a") != 1 {
			t.Errorf("after %d dials: %v", h.dialled("a"), err)
		}
	})
}

func TestATransportErrorDropsTheConnectionOnceForAllWaiters(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		var wg sync.WaitGroup
		broken := errors.New("broken pipe")
		for i := range 10 {
			wg.Go(func() {
				err := p.Do(t.Context(), "a", func(ctx context.Context, c *conn) error {
					if i == 0 {
						time.Sleep(time.Second)
						return broken
					}
					<-c.Done() // as an RPC does
					<-ctx.Done()
					if !errors.Is(context.Cause(ctx), broken) {
						t.Errorf("the context ended with %v, want the transport's error", context.Cause(ctx))
					}
					return c.Err()
				})
				if err == nil {
					t.Error("a call on a broken connection succeeded")
				}
				if err := p.Do(t.Context(), "a", nothing); err != nil {
					t.Errorf("the next call: %v", err)
				}
			})
		}
		wg.Wait()
		if h.dialled("a") != 2 {
			t.Errorf("dialled %d times, want a second time for everybody", h.dialled("a"))
		}
	})
}

func TestALateErrorOfAnOldConnectionLeavesTheNewOne(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		var wg sync.WaitGroup
		wg.Go(func() {
			p.Do(t.Context(), "a", func(context.Context, *conn) error {
				time.Sleep(time.Minute)
				return io.ErrUnexpectedEOF
			})
		})
		synctest.Wait()
		p.Do(t.Context(), "a", func(context.Context, *conn) error { return io.EOF })
		p.Do(t.Context(), "a", nothing)
		wg.Wait()
		synctest.Wait()
		p.Do(t.Context(), "a", nothing)
		if h.dialled("a") != 2 {
			t.Errorf("dialled %d times, want 2", h.dialled("a"))
		}
	})
}

func TestTheEndOfTheCallersContextProvesNothingAgainstTheConnection(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Do(ctx, "a", hang); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		p.Do(t.Context(), "a", nothing)
		if h.dialled("a") != 1 {
			t.Errorf("dialled %d times, want once", h.dialled("a"))
		}
	})
}

func TestAConnectionThatDiesByItselfIsReplaced(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		died := errors.New("no answer to keepalives")
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := p.Do(t.Context(), "a", hang); !errors.Is(err, died) {
				t.Errorf("a call on it: %v, want why it died", err)
			}
		})
		synctest.Wait()
		h.conn(0).die(died)
		// Nobody has noticed yet: the pool has to look.
		if err := p.Do(t.Context(), "a", func(_ context.Context, c *conn) error { return c.Err() }); err != nil {
			t.Errorf("the next call got a dead connection: %v", err)
		}
		wg.Wait()
	})
}

func TestACheckGoesThroughWhileAnHourLongUploadHoldsTheLink(t *testing.T) {
	inBubble(t, func(c *config) { c.MaxCalls = 1 }, func(t *testing.T, p *pool, h *hosts) {
		var wg sync.WaitGroup
		uploaded := false
		wg.Go(func() {
			err := p.Do(t.Context(), "a", func(ctx context.Context, _ *conn) error {
				timer := time.NewTimer(time.Hour)
				select {
				case <-timer.C:
					uploaded = true
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			})
			if err != nil {
				t.Errorf("the upload: %v", err)
			}
		})
		synctest.Wait()
		start := time.Now()
		for time.Since(start) < 59*time.Minute {
			before := time.Now()
			if err := p.Probe(t.Context(), "a", nothing); err != nil || time.Since(before) != 0 {
				t.Fatalf("a check took %s: %v", time.Since(before), err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := p.Probe(ctx, "a", hang); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("a check that hangs: %v", err)
			}
			cancel()
			time.Sleep(time.Minute)
		}
		wg.Wait()
		if !uploaded || h.dialled("a") != 1 {
			t.Errorf("uploaded is %v after %d dials", uploaded, h.dialled("a"))
		}
	})
}

func TestOneAbandonedProbeMayWaitAndTheNextReportsATimeoutAtOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		release := make(chan struct{})
		returned := make(chan struct{})
		deaf := func(context.Context, *conn) error { // libvirt's calls know no context
			defer close(returned)
			<-release
			return io.EOF
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		start := time.Now()
		err := p.Probe(ctx, "a", deaf)
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, hostpool.ErrProbePending) || time.Since(start) != 5*time.Second {
			t.Errorf("after %s: %v, want the probe's own timeout", time.Since(start), err)
		}
		for range 3 {
			start = time.Now()
			err := p.Probe(t.Context(), "a", nothing)
			var timeout interface{ Timeout() bool }
			if !errors.Is(err, hostpool.ErrProbePending) || !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() || time.Since(start) != 0 {
				t.Errorf("after %s: %v, want ErrProbePending at once", time.Since(start), err)
			}
		}
		if err := p.Do(t.Context(), "a", nothing); err != nil {
			t.Errorf("a call beside it: %v", err)
		}
		if err := p.Probe(t.Context(), "b", nothing); err != nil {
			t.Errorf("a probe of another host: %v", err)
		}
		close(release)
		<-returned
		synctest.Wait()
		if err := p.Probe(t.Context(), "a", nothing); err != nil {
			t.Errorf("after it returned: %v", err)
		}
		if h.dialled("a") != 1 {
			t.Errorf("dialled %d times: an abandoned probe's error must not end the connection", h.dialled("a"))
		}
	})
}

func TestAProbeWaitsForOneWhoseCallerStillWaits(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, _ *hosts) {
		release := make(chan struct{})
		deaf := func(context.Context, *conn) error { <-release; return nil }
		var wg sync.WaitGroup
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if err := p.Probe(ctx, "a", deaf); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		synctest.Wait()
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if err := p.Probe(ctx, "a", nothing); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 2*time.Second {
			t.Errorf("after %s: %v, want the own timeout", time.Since(start), err)
		}
		if err := p.Probe(t.Context(), "a", nothing); !errors.Is(err, hostpool.ErrProbePending) || time.Since(start) != 10*time.Second {
			t.Errorf("after %s: %v, want to hear when the first is abandoned", time.Since(start), err)
		}
		wg.Wait()
		close(release)
	})
}

func TestIdleConnectionsCloseAndBusyOnesStay(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, p *pool, h *hosts) {
		p.Do(t.Context(), "a", nothing)
		time.Sleep(3 * time.Minute)
		p.Probe(t.Context(), "a", nothing)
		time.Sleep(5*time.Minute - 1)
		synctest.Wait()
		if h.conn(0).Err() != nil {
			t.Fatal("closed before its time")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if h.conn(0).Err() == nil {
			t.Fatal("still open after 5 minutes without a call")
		}
		p.Do(t.Context(), "a", func(context.Context, *conn) error { time.Sleep(time.Hour); return nil })
		if h.conn(1).Err() != nil {
			t.Error("closed during a call")
		}
		if err := p.Do(t.Context(), "a", nothing); err != nil || h.dialled("a") != 2 {
			t.Errorf("after %d dials: %v", h.dialled("a"), err)
		}
	})
	inBubble(t, func(c *config) { c.IdleTimeout = -1 }, func(t *testing.T, p *pool, h *hosts) {
		p.Do(t.Context(), "a", nothing)
		time.Sleep(30 * 24 * time.Hour)
		if h.conn(0).Err() != nil {
			t.Error("closed although idle connections are to be kept")
		}
	})
}

func TestAKeepaliveThatGetsNoAnswerEndsTheConnectionInTime(t *testing.T) {
	for name, hook := range map[string]func(ctx context.Context, c *conn) error{
		"heeds its context":           func(ctx context.Context, _ *conn) error { <-ctx.Done(); return ctx.Err() },
		"heeds the connection's only": func(_ context.Context, c *conn) error { <-c.Done(); return c.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			var silent atomic.Bool
			keepalive := func(ctx context.Context, c *conn) error {
				if !silent.Load() {
					return nil
				}
				return hook(ctx, c)
			}
			inBubble(t, func(c *config) { c.Keepalive = keepalive }, func(t *testing.T, p *pool, h *hosts) {
				var wg sync.WaitGroup
				wg.Go(func() {
					if err := p.Do(t.Context(), "a", hang); err == nil || !strings.Contains(err.Error(), "no sign of life within 30s") {
						t.Errorf("what waited got %v", err)
					}
				})
				time.Sleep(time.Hour)
				if h.conn(0).Err() != nil {
					t.Fatal("ended while there were answers")
				}
				silent.Store(true)
				start := time.Now()
				wg.Wait()
				if took := time.Since(start); took > 45*time.Second {
					t.Errorf("ended after %s, want at most 45 s", took)
				}
			})
		})
	}
}

func TestAKeepaliveErrorEndsTheConnectionUnlessItIsLocal(t *testing.T) {
	var answer atomic.Value
	answer.Store(fmt.Errorf("busy: %w", provider.ErrUnavailable))
	keepalive := func(context.Context, *conn) error { return answer.Load().(error) }
	inBubble(t, func(c *config) { c.Keepalive = keepalive }, func(t *testing.T, p *pool, h *hosts) {
		p.Do(t.Context(), "a", nothing)
		time.Sleep(time.Minute)
		if h.conn(0).Err() != nil {
			t.Error("ended for a local error")
		}
		answer.Store(fmt.Errorf("read: %w", io.EOF))
		time.Sleep(15 * time.Second)
		synctest.Wait()
		if h.conn(0).Err() == nil {
			t.Error("still open after a transport error")
		}
	})
}

func TestCloseEndsCallsDialsAndProbesAndWaitsForThem(t *testing.T) {
	inBubble(t, func(c *config) { c.MaxCalls = 1 }, func(t *testing.T, p *pool, h *hosts) {
		h.set("slow", nil, time.Hour)
		var wg sync.WaitGroup
		start := time.Now()
		closes := func(what string, f func() error) {
			wg.Go(func() {
				if err := f(); !errors.Is(err, hostpool.ErrClosed) || time.Since(start) != time.Second {
					t.Errorf("%s, after %s: %v, want ErrClosed", what, time.Since(start), err)
				}
			})
			synctest.Wait()
		}
		closes("a call", func() error { return p.Do(t.Context(), "a", hang) })
		closes("a call that waits its turn", func() error { return p.Do(t.Context(), "a", nothing) })
		closes("a probe", func() error { return p.Probe(t.Context(), "a", hang) })
		closes("a probe that waits its turn", func() error { return p.Probe(t.Context(), "a", nothing) })
		closes("a dial", func() error { return p.Do(t.Context(), "slow", nothing) })
		closes("a probe's dial", func() error { return p.Probe(t.Context(), "slow", nothing) })
		returned := false
		deaf := func(_ context.Context, c *conn) error {
			<-c.Done()
			time.Sleep(time.Minute)
			returned = true
			return nil
		}
		wg.Go(func() { p.Probe(t.Context(), "b", deaf) })
		time.Sleep(time.Second)
		p.Close()
		if !returned {
			t.Error("Close returned before the abandoned probe")
		}
		wg.Wait()
		for _, err := range []error{p.Do(t.Context(), "a", nothing), p.Probe(t.Context(), "c", nothing)} {
			if !errors.Is(err, hostpool.ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		}
		p.Close()
	})
}

func TestAConnectionThatArrivesDuringCloseIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConn("a")
		p := hostpool.New(config{Dial: func(ctx context.Context, _ string) (*conn, error) {
			<-ctx.Done()
			return c, nil // too late, but a connection
		}})
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := p.Do(t.Context(), "a", hang); !errors.Is(err, hostpool.ErrClosed) {
				t.Error(err)
			}
		})
		synctest.Wait()
		p.Close()
		wg.Wait()
		if c.closes.Load() != 1 {
			t.Errorf("closed %d times, want once", c.closes.Load())
		}
	})
}

func TestAPanicHurtsNobodyElse(t *testing.T) {
	var log bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		h := newHosts()
		p := hostpool.New(config{
			Logger: slog.New(slog.NewTextHandler(&log, nil)), MaxCalls: 1,
			Dial: func(ctx context.Context, host string) (*conn, error) {
				if host == "bad" {
					panic("dial")
				}
				return h.dial(ctx, host)
			},
		})
		defer p.Close()
		if err := p.Do(t.Context(), "bad", nothing); err == nil || !strings.Contains(err.Error(), "panic: dial") {
			t.Errorf("a dial that panics: %v", err)
		}
		if err := p.Probe(t.Context(), "a", func(context.Context, *conn) error { panic("probe") }); err == nil || !strings.Contains(err.Error(), "panic: probe") {
			t.Errorf("a probe that panics: %v", err)
		}
		func() {
			defer func() {
				if recover() != "call" {
					t.Error("the panic of a call did not reach its caller")
				}
			}()
			p.Do(t.Context(), "a", func(context.Context, *conn) error { panic("call") })
		}()
		if err := p.Do(t.Context(), "a", nothing); err != nil {
			t.Errorf("the next call: %v", err)
		}
		if err := p.Probe(t.Context(), "a", nothing); err != nil {
			t.Errorf("the next probe: %v", err)
		}
	})
	if !strings.Contains(log.String(), "hostpool_test.go") {
		t.Error("the log does not say where it panicked")
	}
}

func TestTheLogTellsOfEachChangeOnce(t *testing.T) {
	var log bytes.Buffer
	inBubble(t, func(c *config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) }, func(t *testing.T, p *pool, h *hosts) {
		h.set("a", errors.New("refused"), 0)
		for range 5 {
			p.Do(t.Context(), "a", nothing)
		}
		h.set("a", nil, 0)
		time.Sleep(time.Second)
		for range 5 {
			p.Do(t.Context(), "a", nothing)
		}
		h.conn(0).die(errors.New("cable pulled"))
		synctest.Wait()
	})
	for _, line := range []string{"could not connect", "msg=connected", "connection lost"} {
		if n := strings.Count(log.String(), line); n != 1 {
			t.Errorf("%q stands %d times in\n%s", line, n, log.String())
		}
	}
	if !strings.Contains(log.String(), "cable pulled") {
		t.Errorf("the log does not say why:\n%s", log.String())
	}
}
