package proxmox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// Provider makes instances on one Proxmox VE cluster. It is a provider.Provider, a provider.Checker and a
// provider.Warner, and safe for concurrent use. Nothing runs in the background.
type Provider struct {
	config Config
	connections
	cloning map[string]chan struct{} // by node: a slot for each clone that may run

	// mu guards what follows.
	mu      sync.Mutex
	names   map[string]*nameLock
	known   map[int]known     // what the configurations of VMs said, by VMID
	locked  map[int]time.Time // since when a VM has been seen with the lock clone
	taken   map[int]string    // VMIDs that creates under way have picked, with the instance's name
	placing map[string]load   // by instance name: what creates under way will use
}

// load is what a create under way will use of a node.
type load struct {
	node  string
	mib   int
	group string
}

// nameLock is held while an instance is made or deleted.
type nameLock struct {
	slot  chan struct{}
	users int
}

var (
	_ provider.Provider = (*Provider)(nil)
	_ provider.Checker  = (*Provider)(nil)
	_ provider.Warner   = (*Provider)(nil)
)

// New returns a provider. Besides reading Config.CAFile it does no I/O; the first call connects. The error names every
// field of config that is wrong.
func New(config Config) (*Provider, error) {
	filled, err := config.filled()
	if err != nil {
		return nil, err
	}
	p := &Provider{
		config: filled, cloning: map[string]chan struct{}{}, names: map[string]*nameLock{}, known: map[int]known{},
		locked: map[int]time.Time{}, taken: map[int]string{}, placing: map[string]load{},
	}
	p.asking = make(chan struct{}, 1)
	for _, n := range filled.Nodes {
		p.endpoints = append(p.endpoints, newEndpoint(&p.config, n))
		p.cloning[n.Name] = make(chan struct{}, filled.ClonesPerNode)
	}
	return p, nil
}

// Name returns Config.Name.
func (p *Provider) Name() string { return p.config.Name }

// Close drops idle connections. Requests under way finish, later ones fail. It does not block, may be called again and
// returns nil.
func (p *Provider) Close() error {
	p.closed.Store(true)
	for _, e := range p.endpoints {
		e.transport.CloseIdleConnections()
	}
	return nil
}

// lock waits for the turn of an instance's name.
func (p *Provider) lock(ctx context.Context, name string) (unlock func(), err error) {
	p.mu.Lock()
	l := p.names[name]
	if l == nil {
		l = &nameLock{slot: make(chan struct{}, 1)}
		p.names[name] = l
	}
	l.users++
	p.mu.Unlock()
	leave := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(p.names, name)
		}
	}
	if ctx.Err() == nil {
		select {
		case l.slot <- struct{}{}:
			return func() {
				<-l.slot
				leave()
			}, nil
		case <-ctx.Done():
		}
	}
	leave()
	return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: context.Cause(ctx)}
}

// handle is an instance's id: the VMID, a number of ours that no other VM ever has, and the name.
type handle struct {
	vmid  int
	nonce string
	name  string
}

var noncePattern = regexp.MustCompile(`^[0-9a-f]{8}$`)

func newNonce() string {
	var b [4]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func (h handle) String() string { return fmt.Sprintf("%d/%s/%s", h.vmid, h.nonce, h.name) }

func parseHandle(id string) (handle, bool) {
	digits, rest, _ := strings.Cut(id, "/")
	nonce, name, _ := strings.Cut(rest, "/")
	vmid, err := strconv.Atoi(digits)
	h := handle{vmid, nonce, name}
	return h, err == nil && vmid >= lowestVMID && vmid <= highestVMID && noncePattern.MatchString(nonce) && namePattern.MatchString(name) && h.String() == id
}

// seedFile is the name of an instance's seed. The entry and the nonce keep clusters that share a storage apart.
func (p *Provider) seedFile(h handle) string {
	return fmt.Sprintf("egress-%s-%s-%s.iso", p.config.Name, h.name, h.nonce)
}

func (p *Provider) seedVolume(h handle) string { return p.config.SeedStorage + ":iso/" + p.seedFile(h) }

// note is what a VM's description holds besides the mark. It is written with the clone itself, so there is no moment at
// which a VM of ours lacks it once its configuration is there.
type note struct {
	entry, nonce, group, address string
	vmid                         int // which a copy of the VM, made by hand or restored from a backup, does not have
	created                      time.Time
}

const notePrefix = "egress-vm/1"

func (n note) String() string {
	s := fmt.Sprintf("%s entry=%s vmid=%d nonce=%s created=%s", notePrefix, n.entry, n.vmid, n.nonce, n.created.UTC().Format(time.RFC3339))
	if n.group != "" {
		s += " group=" + hex.EncodeToString([]byte(n.group))
	}
	if n.address != "" {
		s += " address=" + n.address
	}
	return s
}

// parseNote reads what String wrote, among other lines.
func parseNote(description string) (note, bool) {
	var found note
	n := 0
	for line := range strings.Lines(description) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != notePrefix {
			continue
		}
		n++
		found = note{}
		for _, f := range fields[1:] {
			k, v, _ := strings.Cut(f, "=")
			switch k {
			case "entry":
				found.entry = v
			case "vmid":
				found.vmid, _ = strconv.Atoi(v)
			case "nonce":
				found.nonce = v
			case "created":
				found.created, _ = time.Parse(time.RFC3339, v)
			case "group":
				group, _ := hex.DecodeString(v)
				found.group = string(group)
			case "address":
				found.address = v
			}
		}
	}
	return found, n == 1 && found.entry != "" && noncePattern.MatchString(found.nonce)
}

// row is a VM in a list.
type row struct {
	VMID     number `json:"vmid"`
	Kind     text   `json:"type"` // in the cluster's list only
	Node     text   `json:"node"` // in the cluster's list only
	Name     text   `json:"name"`
	Status   text   `json:"status"`
	Lock     text   `json:"lock"`
	Template number `json:"template"`

	live bool // from the node itself, so that name, status and template are not stale
}

// vmConfig is a VM's configuration.
type vmConfig map[string]text

func (c vmConfig) lock() string { return string(c["lock"]) }

// hibernated reports whether starting the VM would resume a saved state instead of booting.
func (c vmConfig) hibernated() bool {
	return c.lock() == "suspended" || c.lock() == "suspending" || c["vmstate"] != ""
}

// known is whose a VM is.
type known struct {
	name string // the VM's
	ours bool   // of this entry
	mark provider.Mark
	note note
	at   time.Time
}

// identify reads mark and note out of the configuration of a VM.
func (p *Provider) identify(vmid int, c vmConfig) known {
	k := known{name: string(c["name"]), at: time.Now()}
	description := string(c["description"])
	mark, marked := provider.ParseMark(description)
	note, noted := parseNote(description)
	if marked && noted && c["template"] != "1" {
		k.mark, k.note = mark, note
		k.ours = note.entry == p.config.Name && note.vmid == vmid && k.name == provider.InstanceName(mark.Owner, mark.Proxy, mark.Generation)
	}
	return k
}

// vm is a VM in our range, and whose it is.
type vm struct {
	row
	known
}

func (v vm) handle() handle { return handle{int(v.VMID), v.note.nonce, v.known.name} }

// view is what the cluster looks like.
type view struct {
	rows    map[int]row
	used    map[int]bool     // VMIDs of anything at all
	missing map[string]error // nodes that did not answer
}

// observe asks every node for its VMs, and the cluster for those on other nodes. Names and states come from the nodes:
// the cluster's list is late with them. VMIDs and nodes in the cluster's list are up to date even for nodes that are
// down, whose VMs are therefore known to exist.
func (p *Provider) observe(ctx context.Context) (view, error) {
	v := view{rows: map[int]row{}, used: map[int]bool{}, missing: map[string]error{}}
	var cluster []row
	var clusterErr error
	lists := make([][]row, len(p.endpoints))
	errs := make([]error, len(p.endpoints))
	var asking sync.WaitGroup
	asking.Go(func() {
		clusterErr = p.any(ctx, request{method: http.MethodGet, path: "/cluster/resources?type=vm"}, &cluster)
	})
	for i, e := range p.endpoints {
		asking.Go(func() { errs[i] = p.look(ctx, e, "/nodes/"+e.node.Name+"/qemu", &lists[i]) })
	}
	asking.Wait()
	if clusterErr != nil {
		return v, clusterErr
	}
	for i, e := range p.endpoints {
		if errs[i] != nil {
			f := classify(errs[i])
			if errors.Is(f.kind, provider.ErrDenied) {
				if !slices.Contains(errs, nil) {
					return v, f
				}
				f.kind = provider.ErrUnavailable // others take the token, so it is this node that can't read it
			}
			v.missing[e.node.Name] = f
			continue
		}
		for _, r := range lists[i] {
			r.Node, r.live = text(e.node.Name), true
			v.rows[int(r.VMID)] = r
			v.used[int(r.VMID)] = true
		}
	}
	for _, r := range cluster {
		v.used[int(r.VMID)] = true
		if _, seen := v.rows[int(r.VMID)]; !seen && r.Kind == "qemu" {
			v.rows[int(r.VMID)] = r
		}
	}
	// After the lists, so that rights which were withdrawn before do not make them look complete.
	return v, p.seesEverything(ctx)
}

// seesEverything makes sure that lists are whole: Proxmox leaves out what the token may not see, without a word.
func (p *Provider) seesEverything(ctx context.Context) error {
	var tree grants
	if err := p.any(ctx, request{method: http.MethodGet, path: "/access/permissions?path=/vms"}, &tree); err != nil {
		return err
	}
	if !tree.have("/vms", "VM.Audit") {
		return &fault{kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied,
			message: "the token lacks VM.Audit on /vms, without which lists leave out VMs and duplicates would be made"}
	}
	return nil
}

// grants are privileges by path, each with whether it counts below the path too.
type grants map[string]map[string]number

// have reports whether a privilege is granted at a path: at /vms that means on the VMs. What a pool grants does not propagate, and
// counts for what is in the pool all the same.
func (g grants) have(path, privilege string) bool {
	propagates, granted := g[path][privilege]
	return granted && (propagates != 0 || path != "/vms")
}

// configOf reads the configuration of a VM on a node. A fault with absent says that it is not there, and maybe elsewhere.
func (p *Provider) configOf(ctx context.Context, node string, vmid int) (vmConfig, error) {
	var c vmConfig
	err := p.lookOn(ctx, node, fmt.Sprintf("/nodes/%s/qemu/%d/config", node, vmid), &c)
	if err == nil && c["digest"] == "" {
		err = &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnsupported, cause: errNothing}
	}
	return c, err
}

// where returns the node of a VM, and "" when the whole cluster has none. VMIDs and nodes in the cluster's list are those of
// the cluster file system and never late, except on a node that has lost the others: what such a one does not know of may
// have been made since. So nothing is gone before a node says so that is with at least half of the cluster, and with just
// half of it only when the others can't be asked.
func (p *Provider) where(ctx context.Context, vmid int) (string, error) {
	first := int(p.preferred.Load())
	var failed error
	half := false
	for i := range p.endpoints {
		at := (first + i) % len(p.endpoints)
		node, up, all, err := p.whereBy(ctx, p.endpoints[at], vmid)
		switch {
		case err != nil:
			if f := classify(err); errors.Is(f.kind, provider.ErrDenied) || ctx.Err() != nil {
				return "", err
			}
			failed = or(failed, err)
			continue
		case node != "":
			p.preferred.Store(int32(at))
			return node, nil
		case 2*up > all:
			p.preferred.Store(int32(at))
			return "", p.seesEverything(ctx)
		case 2*up == all:
			half = true
		default:
			failed = unavailable(provider.ReasonUnreachable, "node %s has lost the others, so it can't tell whether VM %d is gone", p.endpoints[at].node.Name, vmid)
		}
	}
	if half {
		return "", p.seesEverything(ctx)
	}
	return "", failed
}

// whereBy asks one node where a VM is and, when it knows of none, how many nodes of the cluster it sees.
func (p *Provider) whereBy(ctx context.Context, e *endpoint, vmid int) (node string, up, all int, err error) {
	var cluster []row
	if err := p.look(ctx, e, "/cluster/resources?type=vm", &cluster); err != nil {
		return "", 0, 0, err
	}
	for _, r := range cluster {
		if int(r.VMID) == vmid && r.Kind == "qemu" {
			return string(r.Node), 0, 0, nil
		}
	}
	var nodes []nodeRow
	if err := p.look(ctx, e, "/nodes", &nodes); err != nil {
		return "", 0, 0, err
	}
	return "", online(nodes), len(nodes), nil
}

const (
	// knownFor is the longest that the owner of a VM is believed to stay the same, as long as its name does.
	knownFor = 5 * time.Minute
	// configsAtOnce bounds the configurations that one list reads at once.
	configsAtOnce = 8
)

// instanceName matches the names that instances have.
var instanceName = regexp.MustCompile(`^[a-z][a-z0-9-]*--[a-z][a-z0-9-]*--[0-9]+$`)

// owners finds out whose the VMs are that are in our range, or are called like an instance: those were made when the range
// was another one. Nodes that fail are added to what is missing.
func (p *Provider) owners(ctx context.Context, seen *view) ([]vm, error) {
	var mu sync.Mutex // guards found, denied and seen.missing
	var found []vm
	var denied error
	slots := make(chan struct{}, configsAtOnce)
	var asking sync.WaitGroup
	for _, id := range slices.Sorted(maps.Keys(seen.rows)) {
		r := seen.rows[id]
		inRange := id >= p.config.VMIDMin && id <= p.config.VMIDMax
		mu.Lock()
		skip := !inRange && !instanceName.MatchString(string(r.Name)) || r.live && r.Template != 0 || seen.missing[string(r.Node)] != nil
		mu.Unlock()
		if skip {
			continue
		}
		p.mu.Lock()
		k, ok := p.known[id]
		p.mu.Unlock()
		if ok && r.live && k.name == string(r.Name) && time.Since(k.at) < knownFor {
			mu.Lock()
			found = append(found, vm{r, k})
			mu.Unlock()
			continue
		}
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			k, r, err := p.owner(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			f := classifyNil(err)
			switch {
			case err == nil:
				found = append(found, vm{r, k})
			case f.absent: // gone or moved since the list
			case errors.Is(f.kind, provider.ErrDenied):
				denied = err
			default:
				seen.missing[string(r.Node)] = err
			}
		})
	}
	asking.Wait()
	if len(seen.missing) > 0 {
		found = slices.DeleteFunc(found, func(v vm) bool { return seen.missing[string(v.Node)] != nil })
	}
	p.forget(seen)
	slices.SortFunc(found, func(a, b vm) int { return int(a.VMID - b.VMID) })
	return found, denied
}

// owner reads the configuration of a VM, and its state when only the cluster's list, which is late, has it. A VM that is on
// its way to another node is looked for there: it is not gone.
func (p *Provider) owner(ctx context.Context, r row) (known, row, error) {
	id := int(r.VMID)
	c, err := p.configOf(ctx, string(r.Node), id)
	if err != nil && classify(err).absent {
		node, whereErr := p.where(ctx, id)
		if whereErr != nil || node == "" {
			return known{}, r, or(whereErr, err)
		}
		r.Node, r.live = text(node), false
		if c, err = p.configOf(ctx, node, id); err != nil && classify(err).absent {
			err = unavailable(provider.ReasonUnknown, "VM %d is moving to another node", id)
		}
	}
	if err != nil {
		return known{}, r, err
	}
	k := p.identify(id, c)
	r.Name, r.Lock = c["name"], c["lock"]
	if c.lock() == "" {
		p.remember(id, k)
	}
	if !r.live && k.ours {
		var current row
		if err := p.lookOn(ctx, string(r.Node), fmt.Sprintf("/nodes/%s/qemu/%d/status/current", r.Node, id), &current); err != nil {
			return k, r, err
		}
		r.Status = current.Status
	}
	return k, r, nil
}

// remember notes whose a VM is. Not all are forgotten at once, so that no list has to read them all again.
func (p *Provider) remember(vmid int, k known) {
	k.at = k.at.Add(-mathrand.N(knownFor / 2))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[vmid] = k
}

// forget drops what is known of VMs that are gone, and notes since when others have been cloned.
func (p *Provider) forget(seen *view) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.known, func(id int, _ known) bool { _, ok := seen.rows[id]; return !ok })
	maps.DeleteFunc(p.locked, func(id int, _ time.Time) bool { return seen.rows[id].Lock != "clone" })
	for id, r := range seen.rows {
		if _, ok := p.locked[id]; !ok && r.Lock == "clone" {
			p.locked[id] = time.Now()
		}
	}
}

// abandoned reports whether a VM has had the lock clone for longer than any clone takes.
func (p *Provider) abandoned(vmid int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, ok := p.locked[vmid]
	if !ok {
		p.locked[vmid] = time.Now()
	}
	return ok && time.Since(since) > p.config.CloneTimeout
}

// List implements provider.Provider. It asks every node at once, and reads the configuration of each VM in the range
// that it has not seen before.
func (p *Provider) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	if err := provider.CheckName(owner); err != nil {
		return nil, p.wrap("list", "", "", permanent(provider.ReasonUnsupported, "owner %v", err))
	}
	seen, err := p.observe(ctx)
	if err != nil {
		return nil, p.wrap("list", "", "", readable(err))
	}
	vms, err := p.owners(ctx, &seen)
	if err != nil {
		return nil, p.wrap("list", "", "", readable(err))
	}
	var all []provider.Instance
	for _, v := range vms {
		if v.ours && v.mark.Owner == owner {
			all = append(all, p.instance(v))
		}
	}
	if len(seen.missing) == 0 {
		return all, nil
	}
	partial := &provider.PartialError{}
	for _, node := range slices.Sorted(maps.Keys(seen.missing)) {
		partial.Targets = append(partial.Targets, provider.TargetError{Target: node, Err: p.wrap("list", "", node, readable(seen.missing[node]))})
	}
	if len(partial.Targets) >= len(p.endpoints) && len(all) == 0 {
		return nil, partial.Targets[0].Err
	}
	return all, partial
}

// readable turns what a read can't mean into ErrUnavailable.
func readable(err error) error {
	f := classify(err)
	if errors.Is(f.kind, provider.ErrDenied) || errors.Is(f.kind, provider.ErrUnavailable) {
		return f
	}
	g := *f
	g.kind = provider.ErrUnavailable
	return &g
}

// instance returns v as the pool sees it, without an address that has to be asked for.
func (p *Provider) instance(v vm) provider.Instance {
	x := provider.Instance{ID: v.handle().String(), Name: v.known.name, Mark: v.mark, Host: string(v.Node), Created: v.note.created, Address: v.note.address}
	if e := p.endpointOf(x.Host); e == nil || e.node.Drain {
		x.Evacuate = true
		x.Message = "node " + x.Host + " is to be emptied or not among Nodes"
	}
	p.mu.Lock()
	_, making := p.placing[x.Name]
	p.mu.Unlock()
	switch lock := string(v.Lock); {
	case lock == "clone", lock == "create":
		x.State = provider.StatePending
		x.Message = "being cloned"
	case lock == "destroyed":
		x.State = provider.StateDeleting
	case lock == "suspended", lock == "suspending":
		x.State = provider.StateStopped
		x.Message = fmt.Sprintf("VM %d is hibernated and will not be started; resume it by hand (qm resume %d) or have it replaced", int(v.VMID), int(v.VMID))
	case v.Status == "running":
		x.State = provider.StateRunning
		if making {
			x.State = provider.StatePending
		}
	case making:
		x.State = provider.StatePending
	case v.Status == "stopped":
		x.State = provider.StateStopped
	default:
		x.State = provider.StateUnknown
	}
	return x
}

// find returns the VM that an id names, with its configuration. It is ErrNotFound only when the cluster has no such VM
// or another one in its place.
func (p *Provider) find(ctx context.Context, id string) (vm, vmConfig, handle, error) {
	h, ok := parseHandle(id)
	if !ok {
		return vm{}, nil, h, &fault{kind: provider.ErrNotFound, reason: provider.ReasonUnknown, message: fmt.Sprintf("id %q was never given", id)}
	}
	node, err := p.where(ctx, h.vmid)
	if err != nil {
		return vm{}, nil, h, readable(err)
	}
	if node == "" {
		return vm{}, nil, h, &fault{kind: provider.ErrNotFound, reason: provider.ReasonUnknown, message: fmt.Sprintf("VM %d is gone", h.vmid)}
	}
	v := vm{row: row{VMID: number(h.vmid), Node: text(node)}}
	if !nodePattern.MatchString(node) {
		return v, nil, h, unavailable(provider.ReasonUnsupported, "node %q has no name that could be asked for", node)
	}
	c, err := p.configOf(ctx, node, h.vmid)
	if err != nil {
		return v, nil, h, readable(err)
	}
	v.known = p.identify(h.vmid, c)
	v.Name, v.Lock = c["name"], c["lock"]
	same := v.note.entry == p.config.Name && v.note.nonce == h.nonce || p.attached(c, h) != ""
	switch {
	case v.ours && v.handle() == h:
		return v, c, h, nil
	case same:
		return v, c, h, permanent(provider.ReasonUnknown,
			"VM %d on %s was %s and has been renamed or has lost our mark by hand, so it is not touched; give it back its name and description, or destroy it", h.vmid, node, h.name)
	case v.mark.Owner != "" || v.known.name != h.name && (v.known.name != "" || c.lock() == ""):
		return v, c, h, &fault{kind: provider.ErrNotFound, reason: provider.ReasonUnknown, message: fmt.Sprintf("VM %d is another one now", h.vmid)}
	case v.known.name == "":
		what := "it is asked for again when that is gone"
		switch c.lock() { // with the first two the name is to come, and with the last nothing else is left
		case "clone", "create", "destroyed":
			what = fmt.Sprintf("it is being made or destroyed, or what did that has died: then, as root, qm unlock %d && qm destroy %d", h.vmid, h.vmid)
		}
		return v, c, h, unavailable(provider.ReasonUnknown, "VM %d on %s has the lock %q and no name; %s", h.vmid, node, c.lock(), what)
	}
	return v, c, h, permanent(provider.ReasonUnknown, "VM %d on %s does not carry our mark in its description, so it is not touched", h.vmid, node)
}

// Get implements provider.Provider. It asks the guest's agent for the address; what the agent says is in Message.
func (p *Provider) Get(ctx context.Context, id string) (provider.Instance, error) {
	v, c, h, err := p.find(ctx, id)
	if err != nil {
		return provider.Instance{}, p.wrap("get", or(h.name, id), string(v.Node), err)
	}
	var current row
	path := fmt.Sprintf("/nodes/%s/qemu/%d", v.Node, h.vmid)
	if err := p.get(ctx, string(v.Node), path+"/status/current", &current); err != nil {
		return provider.Instance{}, p.wrap("get", h.name, string(v.Node), readable(err))
	}
	v.Status = current.Status
	if c.hibernated() && v.Lock == "" {
		v.Lock = "suspended"
	}
	x := p.instance(v)
	if x.State == provider.StateRunning && x.Address == "" {
		address, why, err := p.address(ctx, string(v.Node), h.vmid, c)
		if err != nil {
			return provider.Instance{}, p.wrap("get", h.name, string(v.Node), err)
		}
		x.Address = address
		x.Message = or(why, x.Message)
	}
	return x, nil
}

// Warnings implements provider.Warner.
func (p *Provider) Warnings(spec provider.Spec) []string { return warnings(spec) }
