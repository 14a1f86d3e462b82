package leases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/leases"
)

var errExpired = errors.New("its time is over")

func newTable(t *testing.T, hooks leases.Hooks) *leases.Table {
	if hooks.Expired == nil {
		hooks.Expired = func(leases.Member) error { return errExpired }
	}
	table := leases.NewTable(hooks)
	t.Cleanup(table.Close)
	return table
}

// add puts a fit entry into the table.
func add(t *leases.Table, name string, maxLeases int, labels ...string) *leases.Entry {
	m := leases.Member{Proxy: name, Instance: name + "-1", MaxLeases: maxLeases, Labels: map[string]string{}}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		m.Labels[k] = v
	}
	e := t.Add(m)
	e.SetFit(true)
	return e
}

func try(t *leases.Table, req leases.Request) (*leases.Lease, error) {
	l := new(leases.Lease)
	return l, t.TryAcquire(&req, l, 0)
}

func mustTry(t *testing.T, table *leases.Table, req leases.Request) *leases.Lease {
	t.Helper()
	l, err := try(table, req)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// await acquires in a goroutine; the result arrives on the channel.
type outcome struct {
	lease *leases.Lease
	err   error
}

func await(ctx context.Context, table *leases.Table, req leases.Request) <-chan outcome {
	c := make(chan outcome, 1)
	go func() {
		l := new(leases.Lease)
		err := table.Acquire(ctx, &req, l, 0)
		c <- outcome{l, err}
	}()
	return c
}

func pending(t *testing.T, c <-chan outcome) {
	t.Helper()
	synctest.Wait()
	select {
	case o := <-c:
		t.Fatalf("got %v, %v, want a caller that waits", o.lease, o.err)
	default:
	}
}

func granted(t *testing.T, c <-chan outcome) *leases.Lease {
	t.Helper()
	synctest.Wait()
	select {
	case o := <-c:
		if o.err != nil {
			t.Fatal(o.err)
		}
		return o.lease
	default:
		t.Fatal("still waiting")
		return nil
	}
}

func TestNoEntryHasMoreLeasesThanItBears(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	add(table, "a", 2)
	add(table, "b", 1)
	for range 3 {
		mustTry(t, table, leases.Request{})
	}
	_, err := try(table, leases.Request{})
	full, ok := errors.AsType[*leases.ExhaustedError](err)
	if !ok || full.Full != 2 || full.Ready+full.Unfit+full.Cooling+full.Excluded != 0 {
		t.Fatalf("got %v", err)
	}
}

func TestTheLeastLoadedIsTakenAndTiesRotate(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	for _, name := range []string{"a", "b", "c"} {
		add(table, name, 5)
	}
	var order []string
	for range 6 {
		order = append(order, mustTry(t, table, leases.Request{}).Entry().Proxy())
	}
	if got := strings.Join(order, ""); got != "abcabc" {
		t.Fatalf("got %s, want abcabc", got)
	}
	mustTry(t, table, leases.Request{Exclude: []string{"b", "c"}})
	mustTry(t, table, leases.Request{Exclude: []string{"b", "c"}})
	if got := mustTry(t, table, leases.Request{}).Entry().Proxy(); got == "a" {
		t.Fatalf("got a, which has the most leases")
	}
}

func TestWaitersAreServedInOrderByDirectHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 1)
		first := mustTry(t, table, leases.Request{})
		second := await(t.Context(), table, leases.Request{})
		pending(t, second)
		third := await(t.Context(), table, leases.Request{})
		pending(t, third)
		first.Release()
		if _, err := try(table, leases.Request{}); err == nil {
			t.Fatal("a newcomer overtook a waiter")
		}
		l := granted(t, second)
		pending(t, third)
		l.Release()
		granted(t, third).Release()
	})
}

func TestAWaiterThatASlotDoesNotSuitIsPassedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 1, "country=cz")
		add(table, "b", 1, "country=de")
		a, b := mustTry(t, table, leases.Request{Exclude: []string{"b"}}), mustTry(t, table, leases.Request{})
		german := await(t.Context(), table, leases.Request{Labels: map[string]string{"country": "de"}})
		pending(t, german)
		anyone := await(t.Context(), table, leases.Request{})
		pending(t, anyone)
		a.Release()
		granted(t, anyone)
		pending(t, german)
		b.Release()
		if got := granted(t, german).Entry().Proxy(); got != "b" {
			t.Fatalf("got %s", got)
		}
	})
}

func TestAnEndedContextAlwaysLoses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 1)
		cause := errors.New("given up")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if err := table.Acquire(ctx, &leases.Request{}, new(leases.Lease), 0); !errors.Is(err, cause) {
			t.Fatalf("got %v with a free entry, want the cause", err)
		}
		held := mustTry(t, table, leases.Request{})
		ctx, cancel = context.WithCancelCause(t.Context())
		waiting := await(ctx, table, leases.Request{})
		pending(t, waiting)
		// The slot is handed over and the context ends before the waiter runs: it must not keep the slot.
		held.Release()
		cancel(cause)
		synctest.Wait()
		o := <-waiting
		if o.err == nil {
			// It ran first, which is as good.
			o.lease.Release()
		} else if !errors.Is(o.err, cause) {
			t.Fatalf("got %v", o.err)
		}
		mustTry(t, table, leases.Request{}).Release()
		if s := table.Stats(); s.Held != 0 || s.Waiting != 0 {
			t.Fatalf("got %+v", s)
		}
	})
}

func TestACancelledWaiterSaysWhyThereWasNoProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "full", 1)
		add(table, "cooling", 1)
		table.Add(leases.Member{Proxy: "unfit", MaxLeases: 1})
		add(table, "excluded", 1)
		l := mustTry(t, table, leases.Request{Target: "shop", Exclude: []string{"full", "excluded"}})
		l.Report(leases.Report{Kind: leases.Banned, Cool: time.Hour})
		l.Release()
		mustTry(t, table, leases.Request{Target: "shop", Exclude: []string{"excluded"}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := table.Acquire(ctx, &leases.Request{Target: "shop", Exclude: []string{"excluded"}}, new(leases.Lease), 0)
		why, ok := errors.AsType[*leases.ExhaustedError](err)
		if !ok || why.Full != 1 || why.Cooling != 1 || why.Unfit != 1 || why.Excluded != 1 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
	})
}

func TestAKeyKeepsItsEntryAndSaysWhenItMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		a, b := add(table, "a", 1), add(table, "b", 1)
		l := mustTry(t, table, leases.Request{Key: "k"})
		first := l.Entry()
		if l.Moved() {
			t.Error("the first lease of a key says moved")
		}
		l.Release()
		mustTry(t, table, leases.Request{Exclude: []string{"b"}}).Release() // rotates
		l = mustTry(t, table, leases.Request{Key: "k"})
		if l.Entry() != first || l.Moved() {
			t.Fatalf("got %s, moved %t, want %s again", l.Entry().Proxy(), l.Moved(), first.Proxy())
		}
		// It waits for its own entry although another one is free.
		waiting := await(t.Context(), table, leases.Request{Key: "k"})
		pending(t, waiting)
		l.Release()
		l = granted(t, waiting)
		if l.Entry() != first {
			t.Fatal("the waiter went elsewhere")
		}
		// When the entry is unfit the waiters move.
		waiting = await(t.Context(), table, leases.Request{Key: "k"})
		pending(t, waiting)
		first.SetFit(false)
		moved := granted(t, waiting)
		other := map[*leases.Entry]*leases.Entry{a: b, b: a}[first]
		if moved.Entry() != other || !moved.Moved() {
			t.Fatalf("got %s, moved %t", moved.Entry().Proxy(), moved.Moved())
		}
		moved.Release()
		first.SetFit(true)
		if l := mustTry(t, table, leases.Request{Key: "k"}); l.Entry() != other || l.Moved() {
			t.Fatal("the key did not stay where it moved to")
		}
	})
}

func TestABannedEntryIsLeftOutForItsTargetUntilItsTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 5)
		l := mustTry(t, table, leases.Request{Target: "shop"})
		l.Report(leases.Report{Kind: leases.Banned, Cool: time.Minute})
		l.Release()
		l.Report(leases.Report{Kind: leases.Banned, Cool: time.Second}) // shorter: changes nothing
		if _, err := try(table, leases.Request{Target: "shop"}); err == nil {
			t.Fatal("leased for the target that banned it")
		}
		mustTry(t, table, leases.Request{Target: "blog"}).Release()
		mustTry(t, table, leases.Request{}).Release()
		begin := time.Now()
		waiting := await(t.Context(), table, leases.Request{Target: "shop"})
		l = (<-waiting).lease
		if took := time.Since(begin); took != time.Minute {
			t.Fatalf("the waiter was served after %s, want when the ban is over", took)
		}
		if got := l.Entry().Cooling(); len(got) != 0 {
			t.Fatalf("still cooling: %v", got)
		}
	})
}

func TestABanStartsNoAvalanche(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	for i := range 4 {
		add(table, fmt.Sprint(i), 2)
	}
	var held []*leases.Lease
	for range 4 {
		l := mustTry(t, table, leases.Request{Target: "shop"})
		l.Report(leases.Report{Kind: leases.Banned, Cool: time.Hour})
		held = append(held, l)
	}
	if _, err := try(table, leases.Request{Target: "shop"}); err == nil {
		t.Fatal("a banned entry was leased")
	}
	for range 4 {
		held = append(held, mustTry(t, table, leases.Request{Target: "blog"}))
	}
	if _, err := try(table, leases.Request{Target: "blog"}); err == nil {
		t.Fatal("an entry got more than its two leases")
	}
	_ = held
}

func TestABrokenEntryIsOutAtOnceAndItsReportIsPassedOn(t *testing.T) {
	var got []leases.ReportKind
	table := newTable(t, leases.Hooks{Reported: func(_ *leases.Entry, r leases.Report) { got = append(got, r.Kind) }})
	e := add(table, "a", 5)
	l := mustTry(t, table, leases.Request{})
	l.Report(leases.Report{Kind: leases.OK})
	l.Report(leases.Report{Kind: leases.Failed})
	l.Report(leases.Report{Kind: leases.Broken})
	if _, err := try(table, leases.Request{}); err == nil {
		t.Fatal("a broken entry was leased")
	}
	if u := e.Usage(); u.Failures != 2 || u.Leases != 1 {
		t.Errorf("got %+v", u)
	}
	if fmt.Sprint(got) != fmt.Sprint([]leases.ReportKind{leases.OK, leases.Failed, leases.Broken}) {
		t.Errorf("got %v", got)
	}
	e.Remove(errors.New("gone"))
	l.Report(leases.Report{Kind: leases.Broken}) // too late to matter
	if len(got) != 3 {
		t.Error("a report about a removed entry was passed on")
	}
}

func TestALeaseEndsWithItsTTLAndTheCauseOfThat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 1)
		l := mustTry(t, table, leases.Request{TTL: time.Minute})
		ctx := l.Context()
		waiting := await(t.Context(), table, leases.Request{})
		pending(t, waiting)
		time.Sleep(time.Minute)
		granted(t, waiting).Release()
		if !errors.Is(context.Cause(ctx), errExpired) || l.Held() {
			t.Fatalf("cause %v, held %t", context.Cause(ctx), l.Held())
		}
		l.Release()
		if s := table.Stats(); s.Revoked != 1 || s.Held != 0 {
			t.Fatalf("got %+v", s)
		}
		// A lease that is released in time is not revoked.
		l = mustTry(t, table, leases.Request{TTL: time.Minute})
		l.Release()
		time.Sleep(time.Hour)
		if s := table.Stats(); s.Revoked != 1 || !errors.Is(context.Cause(l.Context()), leases.ErrReleased) {
			t.Fatalf("got %+v, cause %v", s, context.Cause(l.Context()))
		}
	})
}

func TestRemoveRevokesWithItsCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		e := add(table, "a", 2)
		young := mustTry(t, table, leases.Request{})
		ctx := young.Context()
		time.Sleep(time.Minute)
		late := mustTry(t, table, leases.Request{})
		cause := errors.New("replaced")
		e.Remove(cause)
		e.Remove(errors.New("again"))
		for _, l := range []*leases.Lease{young, late} {
			if !errors.Is(context.Cause(l.Context()), cause) {
				t.Errorf("cause %v", context.Cause(l.Context()))
			}
			l.Release()
		}
		if ctx != young.Context() {
			t.Error("the context changed")
		}
		if s := table.Stats(); s.Held != 0 || s.Revoked != 2 || s.Entries != 0 || s.Fit != 0 {
			t.Errorf("got %+v", s)
		}
	})
}

func TestADrainingEntryTellsWhenItsLastLeaseIsGone(t *testing.T) {
	idle := 0
	table := newTable(t, leases.Hooks{Idle: func(*leases.Entry) { idle++ }})
	e := add(table, "a", 2)
	a, b := mustTry(t, table, leases.Request{}), mustTry(t, table, leases.Request{})
	e.Drain()
	a.Release()
	if idle != 0 {
		t.Fatal("idle with a lease held")
	}
	if _, err := try(table, leases.Request{}); err == nil {
		t.Fatal("a draining entry was leased")
	}
	e.SetFit(true)
	if _, err := try(table, leases.Request{}); err == nil {
		t.Fatal("a draining entry came back")
	}
	b.Release()
	if idle != 1 {
		t.Fatalf("idle %d times, want once", idle)
	}
	empty := add(table, "b", 1)
	empty.Drain()
	if idle != 2 {
		t.Fatal("an entry without leases did not tell at once")
	}
}

func TestReleaseIsSafeFromManyGoroutines(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	add(table, "a", 3)
	for range 100 {
		l := mustTry(t, table, leases.Request{})
		keep := mustTry(t, table, leases.Request{})
		var all sync.WaitGroup
		for range 8 {
			all.Go(l.Release)
		}
		all.Wait()
		if s := table.Stats(); s.Held != 1 {
			t.Fatalf("%d leases held, want the other one alone", s.Held)
		}
		keep.Release()
	}
}

func TestARequestThatCanNeverMatchFailsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		none := leases.Request{Labels: map[string]string{"country": "xx"}}
		if _, err := try(table, none); !isNoMatch(err) {
			t.Fatalf("got %v", err)
		}
		table.SetWanted([]leases.Wanted{
			{Proxy: "p", MaxLeases: 1, Labels: map[string]string{"country": "xx"}}, {Proxy: "zero", Labels: map[string]string{"country": "yy"}},
		})
		waiting := await(t.Context(), table, none)
		pending(t, waiting)
		for _, req := range []leases.Request{
			{Labels: map[string]string{"country": "yy"}}, // bears no leases
			{Labels: map[string]string{"country": "xx"}, Exclude: []string{"p"}},
			{Labels: map[string]string{"country": "xx", "kind": "z"}},
		} {
			if _, err := try(table, req); !isNoMatch(err) {
				t.Errorf("%v: got %v", req, err)
			}
		}
		// What waits fails when the declaration changes under it.
		table.SetWanted(nil)
		synctest.Wait()
		if o := <-waiting; !isNoMatch(o.err) || !strings.Contains(o.err.Error(), "country=xx") {
			t.Fatalf("got %v", o.err)
		}
	})
}

func isNoMatch(err error) bool {
	_, ok := errors.AsType[*leases.NoMatchError](err)
	return ok
}

func TestRefuseEndsWaitersAndNewcomers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		add(table, "a", 1)
		held := mustTry(t, table, leases.Request{})
		waiting := await(t.Context(), table, leases.Request{})
		pending(t, waiting)
		closed := errors.New("closed")
		table.Refuse(closed)
		synctest.Wait()
		if o := <-waiting; !errors.Is(o.err, closed) {
			t.Fatalf("got %v", o.err)
		}
		if _, err := try(table, leases.Request{}); !errors.Is(err, closed) {
			t.Fatalf("got %v", err)
		}
		idle := make(chan error, 1)
		go func() { idle <- table.WaitIdle(t.Context()) }()
		synctest.Wait()
		select {
		case <-idle:
			t.Fatal("idle with a lease held")
		default:
		}
		held.Release()
		if err := <-idle; err != nil {
			t.Fatal(err)
		}
	})
}

func TestALoweredLimitGrantsNothingUntilTheLoadIsBelowIt(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	e := add(table, "a", 3)
	var held []*leases.Lease
	for range 3 {
		held = append(held, mustTry(t, table, leases.Request{}))
	}
	e.Update(nil, 1)
	held[0].Release()
	held[1].Release()
	if _, err := try(table, leases.Request{}); err == nil {
		t.Fatal("leased above the lowered limit")
	}
	held[2].Release()
	mustTry(t, table, leases.Request{}).Release()
	e.Update(nil, 0)
	if _, err := try(table, leases.Request{}); err == nil {
		t.Fatal("leased with a limit of 0")
	}
}

func TestChangedLabelsCountAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(t, leases.Hooks{})
		e := add(table, "a", 1, "country=cz")
		table.SetWanted([]leases.Wanted{{Proxy: "a", MaxLeases: 1, Labels: map[string]string{"country": "de", "x": "y"}}})
		waiting := await(t.Context(), table, leases.Request{Labels: map[string]string{"country": "de", "x": "y"}})
		pending(t, waiting)
		e.Update(map[string]string{"country": "de", "x": "y"}, 1)
		granted(t, waiting).Release()
		if _, err := try(table, leases.Request{Labels: map[string]string{"country": "cz"}}); err == nil {
			t.Fatal("the old label still selects")
		}
	})
}

func TestManySelectorsAreForgottenAgain(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	e := add(table, "a", 1)
	for i := range 1000 {
		labels := map[string]string{"n": fmt.Sprint(i)}
		if i%2 == 0 {
			labels["even"] = "yes"
		}
		e.Update(labels, 1)
		mustTry(t, table, leases.Request{Labels: labels}).Release()
	}
	mustTry(t, table, leases.Request{Labels: map[string]string{"n": "999"}}).Release()
}

//go:noinline
func drop(t *leases.Table, req leases.Request, pc uintptr) {
	if err := t.TryAcquire(&req, new(leases.Lease), pc); err != nil {
		panic(err)
	}
}

func TestADroppedLeaseIsReclaimedAndReported(t *testing.T) {
	for _, ttl := range []time.Duration{0, time.Hour} {
		leaked := make(chan leases.Leak, 1)
		table := newTable(t, leases.Hooks{Leaked: func(l leases.Leak) { leaked <- l }})
		add(table, "a", 1)
		drop(table, leases.Request{TTL: ttl}, 4711)
		deadline := time.After(30 * time.Second)
		for {
			runtime.GC()
			select {
			case l := <-leaked:
				if l.PC != 4711 || l.Member.Proxy != "a" {
					t.Fatalf("got %+v", l)
				}
			case <-deadline:
				t.Fatal("the lease was never reclaimed")
			case <-time.After(50 * time.Millisecond):
				continue
			}
			break
		}
		if s := table.Stats(); s.Leaked != 1 || s.Held != 0 {
			t.Fatalf("got %+v", s)
		}
		mustTry(t, table, leases.Request{}).Release()
	}
}

func TestALeaseThatIsHeldForLongIsNotReclaimed(t *testing.T) {
	table := newTable(t, leases.Hooks{Leaked: func(leases.Leak) { t.Error("reclaimed") }})
	add(table, "a", 1)
	l := mustTry(t, table, leases.Request{})
	until := time.After(2500 * time.Millisecond)
	for done := false; !done; {
		runtime.GC()
		select {
		case <-until:
			done = true
		case <-time.After(20 * time.Millisecond):
		}
	}
	l.Release()
	runtime.GC()
	if s := table.Stats(); s.Leaked != 0 || s.Held != 0 {
		t.Fatalf("got %+v", s)
	}
}

// TestUnderStressNoEntryIsOverbooked mixes everything from many goroutines and counts holders itself.
func TestUnderStressNoEntryIsOverbooked(t *testing.T) {
	const proxies, workers = 12, 24
	duration := time.Second
	table := newTable(t, leases.Hooks{})
	type data struct{ holders, limit atomic.Int64 }
	var entries [proxies]atomic.Pointer[leases.Entry]
	place := func(i int) {
		d := &data{}
		d.limit.Store(int64(i%3 + 1))
		e := table.Add(leases.Member{
			Proxy: fmt.Sprint(i), MaxLeases: i%3 + 1, Data: d, Labels: map[string]string{"half": fmt.Sprint(i % 2), "third": fmt.Sprint(i % 3)},
		})
		e.SetFit(true)
		if old := entries[i].Swap(e); old != nil {
			old.Remove(errors.New("stress"))
		}
	}
	for i := range proxies {
		place(i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var all sync.WaitGroup
	var total atomic.Int64
	for w := range workers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for ctx.Err() == nil {
				req := leases.Request{}
				switch r.IntN(6) {
				case 0:
					req.Labels = map[string]string{"half": fmt.Sprint(r.IntN(2))}
				case 1:
					req.Labels = map[string]string{"half": fmt.Sprint(r.IntN(2)), "third": fmt.Sprint(r.IntN(3))}
				case 2:
					req.Key = fmt.Sprint(r.IntN(20))
				case 3:
					req.Target = fmt.Sprint(r.IntN(3))
				case 4:
					req.Exclude = []string{fmt.Sprint(r.IntN(proxies))}
				}
				if r.IntN(10) == 0 {
					req.TTL = time.Duration(r.IntN(1000)) * time.Microsecond
				}
				wait, stop := context.WithTimeout(ctx, time.Duration(r.IntN(3000))*time.Microsecond)
				l := new(leases.Lease)
				if table.Acquire(wait, &req, l, 0) != nil {
					stop()
					continue
				}
				stop()
				d := l.Entry().Data().(*data)
				revocable := req.TTL > 0
				if n := d.holders.Add(1); n > d.limit.Load() && !revocable && l.Held() {
					// Holders that were revoked count here until they notice, so only sure cases are wrong.
					if int64(l.Entry().Leases()) > d.limit.Load() {
						t.Errorf("%d holders of an entry that bears %d", l.Entry().Leases(), d.limit.Load())
					}
				}
				total.Add(1)
				switch r.IntN(12) {
				case 0:
					l.Report(leases.Report{Kind: leases.Banned, Cool: time.Duration(r.IntN(2000)) * time.Microsecond})
				case 1:
					l.Report(leases.Report{Kind: leases.Broken})
					l.Entry().SetFit(true)
				case 2:
					<-time.After(time.Duration(r.IntN(500)) * time.Microsecond)
				}
				d.holders.Add(-1)
				l.Release()
				if r.IntN(4) == 0 {
					l.Release()
				}
			}
		})
	}
	all.Go(func() {
		r := rand.New(rand.NewPCG(99, 1))
		for ctx.Err() == nil {
			i := r.IntN(proxies)
			switch r.IntN(4) {
			case 0:
				place(i)
			case 1:
				e := entries[i].Load()
				e.SetFit(false)
				e.SetFit(true)
			case 2:
				entries[i].Load().Drain()
				place(i)
			case 3:
				e := entries[i].Load()
				e.Update(map[string]string{"half": fmt.Sprint(r.IntN(2)), "third": fmt.Sprint(r.IntN(3))}, e.Member().MaxLeases)
			}
			<-time.After(200 * time.Microsecond)
		}
	})
	all.Wait()
	if err := table.WaitIdle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := table.Stats(); s.Held != 0 || s.Waiting != 0 {
		t.Errorf("got %+v", s)
	}
	t.Logf("%d leases", total.Load())
}

// TestStrictlyOneHolderEach is the load that made a peer's pool hand one session to up to eight holders at once.
func TestStrictlyOneHolderEach(t *testing.T) {
	table := newTable(t, leases.Hooks{})
	var holders [10]atomic.Int32
	for i := range holders {
		e := table.Add(leases.Member{Proxy: fmt.Sprint(i), MaxLeases: 1, Data: &holders[i]})
		e.SetFit(true)
	}
	var all sync.WaitGroup
	for range 30 {
		all.Go(func() {
			for range 20 {
				l := new(leases.Lease)
				if err := table.Acquire(t.Context(), &leases.Request{}, l, 0); err != nil {
					t.Error(err)
					return
				}
				h := l.Entry().Data().(*atomic.Int32)
				if n := h.Add(1); n > 1 {
					t.Errorf("%d holders at once", n)
				}
				runtime.Gosched()
				h.Add(-1)
				l.Release()
			}
		})
	}
	all.Wait()
	if s := table.Stats(); s.Granted != 600 || s.Held != 0 {
		t.Errorf("got %+v", s)
	}
}
