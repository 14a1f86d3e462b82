// Package sshconn connects to SSH servers: it verifies whom it talks to, logs in with keys, goes through jump hosts,
// notices within a promised time when the peer has gone, and runs commands and reaches unix sockets over the connection.
package sshconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
)

// Host is one SSH server, how to know it and how to log in there.
type Host struct {
	// Address is [ssh://][user@]host[:port], see [ParseAddress]. Required.
	Address string
	// User logs in. Defaults to the user in Address, one of which is required.
	User string
	// KnownHosts are files in OpenSSH's format; hashed names, @cert-authority and @revoked lines count. A host on another
	// port than 22 stands in them as [host]:port. They are not read when PinnedKeys is set. Defaults to those of
	// /etc/ssh/ssh_known_hosts and ~/.ssh/known_hosts that exist.
	KnownHosts []string
	// PinnedKeys are the host's keys, as lines of an authorized_keys file or as fingerprints (SHA256:…). Only these
	// are accepted then. Defaults to none.
	PinnedKeys []string
	// InsecureIgnoreHostKey accepts any key, and thus anybody who stands between. Defaults to false.
	InsecureIgnoreHostKey bool
	// KeyFiles are private keys, tried in this order and before the agent's. Defaults to none.
	KeyFiles []string
	// Passphrase returns the passphrase of an encrypted key file. It is called during Dial, once for each such file, and
	// must heed ctx. The bytes are overwritten when they have been used. Defaults to none: an encrypted key is then
	// expected in the agent.
	Passphrase func(ctx context.Context, file string) ([]byte, error)
	// Agent is the path of an SSH agent's socket, whose keys are tried too. Defaults to $SSH_AUTH_SOCK when neither
	// KeyFiles nor Signers is set, and otherwise to no agent.
	Agent string
	// Signers are keys that are loaded already; they are tried first. Defaults to none.
	Signers []ssh.Signer
}

// Config says how to reach a server.
type Config struct {
	// Host is the server. Required.
	Host Host
	// Jumps are the hosts on the way, the first of which is dialled directly and each further one through the one
	// before. Each is verified and logged in to by its own settings. Defaults to none.
	Jumps []Host
	// Dial opens the first connection. Defaults to a net.Dialer's DialContext.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Timeout bounds Dial: every hop, handshake, login and retry together. Defaults to 30 s.
	Timeout time.Duration
	// KeepaliveInterval is how long the server may be silent before it is asked for a sign of life. Defaults to 15 s.
	KeepaliveInterval time.Duration
	// KeepaliveCount times KeepaliveInterval of silence is the end: the connection is closed, and whatever waits on it
	// fails with ErrNoAnswer. Anything that arrives counts as a sign of life. Defaults to 3, so 45 s; raised to 2, since
	// with 1 there would be no time to answer.
	KeepaliveCount int
	// MaxSessions is how many commands may run at a time; further ones wait within their contexts. Forwarded sockets
	// don't count. When the server allows fewer, that is met by waiting too. Defaults to 10, sshd's MaxSessions.
	MaxSessions int
}

// Client is a connection to a server. It is safe for concurrent use. It is made for hostpool: it has its Close, Done
// and Err.
type Client struct {
	config  Config
	address string // user@host:port
	// base is the network connection. Closing it ends everything on top of it, without asking the peer of any hop.
	base net.Conn
	hops []*ssh.Client // the last is the server's
	// heard is when the server was last heard of, in nanoseconds since born.
	heard    atomic.Int64
	born     time.Time
	sessions *sessions
	done     chan struct{}

	// mu guards err, and running may grow only under mu and while err is nil.
	mu      sync.Mutex
	err     error
	running sync.WaitGroup
}

// hop is a host with everything read that is needed to connect to it.
type hop struct {
	address Address
	keys    *hostKeys
	signers []ssh.Signer
}

// Validate reports the first fault in the fields. It does no I/O: it doesn't look at the files named.
func (c Config) Validate() error {
	for i, h := range c.Jumps {
		if _, err := h.parse(); err != nil {
			return fmt.Errorf("Jumps[%d]: %w", i, err)
		}
	}
	_, err := c.Host.parse()
	return err
}

func (h Host) parse() (Address, error) {
	a, err := ParseAddress(h.Address)
	if err != nil {
		return Address{}, err
	}
	if h.User != "" {
		a.User = h.User
	}
	if a.User == "" {
		return Address{}, fmt.Errorf("sshconn: Address %q names no user and User is empty, want user@host:port", h.Address)
	}
	for i, pin := range h.PinnedKeys {
		if err := new(hostKeys).pin(strings.TrimSpace(pin)); err != nil {
			return Address{}, fmt.Errorf("sshconn: %s: PinnedKeys[%d]: %w", a, i, err)
		}
	}
	return a, nil
}

// Dial connects, verifies and logs in, through every jump. It blocks until that is done, within ctx and Timeout; the
// connection outlives ctx. A connection that the server resets before it has shown its key is tried again a few times,
// at random intervals: sshd does that above MaxStartups.
//
// Errors: *HostKeyError, *CredentialsError, *AuthError, those of the network, and one that matches ctx's when it ended.
func Dial(ctx context.Context, config Config) (*Client, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	if config.Dial == nil {
		config.Dial = (&net.Dialer{}).DialContext
	}
	if config.Timeout <= 0 {
		config.Timeout = 30 * time.Second
	}
	if config.KeepaliveInterval <= 0 {
		config.KeepaliveInterval = 15 * time.Second
	}
	if config.KeepaliveCount <= 0 {
		config.KeepaliveCount = 3
	}
	config.KeepaliveCount = max(config.KeepaliveCount, 2)
	if config.MaxSessions <= 0 {
		config.MaxSessions = 10
	}
	ctx, cancel := context.WithTimeoutCause(ctx, config.Timeout, fmt.Errorf("%w: not connected within %s", context.DeadlineExceeded, config.Timeout))
	defer cancel()

	var hops []hop
	for _, h := range append(append([]Host(nil), config.Jumps...), config.Host) {
		a, err := h.parse()
		if err != nil {
			return nil, err
		}
		keys, err := newHostKeys(h, a.HostPort())
		if err != nil {
			return nil, err
		}
		signers, done, err := loadSigners(ctx, h, a.String())
		if err != nil {
			return nil, err
		}
		defer done()
		hops = append(hops, hop{a, keys, signers})
	}
	c := &Client{
		config: config, address: hops[len(hops)-1].address.String(), born: time.Now(),
		sessions: newSessions(config.MaxSessions), done: make(chan struct{}),
	}
	for i := range hops {
		if err := c.connect(ctx, &hops[i], i == len(hops)-1); err != nil {
			c.end(err)
			c.join()
			return nil, err
		}
	}
	c.running.Go(c.awaitEnd)
	c.running.Go(c.watch)
	return c, nil
}

const (
	// maxResets is how often a reset connection is tried again. With the pauses between it is about 6 s, several times
	// what sshd needs to log in those that fill its MaxStartups.
	maxResets  = 6
	firstPause = 100 * time.Millisecond
	longPause  = 2 * time.Second
)

// connect adds one hop.
func (c *Client) connect(ctx context.Context, h *hop, last bool) error {
	var refused error    // the first refusal of a key
	var without []string // host key types not to ask for
	resets := 0
	for {
		showed, err := c.tryConnect(ctx, h, last, h.keys.algorithms(without))
		_, ours := errors.AsType[*CredentialsError](err)
		switch {
		case err == nil:
			return nil
		case ours && !errors.Is(ctx.Err(), context.Canceled): // also when the agent let the time pass
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("sshconn: %s: %w", h.address, ended(ctx))
		case errors.Is(err, ErrChangedHostKey) && len(h.keys.fingerprints) > 0:
			// A fingerprint doesn't tell the type of its key, so ask for the server's other keys before giving up.
			if refused == nil {
				refused = err
			}
			without = append(without, keyType(showed.Type()))
			if len(h.keys.algorithms(without)) == 0 {
				return refused
			}
		case showed == nil && isReset(err) && resets < maxResets:
			pause := min(firstPause<<resets, longPause)
			resets++
			timer := time.NewTimer(pause/2 + rand.N(pause))
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
			}
		case refused != nil:
			return refused
		default:
			return err
		}
	}
}

// tryConnect returns the key that the server showed, also when that was all it did.
func (c *Client) tryConnect(ctx context.Context, h *hop, last bool, algorithms []string) (showed ssh.PublicKey, err error) {
	var conn net.Conn
	if len(c.hops) == 0 {
		if conn, err = c.config.Dial(ctx, "tcp", h.address.HostPort()); err != nil {
			return nil, fmt.Errorf("sshconn: %s: %w", h.address, err)
		}
		// A conn through a jump has no deadlines, so closing is what ends a handshake in time, for all hops alike.
		defer context.AfterFunc(ctx, func() { conn.Close() })()
	} else {
		defer context.AfterFunc(ctx, func() { c.base.Close() })()
		if conn, err = c.hops[len(c.hops)-1].Dial("tcp", h.address.HostPort()); err != nil {
			return nil, fmt.Errorf("sshconn: %s: through the jump host: %w", h.address, err)
		}
	}
	under := conn
	if last {
		under = heardConn{conn, c}
	}
	var refusal error
	sc, chans, reqs, err := ssh.NewClientConn(under, h.address.HostPort(), &ssh.ClientConfig{
		User:              h.address.User,
		Auth:              []ssh.AuthMethod{ssh.PublicKeys(h.signers...)}, // one: the library heeds the first of a kind only
		HostKeyAlgorithms: algorithms,
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			if cert, ok := key.(*ssh.Certificate); ok {
				showed = cert.Key
			} else {
				showed = key
			}
			refusal = h.keys.verify(key)
			return refusal
		},
	})
	ours, isOurs := errors.AsType[*CredentialsError](err)
	switch {
	case refusal != nil:
		return showed, refusal
	case isOurs:
		return showed, ours
	case err != nil && isAuthFailure(err):
		auth := &AuthError{Address: h.address.String(), Err: err}
		for _, s := range h.signers {
			auth.Keys = append(auth.Keys, s.PublicKey().Type()+" "+ssh.FingerprintSHA256(s.PublicKey()))
		}
		return showed, auth
	case err != nil:
		return showed, fmt.Errorf("sshconn: %s: %w", h.address, err)
	}
	if len(c.hops) == 0 {
		c.base = conn
	}
	c.hops = append(c.hops, ssh.NewClient(sc, chans, reqs))
	return showed, ctx.Err() // it may have been closed just now
}

func isReset(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// isAuthFailure knows the library's and sshd's texts, for neither has a type.
func isAuthFailure(err error) bool {
	return strings.Contains(err.Error(), "unable to authenticate") || strings.Contains(err.Error(), "Too many authentication failures")
}

// heardConn notes when something was read.
type heardConn struct {
	net.Conn
	client *Client
}

func (h heardConn) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	if n > 0 {
		h.client.heard.Store(int64(time.Since(h.client.born)))
	}
	return n, err
}

// server returns the connection to the server behind all jumps.
func (c *Client) server() *ssh.Client { return c.hops[len(c.hops)-1] }

func (c *Client) awaitEnd() {
	err := c.server().Wait()
	if err == nil {
		err = io.EOF
	}
	c.end(fmt.Errorf("sshconn: %s: connection lost: %w", c.address, err))
}

// watch asks a silent server for a sign of life, and ends the connection when none comes.
func (c *Client) watch() {
	interval := c.config.KeepaliveInterval
	limit := interval * time.Duration(c.config.KeepaliveCount)
	timer := time.NewTimer(interval)
	defer timer.Stop()
	asked := make(chan struct{}, 1) // holds a token while an answer is awaited
	for {
		select {
		case <-c.done:
			return
		case <-timer.C:
		}
		silence := time.Since(c.born) - time.Duration(c.heard.Load())
		if silence >= limit {
			c.end(fmt.Errorf("sshconn: %s: %w for %s", c.address, ErrNoAnswer, limit))
			return
		}
		if silence < interval {
			timer.Reset(interval - silence)
			continue
		}
		timer.Reset(min(interval, limit-silence))
		select {
		case asked <- struct{}{}:
			// Sending waits when the network takes nothing, and for the answer. OpenSSH answers that it doesn't know
			// the request, which is a sign of life too; that it came is seen where it is read.
			c.spawn(func() {
				c.server().SendRequest("keepalive@openssh.com", true, nil)
				<-asked
			})
		default:
		}
	}
}

// spawn runs f in a goroutine that Close waits for. It returns why the connection ended when it has, and then doesn't.
func (c *Client) spawn(f func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	c.running.Go(f)
	return nil
}

// end closes the connection for the reason given, unless it has one.
func (c *Client) end(cause error) {
	c.mu.Lock()
	first := c.err == nil
	if first {
		c.err = cause
	}
	c.mu.Unlock()
	if !first {
		return
	}
	close(c.done)
	if c.base != nil {
		c.base.Close()
	}
}

func (c *Client) join() {
	c.running.Wait()
	for _, h := range c.hops {
		h.Wait()
	}
}

// Done is closed when the connection has ended, by Close, by the server or for want of an answer.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err says why the connection ended: ErrClosed, an error that matches ErrNoAnswer, or that of the network. Nil while it
// lives.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection and everything on it, without waiting for the server, and returns when every goroutine has
// ended. A Run whose stdin waits in Read holds it up until that Read returns. It may be called again. It returns nil.
func (c *Client) Close() error {
	c.end(ErrClosed)
	c.join()
	return nil
}

// String returns user@host:port.
func (c *Client) String() string { return c.address }

// lostPatience is how long failed calls wait for the connection's end to be known, which is a matter of goroutines being
// scheduled. Without it their errors would often be a bare EOF.
const lostPatience = 200 * time.Millisecond

// explain returns why the connection ended, or err when it has not.
func (c *Client) explain(what string, err error) error {
	timer := time.NewTimer(lostPatience)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.Err()
	case <-timer.C:
		return fmt.Errorf("sshconn: %s: %s: %w", c.address, what, err)
	}
}
