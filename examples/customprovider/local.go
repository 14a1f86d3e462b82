package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// Local is a backend whose machines are forward proxies on loopback ports of this process. A real backend asks its
// hypervisor where this one looks into a map, and its machines outlive the process.
type Local struct {
	name    string
	room    int            // how many machines there may be
	serving sync.WaitGroup // one for each machine

	// mu guards the fields below. Nothing that is done under it takes long; a backend that goes over a network must not
	// hold a lock meanwhile, and has to reserve a name before it makes the machine.
	mu       sync.Mutex
	machines map[string]*machine // by id
	made     int
}

type machine struct {
	provider.Instance
	server *http.Server
}

// NewLocal returns a backend with room for so many machines. As with every backend, nothing is done yet.
func NewLocal(name string, room int) *Local {
	return &Local{name: name, room: room, machines: map[string]*machine{}}
}

// Name is what a proxy's Provider field refers to.
func (l *Local) Name() string { return l.name }

// fail gives an error its kind, which is what the pool acts on.
func (l *Local) fail(op, instance string, kind, err error) error {
	return &provider.Error{Provider: l.name, Op: op, Instance: instance, Kind: kind, Err: err}
}

// Validate refuses what Create could not make. It asks nobody.
func (l *Local) Validate(spec provider.Spec) error {
	var errs []error
	for key := range spec.Options {
		errs = append(errs, fmt.Errorf("Options has the unknown key %q, want none", key))
	}
	if host := spec.Placement.Host; host != "" && host != "localhost" {
		errs = append(errs, fmt.Errorf("Placement.Host is %q, want localhost", host))
	}
	if len(errs) > 0 {
		return l.fail("validate", "", provider.ErrPermanent, errors.Join(errs...))
	}
	return nil
}

// Create makes a machine. It is called again after a failure, with the same name, so it looks for what is there first.
func (l *Local) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	if ctx.Err() != nil {
		return provider.Instance{}, l.fail("create", req.Name, provider.ErrUnavailable, context.Cause(ctx))
	}
	if err := l.Validate(req.Spec); err != nil {
		return provider.Instance{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.machines {
		if m.Name != req.Name {
			continue
		}
		if m.Mark.Owner == req.Mark.Owner && m.Mark.Proxy == req.Mark.Proxy && m.Mark.Generation == req.Mark.Generation {
			return provider.Instance{}, l.fail("create", req.Name, provider.ErrAlreadyExists, fmt.Errorf("it is %s", m.ID))
		}
		return provider.Instance{}, l.fail("create", req.Name, provider.ErrPermanent, errors.New("somebody else's machine has the name"))
	}
	if len(l.machines) >= l.room {
		return provider.Instance{}, l.fail("create", req.Name, provider.ErrNoCapacity, fmt.Errorf("all %d places are taken", l.room))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return provider.Instance{}, l.fail("create", req.Name, provider.ErrUnavailable, err)
	}
	l.made++ // an id is never used again
	m := &machine{
		Instance: provider.Instance{
			ID: "local-" + strconv.Itoa(l.made), Name: req.Name, Mark: req.Mark, State: provider.StateRunning,
			Address: "127.0.0.1", Port: listener.Addr().(*net.TCPAddr).Port, Host: "localhost", Created: time.Now(),
		},
		server: &http.Server{Handler: forward(req.Name), ReadHeaderTimeout: time.Minute},
	}
	l.machines[m.ID] = m
	l.serving.Go(func() { _ = m.server.Serve(listener) }) // ends with Delete or Close
	return m.Instance, nil
}

// forward is a forward proxy for plain HTTP.
func forward(name string) http.Handler {
	return &httputil.ReverseProxy{
		Transport: &http.Transport{IdleConnTimeout: 10 * time.Second},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.Host = r.In.Host
			r.Out.Header.Set("Via", "1.1 "+name)
		},
	}
}

// findLocked returns one machine.
func (l *Local) findLocked(ctx context.Context, op, id string) (*machine, error) {
	if ctx.Err() != nil {
		return nil, l.fail(op, id, provider.ErrUnavailable, context.Cause(ctx))
	}
	m := l.machines[id]
	if m == nil {
		return nil, l.fail(op, id, provider.ErrNotFound, errors.New("no machine has this id"))
	}
	return m, nil
}

// Get returns one machine as it is now.
func (l *Local) Get(ctx context.Context, id string) (provider.Instance, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.findLocked(ctx, "get", id)
	if err != nil {
		return provider.Instance{}, err
	}
	return m.Instance, nil
}

// List returns the machines of one owner. Whatever else is there is none of the pool's business.
func (l *Local) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	if ctx.Err() != nil {
		return nil, l.fail("list", "", provider.ErrUnavailable, context.Cause(ctx))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []provider.Instance
	for _, m := range l.machines {
		if m.Mark.Owner == owner {
			found = append(found, m.Instance)
		}
	}
	return found, nil
}

// Delete removes a machine, unless no pool has made it.
func (l *Local) Delete(ctx context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.findLocked(ctx, "delete", id)
	if err != nil {
		return err
	}
	if m.Mark.Owner == "" {
		return l.fail("delete", id, provider.ErrPermanent, errors.New("it carries no mark, so it is not ours"))
	}
	delete(l.machines, id)
	m.server.Close()
	return nil
}

// Close ends the machines, which the process can't leave behind. The pool calls it because the type is an io.Closer.
func (l *Local) Close() error {
	var err error
	l.mu.Lock()
	for _, m := range l.machines {
		err = errors.Join(err, m.server.Close())
	}
	clear(l.machines)
	l.mu.Unlock()
	l.serving.Wait()
	return err
}
