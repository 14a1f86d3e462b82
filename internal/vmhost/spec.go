package vmhost

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"crawl.example.com/egress/cloudinit"
	"crawl.example.com/egress/provider"
)

// Keys of provider.Spec.Options.
const (
	OptionSHA256   = "sha256"
	OptionFormat   = "format"
	OptionFirmware = "firmware"
)

// Sizes of instances whose spec names none. Squid and Debian fit into half of that, if barely.
const (
	defaultCPUs      = 1
	defaultMemoryMiB = 512
	minMemoryMiB     = 32
	maxCPUs          = 1024
	maxMemoryMiB     = 16 << 20
	maxDiskGiB       = 64 << 10
)

// MaxUserData is the most bytes of user data that a seed takes.
const MaxUserData = 4 << 20

// Plan is a spec in libvirt's terms.
type Plan struct {
	Image     Image
	key       string // names the base
	CPUs      int
	MemoryMiB int
	diskBytes uint64 // 0 keeps the image's
	cloud     provider.CloudInit
	vendor    []byte
	network   *cloudinit.Network
	firmware  string
}

// Plan checks spec as far as a host is concerned; placement is the backend's. The error joins every fault.
func (h *Host) Plan(spec provider.Spec) (*Plan, error) { return h.config.plan(spec) }

func (c Config) plan(spec provider.Spec) (*Plan, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	p := &Plan{CPUs: spec.CPUs, MemoryMiB: spec.MemoryMiB, cloud: spec.CloudInit}
	for _, key := range slices.Sorted(maps.Keys(spec.Options)) {
		if !slices.Contains([]string{OptionSHA256, OptionFormat, OptionFirmware}, key) {
			fault("Options has unknown key %q, want %s, %s or %s", key, OptionSHA256, OptionFormat, OptionFirmware)
		}
	}
	image, known := c.Images[spec.Image]
	switch {
	case known:
		p.Image, p.key = image, spec.Image
		if spec.Options[OptionSHA256] != "" || spec.Options[OptionFormat] != "" {
			fault("Options %s and %s are for images that are given as a URL; %q is one of Images", OptionSHA256, OptionFormat, spec.Image)
		}
	case strings.Contains(spec.Image, "://"):
		filled, err := Image{URL: spec.Image, SHA256: spec.Options[OptionSHA256], Format: spec.Options[OptionFormat]}.filled(c.Firmware)
		if err != nil {
			fault("Image: %w", err)
		}
		sum := sha256.Sum256([]byte(spec.Image))
		p.Image, p.key = filled, hex.EncodeToString(sum[:])[:16]
	case spec.Image == "":
		fault("Image is empty, want %s or a URL", c.imageNames())
	default:
		fault("Image %q, want %s or a URL", spec.Image, c.imageNames())
	}
	p.firmware = p.Image.Firmware
	if f := spec.Options[OptionFirmware]; f != "" {
		if f != firmwareUEFI && f != firmwareBIOS {
			fault("Options %s %q, want uefi or bios", OptionFirmware, f)
		}
		p.firmware = f
	}
	if p.CPUs == 0 {
		p.CPUs = defaultCPUs
	}
	if p.MemoryMiB == 0 {
		p.MemoryMiB = defaultMemoryMiB
	}
	if p.CPUs < 0 || p.CPUs > maxCPUs {
		fault("CPUs %d, want 1 to %d", spec.CPUs, maxCPUs)
	}
	if p.MemoryMiB < minMemoryMiB || p.MemoryMiB > maxMemoryMiB {
		fault("MemoryMiB %d, want %d to %d", spec.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	}
	if spec.DiskGiB < 0 || spec.DiskGiB > maxDiskGiB {
		fault("DiskGiB %d, want 0 for the image's or up to %d", spec.DiskGiB, maxDiskGiB)
	} else {
		p.diskBytes = uint64(spec.DiskGiB) << 30
	}
	if spec.Port < 0 || spec.Port > 65535 {
		fault("Port %d, want 1 to 65535", spec.Port)
	}
	if len(spec.CloudInit.UserData) > 0 {
		if err := cloudinit.CheckUserData(spec.CloudInit.UserData, MaxUserData); err != nil {
			fault("CloudInit.UserData: %w", err)
		}
	}
	vendor, err := cloudinit.VendorData(cloudinit.Vendor{Document: spec.CloudInit.VendorData, InstallGuestAgent: spec.CloudInit.InstallGuestAgent})
	if err != nil {
		fault("CloudInit.VendorData: %w", err)
	}
	p.vendor = vendor
	if spec.CloudInit.Network != nil {
		network := cloudinit.Network(*spec.CloudInit.Network)
		if err := network.Validate(); err != nil {
			fault("CloudInit.Network: %w", err)
		}
		p.network = &network
	}
	return p, errors.Join(faults...)
}

func (c Config) imageNames() string {
	names := slices.Sorted(maps.Keys(c.Images))
	if len(names) == 0 {
		return "a name in Images, which is empty,"
	}
	return "one of " + strings.Join(names, ", ")
}

// Warnings returns what is allowed in spec and probably not meant.
func Warnings(spec provider.Spec) []string { return cloudinit.Warnings(spec.CloudInit.UserData) }

// seed builds the seed image for an instance.
func (p *Plan) seed(name, hash string, mac net.HardwareAddr) ([]byte, error) {
	meta, err := cloudinit.MetaData{InstanceID: cloudinit.InstanceID(name, hash), LocalHostname: name}.Render()
	if err != nil {
		return nil, err
	}
	seed := cloudinit.Seed{UserData: p.cloud.UserData, MetaData: meta, VendorData: p.vendor}
	if p.network != nil {
		if seed.NetworkConfig, err = p.network.Render(mac); err != nil {
			return nil, err
		}
	}
	return seed.ISO()
}

// macOf is the hardware address of the instance of that name: locally administered, and the same for each attempt.
func macOf(name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("egress mac " + name))
	return net.HardwareAddr{0x52, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// Allowed reports whether an instance may be on the host of that name and labels.
func Allowed(p provider.Placement, host string, labels map[string]string) error {
	if p.Host != "" && p.Host != host {
		return fmt.Errorf("Placement.Host %q, want %q or nothing", p.Host, host)
	}
	for _, key := range slices.Sorted(maps.Keys(p.Labels)) {
		if value, ok := labels[key]; !ok || value != p.Labels[key] {
			return fmt.Errorf("Placement.Labels %s=%s, which %s has not", key, p.Labels[key], host)
		}
	}
	return nil
}
