// Package fake is a backend in memory, for the tests of crawlers and of the pool itself.
//
// Its instances boot, die, hide from lists and fail to be made as told. Nothing runs in the background: an
// instance's state is worked out from the time, so that a Provider works in a testing/synctest bubble, where the pool
// asks it instead of probing over a network. Leases are granted there as ever; requests need a network. With
// Config.Serve every instance is a real forward proxy on a loopback port instead, for use outside of bubbles.
//
// A test of a crawler, in which an hour takes no time:
//
//	synctest.Test(t, func(t *testing.T) {
//		home := fake.New(fake.Config{BootTime: time.Minute})
//		pool, err := egress.New(egress.Config{
//			Name: "test", Providers: []provider.Provider{home}, DestroyOnClose: true,
//		})
//		… // Apply, Start, WaitReady
//		home.Kill(home.Instances()[0].ID)
//		time.Sleep(time.Hour)
//		… // the proxy has been replaced
//		pool.Close(t.Context())
//	})
package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/provider"
)

// Op is a method of a provider.
type Op string

// The methods that faults and the call log refer to.
const (
	OpCreate Op = "create"
	OpGet    Op = "get"
	OpList   Op = "list"
	OpDelete Op = "delete"
	OpCheck  Op = "check"
)

// Config says how a Provider behaves. Everything but Name, Store and Serve can be changed later.
type Config struct {
	// Name is the entry name. Defaults to "fake".
	Name string
	// Store holds the instances. Two providers with one store are one backend, before and after a restart.
	// Defaults to a new store in memory.
	Store *Store
	// Hosts are the targets that instances are spread over. Defaults to one, "host-1".
	Hosts []string
	// CreateTime is how long Create takes. Defaults to 0.
	CreateTime time.Duration
	// BootTime is the time from the end of Create until the instance has an address and answers.
	// Defaults to 0.
	BootTime time.Duration
	// DeleteTime is the time from an accepted Delete until the instance is gone. Defaults to 0.
	DeleteTime time.Duration
	// ListLag is how far List is behind; Get is not. Defaults to 0.
	ListLag time.Duration
	// Capacity is how many instances there may be, those on their way out included. Defaults to 0, no
	// limit.
	Capacity int
	// Addresses are given out in turn, again and again, to instances of a provider that does not Serve.
	// Defaults to addresses in 10.0.0.0/8, each used once.
	Addresses []string
	// Serve makes every instance a real forward proxy on a loopback port. Close must be called then.
	// Defaults to false.
	Serve bool
	// Username and Password are what the served proxies want. Defaults to none.
	Username, Password string
}

// Provider is a backend in memory. All methods are safe for concurrent use.
type Provider struct {
	name  string
	serve bool
	store *Store

	// mu guards the fields below. It is never held together with the store's lock.
	mu       sync.Mutex
	config   Config
	fails    map[Op][]error
	lateFail []error // for creates that succeed and say otherwise
	halfway  int     // creates that stop half way
	hangs    map[Op]chan struct{}
	panics   map[Op]int
	down     map[string]bool
	draining map[string]bool
	lies     bool
	stuck    bool
	denied   bool
	calls    []Call
	most     int
	making   map[string]bool // names of creates under way in this process
	servers  map[string]*forwardproxy.Server
	health   func(context.Context) []provider.TargetHealth
	closed   bool
}

var (
	_ provider.Provider = (*Provider)(nil)
	_ provider.Checker  = (*Provider)(nil)
	_ provider.Prober   = (*Provider)(nil)
)

// Call is one call of a method.
type Call struct {
	Op       Op
	Instance string // name or id; empty for List and Check
	Began    time.Time
	Err      error // nil while it is under way
}

// New returns a provider. It does no I/O.
func New(config Config) *Provider {
	if config.Name == "" {
		config.Name = "fake"
	}
	if config.Store == nil {
		config.Store = NewStore()
	}
	if len(config.Hosts) == 0 {
		config.Hosts = []string{"host-1"}
	}
	config.Hosts = slices.Clone(config.Hosts)
	return &Provider{
		name: config.Name, serve: config.Serve, store: config.Store, config: config,
		fails: map[Op][]error{}, hangs: map[Op]chan struct{}{}, panics: map[Op]int{}, down: map[string]bool{}, draining: map[string]bool{},
		making: map[string]bool{}, servers: map[string]*forwardproxy.Server{},
	}
}

// Name implements provider.Provider.
func (p *Provider) Name() string { return p.name }

// Validate implements provider.Provider. It knows the option "note" and refuses any other, hosts that are not
// Config.Hosts, and the image "invalid".
func (p *Provider) Validate(spec provider.Spec) error {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(spec.Options)) {
		if key != "note" {
			errs = append(errs, fmt.Errorf("Options has the unknown key %q, want note", key))
		}
	}
	if spec.Image == "invalid" {
		errs = append(errs, fmt.Errorf("Image is %q, want any other", spec.Image))
	}
	p.mu.Lock()
	hosts := p.config.Hosts
	p.mu.Unlock()
	if h := spec.Placement.Host; h != "" && !slices.Contains(hosts, h) {
		errs = append(errs, fmt.Errorf("Placement.Host is %q, want one of %s", h, strings.Join(hosts, ", ")))
	}
	if len(errs) == 0 {
		return nil
	}
	return &provider.Error{Provider: p.name, Op: "validate", Kind: provider.ErrPermanent, Err: errors.Join(errs...)}
}

// begin logs a call, and applies what was set for it. The returned function must be called with its outcome.
func (p *Provider) begin(ctx context.Context, op Op, instance string) (func(error) error, error) {
	p.mu.Lock()
	i := len(p.calls)
	p.calls = append(p.calls, Call{Op: op, Instance: instance, Began: time.Now()})
	end := func(err error) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if err != nil {
			err = p.wrap(op, instance, err)
		}
		if i < len(p.calls) {
			p.calls[i].Err = err
		}
		return err
	}
	var fail error
	if queue := p.fails[op]; len(queue) > 0 {
		fail, p.fails[op] = queue[0], queue[1:]
	}
	hang := p.hangs[op]
	if p.panics[op] > 0 {
		p.panics[op]--
		p.mu.Unlock()
		panic("fake: told to panic in " + string(op))
	}
	if fail == nil && p.denied {
		fail = provider.ErrDenied
	}
	if fail == nil && p.closed {
		fail = provider.ErrUnavailable
	}
	p.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return end, fmt.Errorf("%w: %w", provider.ErrUnavailable, context.Cause(ctx))
		}
	}
	if ctx.Err() != nil {
		return end, fmt.Errorf("%w: %w", provider.ErrUnavailable, context.Cause(ctx))
	}
	return end, fail
}

// wrap gives an error the form that backends' errors have.
func (p *Provider) wrap(op Op, instance string, err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok {
		return err
	}
	if _, ok := errors.AsType[*provider.PartialError](err); ok {
		return err
	}
	kind := provider.Kind(err)
	if kind == nil {
		kind = provider.ErrUnavailable
		if op == OpCreate || op == OpDelete {
			kind = provider.ErrOutcomeUnknown
		}
	}
	reasons := map[error]provider.Reason{
		provider.ErrDenied: provider.ReasonPermissionDenied, provider.ErrNoCapacity: provider.ReasonInsufficientCapacity,
		provider.ErrUnavailable: provider.ReasonUnreachable,
	}
	return &provider.Error{Provider: p.name, Op: string(op), Instance: instance, Kind: kind, Reason: reasons[kind], Err: err}
}

// Create implements provider.Provider.
func (p *Provider) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	end, err := p.begin(ctx, OpCreate, req.Name)
	if err != nil {
		return provider.Instance{}, end(err)
	}
	made, err := p.create(ctx, req)
	return made, end(err)
}

func (p *Provider) create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	if err := p.Validate(req.Spec); err != nil {
		return provider.Instance{}, err
	}
	p.mu.Lock()
	c := p.config
	if p.making[req.Name] {
		p.mu.Unlock()
		return provider.Instance{}, fmt.Errorf("%w: a create of %s is under way", provider.ErrAlreadyExists, req.Name)
	}
	p.making[req.Name] = true
	down := maps.Clone(p.down)
	maps.Copy(down, p.draining)
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.making, req.Name)
	}()

	id, err := p.store.reserve(req, c, down)
	if err != nil {
		return provider.Instance{}, err
	}
	p.mu.Lock()
	stop := p.halfway > 0
	if stop {
		p.halfway--
	}
	p.mu.Unlock()
	if stop {
		return provider.Instance{}, fmt.Errorf("%w: told to stop half way", provider.ErrOutcomeUnknown)
	}
	if c.CreateTime > 0 {
		timer := time.NewTimer(c.CreateTime)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return provider.Instance{}, fmt.Errorf("%w: %w", provider.ErrOutcomeUnknown, context.Cause(ctx))
		}
	}
	if p.serve {
		if err := p.startServer(id, req); err != nil {
			return provider.Instance{}, err
		}
	}
	r, err := p.store.finish(id, c.BootTime)
	if err != nil {
		return provider.Instance{}, err
	}
	p.count()
	p.mu.Lock()
	var late error
	if len(p.lateFail) > 0 {
		late, p.lateFail = p.lateFail[0], p.lateFail[1:]
	}
	p.mu.Unlock()
	if late != nil {
		return provider.Instance{}, late
	}
	return p.instance(r, time.Now()), nil
}

// count keeps the highest number of instances that were there at once.
func (p *Provider) count() {
	n := p.store.size(time.Now())
	p.mu.Lock()
	defer p.mu.Unlock()
	p.most = max(p.most, n)
}

func (p *Provider) startServer(id string, req provider.CreateRequest) error {
	p.mu.Lock()
	c := forwardproxy.Config{Name: req.Mark.Proxy, Username: p.config.Username, Password: p.config.Password}
	running := p.servers[id] != nil
	p.mu.Unlock()
	if running {
		return nil
	}
	s, err := forwardproxy.Start(c)
	if err != nil {
		return fmt.Errorf("%w: %w", provider.ErrUnavailable, err)
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.servers[id] = s
	}
	p.mu.Unlock()
	if closed {
		s.Close()
		return fmt.Errorf("%w: the provider is closed", provider.ErrOutcomeUnknown)
	}
	return nil
}

// instance describes a row as of now.
func (p *Provider) instance(r row, now time.Time) provider.Instance {
	x := r.instance(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.Half && p.making[r.Name] {
		x.State = provider.StatePending
	}
	x.Evacuate = p.draining[r.Host]
	if s := p.servers[r.ID]; s != nil && x.Address != "" {
		x.Address, x.Port = "127.0.0.1", s.Port()
	}
	return x
}

// Get implements provider.Provider.
func (p *Provider) Get(ctx context.Context, id string) (provider.Instance, error) {
	end, err := p.begin(ctx, OpGet, id)
	if err != nil {
		return provider.Instance{}, end(err)
	}
	r, ok := p.store.row(id, time.Now())
	if !ok {
		return provider.Instance{}, end(provider.ErrNotFound)
	}
	if p.hostDown(r.Host) {
		return provider.Instance{}, end(fmt.Errorf("%w: host %s does not answer", provider.ErrUnavailable, r.Host))
	}
	return p.instance(r, time.Now()), end(nil)
}

// List implements provider.Provider.
func (p *Provider) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	end, err := p.begin(ctx, OpList, "")
	if err != nil {
		return nil, end(err)
	}
	p.mu.Lock()
	then := time.Now().Add(-p.config.ListLag)
	var partial *provider.PartialError
	for _, h := range p.config.Hosts {
		if p.down[h] {
			if partial == nil {
				partial = &provider.PartialError{}
			}
			partial.Targets = append(partial.Targets, provider.TargetError{Target: h, Err: errors.New("does not answer")})
		}
	}
	p.mu.Unlock()
	var found []provider.Instance
	for _, r := range p.store.rows(then) {
		if r.Mark.Owner == owner && !p.hostDown(r.Host) {
			found = append(found, p.instance(r, then))
		}
	}
	if partial != nil {
		return found, end(partial)
	}
	return found, end(nil)
}

// Delete implements provider.Provider.
func (p *Provider) Delete(ctx context.Context, id string) error {
	end, err := p.begin(ctx, OpDelete, id)
	if err != nil {
		return end(err)
	}
	r, ok := p.store.row(id, time.Now())
	if !ok {
		return end(provider.ErrNotFound)
	}
	if r.Mark.Owner == "" {
		return end(fmt.Errorf("%w: it carries no mark, so it is not ours", provider.ErrPermanent))
	}
	if p.hostDown(r.Host) {
		return end(fmt.Errorf("%w: host %s does not answer", provider.ErrUnavailable, r.Host))
	}
	p.mu.Lock()
	lies, stuck, wait := p.lies, p.stuck, p.config.DeleteTime
	server := p.servers[id]
	if !lies {
		delete(p.servers, id)
	}
	p.mu.Unlock()
	if lies {
		return end(nil)
	}
	if server != nil {
		server.Close()
	}
	return end(p.store.remove(id, wait, stuck))
}

// Check implements provider.Checker: every host is ready unless it was switched off or SetHealth says otherwise.
func (p *Provider) Check(ctx context.Context) []provider.TargetHealth {
	end, err := p.begin(ctx, OpCheck, "")
	defer end(nil)
	p.mu.Lock()
	health, hosts, down := p.health, p.config.Hosts, maps.Clone(p.down)
	p.mu.Unlock()
	if health != nil {
		return health(ctx)
	}
	all := make([]provider.TargetHealth, 0, len(hosts))
	for _, h := range hosts {
		t := provider.TargetHealth{Target: h, Ready: true, Reason: provider.ReasonReady, CheckedAt: time.Now()}
		switch {
		case err != nil && errors.Is(err, provider.ErrDenied):
			t.Ready, t.Reason, t.Message = false, provider.ReasonAuthenticationFailed, "the credentials are refused"
		case err != nil && ctx.Err() != nil:
			t.Ready, t.Reason, t.Message = false, provider.ReasonTimeout, "no answer in time"
		case err != nil || down[h]:
			t.Ready, t.Reason, t.Message = false, provider.ReasonUnreachable, "the host does not answer"
		}
		all = append(all, t)
	}
	return all
}

// Close ends the proxies of a provider that serves. It may be called again; calls after it fail with
// provider.ErrUnavailable.
func (p *Provider) Close() error {
	p.mu.Lock()
	p.closed = true
	servers := p.servers
	p.servers = map[string]*forwardproxy.Server{}
	p.mu.Unlock()
	for _, s := range servers {
		s.Close()
	}
	return nil
}

func (p *Provider) hostDown(host string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down[host]
}

// Probe implements provider.Prober: the proxy of an instance works when the instance runs and was not killed. A
// provider that serves is probed over the network.
func (p *Provider) Probe(ctx context.Context, x provider.Instance) error {
	switch {
	case p.serve:
		return errors.ErrUnsupported
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case !p.Alive(x.Address):
		return errors.New("connection refused")
	}
	return nil
}

// Alive reports whether a proxy answers at address (host, or host:port): an instance is there, running, and was not
// killed.
func (p *Provider) Alive(address string) bool {
	host := address
	if h, _, err := net.SplitHostPort(address); err == nil {
		host = h
	}
	return p.store.alive(host, time.Now())
}
