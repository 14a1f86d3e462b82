package gcp

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"cloud.google.com/go/compute/apiv1/computepb"
	"google.golang.org/protobuf/proto"

	"crawl.example.com/egress/cloudinit"
	"crawl.example.com/egress/provider"
)

// Keys of provider.Spec.Options.
const (
	// OptionMachineType is a machine type such as "n2-standard-2", instead of CPUs and MemoryMiB.
	OptionMachineType = "machine-type"
	// OptionDiskType is a disk type such as "pd-standard", instead of Config.DiskType.
	OptionDiskType = "disk-type"
	// OptionSpot is "true" or "false", instead of Config.Spot.
	OptionSpot = "spot"
)

// Compute's limits for metadata.
const (
	maxMetadataValue = 262144
	maxMetadata      = 512 * 1024 // all keys and values together stay below
)

// machineType is one of Google's general-purpose types.
type machineType struct {
	name      string
	cpus, mib int
}

// machineTypes are the E2 types, cheapest first. The first three share their processors.
var machineTypes = []machineType{
	{"e2-micro", 2, 1024}, {"e2-small", 2, 2048}, {"e2-medium", 2, 4096}, {"e2-highcpu-4", 4, 4096},
	{"e2-standard-2", 2, 8192}, {"e2-highcpu-8", 8, 8192}, {"e2-highmem-2", 2, 16384}, {"e2-standard-4", 4, 16384},
	{"e2-highcpu-16", 16, 16384}, {"e2-highmem-4", 4, 32768}, {"e2-standard-8", 8, 32768}, {"e2-highcpu-32", 32, 32768},
	{"e2-highmem-8", 8, 65536}, {"e2-standard-16", 16, 65536}, {"e2-highmem-16", 16, 131072}, {"e2-standard-32", 32, 131072},
}

// plan is a spec in Google's terms.
type plan struct {
	zones                        []string
	spread                       bool
	image, machineType, diskType string
	diskGiB                      int
	spot                         bool
	metadata                     map[string]string
}

// Validate implements provider.Provider. All faults are joined.
func (p *Provider) Validate(spec provider.Spec) error {
	_, err := p.plan(spec)
	if err == nil {
		return nil
	}
	return &provider.Error{Provider: p.config.Name, Op: "validate", Kind: provider.ErrPermanent, Reason: provider.ReasonUnsupported, Err: err}
}

func (p *Provider) plan(spec provider.Spec) (*plan, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("gcp: "+format, args...)) }
	if spec.Provider != "" && spec.Provider != p.config.Name {
		fault("Provider %q, this one is %q", spec.Provider, p.config.Name)
	}
	s := &plan{
		zones: p.config.Zones, spread: p.config.Spread || spec.Placement.Group != "",
		image: or(spec.Image, p.config.Image), machineType: p.config.MachineType, diskType: p.config.DiskType,
		diskGiB: spec.DiskGiB, spot: p.config.Spot,
	}
	if err := checkImage(s.image); err != nil {
		fault("Image %w", err)
	}
	p.planZones(s, spec.Placement, fault)
	if spec.CPUs < 0 || spec.MemoryMiB < 0 || spec.DiskGiB < 0 || spec.DiskGiB > 65536 {
		fault("CPUs %d, MemoryMiB %d and DiskGiB %d: want none negative and a disk of at most 65536", spec.CPUs, spec.MemoryMiB, spec.DiskGiB)
	}
	if spec.Port < 0 || spec.Port > 65535 {
		fault("Port %d, want 1 to 65535", spec.Port)
	}
	if spec.CPUs > 0 || spec.MemoryMiB > 0 {
		i := slices.IndexFunc(machineTypes, func(t machineType) bool { return t.cpus >= spec.CPUs && t.mib >= spec.MemoryMiB })
		switch {
		case spec.Options[OptionMachineType] != "":
			fault("Options %s stands beside CPUs and MemoryMiB, want one or the other", OptionMachineType)
		case i < 0:
			fault("CPUs %d with MemoryMiB %d: no E2 machine type has that much, name one by Options %s", spec.CPUs, spec.MemoryMiB, OptionMachineType)
		default:
			s.machineType = machineTypes[i].name
		}
	}
	for _, k := range slices.Sorted(maps.Keys(spec.Options)) {
		v := spec.Options[k]
		switch k {
		case OptionMachineType, OptionDiskType:
			if !namePattern.MatchString(v) {
				fault("Options %s %q is no type's name, want one such as e2-small or pd-balanced", k, v)
			}
			if k == OptionMachineType {
				s.machineType = v
			} else {
				s.diskType = v
			}
		case OptionSpot:
			if v != "true" && v != "false" {
				fault("Options %s %q, want true or false", k, v)
			}
			s.spot = v == "true"
		default:
			fault("Options has unknown key %q, want %s, %s or %s", k, OptionMachineType, OptionDiskType, OptionSpot)
		}
	}
	if spec.CloudInit.Network != nil {
		fault("CloudInit.Network: Google assigns addresses itself; use Config.StaticAddresses for fixed external ones")
	}
	if len(spec.CloudInit.UserData) > 0 {
		// Its size is checked below, as it is sent.
		if err := cloudinit.CheckUserData(spec.CloudInit.UserData, 0); err != nil {
			fault("CloudInit.UserData: %w", err)
		}
	}
	if v := spec.CloudInit.VendorData; len(v) > 0 && !isScript(v) {
		fault("CloudInit.VendorData is no script: Google has no vendor data, and only a script that starts with #! can go into startup-script")
	}
	s.metadata = p.metadata(spec.CloudInit)
	total := 0
	for _, k := range slices.Sorted(maps.Keys(s.metadata)) {
		n := len(s.metadata[k])
		total += len(k) + n
		if n > maxMetadataValue {
			fault("metadata %s has %d bytes as it is sent, want at most %d (binary documents grow by a third)", k, n, maxMetadataValue)
		}
	}
	if total >= maxMetadata {
		fault("metadata has %d bytes in all, want less than %d", total, maxMetadata)
	}
	return s, errors.Join(faults...)
}

// planZones narrows the zones. Every zone has the labels zone and region.
func (p *Provider) planZones(s *plan, where provider.Placement, fault func(string, ...any)) {
	if where.Host != "" {
		if !slices.Contains(p.config.Zones, where.Host) {
			fault("Placement.Host %q, want one of the zones %s", where.Host, strings.Join(p.config.Zones, ", "))
		}
		s.zones = []string{where.Host}
	}
	for k := range where.Labels {
		if k != "zone" && k != "region" {
			fault("Placement.Labels has unknown key %q, want zone or region", k)
		}
	}
	var fit []string
	for _, z := range s.zones {
		zone, wantZone := where.Labels["zone"]
		region, wantRegion := where.Labels["region"]
		if zonePattern.MatchString(z) && (!wantZone || zone == z) && (!wantRegion || region == regionOf(z)) {
			fit = append(fit, z)
		}
	}
	if len(fit) == 0 {
		fault("Placement fits none of the zones %s", strings.Join(p.config.Zones, ", "))
	}
	s.zones = fit
}

func isScript(b []byte) bool { return bytes.HasPrefix(b, []byte("#!")) }

// Warnings implements provider.Warner.
func (p *Provider) Warnings(spec provider.Spec) []string {
	var found []string
	if len(spec.CloudInit.VendorData) > 0 {
		found = append(found, "the vendor script runs after cloud-init has finished, since Google has no vendor data: what the user data does can't rely on it")
	}
	image := or(spec.Image, p.config.Image)
	if strings.Contains(image, "debian-cloud/") && !p.config.BootstrapCloudInit && len(spec.CloudInit.UserData) > 0 {
		found = append(found, "Google's Debian images have no cloud-init, so that the user data does nothing; set BootstrapCloudInit or take another image")
	}
	if len(spec.CloudInit.UserData) == 0 {
		found = append(found, "there is no user data, so that the image must have the proxy in it")
	}
	return found
}

// metadata returns what the guest reads.
func (p *Provider) metadata(c provider.CloudInit) map[string]string {
	m := map[string]string{}
	if len(c.UserData) > 0 {
		if utf8.Valid(c.UserData) && !bytes.ContainsRune(c.UserData, 0) {
			m["user-data"] = string(c.UserData)
		} else {
			m["user-data"] = base64.StdEncoding.EncodeToString(c.UserData)
			m["user-data-encoding"] = "base64"
		}
	}
	if s := startupScript(p.config.BootstrapCloudInit, c.VendorData); s != "" {
		m["startup-script"] = s
	}
	return m
}

// startupScript returns the script that Google's guest agent runs as root at every boot, unordered against cloud-init.
// It is empty when there is nothing to do. Google's images have their guest agent, so none is installed.
func startupScript(bootstrap bool, vendor []byte) string {
	if !bootstrap && len(vendor) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("#!/bin/sh\nset -u\nstate=/var/lib/egress\nmkdir -p \"$state\"\n")
	if bootstrap {
		// The mark ends a loop of boots when the installation does not help.
		b.WriteString(`if ! command -v cloud-init >/dev/null 2>&1 && [ ! -e "$state/bootstrapped" ]; then
	export DEBIAN_FRONTEND=noninteractive
	if apt-get -o DPkg::Lock::Timeout=300 update && apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends cloud-init; then
		: >"$state/bootstrapped"
		reboot
		exit 0
	fi
	echo "egress: cloud-init could not be installed" >&2
	exit 1
fi
`)
	}
	// Exit status 2 is a recoverable error, since cloud-init 23.4.
	b.WriteString("if command -v cloud-init >/dev/null 2>&1; then\n\tcloud-init status --wait >/dev/null || [ $? -eq 2 ] || echo \"egress: cloud-init failed\" >&2\nfi\n")
	if len(vendor) > 0 {
		b.WriteString("if [ ! -e \"$state/vendor-done\" ]; then\n\tumask 077\n\tbase64 -d >\"$state/vendor\" <<'EGRESS_END'\n")
		for chunk := range slices.Chunk([]byte(base64.StdEncoding.EncodeToString(vendor)), 76) {
			b.Write(chunk)
			b.WriteByte('\n')
		}
		b.WriteString("EGRESS_END\n\tchmod 700 \"$state/vendor\"\n\t\"$state/vendor\" && : >\"$state/vendor-done\"\nfi\n")
	}
	return b.String()
}

// body is the instance that is asked for.
func (p *Provider) body(zone string, req provider.CreateRequest, s *plan, static netip.Addr) *computepb.Instance {
	disk := &computepb.AttachedDiskInitializeParams{
		SourceImage: proto.String(p.imagePath(s.image)),
		DiskType:    proto.String("zones/" + zone + "/diskTypes/" + s.diskType),
		Labels:      labelsOf(req.Mark, p.config.Labels),
	}
	if s.diskGiB > 0 {
		disk.DiskSizeGb = proto.Int64(int64(s.diskGiB))
	}
	x := &computepb.Instance{
		Name:        proto.String(req.Name),
		Labels:      labelsOf(req.Mark, p.config.Labels),
		MachineType: proto.String("zones/" + zone + "/machineTypes/" + s.machineType),
		Disks: []*computepb.AttachedDisk{{
			Boot: proto.Bool(true), AutoDelete: proto.Bool(true), InitializeParams: disk,
		}},
		NetworkInterfaces: []*computepb.NetworkInterface{p.networkInterface(zone, static)},
		Scheduling:        &computepb.Scheduling{ProvisioningModel: proto.String("STANDARD"), AutomaticRestart: proto.Bool(true)},
		Metadata:          &computepb.Metadata{},
	}
	for _, k := range slices.Sorted(maps.Keys(s.metadata)) {
		x.Metadata.Items = append(x.Metadata.Items, &computepb.Items{Key: proto.String(k), Value: proto.String(s.metadata[k])})
	}
	if len(p.config.Tags) > 0 {
		x.Tags = &computepb.Tags{Items: p.config.Tags}
	}
	if p.config.DeletionProtection {
		x.DeletionProtection = proto.Bool(true)
	}
	if s.spot {
		x.Scheduling = &computepb.Scheduling{
			ProvisioningModel: proto.String("SPOT"), InstanceTerminationAction: proto.String(p.config.SpotTermination),
			OnHostMaintenance: proto.String("TERMINATE"), AutomaticRestart: proto.Bool(false),
		}
	}
	return x
}

func (p *Provider) networkInterface(zone string, static netip.Addr) *computepb.NetworkInterface {
	n := &computepb.NetworkInterface{}
	if p.config.Network != "" {
		n.Network = proto.String(p.networkPath())
	}
	if p.config.Subnetwork != "" {
		n.Subnetwork = proto.String(p.subnetworkPath(zone))
	}
	var tier *string
	if p.config.NetworkTier != "" {
		tier = proto.String(p.config.NetworkTier)
	}
	if p.config.External != ExternalNone {
		access := &computepb.AccessConfig{Type: proto.String("ONE_TO_ONE_NAT"), Name: proto.String("External NAT"), NetworkTier: tier}
		if static.IsValid() {
			access.NatIP = proto.String(static.String())
		}
		n.AccessConfigs = []*computepb.AccessConfig{access}
	}
	if p.config.IPv6 {
		n.StackType = proto.String("IPV4_IPV6")
		// External IPv6 exists in the premium tier only.
		n.Ipv6AccessConfigs = []*computepb.AccessConfig{{
			Type: proto.String("DIRECT_IPV6"), Name: proto.String("External IPv6"), NetworkTier: proto.String("PREMIUM"),
		}}
	}
	return n
}

func (p *Provider) imagePath(image string) string {
	if strings.HasPrefix(image, "global/") {
		return "projects/" + p.config.Project + "/" + image
	}
	return image
}

func (p *Provider) networkPath() string {
	if strings.Contains(p.config.Network, "/") {
		return p.config.Network
	}
	return "projects/" + p.config.Project + "/global/networks/" + p.config.Network
}

func (p *Provider) subnetworkPath(zone string) string {
	if strings.Contains(p.config.Subnetwork, "/") {
		return p.config.Subnetwork
	}
	return "projects/" + p.config.Project + "/regions/" + regionOf(zone) + "/subnetworks/" + p.config.Subnetwork
}
