package plan

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
)

var (
	now    = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	limits = Limits{
		Surge: 1, MaxUnavailable: 1, MaxParallel: 10, DrainDeadline: 5 * time.Minute, BootTimeout: 10 * time.Minute,
		UnhealthyGrace: 2 * time.Minute, StoppedGrace: 30 * time.Second, LostGrace: 2 * time.Minute,
		OrphanGrace: 2 * time.Minute, SuspectDelay: 15 * time.Minute, SuspectWindow: 2 * time.Minute,
	}
)

// steady is a fleet of n proxies on one provider, all as they should be.
func steady(n int) Input {
	in := Input{Now: now, Limits: limits, Providers: []Provider{{Fresh: true}}}
	for i := range n {
		in.Proxies = append(in.Proxies, Proxy{
			Name: fmt.Sprintf("p-%05d", i), SpecReady: true, Hash: "h", HashVersion: 1, LastGeneration: 1,
		})
		in.Instances = append(in.Instances, fitInstance(i, 1))
	}
	return in
}

func fitInstance(proxy int, generation int64) Instance {
	return Instance{
		Proxy: proxy, ID: fmt.Sprintf("i-%d-%d", proxy, generation), Generation: generation, Hash: "h", HashVersion: 1,
		State: provider.StateRunning, StateSince: now.Add(-time.Hour), Created: now.Add(-time.Hour), FirstSeen: now.Add(-time.Hour),
		Addressed: true, Fit: true, EverFit: true,
	}
}

func describe(in Input, out Output) string {
	var s string
	for _, a := range out.Actions {
		switch a.Kind {
		case Create:
			s += fmt.Sprintf("create %d/%d (%s); ", a.Proxy, a.Generation, a.Why)
		default:
			s += fmt.Sprintf("%s %s (%s); ", [...]string{"", "look", "drain", "delete", "revoke"}[a.Kind], in.Instances[a.Instance].ID, a.Why)
		}
	}
	return s
}

func TestDecisions(t *testing.T) {
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for _, c := range []struct {
		name   string
		change func(*Input)
		want   string
		phases string // of the first proxies
	}{
		{"a steady fleet is left alone", func(*Input) {}, "", "Ready Ready Ready"},
		{"what is missing is created", func(in *Input) { in.Instances = in.Instances[1:] }, "create 0/2 (missing); ", "Provisioning"},
		{"nothing is created before the first list", func(in *Input) {
			in.Instances = in.Instances[1:]
			in.Providers[0].Fresh = false
		}, "", "Pending"},
		{"drift rolls one at a time with a surge of one", func(in *Input) {
			for i := range in.Proxies {
				in.Proxies[i].Hash = "new"
			}
		}, "create 0/2 (drift); ", "Ready Ready Ready"},
		{"what is to be evacuated is replaced like drift", func(in *Input) { in.Instances[0].Evacuate = true }, "create 0/2 (evacuate); ", "Ready"},
		{"what is to be evacuated waits while its host does not answer", func(in *Input) {
			in.Instances[0].Evacuate, in.Instances[0].MissingSince = true, now.Add(-time.Second)
		}, "", "Ready"},
		{"another hash version is no drift", func(in *Input) { in.Instances[0].HashVersion, in.Instances[0].Hash = 7, "x" }, "", "Ready"},
		{"another hash version drifts when the spec changes before our eyes", func(in *Input) {
			in.Instances[0].HashVersion, in.Instances[0].Hash = 7, "x"
			in.Proxies[0].SpecChanged = true
		}, "create 0/2 (drift); ", "Ready"},
		{"the old one serves until the new one is fit", func(in *Input) {
			in.Proxies[0].Hash = "new"
			x := fitInstance(0, 2)
			x.Hash, x.Fit, x.EverFit, x.Created, x.FirstSeen = "new", false, false, now, now
			in.Instances = append(in.Instances, x)
		}, "", "Ready"},
		{"the old one goes when the new one is fit", func(in *Input) {
			in.Proxies[0].Hash = "new"
			x := fitInstance(0, 2)
			x.Hash = "new"
			in.Instances = append(in.Instances, x)
		}, "delete i-0-1 (replaced); ", "Ready"},
		{"leases on the old one run out first", func(in *Input) {
			in.Instances[0].Leases = 1
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "drain i-0-1 (replaced); ", "Ready"},
		{"leases that do not run out are revoked at the deadline", func(in *Input) {
			in.Instances[0].Leases, in.Instances[0].DrainingSince = 1, ago(5*time.Minute)
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "delete i-0-1 (replaced); ", "Ready"},
		{"leases are revoked at the deadline even where nothing can be deleted", func(in *Input) {
			in.Instances[0].Leases, in.Instances[0].DrainingSince = 1, ago(5*time.Minute)
			in.Instances = append(in.Instances, fitInstance(0, 2))
			in.Providers[0].Fresh = false
		}, "revoke i-0-1 (replaced); ", "Ready"},
		{"creates under way for what is not wanted any more count", func(in *Input) {
			in.Instances = in.Instances[1:]
			in.Providers[0].Creating = 2
		}, "", "Pending"},
		{"leases are waited for before the deadline", func(in *Input) {
			in.Instances[0].Leases, in.Instances[0].DrainingSince = 1, ago(4*time.Minute)
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "", "Ready"},
		{"without a surge the old one goes first", func(in *Input) {
			in.Limits.Surge = 0
			in.Proxies[0].Hash, in.Proxies[1].Hash = "new", "new"
		}, "delete i-0-1 (drift); ", "Ready"},
		{"without a surge nothing goes while one is unfit", func(in *Input) {
			in.Limits.Surge = 0
			in.Proxies[0].Hash = "new"
			in.Instances[1].Fit, in.Instances[1].FailingSince = false, now
		}, "", "Ready Unhealthy"},
		{"where there is no capacity the old one goes first", func(in *Input) {
			in.Proxies[0].Hash = "new"
			in.Providers[0].Full, in.Providers[0].NotBefore = true, now.Add(time.Minute)
		}, "delete i-0-1 (drift); ", ""},
		{"age rolls", func(in *Input) { in.Proxies[0].MaxAge = 30 * time.Minute }, "create 0/2 (age); ", "Ready"},
		{"a clock that stepped back makes nothing old", func(in *Input) {
			for i := range in.Instances {
				in.Proxies[i].MaxAge = 30 * time.Minute
				in.Instances[i].Created = now.Add(24 * time.Hour)
			}
		}, "", "Ready Ready Ready"},
		{"a clock that stepped forward makes all old and one is replaced at a time", func(in *Input) {
			for i := range in.Instances {
				in.Proxies[i].MaxAge = 30 * time.Minute
				in.Instances[i].Created = now.Add(-365 * 24 * time.Hour)
			}
		}, "create 0/2 (age); ", "Ready Ready Ready"},
		{"refresh rolls", func(in *Input) { in.Proxies[0].RefreshBelow = 2 }, "create 0/2 (refresh); ", "Ready"},
		{"one failed probe is no verdict", func(in *Input) { in.Instances[0].FailingSince = now }, "", "Ready"},
		{"what fails for long is replaced", func(in *Input) {
			in.Instances[0].Fit, in.Instances[0].FailingSince = false, ago(2*time.Minute)
		}, "create 0/2 (unhealthy); ", "Unhealthy"},
		{"when most fail at once nothing is replaced", func(in *Input) {
			for i := range 2 {
				in.Instances[i].Fit, in.Instances[i].FailingSince, in.Instances[i].Soft = false, ago(3*time.Minute), true
			}
		}, "", "Unhealthy Unhealthy Ready"},
		{"the last good set goes on serving", func(in *Input) {
			for i := range 3 {
				in.Instances[i].Fit, in.Instances[i].FailingSince, in.Instances[i].Soft = false, ago(time.Minute), true
			}
		}, "", "Ready Ready Ready"},
		{"one at a time is tried when that lasts", func(in *Input) {
			for i := range 3 {
				in.Instances[i].Fit, in.Instances[i].FailingSince = false, ago(30*time.Minute)
			}
			in.SuspectSince = ago(20 * time.Minute)
		}, "create 0/2 (unhealthy); ", "Unhealthy"},
		{"what never boots is given up", func(in *Input) {
			x := &in.Instances[0]
			x.Fit, x.EverFit, x.Created, x.FirstSeen = false, false, ago(10*time.Minute), ago(10*time.Minute)
		}, "delete i-0-1 (boot timeout); create 0/2 (missing); ", "Provisioning"},
		{"what is stopped is replaced", func(in *Input) {
			in.Instances[0].State, in.Instances[0].StateSince = provider.StateStopped, ago(time.Minute)
		}, "delete i-0-1 (stopped); create 0/2 (missing); ", "Provisioning"},
		{"a row stuck in deleting is no capacity", func(in *Input) {
			in.Limits.Surge = 0
			in.Limits.MaxUnavailable = 1
			in.Instances[0].Deleting, in.Instances[0].DeleteNotBefore = true, now.Add(time.Minute)
		}, "create 0/2 (missing); ", "Provisioning"},
		{"a delete is asked for again", func(in *Input) {
			in.Instances[0].Deleting, in.Instances[0].DeleteNotBefore = true, ago(time.Second)
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "delete i-0-1 (replaced); ", "Ready"},
		{"an orphan has a grace", func(in *Input) {
			in.Instances[0].Proxy, in.Instances[0].UnwantedSince = -1, ago(time.Minute)
			in.Proxies[0].LastGeneration = 1
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "", "Ready"},
		{"an orphan goes after its grace", func(in *Input) {
			in.Instances[0].Proxy, in.Instances[0].UnwantedSince = -1, ago(2*time.Minute)
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "delete i-0-1 (removed); ", "Ready"},
		{"what was dismissed goes at once", func(in *Input) {
			in.Instances[0].Proxy, in.Instances[0].UnwantedSince, in.Instances[0].Dismissed = -1, now, true
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "delete i-0-1 (removed); ", "Ready"},
		{"a silent host is waited for", func(in *Input) {
			in.Instances[0].Fit, in.Instances[0].FailingSince, in.Instances[0].MissingSince = false, ago(time.Minute), ago(time.Minute)
		}, "", "Unhealthy"},
		{"what is lost is replaced elsewhere", func(in *Input) {
			in.Instances[0].Fit, in.Instances[0].FailingSince, in.Instances[0].MissingSince = false, ago(3*time.Minute), ago(3*time.Minute)
		}, "create 0/2 (missing); ", "Provisioning"},
		{"what works on a silent host goes on serving", func(in *Input) { in.Instances[0].MissingSince = ago(time.Hour) }, "", "Ready"},
		{"a stray that comes back is removed", func(in *Input) {
			in.Proxies[0].LastGeneration = 2
			in.Instances = append(in.Instances, fitInstance(0, 2))
		}, "delete i-0-1 (replaced); ", "Ready"},
		{"what the list lost is looked at", func(in *Input) { in.Instances[0].Unlisted = true }, "look i-0-1 (); ", "Ready"},
		{"a permanent error stops creates", func(in *Input) {
			in.Instances = in.Instances[1:]
			in.Proxies[0].Permanent = true
		}, "", "Failed"},
		{"refused credentials stop creates and nothing else", func(in *Input) {
			in.Instances = in.Instances[1:]
			in.Providers[0].Denied, in.Providers[0].NotBefore = true, now.Add(time.Minute)
		}, "", "Pending Ready Ready"},
		{"nothing is made twice", func(in *Input) {
			in.Instances = in.Instances[1:]
			in.Proxies[0].Creating = true
		}, "", "Provisioning"},
		{"a broken one is not served", func(in *Input) { in.Instances[0].Broken = true }, "", "Unhealthy"},
		{"a proxy that moved to another provider is made there", func(in *Input) {
			in.Providers = append(in.Providers, Provider{Fresh: true})
			in.Proxies[0].Provider = 1
		}, "create 0/2 (missing); ", "Ready"},
		{"an external proxy's old endpoint runs out", func(in *Input) {
			in.Proxies[0].Provider, in.Instances[0].Provider = -1, -1
			in.Instances[0].DrainingSince = ago(time.Minute)
			x := fitInstance(0, 2)
			x.Provider = -1
			in.Instances = append(in.Instances, x)
		}, "delete i-0-1 (replaced); ", "Ready"},
		{"an external proxy is only served", func(in *Input) {
			in.Proxies[0].Provider, in.Instances[0].Provider = -1, -1
			in.Instances[0].FailingSince, in.Instances[0].Fit = ago(time.Hour), false
		}, "", "Unhealthy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := steady(3)
			c.change(&in)
			out := Next(in)
			if got := describe(in, out); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			var phases string
			for _, s := range out.Status {
				phases += string(s.Phase) + " "
			}
			if len(phases) < len(c.phases) || phases[:len(c.phases)] != c.phases {
				t.Errorf("phases %s, want %s", phases, c.phases)
			}
		})
	}
}

func TestNextIsToldToLookAgainWhenAGraceEnds(t *testing.T) {
	in := steady(2)
	in.Instances[0].Fit, in.Instances[0].FailingSince = false, now.Add(-time.Minute)
	if got := Next(in).Wake; !got.Equal(now.Add(time.Minute)) {
		t.Errorf("wakes at %s, want in a minute", got.Sub(now))
	}
}

func TestAgesAreSpread(t *testing.T) {
	seen := map[time.Duration]bool{}
	for i := range 100 {
		j := ageJitter(fmt.Sprint(i), time.Hour)
		if j < 0 || j > 6*time.Minute || j != ageJitter(fmt.Sprint(i), time.Hour) {
			t.Fatalf("jitter %s", j)
		}
		seen[j] = true
	}
	if len(seen) < 90 {
		t.Errorf("only %d different jitters", len(seen))
	}
}

// random makes any input at all.
func random(r *rand.Rand) Input {
	n := r.IntN(8)
	in := Input{Now: now, Limits: limits}
	in.Limits.Surge = r.IntN(3)
	in.Limits.MaxUnavailable = r.IntN(3)
	in.Limits.MaxParallel = 1 + r.IntN(4)
	at := func() time.Time {
		if r.IntN(3) == 0 {
			return time.Time{}
		}
		return now.Add(time.Duration(r.IntN(3600)-2400) * time.Second)
	}
	yes := func(outOf int) bool { return r.IntN(outOf) == 0 }
	for range 1 + r.IntN(3) {
		in.Providers = append(in.Providers, Provider{Fresh: !yes(4), NotBefore: at(), Full: yes(4), Denied: yes(8), Creating: r.IntN(3) / 2})
	}
	for i := range n {
		in.Proxies = append(in.Proxies, Proxy{
			Name: fmt.Sprint(i), Provider: r.IntN(len(in.Providers)+1) - 1, SpecReady: !yes(6), Hash: fmt.Sprint(r.IntN(2)), HashVersion: 1,
			SpecChanged: yes(4), MaxAge: time.Duration(r.IntN(2)) * time.Hour, RefreshBelow: int64(r.IntN(3)), LastGeneration: int64(r.IntN(4)),
			NotBefore: at(), Permanent: yes(10), Creating: yes(5),
		})
	}
	states := []provider.State{provider.StateUnknown, provider.StatePending, provider.StateRunning, provider.StateRunning,
		provider.StateRunning, provider.StateStopped, provider.StateDeleting, provider.StateFailed, "strange"}
	for i := range r.IntN(3 * (n + 1)) {
		x := Instance{
			Proxy: r.IntN(n+1) - 1, Provider: r.IntN(len(in.Providers)), ID: fmt.Sprint(i), Generation: int64(r.IntN(4)),
			Hash: fmt.Sprint(r.IntN(2)), HashVersion: 1 + r.IntN(2), State: states[r.IntN(len(states))], StateSince: at(), Created: at(),
			FirstSeen: at(), Addressed: !yes(5), Unlisted: yes(6), LookedAt: at(), Fit: !yes(3), EverFit: !yes(3), FailingSince: at(),
			Soft: yes(2), Broken: yes(8), Leases: r.IntN(3), Deleting: yes(6), DeleteNotBefore: at(), Busy: yes(6), Dismissed: yes(4),
			UnwantedSince: at(),
		}
		x.EverFit = x.EverFit || x.Fit
		if yes(5) {
			x.MissingSince = at()
		}
		if yes(5) {
			x.DrainingSince = at()
		}
		if x.Proxy >= 0 && in.Proxies[x.Proxy].Provider < 0 {
			x.Provider = -1
		}
		in.Instances = append(in.Instances, x)
	}
	in.SuspectSince = at()
	return in
}

// check asserts what must hold whatever the input.
func check(t *testing.T, in Input) {
	t.Helper()
	before := fmt.Sprintf("%+v", in)
	out := Next(in)
	if again := Next(in); !reflect.DeepEqual(out, again) {
		t.Fatal("the same input gave another output")
	}
	if fmt.Sprintf("%+v", in) != before {
		t.Fatal("the input was changed")
	}
	if !out.Wake.IsZero() && !out.Wake.After(now) {
		t.Fatalf("wakes at %s, which has been", out.Wake)
	}
	creates := map[int]int{}
	size, live := make([]int, len(in.Providers)), make([]int, len(in.Providers))
	for i := range in.Providers {
		live[i] = in.Providers[i].Creating
	}
	for i := range in.Proxies {
		if p := in.Proxies[i].Provider; p >= 0 {
			size[p]++
			if in.Proxies[i].Creating {
				live[p]++
			}
		}
	}
	touched := map[int]bool{}
	for _, a := range out.Actions {
		if a.Kind == Create {
			continue
		}
		if touched[a.Instance] {
			t.Fatalf("two actions for instance %d", a.Instance)
		}
		touched[a.Instance] = true
		x := &in.Instances[a.Instance]
		if x.Busy && a.Kind != Drain && a.Kind != Revoke {
			t.Fatalf("action %d on a busy instance", a.Kind)
		}
		if a.Kind == Delete && x.Provider >= 0 && !in.Providers[x.Provider].Fresh {
			t.Fatal("deleted on a provider that can't be listed")
		}
		if a.Kind == Delete && x.Leases > 0 && !x.Deleting && (x.DrainingSince.IsZero() || now.Before(x.DrainingSince.Add(in.Limits.DrainDeadline))) {
			t.Fatal("leases revoked before their deadline")
		}
		if a.Kind == Delete && out.Serve[a.Instance] {
			t.Fatal("served and deleted")
		}
		if x.Proxy < 0 && a.Kind != Look && !x.Dismissed && !x.Deleting && x.DrainingSince.IsZero() &&
			(x.UnwantedSince.IsZero() || now.Before(x.UnwantedSince.Add(in.Limits.OrphanGrace))) {
			t.Fatal("an orphan was touched before its grace was over")
		}
	}
	for i := range in.Instances {
		x := &in.Instances[i]
		deleted := false
		for _, a := range out.Actions {
			deleted = deleted || a.Kind == Delete && a.Instance == i
		}
		lost := !x.MissingSince.IsZero() && !x.Fit && !now.Before(x.MissingSince.Add(in.Limits.LostGrace))
		if x.Proxy >= 0 && x.Provider >= 0 && !x.Deleting && x.State != provider.StateDeleting && x.State != provider.StateFailed && !lost && !deleted {
			live[x.Provider]++
		}
	}
	for _, a := range out.Actions {
		if a.Kind != Create {
			continue
		}
		want := &in.Proxies[a.Proxy]
		creates[a.Proxy]++
		switch {
		case creates[a.Proxy] > 1 || want.Creating:
			t.Fatal("two creates for one proxy")
		case want.Provider < 0 || want.Permanent || !want.SpecReady || !in.Providers[want.Provider].Fresh:
			t.Fatalf("created what must not be: %+v", want)
		case now.Before(want.NotBefore) || now.Before(in.Providers[want.Provider].NotBefore):
			t.Fatal("created before its time")
		case a.Generation <= want.LastGeneration:
			t.Fatalf("generation %d after %d", a.Generation, want.LastGeneration)
		}
		live[want.Provider]++
		if live[want.Provider] > size[want.Provider]+in.Limits.Surge {
			t.Fatalf("%d instances of %d proxies with a surge of %d", live[want.Provider], size[want.Provider], in.Limits.Surge)
		}
	}
	// One proxy, one server; and what serves works, or did a moment ago.
	servers := map[int]int{}
	serving, could := 0, map[int]bool{}
	for i := range in.Instances {
		x := &in.Instances[i]
		usable := x.Proxy >= 0 && x.Fit && !x.Broken && x.Addressed && !x.Deleting && x.DrainingSince.IsZero() &&
			(x.State == provider.StateRunning || x.State == provider.StateUnknown || !x.MissingSince.IsZero())
		if usable {
			could[x.Proxy] = true
		}
		if !out.Serve[i] {
			continue
		}
		serving++
		servers[x.Proxy]++
		if x.Proxy < 0 || servers[x.Proxy] > 1 {
			t.Fatal("two instances of one proxy serve, or one that nobody wants")
		}
		if x.Deleting || x.Broken || !x.EverFit && !x.Fit || x.State == provider.StateStopped && x.MissingSince.IsZero() {
			t.Fatalf("serves what is unfit: %+v", x)
		}
	}
	// Replacing never takes away the last ones that work for ones that may not.
	starved := 0
	for i := range in.Proxies {
		has := false
		for k := range in.Instances {
			has = has || in.Instances[k].Proxy == i
		}
		if w := &in.Proxies[i]; !has && w.Provider >= 0 && !w.Creating && in.Providers[w.Provider].Full {
			starved++
		}
	}
	floor := max(len(in.Proxies)-starved-in.Limits.MaxUnavailable, min(1, len(in.Proxies)-1))
	if serving < min(floor, len(could)) {
		t.Fatalf("%d serve of %d that could, floor %d: %s\n%+v\n%+v", serving, len(could), floor, describe(in, out), in, out)
	}
}

func TestWhateverTheInputTheRulesHold(t *testing.T) {
	for seed := range uint64(20_000) {
		check(t, random(rand.New(rand.NewPCG(seed, 1))))
	}
}

func FuzzNext(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) { check(t, random(rand.New(rand.NewPCG(a, b)))) })
}

// TestEveryFleetSettles carries decisions out, with luck and without, until nothing is left to do.
func TestEveryFleetSettles(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		in := steady(1 + r.IntN(6))
		in.Limits.Surge = r.IntN(3)
		in.Limits.MaxUnavailable = 1 + r.IntN(2)
		for i := range in.Proxies {
			in.Proxies[i].Hash = "new"
		}
		quiet := 0
		for step := 0; quiet < 25; step++ {
			if step > 2000 {
				t.Fatalf("seed %d does not settle: %s", seed, describe(in, Next(in)))
			}
			out := Next(in)
			in.SuspectSince = out.SuspectSince
			if len(out.Actions) == 0 {
				quiet++
			} else {
				quiet = 0
			}
			gone := map[int]bool{}
			for _, a := range out.Actions {
				switch a.Kind {
				case Create:
					x := fitInstance(a.Proxy, a.Generation)
					x.Hash, x.Created, x.FirstSeen = "new", in.Now, in.Now
					x.Fit, x.EverFit = false, false
					in.Instances = append(in.Instances, x)
					in.Proxies[a.Proxy].LastGeneration = a.Generation
				case Delete:
					gone[a.Instance] = r.IntN(3) > 0
					in.Instances[a.Instance].Deleting = true
				case Drain:
					in.Instances[a.Instance].DrainingSince = in.Now
				}
			}
			kept := in.Instances[:0:0]
			for i, x := range in.Instances {
				if gone[i] {
					continue
				}
				if !x.EverFit && r.IntN(2) == 0 {
					x.Fit, x.EverFit = true, true
				}
				kept = append(kept, x)
			}
			in.Instances = kept
			in.Now = in.Now.Add(30 * time.Second)
		}
		for i := range in.Proxies {
			if s := Next(in).Status[i]; s.Phase != PhaseReady || in.Instances[s.Instance].Hash != "new" {
				t.Fatalf("seed %d: proxy %d ended as %+v", seed, i, s)
			}
		}
		if len(in.Instances) != len(in.Proxies) {
			t.Fatalf("seed %d: %d instances of %d proxies", seed, len(in.Instances), len(in.Proxies))
		}
	}
}

func BenchmarkNext(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		in := steady(n)
		for i := range in.Proxies {
			in.Proxies[i].MaxAge = 24 * time.Hour
			if i%10 == 0 {
				in.Proxies[i].Hash = "new"
			}
		}
		b.Run(fmt.Sprintf("proxies=%d", n), func(b *testing.B) {
			for b.Loop() {
				Next(in)
			}
		})
	}
}
