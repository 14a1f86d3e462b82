package vmhost

import "context"

// turn is a lock on a name that is waited for within a context.
type turn struct {
	held  chan struct{} // holds a token while somebody has it
	users int           // who have it or wait for it
}

// lock waits within ctx for the turn of name and returns what ends it.
func (h *Host) lock(ctx context.Context, name string) (unlock func(), err error) {
	h.mu.Lock()
	t := h.names[name]
	if t == nil {
		t = &turn{held: make(chan struct{}, 1)}
		h.names[name] = t
	}
	t.users++
	h.mu.Unlock()
	leave := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(h.names, name)
		}
	}
	if ctx.Err() != nil {
		leave()
		return nil, context.Cause(ctx)
	}
	select {
	case t.held <- struct{}{}:
		return func() {
			<-t.held
			leave()
		}, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}

// note counts name in m until the returned function is called.
func (h *Host) note(m map[string]int, name string) (end func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m[name]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if m[name]--; m[name] == 0 {
			delete(m, name)
		}
	}
}
