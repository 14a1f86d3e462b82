// Package libvirt speaks libvirt's protocol to one host: over SSH or on this machine, with a context for every call.
//
// The client underneath, go-libvirt, knows no contexts: a call that is given up can only be ended with its connection,
// and a connection on which a call was given up may never work again. So a [Conn] to a host carries many [Session]s, one for
// each call at a time, which cost a channel on the one SSH connection. Ending a call ends its session and nobody
// else's: the upload beside it goes on. That also keeps out of the way of the server's limit of five requests at a
// time on one connection, behind which a hung guest agent would make everything wait.
package libvirt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/sshconn"
)

// Sockets are where libvirt's daemons listen: the one daemon of old, and the one for QEMU of those that replaced it.
var Sockets = []string{"/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"}

// helpers are programs on the host that reach a socket where sshd does not forward to it, best first. The first comes with
// libvirt and finds the socket itself.
var helpers = []string{
	"virt-ssh-helper qemu:///system",
	"nc -U /run/libvirt/libvirt-sock",
}

const (
	// maxSessions bounds the sessions of a host. libvirtd has 20 workers for all its clients.
	maxSessions = 12
	// maxHelperSessions is the same where each takes one of sshd's sessions, of which there are ten by default.
	maxHelperSessions = 6
	// maxIdle is how many sessions are kept open for the next call.
	maxIdle = 4
	// openTimeout bounds the opening of a session.
	openTimeout = 30 * time.Second
	// hurryTimeout bounds a command that does nothing, and with it how long one that hangs takes up one of the ten sessions for
	// commands.
	hurryTimeout = 5 * time.Minute
)

// ErrClosed is what calls get after Close.
var ErrClosed = errors.New("libvirt: closed")

// ErrLost is what a call gets whose session ended under it. What became of the call is not known.
var ErrLost = errors.New("libvirt: connection lost")

// ErrNoSocket says that none of libvirt's sockets is on the host.
var ErrNoSocket = errors.New("no libvirt socket on the host: is libvirtd (or virtqemud) installed and running?")

// Config says how to reach a host.
type Config struct {
	// URI is the host. Required.
	URI URI
	// SSH is how to log in. Its Host.Address is URI's. Unused on this machine.
	SSH sshconn.Config
	// Dial opens a connection to libvirt's socket instead of all that. Defaults to none.
	Dial func(ctx context.Context) (net.Conn, error)
}

// Conn is a connection to a host. It is safe for concurrent use, and made for hostpool: it has its Close, Done and Err.
type Conn struct {
	config Config
	ssh    *sshconn.Client // nil on this machine
	done   chan struct{}
	tasks  sync.WaitGroup // of abortable connections
	turns  chan struct{}  // one for each session of Do

	// mu guards what follows.
	mu     sync.Mutex
	dial   func(ctx context.Context) (net.Conn, error) // the way that worked
	idle   []*Session
	open   map[*Session]struct{}
	closed bool
	err    error
}

// Session is one libvirt connection. It belongs to one call at a time.
type Session struct {
	*golibvirt.Libvirt
	conn *watched
}

// Dial connects to the host and opens the first session. It blocks until that is done, within ctx; the connection
// outlives ctx. Errors are those of sshconn.Dial; ErrNoSocket, sshconn.ErrSocketDenied and sshconn.ErrForwardingRefused;
// those of libvirt; and one that matches ctx's.
func Dial(ctx context.Context, config Config) (*Conn, error) {
	c := &Conn{config: config, done: make(chan struct{}), open: map[*Session]struct{}{}}
	if config.Dial == nil && !config.URI.Local() {
		client, err := sshconn.Dial(ctx, config.SSH)
		if err != nil {
			return nil, err
		}
		c.ssh = client
	}
	s, way, err := c.first(ctx)
	if err != nil {
		_ = c.Close() // always nil
		return nil, err
	}
	c.turns = make(chan struct{}, way.sessions())
	c.put(s)
	if c.ssh != nil {
		if !way.command {
			c.tasks.Go(c.hurry)
		}
		c.tasks.Go(func() {
			select {
			case <-c.ssh.Done():
				c.end(c.ssh.Err())
			case <-c.done:
			}
		})
	}
	return c, nil
}

// first finds the way to libvirt's socket and opens a session on it.
func (c *Conn) first(ctx context.Context) (*Session, way, error) {
	var refusals []error
	for _, w := range c.ways() {
		c.setDial(w.dial)
		s, err := c.openSession(ctx)
		if err == nil {
			return s, w, nil
		}
		if ctx.Err() != nil || c.ssh != nil && c.ssh.Err() != nil || !elsewhere(err) {
			return nil, way{}, err
		}
		refusals = append(refusals, err)
	}
	// The first way is the one an operator would repair.
	for _, err := range refusals[:c.sockets()] {
		if !errors.Is(err, sshconn.ErrSocketMissing) && !errors.Is(err, os.ErrNotExist) {
			return nil, way{}, err
		}
	}
	return nil, way{}, fmt.Errorf("%w (%w)", ErrNoSocket, refusals[0])
}

// elsewhere reports whether another way may work where one failed like that.
func elsewhere(err error) bool {
	_, exit := errors.AsType[*sshconn.ExitError](err)
	return exit || errors.Is(err, sshconn.ErrSocketMissing) || errors.Is(err, sshconn.ErrForwardingRefused) ||
		errors.Is(err, sshconn.ErrSocketDenied) || errors.Is(err, os.ErrNotExist)
}

// sockets is how many of the ways are sockets; the others are helpers.
func (c *Conn) sockets() int {
	switch {
	case c.config.Dial != nil, c.config.URI.Socket != "":
		return 1
	}
	return len(Sockets)
}

type way struct {
	dial    func(ctx context.Context) (net.Conn, error)
	command bool // it is one on the host
}

func (w way) sessions() int {
	if w.command {
		return maxHelperSessions
	}
	return maxSessions
}

// ways are the ways to libvirt's socket, best first.
func (c *Conn) ways() []way {
	if c.config.Dial != nil {
		return []way{{dial: c.config.Dial}}
	}
	sockets := Sockets
	if c.config.URI.Socket != "" {
		sockets = []string{c.config.URI.Socket}
	}
	var all []way
	for _, socket := range sockets {
		dial := func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}
		if c.ssh != nil {
			dial = func(ctx context.Context) (net.Conn, error) {
				conn, err := c.ssh.DialUnix(ctx, socket)
				if err != nil {
					return nil, err
				}
				return c.abortable(conn), nil
			}
		}
		all = append(all, way{dial: dial})
	}
	if c.ssh == nil {
		return all
	}
	commands := helpers
	if c.config.URI.Socket != "" {
		commands = []string{"nc -U " + quote(c.config.URI.Socket)}
	}
	for _, command := range commands {
		all = append(all, way{command: true, dial: func(ctx context.Context) (net.Conn, error) {
			cmd, err := c.ssh.Start(ctx, command)
			if err != nil {
				return nil, err
			}
			return c.abortable(&helper{cmd}), nil
		}})
	}
	return all
}

// hurry has sshd set TCP_NODELAY, which it does when it starts a command and not when it forwards to a socket. Without it, what
// the host sends soon after something else waits up to 40 ms for an acknowledgement, as in every upload. What becomes of the
// command does not matter, but it is given time: what the user's shell does first should not be cut short.
func (c *Conn) hurry() {
	ctx, cancel := context.WithTimeoutCause(context.Background(), hurryTimeout, errors.New("a command that does nothing takes too long"))
	defer cancel()
	_, _, _ = c.ssh.Run(ctx, "true", nil)
}

// helper is a command that speaks libvirt's protocol. Its end says why there was no answer.
type helper struct{ *sshconn.Command }

func (h *helper) Read(p []byte) (int, error) {
	n, err := h.Command.Read(p)
	return n, h.why(err)
}

func (h *helper) Write(p []byte) (int, error) {
	n, err := h.Command.Write(p)
	return n, h.why(err)
}

// why returns how the command ended, where err says only that it did.
func (h *helper) why(err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if exit := h.Wait(ctx); exit != nil {
		return exit
	}
	return err
}

func (c *Conn) setDial(dial func(ctx context.Context) (net.Conn, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dial = dial
}

// Close ends the connection and every call on it, without waiting for the host, and returns when every goroutine has
// ended. It may be called again. It returns nil.
func (c *Conn) Close() error {
	c.end(ErrClosed)
	if c.ssh != nil {
		_ = c.ssh.Close() // always nil
	}
	c.tasks.Wait()
	return nil
}

// end closes every session. The SSH connection is Close's to close.
func (c *Conn) end(cause error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed, c.err = true, cause
	open := c.open
	c.open, c.idle = nil, nil
	c.mu.Unlock()
	for s := range open {
		s.conn.fail(cause)
	}
	close(c.done)
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err says why the connection ended. Nil while it lives.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// SSH returns the SSH connection, for commands on the host. It is nil when the host is this machine. It must not be closed.
func (c *Conn) SSH() *sshconn.Client { return c.ssh }

// Do calls f with a session of its own. It blocks until f returns, and waits for a session before that when many are in
// use, within ctx. When ctx ends the session is closed, which ends whatever f does with it.
//
// It returns f's error; an error that matches ctx's when that has ended first; one that matches ErrLost when the session
// ended by itself; and otherwise what Dial may return. f must not keep the session.
func (c *Conn) Do(ctx context.Context, f func(*Session) error) error {
	select {
	case c.turns <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return c.lost(c.Err())
	}
	defer func() { <-c.turns }()
	return c.Probe(ctx, f)
}

// Probe is Do for checks: it never waits for its turn.
func (c *Conn) Probe(ctx context.Context, f func(*Session) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s, err := c.take(ctx)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.conn.fail(context.Cause(ctx)) })
	err = f(s)
	if !stop() {
		c.drop(s)
		if err != nil {
			return context.Cause(ctx)
		}
		return nil
	}
	if dead := s.conn.failure(); dead != nil {
		c.drop(s)
		if err != nil {
			return c.lost(dead)
		}
		return nil
	}
	if err != nil && !reusable(err) {
		c.drop(s)
		return err
	}
	c.put(s)
	return err
}

// reusable reports whether the session is sound after an error of f, whose calls have all ended.
func reusable(err error) bool {
	_, stream := errors.AsType[*StreamError](err)
	return !stream
}

// StreamError is what a call that moved data returns, whose session may still get answers that nobody waits for.
type StreamError struct{ Err error }

// Error returns the cause's text.
func (e *StreamError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *StreamError) Unwrap() error { return e.Err }

func (c *Conn) lost(cause error) error {
	if cause == nil {
		return ErrLost
	}
	if errors.Is(cause, ErrLost) {
		return cause
	}
	return fmt.Errorf("%w: %w", ErrLost, cause)
}

func (c *Conn) take(ctx context.Context) (*Session, error) {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, c.lost(c.err)
		}
		n := len(c.idle)
		if n == 0 {
			c.mu.Unlock()
			return c.openSession(ctx)
		}
		s := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		if s.conn.failure() == nil {
			return s, nil
		}
		c.drop(s)
	}
}

func (c *Conn) put(s *Session) {
	c.mu.Lock()
	if !c.closed && len(c.idle) < maxIdle {
		c.idle = append(c.idle, s)
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	c.drop(s)
}

func (c *Conn) drop(s *Session) {
	c.mu.Lock()
	delete(c.open, s)
	c.mu.Unlock()
	s.conn.fail(ErrClosed)
}

func (c *Conn) openSession(ctx context.Context) (*Session, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, openTimeout,
		fmt.Errorf("libvirt: no session within %s: %w", openTimeout, context.DeadlineExceeded))
	defer cancel()
	c.mu.Lock()
	dial := c.dial
	c.mu.Unlock()
	raw, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	w := &watched{Conn: raw}
	s := &Session{golibvirt.NewWithDialer(dialer{w}), w}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		w.fail(ErrClosed)
		return nil, c.lost(c.err)
	}
	c.open[s] = struct{}{}
	c.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { w.fail(context.Cause(ctx)) })
	err = s.ConnectToURI(golibvirt.QEMUSystem)
	if !stop() {
		c.drop(s)
		return nil, context.Cause(ctx)
	}
	if err != nil && Answered(err) {
		c.drop(s)
		return nil, err
	}
	// The client says yes even when the peer has gone right after its answer.
	if dead := w.failure(); dead != nil {
		c.drop(s)
		return nil, c.lost(dead)
	}
	if err != nil {
		c.drop(s)
		return nil, err
	}
	return s, nil
}

// dialer hands a connection to go-libvirt.
type dialer struct{ conn net.Conn }

func (d dialer) Dial() (net.Conn, error) { return d.conn, nil }

// watched is a connection that knows whether it still works, which go-libvirt can't be asked.
type watched struct {
	net.Conn

	// mu guards dead.
	mu   sync.Mutex
	dead error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.fail(fmt.Errorf("%w: %w", ErrLost, err))
	}
	return n, err
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	if err != nil {
		w.fail(fmt.Errorf("%w: %w", ErrLost, err))
	}
	return n, err
}

// Close is go-libvirt's.
func (w *watched) Close() error {
	w.fail(ErrClosed)
	return nil
}

// fail closes the connection. The first cause counts.
func (w *watched) fail(cause error) {
	w.mu.Lock()
	first := w.dead == nil
	if first {
		w.dead = cause
	}
	w.mu.Unlock()
	if first {
		_ = w.Conn.Close() // it is given up
	}
}

func (w *watched) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dead
}

// abortable makes a connection whose Close frees Read and Write at once. A channel of an SSH connection whose peer has
// gone does so only when the SSH connection ends.
func (c *Conn) abortable(inner net.Conn) net.Conn {
	reader, writer := io.Pipe()
	a := &abortable{Conn: inner, reads: reader, writes: make(chan []byte), wrote: make(chan result, 1), closed: make(chan struct{})}
	c.tasks.Go(func() {
		_, err := io.CopyBuffer(onlyWriter{writer}, onlyReader{inner}, make([]byte, 64<<10))
		_ = writer.CloseWithError(errOrEOF(err)) // always nil
	})
	c.tasks.Go(func() {
		for {
			select {
			case p := <-a.writes:
				n, err := inner.Write(p)
				a.wrote <- result{n, err}
			case <-a.closed:
				_ = inner.Close() // it is given up
				return
			}
		}
	})
	return a
}

func errOrEOF(err error) error {
	if err == nil {
		return io.EOF
	}
	return err
}

// onlyReader and onlyWriter keep io.Copy from the other methods, which would go around the buffer.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
	result     struct {
		n   int
		err error
	}
)

type abortable struct {
	net.Conn
	reads  *io.PipeReader
	writes chan []byte
	wrote  chan result
	once   sync.Once
	closed chan struct{}
}

func (a *abortable) Read(p []byte) (int, error) { return a.reads.Read(p) }

// Write hands p to the goroutine that writes. When the connection is closed meanwhile p may still be read once it has
// returned, which go-libvirt bears: what it sends from is not used again after an error.
func (a *abortable) Write(p []byte) (int, error) {
	select {
	case a.writes <- p:
	case <-a.closed:
		return 0, net.ErrClosed
	}
	select {
	case r := <-a.wrote:
		return r.n, r.err
	case <-a.closed:
		return 0, net.ErrClosed
	}
}

func (a *abortable) Close() error {
	a.once.Do(func() {
		close(a.closed)
		_ = a.reads.CloseWithError(net.ErrClosed) // always nil
	})
	return nil
}
