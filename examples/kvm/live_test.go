//go:build live

package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"crawl.example.com/egress/examples/internal/guestsite"
	"crawl.example.com/egress/internal/testhost"
)

// patience bounds an emulated boot on a busy machine.
const patience = 6 * time.Minute

// program is the example, running.
type program struct {
	*exec.Cmd
	t     *testing.T
	lines chan string
	read  sync.WaitGroup
}

func start(t *testing.T, args ...string) *program {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), "EGRESS_EXAMPLE=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &program{Cmd: cmd, t: t, lines: make(chan string, 1<<16)}
	p.read.Go(func() {
		defer close(p.lines)
		in := bufio.NewScanner(out)
		for in.Scan() {
			p.lines <- in.Text()
		}
		_, _ = io.Copy(io.Discard, out) // a line too long for the scanner
	})
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // unless it is over
		p.read.Wait()
		_ = cmd.Wait() // the tests look at it where it matters
	})
	return p
}

// until returns the first line with all the words.
func (p *program) until(words ...string) string {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("it ended before a line with %q", words)
			}
			missing := false
			for _, w := range words {
				missing = missing || !strings.Contains(line, w)
			}
			if !missing {
				p.t.Log(line)
				return line
			}
		case <-deadline:
			p.t.Fatalf("no line with %q within %s", words, patience)
		}
	}
}

func TestMain(m *testing.M) {
	if os.Getenv("EGRESS_EXAMPLE") == "1" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestLiveACrawlSurvivesARollAndAKillAndLeavesNothing(t *testing.T) {
	host := testhost.Start(t, testhost.Options{PoolMiB: 3072})
	image, err := testhost.Image()
	if err != nil {
		t.Fatal(err)
	}
	site, end, err := guestsite.Serve(host.Outside, image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = end() }) // it is over
	sum, err := guestsite.Digest(image)
	if err != nil {
		t.Fatal(err)
	}
	userData := filepath.Join(t.TempDir(), "squid.yaml")
	if err := os.WriteFile(userData, []byte(guestsite.Squid), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"-uri", host.URI(), "-known-hosts", host.KnownHosts(), "-key", host.KeyFile(), "-emulate", "-user-data", userData,
		"-image", site + "/image.qcow2", "-sha256", sum, "-url", site + "/page", "-pause", "100ms",
	}
	begin := time.Now()
	first := start(t, append(args, "-n", "0")...)
	first.until("page 1:", "200", "generation 1 Ready")
	t.Logf("from nothing to a page through the guest's squid: %s", time.Since(begin).Round(time.Second))

	if err := first.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	first.until("replacing every proxy")
	// Pages go on through the old one until the new one serves; a page that fails ends the program.
	rolled := first.until("generation 2 Ready")
	if !strings.Contains(rolled, "200") {
		t.Errorf("got %s", rolled)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	before := strings.Fields(host.Virsh(t, "list", "--all", "--uuid"))
	if len(before) == 0 {
		t.Fatal("the guest went with the program")
	}

	begin = time.Now()
	second := start(t, append(args, "-n", "3", "-destroy")...)
	second.until("page 1:", "200", "generation 2 Ready")
	adopted := time.Since(begin)
	t.Logf("from the restart to a page through the adopted proxy: %s", adopted.Round(100*time.Millisecond))
	second.until("page 3:")
	second.until("images deleted:")
	second.read.Wait()
	if err := second.Wait(); err != nil {
		t.Error(err)
	}
	if adopted > 30*time.Second {
		t.Errorf("%s is a boot, not an adoption", adopted)
	}
	host.Virsh(t, "pool-refresh", "default")
	left := host.Virsh(t, "list", "--all", "--name") + host.Virsh(t, "vol-list", "default")
	files, err := host.Run("sh", "-c", "find /var/lib/libvirt/images /var/lib/libvirt/qemu/nvram /var/lib/libvirt/qemu/save -type f 2>/dev/null; true")
	if err != nil {
		t.Fatal(err)
	}
	if left := strings.TrimSpace(left + files); left != "" {
		t.Errorf("left on the host:\n%s", left)
	}
}
