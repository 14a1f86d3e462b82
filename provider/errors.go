package provider

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// The sentinels say what the pool will do next. Test for them with errors.Is.
var (
	// ErrPermanent: trying again changes nothing until the spec does. The pool stops, and says so in the
	// proxy's status.
	ErrPermanent = errors.New("permanent")
	// ErrNotFound: the instance is gone for sure. For Delete that is success.
	ErrNotFound = errors.New("not found")
	// ErrAlreadyExists: an instance of ours already has the name. The pool lists and adopts it.
	ErrAlreadyExists = errors.New("already exists")
	// ErrNoCapacity: no allowed host has room, or a quota is used up. The pool backs off this provider's
	// creates; nothing was made.
	ErrNoCapacity = errors.New("no capacity")
	// ErrUnavailable: the backend could not be asked, nothing was changed, and the call may be repeated.
	ErrUnavailable = errors.New("unavailable")
	// ErrDenied: the credentials were refused or lack a right. The pool stops creating, keeps serving
	// what it has, and says so loudly.
	ErrDenied = errors.New("denied")
	// ErrOutcomeUnknown: the request may have been carried out. The pool lists before it does anything
	// else about this proxy.
	ErrOutcomeUnknown = errors.New("outcome unknown")
)

// Kind returns the sentinel of this package that err matches, or nil when it matches none.
func Kind(err error) error {
	for _, kind := range []error{
		ErrPermanent, ErrNotFound, ErrAlreadyExists, ErrNoCapacity, ErrDenied, ErrOutcomeUnknown, ErrUnavailable,
	} {
		if errors.Is(err, kind) {
			return kind
		}
	}
	return nil
}

// Reason is a word for why something is as it is, stable enough for alerts. A Message beside it says more.
type Reason string

// The reasons of targets and of errors.
const (
	ReasonReady                  Reason = "Ready"
	ReasonTimeout                Reason = "Timeout"
	ReasonUnreachable            Reason = "Unreachable"
	ReasonAuthenticationFailed   Reason = "AuthenticationFailed"
	ReasonPermissionDenied       Reason = "PermissionDenied"
	ReasonCertificateInvalid     Reason = "CertificateInvalid" // also an unknown or changed SSH host key
	ReasonCredentialsUnavailable Reason = "CredentialsUnavailable"
	ReasonStorageNotFound        Reason = "StorageNotFound"
	ReasonNetworkNotFound        Reason = "NetworkNotFound"
	ReasonTemplateNotFound       Reason = "TemplateNotFound"
	ReasonImageNotFound          Reason = "ImageNotFound"
	ReasonInsufficientCapacity   Reason = "InsufficientCapacity"
	ReasonQuotaExceeded          Reason = "QuotaExceeded"
	ReasonUnsupported            Reason = "Unsupported"
	ReasonUnknown                Reason = "Unknown"
)

// Error is the error that backends return: what was attempted, where, and how it ended. It never holds a
// secret.
type Error struct {
	// Provider is the entry name.
	Provider string
	// Op is the method in lower case: create, get, list, delete, check, validate.
	Op string
	// Instance is the instance's name or id. Empty when the error is not about one.
	Instance string
	// Target is the host it happened on. Empty when it is not about one.
	Target string
	// Kind is one of the sentinels of this package. Required.
	Kind error
	// Reason is the machine-readable why. Empty means ReasonUnknown.
	Reason Reason
	// RetryAfter is how long the backend asked to be left alone. Zero leaves it to the pool.
	RetryAfter time.Duration
	// Err is the cause. Required.
	Err error
}

// Error returns one line that names provider, operation, instance, target, kind and cause.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "provider %s: %s", e.Provider, e.Op)
	if e.Instance != "" {
		fmt.Fprintf(&b, " %s", e.Instance)
	}
	if e.Target != "" {
		fmt.Fprintf(&b, " on %s", e.Target)
	}
	if e.Kind != nil && e.Err != e.Kind { //nolint:errorlint // identity: print the kind once
		fmt.Fprintf(&b, ": %v", e.Kind)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Unwrap returns the kind and the cause, so that errors.Is and errors.As see both.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.Kind != nil {
		errs = append(errs, e.Kind)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// ReasonOf returns the reason of the first *Error in err's tree that has one, else ReasonUnknown.
func ReasonOf(err error) Reason {
	if e, ok := errors.AsType[*Error](err); ok && e.Reason != "" {
		return e.Reason
	}
	return ReasonUnknown
}

// PartialError says that a List is not the whole truth: the hosts it names could not be asked. What is on
// them is unknown, neither gone nor healthy. It matches ErrUnavailable.
type PartialError struct {
	// Targets are the hosts that did not answer, at least one.
	Targets []TargetError
}

// TargetError is the failure of one host.
type TargetError struct {
	Target string
	Err    error
}

// Error names every host that could not be asked and why.
func (e *PartialError) Error() string {
	var b strings.Builder
	b.WriteString("provider: partial list")
	for i, t := range e.Targets {
		if i == 0 {
			b.WriteString(": ")
		} else {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "%s: %v", t.Target, t.Err)
	}
	return b.String()
}

// Is makes a PartialError match ErrUnavailable.
func (e *PartialError) Is(target error) bool { return target == ErrUnavailable }

// Unwrap returns the causes.
func (e *PartialError) Unwrap() []error {
	errs := make([]error, 0, len(e.Targets))
	for _, t := range e.Targets {
		errs = append(errs, t.Err)
	}
	return errs
}

// Missing reports whether target is among the hosts that could not be asked.
func (e *PartialError) Missing(target string) bool {
	for _, t := range e.Targets {
		if t.Target == target {
			return true
		}
	}
	return false
}
