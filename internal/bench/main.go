package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"
	"text/tabwriter"
	"time"
)

// measurement is one row; its peer is the row it is compared with.
type measurement struct {
	name  string
	run   func(*testing.B)
	peer  string
	bar   float64 // the most that it may take of the peer's time; 0 is none
	times []float64
	alloc int64
}

func measurements() []*measurement {
	return []*measurement{
		{name: "puddle: acquire and release", run: puddleOne},
		{name: "egress: 10 proxies", run: leases(10, plain), peer: "puddle: acquire and release", bar: 1.0},
		{name: "egress: 1,000 proxies", run: leases(1000, plain), peer: "egress: 10 proxies", bar: 1.3},
		{name: "egress: 20,000 proxies", run: leases(20_000, plain), peer: "egress: 10 proxies", bar: 1.3},
		{name: "egress: selector, 10 proxies", run: leases(10, labelled)},
		{name: "egress: selector, 20,000 proxies", run: leases(20_000, labelled), peer: "egress: selector, 10 proxies", bar: 1.3},
		{name: "egress: 10,000 sticky keys, 10 proxies", run: leases(10, sticky)},
		{name: "egress: 10,000 sticky keys, 20,000 proxies", run: leases(20_000, sticky), peer: "egress: 10,000 sticky keys, 10 proxies", bar: 1.3},
		{name: "colly: round robin, no lease", run: collySwitcher},
		{name: "puddle: contended", run: puddleContended},
		{name: "egress: contended", run: contended, peer: "puddle: contended", bar: 1.0},
		{name: "bare http.Transport: request through one proxy", run: bareRequests},
		{name: "egress: request through one proxy", run: requests},
	}
}

func main() {
	rounds := flag.Int("rounds", 5, "rounds; each measures every row once")
	testing.Init()
	flag.Parse()
	all := measurements()
	byName := map[string]*measurement{}
	for _, m := range all {
		byName[m.name] = m
	}
	for range *rounds {
		for _, m := range all {
			r := testing.Benchmark(m.run)
			m.times = append(m.times, float64(r.T.Nanoseconds())/float64(r.N))
			m.alloc = r.AllocsPerOp()
		}
	}
	fmt.Printf("%s, %s/%s, GOMAXPROCS %d, %d interleaved rounds\n\n", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.GOMAXPROCS(0), *rounds)
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "what\tmedian\tlowest\thighest\tallocs\tratio\tbar\t")
	for _, m := range all {
		ratio, bar := "", ""
		if m.peer != "" {
			value := m.ratio(byName[m.peer])
			ratio, bar = fmt.Sprintf("%.2f", value), fmt.Sprintf("≤ %.2f", m.bar)
			if value > m.bar {
				bar += " missed"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t\n", m.name, nanos(median(m.times)), nanos(slices.Min(m.times)), nanos(slices.Max(m.times)), m.alloc, ratio, bar)
	}
	w.Flush()
	pooled, bare := pairedRequests()
	fmt.Printf("\nrequests in short turns: %s through the pool, %s through a bare transport, %.3f of its requests/s (bar 0.95)\n",
		nanos(pooled), nanos(bare), bare/pooled)
	first := make([]float64, 0, *rounds)
	for range *rounds {
		first = append(first, float64(firstLease()))
	}
	fmt.Printf("first lease with a boot of 2 s: %s (bar 2.1 s)\n", time.Duration(median(first)).Round(time.Millisecond))
	fmt.Printf("memory of a proxy in a pool of 10,000: %d bytes (bar 2,048)\n", memoryEach(10_000))
	fmt.Printf("most holders of a proxy with one lease, 30 workers: %d (bar 1)\n", overlap())
}

// ratio is the median of the ratios of each round, so that a machine whose speed drifts compares like with like.
func (m *measurement) ratio(peer *measurement) float64 {
	var all []float64
	for i := range m.times {
		all = append(all, m.times[i]/peer.times[i])
	}
	return median(all)
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

func nanos(ns float64) string {
	if ns < 10_000 {
		return fmt.Sprintf("%.0f ns", ns)
	}
	return fmt.Sprintf("%.1f µs", ns/1000)
}
