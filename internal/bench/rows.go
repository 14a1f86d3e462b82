package main

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// group is rows that take turns.
type group struct {
	title  string
	unit   string // what is shown and compared
	rounds int
	each   time.Duration // length of a turn, where n does not say it
	rows   []*row
}

// row is one line of the table.
type row struct {
	what    string
	name    string // of the benchmark; benchstat reads what is between slashes
	subject string // whose process it is
	n       int    // operations of a turn; 0 is as many as fill it
	bar     bar    // for the median
	beside  []beside
	turns   []turn
	err     error
}

// beside compares a row's rounds with another's: the median of the ratios of each.
type beside struct {
	name string
	bar  bar
}

// bar is what a figure must reach. The zero value is none.
type bar struct {
	limit float64
	least bool // it is the least, else the most
	is    bool
}

func atMost(limit float64) bar  { return bar{limit, false, true} }
func atLeast(limit float64) bar { return bar{limit, true, true} }

func (b bar) missed(v float64) bool {
	return b.is && (b.least && v < b.limit || !b.least && v > b.limit)
}

// work is what the row's process is asked for. Only a script of a peer knows more than one.
func (x *row) work() string {
	if x.subject == "crawlee" && strings.HasPrefix(x.name, "Overlap") {
		return "overlap"
	}
	return "lease"
}

// groups returns what is measured.
func groups(quick bool) []*group {
	// Many short turns: what else the machine does falls on all alike.
	large, rounds, each := 20_000, 15, 100*time.Millisecond
	requestRounds, requestEach := 41, 150*time.Millisecond
	slowRounds := 5
	if quick {
		large, rounds, each = 5000, 6, 60*time.Millisecond
		requestRounds, requestEach = 8, 120*time.Millisecond
		slowRounds = 1
	}
	sized := func(of string, n int) string { return fmt.Sprintf("Lease/of=%s/proxies=%d/by=egress", of, n) }
	flat := func(of string) []beside { return []beside{{sized(of, 10), atMost(1.3)}} }
	many := func(what string, n int) string { return fmt.Sprintf("egress, %s%d proxies", what, n) }
	const puddle, contended = "Lease/of=any/proxies=10/by=puddle", "LeaseContended/by=puddle"
	return []*group{
		{title: "Leases: acquire and release", unit: "ns/op", rounds: rounds, each: each, rows: []*row{
			{what: "puddle v2, one goroutine", name: puddle, subject: "puddle"},
			{what: many("", 10), name: sized("any", 10), subject: "lease-10", beside: []beside{
				{puddle, atMost(1)}, {"Lease/of=any/proxies=10/by=colly", bar{}}, {"Lease/of=any/proxies=10/by=crawlee", bar{}},
			}},
			{what: "colly, round-robin switcher (no lease)", name: "Lease/of=any/proxies=10/by=colly", subject: "colly"},
			{what: "Crawlee, session and its proxy (no lease)", name: "Lease/of=any/proxies=10/by=crawlee", subject: "crawlee"},
			{what: many("", 1000), name: sized("any", 1000), subject: "lease-1000", beside: flat("any")},
			{what: many("", large), name: sized("any", large), subject: fmt.Sprintf("lease-%d", large), beside: flat("any")},
			{what: many("label selector, ", 10), name: sized("label", 10), subject: "label-10"},
			{what: many("label selector, ", large), name: sized("label", large), subject: fmt.Sprintf("label-%d", large), beside: flat("label")},
			{what: many("10,000 sticky keys, ", 10), name: sized("key", 10), subject: "key-10"},
			{what: many("10,000 sticky keys, ", large), name: sized("key", large), subject: fmt.Sprintf("key-%d", large), beside: flat("key")},
		}},
		{title: "Leases: 8 goroutines for each processor", unit: "ns/op", rounds: rounds, each: each, rows: []*row{
			{what: "puddle v2", name: contended, subject: "puddle-contended"},
			{what: "egress, 10 proxies", name: "LeaseContended/by=egress", subject: "contended", beside: []beside{{contended, atMost(1)}}},
		}},
		{title: "Requests through one proxy, one at a time", unit: "req/s", rounds: requestRounds, each: requestEach, rows: []*row{
			{what: "bare http.Transport", name: "Request/proxies=1/workers=1/by=bare", subject: "bare-1"},
			{what: "egress, pool.Client", name: "Request/proxies=1/workers=1/by=egress", subject: "pool-1",
				beside: []beside{{"Request/proxies=1/workers=1/by=bare", atLeast(0.95)}}},
		}},
		{title: "Requests through one proxy, 16 at a time", unit: "req/s", rounds: requestRounds, each: requestEach, rows: []*row{
			{what: "bare http.Transport", name: "Request/proxies=1/workers=16/by=bare", subject: "bare-16"},
			{what: "egress, pool.Client", name: "Request/proxies=1/workers=16/by=egress", subject: "pool-16",
				beside: []beside{{"Request/proxies=1/workers=16/by=bare", atLeast(0.95)}}},
		}},
		{title: fmt.Sprintf("Requests through %d proxies, 16 at a time", manyProxies), unit: "req/s", rounds: requestRounds, each: requestEach, rows: []*row{
			{what: "squid in front, round-robin parents", name: "Request/proxies=4/workers=16/by=squid", subject: "squid"},
			{what: "egress, pool.Client", name: "Request/proxies=4/workers=16/by=egress", subject: "pool-all", beside: []beside{
				{"Request/proxies=4/workers=16/by=squid", atLeast(1.5)}, {"Request/proxies=4/workers=16/by=proxychain", bar{}},
			}},
			{what: "proxy-chain in front, upstreams in turn", name: "Request/proxies=4/workers=16/by=proxychain", subject: "chain"},
		}},
		{title: "Overlap: 30 workers on 10 proxies that bear one holder each, share of holds on a proxy that was held", unit: "overlaps/hold",
			rounds: 5, rows: []*row{
				{what: "Crawlee, session and its proxy", name: "Overlap/by=crawlee", subject: "crawlee", n: 600},
				{what: "egress", name: "Overlap/by=egress", subject: "overlap", n: 600, bar: atMost(0)},
			}},
		{title: "From Start to the first lease, on a backend that takes 2 s to boot", unit: "first-ns", rounds: slowRounds, rows: []*row{
			{what: "egress, 5 proxies", name: "FirstLease/by=egress", subject: "first-lease", n: 1, bar: atMost(2.1e9)},
		}},
		{title: "Memory of a ready proxy", unit: "B/proxy", rounds: slowRounds, rows: []*row{
			{what: "egress, 10,000 proxies", name: "Memory/proxies=10000/by=egress", subject: "memory", n: 10_000, bar: atMost(2048)},
		}},
		{title: "A pass of the planner", unit: "ns/op", rounds: rounds, each: each, rows: []*row{
			{what: "egress, 10,000 proxies, a tenth to replace", name: "Plan/proxies=10000/by=egress", subject: "plan", bar: atMost(10e6)},
		}},
		{title: "A NoCloud seed image", unit: "ns/op", rounds: rounds, each: each, rows: []*row{
			{what: "genisoimage", name: "Seed/by=genisoimage", subject: "genisoimage"},
			{what: "egress", name: "Seed/by=egress", subject: "seed", beside: []beside{{"Seed/by=genisoimage", bar{}}}},
		}},
	}
}

// values returns the row's figure of each turn.
func (x *row) values(unit string) []float64 {
	all := make([]float64, 0, len(x.turns))
	for _, t := range x.turns {
		if unit == "ns/op" {
			all = append(all, t.NS/float64(t.N))
		} else if v, ok := t.Extra[unit]; ok {
			all = append(all, v)
		}
	}
	return all
}

// ratios returns x's figure in each round divided by y's.
func ratios(x, y *row, unit string) []float64 {
	a, b := x.values(unit), y.values(unit)
	all := make([]float64, 0, len(a))
	for i := range min(len(a), len(b)) {
		all = append(all, a[i]/b[i])
	}
	return all
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// spread returns the quartiles, between which half of the values are.
func spread(values []float64) (low, high float64) {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/4], sorted[len(sorted)-1-len(sorted)/4]
}

// table prints what was found.
func (r *run) table(out io.Writer) {
	fmt.Fprintf(out, "%s, %s/%s, GOMAXPROCS %d, %s in %s, load average %s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH,
		runtime.GOMAXPROCS(0), r.began.UTC().Format(time.DateOnly), r.took.Round(time.Second), strings.Join(r.loads, " "))
	fmt.Fprintln(out, "Medians of rounds in which the rows of a group take turns; in brackets the quartiles. A ratio is the median of each round's.")
	fmt.Fprintln(out, "Then the latency of requests, and the processor time and the allocations of one operation in the process measured.")
	if r.busy() {
		fmt.Fprintln(out, "THE MACHINE WAS BUSY WITH OTHER WORK when this began: times and ratios say little.")
	}
	for _, g := range r.groups {
		fmt.Fprintf(out, "\n%s (%s)\n", g.title, counted(float64(g.rounds), "round"))
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		for _, x := range g.rows {
			for _, cells := range g.lines(x) {
				fmt.Fprintln(w, "  "+strings.Join(cells, "\t"))
			}
		}
		w.Flush()
	}
}

// lines returns a row's cells, and those of its further comparisons.
func (g *group) lines(x *row) [][]string {
	if len(x.turns) == 0 || x.err != nil {
		why := "no turn"
		if x.err != nil {
			why = x.err.Error()
		}
		return [][]string{{x.what, why}}
	}
	values := x.values(g.unit)
	middle := median(values)
	figure := show(middle, g.unit)
	if low, high := spread(values); len(values) > 1 && low != high {
		figure += fmt.Sprintf(" (%s–%s)", show(low, g.unit), show(high, g.unit))
	}
	first := []string{x.what, figure}
	if p99 := x.values("p99-ns"); len(p99) > 0 {
		first = append(first, "p99 "+show(median(p99), "ns/op"))
	}
	if cpu := x.values("cpu-ns/op"); g.each > 0 {
		text := ""
		if len(cpu) > 0 {
			text = "processor " + show(median(cpu), "ns/op")
		}
		first = append(first, text)
	}
	if allocs := x.values("allocs/op"); len(allocs) > 0 && (g.unit == "ns/op" || g.unit == "req/s") {
		first = append(first, counted(median(allocs), "alloc"))
	} else if holders := x.values("holders"); len(holders) > 0 {
		first = append(first, counted(slices.Max(holders), "holder")+" at most")
	} else {
		first = append(first, "")
	}
	if x.bar.is {
		first = append(first, x.bar.say(middle, show(x.bar.limit, g.unit)))
	}
	lines := [][]string{first}
	for i, b := range x.beside {
		text := "no ratio"
		if peer := g.row(b.name); peer != nil && peer.err == nil {
			if all := ratios(x, peer, g.unit); len(all) > 0 {
				low, high := spread(all)
				text = fmt.Sprintf("%s (%s–%s) of %s", ratio(median(all)), ratio(low), ratio(high), peer.what)
				if b.bar.is {
					text += ", " + b.bar.say(median(all), fmt.Sprint(b.bar.limit))
				}
			}
		}
		if i == 0 {
			lines[0] = append(lines[0], text)
			continue
		}
		lines = append(lines, append(slices.Repeat([]string{""}, len(lines[0])-1), text))
	}
	return lines
}

func (b bar) say(v float64, limit string) string {
	text := "bar ≤ " + limit
	if b.least {
		text = "bar ≥ " + limit
	}
	if b.missed(v) {
		text += " MISSED"
	}
	return text
}

func (g *group) row(name string) *row {
	for _, x := range g.rows {
		if x.name == name {
			return x
		}
	}
	return nil
}

func counted(v float64, what string) string {
	if math.Round(v) == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%.0f %ss", v, what)
}

func ratio(v float64) string {
	if v < 0.1 {
		return fmt.Sprintf("%.4f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// show returns a figure as people read it.
func show(v float64, unit string) string {
	switch unit {
	case "ns/op", "first-ns":
		switch {
		case v < 1e3:
			return fmt.Sprintf("%.0f ns", v)
		case v < 1e6:
			return fmt.Sprintf("%.1f µs", v/1e3)
		case v < 1e9:
			return fmt.Sprintf("%.2f ms", v/1e6)
		}
		return fmt.Sprintf("%.3f s", v/1e9)
	case "B/proxy":
		return fmt.Sprintf("%.0f bytes", v)
	case "req/s":
		return fmt.Sprintf("%.0f req/s", v)
	}
	return fmt.Sprintf("%.3g", v)
}
