package libvirttest

import (
	"bytes"
	"encoding/hex"
	"encoding/xml"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"
)

// Domain is a virtual machine.
type Domain struct {
	// XML is what it was defined with last.
	XML libvirtxml.Domain
	// UUID is libvirt's.
	UUID golibvirt.UUID
	// State and Reason are libvirt's.
	State  golibvirt.DomainState
	Reason int32
	// Transient domains run without a definition.
	Transient bool
	// Autostart and Saved say whether it starts with the host, and whether its memory was saved to disk.
	Autostart, Saved bool
	// Metadata is what elements of other namespaces than libvirt's say, by namespace.
	Metadata map[string]string
	// Addresses are what libvirt says by source. Without an entry the others know nothing, and the guest agent what
	// Config.Address says.
	Addresses map[golibvirt.DomainInterfaceAddressesSource][]golibvirt.DomainInterface
	// ShutsDown has the guest heed the power button.
	ShutsDown bool
}

// Domains returns copies of the domains, by name.
func (h *Host) Domains() []Domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Domain
	for _, name := range slices.Sorted(maps.Keys(h.domains)) {
		d := *h.domains[name]
		d.Metadata = maps.Clone(d.Metadata)
		all = append(all, d)
	}
	return all
}

// AddDomain defines a domain of that name, which somebody else made, and returns its UUID.
func (h *Host) AddDomain(name string) golibvirt.UUID {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := &Domain{XML: libvirtxml.Domain{Name: name, Type: "kvm"}, State: golibvirt.DomainShutoff, Metadata: map[string]string{}}
	copy(d.UUID[:], "foreign "+name)
	h.domains[name] = d
	return d.UUID
}

// ChangeDomain changes a domain, if it is there.
func (h *Host) ChangeDomain(name string, change func(*Domain)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d := h.domains[name]; d != nil {
		change(d)
	}
}

// RemoveDomain removes a domain and leaves its files, as somebody else might.
func (h *Host) RemoveDomain(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.domains, name)
}

func (d *Domain) runs() bool {
	return d.State != golibvirt.DomainShutoff && d.State != golibvirt.DomainCrashed
}

func (d *Domain) ref() golibvirt.Domain {
	id := int32(-1)
	if d.runs() {
		id = 1
	}
	return golibvirt.Domain{Name: d.XML.Name, UUID: d.UUID, ID: id}
}

func (h *Host) domainLocked(ref golibvirt.Domain) (*Domain, error) {
	for _, d := range h.domains {
		if d.UUID == ref.UUID {
			return d, nil
		}
	}
	return nil, fail(golibvirt.ErrNoDomain, "Domain not found: no domain with matching uuid '%s' (%s)", hex.EncodeToString(ref.UUID[:]), ref.Name)
}

func (h *Host) domainByNameLocked(args golibvirt.DomainLookupByNameArgs) (any, error) {
	d := h.domains[args.Name]
	if d == nil {
		return nil, fail(golibvirt.ErrNoDomain, "Domain not found: no domain with matching name '%s'", args.Name)
	}
	return golibvirt.DomainLookupByNameRet{Dom: d.ref()}, nil
}

func (h *Host) domainByUUIDLocked(args golibvirt.DomainLookupByUUIDArgs) (any, error) {
	d, err := h.domainLocked(golibvirt.Domain{UUID: args.UUID})
	if err != nil {
		return nil, err
	}
	return golibvirt.DomainLookupByUUIDRet{Dom: d.ref()}, nil
}

func (h *Host) defineLocked(args golibvirt.DomainDefineXMLFlagsArgs) (any, error) {
	var x libvirtxml.Domain
	if err := x.Unmarshal(args.XML); err != nil {
		return nil, fail(golibvirt.ErrXMLDetail, "(domain_definition):1: %v", err)
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(x.UUID, "-", ""))
	if err != nil || len(raw) != golibvirt.UUIDBuflen || x.Name == "" || x.OS == nil {
		return nil, fail(golibvirt.ErrXMLInvalidSchema, "XML document failed to validate against schema: Unable to validate doc against domain.rng")
	}
	var id golibvirt.UUID
	copy(id[:], raw)
	if x.OS.Firmware == "efi" && h.config.NoUEFI {
		return nil, fail(golibvirt.ErrOperationFailed, "operation failed: Unable to find any firmware to satisfy 'efi'")
	}
	old := h.domains[x.Name]
	if old != nil && old.UUID != id {
		return nil, fail(golibvirt.ErrOperationFailed, "operation failed: domain '%s' already exists with uuid %s", x.Name, hex.EncodeToString(old.UUID[:]))
	}
	if other, err := h.domainLocked(golibvirt.Domain{UUID: id}); err == nil && other.XML.Name != x.Name {
		return nil, fail(golibvirt.ErrOperationFailed, "operation failed: domain '%s' is already defined with uuid %s", other.XML.Name, x.UUID)
	}
	d := &Domain{XML: x, UUID: id, State: golibvirt.DomainShutoff, Metadata: map[string]string{}}
	if old != nil {
		d.State, d.Reason, d.Autostart, d.Addresses = old.State, old.Reason, old.Autostart, old.Addresses
	}
	if x.Metadata != nil {
		maps.Copy(d.Metadata, elements(x.Metadata.XML))
	}
	h.domains[x.Name] = d
	return golibvirt.DomainDefineXMLFlagsRet{Dom: d.ref()}, nil
}

// elements splits metadata by namespace. libvirt gives the elements back without their namespace.
func elements(text string) map[string]string {
	found := map[string]string{}
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		begin := d.InputOffset()
		token, err := d.Token()
		if err != nil {
			return found
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if d.Skip() != nil {
			return found
		}
		space := start.Name.Space
		var quoted bytes.Buffer
		_ = xml.EscapeText(&quoted, []byte(space)) // into memory
		found[space] = strings.Replace(strings.TrimSpace(text[begin:d.InputOffset()]), ` xmlns="`+quoted.String()+`"`, "", 1)
	}
}

func (h *Host) startLocked(args golibvirt.DomainCreateWithFlagsArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if d.runs() {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: domain is already running")
	}
	if d.XML.Type == "kvm" && h.config.NoKVM {
		d.Reason = int32(golibvirt.DomainShutoffFailed)
		return nil, fail(golibvirt.ErrInternalError, "internal error: process exited while connecting to monitor: Could not access KVM kernel module: No such file or directory")
	}
	if devices := d.XML.Devices; devices != nil {
		for _, disk := range devices.Disks {
			file := disk.Source.File.File
			v := h.fileLocked(file)
			for ; v != nil && v.Backing != ""; v = h.fileLocked(file) {
				file = v.Backing
			}
			if v == nil {
				return nil, fail(golibvirt.ErrSystemError, "Cannot access storage file '%s': No such file or directory", file)
			}
		}
		for _, nic := range devices.Interfaces {
			if nic.Source == nil || nic.Source.Network == nil {
				continue
			}
			n, err := h.networkLocked(golibvirt.Network{Name: nic.Source.Network.Network})
			if err != nil {
				return nil, err
			}
			if n.Inactive {
				return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: network '%s' is not active", n.Name)
			}
		}
		for _, serial := range devices.Serials {
			if serial.Log == nil {
				continue
			}
			for _, p := range h.pools {
				if path.Dir(serial.Log.File) == p.Path {
					name := path.Base(serial.Log.File)
					p.volumes[name] = &Volume{Name: name, Format: "raw", Modified: time.Now(), Unseen: true}
				}
			}
		}
	}
	d.State, d.Reason = golibvirt.DomainRunning, int32(golibvirt.DomainRunningBooted)
	return golibvirt.DomainCreateWithFlagsRet{Dom: d.ref()}, nil
}

func (d *Domain) mustRun() error {
	if !d.runs() {
		return fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: domain is not running")
	}
	return nil
}

// stopLocked switches a domain off.
func (h *Host) stopLocked(d *Domain, reason golibvirt.DomainShutoffReason) {
	d.State, d.Reason = golibvirt.DomainShutoff, int32(reason)
	if d.Transient {
		delete(h.domains, d.XML.Name)
	}
}

func (h *Host) destroyLocked(args golibvirt.DomainDestroyFlagsArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if err := d.mustRun(); err != nil {
		return nil, err
	}
	h.stopLocked(d, golibvirt.DomainShutoffDestroyed)
	return nil, nil
}

func (h *Host) shutdownLocked(args golibvirt.DomainShutdownFlagsArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if err := d.mustRun(); err != nil {
		return nil, err
	}
	if d.ShutsDown {
		h.stopLocked(d, golibvirt.DomainShutoffShutdown)
	}
	return nil, nil
}

func (h *Host) undefineLocked(args golibvirt.DomainUndefineFlagsArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if d.XML.OS != nil && d.XML.OS.Firmware == "efi" && args.Flags&golibvirt.DomainUndefineNvram == 0 {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: cannot undefine domain with nvram")
	}
	if d.Saved && args.Flags&golibvirt.DomainUndefineManagedSave == 0 {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: Refusing to undefine while domain managed save image exists")
	}
	if d.runs() {
		d.Transient = true
		return nil, nil
	}
	delete(h.domains, d.XML.Name)
	return nil, nil
}

func (h *Host) stateLocked(args golibvirt.DomainGetStateArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	return golibvirt.DomainGetStateRet{State: int32(d.State), Reason: d.Reason}, nil
}

func (h *Host) managedSaveLocked(args golibvirt.DomainHasManagedSaveImageArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	return golibvirt.DomainHasManagedSaveImageRet{Result: number(d.Saved)}, nil
}

func (h *Host) autostartLocked(args golibvirt.DomainSetAutostartArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	d.Autostart = args.Autostart != 0
	return nil, nil
}

func (h *Host) setMetadataLocked(args golibvirt.DomainSetMetadataArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if args.Flags&golibvirt.DomainAffectLive != 0 {
		if err := d.mustRun(); err != nil {
			return nil, err
		}
	}
	if len(args.Uri) != 1 || len(args.Key) != 1 || len(args.Metadata) != 1 {
		return nil, fail(golibvirt.ErrInvalidArg, "invalid argument: key must be set when the element is")
	}
	maps.Copy(d.Metadata, elements(args.Metadata[0]))
	return nil, nil
}

func (h *Host) getMetadataLocked(args golibvirt.DomainGetMetadataArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if d.Transient && args.Flags&golibvirt.DomainAffectConfig != 0 {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: transient domains do not have any persistent config")
	}
	if len(args.Uri) == 1 {
		if text, ok := d.Metadata[args.Uri[0]]; ok {
			return golibvirt.DomainGetMetadataRet{Metadata: text}, nil
		}
	}
	return nil, fail(golibvirt.ErrNoDomainMetadata, "metadata not found: Requested metadata element is not present")
}

// Statistics of virDomainStatsTypes.
const (
	statsState   = 1 << 0
	statsBalloon = 1 << 2
	statsVCPU    = 1 << 3
)

func (h *Host) statsLocked(args golibvirt.ConnectGetAllDomainStatsArgs) (any, error) {
	var ret golibvirt.ConnectGetAllDomainStatsRet
	for _, name := range slices.Sorted(maps.Keys(h.domains)) {
		d := h.domains[name]
		r := golibvirt.DomainStatsRecord{Dom: d.ref()}
		add := func(field string, v *golibvirt.TypedParamValue) {
			r.Params = append(r.Params, golibvirt.TypedParam{Field: field, Value: *v})
		}
		if args.Stats&statsState != 0 {
			add("state.state", golibvirt.NewTypedParamValueInt(int32(d.State)))
			add("state.reason", golibvirt.NewTypedParamValueInt(d.Reason))
		}
		if args.Stats&statsBalloon != 0 && d.XML.Memory != nil {
			memory := uint64(d.XML.Memory.Value)
			if d.XML.Memory.Unit == "MiB" {
				memory <<= 10
			}
			add("balloon.maximum", golibvirt.NewTypedParamValueUllong(memory))
		}
		if args.Stats&statsVCPU != 0 && d.XML.VCPU != nil {
			add("vcpu.maximum", golibvirt.NewTypedParamValueUint(uint32(d.XML.VCPU.Value)))
		}
		ret.RetStats = append(ret.RetStats, r)
	}
	return ret, nil
}

func (h *Host) agentTimeoutLocked(args golibvirt.DomainAgentSetResponseTimeoutArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if err := d.mustRun(); err != nil {
		return nil, err
	}
	return golibvirt.DomainAgentSetResponseTimeoutRet{}, nil
}

func (h *Host) addressesLocked(args golibvirt.DomainInterfaceAddressesArgs) (any, error) {
	d, err := h.domainLocked(args.Dom)
	if err != nil {
		return nil, err
	}
	if err := d.mustRun(); err != nil {
		return nil, err
	}
	source := golibvirt.DomainInterfaceAddressesSource(args.Source)
	found, ok := d.Addresses[source]
	if !ok && source == golibvirt.DomainInterfaceAddressesSrcAgent && h.config.Address != nil && d.XML.Devices != nil {
		for _, nic := range d.XML.Devices.Interfaces {
			mac := nic.MAC.Address
			found = append(found, golibvirt.DomainInterface{
				Name: "eth0", Hwaddr: golibvirt.OptString{mac}, Addrs: []golibvirt.DomainIPAddr{{Addr: h.config.Address(mac), Prefix: 24}},
			})
		}
		ok = true
	}
	if !ok && source == golibvirt.DomainInterfaceAddressesSrcAgent {
		return nil, fail(golibvirt.ErrAgentUnresponsive, "Guest agent is not responding: QEMU guest agent is not connected")
	}
	return golibvirt.DomainInterfaceAddressesRet{Ifaces: found}, nil
}
