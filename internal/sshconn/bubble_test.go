package sshconn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
)

var (
	hostKey = sshtest.NewKey("ed25519")
	userKey = sshtest.NewKey("ed25519")
)

func authorized(key ssh.Signer) string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key.PublicKey())))
}

// newServer returns a server that knows hostKey and userKey.
func newServer() *sshtest.Server {
	return &sshtest.Server{HostKeys: []ssh.Signer{hostKey}, Users: []ssh.PublicKey{userKey.PublicKey()}}
}

// configFor returns the settings that log in to a server of newServer.
func configFor(s *sshtest.Server) sshconn.Config {
	return sshconn.Config{
		Host: sshconn.Host{Address: "root@host", PinnedKeys: []string{authorized(hostKey)}, Signers: []ssh.Signer{userKey}},
		Dial: s.Dial,
	}
}

// inBubble connects to s in a bubble. That the bubble ends proves that Close leaves no goroutine.
func inBubble(t *testing.T, s *sshtest.Server, change func(*sshconn.Config), f func(t *testing.T, c *sshconn.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		config := configFor(s)
		if change != nil {
			change(&config)
		}
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		defer c.Close()
		f(t, c)
	})
}

func TestACommandGetsItsInputAndReturnsBothOutputs(t *testing.T) {
	s := newServer()
	s.Exec = func(command string, ch ssh.Channel, _ <-chan struct{}) int {
		in, _ := io.ReadAll(ch)
		fmt.Fprintf(ch, "%s: %s", command, bytes.ToUpper(in))
		io.WriteString(ch.Stderr(), "noted")
		return 0
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		out, stderr, err := c.Run(t.Context(), "upper", strings.NewReader("words"))
		if string(out) != "upper: WORDS" || string(stderr) != "noted" || err != nil {
			t.Errorf("got %q, %q and %v", out, stderr, err)
		}
		out, _, err = c.Run(t.Context(), "empty", nil)
		if string(out) != "empty: " || err != nil {
			t.Errorf("without input: got %q and %v", out, err)
		}
	})
}

func TestACommandThatTakesNinetySecondsIsWaitedFor(t *testing.T) {
	s := newServer()
	s.Exec = func(string, ssh.Channel, <-chan struct{}) int { time.Sleep(90 * time.Second); return 0 }
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		start := time.Now()
		if _, _, err := c.Run(t.Context(), "sleep", nil); err != nil || time.Since(start) < 90*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
	})
}

func TestAFailedCommandSaysHowAndLeavesTheConnection(t *testing.T) {
	s := newServer()
	s.Exec = func(command string, ch ssh.Channel, _ <-chan struct{}) int {
		io.WriteString(ch, "partial")
		io.WriteString(ch.Stderr(), "no such\x1b[31m volume\n")
		if strings.HasPrefix(command, "hang-up") {
			return -1
		}
		return 3
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		out, _, err := c.Run(t.Context(), "fail --password hunter2", nil)
		exit, ok := errors.AsType[*sshconn.ExitError](err)
		if !ok || exit.Status != 3 || exit.Stderr != "no such [31m volume" || string(out) != "partial" {
			t.Errorf("got %q and %v", out, err)
		}
		if !sshconn.Local(err) {
			t.Errorf("%v speaks against the connection, want not", err)
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the command stands in the error: %v", err)
		}
		if _, _, err := c.Run(t.Context(), "hang-up", nil); err == nil || sshconn.Local(err) {
			t.Errorf("a session without an exit status: %v", err)
		}
		if c.Err() != nil {
			t.Errorf("the connection ended: %v", c.Err())
		}
	})
}

func TestACommandIsKilledWhenItsContextEndsAndItsSessionIsFree(t *testing.T) {
	s := newServer()
	var killings atomic.Int64
	s.Exec = func(command string, _ ssh.Channel, killed <-chan struct{}) int {
		if command == "hang" {
			<-killed
			killings.Add(1)
		}
		return 0
	}
	one := func(c *sshconn.Config) { c.MaxSessions = 1 }
	inBubble(t, s, one, func(t *testing.T, c *sshconn.Client) {
		cause := errors.New("no longer wanted")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, cause)
		defer cancel()
		start := time.Now()
		_, _, err := c.Run(ctx, "hang", nil)
		if !errors.Is(err, cause) || !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
			t.Errorf("the next command: %v", err)
		}
		if killings.Load() != 1 {
			t.Error("the command was not killed")
		}
	})
}

func TestAStreamIsAConnThroughACommand(t *testing.T) {
	s := newServer()
	s.Exec = func(_ string, ch ssh.Channel, _ <-chan struct{}) int {
		n, _ := io.Copy(ch, ch)
		return int(n)
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		cmd, err := c.Start(t.Context(), "cat")
		if err != nil {
			t.Fatal(err)
		}
		var _ net.Conn = cmd
		cmd.Write([]byte("ping"))
		got := make([]byte, 4)
		if _, err := io.ReadFull(cmd, got); err != nil || string(got) != "ping" {
			t.Errorf("got %q and %v", got, err)
		}
		cmd.CloseWrite()
		if rest, err := io.ReadAll(cmd); len(rest) != 0 || err != nil {
			t.Errorf("after the end: %q and %v", rest, err)
		}
		if exit, ok := errors.AsType[*sshconn.ExitError](cmd.Wait(t.Context())); !ok || exit.Status != 4 {
			t.Errorf("exit is %v, want status 4", exit)
		}
		cmd.Close()
	})
}

func TestOutputBeyondTheLimitEndsTheCommand(t *testing.T) {
	s := newServer()
	s.Exec = func(_ string, ch ssh.Channel, _ <-chan struct{}) int {
		block := make([]byte, 1<<20)
		for {
			if _, err := ch.Write(block); err != nil {
				return 0
			}
		}
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		if out, _, err := c.Run(t.Context(), "yes", nil); !errors.Is(err, sshconn.ErrOutputTooLong) || out != nil || !sshconn.Local(err) {
			t.Errorf("got %d bytes and %v", len(out), err)
		}
	})
}

func TestMoreCommandsThanSessionsTakeTurns(t *testing.T) {
	for _, limits := range []struct{ ours, server, want int }{{3, 0, 3}, {10, 3, 3}, {10, 1, 1}, {2, 10, 2}} {
		t.Run(fmt.Sprintf("%d here, %d there", limits.ours, limits.server), func(t *testing.T) {
			var now, most atomic.Int64
			s := newServer()
			s.MaxSessions = limits.server
			s.Exec = func(string, ssh.Channel, <-chan struct{}) int {
				n := now.Add(1)
				for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
				time.Sleep(time.Second)
				now.Add(-1)
				return 0
			}
			inBubble(t, s, func(c *sshconn.Config) { c.MaxSessions = limits.ours }, func(t *testing.T, c *sshconn.Client) {
				var wg sync.WaitGroup
				for range 30 {
					wg.Go(func() {
						if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				if most.Load() != int64(limits.want) {
					t.Errorf("%d commands ran at once, want %d", most.Load(), limits.want)
				}
			})
		})
	}
}

func TestAWaitForASessionEndsWithTheContextAndWithTheConnection(t *testing.T) {
	s := newServer()
	s.Exec = func(_ string, _ ssh.Channel, killed <-chan struct{}) int { <-killed; return 0 }
	inBubble(t, s, func(c *sshconn.Config) { c.MaxSessions = 1 }, func(t *testing.T, c *sshconn.Client) {
		if _, err := c.Start(t.Context(), "hang"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Start(ctx, "true"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's end", err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := c.Start(t.Context(), "true"); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want the connection's end", err)
			}
		})
		synctest.Wait()
		s.Cut()
		wg.Wait()
	})
}

func TestAServerWithoutSessionsIsToldApartFromABusyOne(t *testing.T) {
	s := newServer()
	s.MaxSessions = 1
	s.Exec = func(_ string, _ ssh.Channel, killed <-chan struct{}) int { <-killed; return 0 }
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := c.Start(t.Context(), "hang"); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Start(ctx, "true"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("beside a session of ours: got %v, want to have waited", err)
		}
	})
	s = newServer()
	s.RefuseExec = true
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		if _, err := c.Start(t.Context(), "secret-word"); err == nil || strings.Contains(err.Error(), "secret-word") {
			t.Errorf("got %v, want a refusal without the command", err)
		}
		if c.Err() != nil {
			t.Errorf("the connection ended: %v", c.Err())
		}
	})
}

func TestASocketOnTheServerIsReached(t *testing.T) {
	s := newServer()
	s.Socket = func(path string, conn io.ReadWriteCloser) {
		fmt.Fprintf(conn, "%s:", path)
		io.Copy(conn, conn)
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		conn, err := c.DialUnix(t.Context(), "/run/libvirt/libvirt-sock")
		if err != nil {
			t.Fatal(err)
		}
		conn.Write([]byte("x"))
		conn.(interface{ CloseWrite() error }).CloseWrite()
		if got, err := io.ReadAll(conn); string(got) != "/run/libvirt/libvirt-sock:x" || err != nil {
			t.Errorf("got %q and %v", got, err)
		}
		conn.Close()
	})
}

func TestARefusedSocketIsLookedInto(t *testing.T) {
	for answer, want := range map[string]error{
		"asked\n":                   sshconn.ErrSocketMissing,
		"socket\nasked\n":           sshconn.ErrSocketDenied,
		"socket\nwritable\nasked\n": sshconn.ErrForwardingRefused,
	} {
		s := newServer()
		s.Exec = func(_ string, ch ssh.Channel, _ <-chan struct{}) int { io.WriteString(ch, answer); return 0 }
		inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
			_, err := c.DialUnix(t.Context(), "/run/s")
			if !errors.Is(err, want) || !sshconn.Local(err) {
				t.Errorf("%q: got %v, want %v", answer, err, want)
			}
		})
	}
	s := newServer()
	s.RefuseExec = true
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		if _, err := c.DialUnix(t.Context(), "/run/s"); err == nil || !strings.Contains(err.Error(), "could not ask") {
			t.Errorf("got %v, want to hear that nothing could be found out", err)
		}
	})
}

func TestASocketThatConnectsTooLateIsClosed(t *testing.T) {
	s := newServer()
	closed := make(chan struct{})
	s.Socket = func(_ string, conn io.ReadWriteCloser) {
		io.Copy(io.Discard, conn)
		close(closed)
	}
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		s.Freeze()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.DialUnix(ctx, "/run/s"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's end", err)
		}
		s.Thaw()
		<-closed
		if c.Err() != nil {
			t.Errorf("the connection ended: %v", c.Err())
		}
	})
}

func TestASilentServerIsGivenUpAfterTheIntervalTimesTheCount(t *testing.T) {
	for _, test := range []struct {
		interval time.Duration
		count    int
		want     time.Duration
	}{{0, 0, 45 * time.Second}, {time.Second, 5, 5 * time.Second}, {10 * time.Second, 1, 20 * time.Second}} {
		t.Run(test.want.String(), func(t *testing.T) {
			s := newServer()
			s.Exec = func(command string, _ ssh.Channel, killed <-chan struct{}) int {
				if command == "hang" {
					<-killed
				}
				return 0
			}
			s.Socket = func(_ string, conn io.ReadWriteCloser) { io.Copy(io.Discard, conn) }
			change := func(c *sshconn.Config) { c.KeepaliveInterval, c.KeepaliveCount = test.interval, test.count }
			inBubble(t, s, change, func(t *testing.T, c *sshconn.Client) {
				var wg sync.WaitGroup
				conn, err := c.DialUnix(t.Context(), "/run/s")
				if err != nil {
					t.Fatal(err)
				}
				wg.Go(func() { // a read on a socket
					if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
						t.Errorf("read %d bytes and %v", n, err)
					}
				})
				fails := func(what string, f func() error) {
					wg.Go(func() {
						if err := f(); !errors.Is(err, sshconn.ErrNoAnswer) || sshconn.Reason(err) != "Timeout" {
							t.Errorf("%s: got %v, want ErrNoAnswer", what, err)
						}
					})
				}
				fails("a command", func() error { _, _, err := c.Run(t.Context(), "hang", nil); return err })
				synctest.Wait()
				time.Sleep(7*time.Second + 300*time.Millisecond)
				if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
					t.Fatal(err)
				}
				heard := time.Now()
				s.Freeze()
				fails("a socket", func() error { _, err := c.DialUnix(t.Context(), "/run/s"); return err })
				fails("a new command", func() error { _, err := c.Start(t.Context(), "true"); return err })
				<-c.Done()
				if took := time.Since(heard); took != test.want {
					t.Errorf("given up after %s, want %s", took, test.want)
				}
				wg.Wait()
				if err := c.Err(); !errors.Is(err, sshconn.ErrNoAnswer) {
					t.Errorf("Err: %v", err)
				}
				if _, err := c.DialUnix(t.Context(), "/run/s"); !errors.Is(err, sshconn.ErrNoAnswer) {
					t.Errorf("a call afterwards: %v", err)
				}
			})
		})
	}
}

func TestAnIdleServerIsAskedAndItsRefusalCountsAsLife(t *testing.T) {
	s := newServer()
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		time.Sleep(time.Hour)
		if c.Err() != nil {
			t.Fatalf("the connection ended: %v", c.Err())
		}
		if n := s.Requests.Load(); n < 200 || n > 240 {
			t.Errorf("asked %d times in an hour, want one each 15 s", n)
		}
		if s.Ping() != 1 {
			t.Error("the server's own question was not answered")
		}
	})
}

func TestASilenceShorterThanPromisedIsForgiven(t *testing.T) {
	s := newServer()
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		for range 20 {
			s.Freeze()
			time.Sleep(44 * time.Second)
			s.Thaw()
			synctest.Wait()
			if c.Err() != nil {
				t.Fatalf("the connection ended: %v", c.Err())
			}
			if _, _, err := c.Run(t.Context(), "true", nil); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestALostConnectionFailsWhatWaitsAndSaysWhy(t *testing.T) {
	s := newServer()
	s.Exec = func(_ string, _ ssh.Channel, killed <-chan struct{}) int { <-killed; return 0 }
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		time.AfterFunc(time.Minute, s.Cut)
		start := time.Now()
		_, _, err := c.Run(t.Context(), "hang", nil)
		if !errors.Is(err, syscall.ECONNRESET) || sshconn.Reason(err) != "Unreachable" || time.Since(start) != time.Minute {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		<-c.Done()
		if !errors.Is(c.Err(), syscall.ECONNRESET) {
			t.Errorf("Err: %v", c.Err())
		}
	})
}

func TestCloseDoesNotWaitForASilentServer(t *testing.T) {
	s := newServer()
	s.Exec = func(_ string, _ ssh.Channel, killed <-chan struct{}) int { <-killed; return 0 }
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, _, err := c.Run(t.Context(), "hang", nil); !errors.Is(err, sshconn.ErrClosed) {
				t.Errorf("got %v, want ErrClosed", err)
			}
		})
		synctest.Wait()
		s.Freeze()
		start := time.Now()
		c.Close()
		c.Close()
		if took := time.Since(start); took > time.Second {
			t.Errorf("Close took %s", took)
		}
		if !errors.Is(c.Err(), sshconn.ErrClosed) {
			t.Errorf("Err: %v", c.Err())
		}
		wg.Wait()
		s.Thaw()
	})
}

func TestAHandshakeThatHangsEndsWithTheContextOrTheTimeout(t *testing.T) {
	for _, test := range []struct{ ctx, timeout, want time.Duration }{
		{time.Hour, 0, 30 * time.Second}, {time.Hour, 5 * time.Second, 5 * time.Second}, {2 * time.Second, 0, 2 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			defer s.Close()
			config := configFor(s)
			config.Timeout = test.timeout
			config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := s.Dial(ctx, network, address)
				s.Freeze()
				return conn, err
			}
			ctx, cancel := context.WithTimeout(t.Context(), test.ctx)
			defer cancel()
			start := time.Now()
			_, err := sshconn.Dial(ctx, config)
			if !errors.Is(err, context.DeadlineExceeded) || sshconn.Reason(err) != "Timeout" || time.Since(start) != test.want {
				t.Errorf("after %s: %v, want a timeout after %s", time.Since(start), err, test.want)
			}
			s.Thaw()
		})
	}
}

func TestAConnectionResetBeforeTheKeyIsShownIsTriedAgain(t *testing.T) {
	s := newServer()
	s.Reset = 5
	inBubble(t, s, nil, func(t *testing.T, c *sshconn.Client) {
		if s.Dials() != 6 {
			t.Errorf("dialled %d times, want 6", s.Dials())
		}
	})
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.Reset = 1000
		start := time.Now()
		_, err := sshconn.Dial(t.Context(), configFor(s))
		if !errors.Is(err, syscall.ECONNRESET) || s.Dials() != 7 {
			t.Errorf("after %d dials: %v, want to give up after 7", s.Dials(), err)
		}
		if took := time.Since(start); took < 2*time.Second || took > 12*time.Second {
			t.Errorf("gave up after %s, want some seconds", took)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		dials := 0
		config := configFor(newServer())
		config.Dial = func(context.Context, string, string) (net.Conn, error) { dials++; return nil, syscall.ECONNREFUSED }
		if _, err := sshconn.Dial(t.Context(), config); !errors.Is(err, syscall.ECONNREFUSED) || dials != 1 {
			t.Errorf("after %d dials: %v, want a refusal to be final", dials, err)
		}
	})
}

// chain returns the settings to reach a server through two jump hosts, each with keys of its own.
func chain() (config sshconn.Config, jump1, jump2, target *sshtest.Server) {
	hosts := []*sshtest.Server{newServer(), newServer(), newServer()}
	config = configFor(hosts[0])
	var settings []sshconn.Host
	for i, s := range hosts {
		key, user := sshtest.NewKey("ed25519"), sshtest.NewKey("ecdsa")
		s.HostKeys, s.Users = []ssh.Signer{key}, []ssh.PublicKey{user.PublicKey()}
		settings = append(settings, sshconn.Host{
			Address: fmt.Sprintf("user%d@host%d:%d", i, i, 2200+i), PinnedKeys: []string{authorized(key)}, Signers: []ssh.Signer{user},
		})
		if i+1 < len(hosts) {
			next := hosts[i+1]
			s.DialTCP = func(host string) (net.Conn, error) {
				if host != fmt.Sprintf("host%d", i+1) {
					return nil, errors.New("no route to " + host)
				}
				return next.Dial(context.Background(), "tcp", host)
			}
		}
	}
	config.Host, config.Jumps = settings[2], settings[:2]
	return config, hosts[0], hosts[1], hosts[2]
}

func TestAServerBehindTwoJumpHostsIsReachedAndEachIsVerified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, jump1, jump2, target := chain()
		target.Exec = func(_ string, ch ssh.Channel, _ <-chan struct{}) int { io.WriteString(ch, "target"); return 0 }
		defer jump1.Close()
		defer jump2.Close()
		defer target.Close()
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		if out, _, err := c.Run(t.Context(), "hostname", nil); string(out) != "target" || err != nil {
			t.Errorf("got %q and %v", out, err)
		}
		if c.String() != "user2@host2:2202" {
			t.Errorf("String is %s", c)
		}
		c.Close()
	})
	for i := range 3 {
		synctest.Test(t, func(t *testing.T) {
			config, jump1, jump2, target := chain()
			defer jump1.Close()
			defer jump2.Close()
			defer target.Close()
			h := &config.Host
			if i < 2 {
				h = &config.Jumps[i]
			}
			h.PinnedKeys = []string{authorized(hostKey)}
			_, err := sshconn.Dial(t.Context(), config)
			if refused, ok := errors.AsType[*sshconn.HostKeyError](err); !ok || refused.Address != fmt.Sprintf("host%d:%d", i, 2200+i) {
				t.Errorf("hop %d with another key: %v", i, err)
			}
		})
	}
}

func TestASilentServerBehindATalkativeJumpHostIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, jump1, jump2, target := chain()
		defer jump1.Close()
		defer jump2.Close()
		defer target.Close()
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		start := time.Now()
		target.Freeze()
		for c.Err() == nil && time.Since(start) < 2*time.Minute {
			jump1.Ping()
			time.Sleep(time.Second)
		}
		if took := time.Since(start); !errors.Is(c.Err(), sshconn.ErrNoAnswer) || took > 46*time.Second {
			t.Errorf("after %s: %v", took, c.Err())
		}
	})
}

func TestAJumpHostThatDiesEndsTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, jump1, jump2, target := chain()
		defer jump1.Close()
		defer jump2.Close()
		defer target.Close()
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		start := time.Now()
		jump1.Cut()
		<-c.Done()
		if time.Since(start) > time.Second {
			t.Errorf("noticed after %s", time.Since(start))
		}
	})
}

func TestAJumpHostThatGoesSilentDuringTheDialEndsItInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, jump1, jump2, target := chain()
		defer jump1.Close()
		defer jump2.Close()
		defer target.Close()
		dial := jump1.DialTCP
		jump1.DialTCP = func(host string) (net.Conn, error) {
			jump1.Freeze()
			return dial(host)
		}
		start := time.Now()
		if _, err := sshconn.Dial(t.Context(), config); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 30*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		jump1.Thaw()
	})
}
