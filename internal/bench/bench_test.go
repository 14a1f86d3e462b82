package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if !childMain() {
		os.Exit(m.Run())
	}
}

func BenchmarkAll(b *testing.B) {
	s, closeAll := openSites()
	defer closeAll()
	for _, g := range groups(false) {
		for _, x := range g.rows {
			subject := subjects[x.subject]
			if subject == nil || x.n > 0 || x.subject == "squid" || x.subject == "chain" {
				continue // a peer that is not in Go, or a figure that is no time
			}
			b.Run(x.name, func(b *testing.B) {
				w, done := subject(s)
				defer done()
				b.ReportAllocs()
				b.ResetTimer()
				extra := w(b.N)
				b.StopTimer()
				for unit, v := range extra {
					b.ReportMetric(v, unit)
				}
			})
		}
	}
}

func TestNoProxyHasTwoHoldersWhenItBearsOneLease(t *testing.T) {
	s, closeAll := openSites()
	defer closeAll()
	w, done := overlap(s)
	defer done()
	if got := w(300); got["overlaps/hold"] != 0 || got["holders"] != 1 {
		t.Errorf("got %v, want one holder at most", got)
	}
}

func TestEveryRowHasASubjectAndSomethingToCompareWith(t *testing.T) {
	for _, quick := range []bool{false, true} {
		names := map[string]bool{}
		for _, g := range groups(quick) {
			for _, x := range g.rows {
				if names[x.name] {
					t.Errorf("%s: there are two", x.name)
				}
				names[x.name] = true
				if subjects[x.subject] == nil && x.subject != "crawlee" {
					t.Errorf("%s: no subject %q", x.name, x.subject)
				}
				for _, beside := range x.beside {
					if g.row(beside.name) == nil {
						t.Errorf("%s: its group has no row %s", x.name, beside.name)
					}
				}
			}
		}
	}
}

func TestAChildTakesTurns(t *testing.T) {
	s, closeAll := openSites()
	defer closeAll()
	c, err := startSubject(t.Context(), "pool-all", s)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for _, n := range []int{1, 50} {
		got, err := c.turn("lease", n)
		if err != nil || got.N != n || got.NS <= 0 || got.Extra["req/s"] <= 0 || got.Extra["allocs/op"] <= 0 {
			t.Errorf("got %+v, %v", got, err)
		}
	}
}

func TestAChildThatEndsIsAnError(t *testing.T) {
	c, _, err := start(t.Context(), nil, "", "/bin/sh", "-c", "echo ready; read line")
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if got, err := c.turn("lease", 1); err == nil {
		t.Errorf("got %+v, want an error", got)
	}
}

// example is a run with figures that are easy to check.
func example() *run {
	turns := func(ns ...float64) (all []turn) {
		for _, v := range ns {
			all = append(all, turn{N: 10, NS: v * 10, Extra: map[string]float64{"allocs/op": 2}})
		}
		return all
	}
	return &run{loads: []string{"0.50", "1.00"}, groups: []*group{{title: "Leases", unit: "ns/op", rounds: 3, rows: []*row{
		{what: "peer", name: "Lease/by=peer", turns: turns(100, 200, 400)},
		{what: "egress", name: "Lease/by=egress", turns: turns(50, 300, 200), beside: []beside{{"Lease/by=peer", atMost(0.4)}}},
		{what: "absent", name: "Lease/by=absent", err: errSkipped("no npm")},
	}}}}
}

func TestTheTableShowsMediansRatiosAndWhatWasSkipped(t *testing.T) {
	var out bytes.Buffer
	example().table(&out)
	for _, want := range []string{
		`(?m)^  peer +200 ns \(100 ns–400 ns\) +2 allocs$`,
		`(?m)^  egress +200 ns \(50 ns–300 ns\) +2 allocs +0\.50 \(0\.50–1\.50\) of peer, bar ≤ 0\.4 MISSED$`,
		`(?m)^  absent +skipped: no npm$`,
		`load average 0\.50 1\.00`,
	} {
		if !regexp.MustCompile(want).Match(out.Bytes()) {
			t.Errorf("no %s in\n%s", want, out.String())
		}
	}
	if bytes.Contains(out.Bytes(), []byte("BUSY")) {
		t.Errorf("a load of 0.5 is called busy:\n%s", out.String())
	}
}

func TestRawLinesAreInGosBenchmarkFormat(t *testing.T) {
	var out bytes.Buffer
	example().raw(&out)
	lines := regexp.MustCompile(`^Benchmark[A-Z]\S*-\d+\t\d+(\t[0-9.e+]+ \S+)+$`)
	n := 0
	for in := bufio.NewScanner(&out); in.Scan(); {
		line := in.Text()
		if !strings.HasPrefix(line, "Benchmark") {
			continue
		}
		n++
		if !lines.MatchString(line) {
			t.Errorf("got %q", line)
		}
	}
	if n != 6 {
		t.Errorf("got %d lines, want 6", n)
	}
}

func TestAPeerThatIsNotThereIsSkipped(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := installPeers(t.Context()); !errors.As(err, new(errSkipped)) || err.Error() != "skipped: no npm" {
		t.Errorf("got %v", err)
	}
}

func TestAGroupRunsWithoutThePeersThatAreNotThere(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	s, closeAll := openSites()
	defer closeAll()
	g := &group{unit: "ns/op", rounds: 3, each: time.Millisecond, rows: []*row{
		{name: "A/by=colly", subject: "colly"},
		{name: "A/by=crawlee", subject: "crawlee"},
		{name: "A/by=genisoimage", subject: "genisoimage"},
	}}
	m := &machine{sites: s}
	defer m.close()
	g.run(t.Context(), m)
	if x := g.rows[0]; x.err != nil || len(x.turns) != 3 || x.n < 2 {
		t.Errorf("got %+v", x)
	}
	for _, x := range g.rows[1:] {
		if len(x.turns) != 0 || !errors.As(x.err, new(errSkipped)) {
			t.Errorf("got %+v", x)
		}
	}
}

func TestAGroupWhoseTurnsTakeTooLongHasFewerRounds(t *testing.T) {
	g := &group{unit: "ns/op", rounds: 1000, each: 1, rows: []*row{{name: "A/by=colly", subject: "colly", n: 1}}}
	g.run(t.Context(), &machine{})
	if n := len(g.rows[0].turns); n != g.rounds || n < fewRounds || n == 1000 {
		t.Errorf("got %d turns and %d rounds", n, g.rounds)
	}
}

func TestWhatThereIsNoTimeForIsSkipped(t *testing.T) {
	ctx, cancel := context.WithTimeoutCause(t.Context(), 0, errSkipped("no time left"))
	defer cancel()
	g := &group{unit: "ns/op", rounds: 3, each: time.Millisecond, rows: []*row{{name: "A/by=colly", subject: "colly"}}}
	g.run(ctx, &machine{})
	if x := g.rows[0]; x.err == nil || x.err.Error() != "skipped: no time left" {
		t.Errorf("got %v", x.err)
	}
}

func TestThePeersAreOfPinnedVersions(t *testing.T) {
	b, err := peerFiles.ReadFile("peers/package.json")
	if err != nil {
		t.Fatal(err)
	}
	var pkg struct{ Dependencies map[string]string }
	if err := json.Unmarshal(b, &pkg); err != nil || len(pkg.Dependencies) == 0 {
		t.Fatalf("got %+v, %v", pkg, err)
	}
	for name, version := range pkg.Dependencies {
		if !regexp.MustCompile(`^\d+\.\d+\.\d+$`).MatchString(version) {
			t.Errorf("%s: got %q, want one version", name, version)
		}
	}
}
