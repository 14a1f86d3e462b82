package sshconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
)

// DialUnix connects to a unix socket on the server. It blocks until the server has connected, within ctx; the
// connection outlives ctx. It has no deadlines. Closing it may wait for the network while the server is silent, until
// the keepalive ends the connection or [Client.Close] does.
//
// A server refuses with the same words whatever the cause, so a refusal is looked into with a command: ErrSocketMissing,
// ErrSocketDenied and ErrForwardingRefused say what was found. Other errors: one that matches ctx's, and why the
// connection ended.
func (c *Client) DialUnix(ctx context.Context, path string) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	dialled := make(chan result)
	err := c.spawn(func() {
		conn, err := c.server().Dial("unix", path)
		select {
		case dialled <- result{conn, err}:
		case <-ctx.Done(): // nobody waits any more
			if err == nil {
				conn.Close()
			}
		}
	})
	if err != nil {
		return nil, err
	}
	select {
	case r := <-dialled:
		var refused *ssh.OpenChannelError
		switch {
		case r.err == nil:
			return r.conn, nil
		case errors.As(r.err, &refused):
			return nil, c.diagnose(ctx, path, refused)
		default:
			return nil, c.explain("connecting to "+path, r.err)
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("sshconn: %s: connecting to %s: %w", c.address, path, ended(ctx))
	}
}

// diagnose finds out why the server would not connect to the socket.
func (c *Client) diagnose(ctx context.Context, path string, refused error) error {
	quoted := "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
	out, _, err := c.Run(ctx, "test -S "+quoted+" && echo socket; test -w "+quoted+" && echo writable; echo asked", nil)
	fail := func(kind error, advice string) error {
		return fmt.Errorf("sshconn: %s: %s: %w: %s (%w)", c.address, path, kind, advice, refused)
	}
	has := func(word string) bool { return slices.Contains(strings.Fields(string(out)), word) }
	switch {
	case err != nil:
		return fmt.Errorf("sshconn: %s: %s: %w; could not ask what is there: %w", c.address, path, refused, err)
	case !has("asked"):
		return fmt.Errorf("sshconn: %s: %s: %w; could not ask what is there: the user's shell runs no commands", c.address, path, refused)
	case !has("socket"):
		return fail(ErrSocketMissing, "does the service run?")
	case !has("writable"):
		return fail(ErrSocketDenied, "add the user to the socket's group")
	default:
		return fail(ErrForwardingRefused, "sshd has AllowStreamLocalForwarding no or DisableForwarding, or nobody listens there any more")
	}
}
