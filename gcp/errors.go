package gcp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"cloud.google.com/go/auth"
	"cloud.google.com/go/compute/apiv1/computepb"
	"google.golang.org/api/googleapi"

	"crawl.example.com/egress/provider"
)

// fault is a failure with what follows from it. It keeps nothing of Google's own error values, because those hold
// whole response bodies, which may repeat what was sent.
type fault struct {
	kind    error
	reason  provider.Reason
	code    int    // HTTP status; zero when there was no answer
	word    string // Google's word for it
	message string
	cause   error // of the context or the transport

	retry      bool          // the same request may succeed in a moment
	ambiguous  bool          // a request that changes something may have been carried out
	retryAfter time.Duration // zero leaves it to the caller
}

func (f *fault) Error() string {
	var parts []string
	if f.code != 0 {
		parts = append(parts, strconv.Itoa(f.code))
	}
	if f.word != "" {
		parts = append(parts, f.word)
	}
	s := strings.Join(parts, " ")
	if f.message != "" {
		if s != "" {
			s += ": "
		}
		s += f.message
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

// stockoutBackoff is how long a zone without machines is left alone; they come back within minutes at best.
const stockoutBackoff = 2 * time.Minute

// classify says what follows from err, which a client returned.
func classify(err error) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	if a, ok := errors.AsType[*auth.Error](err); ok {
		f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonCredentialsUnavailable, message: "no access token", retry: true}
		if a.Response != nil {
			f.code = a.Response.StatusCode
		}
		if f.code >= 400 && f.code < 500 && f.code != http.StatusTooManyRequests {
			f.kind, f.reason, f.retry = provider.ErrDenied, provider.ReasonAuthenticationFailed, false
			f.message = "the credentials were refused; give a key that is valid and not disabled"
		}
		return f
	}
	if g, ok := errors.AsType[*googleapi.Error](err); ok {
		return classifyAnswer(g)
	}
	f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnreachable, cause: err, retry: true, ambiguous: true}
	if operation, ok := errors.AsType[*net.OpError](err); ok && operation.Op == "dial" {
		f.ambiguous = false
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		f.reason, f.retry, f.ambiguous = provider.ReasonCertificateInvalid, false, false
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		f.reason, f.retry, f.ambiguous = provider.ReasonCertificateInvalid, false, false
	}
	if errors.Is(err, context.DeadlineExceeded) {
		f.reason = provider.ReasonTimeout
	}
	if errors.Is(err, errNotSent) {
		f.ambiguous = false
	}
	return f
}

func classifyAnswer(g *googleapi.Error) *fault {
	f := &fault{code: g.Code, message: scrub(g.Message), kind: provider.ErrPermanent, reason: provider.ReasonUnknown}
	if len(g.Errors) > 0 {
		f.word = g.Errors[0].Reason
	}
	if seconds, err := strconv.Atoi(g.Header.Get("Retry-After")); err == nil && seconds > 0 {
		f.retryAfter = time.Duration(seconds) * time.Second
	}
	stockout := strings.Contains(g.Message, "RESOURCE_POOL_EXHAUSTED") || f.word == "insufficientCapacity"
	switch {
	case stockout:
		return f.as(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, stockoutBackoff)
	case f.word == "rateLimitExceeded", f.word == "userRateLimitExceeded", g.Code == http.StatusTooManyRequests:
		// Rate quotas refill on the minute.
		return f.as(provider.ErrUnavailable, provider.ReasonQuotaExceeded, time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)))
	case f.word == "quotaExceeded":
		return f.as(provider.ErrNoCapacity, provider.ReasonQuotaExceeded, 0)
	case g.Code == http.StatusUnauthorized:
		return f.as(provider.ErrDenied, provider.ReasonAuthenticationFailed, 0)
	case g.Code == http.StatusForbidden:
		return f.as(provider.ErrDenied, provider.ReasonPermissionDenied, 0)
	case g.Code == http.StatusNotFound:
		f.kind = provider.ErrNotFound
		if strings.Contains(g.Message, "/images/") {
			f.reason = provider.ReasonImageNotFound
		}
		return f
	case g.Code == http.StatusConflict && f.word == "alreadyExists":
		return f.as(provider.ErrAlreadyExists, provider.ReasonUnknown, 0)
	case g.Code == http.StatusConflict, f.word == "resourceNotReady", f.word == "resourceInUseByAnotherResource":
		return f.as(provider.ErrUnavailable, provider.ReasonUnknown, 0)
	case g.Code == http.StatusPreconditionFailed && strings.Contains(g.Message, "constraints/"):
		return f.as(provider.ErrPermanent, provider.ReasonPermissionDenied, 0)
	case g.Code == http.StatusPreconditionFailed:
		// The resource changed since it was read.
		f.retry = true
		return f.as(provider.ErrUnavailable, provider.ReasonUnknown, 0)
	case g.Code == http.StatusRequestTimeout || g.Code >= 500:
		f.retry, f.ambiguous = true, true
		return f.as(provider.ErrUnavailable, provider.ReasonUnreachable, 0)
	}
	return f
}

func (f *fault) as(kind error, reason provider.Reason, retryAfter time.Duration) *fault {
	f.kind, f.reason = kind, reason
	f.retryAfter = max(f.retryAfter, retryAfter)
	return f
}

// operationFault returns how op failed, or nil. It reads the error list itself: an operation may be done and have
// failed without an HTTP status, which Google's own waiting takes for success.
func operationFault(op *computepb.Operation) *fault {
	list := op.GetError().GetErrors()
	if len(list) == 0 && op.GetHttpErrorStatusCode() < 400 {
		return nil
	}
	f := &fault{kind: provider.ErrPermanent, reason: provider.ReasonUnknown, code: int(op.GetHttpErrorStatusCode()), message: scrub(op.GetHttpErrorMessage())}
	if len(list) == 0 {
		return classifyAnswer(&googleapi.Error{Code: f.code, Message: op.GetHttpErrorMessage()})
	}
	f.word, f.message = list[0].GetCode(), scrub(list[0].GetMessage())
	switch word := f.word; {
	case strings.Contains(word, "RESOURCE_POOL_EXHAUSTED"), word == "UNSUPPORTED_OPERATION":
		// The latter is what a Spot instance gets that is taken away while it is made.
		return f.as(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, stockoutBackoff)
	case strings.Contains(word, "RATE_LIMIT"), word == "RESOURCE_OPERATION_RATE_EXCEEDED":
		return f.as(provider.ErrUnavailable, provider.ReasonQuotaExceeded, time.Minute)
	case strings.Contains(word, "QUOTA"):
		return f.as(provider.ErrNoCapacity, provider.ReasonQuotaExceeded, 0)
	case strings.HasPrefix(word, "IP_SPACE_EXHAUSTED"):
		return f.as(provider.ErrPermanent, provider.ReasonInsufficientCapacity, 0)
	case word == "PERMISSIONS_ERROR", word == "CONDITION_NOT_MET" && strings.Contains(f.message, "constraints/"):
		return f.as(provider.ErrPermanent, provider.ReasonPermissionDenied, 0)
	case word == "CONDITION_NOT_MET", word == "RESOURCE_NOT_READY", word == "INTERNAL_ERROR", strings.Contains(word, "BACKEND_ERROR"):
		return f.as(provider.ErrUnavailable, provider.ReasonUnknown, 0)
	case word == "RESOURCE_ALREADY_EXISTS":
		return f.as(provider.ErrAlreadyExists, provider.ReasonUnknown, 0)
	case addressTaken(f):
		return f.as(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, 0)
	case word == "RESOURCE_NOT_FOUND" && strings.Contains(f.message, "/images/"):
		return f.as(provider.ErrPermanent, provider.ReasonImageNotFound, 0)
	case f.code >= 500:
		return f.as(provider.ErrUnavailable, provider.ReasonUnknown, 0)
	}
	return f
}

// addressTaken reports whether somebody else took a static address first.
func addressTaken(f *fault) bool {
	return f.word == "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE" || f.word == "IP_IN_USE_BY_ANOTHER_RESOURCE" || f.word == "EXTERNAL_IP_IN_USE"
}

// maxMessage keeps a line of the log readable.
const maxMessage = 500

var (
	// resourceName matches what helps in a message: names and paths.
	resourceName = regexp.MustCompile(`^[][a-zA-Z0-9_./:-]{1,200}$`)
	// metadataValue matches from a mention of metadata to the end.
	metadataValue = regexp.MustCompile(`(?is)(metadata[^:]*):.*`)
	quotation     = regexp.MustCompile(`(?s)'(.*?)'`)
)

// scrub takes out of a message what may be metadata: Google quotes the values that it does not like.
func scrub(message string) string {
	message = metadataValue.ReplaceAllString(message, "$1: [redacted]")
	message = quotation.ReplaceAllStringFunc(message, func(q string) string {
		if resourceName.MatchString(q[1 : len(q)-1]) {
			return q
		}
		return "[redacted]"
	})
	if first, _, more := strings.Cut(message, "\n"); more {
		message = first + " [redacted]"
	}
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
	return &provider.Error{Provider: p.config.Name, Op: op, Instance: instance, Target: target,
		Kind: f.kind, Reason: f.reason, RetryAfter: f.retryAfter, Err: fmt.Errorf("gcp: %w", f)}
}

func permanent(reason provider.Reason, format string, args ...any) *fault {
	return &fault{kind: provider.ErrPermanent, reason: reason, message: fmt.Sprintf(format, args...)}
}
