package provider

import (
	"io"
	"time"
)

// TargetHealth is one target's result in one round of checks.
type TargetHealth struct {
	// Target is the host, node or zone.
	Target string
	// Ready is true when instances can be made and reached there.
	Ready bool
	// Reason is ReasonReady exactly when Ready is true.
	Reason Reason
	// Message says in a sentence what is wrong and what would mend it. It holds no secret.
	Message string
	// Duration is how long this target's check took.
	Duration time.Duration
	// CheckedAt is when it ended.
	CheckedAt time.Time
}

// As returns p, or what p wraps, as a T. Use it to ask for an optional interface such as [Checker]; a plain
// type assertion would not see through [Shared].
func As[T any](p Provider) (T, bool) {
	for p != nil {
		if t, ok := p.(T); ok {
			return t, true
		}
		w, ok := p.(interface{ Unwrap() Provider })
		if !ok {
			break
		}
		p = w.Unwrap()
	}
	var none T
	return none, false
}

// Shared returns p marked as used by others too: a pool that is closed leaves it open. Without it a pool
// closes every provider that is an io.Closer when the pool itself is closed.
func Shared(p Provider) Provider { return shared{p} }

type shared struct{ Provider }

func (s shared) Unwrap() Provider { return s.Provider }

// Closer returns what has to be closed with p, or nil when p has nothing to close or is [Shared].
func Closer(p Provider) io.Closer {
	if _, ok := As[shared](p); ok {
		return nil
	}
	c, _ := As[io.Closer](p)
	return c
}
