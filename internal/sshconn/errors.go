package sshconn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"crawl.example.com/egress/provider"
)

// What may be wrong with a host's key. Test for them with errors.Is; the error is a *HostKeyError.
var (
	// ErrUnknownHostKey: nothing is known of this host.
	ErrUnknownHostKey = errors.New("unknown host key")
	// ErrChangedHostKey: other keys are known for this host.
	ErrChangedHostKey = errors.New("changed host key")
	// ErrRevokedHostKey: the key stands in a @revoked line.
	ErrRevokedHostKey = errors.New("revoked host key")
	// ErrHostCertificate: the host showed a certificate that is not good, and its bare key is not known either.
	ErrHostCertificate = errors.New("host certificate not accepted")
)

// What may become of a socket on the host. Test for them with errors.Is.
var (
	// ErrSocketMissing: no socket has that path on the host.
	ErrSocketMissing = errors.New("no such socket on the host")
	// ErrSocketDenied: the user may not write to the socket.
	ErrSocketDenied = errors.New("no right to write to the socket")
	// ErrForwardingRefused: the socket is there, but sshd doesn't forward to it, or nobody listens on it.
	ErrForwardingRefused = errors.New("socket not forwarded")
)

// ErrClosed is what calls get after Close.
var ErrClosed = errors.New("sshconn: closed")

// ErrNoAnswer is why a connection ended whose peer had fallen silent. It is a timeout: it matches
// context.DeadlineExceeded.
var ErrNoAnswer error = noAnswer{}

type noAnswer struct{}

func (noAnswer) Error() string        { return "no answer to keepalives" }
func (noAnswer) Timeout() bool        { return true }
func (noAnswer) Is(target error) bool { return target == context.DeadlineExceeded }

// ErrOutputTooLong says that a command wrote more than [MaxOutput] to its standard output.
var ErrOutputTooLong = fmt.Errorf("more than %d bytes of output", MaxOutput)

// HostKeyError says that a host did not prove who it is. Nothing was sent to it.
type HostKeyError struct {
	// Address is host:port.
	Address string
	// Kind is ErrUnknownHostKey, ErrChangedHostKey, ErrRevokedHostKey or ErrHostCertificate.
	Kind error
	// KeyType and Fingerprint are of the key that the host showed; for a certificate, of the key in it.
	KeyType, Fingerprint string
	// Advice says what to do about it.
	Advice string
}

// Error names the host, the key it showed and what to do.
func (e *HostKeyError) Error() string {
	return fmt.Sprintf("sshconn: %s: %v: it showed %s %s: %s", e.Address, e.Kind, e.KeyType, e.Fingerprint, e.Advice)
}

// Unwrap returns the kind.
func (e *HostKeyError) Unwrap() error { return e.Kind }

// CredentialsError says that there is nothing to log in with or to know the host by: a key file, its passphrase, the agent
// or a known_hosts file is missing or broken on our side, or nobody answered there in time.
type CredentialsError struct {
	// Address is user@host:port.
	Address string
	// Err is the cause, and names the file or socket.
	Err error
}

// Error names the host and the cause. It holds neither a key nor a passphrase.
func (e *CredentialsError) Error() string { return fmt.Sprintf("sshconn: %s: %v", e.Address, e.Err) }

// Unwrap returns the cause.
func (e *CredentialsError) Unwrap() error { return e.Err }

// AuthError says that the host refused every key.
type AuthError struct {
	// Address is user@host:port.
	Address string
	// Keys are the fingerprints of the keys that could be offered.
	Keys []string
	// Err is what the SSH client said.
	Err error
}

// maxAuthTries is sshd's MaxAuthTries unless it is configured.
const maxAuthTries = 6

// Error names the user, the host, the keys and what to do.
func (e *AuthError) Error() string {
	hint := "add one of them to authorized_keys there, or name another with KeyFiles or Agent"
	if len(e.Keys) >= maxAuthTries {
		hint = "servers allow 6 attempts by default, so name the right one with KeyFiles"
	}
	return fmt.Sprintf("sshconn: %s: login refused with the keys %s: %s (%v)", e.Address, strings.Join(e.Keys, ", "), hint, e.Err)
}

// Unwrap returns what the SSH client said.
func (e *AuthError) Unwrap() error { return e.Err }

// ExitError says that a command ran and did not end well. It says nothing against the connection.
type ExitError struct {
	// Address is user@host:port.
	Address string
	// Status is the exit status, or -1 when a signal ended the command.
	Status int
	// Signal is the signal's name without SIG, such as KILL. Empty when there was none.
	Signal string
	// Stderr is the beginning of what it wrote there, at most 1 KiB, without control characters.
	Stderr string
}

// Error names the host, the status and what the command said. The command itself, which may hold a secret, is not in it.
func (e *ExitError) Error() string {
	how := fmt.Sprintf("exit status %d", e.Status)
	if e.Signal != "" {
		how = "ended by SIG" + e.Signal
	}
	if e.Stderr == "" {
		return fmt.Sprintf("sshconn: %s: command failed: %s", e.Address, how)
	}
	return fmt.Sprintf("sshconn: %s: command failed: %s: %s", e.Address, how, e.Stderr)
}

// Local reports whether err is about what was asked of the host and says nothing against the connection: a command's
// exit, its output, a socket that is not there. It is made for hostpool's Config.Local.
func Local(err error) bool {
	if _, ok := errors.AsType[*ExitError](err); ok {
		return true
	}
	for _, kind := range []error{ErrSocketMissing, ErrSocketDenied, ErrForwardingRefused, ErrOutputTooLong} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// Reason returns the reason of err for a check's result or a provider's error: that of the first of this package's
// errors in it; Timeout for an error that is one; Unreachable otherwise.
func Reason(err error) provider.Reason {
	if _, ok := errors.AsType[*HostKeyError](err); ok {
		return provider.ReasonCertificateInvalid
	}
	if _, ok := errors.AsType[*AuthError](err); ok {
		return provider.ReasonAuthenticationFailed
	}
	if _, ok := errors.AsType[*CredentialsError](err); ok {
		return provider.ReasonCredentialsUnavailable
	}
	switch {
	case errors.Is(err, ErrSocketDenied), errors.Is(err, ErrForwardingRefused):
		return provider.ReasonPermissionDenied
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return provider.ReasonTimeout
	}
	if timeout, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err); ok && timeout.Timeout() {
		return provider.ReasonTimeout
	}
	return provider.ReasonUnreachable
}

// ended returns why ctx ended, as an error that matches both ctx.Err and its cause.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
