package hostpool_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"crawl.example.com/egress/internal/hostpool"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
	"crawl.example.com/egress/provider"
)

var (
	hostKey = sshtest.NewKey("ed25519")
	userKey = sshtest.NewKey("ed25519")
)

// sshPool is a pool as a backend makes one, over the real protocol in memory.
type sshPool = hostpool.Pool[string, *sshconn.Client]

func inSSHBubble(t *testing.T, s *sshtest.Server, f func(t *testing.T, p *sshPool)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s.HostKeys, s.Users = []ssh.Signer{hostKey}, []ssh.PublicKey{userKey.PublicKey()}
		p := hostpool.New(hostpool.Config[string, *sshconn.Client]{
			Dial: func(ctx context.Context, host string) (*sshconn.Client, error) {
				return sshconn.Dial(ctx, sshconn.Config{
					Host: sshconn.Host{
						Address: "root@" + host, Signers: []ssh.Signer{userKey},
						PinnedKeys: []string{ssh.FingerprintSHA256(hostKey.PublicKey())},
					},
					Dial: s.Dial,
				})
			},
			Local: func(err error) bool { return provider.Kind(err) != nil || sshconn.Local(err) },
		})
		defer s.Close()
		defer p.Close()
		f(t, p)
	})
}

func run(command string) func(context.Context, *sshconn.Client) error {
	return func(ctx context.Context, c *sshconn.Client) error {
		_, _, err := c.Run(ctx, command, nil)
		return err
	}
}

func TestAnUploadOverSSHGoesOnBesideChecksThatTimeOut(t *testing.T) {
	var received atomic.Int64
	s := &sshtest.Server{
		Socket: func(_ string, conn io.ReadWriteCloser) {
			n, _ := io.Copy(io.Discard, conn)
			received.Add(n)
			io.WriteString(conn, "stored")
		},
		Exec: func(command string, _ ssh.Channel, killed <-chan struct{}) int {
			if command == "hang" {
				<-killed
			}
			return 0
		},
	}
	inSSHBubble(t, s, func(t *testing.T, p *sshPool) {
		var wg sync.WaitGroup
		wg.Go(func() {
			err := p.Do(t.Context(), "host", func(ctx context.Context, c *sshconn.Client) error {
				conn, err := c.DialUnix(ctx, "/run/libvirt/libvirt-sock")
				if err != nil {
					return err
				}
				defer conn.Close()
				block := make([]byte, 64<<10)
				for range 3600 {
					if _, err := conn.Write(block); err != nil {
						return err
					}
					time.Sleep(time.Second)
				}
				conn.(interface{ CloseWrite() error }).CloseWrite()
				if answer, err := io.ReadAll(conn); string(answer) != "stored" {
					return fmt.Errorf("the server said %q: %w", answer, err)
				}
				return nil
			})
			if err != nil {
				t.Errorf("the upload: %v", err)
			}
		})
		for range 55 {
			time.Sleep(time.Minute)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			if err := p.Probe(ctx, "host", run("hang")); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a check that hangs: %v", err)
			}
			cancel()
			synctest.Wait()
			if err := p.Probe(t.Context(), "host", run("true")); err != nil {
				t.Errorf("a check: %v", err)
			}
		}
		wg.Wait()
		if received.Load() != 3600*64<<10 || s.Dials() != 1 {
			t.Errorf("received %d bytes over %d connections", received.Load(), s.Dials())
		}
	})
}

func TestAVanishedPeerFailsWhatWaitsInTimeAndTheNextCallDialsAnew(t *testing.T) {
	s := &sshtest.Server{
		Exec: func(command string, _ ssh.Channel, killed <-chan struct{}) int {
			if command == "hang" {
				<-killed
			}
			return 0
		},
	}
	inSSHBubble(t, s, func(t *testing.T, p *sshPool) {
		var wg sync.WaitGroup
		start := time.Now()
		for range 5 {
			wg.Go(func() {
				if err := p.Do(t.Context(), "host", run("hang")); !errors.Is(err, sshconn.ErrNoAnswer) || time.Since(start) != 45*time.Second {
					t.Errorf("after %s: %v", time.Since(start), err)
				}
			})
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if err := p.Probe(ctx, "host", run("hang")); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 5*time.Second {
				t.Errorf("a check, after %s: %v", time.Since(start), err)
			}
		})
		synctest.Wait()
		s.Freeze()
		wg.Wait()
		if err := p.Do(t.Context(), "host", run("true")); err != nil || s.Dials() != 2 {
			t.Errorf("after %d dials: %v", s.Dials(), err)
		}
		s.Thaw()
	})
}

func TestAFailedCommandKeepsTheSSHConnectionAndAResetDropsIt(t *testing.T) {
	s := &sshtest.Server{Exec: func(string, ssh.Channel, <-chan struct{}) int { return 1 }}
	inSSHBubble(t, s, func(t *testing.T, p *sshPool) {
		for range 3 {
			if _, ok := errors.AsType[*sshconn.ExitError](p.Do(t.Context(), "host", run("false"))); !ok {
				t.Error("want an exit status")
			}
		}
		if s.Dials() != 1 {
			t.Errorf("dialled %d times, want once", s.Dials())
		}
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				err := p.Do(t.Context(), "host", func(ctx context.Context, c *sshconn.Client) error {
					<-c.Done()
					return c.Err()
				})
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("got %v, want the reset", err)
				}
				if _, ok := errors.AsType[*sshconn.ExitError](p.Do(t.Context(), "host", run("false"))); !ok {
					t.Error("want an exit status of the new connection")
				}
			})
		}
		synctest.Wait()
		s.Cut()
		wg.Wait()
		if s.Dials() != 2 {
			t.Errorf("dialled %d times, want one new connection for everybody", s.Dials())
		}
	})
}

func TestAHostKeyThatIsWrongReachesTheCaller(t *testing.T) {
	s := &sshtest.Server{}
	inSSHBubble(t, s, func(t *testing.T, p *sshPool) {
		s.HostKeys = []ssh.Signer{sshtest.NewKey("ed25519")}
		err := p.Probe(t.Context(), "host", run("true"))
		if !errors.Is(err, sshconn.ErrChangedHostKey) || sshconn.Reason(err) != "CertificateInvalid" || !strings.Contains(err.Error(), "host") {
			t.Errorf("got %v", err)
		}
	})
}

func TestAnIdleSSHConnectionIsClosed(t *testing.T) {
	inSSHBubble(t, &sshtest.Server{}, func(t *testing.T, p *sshPool) {
		var first *sshconn.Client
		p.Do(t.Context(), "host", func(_ context.Context, c *sshconn.Client) error { first = c; return nil })
		time.Sleep(5*time.Minute + 1)
		synctest.Wait()
		if !errors.Is(first.Err(), sshconn.ErrClosed) {
			t.Errorf("after 5 minutes: %v, want it closed", first.Err())
		}
	})
}
