//go:build live

package sshconn_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"crawl.example.com/egress/internal/sshconn"
)

// need returns the path of a program of OpenSSH. Without it the test is skipped, or fails when CI wants it to run.
func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		path, err = exec.LookPath("/usr/sbin/" + program)
	}
	if err != nil {
		if os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
			t.Fatalf("%s is not installed (apt install openssh-server openssh-client)", program)
		}
		t.Skipf("%s is not installed", program)
	}
	return path
}

func tool(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(need(t, program), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// keygen makes a key pair and returns the private key's path.
func keygen(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if len(args) == 0 {
		args = []string{"-t", "ed25519", "-N", ""}
	}
	tool(t, "ssh-keygen", append([]string{"-q", "-C", "test", "-f", path}, args...)...)
	return path
}

func read(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(content))
}

// sshd is a real one, on loopback, with a configuration of its own.
type sshd struct {
	t       *testing.T
	dir     string
	port    int
	user    string
	userKey string // path of the key that may log in
	hostKey string // path
	lines   []string
	cmd     *exec.Cmd
	log     sync.WaitGroup
}

// startSSHD starts sshd with these lines in its configuration. It ends with the test, and then no goroutine may be left.
func startSSHD(t *testing.T, lines ...string) *sshd {
	t.Helper()
	need(t, "sshd")
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		eventually(t, func() bool { return runtime.NumGoroutine() <= before }, func() string {
			stacks := make([]byte, 1<<20)
			return fmt.Sprintf("goroutines are left:\n%s", stacks[:runtime.Stack(stacks, true)])
		})
	})
	if os.Geteuid() == 0 {
		// sshd refuses to start as root without this directory, which the system's own service makes.
		if err := os.Mkdir("/run/sshd", 0o755); err == nil {
			t.Cleanup(func() { os.Remove("/run/sshd") })
		} else if !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	os.Chmod(dir, 0o755)
	s := &sshd{t: t, dir: dir, user: me.Username, lines: lines, userKey: keygen(t, dir, "user"), hostKey: keygen(t, dir, "host")}
	s.authorize(s.userKey + ".pub")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *sshd) authorize(public string) {
	s.t.Helper()
	f, err := os.OpenFile(filepath.Join(s.dir, "authorized_keys"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer f.Close()
	fmt.Fprintln(f, read(s.t, public))
}

// start starts sshd and returns when it listens.
func (s *sshd) start() {
	s.t.Helper()
	config := append([]string{ // the first value counts
		fmt.Sprintf("Port %d", s.port), "ListenAddress 127.0.0.1", "AuthorizedKeysFile " + filepath.Join(s.dir, "authorized_keys"),
		"PidFile none", "UsePAM no", "StrictModes no", "PermitRootLogin prohibit-password", "PasswordAuthentication no", "KbdInteractiveAuthentication no",
		"SetEnv HOME=" + s.dir, // what this machine's user has the shell do at every login is no part of the test
	}, s.lines...)
	config = append(config, "HostKey "+s.hostKey)
	file := filepath.Join(s.dir, "sshd_config")
	if err := os.WriteFile(file, []byte(strings.Join(config, "\n")+"\n"), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.cmd = exec.Command(need(s.t, "sshd"), "-D", "-e", "-f", file)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // also when the test is killed
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	listening := make(chan struct{})
	s.log.Go(func() {
		var said bytes.Buffer
		once := sync.OnceFunc(func() { close(listening) })
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			said.WriteString(lines.Text() + "\n")
			if strings.HasPrefix(lines.Text(), "Server listening") {
				once()
			}
		}
		once()
		if s.t.Failed() {
			s.t.Logf("sshd said:\n%s", said.String())
		}
	})
	<-listening
}

func (s *sshd) stop() {
	for _, pid := range s.children() {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	s.cmd.Process.Kill()
	s.cmd.Wait()
	s.log.Wait()
}

// children returns the processes that serve connections.
func (s *sshd) children() []int {
	var all []int
	var walk func(pid int)
	walk = func(pid int) {
		content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		for _, field := range strings.Fields(string(content)) {
			if child, err := strconv.Atoi(field); err == nil {
				all = append(all, child)
				walk(child)
			}
		}
	}
	walk(s.cmd.Process.Pid)
	return all
}

func (s *sshd) signal(sig syscall.Signal) {
	s.t.Helper()
	children := s.children()
	if len(children) == 0 {
		s.t.Fatal("sshd serves nobody")
	}
	for _, pid := range children {
		if err := syscall.Kill(pid, sig); err != nil {
			s.t.Fatal(err)
		}
	}
}

func (s *sshd) address() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

// knownHosts writes a file and returns its path.
func (s *sshd) knownHosts(lines ...string) string {
	s.t.Helper()
	f, err := os.CreateTemp(s.dir, "known_hosts")
	if err != nil {
		s.t.Fatal(err)
	}
	defer f.Close()
	fmt.Fprintln(f, strings.Join(lines, "\n"))
	return f.Name()
}

// config returns the settings that log in.
func (s *sshd) config() sshconn.Config {
	return sshconn.Config{Host: sshconn.Host{
		Address: s.user + "@" + s.address(), KeyFiles: []string{s.userKey},
		KnownHosts: []string{s.knownHosts(fmt.Sprintf("[127.0.0.1]:%d %s", s.port, read(s.t, s.hostKey+".pub")))},
	}}
}

func (s *sshd) dial(change ...func(*sshconn.Config)) *sshconn.Client {
	s.t.Helper()
	config := s.config()
	for _, f := range change {
		f(&config)
	}
	c, err := sshconn.Dial(s.t.Context(), config)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

// eventually asks until the answer is yes, for up to 10 s.
func eventually(t *testing.T, yes func() bool, otherwise func() string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !yes() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Error(otherwise())
			return
		}
	}
}

func TestLiveCommandsRun(t *testing.T) {
	c := startSSHD(t).dial()
	out, stderr, err := c.Run(t.Context(), "tr a-z A-Z; echo noted >&2", strings.NewReader("words"))
	if string(out) != "WORDS" || string(stderr) != "noted\n" || err != nil {
		t.Errorf("got %q, %q and %v", out, stderr, err)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 512<<10)
	out, _, err = c.Run(t.Context(), "cat", bytes.NewReader(big))
	if err != nil || !bytes.Equal(out, big) {
		t.Errorf("8 MiB there and back: %d bytes and %v", len(out), err)
	}
	_, _, err = c.Run(t.Context(), "echo no >&2; exit 7", nil)
	if exit, ok := errors.AsType[*sshconn.ExitError](err); !ok || exit.Status != 7 || exit.Stderr != "no" {
		t.Errorf("got %v, want status 7", err)
	}
	_, _, err = c.Run(t.Context(), "kill -TERM $$", nil)
	if exit, ok := errors.AsType[*sshconn.ExitError](err); !ok || exit.Signal != "TERM" {
		t.Errorf("got %v, want SIGTERM", err)
	}
	if _, _, err := c.Run(t.Context(), "true", neverEnds{}); err != nil {
		t.Errorf("a command that doesn't read its input: %v", err)
	}
}

// waits is an input that gives nothing until its context ends.
type waits struct{ ctx context.Context }

func (w waits) Read([]byte) (int, error) { <-w.ctx.Done(); return 0, w.ctx.Err() }

// neverEnds is an endless input.
type neverEnds struct{}

func (neverEnds) Read(p []byte) (int, error) { return len(p), nil }

func TestLiveACommandIsKilledWithItsContext(t *testing.T) {
	c := startSSHD(t).dial()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("no longer wanted")
	command := "sleep 1000"
	if os.Geteuid() == 0 {
		command = "cat" // sshd passes no signals on to root's commands: what ends them is the end of their input
	}
	file := filepath.Join(t.TempDir(), "pid")
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, _, err := c.Run(ctx, "echo $$ >"+file+"; exec "+command, waits{ctx}); !errors.Is(err, cause) {
			t.Errorf("got %v, want the cause", err)
		}
	})
	var pid int
	eventually(t, func() bool {
		content, _ := os.ReadFile(file)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(content)))
		return pid > 0
	}, func() string { return "the command did not start" })
	cancel(cause)
	wg.Wait()
	eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }, func() string { return "the command still runs" })
	if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
		t.Errorf("the next command: %v", err)
	}
}

func TestLiveMoreCommandsThanMaxSessionsTakeTurns(t *testing.T) {
	for _, limit := range []int{1, 2, 10} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			c := startSSHD(t, fmt.Sprintf("MaxSessions %d", limit)).dial()
			var wg sync.WaitGroup
			for i := range 40 {
				wg.Go(func() {
					if out, _, err := c.Run(t.Context(), fmt.Sprintf("sleep 0.05; echo %d", i), nil); err != nil || string(out) != fmt.Sprintln(i) {
						t.Errorf("%d: %q and %v", i, out, err)
					}
				})
			}
			wg.Wait()
			if c.Err() != nil {
				t.Error(c.Err())
			}
		})
	}
}

func TestLiveMaxSessionsZeroIsNamed(t *testing.T) {
	c := startSSHD(t, "MaxSessions 0").dial()
	if _, _, err := c.Run(t.Context(), "true", nil); err == nil || !strings.Contains(err.Error(), "MaxSessions") {
		t.Errorf("got %v", err)
	}
	path := serveEcho(t)
	conn, err := c.DialUnix(t.Context(), path)
	if err != nil {
		t.Fatalf("a socket needs no session: %v", err)
	}
	conn.Close()
}

func TestLiveDialsAboveMaxStartupsAllSucceed(t *testing.T) {
	for _, limit := range []string{"10:30:100", "2:50:6"} {
		t.Run(limit, func(t *testing.T) {
			s := startSSHD(t, "MaxStartups "+limit)
			config := s.config()
			var mu sync.Mutex
			dials := 0
			config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				mu.Lock()
				dials++
				mu.Unlock()
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}
			var wg sync.WaitGroup
			for range 24 {
				wg.Go(func() {
					c, err := sshconn.Dial(t.Context(), config)
					if err != nil {
						t.Error(err)
						return
					}
					c.Close()
				})
			}
			wg.Wait()
			t.Logf("%d connections for 24 logins", dials)
		})
	}
}

// serveEcho listens on a unix socket and returns its path.
func serveEcho(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "it's a socket")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				io.Copy(conn, conn)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return path
}

func TestLiveSocketsAreReachedBeyondMaxSessions(t *testing.T) {
	s := startSSHD(t, "MaxSessions 2")
	path := serveEcho(t)
	c := s.dial()
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			conn, err := c.DialUnix(t.Context(), path)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			conn.Write([]byte("ping"))
			got := make([]byte, 4)
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != "ping" {
				t.Errorf("got %q and %v", got, err)
			}
		})
	}
	wg.Wait()
	c.Close()
}

func TestLiveARefusedSocketSaysWhy(t *testing.T) {
	path := serveEcho(t)
	stale := filepath.Join(t.TempDir(), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	c := startSSHD(t).dial()
	if _, err := c.DialUnix(t.Context(), path+".not"); !errors.Is(err, sshconn.ErrSocketMissing) {
		t.Errorf("no socket: %v", err)
	}
	if _, err := c.DialUnix(t.Context(), stale); !errors.Is(err, sshconn.ErrForwardingRefused) {
		t.Errorf("a stale socket: %v", err)
	}
	c = startSSHD(t, "AllowStreamLocalForwarding no").dial()
	if _, err := c.DialUnix(t.Context(), path); !errors.Is(err, sshconn.ErrForwardingRefused) || !strings.Contains(err.Error(), "AllowStreamLocalForwarding") {
		t.Errorf("no forwarding: %v", err)
	}
	if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
		t.Errorf("a command afterwards: %v", err)
	}
}

func TestLiveAPeerThatStopsIsGivenUpInTimeAndFailsWhatWaits(t *testing.T) {
	path := serveEcho(t) // before sshd, whose stopped child holds a connection to it until the end
	s := startSSHD(t)
	const interval, count = 200 * time.Millisecond, 4
	c := s.dial(func(c *sshconn.Config) { c.KeepaliveInterval, c.KeepaliveCount = interval, count })
	conn, err := c.DialUnix(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	// A command that has been answered says that the peer was alive a moment ago.
	if _, _, err := c.Run(t.Context(), "sleep 1.5", nil); err != nil {
		t.Fatalf("with keepalives answered: %v", err)
	}
	s.signal(syscall.SIGSTOP)
	start := time.Now()
	var wg sync.WaitGroup
	wg.Go(func() { // fills every buffer on the way, so that not even a keepalive gets out
		block := make([]byte, 1<<20)
		for {
			if _, err := conn.Write(block); err != nil {
				return
			}
		}
	})
	for name, f := range map[string]func() error{
		"a command":       func() error { _, _, err := c.Run(t.Context(), "true", nil); return err },
		"a second socket": func() error { _, err := c.DialUnix(t.Context(), path); return err },
	} {
		wg.Go(func() {
			if err := f(); !errors.Is(err, sshconn.ErrNoAnswer) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	wg.Wait()
	<-c.Done()
	if took := time.Since(start); took > interval*count+500*time.Millisecond {
		t.Errorf("given up after %s, want %s", took, interval*count)
	}
	start = time.Now()
	c.Close()
	if took := time.Since(start); took > time.Second {
		t.Errorf("Close took %s", took)
	}
}

func TestLiveCloseDoesNotWaitForAStoppedPeer(t *testing.T) {
	s := startSSHD(t)
	c := s.dial()
	cmd, err := c.Start(t.Context(), "cat")
	if err != nil {
		t.Fatal(err)
	}
	s.signal(syscall.SIGSTOP)
	var wg sync.WaitGroup
	full := make(chan struct{})
	wg.Go(func() {
		block := make([]byte, 1<<20)
		for i := range 64 {
			if i == 1 { // one is on its way, and the window has room for one more
				close(full)
			}
			if _, err := cmd.Write(block); err != nil {
				return
			}
		}
	})
	<-full
	start := time.Now()
	cmd.Close()
	c.Close()
	wg.Wait()
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("Close took %s", took)
	}
	if err := cmd.Wait(t.Context()); !errors.Is(err, sshconn.ErrClosed) {
		t.Errorf("the command: %v, want ErrClosed", err)
	}
}

func TestLiveAHandshakeWithAStoppedServerEndsInTime(t *testing.T) {
	s := startSSHD(t)
	if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil { // the kernel still accepts
		t.Fatal(err)
	}
	config := s.config()
	config.Timeout = 300 * time.Millisecond
	start := time.Now()
	_, err := sshconn.Dial(t.Context(), config)
	if !errors.Is(err, context.DeadlineExceeded) || sshconn.Reason(err) != "Timeout" || time.Since(start) > 2*time.Second {
		t.Errorf("after %s: %v", time.Since(start), err)
	}
}

func TestLiveAPeerThatDiesIsNoticedAtOnce(t *testing.T) {
	s := startSSHD(t)
	c := s.dial()
	var wg sync.WaitGroup
	cmd, err := c.Start(t.Context(), "sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		if err := cmd.Wait(t.Context()); err == nil || sshconn.Local(err) {
			t.Errorf("the command: %v", err)
		}
	})
	start := time.Now()
	s.signal(syscall.SIGKILL)
	<-c.Done()
	if took := time.Since(start); took > time.Second {
		t.Errorf("noticed after %s", took)
	}
	wg.Wait()
	if sshconn.Reason(c.Err()) != "Unreachable" {
		t.Errorf("Err: %v", c.Err())
	}
}

func TestLiveTheServersOwnKeepalivesAreAnswered(t *testing.T) {
	c := startSSHD(t, "ClientAliveInterval 1", "ClientAliveCountMax 1").dial(func(c *sshconn.Config) { c.KeepaliveInterval = time.Hour })
	if _, _, err := c.Run(t.Context(), "sleep 4", nil); err != nil {
		t.Error(err)
	}
}

func TestLiveHostKeysAreKnownChangedUnknownOrCertified(t *testing.T) {
	s := startSSHD(t)
	ecdsa, rsa := keygen(t, s.dir, "ecdsa", "-t", "ecdsa", "-N", ""), keygen(t, s.dir, "rsa", "-t", "rsa", "-b", "2048", "-N", "")
	authority := keygen(t, s.dir, "ca")
	s.stop()
	s.lines = []string{"HostKey " + ecdsa, "HostKey " + rsa}
	s.start()
	name := fmt.Sprintf("[127.0.0.1]:%d", s.port)
	entry := func(key string) string { return name + " " + read(t, key+".pub") }
	try := func(want error, change func(*sshconn.Host)) {
		t.Helper()
		config := s.config()
		change(&config.Host)
		c, err := sshconn.Dial(t.Context(), config)
		if err == nil {
			c.Close()
		}
		if !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	known := func(lines ...string) func(*sshconn.Host) {
		return func(h *sshconn.Host) { h.KnownHosts = []string{s.knownHosts(lines...)} }
	}
	for _, key := range []string{s.hostKey, ecdsa, rsa} {
		try(nil, known(entry(key)))
		try(nil, func(h *sshconn.Host) { h.PinnedKeys = []string{read(t, key+".pub")} })
		fingerprint := strings.Fields(tool(t, "ssh-keygen", "-l", "-f", key+".pub"))[1]
		try(nil, func(h *sshconn.Host) { h.PinnedKeys = []string{fingerprint} })
		file := s.knownHosts(entry(key))
		tool(t, "ssh-keygen", "-H", "-f", file)
		if strings.Contains(read(t, file), "127.0.0.1") {
			t.Error("ssh-keygen did not hash the name")
		}
		try(nil, func(h *sshconn.Host) { h.KnownHosts = []string{file} })
	}
	try(sshconn.ErrUnknownHostKey, known("127.0.0.1 "+read(t, s.hostKey+".pub")))
	try(sshconn.ErrRevokedHostKey, known(entry(s.hostKey), "@revoked * "+read(t, s.hostKey+".pub")))
	file := s.knownHosts()
	scan, err := exec.Command(need(t, "ssh-keyscan"), "-p", strconv.Itoa(s.port), "127.0.0.1").Output()
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(file, scan, 0o600)
	try(nil, func(h *sshconn.Host) { h.KnownHosts = []string{file} })

	// The host gets another key of the type that was known.
	old := s.hostKey
	s.stop()
	s.lines = nil
	s.hostKey = keygen(t, s.dir, "new")
	s.start()
	try(sshconn.ErrChangedHostKey, known(entry(old)))
	file = s.knownHosts(entry(old))
	tool(t, "ssh-keygen", "-R", name, "-f", file) // as the error advises
	try(sshconn.ErrUnknownHostKey, func(h *sshconn.Host) { h.KnownHosts = []string{file} })

	// It gets a certificate.
	tool(t, "ssh-keygen", "-q", "-s", authority, "-h", "-I", "test", "-n", "127.0.0.1", s.hostKey+".pub")
	s.stop()
	s.lines = []string{"HostCertificate " + s.hostKey + "-cert.pub"}
	s.start()
	try(nil, known("@cert-authority "+name+" "+read(t, authority+".pub")))
	try(nil, known("@cert-authority "+name+" "+read(t, authority+".pub"), entry(old)))
	try(sshconn.ErrHostCertificate, known("@cert-authority "+name+" "+read(t, old+".pub")))
	tool(t, "ssh-keygen", "-q", "-s", authority, "-h", "-I", "test", "-n", "elsewhere", s.hostKey+".pub")
	s.stop()
	s.start()
	try(sshconn.ErrHostCertificate, known("@cert-authority "+name+" "+read(t, authority+".pub")))
}

func TestLiveAServerIsReachedThroughAJumpHost(t *testing.T) {
	jump, target := startSSHD(t), startSSHD(t)
	config := target.config()
	config.Jumps = []sshconn.Host{jump.config().Host}
	c, err := sshconn.Dial(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	out, _, err := c.Run(t.Context(), "echo $SSH_CONNECTION", nil)
	if fields := strings.Fields(string(out)); err != nil || len(fields) != 4 || fields[3] != strconv.Itoa(target.port) {
		t.Errorf("got %q and %v", out, err)
	}
	path := serveEcho(t)
	conn, err := c.DialUnix(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	c.Close()

	wrong := config
	wrong.Jumps = []sshconn.Host{jump.config().Host}
	wrong.Jumps[0].KnownHosts = target.config().Host.KnownHosts
	if _, err := sshconn.Dial(t.Context(), wrong); !errors.Is(err, sshconn.ErrUnknownHostKey) || !strings.Contains(err.Error(), jump.address()) {
		t.Errorf("an unknown jump host: %v", err)
	}
	wrong = config
	wrong.Host.KnownHosts = jump.config().Host.KnownHosts
	if _, err := sshconn.Dial(t.Context(), wrong); !errors.Is(err, sshconn.ErrUnknownHostKey) || !strings.Contains(err.Error(), target.address()) {
		t.Errorf("an unknown target: %v", err)
	}

	config.KeepaliveInterval, config.KeepaliveCount = 200*time.Millisecond, 3
	if c, err = sshconn.Dial(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	jump.signal(syscall.SIGSTOP)
	<-c.Done()
	if took := time.Since(start); !errors.Is(c.Err(), sshconn.ErrNoAnswer) || took > 2*time.Second {
		t.Errorf("a stopped jump host, after %s: %v", took, c.Err())
	}
	target.stop()
	jump.signal(syscall.SIGCONT)
	if _, err := sshconn.Dial(t.Context(), config); err == nil || !strings.Contains(err.Error(), "through the jump host") {
		t.Errorf("a target that does not listen: %v", err)
	}
}

func TestLiveEncryptedKeysAndTheAgentLogIn(t *testing.T) {
	s := startSSHD(t)
	for name, args := range map[string][]string{
		"openssh": {"-t", "ed25519", "-N", passphrase}, "rsa": {"-t", "rsa", "-b", "2048", "-N", passphrase}, "pem": {"-t", "rsa", "-b", "2048", "-m", "PEM", "-N", passphrase},
	} {
		key := keygen(t, s.dir, name, args...)
		s.authorize(key + ".pub")
		c := s.dial(func(c *sshconn.Config) {
			c.Host.KeyFiles, c.Host.Passphrase = []string{key}, givePassphrase(passphrase)
		})
		c.Close()
		config := s.config()
		config.Host.KeyFiles, config.Host.Passphrase = []string{key}, givePassphrase("wrong")
		_, err := sshconn.Dial(t.Context(), config)
		if _, ok := errors.AsType[*sshconn.CredentialsError](err); !ok || strings.Contains(err.Error(), passphrase) {
			t.Errorf("%s with a wrong passphrase: %v", name, err)
		}
	}

	socket := filepath.Join(s.dir, "agent")
	agent := exec.Command(need(t, "ssh-agent"), "-D", "-a", socket)
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { agent.Process.Kill(); agent.Wait() }()
	eventually(t, func() bool { _, err := os.Stat(socket); return err == nil }, func() string { return "ssh-agent did not start" })
	add := func(key string) {
		t.Helper()
		cmd := exec.Command(need(t, "ssh-add"), "-q", key)
		cmd.Env = append(os.Environ(), "SSH_AUTH_SOCK="+socket)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("ssh-add: %v\n%s", err, out)
		}
	}
	add(s.userKey)
	rsa := keygen(t, s.dir, "agent-rsa", "-t", "rsa", "-b", "2048", "-N", "")
	s.dial(func(c *sshconn.Config) { c.Host.KeyFiles, c.Host.Agent = nil, socket }).Close()
	t.Setenv("SSH_AUTH_SOCK", socket)
	s.dial(func(c *sshconn.Config) { c.Host.KeyFiles = nil }).Close()

	// Only an RSA key is authorized: it has to sign with SHA-2, for sshd refuses SHA-1.
	os.Remove(filepath.Join(s.dir, "authorized_keys"))
	s.authorize(rsa + ".pub")
	add(rsa)
	s.dial(func(c *sshconn.Config) { c.Host.KeyFiles = nil }).Close()

	// More wrong keys than sshd's MaxAuthTries come first.
	for i := range 8 {
		add(keygen(t, s.dir, fmt.Sprintf("wrong%d", i)))
	}
	os.Remove(filepath.Join(s.dir, "authorized_keys"))
	config := s.config()
	config.Host.KeyFiles = nil
	_, err := sshconn.Dial(t.Context(), config)
	if _, ok := errors.AsType[*sshconn.AuthError](err); !ok || !strings.Contains(err.Error(), "6 attempts") {
		t.Errorf("got %v, want to hear of the attempts", err)
	}
}
