package checks_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/checks"
	"crawl.example.com/egress/provider"
)

// scripted is a provider of which only Name and Check are called.
type scripted struct {
	provider.Provider
	name  string
	calls atomic.Int32
	check func(ctx context.Context, call int) []provider.TargetHealth
}

func (s *scripted) Name() string { return s.name }

func (s *scripted) Check(ctx context.Context) []provider.TargetHealth {
	return s.check(ctx, int(s.calls.Add(1)))
}

func up(target string) provider.TargetHealth {
	return provider.TargetHealth{Target: target, Ready: true, Reason: provider.ReasonReady}
}

func down(target string, reason provider.Reason) provider.TargetHealth {
	return provider.TargetHealth{Target: target, Reason: reason}
}

// start runs checks over providers until the test ends.
func start(t *testing.T, config checks.Config) *checks.Checks {
	t.Helper()
	c := checks.New(config)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return c
}

func one(t *testing.T, c *checks.Checks) checks.Target {
	t.Helper()
	all := c.Snapshot()
	if len(all) != 1 {
		t.Fatalf("snapshot holds %d targets, want 1: %v", len(all), all)
	}
	return all[0]
}

func TestTheFirstRoundRunsAtOnceAndTheNextAfterTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &scripted{name: "home", check: func(context.Context, int) []provider.TargetHealth {
			return []provider.TargetHealth{up("a")}
		}}
		c := start(t, checks.Config{Providers: []provider.Provider{p}, Interval: time.Minute})
		synctest.Wait()
		if got := p.calls.Load(); got != 1 {
			t.Fatalf("%d checks at start, want 1", got)
		}
		if got := one(t, c); !got.Ready || got.Provider != "home" {
			t.Fatalf("got %+v", got)
		}
		time.Sleep(time.Minute - time.Second)
		if got := p.calls.Load(); got != 1 {
			t.Fatalf("%d checks before the interval is over, want 1", got)
		}
		time.Sleep(2 * time.Second)
		if got := p.calls.Load(); got != 2 {
			t.Fatalf("%d checks after the interval, want 2", got)
		}
	})
}

func TestASlowProviderDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &scripted{name: "slow", check: func(ctx context.Context, _ int) []provider.TargetHealth {
			<-ctx.Done()
			return []provider.TargetHealth{down("s", provider.ReasonTimeout)}
		}}
		fast := &scripted{name: "fast", check: func(context.Context, int) []provider.TargetHealth {
			return []provider.TargetHealth{up("f")}
		}}
		c := start(t, checks.Config{Providers: []provider.Provider{slow, fast}, Interval: time.Minute})
		synctest.Wait()
		if got := one(t, c); got.Target != "f" || !got.Ready {
			t.Fatalf("got %+v", got)
		}
		time.Sleep(15*time.Second + time.Millisecond) // the derived timeout
		if got := c.Snapshot(); len(got) != 2 || got[0].Target != "s" || got[0].Reason != provider.ReasonTimeout {
			t.Fatalf("got %+v", got)
		}
	})
}

func TestTheTimeoutIsTheIntervalWhenThatIsShorter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var deadline time.Duration
		p := &scripted{name: "p", check: func(ctx context.Context, _ int) []provider.TargetHealth {
			end, _ := ctx.Deadline()
			deadline = time.Until(end)
			return nil
		}}
		start(t, checks.Config{Providers: []provider.Provider{p}, Interval: checks.MinInterval})
		synctest.Wait()
		if deadline != checks.MinInterval {
			t.Fatalf("the check had %s, want %s", deadline, checks.MinInterval)
		}
	})
}

func TestACheckerThatIgnoresItsContextIsATimeoutUntilItReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		p := &scripted{name: "p", check: func(_ context.Context, call int) []provider.TargetHealth {
			if call == 2 {
				<-release
			}
			return []provider.TargetHealth{up("a"), up("b")}
		}}
		c := start(t, checks.Config{Providers: []provider.Provider{p}, Interval: time.Minute})
		time.Sleep(time.Minute + 16*time.Second)
		for _, got := range c.Snapshot() {
			if got.Ready || got.Reason != provider.ReasonTimeout {
				t.Fatalf("got %+v, want a timeout", got)
			}
		}
		time.Sleep(5 * time.Minute)
		if got := p.calls.Load(); got != 2 {
			t.Fatalf("%d checks started, want the hung one to be the last", got)
		}
		close(release)
		time.Sleep(time.Minute)
		for _, got := range c.Snapshot() {
			if !got.Ready {
				t.Fatalf("got %+v, want ready again", got)
			}
		}
	})
}

func TestTheTransitionTimeSurvivesRoundsThatDoNotFlipReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &scripted{name: "p", check: func(_ context.Context, call int) []provider.TargetHealth {
			switch call {
			case 1, 2:
				return []provider.TargetHealth{up("a")}
			case 3:
				return []provider.TargetHealth{down("a", provider.ReasonUnreachable)}
			default:
				return []provider.TargetHealth{down("a", provider.ReasonTimeout)}
			}
		}}
		begin := time.Now()
		c := start(t, checks.Config{Providers: []provider.Provider{p}, Interval: time.Minute})
		time.Sleep(90 * time.Second)
		if got := one(t, c); got.Since != begin {
			t.Fatalf("ready since %s, want %s", got.Since, begin)
		}
		time.Sleep(time.Minute)
		flipped := begin.Add(2 * time.Minute)
		if got := one(t, c); got.Ready || got.Since != flipped {
			t.Fatalf("got %+v, want down since %s", got, flipped)
		}
		time.Sleep(time.Minute)
		got := one(t, c)
		if got.Reason != provider.ReasonTimeout || got.Since != flipped || !got.CheckedAt.After(flipped) {
			t.Fatalf("got %+v, want the new reason and the old transition time", got)
		}
	})
}

func TestEachChangeIsLoggedOnceAndNothingElseIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		script := map[int]provider.TargetHealth{
			1: up("a"), 2: down("a", provider.ReasonUnreachable), 3: down("a", provider.ReasonUnreachable),
			4: down("a", provider.ReasonAuthenticationFailed), 5: up("a"), 6: up("a"),
		}
		p := &scripted{name: "p", check: func(_ context.Context, call int) []provider.TargetHealth {
			return []provider.TargetHealth{script[min(call, 6)]}
		}}
		var log bytes.Buffer
		var changes []provider.Reason
		start(t, checks.Config{
			Providers: []provider.Provider{p}, Interval: time.Minute,
			Logger:  slog.New(slog.NewTextHandler(&log, nil)),
			Changed: func(t checks.Target) { changes = append(changes, t.Reason) },
		})
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		want := []string{"target is not ready", "for another reason", "ready again"}
		if len(lines) != len(want) {
			t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), log.String())
		}
		for i := range want {
			if !strings.Contains(lines[i], want[i]) {
				t.Errorf("line %d is %q, want %q in it", i+1, lines[i], want[i])
			}
		}
		if len(changes) != 4 {
			t.Errorf("changes %v, want the first answer and three changes", changes)
		}
	})
}

func TestAPanickingCheckerIsAReasonAndStopsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := &scripted{name: "bad", check: func(context.Context, int) []provider.TargetHealth { panic("boom") }}
		good := &scripted{name: "good", check: func(context.Context, int) []provider.TargetHealth {
			return []provider.TargetHealth{up("g")}
		}}
		c := start(t, checks.Config{Providers: []provider.Provider{bad, good}, Interval: time.Minute})
		synctest.Wait()
		got := c.Snapshot()
		if len(got) != 2 || got[0].Ready || !strings.Contains(got[0].Message, "boom") || !got[1].Ready {
			t.Fatalf("got %+v", got)
		}
	})
}

func TestAnIntervalOfZeroTurnsChecksOff(t *testing.T) {
	p := &scripted{name: "p", check: func(context.Context, int) []provider.TargetHealth {
		t.Error("checked")
		return nil
	}}
	checks.New(checks.Config{Providers: []provider.Provider{p}}).Run(t.Context())
}

func TestWhatACancelledCheckSaysIsNotStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &scripted{name: "p", check: func(ctx context.Context, call int) []provider.TargetHealth {
			if call == 1 {
				return []provider.TargetHealth{up("a")}
			}
			<-ctx.Done()
			return []provider.TargetHealth{down("a", provider.ReasonTimeout)}
		}}
		c := checks.New(checks.Config{Providers: []provider.Provider{p}, Interval: time.Minute})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); c.Run(ctx) }()
		time.Sleep(time.Minute + time.Second)
		cancel()
		<-done
		if got := one(t, c); !got.Ready {
			t.Fatalf("got %+v, want the last real answer", got)
		}
	})
}

func TestAnAnswerWithoutAReasonIsMended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &scripted{name: "p", check: func(context.Context, int) []provider.TargetHealth {
			return []provider.TargetHealth{{Target: "a", Ready: true}, {Target: "b", Reason: provider.ReasonReady}}
		}}
		c := start(t, checks.Config{Providers: []provider.Provider{p}, Interval: time.Minute})
		synctest.Wait()
		got := c.Snapshot()
		if got[0].Reason != provider.ReasonReady || got[1].Reason != provider.ReasonUnknown {
			t.Fatalf("got %+v", got)
		}
	})
}
