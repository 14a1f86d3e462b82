package gcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/compute/apiv1/computepb"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	"crawl.example.com/egress/provider"
)

// Provider makes instances in one Google Cloud project. It is a provider.Provider, a provider.Checker and a
// provider.Warner, and safe for concurrent use. Nothing runs in the background.
type Provider struct {
	config     Config
	pace       *rate.Limiter
	connecting chan struct{} // held while clients are looked up or made

	// mu guards what follows.
	mu      sync.Mutex
	clients *clients
	closed  bool
	salts   map[string]string     // by zone and name: the failed operation that the next insert must not repeat
	taken   map[netip.Addr]string // static addresses that creates under way have picked, with the instance's name
}

var (
	_ provider.Provider = (*Provider)(nil)
	_ provider.Checker  = (*Provider)(nil)
	_ provider.Warner   = (*Provider)(nil)
)

// New returns a provider. It does no I/O; the first call connects. The error names every field of config that is
// wrong.
func New(config Config) (*Provider, error) {
	filled, err := config.filled()
	if err != nil {
		return nil, err
	}
	return &Provider{
		config:     filled,
		pace:       rate.NewLimiter(rate.Limit(filled.RequestsPerSecond), max(1, int(filled.RequestsPerSecond))),
		connecting: make(chan struct{}, 1),
		salts:      map[string]string{},
		taken:      map[netip.Addr]string{},
	}, nil
}

// Name returns Config.Name.
func (p *Provider) Name() string { return p.config.Name }

// Close drops idle connections. Calls under way finish, later ones fail. It does not block, may be called again and
// returns nil.
func (p *Provider) Close() error {
	p.mu.Lock()
	c := p.clients
	p.clients, p.closed = nil, true
	p.mu.Unlock()
	if c != nil {
		c.base.CloseIdleConnections()
	}
	return nil
}

// zones returns all zones that instances may be in.
func (p *Provider) zones() []string {
	return append(slices.Clone(p.config.Zones), p.config.DrainZones...)
}

// handle is an instance id: zone, name and Google's own number, which no other instance ever has.
type handle struct {
	zone, name string
	number     uint64
}

func (h handle) String() string { return fmt.Sprintf("%s/%s/%d", h.zone, h.name, h.number) }

func parseHandle(id string) (handle, bool) {
	zone, rest, _ := strings.Cut(id, "/")
	name, digits, _ := strings.Cut(rest, "/")
	number, err := strconv.ParseUint(digits, 10, 64)
	h := handle{zone, name, number}
	return h, err == nil && zonePattern.MatchString(zone) && namePattern.MatchString(name) && h.String() == id
}

const (
	instanceFields = "id,name,status,statusMessage,labels,creationTimestamp,deletionProtection,serviceAccounts/email," +
		"networkInterfaces(networkIP,accessConfigs(type,natIP),ipv6AccessConfigs(externalIpv6))"
	// listFields leaves the metadata out: user data of 256 KiB each would make a page a hundred megabytes.
	listFields = "items(" + instanceFields + "),nextPageToken,warning(code,message)"
	// pageSize is the most that Compute gives at once.
	pageSize = 500
)

// find returns the instance of that name in zone, or nil when there is none for sure.
func (p *Provider) find(ctx context.Context, zone, name string) (*computepb.Instance, error) {
	var found *computepb.Instance
	info := call{method: "instances.get", target: zone + "/" + name, fields: instanceFields}
	err := p.do(ctx, info, requestTimeout, func(ctx context.Context, c *clients) (err error) {
		found, err = c.instances.Get(ctx, &computepb.GetInstanceRequest{Project: p.config.Project, Zone: zone, Instance: name}, once...)
		return err
	})
	if err == nil {
		return found, nil
	}
	f := classify(err)
	if errors.Is(f.kind, provider.ErrNotFound) {
		// A project or zone that is not found says nothing about the instance.
		if strings.Contains(f.message, "/instances/"+name) {
			return nil, nil
		}
		f.kind = provider.ErrUnavailable
	}
	return nil, f
}

// findOurs is find for an id. The instance carries a mark.
func (p *Provider) findOurs(ctx context.Context, id string) (*computepb.Instance, handle, error) {
	h, ok := parseHandle(id)
	if !ok {
		return nil, h, &fault{kind: provider.ErrNotFound, message: fmt.Sprintf("id %q was never given", id)}
	}
	x, err := p.find(ctx, h.zone, h.name)
	if err != nil {
		return nil, h, err
	}
	if x == nil || x.GetId() != h.number {
		return nil, h, &fault{kind: provider.ErrNotFound, message: "the instance is gone"}
	}
	if _, ok := markOf(x); !ok {
		return nil, h, permanent(provider.ReasonUnknown, "the instance does not carry our labels, so it is not touched")
	}
	return x, h, nil
}

// Get implements provider.Provider.
func (p *Provider) Get(ctx context.Context, id string) (provider.Instance, error) {
	x, h, err := p.findOurs(ctx, id)
	if err != nil {
		return provider.Instance{}, p.wrap("get", or(h.name, id), h.zone, err)
	}
	return p.instance(h.zone, x), nil
}

// Delete implements provider.Provider. It asks for the instance's labels first. An instance with deletion protection
// is refused with provider.ErrPermanent.
func (p *Provider) Delete(ctx context.Context, id string) error {
	x, h, err := p.findOurs(ctx, id)
	if err == nil {
		err = p.remove(ctx, h, x)
	}
	return p.wrap("delete", or(h.name, id), h.zone, err)
}

func (p *Provider) remove(ctx context.Context, h handle, x *computepb.Instance) error {
	if x.GetDeletionProtection() {
		return permanent(provider.ReasonUnsupported,
			"the instance has deletion protection; to have it deleted: gcloud compute instances update %s --zone=%s --no-deletion-protection", h.name, h.zone)
	}
	switch x.GetStatus() {
	case "STOPPING", "PENDING_STOP", "DEPROVISIONING":
		return nil // on its way; when it stops for another reason the next call deletes it
	}
	request := &computepb.DeleteInstanceRequest{Project: p.config.Project, Zone: h.zone, Instance: h.name, RequestId: proto.String(randomID())}
	var op *computepb.Operation
	info := call{method: "instances.delete", target: h.zone + "/" + h.name}
	err := p.do(ctx, info, requestTimeout, func(ctx context.Context, c *clients) error {
		answer, err := c.instances.Delete(ctx, request, once...)
		if err == nil {
			op = answer.Proto()
		}
		return err
	})
	if err == nil {
		if f := operationFault(op); f != nil {
			return f
		}
		return nil
	}
	f := classify(err)
	if errors.Is(f.kind, provider.ErrNotFound) && !strings.Contains(f.message, "/instances/"+h.name) {
		f.kind = provider.ErrUnavailable
	}
	if f.ambiguous && errors.Is(f.kind, provider.ErrUnavailable) {
		f.kind = provider.ErrOutcomeUnknown
	}
	return f
}

// List implements provider.Provider. It asks all zones at once, for up to 500 instances in a request.
func (p *Provider) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	if err := provider.CheckName(owner); err != nil {
		return nil, p.wrap("list", "", "", permanent(provider.ReasonUnsupported, "owner %v", err))
	}
	zones := p.zones()
	found := make([][]provider.Instance, len(zones))
	errs := make([]error, len(zones))
	var asking sync.WaitGroup
	for i, zone := range zones {
		asking.Go(func() { found[i], errs[i] = p.listZone(ctx, zone, owner) })
	}
	asking.Wait()
	var all []provider.Instance
	var missing provider.PartialError
	for i, zone := range zones {
		if errs[i] != nil {
			missing.Targets = append(missing.Targets, provider.TargetError{Target: zone, Err: p.wrap("list", "", zone, errs[i])})
			continue
		}
		all = append(all, found[i]...)
	}
	switch len(missing.Targets) {
	case 0:
		return all, nil
	case len(zones):
		return nil, missing.Targets[0].Err
	}
	return all, &missing
}

func (p *Provider) listZone(ctx context.Context, zone, owner string) ([]provider.Instance, error) {
	var all []provider.Instance
	request := &computepb.ListInstancesRequest{
		Project: p.config.Project, Zone: zone, Filter: proto.String(fmt.Sprintf("labels.%s = %q", labelOwner, owner)),
	}
	for {
		var page []*computepb.Instance
		var next string
		info := call{method: "instances.list", target: zone, fields: listFields}
		err := p.do(ctx, info, requestTimeout, func(ctx context.Context, c *clients) (err error) {
			it := c.instances.List(ctx, request, once...)
			if page, next, err = it.InternalFetch(pageSize, request.GetPageToken()); err != nil {
				return err
			}
			if whole, ok := it.Response.(*computepb.InstanceList); ok && whole.GetWarning().GetCode() != "" && whole.GetWarning().GetCode() != "NO_RESULTS_ON_PAGE" {
				return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnreachable, word: whole.GetWarning().GetCode(), message: "the list is not complete"}
			}
			return nil
		})
		if err != nil {
			f := classify(err)
			if errors.Is(f.kind, provider.ErrNotFound) || errors.Is(f.kind, provider.ErrPermanent) {
				f.kind = provider.ErrUnavailable // nothing is known about instances in there
			}
			return nil, f
		}
		for _, x := range page {
			if m, ok := markOf(x); ok && m.Owner == owner {
				all = append(all, p.instance(zone, x))
			}
		}
		if next == "" {
			return all, nil
		}
		request.PageToken = proto.String(next)
	}
}

// Labels that hold the mark.
const (
	labelPrefix      = "egress-"
	labelOwner       = labelPrefix + "owner"
	labelProxy       = labelPrefix + "proxy"
	labelGeneration  = labelPrefix + "generation"
	labelHashVersion = labelPrefix + "hash-version"
	labelHash        = labelPrefix + "hash"
)

func labelsOf(m provider.Mark, others map[string]string) map[string]string {
	labels := map[string]string{
		labelOwner: m.Owner, labelProxy: m.Proxy, labelGeneration: strconv.FormatInt(m.Generation, 10),
		labelHashVersion: strconv.Itoa(m.HashVersion), labelHash: m.Hash,
	}
	maps.Copy(labels, others)
	return labels
}

// markOf reads what labelsOf wrote. It reports false when anything is missing or damaged: such an instance is not
// ours.
func markOf(x *computepb.Instance) (provider.Mark, bool) {
	labels := x.GetLabels()
	m := provider.Mark{Owner: labels[labelOwner], Proxy: labels[labelProxy], Hash: labels[labelHash]}
	var err1, err2 error
	m.Generation, err1 = strconv.ParseInt(labels[labelGeneration], 10, 64)
	m.HashVersion, err2 = strconv.Atoi(labels[labelHashVersion])
	ok := err1 == nil && err2 == nil && m.Generation > 0 && m.HashVersion > 0 && m.Hash != "" &&
		provider.CheckName(m.Owner) == nil && provider.CheckName(m.Proxy) == nil
	return m, ok
}

// instance returns x as the pool sees it.
func (p *Provider) instance(zone string, x *computepb.Instance) provider.Instance {
	mark, _ := markOf(x)
	made := provider.Instance{
		ID: handle{zone, x.GetName(), x.GetId()}.String(), Name: x.GetName(), Mark: mark, Host: zone,
		State: stateOf(x.GetStatus()), Address: p.address(x), Message: x.GetStatusMessage(),
	}
	made.Created, _ = time.Parse(time.RFC3339, x.GetCreationTimestamp())
	if made.State != provider.StateRunning && made.Message == "" {
		made.Message = "Google says " + x.GetStatus()
	}
	return made
}

// stateOf never says running or deleting of a status that is new to it.
func stateOf(status string) provider.State {
	switch status {
	case "RUNNING":
		return provider.StateRunning
	case "PROVISIONING", "STAGING", "PENDING", "REPAIRING":
		return provider.StatePending
	case "STOPPING", "PENDING_STOP", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED":
		return provider.StateStopped
	case "DEPROVISIONING":
		return provider.StateDeleting
	}
	return provider.StateUnknown
}

// address returns where the proxy is reached, which changes when an ephemeral address is given up at a stop.
func (p *Provider) address(x *computepb.Instance) string {
	interfaces := x.GetNetworkInterfaces()
	if len(interfaces) == 0 {
		return ""
	}
	if p.config.External == ExternalNone {
		return interfaces[0].GetNetworkIP()
	}
	if access := interfaces[0].GetAccessConfigs(); len(access) > 0 {
		return access[0].GetNatIP()
	}
	return ""
}

// each runs f for every zone at once and joins the errors.
func each(zones []string, f func(zone string) error) error {
	errs := make([]error, len(zones))
	var running sync.WaitGroup
	for i, zone := range zones {
		running.Go(func() { errs[i] = f(zone) })
	}
	running.Wait()
	return errors.Join(errs...)
}
