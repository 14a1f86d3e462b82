package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if childMain() {
		return
	}
	quick := flag.Bool("quick", false, "fewer and shorter turns, and smaller fleets")
	rounds := flag.Int("rounds", 0, "rounds in which every row of a group has its turn; 0 is as many as the group wants")
	raw := flag.String("raw", "", "file for the turns in benchstat's format")
	only := flag.String("only", "", "only rows whose benchmark begins with this")
	flag.Parse()
	if err := measure(&run{quick: *quick, rounds: *rounds, only: *only}, *raw); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// measure does a whole run and prints it. raw is the file for benchstat; empty is none.
func measure(r *run, raw string) error {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	limit := 5 * time.Minute
	if r.quick {
		limit = time.Minute
	}
	ctx, cancel = context.WithTimeoutCause(ctx, limit, errSkipped("no time left"))
	defer cancel()
	if err := r.all(ctx); err != nil {
		return err
	}
	r.table(os.Stdout)
	if raw == "" {
		return nil
	}
	f, err := os.Create(raw)
	if err != nil {
		return err
	}
	r.raw(f)
	return f.Close()
}

// run is one run of the program.
type run struct {
	quick  bool
	rounds int
	only   string
	groups []*group
	began  time.Time
	took   time.Duration
	loads  []string // the load average at the beginning of each group, and at the end
}

func (r *run) all(ctx context.Context) error {
	r.began = time.Now()
	// Here, so that the rows that need them can be made at any time.
	server, s, err := startSites(ctx)
	if err != nil {
		return err
	}
	defer server.close()
	m := &machine{sites: s}
	defer m.close()
	for _, g := range groups(r.quick) {
		g.rows = slices.DeleteFunc(g.rows, func(x *row) bool { return !strings.HasPrefix(x.name, r.only) })
		if len(g.rows) == 0 {
			continue
		}
		if r.rounds > 0 {
			g.rounds = r.rounds
		}
		r.groups = append(r.groups, g)
		r.loads = append(r.loads, load())
		g.run(ctx, m)
		if ctx.Err() != nil && !errors.As(context.Cause(ctx), new(errSkipped)) {
			return context.Cause(ctx)
		}
	}
	r.loads = append(r.loads, load())
	r.took = time.Since(r.began)
	return nil
}

// machine has what rows run on. Peers are started when a row first wants them.
type machine struct {
	sites     sites
	installed bool
	npmDir    string
	npmErr    error
	stops     []func()
}

func (m *machine) close() {
	for _, stop := range slices.Backward(m.stops) {
		stop()
	}
}

func (m *machine) npm(ctx context.Context) (string, error) {
	if !m.installed {
		m.installed = true
		m.npmDir, m.npmErr = installPeers(ctx)
	}
	return m.npmDir, m.npmErr
}

// start starts the process for a row.
func (m *machine) start(ctx context.Context, x *row) (*child, error) {
	switch x.subject {
	case "genisoimage":
		if _, err := exec.LookPath("genisoimage"); err != nil {
			return nil, errSkipped("no genisoimage")
		}
	case "squid":
		if m.sites.Squid == "" {
			address, stop, err := startSquid(ctx, m.sites.Proxies)
			if err != nil {
				return nil, err
			}
			m.sites.Squid = address
			m.stops = append(m.stops, stop)
		}
	case "chain":
		dir, err := m.npm(ctx)
		if err != nil {
			return nil, err
		}
		if m.sites.Chain == "" {
			c, address, err := startChain(ctx, dir, m.sites.Proxies)
			if err != nil {
				return nil, err
			}
			m.sites.Chain = address
			m.stops = append(m.stops, c.close)
		}
	case "crawlee":
		dir, err := m.npm(ctx)
		if err != nil {
			return nil, err
		}
		return startCrawlee(ctx, dir)
	}
	return startSubject(ctx, x.subject, m.sites)
}

// fewRounds is how many rounds a group has at least. On a machine so busy that its turns take twice as long as they should
// it has no more than time allows, so that those after it have theirs.
const fewRounds = 5

// run gives every row its turn, round by round, there and back, so that a machine whose speed drifts is as slow for one
// as for the other.
func (g *group) run(ctx context.Context, m *machine) {
	fmt.Fprintln(os.Stderr, g.title)
	children := make([]*child, len(g.rows))
	defer func() {
		for _, c := range children {
			if c != nil {
				c.close()
			}
		}
	}()
	for i, x := range g.rows {
		if ctx.Err() != nil {
			x.err = context.Cause(ctx)
			continue
		}
		c, err := m.start(ctx, x)
		if err == nil {
			children[i] = c
			err = x.settle(ctx, c, g.each)
		}
		if err != nil {
			x.err = cmpErr(context.Cause(ctx), err)
		}
	}
	begin := time.Now()
	for round := range g.rounds {
		if round >= fewRounds && time.Since(begin) > 2*time.Duration(g.rounds*len(g.rows))*g.each && g.each > 0 {
			g.rounds = round
			break
		}
		for k := range g.rows {
			i := k
			if round%2 == 1 {
				i = len(g.rows) - 1 - k
			}
			x := g.rows[i]
			if x.err != nil || ctx.Err() != nil {
				continue
			}
			t, err := children[i].turn(x.work(), x.n)
			if err != nil {
				x.err = cmpErr(context.Cause(ctx), err)
				continue
			}
			x.turns = append(x.turns, t)
		}
	}
}

func cmpErr(first, second error) error {
	if first != nil {
		return first
	}
	return second
}

// settle finds how many operations make a turn of about the given length, which warms the process up too. A turn that
// something else held up says little, so that it takes a few.
func (x *row) settle(ctx context.Context, c *child, each time.Duration) error {
	if x.n > 0 {
		return nil
	}
	for n, try := 1, 0; ctx.Err() == nil; try++ {
		t, err := c.turn(x.work(), n)
		if err != nil {
			return err
		}
		fill := max(1, int(float64(n)*min(20, float64(each)/max(t.NS, 1))))
		if try >= 4 && fill < 2*n {
			x.n = max(n, fill)
			return nil
		}
		n = max(n, fill)
	}
	return context.Cause(ctx)
}

// raw writes every turn as a line of Go's benchmark format.
func (r *run) raw(w io.Writer) {
	fmt.Fprintf(w, "goos: %s\ngoarch: %s\npkg: crawl.example.com/egress/internal/bench\n", runtime.GOOS, runtime.GOARCH)
	fmt.Fprintf(w, "Unit req/s better=higher\nUnit overlaps/hold better=lower\n")
	for _, g := range r.groups {
		for _, x := range g.rows {
			for _, t := range x.turns {
				fmt.Fprintf(w, "Benchmark%s-%d\t%d\t%g ns/op", x.name, runtime.GOMAXPROCS(0), t.N, t.NS/float64(t.N))
				units := make([]string, 0, len(t.Extra))
				for unit := range t.Extra {
					units = append(units, unit)
				}
				slices.Sort(units)
				for _, unit := range units {
					fmt.Fprintf(w, "\t%g %s", t.Extra[unit], unit)
				}
				fmt.Fprintln(w)
			}
		}
	}
}

// busy reports whether others kept the machine busy when the run began.
func (r *run) busy() bool {
	v, err := strconv.ParseFloat(r.loads[0], 64)
	return err == nil && v > float64(runtime.NumCPU())
}

// load returns the load average of the last minute.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "?"
	}
	first, _, _ := strings.Cut(string(b), " ")
	return first
}
