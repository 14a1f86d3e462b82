package libvirt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"golang.org/x/crypto/ssh"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
)

// inBubble runs f with a connection to a host in fake time. That the bubble ends proves that Close leaves no goroutine.
func inBubble(t *testing.T, f func(t *testing.T, c *Conn, host *libvirttest.Host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		host := libvirttest.New(libvirttest.Config{})
		defer host.Close()
		c, err := Dial(t.Context(), Config{Dial: host.Dial})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		f(t, c, host)
	})
}

func version(s *Session) error {
	v, err := s.ConnectGetLibVersion()
	if err == nil && v != 9_000_000 {
		err = fmt.Errorf("the version is %d", v)
	}
	return err
}

// hold returns a call that takes d.
func hold(d time.Duration) func(*Session) error {
	return func(*Session) error { time.Sleep(d); return nil }
}

func TestASessionIsUsedAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		for range 5 {
			if err := c.Do(t.Context(), version); err != nil {
				t.Fatal(err)
			}
		}
		if n := host.Dials(); n != 1 {
			t.Errorf("%d connections for calls one after another", n)
		}
		if c.SSH() != nil {
			t.Error("it goes over SSH")
		}
	})
}

func TestSessionsAreBoundedAndAFewAreKept(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		begin := time.Now()
		var all sync.WaitGroup
		for range 2 * maxSessions {
			all.Go(func() {
				if err := c.Do(t.Context(), hold(time.Second)); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if n := host.Conns(); n != maxSessions {
			t.Errorf("%d sessions at once", n)
		}
		// A check does not wait for its turn.
		if err := c.Probe(t.Context(), version); err != nil || time.Since(begin) > 0 {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
		// Nor does anybody wait for longer than their context.
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := c.Do(ctx, version); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		all.Wait()
		if took := time.Since(begin); took != 2*time.Second {
			t.Errorf("two rounds of a second took %s", took)
		}
		synctest.Wait()
		if n := host.Conns(); n != maxIdle {
			t.Errorf("%d sessions are kept", n)
		}
	})
}

func TestTheEndOfACallsContextEndsItsSessionAndNobodyElses(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		other := make(chan error, 1)
		go func() {
			other <- c.Do(t.Context(), func(s *Session) error {
				time.Sleep(time.Minute)
				return version(s)
			})
		}()
		synctest.Wait()
		host.Inject(libvirttest.Fault{Procedure: "NodeGetInfo", Hang: true})
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, cause)
		defer cancel()
		begin := time.Now()
		err := c.Do(ctx, func(s *Session) error {
			_, _, _, _, _, _, _, _, err := s.NodeGetInfo()
			return err
		})
		if !errors.Is(err, cause) || time.Since(begin) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
		if err := <-other; err != nil {
			t.Errorf("the call beside it: %v", err)
		}
		if c.Err() != nil {
			t.Errorf("the connection ended: %v", c.Err())
		}
		ctx, stop := context.WithCancelCause(t.Context())
		stop(cause)
		for _, call := range []func(context.Context, func(*Session) error) error{c.Do, c.Probe} {
			if err := call(ctx, func(*Session) error { t.Error("called"); return nil }); !errors.Is(err, cause) {
				t.Errorf("with a context that has ended: %v", err)
			}
		}
	})
}

func TestALostSessionSaysSoAndTheNextCallHasAnother(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		for _, f := range []libvirttest.Fault{{Cut: true}, {Lose: true}} {
			f.Procedure, f.Times = "ConnectGetLibVersion", 1
			host.Inject(f)
			if err := c.Do(t.Context(), version); !errors.Is(err, ErrLost) || Answered(err) {
				t.Errorf("%+v: %v", f, err)
			}
			if err := c.Do(t.Context(), version); err != nil {
				t.Error(err)
			}
		}
		// One that dies while nobody uses it is not given out.
		host.Cut()
		synctest.Wait()
		if err := c.Do(t.Context(), version); err != nil {
			t.Error(err)
		}
		host.SetDown(true)
		synctest.Wait()
		if err := c.Do(t.Context(), version); err == nil || Answered(err) {
			t.Errorf("without a daemon: %v", err)
		}
		host.SetDown(false)
		if err := c.Do(t.Context(), version); err != nil {
			t.Error(err)
		}
	})
}

func TestLibvirtsOwnErrorsLeaveTheSession(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		look := func(s *Session) error {
			_, err := s.DomainLookupByName("nobody")
			return err
		}
		for range 3 {
			if err := c.Do(t.Context(), look); Code(err) != golibvirt.ErrNoDomain {
				t.Errorf("got %v", err)
			}
		}
		mine := errors.New("mine")
		if err := c.Do(t.Context(), func(*Session) error { return mine }); !errors.Is(err, mine) {
			t.Errorf("got %v", err)
		}
		if n := host.Dials(); n != 1 {
			t.Errorf("%d connections", n)
		}
		// A stream may still get answers for which nobody waits, so its session is not used again.
		if err := c.Do(t.Context(), func(*Session) error { return &StreamError{mine} }); !errors.Is(err, mine) || err.Error() != "mine" {
			t.Errorf("got %v", err)
		}
		if err := c.Do(t.Context(), version); err != nil || host.Dials() != 2 {
			t.Errorf("%v, %d connections", err, host.Dials())
		}
	})
}

func TestCloseEndsEveryCallAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, c *Conn, host *libvirttest.Host) {
		host.Inject(libvirttest.Fault{Hang: true})
		failed := make(chan error, maxSessions+1)
		for range cap(failed) { // one of them waits for its turn
			go func() { failed <- c.Do(context.Background(), version) }()
		}
		synctest.Wait()
		begin := time.Now()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		for range cap(failed) {
			if err := <-failed; !errors.Is(err, ErrLost) || !errors.Is(err, ErrClosed) {
				t.Errorf("got %v", err)
			}
		}
		if time.Since(begin) > 0 {
			t.Errorf("it took %s", time.Since(begin))
		}
		select {
		case <-c.Done():
		default:
			t.Error("Done is open")
		}
		if !errors.Is(c.Err(), ErrClosed) || c.Close() != nil {
			t.Errorf("Err is %v", c.Err())
		}
		if err := c.Do(t.Context(), version); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

func TestADialFailsInTime(t *testing.T) {
	for _, c := range []struct {
		what  string
		fault libvirttest.Fault
		limit time.Duration
		took  time.Duration
		check func(error) bool
	}{
		{"hangs", libvirttest.Fault{Procedure: "ConnectOpen", Hang: true}, time.Hour, openTimeout, func(err error) bool {
			return errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "no session within 30s")
		}},
		{"hangs for longer than the caller has", libvirttest.Fault{Procedure: "AuthList", Hang: true}, time.Second, time.Second, func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }},
		{"cut", libvirttest.Fault{Procedure: "AuthList", Cut: true}, time.Hour, 0, func(err error) bool { return errors.Is(err, ErrLost) }},
		{"refused", libvirttest.Fault{Procedure: "ConnectOpen", Code: golibvirt.ErrAuthFailed, Message: "authentication failed"}, time.Hour, 0, Denied},
	} {
		synctest.Test(t, func(t *testing.T) {
			host := libvirttest.New(libvirttest.Config{})
			defer host.Close()
			host.Inject(c.fault)
			ctx, cancel := context.WithTimeout(t.Context(), c.limit)
			defer cancel()
			begin := time.Now()
			conn, err := Dial(ctx, Config{Dial: host.Dial})
			if conn != nil || !c.check(err) || time.Since(begin) != c.took {
				t.Errorf("%s: %v after %s", c.what, err, time.Since(begin))
			}
			synctest.Wait()
			if n := host.Conns(); n != 0 {
				t.Errorf("%s: %d connections are left", c.what, n)
			}
		})
	}
}

func TestAHostWithoutASocketSaysSo(t *testing.T) {
	_, err := Dial(t.Context(), Config{URI: URI{Socket: "/nonexistent/libvirt-sock"}})
	if !errors.Is(err, ErrNoSocket) || !strings.Contains(err.Error(), "/nonexistent/libvirt-sock") {
		t.Errorf("got %v", err)
	}
}

func TestTheSocketOfThisMachineIsUsed(t *testing.T) {
	host := libvirttest.New(libvirttest.Config{})
	defer host.Close()
	socket := t.TempDir() + "/s"
	if err := host.Listen(socket); err != nil {
		t.Fatal(err)
	}
	c, err := Dial(t.Context(), Config{URI: URI{Socket: socket}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Do(t.Context(), version); err != nil {
		t.Error(err)
	}
}

var hostKey, userKey = sshtest.NewKey("ed25519"), sshtest.NewKey("ed25519")

// overSSH runs f with a server in fake time and a configuration that logs in to it.
func overSSH(t *testing.T, server *sshtest.Server, f func(t *testing.T, config Config, host *libvirttest.Host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		host := libvirttest.New(libvirttest.Config{})
		defer host.Close()
		server.HostKeys, server.Users = []ssh.Signer{hostKey}, []ssh.PublicKey{userKey.PublicKey()}
		defer server.Close()
		uri, err := ParseURI("qemu+ssh://root@host/system")
		if err != nil {
			t.Fatal(err)
		}
		pin := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(hostKey.PublicKey())))
		f(t, Config{URI: uri, SSH: sshconn.Config{
			Host: sshconn.Host{Address: uri.SSH.String(), User: "root", PinnedKeys: []string{pin}, Signers: []ssh.Signer{userKey}}, Dial: server.Dial,
		}}, host)
	})
}

// volumeOf returns a volume to send content to.
func volumeOf(s *Session) (golibvirt.StorageVol, error) {
	pool, err := s.StoragePoolLookupByName("default")
	if err != nil {
		return golibvirt.StorageVol{}, err
	}
	return s.StorageVolCreateXML(pool, "<volume><name>v</name><capacity>0</capacity></volume>", 0)
}

func TestTheSocketIsReachedThroughSSHWithOneLoginForAllSessions(t *testing.T) {
	server := &sshtest.Server{}
	overSSH(t, server, func(t *testing.T, config Config, host *libvirttest.Host) {
		var mu sync.Mutex
		paths := map[string]int{}
		server.Socket = func(path string, conn io.ReadWriteCloser) {
			mu.Lock()
			paths[path]++
			mu.Unlock()
			host.Serve(conn)
		}
		c, err := Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		content := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
		err = c.Do(t.Context(), func(s *Session) error {
			v, err := volumeOf(s)
			if err != nil {
				return err
			}
			if err := s.StorageVolUpload(v, bytes.NewReader(content), 0, 0, 0); err != nil {
				return err
			}
			var back bytes.Buffer
			if err := s.StorageVolDownload(v, &back, 16, 32, 0); err != nil {
				return err
			}
			if !bytes.Equal(back.Bytes(), content[16:48]) {
				t.Errorf("read back %q", back.Bytes())
			}
			// A call beside it has a session of its own.
			return c.Do(t.Context(), version)
		})
		if err != nil {
			t.Fatal(err)
		}
		if v := host.Volumes(); len(v) != 1 || !bytes.Equal(v[0].Content, content) {
			t.Error("the volume does not hold what was sent")
		}
		mu.Lock()
		defer mu.Unlock()
		if server.Dials() != 1 || len(paths) != 1 || paths[Sockets[0]] != 2 {
			t.Errorf("%d logins, sockets %v", server.Dials(), paths)
		}
	})
}

func TestSSHDIsMadeToAnswerAtOnceWhateverBecomesOfTheCommand(t *testing.T) {
	for _, what := range []string{"it ends", "it hangs", "it is refused"} {
		server := &sshtest.Server{RefuseExec: what == "it is refused"}
		overSSH(t, server, func(t *testing.T, config Config, host *libvirttest.Host) {
			commands := make(chan string, 10)
			server.Exec = func(command string, _ ssh.Channel, killed <-chan struct{}) int {
				commands <- command
				if what == "it hangs" {
					<-killed
				}
				return 0
			}
			server.Socket = func(_ string, conn io.ReadWriteCloser) { host.Serve(conn) }
			begin := time.Now()
			c, err := Dial(t.Context(), config)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for range 3 {
				if err := c.Do(t.Context(), version); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			synctest.Wait()
			_ = c.Close() // always nil
			if took := time.Since(begin); took > 0 {
				t.Errorf("%s: it held up others or the end by %s", what, took)
			}
			close(commands)
			var all []string
			for command := range commands {
				all = append(all, command)
			}
			if want := []string{"true"}; server.RefuseExec == (len(all) > 0) || len(all) > 0 && !slices.Equal(all, want) {
				t.Errorf("%s: the host was told %q, want %q once for a connection", what, all, want)
			}
		})
	}
}

func TestWhereTheSocketIsNotForwardedAHelperIsUsed(t *testing.T) {
	for _, c := range []struct {
		what, found, helper string
		want                error
	}{
		{"forwarding is off", "socket\nwritable\nasked\n", helpers[0], nil},
		{"no socket is where it is looked for", "asked\n", helpers[0], nil},
		{"the first helper is not there", "socket\nwritable\nasked\n", helpers[1], nil},
		{"there is nothing", "asked\n", "", ErrNoSocket},
		{"forwarding is off and no helper there", "socket\nwritable\nasked\n", "", sshconn.ErrForwardingRefused},
		{"the user may not", "socket\nasked\n", "", sshconn.ErrSocketDenied},
	} {
		server := &sshtest.Server{}
		overSSH(t, server, func(t *testing.T, config Config, host *libvirttest.Host) {
			server.Exec = func(command string, ch ssh.Channel, _ <-chan struct{}) int {
				switch {
				case command == "true":
					t.Errorf("%s: a command is started though the way is one", c.what)
					return 0
				case strings.HasPrefix(command, "test -S"):
					_, _ = io.WriteString(ch, c.found)
					return 0
				case command == c.helper:
					host.Serve(ch)
					return 0
				}
				_, _ = io.WriteString(ch.Stderr(), "not found")
				return 127
			}
			conn, err := Dial(t.Context(), config)
			if c.want != nil {
				if !errors.Is(err, c.want) {
					t.Errorf("%s: %v, want %v", c.what, err, c.want)
				}
				return
			}
			if err != nil {
				t.Errorf("%s: %v", c.what, err)
				return
			}
			defer conn.Close()
			if err := conn.Do(t.Context(), version); err != nil || cap(conn.turns) != maxHelperSessions {
				t.Errorf("%s: %v, at most %d sessions", c.what, err, cap(conn.turns))
			}
		})
	}
}

func TestWhenTheSSHConnectionEndsSoDoesEverythingOnIt(t *testing.T) {
	server := &sshtest.Server{}
	overSSH(t, server, func(t *testing.T, config Config, host *libvirttest.Host) {
		server.Socket = func(_ string, conn io.ReadWriteCloser) { host.Serve(conn) }
		c, err := Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		host.Inject(libvirttest.Fault{Procedure: "ConnectGetLibVersion", Hang: true})
		failed := make(chan error)
		go func() { failed <- c.Do(t.Context(), version) }()
		synctest.Wait()
		server.Cut()
		if err := <-failed; !errors.Is(err, ErrLost) {
			t.Errorf("got %v", err)
		}
		<-c.Done()
		if c.Err() == nil {
			t.Error("no cause is known")
		}
	})
}

// A network that swallows everything is found by the keepalive of SSH, and a call's own context frees it before.
func TestACallIsFreedThoughTheNetworkSwallowsEverything(t *testing.T) {
	server := &sshtest.Server{}
	overSSH(t, server, func(t *testing.T, config Config, host *libvirttest.Host) {
		server.Socket = func(_ string, conn io.ReadWriteCloser) { host.Serve(conn) }
		c, err := Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		server.Freeze()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		if err := c.Do(ctx, version); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
		<-c.Done()
		if took := time.Since(begin); took > 2*time.Minute {
			t.Errorf("the connection was given up after %s", took)
		}
	})
}

func TestErrorsAreTold(t *testing.T) {
	e := func(code golibvirt.ErrorNumber, text string) error {
		return fmt.Errorf("wrapped: %w", golibvirt.Error{Code: uint32(code), Message: text})
	}
	for _, c := range []struct {
		err                    error
		answered, full, denied bool
	}{
		{nil, false, false, false},
		{io.EOF, false, false, false},
		{net.ErrClosed, false, false, false},
		{golibvirt.ErrUnsupported, true, false, false},
		{golibvirt.ErrInterrupted, false, false, false},
		{e(golibvirt.ErrNoDomain, "x"), true, false, false},
		{e(golibvirt.ErrSystemError, "write: No space left on device"), true, true, false},
		{e(golibvirt.ErrInternalError, "qemu-img: Disk quota exceeded"), true, true, false},
		{e(golibvirt.ErrNoDomain, "No space left on device"), true, false, false},
		{errors.New("No space left on device"), false, false, false},
		{e(golibvirt.ErrAuthFailed, "x"), true, false, true},
		{e(golibvirt.ErrOperationDenied, "x"), true, false, true},
		{e(golibvirt.ErrAccessDenied, "x"), true, false, true},
		{e(golibvirt.ErrInternalError, "cannot reach the system bus"), true, false, true},
	} {
		if Answered(c.err) != c.answered || Full(c.err) != c.full || Denied(c.err) != c.denied {
			t.Errorf("%v: answered %t, full %t, denied %t", c.err, Answered(c.err), Full(c.err), Denied(c.err))
		}
	}
	if got := quote("it's"); got != `'it'\''s'` {
		t.Errorf("quoted: %s", got)
	}
}
