package vmhost

import (
	"encoding/xml"
	"net/netip"
	"strings"
	"testing"

	"libvirt.org/go/libvirtxml"

	"crawl.example.com/egress/provider"
)

// rendered is the domain of a plan.
func rendered(t *testing.T, s provider.Spec, change func(*machine)) (libvirtxml.Domain, record) {
	t.Helper()
	config := valid()
	config.Images = map[string]Image{"debian": {URL: "https://images.example/a.qcow2"}, "raw": {URL: "https://images.example/a.raw", Format: "raw", Firmware: "bios"}}
	config, err := config.filled()
	if err != nil {
		t.Fatal(err)
	}
	plan, err := config.plan(s)
	if err != nil {
		t.Fatal(err)
	}
	name, id := "own--a--1", uuid{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89}
	r := record{
		Namespace: metadataURI, Mark: provider.Mark{Owner: "own", Proxy: "a", Generation: 1, HashVersion: 1, Hash: "h"}.String(), Created: "2026-12-01T00:00:00Z",
		Pool: "default", Prefix: prefixOf(name, id), Base: "base-debian", Network: "lan", Why: "<&\"'>", Stale: []staleLease{{"10.0.0.1", 9}},
	}
	m := machine{name: name, id: id, plan: plan, record: r, mac: macOf(name), folder: "/pool"}
	if change != nil {
		change(&m)
	}
	text, err := m.render()
	if err != nil {
		t.Fatal(err)
	}
	var d libvirtxml.Domain
	if err := d.Unmarshal(text); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return d, m.record
}

func TestADomainHasWhatItsGuestNeeds(t *testing.T) {
	d, want := rendered(t, provider.Spec{Image: "debian", CPUs: 3, MemoryMiB: 768}, nil)
	if d.Type != "kvm" || d.Name != "own--a--1" || d.UUID != "01020304-0506-4708-8900-000000000000" || d.VCPU.Value != 3 || d.Memory.Value != 768 || d.Memory.Unit != "MiB" {
		t.Errorf("%s %s %s, %+v, %+v", d.Type, d.Name, d.UUID, d.VCPU, d.Memory)
	}
	if d.OS.Type.Machine != "q35" || d.OS.Type.Arch != "x86_64" || d.OS.Type.Type != "hvm" || d.CPU.Mode != "host-passthrough" {
		t.Errorf("%+v, %+v", d.OS.Type, d.CPU)
	}
	if d.OnPoweroff != "destroy" || d.OnReboot != "restart" || d.OnCrash != "destroy" || d.Features.ACPI == nil || d.Features.APIC == nil {
		t.Errorf("%s %s %s %+v", d.OnPoweroff, d.OnReboot, d.OnCrash, d.Features)
	}
	if d.OS.Firmware != "efi" || len(d.OS.FirmwareInfo.Features) != 2 {
		t.Fatalf("firmware: %+v", d.OS)
	}
	for _, f := range d.OS.FirmwareInfo.Features {
		if f.Enabled != "no" {
			t.Errorf("%s is on", f.Name)
		}
	}
	dev := d.Devices
	if len(dev.Disks) != 2 {
		t.Fatalf("disks: %+v", dev.Disks)
	}
	disk, seed := dev.Disks[0], dev.Disks[1]
	if disk.Source.File.File != "/pool/"+diskName(want.Prefix) || disk.Driver.Type != "qcow2" || disk.Driver.Discard != "unmap" || disk.Target.Bus != "virtio" || disk.Boot.Order != 1 || disk.ReadOnly != nil {
		t.Errorf("disk: %+v", disk)
	}
	// A disk that is not said to be raw would be probed for a format, which the guest could write into it.
	if seed.Source.File.File != "/pool/"+seedName(want.Prefix) || seed.Driver.Type != "raw" || seed.Target.Bus != "virtio" || seed.ReadOnly == nil || seed.Boot != nil {
		t.Errorf("seed: %+v", seed)
	}
	if nic := dev.Interfaces[0]; len(dev.Interfaces) != 1 || nic.Source.Network.Network != "lan" || nic.Model.Type != "virtio" || nic.MAC.Address != macOf("own--a--1").String() {
		t.Errorf("network: %+v", dev.Interfaces)
	}
	if len(dev.Serials) != 1 || dev.Serials[0].Log.File != "/pool/"+logName(want.Prefix) || dev.Serials[0].Source.Pty == nil {
		t.Errorf("serial: %+v", dev.Serials)
	}
	if len(dev.Channels) != 1 || dev.Channels[0].Target.VirtIO.Name != "org.qemu.guest_agent.0" || dev.Channels[0].Source.UNIX == nil {
		t.Errorf("agent: %+v", dev.Channels)
	}
	if len(dev.RNGs) != 1 || dev.RNGs[0].Model != "virtio" || dev.RNGs[0].Backend.Random.Device != "/dev/urandom" {
		t.Errorf("random numbers: %+v", dev.RNGs)
	}
	if len(dev.Videos) != 1 || dev.Videos[0].Model.Type != "vga" || len(dev.Graphics) != 0 || dev.MemBalloon.Model != "virtio" {
		t.Errorf("video: %+v, graphics: %+v, balloon: %+v", dev.Videos, dev.Graphics, dev.MemBalloon)
	}
	var r record
	if err := xml.Unmarshal([]byte(d.Metadata.XML), &r); err != nil || r.XMLName.Space != metadataURI {
		t.Fatalf("metadata: %v in %s", err, d.Metadata.XML)
	}
	who := parseRecord(d.Name, d.Metadata.XML)
	if !who.ours || who.mark.Owner != "own" || who.Why != want.Why || who.Prefix != want.Prefix || len(who.Stale) != 1 || who.Stale[0] != want.Stale[0] || who.created.Year() != 2026 {
		t.Errorf("metadata: %+v", who)
	}
}

func TestADomainFollowsFirmwareBridgeAndEmulation(t *testing.T) {
	d, _ := rendered(t, provider.Spec{Image: "raw"}, nil)
	if d.OS.Firmware != "" || d.OS.FirmwareInfo != nil {
		t.Errorf("BIOS: %+v", d.OS)
	}
	// What the guest writes to is an overlay, whatever the image is.
	if d.Devices.Disks[0].Driver.Type != "qcow2" {
		t.Errorf("disk: %+v", d.Devices.Disks[0])
	}
	d, _ = rendered(t, provider.Spec{Image: "debian", Options: map[string]string{OptionFirmware: "bios"}}, nil)
	if d.OS.Firmware != "" {
		t.Errorf("BIOS by option: %+v", d.OS)
	}
	d, _ = rendered(t, provider.Spec{Image: "debian"}, func(m *machine) { m.bridge, m.emulated = "br0", true })
	if d.Type != "qemu" || d.CPU.Mode != "maximum" {
		t.Errorf("emulated: %s, %+v", d.Type, d.CPU)
	}
	if source := d.Devices.Interfaces[0].Source; source.Bridge == nil || source.Bridge.Bridge != "br0" || source.Network != nil {
		t.Errorf("on a bridge: %+v", source)
	}
}

func TestUUIDsAreRandomAndReadBackOnlyAsWritten(t *testing.T) {
	a, b := newUUID(), newUUID()
	if a == b || a[6]>>4 != 4 || a[8]>>6 != 2 {
		t.Errorf("%s and %s", formatUUID(a), formatUUID(b))
	}
	if got, ok := parseUUID(formatUUID(a)); !ok || got != a {
		t.Errorf("%s is read as %s, %t", formatUUID(a), formatUUID(got), ok)
	}
	for _, text := range []string{"", strings.ToUpper("abcdef00-0000-4000-8000-00000000000f"), formatUUID(a) + "0", strings.ReplaceAll(formatUUID(a), "-", "_"), strings.Repeat("-", 36), strings.Repeat("é", 18)} {
		if got, ok := parseUUID(text); ok {
			t.Errorf("%q is read as %s", text, formatUUID(got))
		}
	}
}

func TestHardwareAddressesFollowFromTheNameAndAreLocal(t *testing.T) {
	a := macOf("own--a--1")
	if a.String() != macOf("own--a--1").String() || a.String() == macOf("own--a--2").String() || len(a) != 6 || a[0] != 0x52 {
		t.Errorf("%s", a)
	}
}

func TestASeedHoldsTheDocumentsAndTheNetwork(t *testing.T) {
	config := valid()
	config.Images = map[string]Image{"debian": {URL: "https://images.example/a.qcow2"}}
	config, err := config.filled()
	if err != nil {
		t.Fatal(err)
	}
	network := &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.8.7/24")}, Gateways: []netip.Addr{netip.MustParseAddr("10.9.8.1")}}
	plan, err := config.plan(provider.Spec{Image: "debian", CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n# exactly this\n"), InstallGuestAgent: true, Network: network}})
	if err != nil {
		t.Fatal(err)
	}
	seed, err := plan.seed("own--a--1", "hash", macOf("own--a--1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"#cloud-config\n# exactly this\n", "local-hostname", "own--a--1", "qemu-guest-agent", "10.9.8.7/24", macOf("own--a--1").String(), "cidata"} {
		if !strings.Contains(string(seed), want) {
			t.Errorf("the seed does not hold %q", want)
		}
	}
	again, _ := plan.seed("own--a--1", "hash", macOf("own--a--1"))
	if string(again) != string(seed) {
		t.Error("two seeds of one plan differ")
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add(`<instance><mark>egress/1 owner=own proxy=a generation=1 hash=1:h</mark><pool>default</pool><prefix>own--a--1.00000000.</prefix><created>2026-12-01T00:00:00Z</created></instance>`)
	r := record{Namespace: metadataURI, Mark: provider.Mark{Owner: "own", Proxy: "a", Generation: 1, HashVersion: 1, Hash: "h"}.String(), Pool: "default", Prefix: "p."}
	text, err := xml.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add(`<x:instance xmlns:x="` + metadataURI + `"><mark>`)
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		who := parseRecord("name", text)
		if !who.ours {
			return
		}
		// An empty prefix would match every file in the pool when the instance is deleted.
		if who.Pool == "" || who.Prefix == "" || who.mark.Owner == "" {
			t.Fatalf("%q is ours with %+v", text, who)
		}
		again, err := xml.Marshal(who.record)
		if err != nil {
			return // not everything that can be read can be written
		}
		if back := parseRecord("name", string(again)); !back.ours || back.mark != who.mark {
			t.Fatalf("%q is read as %+v and then as %+v", text, who, back)
		}
	})
}

func FuzzParseUUID(f *testing.F) {
	f.Add("01020304-0506-4708-8900-000000000000")
	f.Add(strings.Repeat("-", 36))
	f.Fuzz(func(t *testing.T, text string) {
		if u, ok := parseUUID(text); ok && formatUUID(u) != text {
			t.Fatalf("%q is read as %s", text, formatUUID(u))
		}
	})
}

func FuzzParseDataName(f *testing.F) {
	f.Add(dataName{"base-debian", "0123abcd", undeclared, "4567ef01", "89abcdef"}.String())
	f.Add(dataName{"base-debian.12.5", "0123abcd", "sha256-" + strings.Repeat("a", 64), "4567ef01", "89abcdef"}.String())
	f.Add("base.....img")
	f.Add("..........img")
	f.Fuzz(func(t *testing.T, text string) {
		d, ok := parseDataName(text)
		if ok && (d.String() != text || d.base == "" || d.digest == "") {
			t.Fatalf("%q is read as %+v", text, d)
		}
	})
}
