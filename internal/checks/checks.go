// Package checks asks every provider's Checker in rounds how its targets are, and remembers the answers.
package checks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// MinInterval is the shortest time between two rounds. A check may cost a login, and a refused login may be
// held for seconds and counted against us.
const MinInterval = 10 * time.Second

// maxDerivedTimeout bounds a round whose timeout is derived: Proxmox holds a refused login for 3 s and
// forwards to other nodes for up to 30 s, and 15 s tells the first from a dead host.
const maxDerivedTimeout = 15 * time.Second

// Config says whom to ask and when.
type Config struct {
	// Providers are asked in every round. Those without a provider.Checker are left out. Required.
	Providers []provider.Provider
	// Interval is the time from the start of one round to the start of the next. Defaults to 0, no rounds.
	Interval time.Duration
	// Timeout bounds a round. Defaults to 15 s or Interval, whichever is shorter.
	Timeout time.Duration
	// Logger gets one line for each change of a target. Defaults to discarding.
	Logger *slog.Logger
	// Changed is called after each change of a target, without locks, in order for each target. Defaults
	// to nothing.
	Changed func(Target)
}

// Target is what is known of one target.
type Target struct {
	provider.TargetHealth
	// Provider is the entry name of the target's provider.
	Provider string
	// Since is when Ready took the value it has.
	Since time.Time
}

// Checks holds the results. It is safe for concurrent use.
type Checks struct {
	config   Config
	checkers []*checker

	// mu guards targets.
	mu      sync.Mutex
	targets map[string][]Target // by provider; in the order of the last answer
}

type checker struct {
	name  string
	check provider.Checker
	// busy holds a token while a Check runs, which may be long after its round has ended.
	busy chan struct{}
}

// New returns Checks that know nothing yet. It does no I/O.
func New(config Config) *Checks {
	if config.Timeout <= 0 {
		config.Timeout = min(maxDerivedTimeout, config.Interval)
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Checks{config: config, targets: map[string][]Target{}}
	for _, p := range config.Providers {
		if check, ok := provider.As[provider.Checker](p); ok {
			c.checkers = append(c.checkers, &checker{name: p.Name(), check: check, busy: make(chan struct{}, 1)})
		}
	}
	return c
}

// Run runs the first round at once and then one every Interval until ctx ends. It returns when every Check it
// started has returned, so a Checker that does not heed its context holds it up.
func (c *Checks) Run(ctx context.Context) {
	if c.config.Interval <= 0 || len(c.checkers) == 0 {
		return
	}
	var running sync.WaitGroup
	defer running.Wait()
	ticker := time.NewTicker(c.config.Interval)
	defer ticker.Stop()
	for {
		c.round(ctx, &running)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Snapshot returns the newest results, sorted by provider and in the order its Checker gave. It never waits
// for a round. Targets that have not been checked yet are not in it.
func (c *Checks) Snapshot() []Target {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Target
	for _, k := range c.checkers {
		all = append(all, c.targets[k.name]...)
	}
	return all
}

// round asks every checker at once and returns when each has answered or its time is over.
func (c *Checks) round(ctx context.Context, running *sync.WaitGroup) {
	ctx, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	var round sync.WaitGroup
	for _, k := range c.checkers {
		round.Go(func() { c.ask(ctx, k, running) })
	}
	round.Wait()
}

func (c *Checks) ask(ctx context.Context, k *checker, running *sync.WaitGroup) {
	start := time.Now()
	select {
	case k.busy <- struct{}{}:
	default:
		c.timedOut(ctx, k, start, "the check of an earlier round has not returned yet")
		return
	}
	answers := make(chan []provider.TargetHealth, 1)
	running.Go(func() {
		defer func() { <-k.busy }()
		answers <- c.call(ctx, k)
	})
	select {
	case health := <-answers:
		c.store(ctx, k, health)
		return
	case <-ctx.Done():
	}
	// A checker that heeds its context answers about now; one that does not is given up for this round.
	grace := time.NewTimer(graceAfterTimeout)
	defer grace.Stop()
	select {
	case health := <-answers:
		c.store(ctx, k, health)
	case <-grace.C:
		c.timedOut(ctx, k, start, fmt.Sprintf("no answer within %s", c.config.Timeout))
	}
}

// graceAfterTimeout is what a checker has to return after its context has ended. It is short because all of
// one round's results wait for it.
const graceAfterTimeout = 100 * time.Millisecond

func (c *Checks) call(ctx context.Context, k *checker) (health []provider.TargetHealth) {
	defer func() {
		if v := recover(); v != nil {
			c.config.Logger.Error("checker panicked", "provider", k.name, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			health = []provider.TargetHealth{{
				Target: k.name, Reason: provider.ReasonUnknown, Message: "the checker panicked: " + fmt.Sprint(v),
			}}
		}
	}()
	return k.check.Check(ctx)
}

// timedOut stores a timeout for every target known, or for the provider as a whole when none is.
func (c *Checks) timedOut(ctx context.Context, k *checker, start time.Time, message string) {
	c.mu.Lock()
	known := slices.Clone(c.targets[k.name])
	c.mu.Unlock()
	health := make([]provider.TargetHealth, 0, max(1, len(known)))
	for _, t := range known {
		health = append(health, provider.TargetHealth{Target: t.Target})
	}
	if len(health) == 0 {
		health = append(health, provider.TargetHealth{Target: k.name})
	}
	for i := range health {
		health[i].Reason = provider.ReasonTimeout
		health[i].Message = message
		health[i].Duration = time.Since(start)
	}
	c.store(ctx, k, health)
}

func (c *Checks) store(ctx context.Context, k *checker, health []provider.TargetHealth) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the pool is closing: what a cancelled check says is about us, not about the target
	}
	now := time.Now()
	c.mu.Lock()
	old := map[string]Target{}
	for _, t := range c.targets[k.name] {
		old[t.Target] = t
	}
	next := make([]Target, 0, len(health))
	var changed []Target
	var before []Target
	for _, h := range health {
		t := Target{TargetHealth: normal(h, now), Provider: k.name, Since: now}
		was, known := old[t.Target]
		if known && was.Ready == t.Ready {
			t.Since = was.Since
		}
		next = append(next, t)
		if !known || was.Ready != t.Ready || was.Reason != t.Reason {
			changed = append(changed, t)
			before = append(before, was)
		}
	}
	c.targets[k.name] = next
	c.mu.Unlock()

	for i, t := range changed {
		c.log(before[i], t)
		if c.config.Changed != nil {
			c.config.Changed(t)
		}
	}
}

// normal mends what a sloppy Checker leaves out, so that a reader can rely on Ready and Reason agreeing.
func normal(h provider.TargetHealth, now time.Time) provider.TargetHealth {
	switch {
	case h.Ready:
		h.Reason = provider.ReasonReady
	case h.Reason == "" || h.Reason == provider.ReasonReady:
		h.Reason = provider.ReasonUnknown
	}
	if h.CheckedAt.IsZero() {
		h.CheckedAt = now
	}
	return h
}

func (c *Checks) log(was, is Target) {
	attrs := []any{"provider", is.Provider, "target", is.Target, "reason", is.Reason, "message", is.Message}
	seen := !was.CheckedAt.IsZero()
	switch {
	case is.Ready && seen:
		c.config.Logger.Info("target is ready again", append(attrs, "down_for", is.Since.Sub(was.Since))...)
	case is.Ready:
		c.config.Logger.Debug("target is ready", attrs...)
	case seen && !was.Ready:
		c.config.Logger.Warn("target is not ready for another reason", append(attrs, "was", was.Reason)...)
	default:
		c.config.Logger.Warn("target is not ready", attrs...)
	}
}
