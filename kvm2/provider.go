package kvm2

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"crawl.example.com/egress/internal/vmhost"
	"crawl.example.com/egress/provider"
)

// Provider makes proxies on a fleet of libvirt hosts. It is a [provider.Provider], [provider.Checker], [provider.Warner]
// and io.Closer. All methods are safe for concurrent use.
type Provider struct {
	config  Config
	uploads chan struct{}

	// mu guards what follows.
	mu     sync.Mutex
	hosts  []*host // in the order of the configuration
	placed map[string]placement
	closed bool
}

// placement is where an instance was put, for spreading those that a list does not show yet.
type placement struct {
	host, group, owner string
}

// host is one host in use.
type host struct {
	vm *vmhost.Host
	// absent is true when it did not answer the last time.
	absent atomic.Bool

	// mu guards what follows.
	mu       sync.Mutex
	config   Host
	failures int // of creates, in a row
	restful  time.Time
	seen     []provider.Instance // of the newest list, whosever
}

func (h *host) is() Host {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.config
}

// New returns a Provider. It does no I/O: hosts are called when they are needed. The error joins every fault of config.
func New(config Config) (*Provider, error) {
	config, err := config.filled()
	p := &Provider{config: config, uploads: make(chan struct{}, max(config.MaxUploads, 1)), placed: map[string]placement{}}
	if err := errors.Join(err, p.SetHosts(config.Hosts)); err != nil {
		_ = p.Close() // always nil
		return nil, err
	}
	return p, nil
}

// SetHosts changes the hosts: to add some, to cordon or drain some, to change limits. A host whose address, login or storage
// has changed gets a new connection; calls on the old one fail with provider.ErrUnavailable. A host that is no longer named
// is forgotten, and what is on it is not seen any more, so drain it first. When the error is not nil nothing has changed. It
// does no I/O on hosts, and waits for calls on hosts that are dropped to end.
func (p *Provider) SetHosts(hosts []Host) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return errors.New("kvm2: the provider is closed")
	}
	faults := []error{checkHosts(hosts)}
	var made, dropped, next []*host
	for _, h := range hosts {
		h.Labels = maps.Clone(h.Labels)
		i := slices.IndexFunc(p.hosts, func(old *host) bool { return sameMachine(old.is(), h) })
		if i >= 0 {
			next = append(next, p.hosts[i])
			continue
		}
		vm, err := vmhost.New(p.config.vmhostConfig(h, p.uploads))
		if err != nil {
			faults = append(faults, fmt.Errorf("kvm2: host %s: %w", h.Name, err))
			continue
		}
		x := &host{vm: vm, config: h}
		made, next = append(made, x), append(next, x)
	}
	err := errors.Join(faults...)
	if err != nil {
		dropped = made
	} else {
		for _, old := range p.hosts {
			if !slices.Contains(next, old) {
				dropped = append(dropped, old)
			}
		}
		for i, x := range next {
			x.mu.Lock()
			x.config = hosts[i]
			x.config.Labels = maps.Clone(hosts[i].Labels)
			x.mu.Unlock()
		}
		p.hosts = next
	}
	p.mu.Unlock()
	closeAll(dropped)
	return err
}

// sameMachine reports whether b needs no other connection than a, nor other limits.
func sameMachine(a, b Host) bool {
	return a.Name == b.Name && a.URI == b.URI && sameLogin(a.SSH, b.SSH) && a.StoragePool == b.StoragePool && a.Network == b.Network && a.Bridge == b.Bridge &&
		a.MaxInstances == b.MaxInstances && a.MaxMemoryMiB == b.MaxMemoryMiB && a.MaxCPUs == b.MaxCPUs && a.MinFreeGiB == b.MinFreeGiB
}

// sameLogin reports whether both say the same. Functions are the same only where the whole is.
func sameLogin(a, b *SSH) bool {
	return a == b || a != nil && b != nil && reflect.DeepEqual(*a, *b)
}

func closeAll(hosts []*host) {
	var all sync.WaitGroup
	for _, h := range hosts {
		all.Go(func() { _ = h.vm.Close() }) // always nil
	}
	all.Wait()
}

// Close ends what is under way and the connections. Instances stay. It returns when every goroutine has ended, and nil.
func (p *Provider) Close() error {
	p.mu.Lock()
	p.closed = true
	hosts := p.hosts
	p.mu.Unlock()
	closeAll(hosts)
	return nil
}

// Name implements provider.Provider.
func (p *Provider) Name() string { return p.config.Name }

// all returns the hosts of now.
func (p *Provider) all() []*host {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.hosts)
}

// find returns the host of that name, or nil.
func (p *Provider) find(name string) *host {
	for _, h := range p.all() {
		if h.vm.Target() == name {
			return h
		}
	}
	return nil
}

// Validate implements provider.Provider. All faults are joined. A placement that no host allows is one, so that it does not
// wait for ever.
func (p *Provider) Validate(spec provider.Spec) error {
	hosts := p.all()
	var faults []error
	if spec.Provider != "" && spec.Provider != p.config.Name {
		faults = append(faults, fmt.Errorf("kvm2: Provider %q, this one is %q", spec.Provider, p.config.Name))
	}
	if len(hosts) > 0 {
		if _, err := hosts[0].vm.Plan(spec); err != nil { // every host has the same images
			faults = append(faults, fmt.Errorf("kvm2: %w", err))
		}
	}
	var refusals []string
	for _, h := range hosts {
		c := h.is()
		err := vmhost.Allowed(spec.Placement, c.Name, c.Labels)
		if err == nil {
			refusals = nil
			break
		}
		refusals = append(refusals, c.Name+": "+err.Error())
	}
	if len(refusals) > 0 {
		faults = append(faults, fmt.Errorf("kvm2: no host is allowed: %s", strings.Join(refusals, "; ")))
	}
	if err := errors.Join(faults...); err != nil {
		return &provider.Error{Provider: p.config.Name, Op: "validate", Kind: provider.ErrPermanent, Reason: provider.ReasonUnsupported, Err: err}
	}
	return nil
}

// Warnings implements provider.Warner.
func (p *Provider) Warnings(spec provider.Spec) []string { return vmhost.Warnings(spec) }

// makeID joins a host's name and an id there.
func makeID(host, id string) string { return host + "/" + id }

// locate splits an id. The host is nil when there is none of that name.
func (p *Provider) locate(op, id string) (*host, string, error) {
	name, rest, ok := strings.Cut(id, "/")
	if !ok || !hostPattern.MatchString(name) || rest == "" {
		return nil, "", p.fail(op, id, "", provider.ErrNotFound, provider.ReasonUnknown, "id %q was never given", id)
	}
	h := p.find(name)
	if h == nil {
		return nil, "", p.fail(op, id, name, provider.ErrUnavailable, provider.ReasonUnreachable, "there is no host %s in Hosts any more; name it, drained, to have what is on it deleted", name)
	}
	return h, rest, nil
}

func (p *Provider) fail(op, instance, target string, kind error, reason provider.Reason, format string, args ...any) error {
	return &provider.Error{Provider: p.config.Name, Op: op, Instance: instance, Target: target, Kind: kind, Reason: reason, Err: fmt.Errorf(format, args...)}
}

// finish makes an instance of a host one of the fleet.
func (h *host) finish(x provider.Instance) provider.Instance {
	if x.ID == "" {
		return x
	}
	x.ID = makeID(x.Host, x.ID)
	x.Evacuate = h.is().Drained
	return x
}

// Get implements provider.Provider.
func (p *Provider) Get(ctx context.Context, id string) (provider.Instance, error) {
	h, rest, err := p.locate("get", id)
	if err != nil {
		return provider.Instance{}, err
	}
	x, err := h.vm.Get(ctx, rest)
	return h.finish(x), err
}

// Delete implements provider.Provider. It returns when the instance is gone with its files.
func (p *Provider) Delete(ctx context.Context, id string) error {
	h, rest, err := p.locate("delete", id)
	if err != nil {
		return err
	}
	if err := h.vm.Delete(ctx, rest); err != nil {
		return err
	}
	h.mu.Lock()
	h.seen = slices.DeleteFunc(slices.Clone(h.seen), func(x provider.Instance) bool { return x.ID == rest })
	h.mu.Unlock()
	return nil
}

// List implements provider.Provider. All hosts are asked at once. One that has not answered within Config.ListTimeout is named
// in a *provider.PartialError, and keeps nobody waiting.
func (p *Provider) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	hosts := p.all()
	lists, errs := make([][]provider.Instance, len(hosts)), make([]error, len(hosts))
	p.each(ctx, hosts, func(ctx context.Context, i int) error {
		lists[i], errs[i] = p.listHost(ctx, hosts[i], owner)
		return errs[i]
	})
	if ctx.Err() != nil {
		return nil, p.fail("list", "", "", provider.ErrUnavailable, provider.ReasonTimeout, "%w", context.Cause(ctx))
	}
	var all []provider.Instance
	var partial provider.PartialError
	denied := 0
	for i, h := range hosts {
		if errs[i] != nil {
			partial.Targets = append(partial.Targets, provider.TargetError{Target: h.vm.Target(), Err: errs[i]})
			if errors.Is(errs[i], provider.ErrDenied) {
				denied++
			}
			continue
		}
		for _, x := range lists[i] {
			all = append(all, h.finish(x))
		}
	}
	switch {
	case len(partial.Targets) == 0:
		return all, nil
	case len(partial.Targets) == len(hosts) && denied == len(hosts):
		return nil, errs[0]
	case len(partial.Targets) == len(hosts):
		return nil, p.fail("list", "", "", provider.ErrUnavailable, provider.ReasonOf(errs[0]), "no host can be asked: %s", partial.Error())
	}
	return all, &partial
}

// absentGrace is how much longer than the others a host may take that did not answer the last time. One that is slower than that
// and not dead is found by the next check.
const absentGrace = 500 * time.Millisecond

// each calls f for every host at once, with a context that ends after Config.ListTimeout. For hosts that did not answer the last
// time it ends soon after the others have, if there are others.
func (p *Provider) each(caller context.Context, hosts []*host, f func(ctx context.Context, i int) error) {
	ctx, cancel := context.WithTimeoutCause(caller, p.config.ListTimeout,
		fmt.Errorf("no answer within %s: %w", p.config.ListTimeout, context.DeadlineExceeded))
	defer cancel()
	impatient, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	var present, absent sync.WaitGroup
	others := false
	for i, h := range hosts {
		group, within := &absent, impatient
		if !h.absent.Load() {
			group, within, others = &present, ctx, true
		}
		group.Go(func() {
			err := f(within, i)
			if caller.Err() == nil { // a caller who has gone says nothing about the host
				h.absent.Store(err != nil && within.Err() != nil || errors.Is(err, provider.ErrUnavailable))
			}
		})
	}
	present.Wait()
	if others {
		timer := time.AfterFunc(absentGrace, func() {
			giveUp(fmt.Errorf("no answer within %s of the others', as the last time: %w", absentGrace, context.DeadlineExceeded))
		})
		defer timer.Stop()
	}
	absent.Wait()
}

func (p *Provider) listHost(ctx context.Context, h *host, owner string) ([]provider.Instance, error) {
	list, err := h.vm.List(ctx, owner)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen = list
	return list, nil
}

// Check implements provider.Checker. Every host is a target, and all are looked at at once.
func (p *Provider) Check(ctx context.Context) []provider.TargetHealth {
	hosts := p.all()
	results := make([]provider.TargetHealth, len(hosts))
	var checked sync.WaitGroup
	for i, h := range hosts {
		checked.Go(func() {
			results[i] = h.vm.Check(ctx)
			if results[i].Ready {
				h.absent.Store(false)
			}
			if c := h.is(); results[i].Ready && (c.Drained || c.Cordoned) {
				results[i].Message += map[bool]string{true: ", drained", false: ", cordoned"}[c.Drained]
			}
		})
	}
	checked.Wait()
	return results
}

// EvictImages deletes the images on all hosts that no disk stands on and Config.Images doesn't name, and returns their names by
// host. It blocks, within ctx. Nothing is evicted without being asked for. The error joins those of the hosts on which it failed,
// and the others have been done all the same.
func (p *Provider) EvictImages(ctx context.Context) (map[string][]string, error) {
	hosts := p.all()
	gone, errs := make([][]string, len(hosts)), make([]error, len(hosts))
	var evicted sync.WaitGroup
	for i, h := range hosts {
		evicted.Go(func() {
			gone[i], errs[i] = h.vm.Evict(ctx, func(image string) bool { _, named := p.config.Images[image]; return named })
		})
	}
	evicted.Wait()
	byHost := map[string][]string{}
	for i, h := range hosts {
		if len(gone[i]) > 0 {
			byHost[h.vm.Target()] = gone[i]
		}
	}
	return byHost, errors.Join(errs...)
}

var (
	_ provider.Checker = (*Provider)(nil)
	_ provider.Warner  = (*Provider)(nil)
)
