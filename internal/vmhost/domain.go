package vmhost

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"net"
	"time"

	"libvirt.org/go/libvirtxml"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/provider"
)

type uuid = golibvirt.UUID

// newUUID returns a random UUID (RFC 9562, version 4). It is random so that libvirt refuses a second domain of one
// name, instead of overwriting the first.
func newUUID() uuid {
	var u uuid
	rand.Read(u[:])
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

func formatUUID(u uuid) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// parseUUID reads what formatUUID wrote.
func parseUUID(text string) (uuid, bool) {
	var u uuid
	if len(text) != 36 {
		return u, false
	}
	b, err := hex.DecodeString(text[:8] + text[9:13] + text[14:18] + text[19:23] + text[24:])
	if err != nil || copy(u[:], b) != len(u) || formatUUID(u) != text {
		return uuid{}, false
	}
	return u, true
}

// metadataURI is the namespace of our element in a domain's metadata.
const metadataURI = "https://crawl.example.com/egress/instance/1"

// record is our element in a domain's metadata: whose it is, what belongs to it, and how far it is.
type record struct {
	XMLName xml.Name `xml:"instance"`
	// Namespace is metadataURI. libvirt gives the element back without it, or with a prefix.
	Namespace string `xml:"xmlns,attr"`
	// Mark is provider.Mark's text.
	Mark string `xml:"mark"`
	// Made is when everything was in place. Empty while it is being made.
	Made string `xml:"made,omitempty"`
	// Created is when the making began.
	Created string `xml:"created"`
	// Pool and Prefix say where its files are, and how their names begin.
	Pool   string `xml:"pool"`
	Prefix string `xml:"prefix"`
	// Base is the name of the image's base.
	Base string `xml:"base"`
	// Network is the libvirt network, or empty for a bridge.
	Network string `xml:"network,omitempty"`
	// Address is the static address, if it has one.
	Address string `xml:"address,omitempty"`
	// Stale are DHCP leases that the hardware address had before.
	Stale []staleLease `xml:"stale"`
	// Group is the placement's.
	Group string `xml:"group,omitempty"`
	// Why says why it is on this host.
	Why string `xml:"why,omitempty"`
}

type staleLease struct {
	IP      string `xml:"ip,attr"`
	Expires int64  `xml:"expires,attr"`
}

// identity is a record that was read. The zero value is a domain that is not ours.
type identity struct {
	ours bool
	name string
	mark provider.Mark
	record
	created time.Time
}

// parseRecord reads the metadata of the domain of that name.
func parseRecord(name, text string) identity {
	var r record
	if err := xml.Unmarshal([]byte(text), &r); err != nil {
		return identity{}
	}
	mark, ok := provider.ParseMark(r.Mark)
	if !ok || r.Pool == "" || r.Prefix == "" {
		return identity{}
	}
	created, err := time.Parse(time.RFC3339, r.Created)
	if err != nil {
		created = time.Time{}
	}
	return identity{true, name, mark, r, created}
}

// diskName and the others are the volumes of an instance.
func diskName(prefix string) string { return prefix + "qcow2" }
func seedName(prefix string) string { return prefix + "seed.iso" }
func logName(prefix string) string  { return prefix + "log" }

// prefixOf starts the names of an instance's files. With a part of the UUID in it no other attempt has the same.
func prefixOf(name string, id uuid) string { return name + "." + hex.EncodeToString(id[:4]) + "." }

// machine is what a domain is made of.
type machine struct {
	name     string
	id       uuid
	plan     *Plan
	record   record
	mac      net.HardwareAddr
	folder   string // of the pool
	bridge   string
	emulated bool
}

// render returns the domain's XML.
//
// The seed is a virtio disk because Debian's cloud kernel has no driver for SATA. There is always a video device and a
// serial port: some boot loaders hang without the one, some images without the other.
func (m machine) render() (string, error) {
	metadata, err := xml.Marshal(m.record)
	if err != nil {
		return "", err
	}
	file := func(path string) *libvirtxml.DomainDiskSource {
		return &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: path}}
	}
	d := libvirtxml.Domain{
		Type: "kvm", Name: m.name, UUID: formatUUID(m.id),
		Metadata: &libvirtxml.DomainMetadata{XML: string(metadata)},
		Memory:   &libvirtxml.DomainMemory{Value: uint(m.plan.MemoryMiB), Unit: "MiB"},
		VCPU:     &libvirtxml.DomainVCPU{Value: uint(m.plan.CPUs)},
		OS:       &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Arch: "x86_64", Machine: "q35", Type: "hvm"}},
		Features: &libvirtxml.DomainFeatureList{ACPI: &libvirtxml.DomainFeature{}, APIC: &libvirtxml.DomainFeatureAPIC{}},
		CPU:      &libvirtxml.DomainCPU{Mode: "host-passthrough", Migratable: "on"},
		Clock:    &libvirtxml.DomainClock{Offset: "utc"},
		// A guest that has switched itself off or crashed is for the pool to judge.
		OnPoweroff: "destroy", OnReboot: "restart", OnCrash: "destroy",
	}
	if m.emulated {
		d.Type, d.CPU = "qemu", &libvirtxml.DomainCPU{Mode: "maximum"}
	}
	if m.plan.firmware == firmwareUEFI {
		d.OS.Firmware = "efi"
		d.OS.FirmwareInfo = &libvirtxml.DomainOSFirmwareInfo{Features: []libvirtxml.DomainOSFirmwareFeature{
			{Enabled: "no", Name: "enrolled-keys"}, {Enabled: "no", Name: "secure-boot"},
		}}
	}
	nic := libvirtxml.DomainInterface{
		MAC:   &libvirtxml.DomainInterfaceMAC{Address: m.mac.String()},
		Model: &libvirtxml.DomainInterfaceModel{Type: "virtio"},
	}
	if m.bridge != "" {
		nic.Source = &libvirtxml.DomainInterfaceSource{Bridge: &libvirtxml.DomainInterfaceSourceBridge{Bridge: m.bridge}}
	} else {
		nic.Source = &libvirtxml.DomainInterfaceSource{Network: &libvirtxml.DomainInterfaceSourceNetwork{Network: m.record.Network}}
	}
	one := uint(1)
	d.Devices = &libvirtxml.DomainDeviceList{
		Disks: []libvirtxml.DomainDisk{
			{
				Device: "disk", Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: formatQcow2, Discard: "unmap"},
				Source: file(m.folder + "/" + diskName(m.record.Prefix)),
				Target: &libvirtxml.DomainDiskTarget{Dev: "vda", Bus: "virtio"}, Boot: &libvirtxml.DomainDeviceBoot{Order: one},
			},
			{
				Device: "disk", Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: formatRaw},
				Source: file(m.folder + "/" + seedName(m.record.Prefix)),
				Target: &libvirtxml.DomainDiskTarget{Dev: "vdb", Bus: "virtio"}, ReadOnly: &libvirtxml.DomainDiskReadOnly{},
			},
		},
		Interfaces: []libvirtxml.DomainInterface{nic},
		Serials: []libvirtxml.DomainSerial{{
			Source: &libvirtxml.DomainChardevSource{Pty: &libvirtxml.DomainChardevSourcePty{}},
			Log:    &libvirtxml.DomainChardevLog{File: m.folder + "/" + logName(m.record.Prefix), Append: "off"},
		}},
		Channels: []libvirtxml.DomainChannel{{
			Source: &libvirtxml.DomainChardevSource{UNIX: &libvirtxml.DomainChardevSourceUNIX{}},
			Target: &libvirtxml.DomainChannelTarget{VirtIO: &libvirtxml.DomainChannelTargetVirtIO{Name: "org.qemu.guest_agent.0"}},
		}},
		Videos:     []libvirtxml.DomainVideo{{Model: libvirtxml.DomainVideoModel{Type: "vga"}}},
		MemBalloon: &libvirtxml.DomainMemBalloon{Model: "virtio", Stats: &libvirtxml.DomainMemBalloonStats{Period: 60}},
		RNGs: []libvirtxml.DomainRNG{{
			Model:   "virtio",
			Backend: &libvirtxml.DomainRNGBackend{Random: &libvirtxml.DomainRNGBackendRandom{Device: "/dev/urandom"}},
		}},
	}
	return d.Marshal()
}
