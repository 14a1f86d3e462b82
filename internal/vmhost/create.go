package vmhost

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

// cleanUpTimeout bounds the removal of what a create leaves when it fails.
const cleanUpTimeout = time.Minute

// Create makes the instance that req names. why is kept with it, for operators. It blocks until the instance runs, within
// ctx, and until its image is on the host, which goes on when ctx has ended. Errors are *provider.Error.
func (h *Host) Create(ctx context.Context, req provider.CreateRequest, why string) (provider.Instance, error) {
	made, err := h.create(ctx, req, why)
	return made, h.wrap("create", req.Name, err)
}

func (h *Host) create(ctx context.Context, req provider.CreateRequest, why string) (provider.Instance, error) {
	none := provider.Instance{}
	plan, err := h.Plan(req.Spec)
	if err != nil {
		return none, fault(provider.ErrPermanent, provider.ReasonUnsupported, "spec: %v", err)
	}
	if got, ok := provider.ParseMark(req.Mark.String()); !ok || got != req.Mark {
		return none, fault(provider.ErrPermanent, provider.ReasonUnsupported, "mark %v can't be stored", req.Mark)
	}
	unlock, err := h.lock(ctx, req.Name)
	if err != nil {
		return none, err
	}
	handedOver := false
	defer func() {
		if !handedOver {
			unlock()
		}
	}()
	defer h.note(h.making, req.Name)()
	if err := h.do(ctx, func(ctx context.Context, s *libvirt.Session) error { return h.vacate(ctx, s, req) }); err != nil {
		return none, err
	}
	release, err := h.promise(ctx, req.Name, plan)
	if err != nil {
		return none, err
	}
	defer release()
	base, err := h.base(ctx, plan, req.Mark.Owner)
	if err != nil {
		return none, err
	}
	defer base.release()

	b := &build{host: h, req: req, plan: plan, base: base, id: newUUID(), why: why}
	err = h.do(ctx, b.run)
	if err == nil {
		h.log().Info("instance made", "instance", req.Name, "image", plan.key, "emulated", b.emulated)
		return b.instance(), nil
	}
	if !b.defined {
		return none, err
	}
	// Only the domain that was made here may be removed: its UUID was not known to anybody before.
	err = begun(err)
	cleanUp := func(ctx context.Context, unlessMade bool) error {
		ctx, cancel := context.WithTimeoutCause(ctx, cleanUpTimeout, errors.New("no time left to clean up"))
		defer cancel()
		return h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
			dom := golibvirt.Domain{Name: req.Name, UUID: b.id}
			if unlessMade {
				who, err := h.identify(s, dom)
				if libvirt.Code(err) == golibvirt.ErrNoDomain || err == nil && who.Made != "" {
					return nil
				}
				if err != nil {
					return err
				}
			}
			return h.removeDomain(ctx, s, dom, parseRecord(req.Name, b.metadata))
		})
	}
	if f, ok := errors.AsType[*Fault](err); ctx.Err() == nil && (libvirt.Answered(err) || ok && !errors.Is(f.Kind, provider.ErrOutcomeUnknown)) {
		if undo := cleanUp(ctx, false); undo != nil {
			h.log().Warn("a create failed and what it left could not be removed; it is listed as failed until it is", "instance", req.Name, "error", undo)
			f := *judge(err)
			f.Kind, f.Message = provider.ErrOutcomeUnknown, f.Message+"; and what it left could not be removed: "+undo.Error()
			return none, &f
		}
		return none, err
	}
	// The caller is gone or the connection is. The name stays locked until the attempt to clean up has ended. Only the last answer
	// may have been lost: then the instance is listed and perhaps in use by now.
	handedOver = h.spawn(func(ctx context.Context) {
		defer unlock()
		if undo := cleanUp(ctx, true); undo != nil {
			h.log().Warn("a create was cut short and what it left could not be removed yet", "instance", req.Name, "error", undo)
		}
	})
	return none, err
}

// vacate makes sure that nobody has the name. What an earlier attempt left half made is removed.
func (h *Host) vacate(ctx context.Context, s *libvirt.Session, req provider.CreateRequest) error {
	dom, err := s.DomainLookupByName(req.Name)
	if libvirt.Code(err) == golibvirt.ErrNoDomain {
		return nil
	}
	if err != nil {
		return err
	}
	who, err := h.identify(s, dom)
	if err != nil {
		return err
	}
	switch {
	case !who.ours:
		return fault(provider.ErrPermanent, provider.ReasonUnknown, "the domain %s is there and does not carry our mark; rename or remove it", req.Name)
	case who.mark.Owner != req.Mark.Owner || who.mark.Proxy != req.Mark.Proxy || who.mark.Generation != req.Mark.Generation:
		return fault(provider.ErrPermanent, provider.ReasonUnknown, "the domain %s carries another mark: %s", req.Name, who.mark)
	case who.Made != "":
		return fault(provider.ErrAlreadyExists, provider.ReasonUnknown, "the domain %s is there", req.Name)
	}
	return begun(h.removeDomain(ctx, s, dom, who))
}

// identify says whose a domain is.
func (h *Host) identify(s *libvirt.Session, dom golibvirt.Domain) (identity, error) {
	h.mu.Lock()
	who, known := h.known[dom.UUID]
	h.mu.Unlock()
	if known && (!who.ours || who.Made != "" && who.name == dom.Name) {
		return who, nil
	}
	return h.readMark(s, dom)
}

// readMark says whose a domain is that something is going to be done to. What is remembered may be old: somebody may have taken
// our mark away and made it theirs.
func (h *Host) readMark(s *libvirt.Session, dom golibvirt.Domain) (who identity, err error) {
	read := func(of golibvirt.DomainModificationImpact) (string, error) {
		return s.DomainGetMetadata(dom, int32(golibvirt.DomainMetadataElement), golibvirt.OptString{metadataURI}, of)
	}
	text, err := read(golibvirt.DomainAffectConfig)
	// Then it has no definition, and what runs still carries the mark.
	lost := libvirt.Code(err) == golibvirt.ErrOperationInvalid
	if lost && strings.Count(dom.Name, "--") == 2 {
		text, err = read(golibvirt.DomainAffectLive)
	}
	switch {
	case err == nil:
		// A clone carries a copy of our mark. Its name and UUID are its own, and the files are the original's.
		if who = parseRecord(dom.Name, text); !strings.HasSuffix(who.Prefix, prefixOf("", dom.UUID)) {
			who = identity{}
		}
	case libvirt.Code(err) == golibvirt.ErrNoDomainMetadata, libvirt.Code(err) == golibvirt.ErrOperationInvalid: // theirs, or stopped since
	default:
		return identity{}, err
	}
	if lost && who.ours {
		// Such a domain counts as half made: it is gone with its next stop, and its files would stay.
		who.Made, who.Why = "", withoutDefinition
	}
	h.mu.Lock()
	h.known[dom.UUID] = who
	h.mu.Unlock()
	return who, nil
}

// build is one attempt to make an instance.
type build struct {
	host *Host
	req  provider.CreateRequest
	plan *Plan
	base *base
	id   uuid
	why  string

	defined  bool // the domain may exist
	emulated bool
	metadata string
	identity identity
}

func (b *build) run(ctx context.Context, s *libvirt.Session) error {
	h, c := b.host, b.host.config
	pool, folder, err := findPool(s, c.Pool)
	if err != nil {
		return err
	}
	mac := macOf(b.req.Name)
	r := record{
		Namespace: metadataURI, Mark: b.req.Mark.String(), Created: time.Now().UTC().Format(time.RFC3339), Pool: c.Pool, Prefix: prefixOf(b.req.Name, b.id),
		Base: b.base.name, Network: c.Network, Group: b.req.Spec.Placement.Group, Why: b.why,
	}
	if b.plan.network != nil {
		for _, a := range b.plan.network.Addresses {
			if a.Addr().Is6() == c.IPv6 {
				r.Address = a.Addr().String()
				break
			}
		}
	}
	if c.Network != "" {
		if err := b.checkNetwork(s, mac.String(), &r); err != nil {
			return err
		}
	}
	seed, err := b.plan.seed(b.req.Name, b.req.Mark.Hash, mac)
	if err != nil {
		return fault(provider.ErrPermanent, provider.ReasonUnsupported, "seed: %v", err)
	}
	h.mu.Lock()
	b.emulated = h.noKVM && c.AllowEmulation
	h.mu.Unlock()
	m := machine{name: b.req.Name, id: b.id, plan: b.plan, record: r, mac: mac, folder: folder, bridge: c.Bridge, emulated: b.emulated}
	dom, err := b.define(s, m)
	if err != nil {
		return err
	}
	if err := b.makeDisk(ctx, s, pool, r); err != nil {
		return err
	}
	if err := uploadSeed(s, pool, seedName(r.Prefix), seed); err != nil {
		return err
	}
	if dom, err = b.start(s, m, dom); err != nil {
		return err
	}
	if c.Autostart {
		if err := s.DomainSetAutostart(dom, 1); err != nil {
			return err
		}
	}
	r.Made = time.Now().UTC().Format(time.RFC3339)
	if err := b.setRecord(s, dom, r); err != nil {
		return err
	}
	h.mu.Lock()
	h.known[b.id] = b.identity
	h.mu.Unlock()
	return nil
}

func (b *build) checkNetwork(s *libvirt.Session, mac string, r *record) error {
	network, err := activeNetwork(s, b.host.config.Network)
	if err != nil {
		return err
	}
	leases, _, err := s.NetworkGetDhcpLeases(network, golibvirt.OptString{mac}, 1, 0)
	if err != nil && libvirt.Code(err) == 0 {
		return err
	}
	for _, l := range leases {
		r.Stale = append(r.Stale, staleLease{l.Ipaddr, l.Expirytime})
	}
	return nil
}

// define has libvirt keep the domain, which claims the name.
func (b *build) define(s *libvirt.Session, m machine) (golibvirt.Domain, error) {
	text, err := m.render()
	if err != nil {
		return golibvirt.Domain{}, fault(provider.ErrPermanent, provider.ReasonUnsupported, "domain: %v", err)
	}
	metadata, err := xml.Marshal(m.record)
	if err != nil {
		return golibvirt.Domain{}, fault(provider.ErrPermanent, provider.ReasonUnsupported, "metadata: %v", err)
	}
	b.metadata = string(metadata)
	before := b.defined
	b.defined = true
	dom, err := s.DomainDefineXMLFlags(text, golibvirt.DomainDefineValidate)
	if libvirt.Code(err) != 0 {
		b.defined = before
	}
	switch {
	case libvirt.Code(err) == golibvirt.ErrOperationFailed && strings.Contains(err.Error(), "already exists"):
		return dom, fault(provider.ErrUnavailable, provider.ReasonUnknown, "somebody else has just defined the domain %s", m.name)
	case libvirt.Code(err) == golibvirt.ErrConfigUnsupported && m.plan.firmware == firmwareUEFI && strings.Contains(err.Error(), "firmware"),
		libvirt.Code(err) == golibvirt.ErrOperationFailed && strings.Contains(err.Error(), "firmware"):
		return dom, noFirmware(err)
	case libvirt.Code(err) == golibvirt.ErrInvalidArg || libvirt.Code(err) == golibvirt.ErrConfigUnsupported:
		if !m.emulated && aboutKVM(err) {
			return b.withoutKVM(s, m, err)
		}
	}
	return dom, err
}

func noFirmware(err error) error {
	return fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the host has no UEFI firmware (Debian: ovmf), and the image wants it: %v", err)
}

// blamesKVM reports whether KVM may be what keeps an instance from starting. QEMU does not always live to say so, so
// before KVM has worked once on the host, and when emulation is allowed, any end of QEMU is taken for that.
func (b *build) blamesKVM(err error) bool {
	b.host.mu.Lock()
	defer b.host.mu.Unlock()
	ended := strings.Contains(err.Error(), "monitor") && b.host.config.AllowEmulation
	return !b.host.hasKVM && (ended || aboutKVM(err))
}

// aboutKVM reports whether an error blames KVM.
func aboutKVM(err error) bool { return strings.Contains(strings.ToLower(err.Error()), "kvm") }

// withoutKVM goes on with emulation when that is allowed.
func (b *build) withoutKVM(s *libvirt.Session, m machine, cause error) (golibvirt.Domain, error) {
	if !b.host.config.AllowEmulation {
		return golibvirt.Domain{}, fault(provider.ErrUnavailable, provider.ReasonUnsupported, "KVM does not work on this host, and AllowEmulation is not set: %v", cause)
	}
	b.host.mu.Lock()
	first := !b.host.noKVM
	b.host.noKVM = true
	b.host.mu.Unlock()
	if first {
		b.host.log().Warn("KVM does not work on this host; instances are emulated, which is many times slower", "error", cause)
	}
	m.emulated, b.emulated = true, true
	return b.define(s, m)
}

// start starts the domain. Only that shows whether KVM works: libvirt defines what the host can't run.
func (b *build) start(s *libvirt.Session, m machine, dom golibvirt.Domain) (golibvirt.Domain, error) {
	started, err := s.DomainCreateWithFlags(dom, 0)
	if err != nil && libvirt.Code(err) != 0 && !m.emulated && b.blamesKVM(err) {
		if dom, err = b.withoutKVM(s, m, err); err != nil {
			return dom, err
		}
		started, err = s.DomainCreateWithFlags(dom, 0)
		m.emulated = true
	}
	switch {
	case err == nil:
		if !m.emulated {
			b.host.mu.Lock()
			b.host.hasKVM = true
			b.host.mu.Unlock()
		}
		return started, nil
	case strings.Contains(err.Error(), "firmware") && libvirt.Code(err) == golibvirt.ErrOperationFailed:
		return dom, noFirmware(err)
	case libvirt.Code(err) != 0 && strings.Contains(err.Error(), "Cannot allocate memory"):
		return dom, fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the host is out of memory: %v", err)
	}
	return dom, err
}

func (b *build) setRecord(s *libvirt.Session, dom golibvirt.Domain, r record) error {
	metadata, err := xml.Marshal(r)
	if err != nil {
		return err
	}
	b.metadata = string(metadata)
	b.identity = parseRecord(b.req.Name, b.metadata)
	// The live one is changed too, so that whoever looks at the running domain sees the same.
	return s.DomainSetMetadata(dom, int32(golibvirt.DomainMetadataElement), golibvirt.OptString{b.metadata}, golibvirt.OptString{"egress"},
		golibvirt.OptString{metadataURI}, golibvirt.DomainAffectConfig|golibvirt.DomainAffectLive)
}

// makeDisk makes the overlay that the instance writes to.
func (b *build) makeDisk(ctx context.Context, s *libvirt.Session, pool golibvirt.StoragePool, r record) error {
	size := max(b.base.capacity, b.plan.diskBytes)
	if b.plan.diskBytes != 0 && b.plan.diskBytes < b.base.capacity {
		return fault(provider.ErrPermanent, provider.ReasonUnsupported, "DiskGiB %d is less than the image's %d bytes", b.plan.diskBytes>>30, b.base.capacity)
	}
	return makeOverlay(ctx, s, pool, diskName(r.Prefix), size, b.base.path, formatQcow2)
}

// makeOverlay makes an empty qcow2 volume on top of another. The backing format is always said: libvirt takes it for raw
// otherwise, and the guest for garbage.
func makeOverlay(ctx context.Context, s *libvirt.Session, pool golibvirt.StoragePool, name string, size uint64, backing, format string) error {
	v := libvirtxml.StorageVolume{
		Name: name, Capacity: &libvirtxml.StorageVolumeSize{Unit: "bytes", Value: size}, Allocation: &libvirtxml.StorageVolumeSize{Value: 0},
		Target:       &libvirtxml.StorageVolumeTarget{Format: &libvirtxml.StorageVolumeTargetFormat{Type: formatQcow2}},
		BackingStore: &libvirtxml.StorageVolumeBackingStore{Path: backing, Format: &libvirtxml.StorageVolumeTargetFormat{Type: format}},
	}
	text, err := v.Marshal()
	if err != nil {
		return err
	}
	return patiently(ctx, overlayPatience, 100*time.Millisecond, func() (again bool, err error) {
		_, err = s.StorageVolCreateXML(pool, text, 0)
		// While another process has the pool read anew, libvirt does not know the volume below.
		return libvirt.Code(err) == golibvirt.ErrNoStorageVol, err
	})
}

// patiently calls f until it says that calling it again is of no use, with a pause between calls, for as long as patience and
// ctx last.
func patiently(ctx context.Context, patience, pause time.Duration, f func() (again bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		again, err := f()
		if !again {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// overlayPatience is how long the volume that an overlay stands on may be unknown to libvirt.
const overlayPatience = 2 * time.Second

// makeRaw makes an empty volume that something is uploaded to.
func makeRaw(s *libvirt.Session, pool golibvirt.StoragePool, name string, size uint64) (golibvirt.StorageVol, error) {
	v := libvirtxml.StorageVolume{
		Name: name, Capacity: &libvirtxml.StorageVolumeSize{Unit: "bytes", Value: size}, Allocation: &libvirtxml.StorageVolumeSize{Value: 0},
		Target: &libvirtxml.StorageVolumeTarget{
			Format: &libvirtxml.StorageVolumeTargetFormat{Type: formatRaw},
			// Seeds hold secrets, and bases are read by QEMU, which libvirt makes the owner.
			Permissions: &libvirtxml.StorageVolumeTargetPermissions{Mode: "0600"},
		},
	}
	text, err := v.Marshal()
	if err != nil {
		return golibvirt.StorageVol{}, err
	}
	return s.StorageVolCreateXML(pool, text, 0)
}

func uploadSeed(s *libvirt.Session, pool golibvirt.StoragePool, name string, seed []byte) error {
	vol, err := makeRaw(s, pool, name, uint64(len(seed)))
	if err != nil {
		return err
	}
	return upload(s, vol, bytes.NewReader(seed))
}

func (b *build) instance() provider.Instance {
	return b.host.describe(golibvirt.Domain{Name: b.req.Name, UUID: b.id}, b.identity, int32(golibvirt.DomainRunning), 0)
}

// refreshPatience is how long others may be making volumes in a pool that is to be read anew.
const refreshPatience = 15 * time.Second

// refresh has libvirt read the pool anew. It refuses that while a volume is being made, which takes a moment.
func refresh(ctx context.Context, s *libvirt.Session, pool golibvirt.StoragePool) error {
	return patiently(ctx, refreshPatience, 50*time.Millisecond, func() (again bool, err error) {
		err = s.StoragePoolRefresh(pool, 0)
		return libvirt.Code(err) == golibvirt.ErrInternalError && strings.Contains(err.Error(), "asynchronous jobs"), err
	})
}

// findPool returns an active pool and its folder.
func findPool(s *libvirt.Session, name string) (golibvirt.StoragePool, string, error) {
	pool, err := s.StoragePoolLookupByName(name)
	if libvirt.Code(err) == golibvirt.ErrNoStoragePool {
		return pool, "", fault(provider.ErrUnavailable, provider.ReasonStorageNotFound, "there is no storage pool %s; virsh pool-list --all shows what there is", name)
	}
	if err != nil {
		return pool, "", err
	}
	active, err := s.StoragePoolIsActive(pool)
	if err != nil {
		return pool, "", err
	}
	if active == 0 {
		return pool, "", fault(provider.ErrUnavailable, provider.ReasonStorageNotFound, "the storage pool %s is not active: virsh pool-start %s, and pool-autostart", name, name)
	}
	text, err := s.StoragePoolGetXMLDesc(pool, 0)
	if err != nil {
		return pool, "", err
	}
	var parsed libvirtxml.StoragePool
	if err := parsed.Unmarshal(text); err != nil || parsed.Target == nil || parsed.Target.Path == "" {
		return pool, "", fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the storage pool %s is no folder, want one of type dir, fs or netfs", name)
	}
	switch parsed.Type {
	case "dir", "fs", "netfs":
		return pool, strings.TrimSuffix(parsed.Target.Path, "/"), nil
	}
	return pool, "", fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the storage pool %s has type %s, want dir, fs or netfs", name, parsed.Type)
}

// activeNetwork returns a network that guests can be attached to.
func activeNetwork(s *libvirt.Session, name string) (golibvirt.Network, error) {
	network, err := s.NetworkLookupByName(name)
	if libvirt.Code(err) == golibvirt.ErrNoNetwork {
		return network, fault(provider.ErrUnavailable, provider.ReasonNetworkNotFound, "there is no network %s; virsh net-list --all shows what there is", name)
	}
	if err != nil {
		return network, err
	}
	active, err := s.NetworkIsActive(network)
	if err != nil {
		return network, err
	}
	if active == 0 {
		return network, fault(provider.ErrUnavailable, provider.ReasonNetworkNotFound, "the network %s is not active: virsh net-start %s, and net-autostart", name, name)
	}
	return network, nil
}
