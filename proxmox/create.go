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
		if r.live && string(r.Name) == req.Name && !slices.ContainsFunc(vms, func(v vm) bool { return v.VMID == r.VMID && v.ours }) {
			return provider.Instance{}, permanent(provider.ReasonUnsupported, "VM %d on %s has the name and is not ours; rename or remove it", int(r.VMID), r.Node)
		}
	}
	nodes, refused, err := p.candidates(ctx, s, &seen, vms, req)
	if err != nil {
		return provider.Instance{}, readable(err)
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.placing, req.Name)
	}()
	var last error
	for _, c := range nodes {
		p.mu.Lock()
		p.placing[req.Name] = load{node: c.node.Name, mib: c.mib, group: s.group}
		p.mu.Unlock()
		x, err := p.createOn(ctx, c, req, s, &seen)
		if err == nil {
			x.Message = c.why
			return x, nil
		}
		f := classify(err)
		x.Host = c.node.Name
		if f.ambiguous || ctx.Err() != nil || errors.Is(f.kind, provider.ErrDenied) || !p.elsewhere(f) {
			return x, err
		}
		// Nothing is left on this node, and another one may do.
		refused = append(refused, c.node.Name+": "+f.Error())
		last = err
		p.config.Logger.WarnContext(ctx, "proxmox: a create failed, trying the next node", "provider", p.config.Name, "node", c.node.Name, "instance", req.Name, "error", f.Error())
	}
	if last != nil && len(refused) == 1 {
		return provider.Instance{}, last
	}
	f := &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity, message: "no node can take it: " + strings.Join(refused, "; ")}
	if l := classify(last); last != nil && !errors.Is(l.kind, provider.ErrNoCapacity) {
		f.kind, f.reason = l.kind, l.reason
	} else if len(seen.missing) > 0 && last == nil && !strings.Contains(f.message, "MiB") {
		f.kind, f.reason = provider.ErrUnavailable, provider.ReasonUnreachable
	}
	return provider.Instance{}, f
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
		if !p.nameless(&seen, vms) || time.Since(begin) > namelessGrace {
			return seen, vms, nil
		}
		p.config.Logger.DebugContext(ctx, "proxmox: waiting for the name of a clone", "provider", p.config.Name, "instance", name)
		if err := sleep(ctx, pace(begin)); err != nil {
			return seen, nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: err}
		}
	}
}

// nameless reports whether a clone in our range that this process has not begun has no name yet.
func (p *Provider) nameless(seen *view, vms []vm) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, v := range vms {
		since, locked := p.locked[int(v.VMID)]
		_, mine := p.taken[int(v.VMID)]
		if v.known.name == "" && v.Lock == "clone" && !mine && (!locked || time.Since(since) < namelessGrace) && seen.missing[string(v.Node)] == nil {
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
	return !f.ambiguous && !errors.Is(f.kind, provider.ErrDenied) && f.code != http.StatusUnauthorized
}

// unlocked waits until a VM of ours is cloned, and returns its configuration.
func (p *Provider) unlocked(ctx context.Context, node string, h handle) (vmConfig, error) {
	for begin := time.Now(); ; {
		c, err := p.configOf(ctx, node, h.vmid)
		if err != nil {
			return nil, readable(err)
		}
		if k := p.identify(c); !k.ours || k.note.nonce != h.nonce || k.name != h.name {
			return nil, unavailable(provider.ReasonUnknown, "VM %d on %s is not ours any more", h.vmid, node)
		}
		if c.lock() != "clone" {
			return c, nil
		}
		if p.abandoned(h.vmid) {
			return nil, permanent(provider.ReasonUnknown,
				"VM %d on %s has had the lock clone for more than %s, so what cloned it has died; as root: qm unlock %d && qm destroy %d", h.vmid, node, p.config.CloneTimeout, h.vmid, h.vmid)
		}
		if err := sleep(ctx, pace(begin)); err != nil {
			return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: fmt.Sprintf("VM %d is still being cloned", h.vmid), cause: err}
		}
	}
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
	if slot != nil {
		select {
		case slot <- struct{}{}:
		case <-ctx.Done():
			return provider.Instance{}, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: "waiting for a turn to clone", cause: context.Cause(ctx)}
		}
	}
	h, k, err := p.clone(ctx, c, req, s, seen)
	if slot != nil {
		<-slot
	}
	if err != nil {
		return provider.Instance{}, err
	}
	if err := p.finish(ctx, c.node.Name, h, s, req); err != nil {
		if f := classify(err); p.removable(f) && ctx.Err() == nil {
			if gone := p.destroy(ctx, c.node.Name, h); gone != nil {
				g := *f
				g.ambiguous = true // it is still there
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
		n := note{entry: p.config.Name, nonce: h.nonce, group: s.group, address: s.address, created: time.Now().Truncate(time.Second)}
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
		err = p.run(ctx, c.source, request{method: http.MethodPost, path: fmt.Sprintf("/nodes/%s/qemu/%d/clone", c.source, c.template), body: body}, p.config.CloneTimeout)
		f := &fault{}
		if err != nil {
			f = classify(err)
		}
		if err == nil || f.ambiguous {
			if proof := p.prove(ctx, c.node.Name, h, f.ambiguous); proof == nil {
				p.letGo(vmid)
				return h, known{name: req.Name, ours: true, mark: req.Mark, note: n}, nil
			} else if err == nil {
				err, f = proof, classify(proof)
			}
		}
		p.letGo(vmid)
		if !f.collision {
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
			k := p.identify(c)
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
	vmPath := fmt.Sprintf("/nodes/%s/qemu/%d", node, h.vmid)
	if p.attached(c, h) == "" {
		if c["protection"] == "1" {
			// The template's; under it no drive can be taken away.
			body := map[string]any{"delete": "protection", "digest": string(c["digest"])}
			if err := p.run(ctx, node, request{method: http.MethodPost, path: vmPath + "/config", body: body}, p.config.TaskTimeout); err != nil {
				return err
			}
			if c, err = p.unlocked(ctx, node, h); err != nil {
				return err
			}
		}
		if disk, have := rootDisk(c); s.diskGiB > have {
			if disk == "" {
				return permanent(provider.ReasonUnsupported, "VM %d has no disk to grow to %d GiB", h.vmid, s.diskGiB)
			}
			body := map[string]any{"disk": disk, "size": fmt.Sprintf("%dG", s.diskGiB)}
			if err := p.run(ctx, node, request{method: http.MethodPut, path: vmPath + "/resize", body: body}, p.config.TaskTimeout); err != nil {
				return err
			}
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
	}
	return p.start(ctx, node, h)
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
		if sleep(ctx, time.Duration(try+1)*time.Second) != nil {
			break
		}
	}
	return err
}

func classifyNil(err error) *fault {
	if err == nil {
		return &fault{}
	}
	return classify(err)
}

// seedSize returns the size of the seed on a node; -1 when there is none.
func (p *Provider) seedSize(ctx context.Context, node string, h handle) (int, error) {
	var volume struct {
		Size number `json:"size"`
	}
	err := p.get(ctx, node, fmt.Sprintf("/nodes/%s/storage/%s/content/%s", node, p.config.SeedStorage, p.seedVolume(h)), &volume)
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

func isCloudInit(drive string) bool {
	volume, _, _ := strings.Cut(drive, ",")
	return strings.Contains(volume, "cloudinit")
}

func isCDROM(drive string) bool { return strings.Contains(drive, "media=cdrom") }

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
	if p.config.Tags != nil {
		body["tags"] = strings.Join(p.config.Tags, ";")
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

var sizePattern = regexp.MustCompile(`(?:^|,)size=([0-9]+)([MGT]?)`)

// rootDisk returns the disk that is booted from and its size in GiB, rounded up.
func rootDisk(c vmConfig) (disk string, gib int) {
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
	var n number
	_ = n.UnmarshalJSON([]byte(m[1]))
	switch m[2] {
	case "M":
		return order[i], (int(n) + 1023) / 1024
	case "T":
		return order[i], int(n) * 1024
	}
	return order[i], int(n)
}

// start starts the VM. One that runs already is fine.
func (p *Provider) start(ctx context.Context, node string, h handle) error {
	c, err := p.unlocked(ctx, node, h)
	if err != nil {
		return err
	}
	if c.hibernated() {
		return permanent(provider.ReasonUnsupported, "VM %d is hibernated and is not started", h.vmid)
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
	free     int64
	group    int
	why      string
}

// nodeRow is a node in the cluster's list.
type nodeRow struct {
	Node   text   `json:"node"`
	Status text   `json:"status"`
	Max    number `json:"maxmem"`
	Used   number `json:"mem"`
}

// candidates returns the nodes that can take the instance, best first, and why the others can't.
func (p *Provider) candidates(ctx context.Context, s *plan, seen *view, vms []vm, req provider.CreateRequest) ([]candidate, []string, error) {
	var rows []nodeRow
	if err := p.any(ctx, request{method: http.MethodGet, path: "/nodes"}, &rows); err != nil {
		return nil, nil, err
	}
	var all []candidate
	var refused []string
	refuse := func(n Node, format string, args ...any) {
		refused = append(refused, n.Name+": "+fmt.Sprintf(format, args...))
	}
	memories := map[int]int{}
	for _, n := range p.allowed(s) {
		i := slices.IndexFunc(rows, func(r nodeRow) bool { return string(r.Node) == n.Name })
		switch {
		case i < 0:
			refuse(n, "the cluster has no such node")
			continue
		case seen.missing[n.Name] != nil:
			refuse(n, "%v", seen.missing[n.Name])
			continue
		case rows[i].Status != "online":
			refuse(n, "the cluster says that it is %s", rows[i].Status)
			continue
		}
		c := candidate{node: n, mib: s.memoryMiB}
		source, id, ok := p.template(s.image, n.Name, seen)
		if !ok {
			refuse(n, "has no template for image %q", s.image)
			continue
		}
		c.source, c.template = source, id
		if c.mib == 0 {
			if _, ok := memories[id]; !ok {
				config, err := p.configOf(ctx, source, id)
				if err != nil {
					refuse(n, "template %d: %v", id, err)
					continue
				}
				var m number
				_ = m.UnmarshalJSON([]byte(`"` + strings.TrimPrefix(string(config["memory"]), "current=") + `"`))
				memories[id] = max(int(m), leastMemory)
			}
			c.mib = memories[id]
		}
		c.free = int64(rows[i].Max-rows[i].Used) >> 20
		p.mu.Lock()
		for name, l := range p.placing {
			if l.node == n.Name && name != req.Name {
				c.free -= int64(l.mib)
				if s.group != "" && l.group == s.group {
					c.group++
				}
			}
		}
		p.mu.Unlock()
		for _, v := range vms {
			if v.ours && s.group != "" && v.note.group == s.group && string(v.Node) == n.Name && v.mark.Owner == req.Mark.Owner {
				c.group++
			}
		}
		if rows[i].Max > 0 && c.free < int64(c.mib) {
			refuse(n, "%d MiB are free, want %d", c.free, c.mib)
			continue
		}
		c.why = fmt.Sprintf("on %s with %d MiB free, of %d nodes allowed", n.Name, c.free, len(p.allowed(s)))
		all = append(all, c)
	}
	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(b.free, a.free), strings.Compare(a.node.Name, b.node.Name))
	})
	return all, refused, nil
}

// template returns the VM to clone for an image on a node, and the node that it is on.
func (p *Provider) template(image, node string, seen *view) (source string, vmid int, ok bool) {
	t := p.config.Templates[image]
	id := t.Nodes[node]
	if id == 0 {
		id = t.VMID
	}
	if id != 0 {
		r, ok := seen.rows[id]
		return string(r.Node), id, ok && nodePattern.MatchString(string(r.Node))
	}
	best := row{}
	for _, r := range seen.rows {
		if t.Name == "" || !r.live || r.Template == 0 || string(r.Name) != t.Name {
			continue
		}
		here, bestHere := string(r.Node) == node, string(best.Node) == node
		if best.VMID == 0 || here && !bestHere || here == bestHere && r.VMID < best.VMID {
			best = r
		}
	}
	return string(best.Node), int(best.VMID), best.VMID != 0
}
