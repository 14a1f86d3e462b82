package gcp

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/compute/apiv1/computepb"
	"google.golang.org/api/iterator"
	"google.golang.org/protobuf/proto"

	"crawl.example.com/egress/provider"
)

// Create implements provider.Provider. It returns when Google has decided: the instance exists, or its zone and all
// others had no room. It looks for the name in every zone first, so that a repeated create never makes a second
// instance in another one; while a zone can't be asked, creates fail with provider.ErrUnavailable.
func (p *Provider) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	zone, made, err := p.create(ctx, req)
	return made, p.wrap("create", req.Name, zone, err)
}

func (p *Provider) create(ctx context.Context, req provider.CreateRequest) (string, provider.Instance, error) {
	none := provider.Instance{}
	if !namePattern.MatchString(req.Name) {
		return "", none, permanent(provider.ReasonUnsupported, "name %q, want at most 63 lower-case letters, digits and hyphens, a letter first", req.Name)
	}
	if got, ok := markOf(&computepb.Instance{Labels: labelsOf(req.Mark, nil)}); !ok || got != req.Mark || !labelValue.MatchString(req.Mark.Hash) {
		return "", none, permanent(provider.ReasonUnsupported, "mark %v does not fit into labels", req.Mark)
	}
	plan, err := p.plan(req.Spec)
	if err != nil {
		return "", none, permanent(provider.ReasonUnsupported, "spec: %v", err)
	}
	var holders []error
	var mu sync.Mutex // guards holders
	err = each(p.zones(), func(zone string) error {
		x, err := p.find(ctx, zone, req.Name)
		if err != nil {
			return p.wrap("create", req.Name, zone, err)
		}
		if x != nil {
			mu.Lock()
			defer mu.Unlock()
			holders = append(holders, judge(zone, x, req.Mark))
		}
		return nil
	})
	if len(holders) > 0 {
		return "", none, holders[0]
	}
	if err != nil {
		f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonOf(err), message: "whether the instance exists is not known", cause: err}
		if kind := provider.Kind(err); errors.Is(kind, provider.ErrDenied) || errors.Is(kind, provider.ErrNoCapacity) {
			f.kind = kind
		}
		if e, ok := errors.AsType[*provider.Error](err); ok {
			f.retryAfter = e.RetryAfter
		}
		// Whichever kinds the causes have, only this one counts.
		f.message, f.cause = f.message+": "+err.Error(), nil
		return "", none, f
	}
	var full []string
	worst := &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity}
	for _, zone := range plan.ordered(req.Name) {
		made, err := p.createIn(ctx, zone, req, plan)
		if err == nil {
			return zone, made, nil
		}
		f := classify(err)
		if !errors.Is(f.kind, provider.ErrNoCapacity) {
			return zone, none, f
		}
		full = append(full, zone+": "+f.Error())
		worst.reason = f.reason
		worst.retryAfter = max(worst.retryAfter, f.retryAfter)
	}
	worst.message = strings.Join(full, "; ")
	return "", none, worst
}

// judge says what it means that x has the name of an instance with that mark.
func judge(zone string, x *computepb.Instance, want provider.Mark) *fault {
	got, ok := markOf(x)
	if ok && got.Owner == want.Owner && got.Proxy == want.Proxy && got.Generation == want.Generation {
		return &fault{kind: provider.ErrAlreadyExists, message: fmt.Sprintf("%s is there in %s", x.GetName(), zone)}
	}
	return permanent(provider.ReasonUnknown, "the name %s in %s is held by an instance that is not ours", x.GetName(), zone)
}

// ordered returns the zones in the order in which they are tried. It depends on nothing but the name, so that a
// restarted process begins where the last one did.
func (s *plan) ordered(name string) []string {
	if !s.spread || len(s.zones) < 2 {
		return s.zones
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	first := int(h.Sum32() % uint32(len(s.zones)))
	return append(append([]string(nil), s.zones[first:]...), s.zones[:first]...)
}

// replays bounds how often an answer is taken for that of an operation long ago. The server may remember one for
// each salt, so that more than two in a row means something else.
const replays = 3

func (p *Provider) createIn(ctx context.Context, zone string, req provider.CreateRequest, s *plan) (provider.Instance, error) {
	static := netip.Addr{}
	if p.config.External == ExternalStatic {
		var err error
		if static, err = p.takeAddress(ctx, zone, req.Name); err != nil {
			return provider.Instance{}, err
		}
		defer p.freeAddress(static)
	}
	body := p.body(zone, req, s, static)
	key := zone + "/" + req.Name
	for range replays {
		op, err := p.insert(ctx, zone, req, body, static, p.salt(key))
		if err != nil {
			f := classify(err)
			if errors.Is(f.kind, provider.ErrAlreadyExists) {
				return provider.Instance{}, p.judgeTaken(ctx, zone, req, f)
			}
			return provider.Instance{}, f
		}
		op, err = p.decided(ctx, zone, op)
		if err != nil {
			return provider.Instance{}, err
		}
		if f := operationFault(op); f != nil {
			// The same request id would get the same failure again for as long as the server remembers it.
			p.setSalt(key, op.GetName())
			if errors.Is(f.kind, provider.ErrAlreadyExists) {
				return provider.Instance{}, p.judgeTaken(ctx, zone, req, f)
			}
			return provider.Instance{}, f
		}
		x, err := p.find(ctx, zone, req.Name)
		if err != nil {
			f := classify(err)
			return provider.Instance{}, &fault{kind: provider.ErrOutcomeUnknown, reason: f.reason, message: "it was made and can't be read", cause: f}
		}
		if x == nil {
			// The answer was for an instance of that name that is gone again.
			p.setSalt(key, op.GetName())
			continue
		}
		if f := judge(zone, x, req.Mark); !errors.Is(f.kind, provider.ErrAlreadyExists) {
			return provider.Instance{}, f
		}
		p.setSalt(key, "")
		return p.verified(ctx, zone, x)
	}
	return provider.Instance{}, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown,
		message: "Google says that it was made, and that it does not exist; a Spot instance may have been taken away at once"}
}

// verified refuses an instance that got an identity nobody asked for: whoever gets into the proxy would own it.
func (p *Provider) verified(ctx context.Context, zone string, x *computepb.Instance) (provider.Instance, error) {
	if len(x.GetServiceAccounts()) == 0 {
		return p.instance(zone, x), nil
	}
	f := permanent(provider.ReasonUnsupported, "the instance was given a service account, which none was asked for; it is deleted again")
	if err := p.remove(ctx, handle{zone, x.GetName(), x.GetId()}, x); err != nil {
		f.message += ", which failed: " + err.Error()
	}
	return provider.Instance{}, f
}

// judgeTaken looks at who holds the name.
func (p *Provider) judgeTaken(ctx context.Context, zone string, req provider.CreateRequest, conflict *fault) error {
	x, err := p.find(ctx, zone, req.Name)
	if err != nil || x == nil {
		// It is there for inserts and not for gets: it is being made or deleted.
		return &fault{kind: provider.ErrOutcomeUnknown, reason: provider.ReasonUnknown, message: "the name is taken, by whom can't be read now", cause: conflict.withoutKind()}
	}
	return judge(zone, x, req.Mark)
}

func (f *fault) withoutKind() error { return errors.New(f.Error()) }

func (p *Provider) insert(ctx context.Context, zone string, req provider.CreateRequest, body *computepb.Instance, static netip.Addr, salt string) (*computepb.Operation, error) {
	request := &computepb.InsertInstanceRequest{
		Project: p.config.Project, Zone: zone, InstanceResource: body,
		RequestId: proto.String(requestID(p.config.Project, zone, req, static, salt)),
	}
	var op *computepb.Operation
	info := call{method: "instances.insert", target: zone + "/" + req.Name}
	err := p.do(ctx, info, requestTimeout, func(ctx context.Context, c *clients) error {
		answer, err := c.instances.Insert(ctx, request, once...)
		if err == nil {
			op = answer.Proto()
		}
		return err
	})
	if err == nil {
		return op, nil
	}
	f := classify(err)
	switch {
	case errors.Is(f.kind, provider.ErrAlreadyExists):
	case f.ambiguous && !errors.Is(f.kind, provider.ErrPermanent):
		f.kind = provider.ErrOutcomeUnknown
	case errors.Is(f.kind, provider.ErrNotFound):
		f.kind = provider.ErrPermanent // the zone, the image, the network or the type
	}
	return nil, f
}

// waitTimeout bounds one request for an operation's end. The server holds it for up to two minutes.
const waitTimeout = 130 * time.Second

// waitFloor is the least time between two of them: the server may answer at once without an end.
const waitFloor = time.Second

// decided waits for the end of op. Giving up leaves the outcome unknown.
func (p *Provider) decided(ctx context.Context, zone string, op *computepb.Operation) (*computepb.Operation, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, p.config.OperationTimeout,
		fmt.Errorf("not decided within %s: %w", p.config.OperationTimeout, context.DeadlineExceeded))
	defer cancel()
	for op.GetStatus() != computepb.Operation_DONE {
		begin := time.Now()
		request := &computepb.WaitZoneOperationRequest{Project: p.config.Project, Zone: zone, Operation: op.GetName()}
		next := op
		info := call{method: "zoneOperations.wait", target: zone + "/" + op.GetName()}
		err := p.do(ctx, info, waitTimeout, func(ctx context.Context, c *clients) (err error) {
			next, err = c.operations.Wait(ctx, request, once...)
			return err
		})
		if err != nil {
			f := classify(err)
			return nil, &fault{kind: provider.ErrOutcomeUnknown, reason: f.reason, message: "operation " + op.GetName() + " was accepted and its end is not known", cause: f}
		}
		op = next
		if op.GetStatus() == computepb.Operation_DONE {
			break
		}
		timer := time.NewTimer(max(0, waitFloor-time.Since(begin)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, &fault{kind: provider.ErrOutcomeUnknown, reason: provider.ReasonTimeout,
				message: fmt.Sprintf("operation %s was accepted and is %s", op.GetName(), op.GetStatus()), cause: context.Cause(ctx)}
		}
	}
	return op, nil
}

// requestID makes the same id of the same instance in every process, so that the server recognises a create that is
// sent again after a crash.
func requestID(project, zone string, req provider.CreateRequest, static netip.Addr, salt string) string {
	h := sha256.New()
	for _, part := range []string{"egress insert", project, zone, req.Name, req.Mark.String(), static.String(), salt} {
		h.Write(fmt.Appendf(nil, "%d:%s", len(part), part))
	}
	return uuid([16]byte(h.Sum(nil)), 8)
}

func randomID() string {
	var b [16]byte
	rand.Read(b[:])
	return uuid(b, 4)
}

// uuid formats b as a UUID of that version (RFC 9562: 4 is random, 8 is anyone's own).
func uuid(b [16]byte, version byte) string {
	b[6] = b[6]&0x0f | version<<4
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// maxSalts bounds the memory for names that are never created; without one a create costs one more attempt.
const maxSalts = 4096

func (p *Provider) salt(key string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.salts[key]
}

func (p *Provider) setSalt(key, salt string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if salt == "" {
		delete(p.salts, key)
		return
	}
	if len(p.salts) >= maxSalts {
		clear(p.salts)
	}
	p.salts[key] = salt
}

// takeAddress picks a static address that nothing uses and keeps it from other creates until freeAddress.
func (p *Provider) takeAddress(ctx context.Context, zone, name string) (netip.Addr, error) {
	reserved := map[string]bool{} // by address: whether it is free
	info := call{method: "addresses.list", target: regionOf(zone)}
	err := p.do(ctx, info, requestTimeout, func(ctx context.Context, c *clients) error {
		clear(reserved)
		it := c.addresses.List(ctx, &computepb.ListAddressesRequest{Project: p.config.Project, Region: regionOf(zone)}, once...)
		for {
			a, err := it.Next()
			if errors.Is(err, iterator.Done) {
				return nil
			}
			if err != nil {
				return err
			}
			reserved[a.GetAddress()] = a.GetStatus() == "RESERVED" && len(a.GetUsers()) == 0
		}
	})
	if err != nil {
		f := classify(err)
		if errors.Is(f.kind, provider.ErrNotFound) {
			f.kind = provider.ErrPermanent
		}
		return netip.Addr{}, f
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	known := 0
	for _, a := range p.config.StaticAddresses {
		free, ok := reserved[a.String()]
		if ok {
			known++
		}
		if _, busy := p.taken[a]; free && !busy {
			p.taken[a] = name
			return a, nil
		}
	}
	return netip.Addr{}, &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity,
		message: fmt.Sprintf("of %d static addresses %d are in %s and none of those is free", len(p.config.StaticAddresses), known, regionOf(zone))}
}

func (p *Provider) freeAddress(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, a)
}
