package leases

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ErrNilContext is what a nil context gives.
var ErrNilContext = errors.New("nil context")

// ErrReleased is the cause of a lease's context once the lease has been released.
var ErrReleased = errors.New("egress: lease is released")

// ExhaustedError says why there is no lease: what the entries that the request selects are doing.
type ExhaustedError struct {
	Ready    int // could be leased, but not for this request: held back by its key
	Full     int // fit, with MaxLeases leases
	Cooling  int // fit, cooling down for the request's target
	Excluded int // named in Exclude
	Unfit    int // failing, starting or draining
	Waiting  int // callers ahead
	Err      error
}

// Error lists the counts.
func (e *ExhaustedError) Error() string {
	text := fmt.Sprintf("no proxy is free: %d full, %d cooling down, %d excluded, %d unfit, %d held back by the key, %d callers waiting",
		e.Full, e.Cooling, e.Excluded, e.Unfit, e.Ready, e.Waiting)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns why the wait ended, nil when there was none.
func (e *ExhaustedError) Unwrap() error { return e.Err }

// NoMatchError says that no declared proxy can ever satisfy the request.
type NoMatchError struct {
	Labels  map[string]string
	Exclude []string
}

// Error names the selector.
func (e *NoMatchError) Error() string {
	var b strings.Builder
	b.WriteString("no declared proxy can be leased")
	for i, k := range slices.Sorted(maps.Keys(e.Labels)) {
		if i == 0 {
			b.WriteString(" with labels ")
		} else {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s=%s", k, e.Labels[k])
	}
	if len(e.Exclude) > 0 {
		fmt.Fprintf(&b, " other than %s", strings.Join(e.Exclude, ", "))
	}
	return b.String()
}
