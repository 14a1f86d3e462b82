// Package memconn is a network connection in memory, for tests that run protocols in fake time: everything that
// waits in it waits durably in the sense of testing/synctest.
package memconn

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Conn is one end of a pair. It is safe for concurrent use. Reads wait for data, for the other end's Close, for a
// fault or for the deadline; writes never wait, because a protocol that writes under a lock would otherwise stop the
// fake clock as soon as two goroutines want that lock.
type Conn struct {
	name, peer addr
	link       *link
	in, out    *stream
}

// link is what both ends share.
type link struct {
	// mu guards every field of both streams and of both ends' deadlines.
	mu      sync.Mutex
	changed *sync.Cond // broadcast on each change
}

// stream carries the bytes of one direction.
type stream struct {
	data   []byte
	ended  bool  // the writer is closed: EOF after data
	frozen bool  // neither data nor the end arrives
	fault  error // fails both reads and writes at once
	// shut is set when the reader has closed.
	shut          bool
	readDeadline  deadline
	writeDeadline deadline
}

type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

type addr string

func (addr) Network() string  { return "mem" }
func (a addr) String() string { return string(a) }

// Pair returns the two ends of a new connection. The names become their addresses and may be any text, such as
// "host:22".
func Pair(a, b string) (*Conn, *Conn) {
	l := &link{}
	l.changed = sync.NewCond(&l.mu)
	ab, ba := &stream{}, &stream{}
	return &Conn{name: addr(a), peer: addr(b), link: l, in: ba, out: ab},
		&Conn{name: addr(b), peer: addr(a), link: l, in: ab, out: ba}
}

// Read waits for data. It returns io.EOF once the other end has closed and everything is read, net.ErrClosed after
// Close, os.ErrDeadlineExceeded after the deadline, and syscall.ECONNRESET after a Cut.
func (c *Conn) Read(p []byte) (int, error) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	for {
		switch s := c.in; {
		case s.shut:
			return 0, net.ErrClosed
		case s.fault != nil:
			return 0, s.fault
		case s.readDeadline.passed():
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case !s.frozen && len(s.data) > 0:
			n := copy(p, s.data)
			s.data = s.data[n:]
			return n, nil
		case !s.frozen && s.ended:
			return 0, io.EOF
		}
		c.link.changed.Wait()
	}
}

// Write never waits. Into a frozen direction it succeeds, as into a socket buffer. It returns syscall.EPIPE when the
// other end is known to be closed, and the errors of Read.
func (c *Conn) Write(p []byte) (int, error) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	switch s := c.out; {
	case s.ended:
		return 0, net.ErrClosed
	case s.fault != nil:
		return 0, s.fault
	case s.writeDeadline.passed():
		return 0, os.ErrDeadlineExceeded
	case s.shut && !s.frozen && !c.in.frozen:
		return 0, syscall.EPIPE
	default:
		s.data = append(s.data, p...)
		c.link.changed.Broadcast()
		return len(p), nil
	}
}

// Close ends both directions at this end. The other end reads what was sent and then io.EOF, unless the direction is
// frozen: then it learns nothing.
func (c *Conn) Close() error {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	c.in.shut, c.out.ended = true, true
	c.in.readDeadline.setLocked(c.link, time.Time{})
	c.out.writeDeadline.setLocked(c.link, time.Time{})
	c.link.changed.Broadcast()
	return nil
}

// Freeze holds back what this end sends, from now on and until Thaw: the other end sees a peer that has fallen silent
// without a reset. Freeze both ends for a network that has gone.
func (c *Conn) Freeze() { c.setFrozen(true) }

// Thaw delivers what Freeze held back.
func (c *Conn) Thaw() { c.setFrozen(false) }

func (c *Conn) setFrozen(frozen bool) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	c.out.frozen = frozen
	c.link.changed.Broadcast()
}

// Cut resets the connection: both ends fail with syscall.ECONNRESET at once, and what was under way is lost.
func (c *Conn) Cut() {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	c.in.fault, c.out.fault = syscall.ECONNRESET, syscall.ECONNRESET
	c.link.changed.Broadcast()
}

// LocalAddr returns the name of this end.
func (c *Conn) LocalAddr() net.Addr { return c.name }

// RemoteAddr returns the name of the other end.
func (c *Conn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline bounds reads and writes, those that wait already too. The zero time removes it.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline is SetDeadline for reads.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if c.in.shut {
		return net.ErrClosed
	}
	c.in.readDeadline.setLocked(c.link, t)
	return nil
}

// SetWriteDeadline is SetDeadline for writes.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if c.out.ended {
		return net.ErrClosed
	}
	c.out.writeDeadline.setLocked(c.link, t)
	return nil
}

// setLocked wakes the readers of l now, and once more when t has come.
func (d *deadline) setLocked(l *link, t time.Time) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = t
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.changed.Broadcast()
		})
	}
	l.changed.Broadcast()
}
