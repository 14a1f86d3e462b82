package sshconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"
)

const (
	// MaxOutput bounds what Run keeps of a command's standard output. The commands that a backend runs say a few lines.
	MaxOutput = 16 << 20
	// maxStderr bounds what is kept of a command's standard error; the rest is read and dropped.
	maxStderr = 64 << 10
	// maxStderrInError bounds what of it stands in an error.
	maxStderrInError = 1 << 10
)

// Command is a command that runs on the server. Read gives its standard output, Write goes to its standard input; it is
// a net.Conn without deadlines, so that a protocol can be spoken through a helper on the server. Read must be called
// until io.EOF or Close be called, or the command may wait for ever to write. It is safe for concurrent use.
type Command struct {
	client *Client
	ch     ssh.Channel
	stderr head
	closed sync.Once
	// done is closed when the command has ended and everything from it has arrived; err may be read then.
	done chan struct{}
	err  error
}

// Start starts a command, which sshd hands to the user's shell. It blocks until the server has said yes, within ctx,
// waiting for its turn among MaxSessions. The command outlives ctx.
func (c *Client) Start(ctx context.Context, command string) (*Command, error) {
	if err := c.sessions.take(ctx, c); err != nil {
		return nil, err
	}
	type result struct {
		command *Command
		err     error
	}
	started := make(chan result)
	err := c.spawn(func() {
		defer c.sessions.give()
		cmd, reqs, err := c.exec(ctx, command)
		select {
		case started <- result{cmd, err}:
		case <-ctx.Done(): // nobody waits any more
			if cmd != nil {
				cmd.kill()
			}
		}
		if cmd != nil {
			cmd.run(reqs)
			c.sessions.open.Add(-1)
		}
	})
	if err != nil {
		c.sessions.give()
		return nil, err
	}
	select {
	case r := <-started:
		return r.command, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("sshconn: %s: starting a command: %w", c.address, ended(ctx))
	}
}

const (
	// A refused session is asked for again after firstRefusalPause, then after twice that, and so on up to
	// maxRefusalPause: sshd counts a session until it has reaped the command, a little after we have seen its end.
	firstRefusalPause = 20 * time.Millisecond
	maxRefusalPause   = 500 * time.Millisecond
	// maxLoneRefusals is how many refusals in a row, while no session of ours is open, are the server's last word. They
	// take about a second.
	maxLoneRefusals = 6
)

// exec opens a session, waiting when the server has no room for one, and starts the command in it.
func (c *Client) exec(ctx context.Context, command string) (*Command, <-chan *ssh.Request, error) {
	pause, lone := firstRefusalPause, 0
	for {
		freed := c.sessions.freedNext()
		ch, reqs, err := c.server().OpenChannel("session", nil)
		var refused *ssh.OpenChannelError
		switch {
		case err == nil:
			return c.execIn(ch, reqs, command)
		case !errors.As(err, &refused):
			return nil, nil, c.explain("opening a session", err)
		}
		lone++
		if c.sessions.open.Load() > 0 {
			lone = 0
		}
		if lone == maxLoneRefusals {
			return nil, nil, fmt.Errorf("sshconn: %s: the server opens no session (MaxSessions 0, or commands that outlived theirs?): %w", c.address, err)
		}
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-freed:
			pause = firstRefusalPause
		case <-timer.C:
			pause = min(2*pause, maxRefusalPause)
		case <-ctx.Done():
			err = fmt.Errorf("sshconn: %s: waiting for a session: %w", c.address, ended(ctx))
		case <-c.done:
			err = c.Err()
		}
		timer.Stop()
		if ctx.Err() != nil || c.Err() != nil {
			return nil, nil, err
		}
	}
}

func (c *Client) execIn(ch ssh.Channel, reqs <-chan *ssh.Request, command string) (*Command, <-chan *ssh.Request, error) {
	ok, err := ch.SendRequest("exec", true, ssh.Marshal(struct{ Command string }{command}))
	if err == nil && ok {
		c.sessions.open.Add(1)
		return &Command{client: c, ch: ch, done: make(chan struct{})}, reqs, nil
	}
	ch.Close()
	ssh.DiscardRequests(reqs)
	if err != nil {
		return nil, nil, c.explain("starting a command", err)
	}
	return nil, nil, fmt.Errorf("sshconn: %s: the server refused to run a command (ForceCommand or a restricted key?)", c.address)
}

// run waits for the command's end.
func (cmd *Command) run(reqs <-chan *ssh.Request) {
	var stderr sync.WaitGroup
	stderr.Go(func() { io.Copy(&cmd.stderr, cmd.ch.Stderr()) })
	status, signal := -1, ""
	for req := range reqs {
		switch req.Type {
		case "exit-status":
			var msg struct{ Status uint32 }
			if ssh.Unmarshal(req.Payload, &msg) == nil {
				status = int(msg.Status)
			}
		case "exit-signal":
			var msg struct {
				Signal     string
				CoreDumped bool
				Error      string
				Lang       string
			}
			if ssh.Unmarshal(req.Payload, &msg) == nil {
				signal = msg.Signal
			}
		}
		if req.WantReply { // sshd's keepalives
			req.Reply(false, nil)
		}
	}
	stderr.Wait()
	switch {
	case status == 0:
	case status > 0 || signal != "":
		cmd.err = &ExitError{Address: cmd.client.address, Status: status, Signal: printable(signal, 20), Stderr: printable(cmd.stderr.String(), maxStderrInError)}
	default:
		cmd.err = cmd.client.explain("running a command", errors.New("the session was closed without an exit status"))
	}
	close(cmd.done)
}

// Read reads the command's standard output, until io.EOF.
func (cmd *Command) Read(p []byte) (int, error) { return cmd.ch.Read(p) }

// Write writes to the command's standard input.
func (cmd *Command) Write(p []byte) (int, error) { return cmd.ch.Write(p) }

// CloseWrite ends the command's standard input.
func (cmd *Command) CloseWrite() error { return cmd.ch.CloseWrite() }

// Close ends the command's session, and asks the server to kill the command. sshd does that for users other than root;
// for root it closes the command's input and output only, so a command that does neither reads nor writes lives on. Close
// waits for nothing, and may be called again and after the command's end. It returns nil.
func (cmd *Command) Close() error {
	cmd.closed.Do(func() {
		// Sending may wait when the network takes nothing. When the connection is gone there is nothing to end.
		_ = cmd.client.spawn(cmd.kill)
	})
	return nil
}

func (cmd *Command) kill() {
	select {
	case <-cmd.done:
		return
	default:
	}
	cmd.ch.SendRequest("signal", false, ssh.Marshal(struct{ Signal string }{"KILL"}))
	cmd.ch.Close()
}

// Wait waits within ctx until the command has ended, and returns nil when it ended with status 0; an *ExitError; or why
// the connection ended.
func (cmd *Command) Wait(ctx context.Context) error {
	select {
	case <-cmd.done:
		return cmd.err
	default:
	}
	select {
	case <-cmd.done:
		return cmd.err
	case <-ctx.Done():
		return fmt.Errorf("sshconn: %s: waiting for a command: %w", cmd.client.address, ended(ctx))
	}
}

// Stderr returns what has come of the command's standard error, up to 64 KiB.
func (cmd *Command) Stderr() []byte { return []byte(cmd.stderr.String()) }

// LocalAddr returns a placeholder.
func (cmd *Command) LocalAddr() net.Addr { return commandAddr("command") }

// RemoteAddr returns the server's user@host:port.
func (cmd *Command) RemoteAddr() net.Addr { return commandAddr(cmd.client.address) }

// SetDeadline returns os.ErrNoDeadline: SSH channels have none.
func (cmd *Command) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline returns os.ErrNoDeadline.
func (cmd *Command) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline returns os.ErrNoDeadline.
func (cmd *Command) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

type commandAddr string

func (commandAddr) Network() string  { return "ssh" }
func (a commandAddr) String() string { return string(a) }

// Run runs a command with what stdin gives, which may be nil for nothing, and returns what it wrote, standard error up
// to 64 KiB. It blocks until the command has ended and its output has arrived, or until ctx ends: then the command is
// ended as by [Command.Close]. A secret belongs into stdin, never into the command, which every user of the server can
// see. A Read of stdin may still be under way when Run has returned, and must return by itself.
//
// Errors: *ExitError, beside which the output is returned too; ErrOutputTooLong; one that matches ctx's; why the
// connection ended.
func (c *Client) Run(ctx context.Context, command string, stdin io.Reader) (stdout, stderr []byte, err error) {
	cmd, err := c.Start(ctx, command)
	if err != nil {
		return nil, nil, err
	}
	defer cmd.Close()
	err = c.spawn(func() {
		if stdin != nil {
			io.Copy(cmd, stdin) // a command may end without reading everything
		}
		cmd.CloseWrite()
	})
	if err != nil {
		return nil, nil, err
	}
	output := make(chan []byte, 1)
	err = c.spawn(func() {
		var buf bytes.Buffer
		io.Copy(&buf, io.LimitReader(cmd, MaxOutput+1))
		output <- buf.Bytes()
	})
	if err != nil {
		return nil, nil, err
	}
	select {
	case stdout = <-output:
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("sshconn: %s: running a command: %w", c.address, ended(ctx))
	}
	if len(stdout) > MaxOutput {
		return nil, nil, fmt.Errorf("sshconn: %s: command: %w", c.address, ErrOutputTooLong)
	}
	err = cmd.Wait(ctx)
	return stdout, cmd.Stderr(), err
}

// head keeps the beginning of what is written to it.
type head struct {
	// mu guards kept.
	mu   sync.Mutex
	kept []byte
}

func (h *head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kept = append(h.kept, p[:min(len(p), maxStderr-len(h.kept))]...)
	return len(p), nil
}

func (h *head) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return string(h.kept)
}

// printable makes a line of at most n bytes of what a server said.
func printable(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return ' '
		}
		return r
	}, s)
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// sessions hands out the right to have a session open.
type sessions struct {
	tokens chan struct{}
	open   atomic.Int64 // how many are open

	// mu guards freed, which is closed and made anew whenever a session ends.
	mu    sync.Mutex
	freed chan struct{}
}

func newSessions(limit int) *sessions {
	return &sessions{tokens: make(chan struct{}, limit), freed: make(chan struct{})}
}

// take waits within ctx and while c lives.
func (s *sessions) take(ctx context.Context, c *Client) error {
	select {
	case s.tokens <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.tokens <- struct{}{}:
		return nil
	case <-c.done:
		return c.Err()
	case <-ctx.Done():
		return fmt.Errorf("sshconn: %s: waiting while %d commands run: %w", c.address, cap(s.tokens), ended(ctx))
	}
}

func (s *sessions) give() {
	<-s.tokens
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.freed)
	s.freed = make(chan struct{})
}

// freedNext returns the channel that is closed when the next session ends.
func (s *sessions) freedNext() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.freed
}
