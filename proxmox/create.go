package proxmox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"crawl.example.com/egress/provider"
)

const (
	// namelessGrace is how long a VM in our range may be without a name before it is taken for the remains of a clone
	// that died. Proxmox writes the name right after the lock.
	namelessGrace = 30 * time.Second
	// collisions is how many VMIDs are tried when others keep taking them.
	collisions = 20
	// uploads is how often a seed is sent when the answer gets lost.
	uploads = 3
)

// settle is how long to look for what a request with a lost answer may have done.
func (p *Provider) settle() time.Duration { return p.config.RequestTimeout / 3 }

// pace is how long to wait before looking again at what began then.
func pace(begin time.Time) time.Duration {
	return min(max(time.Since(begin)/4, 50*time.Millisecond), time.Second)
}

// Create implements provider.Provider. It clones the template, configures the clone, uploads and attaches the seed and
// starts the VM. The clone carries the mark from the beginning, so whatever an interrupted create has left is found by
// its name, and finished or removed by the next one.
func (p *Provider) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	s, err := p.plan(req.Spec)
	if err != nil {
		return provider.Instance{}, p.wrap("create", req.Name, "", permanent(provider.ReasonUnsupported, "%v", err))
	}
	if want := provider.InstanceName(req.Mark.Owner, req.Mark.Proxy, req.Mark.Generation); req.Name != want || !namePattern.MatchString(req.Name) {
		return provider.Instance{}, p.wrap("create", req.Name, "", permanent(provider.ReasonUnsupported, "the name is not that of the mark, want %q", want))
	}
	unlock, err := p.lock(ctx, req.Name)
	if err != nil {
		return provider.Instance{}, p.wrap("create", req.Name, "", err)
	}
	defer unlock()
	x, err := p.create(ctx, req, s)
	if err != nil {
		return provider.Instance{}, p.wrap("create", req.Name, x.Host, outcome(err))
	}
	return x, nil
}

// outcome turns a failure of something that may have been done into ErrOutcomeUnknown.
func outcome(err error) error {
	f := classify(err)
	if !f.ambiguous || !errors.Is(f.kind, provider.ErrUnavailable) {
		return err
	}
	g := *f
	g.kind = provider.ErrOutcomeUnknown
	return &g
}

func (p *Provider) create(ctx context.Context, req provider.CreateRequest, s *plan) (provider.Instance, error) {
	seen, vms, err := p.survey(ctx, req.Name)
	if err != nil {
		return provider.Instance{}, readable(err)
	}
	if err := p.outOfSight(req.Name, &seen); err != nil {
		return provider.Instance{}, err
	}
	for _, v := range vms {
		if v.ours && v.known.name == req.Name {
			x, gone, err := p.resume(ctx, v, req, s)
			if !gone {
				return x, err
			}
			delete(seen.rows, int(v.VMID))
		}
	}
	for _, r := range seen.rows {
		if r.live && string(r.Name) == req.Name && seen.missing[string(r.Node)] != nil {
			return provider.Instance{}, unavailable(provider.ReasonUnreachable, "VM %d on %s has the name, and whose it is can't be read: %v",
				int(r.VMID), r.Node, seen.missing[string(r.Node)])
		}
		if r.live && string(r.Name) == req.Name && !slices.ContainsFunc(vms, func(v vm) bool { return v.VMID == r.VMID && v.ours }) {
			return provider.Instance{}, permanent(provider.ReasonUnsupported, "VM %d on %s has the name and is not ours; rename or remove it", int(r.VMID), r.Node)
		}
	}
	nodes, refusals, err := p.candidates(ctx, s, &seen, vms, req)
	if err != nil {
		return provider.Instance{}, readable(err)
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.placing, req.Name)
	}()
	for {
		c, ok := p.take(&nodes, &refusals, s, req.Name)
		if !ok {
			return provider.Instance{}, verdict(refusals)
		}
		x, err := p.createOn(ctx, c, req, s, &seen)
		if err == nil {
			x.Message = c.why
			return x, nil
		}
		f := classify(err)
		x.Host = c.node.Name
		if f.ambiguous || ctx.Err() != nil || !p.elsewhere(f) {
			return x, err
		}
		// Nothing is left on this node, and another one may do.
		refusals = append(refusals, refusal{c.node.Name, f})
		p.config.Logger.WarnContext(ctx, "proxmox: a create failed, trying the next node", "provider", p.config.Name, "node", c.node.Name, "instance", req.Name, "error", f.Error())
	}
}

// refusal is why a node does not take an instance.
type refusal struct {
	node string
	why  *fault
}

// verdict says what follows from the refusals of all nodes. As long as one of them may pass by itself, the whole does: what is
// to be done is what the most hopeful of them asks for.
func verdict(refusals []refusal) *fault {
	if len(refusals) == 1 {
		f := *refusals[0].why
		f.message = refusals[0].node + ": " + f.message
		return &f
	}
	var all []string
	for _, r := range refusals {
		all = append(all, r.node+": "+r.why.Error())
	}
	f := &fault{message: "no node can take it: " + strings.Join(all, "; ")}
	for _, kind := range []error{provider.ErrNoCapacity, provider.ErrUnavailable, provider.ErrDenied, provider.ErrPermanent} {
		for _, r := range refusals {
			if f.kind == nil && errors.Is(r.why.kind, kind) {
				f.kind, f.reason = kind, r.why.reason
			}
		}
	}
	return f
}

// elsewhere reports whether a failure is one node's own.
func (p *Provider) elsewhere(f *fault) bool {
	return errors.Is(f.kind, provider.ErrNoCapacity) || errors.Is(f.kind, provider.ErrUnavailable) && f.reason != provider.ReasonCredentialsUnavailable ||
		f.reason == provider.ReasonStorageNotFound || f.reason == provider.ReasonTemplateNotFound
}

// survey lists the cluster before a create. While a clone in our range has no name yet, it may be that of an earlier
// attempt, so it is waited for.
func (p *Provider) survey(ctx context.Context, name string) (view, []vm, error) {
	for begin := time.Now(); ; {
		seen, err := p.observe(ctx)
		if err != nil {
			return seen, nil, err
		}
		vms, err := p.owners(ctx, &seen)
		if err != nil {
			return seen, nil, err
		}
		if !p.nameless(vms) || time.Since(begin) > namelessGrace {
			return seen, vms, nil
		}
		p.config.Logger.DebugContext(ctx, "proxmox: waiting for the name of a clone", "provider", p.config.Name, "instance", name)
		if err := sleep(ctx, pace(begin)); err != nil {
			return seen, nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: err}
		}
	}
}

// outOfSight is an error when the name is that of a VM which is on a node that does not answer.
func (p *Provider) outOfSight(name string, seen *view) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, k := range p.known {
		node := string(seen.rows[id].Node)
		if k.ours && k.name == name && seen.missing[node] != nil {
			return unavailable(provider.ReasonUnreachable, "VM %d has the name and is on %s, which does not answer: %v", id, node, seen.missing[node])
		}
	}
	return nil
}

// nameless reports whether a clone in our range that this process has not begun has no name yet.
func (p *Provider) nameless(vms []vm) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, v := range vms {
		since, locked := p.locked[int(v.VMID)]
		_, mine := p.taken[int(v.VMID)]
		if v.known.name == "" && v.Lock == "clone" && !mine && (!locked || time.Since(since) < namelessGrace) {
			return true
		}
	}
	return false
}

// resume takes up what an earlier create has made. Gone says that it was removed and a new one is to be made.
func (p *Provider) resume(ctx context.Context, v vm, req provider.CreateRequest, s *plan) (_ provider.Instance, gone bool, _ error) {
	h, node := v.handle(), string(v.Node)
	at := provider.Instance{Host: node}
	c, err := p.unlocked(ctx, node, h)
	if err != nil {
		return at, false, err
	}
	if c.hibernated() {
		return at, false, permanent(provider.ReasonUnsupported, "VM %d on %s is hibernated and is not started; resume it by hand (qm resume %d) or destroy it", h.vmid, node, h.vmid)
	}
	if lock := c.lock(); lock != "" {
		return at, false, unavailable(provider.ReasonUnknown, "VM %d on %s has the lock %q", h.vmid, node, lock)
	}
	running, err := p.isRunning(ctx, node, h.vmid)
	if err != nil {
		return at, false, readable(err)
	}
	if running || p.attached(c, h) != "" && v.mark.Hash != req.Mark.Hash {
		return at, false, &fault{kind: provider.ErrAlreadyExists, reason: provider.ReasonUnknown, message: fmt.Sprintf("VM %d on %s", h.vmid, node)}
	}
	if v.mark == req.Mark {
		err := p.finish(ctx, node, h, s, req)
		if err == nil {
			return p.made(node, h, v.known, "finished after an interruption"), false, nil
		}
		if !p.removable(classify(err)) {
			return at, false, err
		}
	}
	if err := p.destroy(ctx, node, h); err != nil {
		return at, false, err
	}
	return at, true, nil
}

// removable reports whether a VM that could not be finished is of no use, and nothing is under way in it.
func (p *Provider) removable(f *fault) bool {
	return !f.ambiguous && !f.unanswered() && !errors.Is(f.kind, provider.ErrDenied)
}

// unlocked waits until a VM of ours is cloned, and returns its configuration.
func (p *Provider) unlocked(ctx context.Context, node string, h handle) (vmConfig, error) {
	for begin := time.Now(); ; {
		c, err := p.configOf(ctx, node, h.vmid)
		if err != nil {
			return nil, readable(err)
		}
		if k := p.identify(h.vmid, c); !k.ours || k.note.nonce != h.nonce || k.name != h.name {
			return nil, unavailable(provider.ReasonUnknown, "VM %d on %s is not ours any more", h.vmid, node)
		}
		if c.lock() != "clone" {
			return c, nil
		}
		if p.abandoned(h.vmid) {
			return nil, p.orphaned(node, h)
		}
		if err := sleep(ctx, pace(begin)); err != nil {
			return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: fmt.Sprintf("VM %d is still being cloned", h.vmid), cause: err}
		}
	}
}

// orphaned is about a clone that has not ended in time. It is not ErrPermanent: a clone that is only slow ends by itself, and
// after the operator has removed another the next attempt finds that too.
func (p *Provider) orphaned(node string, h handle) error {
	return unavailable(provider.ReasonUnknown, "VM %d on %s has had the lock clone for more than %s, so what cloned it has died or CloneTimeout is too short; "+
		"in the first case, as root: qm unlock %d && qm destroy %d", h.vmid, node, p.config.CloneTimeout, h.vmid, h.vmid)
}

func (p *Provider) isRunning(ctx context.Context, node string, vmid int) (bool, error) {
	var current row
	err := p.get(ctx, node, fmt.Sprintf("/nodes/%s/qemu/%d/status/current", node, vmid), &current)
	return current.Status == "running", err
}

func (p *Provider) made(node string, h handle, k known, message string) provider.Instance {
	return provider.Instance{ID: h.String(), Name: h.name, Mark: k.mark, State: provider.StatePending, Host: node, Created: k.note.created,
		Address: k.note.address, Message: message}
}

// createOn makes the instance on one node. When it fails in a way that is not ambiguous, nothing is left there.
func (p *Provider) createOn(ctx context.Context, c candidate, req provider.CreateRequest, s *plan, seen *view) (provider.Instance, error) {
	slot := p.cloning[c.source]
	if slot == nil {
		slot = p.cloning[c.node.Name] // the template is on a node that is not configured
	}
	select {
	case slot <- struct{}{}:
	case <-ctx.Done():
		return provider.Instance{}, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: "waiting for a turn to clone", cause: context.Cause(ctx)}
	}
	h, k, err := p.clone(ctx, c, req, s, seen)
	<-slot
	if err != nil {
		return provider.Instance{}, err
	}
	if err := p.finish(ctx, c.node.Name, h, s, req); err != nil {
		if f := classify(err); p.removable(f) && ctx.Err() == nil {
			if gone := p.destroy(ctx, c.node.Name, h); gone != nil {
				g := *f
				g.kind, g.ambiguous = provider.ErrOutcomeUnknown, true // it is still there
				g.message += "; and it could not be removed: " + gone.Error()
				return provider.Instance{}, &g
			}
			return provider.Instance{}, err
		}
		g := *classify(err)
		g.ambiguous = g.ambiguous || errors.Is(g.kind, provider.ErrUnavailable)
		return provider.Instance{}, &g
	}
	return p.made(c.node.Name, h, k, ""), nil
}

// clone makes a clone under a VMID that nobody has, and proves that what is there in the end is ours.
func (p *Provider) clone(ctx context.Context, c candidate, req provider.CreateRequest, s *plan, seen *view) (handle, known, error) {
	for range collisions {
		vmid, err := p.pick(seen, req.Name)
		if err != nil {
			return handle{}, known{}, err
		}
		h := handle{vmid: vmid, nonce: newNonce(), name: req.Name}
		n := note{entry: p.config.Name, vmid: vmid, nonce: h.nonce, group: s.group, address: s.address, created: time.Now().Truncate(time.Second)}
		body := map[string]any{"newid": vmid, "name": req.Name, "description": req.Mark.String() + "\n" + n.String() + "\n"}
		if p.config.Pool != "" {
			body["pool"] = p.config.Pool
		}
		if p.config.FullClone {
			body["full"] = 1
			if p.config.DiskStorage != "" {
				body["storage"] = p.config.DiskStorage
			}
		}
		if c.node.Name != c.source {
			body["target"] = c.node.Name
		}
		// Known from now on, so that it is not made again elsewhere when the node goes down in the middle.
		k := known{name: req.Name, ours: true, mark: req.Mark, note: n, at: time.Now()}
		p.remember(vmid, k)
		err = p.run(ctx, c.source, request{method: http.MethodPost, path: fmt.Sprintf("/nodes/%s/qemu/%d/clone", c.source, c.template), body: body}, p.config.CloneTimeout)
		f := classifyNil(err)
		if err == nil || f.ambiguous {
			if proof := p.prove(ctx, c.node.Name, h, f.ambiguous); proof == nil {
				p.letGo(vmid)
				p.remember(vmid, k)
				return h, k, nil
			} else if err == nil {
				// It was made, and a read that fails says nothing about it: only one that shows somebody else's does.
				g := *classify(proof)
				g.ambiguous = !g.collision
				err, f = &g, &g
			}
		}
		p.letGo(vmid)
		if f.ambiguous {
			return h, known{}, err
		}
		p.unremember(vmid)
		if !f.collision && f.lockOf != vmid {
			return h, known{}, err
		}
		seen.used[vmid] = true
	}
	return handle{}, known{}, unavailable(provider.ReasonUnknown, "%d VMIDs in a row were taken by somebody else", collisions)
}

// prove makes sure that the VMID carries our name and mark. After a lost answer the clone may still be on its way.
func (p *Provider) prove(ctx context.Context, node string, h handle, lost bool) error {
	var err error
	for begin := time.Now(); ; {
		var c vmConfig
		if c, err = p.configOf(ctx, node, h.vmid); err == nil {
			k := p.identify(h.vmid, c)
			switch {
			case k.ours && k.name == h.name && k.note.nonce == h.nonce:
				_, err = p.unlocked(ctx, node, h)
				return err
			case k.name != "":
				return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, collision: true, message: fmt.Sprintf("VM %d has become somebody else's", h.vmid)}
			}
		}
		if !lost || time.Since(begin) > p.settle() {
			break
		}
		if cause := sleep(ctx, pace(begin)); cause != nil {
			break
		}
	}
	return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, ambiguous: true, message: fmt.Sprintf("VM %d is not there as it should be", h.vmid), cause: err}
}

// pick returns a free VMID of our range at random, so that those who pick at the same time rarely meet.
func (p *Provider) pick(seen *view, name string) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	low, n := p.config.VMIDMin, p.config.VMIDMax-p.config.VMIDMin+1
	start := rand.IntN(n) //nolint:gosec // nothing is kept secret by it
	for i := range n {
		id := low + (start+i)%n
		if _, taken := p.taken[id]; !taken && !seen.used[id] {
			p.taken[id] = name
			return id, nil
		}
	}
	return 0, &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonQuotaExceeded, message: fmt.Sprintf("all VMIDs from %d to %d are in use", low, p.config.VMIDMax)}
}

func (p *Provider) unremember(vmid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, vmid)
}

func (p *Provider) letGo(vmid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, vmid)
}

// finish takes a clone of ours to where it runs. Each step looks at what is there first, so it can be repeated.
func (p *Provider) finish(ctx context.Context, node string, h handle, s *plan, req provider.CreateRequest) error {
	c, err := p.unlocked(ctx, node, h)
	if err != nil {
		return err
	}
	if p.attached(c, h) != "" {
		return p.start(ctx, node, h) // the drive comes with the last change
	}
	if c, err = p.unprotect(ctx, node, h, c); err != nil {
		return err
	}
	if err := p.grow(ctx, node, h, c, s); err != nil {
		return err
	}
	mac := ""
	if m := macPattern.FindStringSubmatch(string(c["net0"])); m != nil {
		mac = m[1]
	}
	image, err := s.seed(req.Name, req.Mark.Hash, mac)
	if err != nil {
		return permanent(provider.ReasonUnsupported, "the seed image: %v", err)
	}
	if err := p.upload(ctx, node, h, image); err != nil {
		return err
	}
	if c, err = p.unlocked(ctx, node, h); err != nil {
		return err
	}
	if err := p.configure(ctx, node, h, c, s); err != nil {
		return err
	}
	return p.start(ctx, node, h)
}

// unprotect takes away the template's protection, under which no drive can be taken out, and returns what is then.
func (p *Provider) unprotect(ctx context.Context, node string, h handle, c vmConfig) (vmConfig, error) {
	if c["protection"] != "1" {
		return c, nil
	}
	body := map[string]any{"delete": "protection", "digest": string(c["digest"])}
	path := fmt.Sprintf("/nodes/%s/qemu/%d/config", node, h.vmid)
	if err := p.run(ctx, node, request{method: http.MethodPost, path: path, body: body}, p.config.TaskTimeout); err != nil {
		return nil, err
	}
	return p.unlocked(ctx, node, h)
}

// grow makes the disk as large as the spec says.
func (p *Provider) grow(ctx context.Context, node string, h handle, c vmConfig, s *plan) error {
	disk, have := rootDisk(c)
	if s.diskGiB<<10 <= have {
		return nil
	}
	if disk == "" {
		return permanent(provider.ReasonUnsupported, "VM %d has no disk to grow to %d GiB", h.vmid, s.diskGiB)
	}
	body := map[string]any{"disk": disk, "size": fmt.Sprintf("%dG", s.diskGiB), "digest": string(c["digest"])}
	return p.run(ctx, node, request{method: http.MethodPut, path: fmt.Sprintf("/nodes/%s/qemu/%d/resize", node, h.vmid), body: body}, p.config.TaskTimeout)
}

// upload brings the seed to the node, through the node itself, and looks whether all of it is there.
func (p *Provider) upload(ctx context.Context, node string, h handle, image []byte) error {
	var err error
	for try := range uploads {
		var upid text
		path := fmt.Sprintf("/nodes/%s/storage/%s/upload", node, p.config.SeedStorage)
		err = p.on(ctx, node, request{method: http.MethodPost, path: path, seed: image, file: p.seedFile(h)}, &upid)
		if err == nil {
			err = p.wait(ctx, string(upid), p.config.TaskTimeout)
		}
		if f := classifyNil(err); err != nil && !f.ambiguous && !strings.Contains(f.message, "pveupload") {
			return err
		}
		size, sizeErr := p.seedSize(ctx, node, h)
		switch {
		case sizeErr == nil && size == len(image) && err == nil:
			return nil
		case err == nil && sizeErr == nil:
			err = unavailable(provider.ReasonUnknown, "the seed has %d bytes on the node, want %d", size, len(image))
		case err == nil:
			err = sizeErr
		}
		if try == uploads-1 || sleep(ctx, time.Duration(try+1)*time.Second) != nil {
			break
		}
	}
	return err
}

// seedSize returns the size of the seed on a node; -1 when there is none.
func (p *Provider) seedSize(ctx context.Context, node string, h handle) (int, error) {
	var volume struct {
		Size number `json:"size"`
	}
	err := p.lookOn(ctx, node, fmt.Sprintf("/nodes/%s/storage/%s/content/%s", node, p.config.SeedStorage, p.seedVolume(h)), &volume)
	if f := classifyNil(err); err != nil && strings.Contains(f.message, "volume_size_info on") {
		return -1, nil
	}
	return int(volume.Size), err
}

// drivePattern matches the options that hold drives.
var drivePattern = regexp.MustCompile(`^(ide|sata|scsi|virtio)[0-9]+$`)

// attached returns the option that holds our seed.
func (p *Provider) attached(c vmConfig, h handle) string {
	for key, value := range c {
		if volume, _, _ := strings.Cut(string(value), ","); drivePattern.MatchString(key) && volume == p.seedVolume(h) {
			return key
		}
	}
	return ""
}

// cloudInitVolume matches the volumes that Proxmox itself takes for cloud-init drives.
var cloudInitVolume = regexp.MustCompile(`[:/](vm-[0-9]+-)?cloudinit(\.[a-z0-9]+)?$`)

func isCloudInit(drive string) bool {
	volume, _, _ := strings.Cut(drive, ",")
	return cloudInitVolume.MatchString(volume)
}

func isCDROM(drive string) bool { return strings.Contains(drive+",", ",media=cdrom,") }

// configure makes one change of everything: processors, memory, network, tags and the drive with the seed. The template's
// own cloud-init drives go, since a guest takes the first volume with that label.
func (p *Provider) configure(ctx context.Context, node string, h handle, c vmConfig, s *plan) error {
	body := map[string]any{"digest": string(c["digest"])}
	var remove []string
	if s.cores > 0 {
		body["cores"], body["sockets"] = s.cores, 1
		if c["vcpus"] != "" {
			remove = append(remove, "vcpus")
		}
	}
	if s.memoryMiB > 0 {
		body["memory"] = s.memoryMiB
		if c["balloon"] != "" && c["balloon"] != "0" {
			remove = append(remove, "balloon")
		}
	}
	if net := p.network(string(c["net0"])); net != string(c["net0"]) {
		body["net0"] = net
	}
	switch {
	case len(p.config.Tags) > 0:
		body["tags"] = strings.Join(p.config.Tags, ";")
	case p.config.Tags != nil && c["tags"] != "":
		remove = append(remove, "tags")
	}
	if !agentEnabled(string(c["agent"])) {
		body["agent"] = "1"
	}
	slot := ""
	for _, key := range []string{"ide2", "ide0", "ide1", "ide3", "sata0", "sata1", "sata2", "sata3", "sata4", "sata5"} {
		if d := string(c[key]); d == "" || isCloudInit(d) || isCDROM(d) {
			slot = key
			break
		}
	}
	if slot == "" {
		return permanent(provider.ReasonUnsupported, "VM %d has no free IDE or SATA slot for the seed", h.vmid)
	}
	body[slot] = p.seedVolume(h) + ",media=cdrom"
	for key, d := range c {
		if drivePattern.MatchString(key) && key != slot && isCloudInit(string(d)) {
			remove = append(remove, key)
		}
	}
	if len(remove) > 0 {
		slices.Sort(remove)
		body["delete"] = strings.Join(remove, ",")
	}
	err := p.run(ctx, node, request{method: http.MethodPost, path: fmt.Sprintf("/nodes/%s/qemu/%d/config", node, h.vmid), body: body}, p.config.TaskTimeout)
	if err == nil {
		return nil
	}
	f := classify(err)
	if !f.ambiguous && !f.stale {
		return err
	}
	// Whatever the answer was: what counts is what the configuration says.
	for begin := time.Now(); time.Since(begin) < p.settle(); {
		now, readErr := p.unlocked(ctx, node, h)
		if readErr == nil && p.attached(now, h) != "" {
			return nil
		}
		if f.stale || sleep(ctx, pace(begin)) != nil {
			break
		}
	}
	return err
}

func agentEnabled(option string) bool {
	first, _, _ := strings.Cut(option, ",")
	return first == "1" || first == "enabled=1"
}

// network returns net0 with the configured bridge and VLAN. The hardware address and all else stay.
func (p *Provider) network(net0 string) string {
	if p.config.Bridge == "" && p.config.VLAN == 0 {
		return net0
	}
	parts := strings.Split(or(net0, "virtio"), ",")
	set := func(key, value string) {
		for i, part := range parts {
			if k, _, _ := strings.Cut(part, "="); k == key {
				parts[i] = key + "=" + value
				return
			}
		}
		parts = append(parts, key+"="+value)
	}
	if p.config.Bridge != "" {
		set("bridge", p.config.Bridge)
	}
	if p.config.VLAN != 0 {
		set("tag", fmt.Sprint(p.config.VLAN))
	}
	return strings.Join(parts, ",")
}

var sizePattern = regexp.MustCompile(`(?:^|,)size=([0-9]+)([KMGT]?)(?:,|$)`)

// rootDisk returns the disk that is booted from and its size in MiB.
func rootDisk(c vmConfig) (disk string, mib int) {
	isDisk := func(key string) bool {
		d := string(c[key])
		return drivePattern.MatchString(key) && d != "" && !isCDROM(d) && !isCloudInit(d)
	}
	var order []string
	if list, ok := strings.CutPrefix(string(c["boot"]), "order="); ok {
		order = strings.Split(list, ";")
	}
	order = append(order, string(c["bootdisk"]), "scsi0", "virtio0", "sata0", "ide0")
	i := slices.IndexFunc(order, isDisk)
	if i < 0 {
		return "", 0
	}
	m := sizePattern.FindStringSubmatch(string(c[order[i]]))
	if m == nil {
		return order[i], 0
	}
	n, _ := strconv.Atoi(m[1])
	switch m[2] {
	case "":
		n >>= 20
	case "K":
		n >>= 10
	case "G":
		n <<= 10
	case "T":
		n <<= 20
	}
	return order[i], n
}

// start starts the VM. One that runs already is fine.
func (p *Provider) start(ctx context.Context, node string, h handle) error {
	c, err := p.unlocked(ctx, node, h)
	if err != nil {
		return err
	}
	if c.hibernated() {
		f := permanent(provider.ReasonUnsupported, "VM %d is hibernated and is not started", h.vmid)
		f.ambiguous = true // somebody is at work on it, so it stays
		return f
	}
	err = p.run(ctx, node, request{method: http.MethodPost, path: fmt.Sprintf("/nodes/%s/qemu/%d/status/start", node, h.vmid)}, p.config.TaskTimeout)
	if err == nil || strings.Contains(classify(err).message, "already running") {
		return nil
	}
	if f := classify(err); !f.ambiguous {
		return err
	}
	for begin := time.Now(); time.Since(begin) < p.settle(); {
		if running, readErr := p.isRunning(ctx, node, h.vmid); readErr == nil && running {
			return nil
		}
		if sleep(ctx, pace(begin)) != nil {
			break
		}
	}
	return err
}

// candidate is a node that may take an instance.
type candidate struct {
	node     Node
	source   string // node of the template
	template int
	mib      int
	free     int64 // MiB
	limited  bool  // free is known
	group    int   // instances of the group that are there
	why      string
}

// nodeRow is a node in the cluster's list.
type nodeRow struct {
	Node   text   `json:"node"`
	Status text   `json:"status"`
	Max    number `json:"maxmem"`
	Used   number `json:"mem"`
}

// online counts the nodes that are.
func online(nodes []nodeRow) int {
	n := 0
	for _, r := range nodes {
		if r.Status == "online" {
			n++
		}
	}
	return n
}

// nodes returns the cluster's nodes as one of them sees them that is with most of the others, if there is such a one.
func (p *Provider) nodes(ctx context.Context) ([]nodeRow, error) {
	first := int(p.preferred.Load())
	var best []nodeRow
	var failed error
	for i := range p.endpoints {
		at := (first + i) % len(p.endpoints)
		var rows []nodeRow
		if err := p.look(ctx, p.endpoints[at], "/nodes", &rows); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			failed = or(failed, err)
			continue
		}
		if 2*online(rows) > len(rows) {
			p.preferred.Store(int32(at))
			return rows, nil
		}
		if best == nil || online(rows) > online(best) {
			best = rows
		}
	}
	if best == nil {
		return nil, failed
	}
	return best, nil
}

// candidates returns the nodes that can take the instance if they have room, and why the others can't.
func (p *Provider) candidates(ctx context.Context, s *plan, seen *view, vms []vm, req provider.CreateRequest) ([]candidate, []refusal, error) {
	rows, err := p.nodes(ctx)
	if err != nil {
		return nil, nil, err
	}
	var all []candidate
	var refusals []refusal
	memories := map[int]int{}
	for _, n := range p.allowed(s) {
		c, why := p.candidate(ctx, n, rows, s, seen, memories)
		if why != nil {
			refusals = append(refusals, refusal{n.Name, why})
			continue
		}
		for _, v := range vms {
			if v.ours && s.group != "" && v.note.group == s.group && string(v.Node) == n.Name && v.mark.Owner == req.Mark.Owner {
				c.group++
			}
		}
		all = append(all, c)
	}
	return all, refusals, nil
}

// take takes the best node out of those that are left, and notes what the create will use there, so that another one which
// chooses at the same time knows of it. It reports false when no node has room.
func (p *Provider) take(nodes *[]candidate, refusals *[]refusal, s *plan, name string) (candidate, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.placing, name)
	best, of := candidate{}, len(p.allowed(s))
	var left []candidate
	for _, c := range *nodes {
		whole := c
		for _, l := range p.placing {
			if l.node == c.node.Name {
				c.free -= int64(l.mib)
				if s.group != "" && l.group == s.group {
					c.group++
				}
			}
		}
		if c.limited && c.free < int64(c.mib) {
			*refusals = append(*refusals, refusal{c.node.Name, &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity,
				message: fmt.Sprintf("%d MiB are free, want %d", c.free, c.mib)}})
			continue
		}
		left = append(left, whole)
		if best.node.Name == "" || cmp.Or(cmp.Compare(c.group, best.group), cmp.Compare(best.free, c.free)) < 0 {
			best = c
		}
	}
	if best.node.Name == "" {
		return best, false
	}
	*nodes = slices.DeleteFunc(left, func(c candidate) bool { return c.node.Name == best.node.Name })
	best.why = fmt.Sprintf("on %s with %d MiB free, of %d nodes allowed", best.node.Name, best.free, of)
	p.placing[name] = load{node: best.node.Name, mib: best.mib, group: s.group}
	return best, true
}

// candidate returns what a node would make the instance from, or why it can't.
func (p *Provider) candidate(ctx context.Context, n Node, rows []nodeRow, s *plan, seen *view, memories map[int]int) (candidate, *fault) {
	i := slices.IndexFunc(rows, func(r nodeRow) bool { return string(r.Node) == n.Name })
	switch {
	case i < 0:
		return candidate{}, unavailable(provider.ReasonUnreachable, "the cluster has no such node")
	case seen.missing[n.Name] != nil:
		return candidate{}, unavailable(classify(seen.missing[n.Name]).reason, "%v", seen.missing[n.Name])
	case rows[i].Status != "online":
		return candidate{}, unavailable(provider.ReasonUnreachable, "the cluster says that it is %s", rows[i].Status)
	}
	source, id, why := p.template(s.image, n.Name, seen)
	if why != "" {
		// Not ErrPermanent: who makes the template changes no spec.
		return candidate{}, unavailable(provider.ReasonTemplateNotFound, "%s", why)
	}
	if seen.missing[source] != nil {
		return candidate{}, unavailable(provider.ReasonUnreachable, "template %d is on %s: %v", id, source, seen.missing[source])
	}
	c := candidate{node: n, source: source, template: id, mib: s.memoryMiB, free: int64(rows[i].Max-rows[i].Used) >> 20, limited: rows[i].Max > 0}
	if c.mib == 0 && memories[id] == 0 {
		config, err := p.configOf(ctx, source, id)
		if err != nil {
			f := *classify(readable(err))
			f.message = fmt.Sprintf("template %d: %s", id, f.message)
			return c, &f
		}
		var m number
		_ = m.UnmarshalJSON([]byte(`"` + strings.TrimPrefix(string(config["memory"]), "current=") + `"`))
		memories[id] = max(int(m), leastMemory)
	}
	c.mib = or(c.mib, memories[id])
	return c, nil
}

// template returns the VM to clone for an image on a node, and the node that it is on, or why there is none.
func (p *Provider) template(image, node string, seen *view) (source string, vmid int, why string) {
	t := p.config.Templates[image]
	if id := or(t.Nodes[node], t.VMID); id != 0 {
		r, ok := seen.rows[id]
		switch {
		case !ok || r.Kind == "lxc" || !nodePattern.MatchString(string(r.Node)):
			return "", id, fmt.Sprintf("node %s has no template for image %q, want VM %d", node, image, id)
		case r.live && r.Template == 0:
			return "", id, fmt.Sprintf("VM %d on %s, for image %q, is no template; make it one (qm template %d)", id, r.Node, image, id)
		}
		return string(r.Node), id, ""
	}
	if t.Name == "" {
		return "", 0, fmt.Sprintf("node %s has no template for image %q, want an entry for it in Templates", node, image)
	}
	best := row{}
	for _, r := range seen.rows {
		if r.Template == 0 || string(r.Name) != t.Name || !nodePattern.MatchString(string(r.Node)) {
			continue
		}
		here, bestHere := string(r.Node) == node, string(best.Node) == node
		if best.VMID == 0 || here && !bestHere || here == bestHere && r.VMID < best.VMID {
			best = r
		}
	}
	if best.VMID == 0 {
		return "", 0, fmt.Sprintf("node %s has no template for image %q, want one with the name %q", node, image, t.Name)
	}
	return string(best.Node), int(best.VMID), ""
}
