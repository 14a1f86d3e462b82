// Package testhost starts libvirt hosts on this machine for tests that meet the real thing: real libvirtd, sshd, QEMU and
// Debian guests, each host in namespaces of its own with its own network, storage and keys, and with faults to
// order. It needs root and Debian's packages, which internal/live/run installs.
//
// host.sh is a host, guest.sh builds the image that guests boot from; both can be run by hand. A host ends with the
// process that started it, however that ends.
package testhost

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// upTimeout bounds the start of a host, and answerTimeout one command to it.
const (
	upTimeout     = 3 * time.Minute
	answerTimeout = 2 * time.Minute
)

// Options says how a host is made.
type Options struct {
	// PoolMiB is the size of the storage pool, which is in memory. Defaults to 2048.
	PoolMiB int
	// Folder holds what belongs to the host. It must be empty. Required.
	Folder string
}

// Host is a running host. Its methods are safe for concurrent use.
type Host struct {
	// Address is the IP address at which sshd listens, and which the host has towards this machine.
	Address string
	// Outside is the address that this machine has towards the host.
	Outside string
	// Guests is the network of the guests, which is routed from here.
	Guests string
	// Namespace is the host's network namespace.
	Namespace string
	// Folder holds the host's keys and logs.
	Folder string

	init  string
	stdin io.WriteCloser
	ended chan struct{}

	// mu guards one command and its answer.
	mu      sync.Mutex
	answers *bufio.Reader
}

// dir is the folder of this file, where the scripts are.
func dir() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(file)
}

// New starts a host and returns when it is up.
func New(options Options) (*Host, error) {
	if options.PoolMiB == 0 {
		options.PoolMiB = 2048
	}
	cmd := exec.Command(filepath.Join(dir(), "host.sh"), options.Folder, fmt.Sprint(options.PoolMiB))
	// In a group of its own, so that an interrupt at the terminal reaches the test first.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h := &Host{Folder: options.Folder, stdin: stdin, ended: make(chan struct{}), answers: bufio.NewReader(stdout)}
	line, err := h.answer(upTimeout)
	go func() {
		_ = cmd.Wait() // it is killed in the end
		close(h.ended)
	}()
	if err != nil {
		_ = stdin.Close()
		<-h.ended
		return nil, fmt.Errorf("testhost: not up: %w: %s", err, stderr.String())
	}
	for _, pair := range strings.Fields(line) {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "address":
			h.Address = value
			h.Outside = strings.TrimSuffix(value, "2") + "1"
		case "guests":
			h.Guests = value
		case "namespace":
			h.Namespace = value
		case "init":
			h.init = value
		}
	}
	return h, nil
}

func (h *Host) answer(limit time.Duration) (string, error) {
	type result struct {
		line string
		err  error
	}
	got := make(chan result, 1)
	go func() {
		line, err := h.answers.ReadString('\n')
		got <- result{strings.TrimSpace(line), err}
	}()
	select {
	case r := <-got:
		return r.line, r.err
	case <-time.After(limit):
		return "", errors.New("no answer")
	}
}

// Order has the host carry out one of host.sh's commands and returns when it has.
func (h *Host) Order(command string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, err := io.WriteString(h.stdin, command+"\n"); err != nil {
		return fmt.Errorf("testhost: %s: %w", command, err)
	}
	line, err := h.answer(answerTimeout)
	if err != nil || line != "ok" {
		return fmt.Errorf("testhost: %s: %q, %w", command, line, err)
	}
	return nil
}

// Close ends the host with everything on it, and returns when nothing is left.
func (h *Host) Close() error {
	_ = h.stdin.Close()
	<-h.ended
	return nil
}

// Init is the process id of the host's init process, as this machine sees it.
func (h *Host) Init() string { return h.init }

// URI is the host's address for libvirt over SSH.
func (h *Host) URI() string { return "qemu+ssh://root@" + h.Address + "/system" }

// KnownHosts is a file with the host's key.
func (h *Host) KnownHosts() string { return filepath.Join(h.Folder, "known_hosts") }

// KeyFile is the private key that the host lets in.
func (h *Host) KeyFile() string { return filepath.Join(h.Folder, "client_key") }

// Command returns a command that runs on the host itself, not over SSH.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--target", h.init, "--mount", "--pid", "--net", "--", name}, args...)...)
}

// Run runs a command on the host and returns its output.
func (h *Host) Run(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	out, err := h.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("testhost: %s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// Image returns the path of the guests' image, which is built when it isn't in the cache of this repository. That takes a
// minute or two.
func Image() (string, error) {
	cmd := exec.Command(filepath.Join(dir(), "guest.sh"), filepath.Join(dir(), "..", "..", ".cache"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("testhost: build the guests' image: %w: %s", err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}

// Tools are the programs that a host needs.
var Tools = []string{
	"iptables", "libvirtd", "virtlogd", "virsh", "qemu-system-x86_64", "qemu-img", "sshd", "ssh-keygen", "dnsmasq", "ip", "nsenter",
	"unshare", "flock", "mmdebstrap", "mkfs.vfat", "mcopy", "sfdisk", "objcopy",
}

// Missing says why no host can run here, or nothing when one can.
func Missing() string {
	if os.Getuid() != 0 {
		return "needs root"
	}
	missing := slices.DeleteFunc(slices.Clone(Tools), func(tool string) bool {
		return slices.ContainsFunc([]string{tool, "/usr/sbin/" + tool, "/sbin/" + tool}, func(file string) bool {
			_, err := exec.LookPath(file)
			return err == nil
		})
	})
	if len(missing) > 0 {
		return "needs " + strings.Join(missing, ", ") + "; internal/live/run installs them"
	}
	return ""
}

// Start starts a host for a test, which is skipped when none can run here, and ended with the test.
func Start(t testing.TB, options Options) *Host {
	t.Helper()
	Require(t)
	if options.Folder == "" {
		folder, err := os.MkdirTemp("", "testhost") // t.TempDir's names are too long for the sockets in there
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(folder) })
		options.Folder = folder
	}
	h, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, log := range []string{"libvirtd.log", "virtlogd.log"} {
				if text, err := os.ReadFile(filepath.Join(h.Folder, "log", log)); err == nil && len(text) > 0 {
					t.Logf("%s of %s:\n%s", log, h.Address, text[max(0, len(text)-4096):])
				}
			}
		}
		_ = h.Close()
	})
	return h
}

// Require skips the test when no host can run here, and fails it instead when EGRESS_REQUIRE_LIVE is 1.
func Require(t testing.TB) {
	t.Helper()
	if why := Missing(); why != "" {
		if os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
}

// Must is Order for tests.
func (h *Host) Must(t testing.TB, command string) {
	t.Helper()
	if err := h.Order(command); err != nil {
		t.Fatal(err)
	}
}

// Virsh runs virsh on the host and returns its output.
func (h *Host) Virsh(t testing.TB, args ...string) string {
	t.Helper()
	out, err := h.Run("virsh", append([]string{"-q"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Serve serves handler over HTTP at the address that this machine has towards the host, so that guests reach it too. It
// returns the URL without a slash at the end.
func (h *Host) Serve(t testing.TB, handler http.Handler) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(h.Outside, "0"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // until Close
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	return "http://" + l.Addr().String()
}

// Delay gives sshd an address behind a link on which everything takes delay in each direction, and a known_hosts file for
// it. It is gone with the test.
func (h *Host) Delay(t testing.TB, delay time.Duration) (address, knownHosts string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	open := make(chan struct{})
	carry := func(to, from net.Conn) {
		type piece struct {
			due  time.Time
			data []byte
		}
		pieces := make(chan piece, 4096)
		conns.Go(func() {
			defer to.Close()
			for p := range pieces {
				select {
				case <-time.After(time.Until(p.due)):
				case <-open:
				}
				if _, err := to.Write(p.data); err != nil {
					_ = from.Close() // the other half sees it
				}
			}
		})
		defer close(pieces)
		for {
			buf := make([]byte, 64<<10)
			n, err := from.Read(buf)
			if n > 0 {
				pieces <- piece{time.Now().Add(delay), buf[:n]}
			}
			if err != nil {
				return
			}
		}
	}
	conns.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", net.JoinHostPort(h.Address, "22"))
			if err != nil {
				_ = near.Close() // nobody is there
				continue
			}
			conns.Go(func() { carry(far, near) })
			conns.Go(func() { carry(near, far) })
			conns.Go(func() {
				<-open
				_, _ = near.Close(), far.Close() // the test is over
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close() // it ends Accept
		close(open)
		conns.Wait()
	})
	key, err := os.ReadFile(h.KnownHosts())
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	knownHosts = filepath.Join(t.TempDir(), "known_hosts")
	_, rest, _ := strings.Cut(string(key), " ")
	rest, _, _ = strings.Cut(rest, "\n")
	if err := os.WriteFile(knownHosts, []byte("[127.0.0.1]:"+port+" "+rest+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return l.Addr().String(), knownHosts
}

// IdleImage is a raw disk image that BIOS boots and that does nothing at all, so that many guests can run at once.
func IdleImage() []byte {
	disk := make([]byte, 1<<20)
	copy(disk, []byte{0xfa, 0xf4, 0xeb, 0xfd}) // cli; hlt; jump back to hlt
	disk[510], disk[511] = 0x55, 0xaa
	return disk
}
