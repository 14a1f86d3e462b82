package proxmox

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	pve "github.com/luthermonson/go-proxmox"

	"crawl.example.com/egress/provider"
)

// fault is a failure with what follows from it.
type fault struct {
	kind    error
	reason  provider.Reason
	code    int // HTTP status; zero when there was no answer
	message string
	cause   error // of the context or the transport

	ambiguous bool // a request that changes something may have been carried out
	collision bool // the VMID is taken
	lockOf    int  // the VMID whose lock somebody else held, when that is what failed
	absent    bool // the node that was asked has no such VM, which may be on another one
	lostTask  bool // the node has forgotten the task
	stale     bool // the configuration has changed since it was read
}

func (f *fault) Error() string {
	s := f.message
	if f.code != 0 {
		s = strings.TrimSpace(fmt.Sprintf("%d %s", f.code, s))
	}
	if f.cause != nil {
		if s != "" {
			s += ": "
		}
		s += f.cause.Error()
	}
	return s
}

func (f *fault) Unwrap() error { return f.cause }

// unanswered reports whether what was asked gave no answer: it says nothing about the VM.
func (f *fault) unanswered() bool { return f.cause != nil || f.code > http.StatusNotImplemented }

func (f *fault) as(kind error, reason provider.Reason) *fault {
	f.kind, f.reason = kind, reason
	return f
}

func permanent(reason provider.Reason, format string, args ...any) *fault {
	return &fault{kind: provider.ErrPermanent, reason: reason, message: fmt.Sprintf(format, args...)}
}

func unavailable(reason provider.Reason, format string, args ...any) *fault {
	return &fault{kind: provider.ErrUnavailable, reason: reason, message: fmt.Sprintf(format, args...)}
}

// errCertificate is a certificate that is not the pinned one.
var errCertificate = errors.New("the certificate has another fingerprint than the configured one")

// errNothing is an answer without what was asked for.
var errNothing = errors.New("the answer holds nothing, so this is not the API of Proxmox VE, or it is not well")

// classify says what follows from err, which a request returned.
func classify(err error) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	if a, ok := errors.AsType[*pve.APIError](err); ok {
		return classifyAnswer(a)
	}
	f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnreachable, cause: err, ambiguous: true}
	if o, ok := errors.AsType[*net.OpError](err); ok && o.Op == "dial" {
		f.ambiguous = false
	}
	if isCertificate(err) {
		f.reason, f.ambiguous = provider.ReasonCertificateInvalid, false
	}
	_, syntax := errors.AsType[*json.SyntaxError](err)
	_, kind := errors.AsType[*json.UnmarshalTypeError](err)
	if syntax || kind {
		f.reason = provider.ReasonUnsupported
		f.message = "the answer is not what was asked for, so this is not the API of Proxmox VE; look at the endpoint and at what stands before it"
	}
	if errors.Is(err, context.DeadlineExceeded) {
		f.reason = provider.ReasonTimeout
	}
	return f
}

// classifyNil is classify for an error that may be nil.
func classifyNil(err error) *fault {
	if err == nil {
		return &fault{}
	}
	return classify(err)
}

func isCertificate(err error) bool {
	_, verification := errors.AsType[*tls.CertificateVerificationError](err)
	_, authority := errors.AsType[x509.UnknownAuthorityError](err)
	_, hostname := errors.AsType[x509.HostnameError](err)
	_, invalid := errors.AsType[x509.CertificateInvalidError](err)
	return verification || authority || hostname || invalid || errors.Is(err, errCertificate)
}

func classifyAnswer(a *pve.APIError) *fault {
	f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, code: a.StatusCode, message: strings.TrimSpace(a.Message)}
	if f.message == "" {
		_, f.message, _ = strings.Cut(a.Status, " ")
	}
	for _, name := range slices.Sorted(maps.Keys(a.Errors)) {
		f.message += fmt.Sprintf(" %s: %s", name, strings.TrimSpace(a.Errors[name]))
	}
	f.message = shorten(f.message)
	switch code := a.StatusCode; {
	case code == http.StatusUnauthorized:
		f.message += " (the API token was refused; look at TokenID, the secret and the token's expiry)"
		return f.as(provider.ErrDenied, provider.ReasonAuthenticationFailed)
	case code == http.StatusForbidden:
		return f.as(provider.ErrDenied, provider.ReasonPermissionDenied)
	case code == http.StatusNotImplemented:
		return f.as(provider.ErrPermanent, provider.ReasonUnsupported)
	case code == pve.StatusNodeConnectFailed:
		return f.as(provider.ErrUnavailable, provider.ReasonUnreachable)
	case code > pve.StatusNodeConnectFailed, code >= 502 && code <= 504, code == http.StatusRequestTimeout:
		// A proxy between gave up waiting; the work goes on.
		f.ambiguous = true
		if strings.Contains(strings.ToLower(f.message), "timed out") || code == http.StatusGatewayTimeout {
			return f.as(provider.ErrUnavailable, provider.ReasonTimeout)
		}
		return f.as(provider.ErrUnavailable, provider.ReasonUnreachable)
	case code == http.StatusTooManyRequests:
		return f
	}
	classifyText(f, a.StatusCode == http.StatusBadRequest)
	return f
}

// texts are Proxmox's own words for what went wrong, in answers and in how tasks end. The status is 500 for all of them.
var texts = []struct {
	contains string
	kind     error
	reason   provider.Reason
}{
	{"no quorum", provider.ErrUnavailable, provider.ReasonUnreachable},
	{"got timeout", provider.ErrUnavailable, provider.ReasonTimeout},
	{"got lock request timeout", provider.ErrUnavailable, provider.ReasonTimeout},
	{"got no worker upid", provider.ErrUnavailable, provider.ReasonUnknown},
	{"VM is locked", provider.ErrUnavailable, provider.ReasonUnknown},
	{"hostname lookup", provider.ErrUnavailable, provider.ReasonUnreachable},
	{"no such cluster node", provider.ErrUnavailable, provider.ReasonUnreachable},
	{"No space left", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity},
	{"insufficient free space", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity},
	{"out of space", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity},
	{"Permission check failed", provider.ErrDenied, provider.ReasonPermissionDenied}, // of a worker
	{"annot allocate memory", provider.ErrNoCapacity, provider.ReasonInsufficientCapacity},
	{"No such storage", provider.ErrPermanent, provider.ReasonStorageNotFound},
	{"an't upload to storage type", provider.ErrPermanent, provider.ReasonStorageNotFound},
	{"Linked clone feature is not supported", provider.ErrPermanent, provider.ReasonUnsupported},
	{"not allowed for linked clones", provider.ErrPermanent, provider.ReasonUnsupported},
	{"can't clone", provider.ErrPermanent, provider.ReasonUnsupported},
	{"protection mode enabled", provider.ErrPermanent, provider.ReasonUnsupported},
	{"you can't start a vm if it's a template", provider.ErrPermanent, provider.ReasonUnsupported},
	{"shrinking disks is not supported", provider.ErrPermanent, provider.ReasonUnsupported},
	{"No QEMU guest agent configured", provider.ErrPermanent, provider.ReasonUnsupported},
}

// lockPattern finds the VMID in what a process says that has waited in vain for another one's work on that VM.
var lockPattern = regexp.MustCompile(`can't lock file '[^']*/qemu-server/lock-([0-9]+)\.conf'`)

func classifyText(f *fault, badRequest bool) {
	m := f.message
	switch {
	case strings.Contains(m, "config file already exists"), strings.Contains(m, "File exists"), strings.Contains(m, "vmid: VM ") && strings.Contains(m, "already exists"):
		f.collision = true
		return
	case lockPattern.MatchString(m):
		f.lockOf, _ = strconv.Atoi(lockPattern.FindStringSubmatch(m)[1])
		f.reason = provider.ReasonTimeout
		return
	case strings.Contains(m, "Configuration file '") && strings.Contains(m, "does not exist"):
		f.absent = true
		return
	case strings.Contains(m, "no such task"):
		f.lostTask = true
		return
	case strings.Contains(m, "(file change by other user?)"): // after "checksum mismatch", which older ones spell otherwise
		f.stale = true
		return
	case strings.Contains(m, "storage '") && (strings.Contains(m, "does not exist") || strings.Contains(m, "is disabled") ||
		strings.Contains(m, "is not available on node") || strings.Contains(m, "does not support")):
		f.kind, f.reason = provider.ErrPermanent, provider.ReasonStorageNotFound
		return
	}
	for _, t := range texts {
		if strings.Contains(m, t.contains) {
			f.kind, f.reason = t.kind, t.reason
			return
		}
	}
	if badRequest {
		f.kind, f.reason = provider.ErrPermanent, provider.ReasonUnsupported
	}
}

// maxMessage keeps a line of the log readable.
const maxMessage = 500

func shorten(message string) string {
	message = strings.Join(strings.Fields(message), " ")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "") + "…"
	}
	return message
}

// wrap makes the error that leaves the package.
func (p *Provider) wrap(op, instance, target string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*provider.Error](err); ok {
		return err
	}
	f := classify(err)
	return &provider.Error{Provider: p.config.Name, Op: op, Instance: instance, Target: target, Kind: f.kind, Reason: f.reason, Err: fmt.Errorf("proxmox: %w", f)}
}
