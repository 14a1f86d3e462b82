package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// The crash test runs this test binary again as a process that owns a pool, over a backend that is a directory, and
// kills it. These variables tell the child what to do.
const (
	crashDir  = "EGRESS_CRASH_DIR"  // the backend
	crashSpec = "EGRESS_CRASH_SPEC" // the image that the proxies want
	crashStop = "EGRESS_CRASH_STOP" // step:n, the call at which the child stops and waits to be killed
)

// stopping is a backend that stops its process in the middle of the n-th call of one step, for the parent to kill.
type stopping struct {
	*fake.Provider
	step string
	n    *int
}

func (s stopping) reached(step string) {
	if step != s.step {
		return
	}
	if *s.n--; *s.n == 0 {
		fmt.Println("stopped")
		select {}
	}
}

func (s stopping) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	s.reached("before create")
	if s.step == "during create" {
		if *s.n--; *s.n == 0 {
			// The row is there, half made; its create never ends.
			s.Set(func(c *fake.Config) { c.CreateTime = time.Hour })
			time.AfterFunc(20*time.Millisecond, func() { fmt.Println("stopped") })
		}
	}
	made, err := s.Provider.Create(ctx, req)
	s.reached("after create")
	return made, err
}

func (s stopping) Delete(ctx context.Context, id string) error {
	s.reached("before delete")
	err := s.Provider.Delete(ctx, id)
	s.reached("after delete")
	return err
}

const crashProxies = 4

func crashPool(t *testing.T, backend provider.Provider, f *fake.Provider, image string) *Pool {
	t.Helper()
	p, err := newPool(Config{
		Name: "test", Providers: []provider.Provider{backend}, ListInterval: 100 * time.Millisecond, OrphanGrace: 200 * time.Millisecond,
		BackoffMin: 10 * time.Millisecond, BackoffMax: 100 * time.Millisecond, BootTimeout: 5 * time.Second,
	}, aliveProber(f))
	if err != nil {
		t.Fatal(err)
	}
	proxies := fleet(crashProxies)
	for i := range proxies {
		proxies[i].Image = image
	}
	if err := p.Apply(t.Context(), proxies...); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestCrashChild is the child of the crash test, and nothing in a run of its own.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashDir)
	if dir == "" {
		t.Skip("is the child process of TestNoCrashLosesOrLeaksAnInstance")
	}
	step, count, _ := strings.Cut(os.Getenv(crashStop), ":")
	n, _ := strconv.Atoi(count)
	f := fake.New(fake.Config{Store: fake.Dir(dir), BootTime: 20 * time.Millisecond, CreateTime: 5 * time.Millisecond, DeleteTime: 10 * time.Millisecond})
	p := crashPool(t, stopping{f, step, &n}, f, os.Getenv(crashSpec))
	for {
		if replaced(p) {
			fmt.Println("settled")
		}
		<-time.After(10 * time.Millisecond)
	}
}

// replaced reports whether every proxy is ready and as it is wanted.
func replaced(p *Pool) bool {
	for _, s := range p.Proxies() {
		if s.Phase != PhaseReady || s.Reason != "" || !s.Wanted {
			return false
		}
	}
	return true
}

// runCrash runs a child until it says that it stopped or settled, or for at most d, and kills it with SIGKILL.
func runCrash(t *testing.T, dir, image, stop string, d time.Duration) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run", "^TestCrashChild$")
	cmd.Env = append(os.Environ(), crashDir+"="+dir, crashSpec+"="+image, crashStop+"="+stop)
	said := &waitFor{words: []string{"stopped", "settled"}, found: make(chan struct{})}
	if d > 0 {
		said.words = nil
	} else {
		d = 20 * time.Second
	}
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-said.found:
	case <-time.After(d):
		if said.words != nil {
			t.Errorf("the child neither stopped nor settled:\n%s", said.text.String())
		}
	}
	cmd.Process.Kill()
	cmd.Wait()
}

// waitFor is a writer that tells when one of some words was written.
type waitFor struct {
	words []string
	text  bytes.Buffer
	found chan struct{}
	done  bool
}

func (w *waitFor) Write(b []byte) (int, error) {
	w.text.Write(b)
	for _, word := range w.words {
		if !w.done && strings.Contains(w.text.String(), word) {
			w.done = true
			close(w.found)
		}
	}
	return len(b), nil
}

// recover runs a pool in this process on what the killed one left, until it has settled, and looks at the result.
func recoverCrash(t *testing.T, dir, image string) {
	t.Helper()
	f := fake.New(fake.Config{Store: fake.Dir(dir), BootTime: 20 * time.Millisecond})
	p := crashPool(t, f, f, image)
	deadline := time.Now().Add(20 * time.Second)
	for {
		all := f.Instances()
		good := len(all) == crashProxies && replaced(p)
		for _, x := range all {
			good = good && x.State == provider.StateRunning
		}
		if good {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("not settled: %+v\n%+v", all, p.Proxies())
			break
		}
		<-time.After(20 * time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := p.Close(ctx); err != nil {
		t.Error(err)
	}
	exactly(t, f, crashProxies)
	leftover, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	if err != nil || len(leftover) > 1 {
		t.Errorf("%v, %v", leftover, err)
	}
}

func TestNoCrashLosesOrLeaksAnInstance(t *testing.T) {
	for _, step := range []string{"before create", "during create", "after create", "before delete", "after delete"} {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s %d", step, n), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				if strings.Contains(step, "delete") || n > 1 {
					runCrash(t, dir, "one", "", 0) // a fleet that is to be replaced
				}
				runCrash(t, dir, "two", fmt.Sprintf("%s:%d", step, n), 0)
				recoverCrash(t, dir, "two")
			})
		}
	}
	kills := 6
	if text := os.Getenv("EGRESS_CRASHES"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(errors.New("EGRESS_CRASHES: want the number of random kills"))
		}
		kills = n
	}
	t.Run(fmt.Sprintf("%d times at random", kills), func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		for i := range kills {
			runCrash(t, dir, fmt.Sprint(i), "", time.Duration(10+rand.IntN(400))*time.Millisecond)
		}
		recoverCrash(t, dir, "last")
	})
}
