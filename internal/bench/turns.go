package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// What is measured runs in a process of its own, so that it has its heap and its collector to itself and a proxy's
// allocations are not taken for a client's. It reads lines "work n" and answers each with a turn in JSON; the scripts
// under peers do the same.

// turn is what n operations took.
type turn struct {
	N     int
	NS    float64            // in all
	Extra map[string]float64 // by unit: allocations for each operation, and what else the work counts
}

// work does n operations and returns further figures, by unit.
type work func(n int) map[string]float64

// subjectEnv names the subject that a process of this program is to be, and serveEnv that it is to be the proxies.
const (
	subjectEnv = "EGRESS_BENCH_SUBJECT"
	sitesEnv   = "EGRESS_BENCH_SITES"
	serveEnv   = "EGRESS_BENCH_SERVE"
)

// childMain is this program when it was started by itself; it returns false when it was not.
func childMain() bool {
	switch {
	case os.Getenv(serveEnv) != "":
		serveSites(os.Stdin, os.Stdout)
	case os.Getenv(subjectEnv) != "":
		var s sites
		must(0, json.Unmarshal([]byte(os.Getenv(sitesEnv)), &s))
		w, done := subjects[os.Getenv(subjectEnv)](s)
		takeTurns(w, os.Stdin, os.Stdout)
		done()
	default:
		return false
	}
	return true
}

func takeTurns(w work, in io.Reader, out io.Writer) {
	fmt.Fprintln(out, "ready")
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var name string
		var n int
		must(fmt.Sscan(lines.Text(), &name, &n))
		must(0, json.NewEncoder(out).Encode(take(w, n)))
	}
}

// take does one turn.
func take(w work, n int) turn {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, begin := cpuTime(), time.Now()
	extra := w(n)
	took := time.Since(begin)
	cpu = cpuTime() - cpu
	runtime.ReadMemStats(&after)
	if extra == nil {
		extra = map[string]float64{}
	}
	extra["allocs/op"] = float64(after.Mallocs-before.Mallocs) / float64(n)
	extra["cpu-ns/op"] = float64(cpu) / float64(n)
	extra["B/op"] = float64(after.TotalAlloc-before.TotalAlloc) / float64(n)
	return turn{n, float64(took), extra}
}

// child is a process that takes turns.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

// start starts a process and waits for its first line. It is ended by close, or when ctx ends.
func start(ctx context.Context, env []string, dir, name string, args ...string) (c *child, first string, err error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	cmd.Env = append(os.Environ(), env...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	c = &child{cmd, in, bufio.NewScanner(out)}
	if !c.lines.Scan() {
		c.close()
		return nil, "", fmt.Errorf("%s ended before it was ready", name)
	}
	return c, c.lines.Text(), nil
}

// startSubject starts this program again, as a subject.
func startSubject(ctx context.Context, name string, s sites) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c, _, err := start(ctx, []string{subjectEnv + "=" + name, sitesEnv + "=" + string(must(json.Marshal(s)))}, "", self)
	return c, err
}

func (c *child) turn(work string, n int) (turn, error) {
	var t turn
	if _, err := fmt.Fprintln(c.in, work, n); err != nil {
		return t, err
	}
	if !c.lines.Scan() {
		return t, fmt.Errorf("%s ended during a turn", strings.Join(c.cmd.Args, " "))
	}
	return t, json.Unmarshal(c.lines.Bytes(), &t)
}

// close ends the process by the end of its input, or kills it when that does not do.
func (c *child) close() {
	c.in.Close()
	late := time.AfterFunc(5*time.Second, func() { c.cmd.Process.Kill() })
	defer late.Stop()
	c.cmd.Wait()
}
