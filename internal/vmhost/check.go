package vmhost

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

// minLibVersion is libvirt 7.2.0, the first that knows the firmware features that domains are defined with.
const minLibVersion = 7_002_000

// Check looks whether instances could be made on the host: connection, version, storage pool and its free space, network,
// firmware and KVM. It returns as soon as ctx ends, and touches neither the connection nor what is under way on it.
func (h *Host) Check(ctx context.Context) provider.TargetHealth {
	begin := time.Now()
	health := provider.TargetHealth{Target: h.config.Target}
	message := ""
	err := h.pool.Probe(ctx, h.config.Target, func(ctx context.Context, conn *libvirt.Conn) error {
		return conn.Probe(ctx, func(s *libvirt.Session) (err error) {
			message, err = h.check(s)
			return err
		})
	})
	health.CheckedAt = time.Now()
	health.Duration = health.CheckedAt.Sub(begin)
	if err == nil {
		health.Ready, health.Reason, health.Message = true, provider.ReasonReady, message
		return health
	}
	f := judge(err)
	health.Reason, health.Message = f.Reason, f.Message
	if health.Reason == "" || health.Reason == provider.ReasonReady {
		health.Reason = provider.ReasonUnknown
	}
	return health
}

func (h *Host) check(s *libvirt.Session) (string, error) {
	version, err := s.ConnectGetLibVersion()
	if err != nil {
		return "", err
	}
	words := fmt.Sprintf("libvirt %d.%d.%d", version/1_000_000, version/1000%1000, version%1000)
	if version < minLibVersion {
		return "", fault(provider.ErrUnavailable, provider.ReasonUnsupported, "%s, want 7.2.0 or newer", words)
	}
	pool, _, err := findPool(s, h.config.Pool)
	if err != nil {
		return "", err
	}
	// What others wrote there is seen only then. Older versions refuse it during an upload, which is no fault.
	if err := s.StoragePoolRefresh(pool, 0); err != nil && libvirt.Code(err) == 0 {
		return "", err
	}
	_, _, _, available, err := s.StoragePoolGetInfo(pool)
	if err != nil {
		return "", err
	}
	if int64(available) < h.reserve() {
		return "", fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool %s has %d MiB free, want MinFreeGiB %d", h.config.Pool, available>>20, h.config.MinFreeGiB)
	}
	words += fmt.Sprintf(", %d GiB free in %s", available>>30, h.config.Pool)
	if h.config.Network != "" {
		if _, err := activeNetwork(s, h.config.Network); err != nil {
			return "", err
		}
	}
	machine, err := h.checkMachine(s)
	return words + machine, err
}

// checkMachine looks whether the host can run what Create defines.
func (h *Host) checkMachine(s *libvirt.Session) (string, error) {
	h.mu.Lock()
	noKVM := h.noKVM
	h.mu.Unlock()
	for _, kind := range []string{"kvm", "qemu"} {
		if kind == "kvm" && noKVM || kind == "qemu" && !h.config.AllowEmulation {
			continue
		}
		text, err := s.ConnectGetDomainCapabilities(nil, golibvirt.OptString{"x86_64"}, golibvirt.OptString{"q35"}, golibvirt.OptString{kind}, 0)
		if err != nil {
			if libvirt.Code(err) == 0 {
				return "", err
			}
			continue
		}
		var caps libvirtxml.DomainCaps
		if err := caps.Unmarshal(text); err != nil {
			return "", fault(provider.ErrUnavailable, provider.ReasonUnknown, "the host's capabilities can't be read: %v", err)
		}
		if h.needsUEFI() && !hasFirmware(caps, "efi") {
			return "", fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the host has no UEFI firmware (Debian: ovmf); install it, or set Firmware to bios")
		}
		return ", " + kind, nil
	}
	return "", fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the host has no KVM for x86_64 (is /dev/kvm there?), and AllowEmulation is %t", h.config.AllowEmulation)
}

func (h *Host) needsUEFI() bool {
	for _, image := range h.config.Images {
		if image.Firmware == firmwareUEFI {
			return true
		}
	}
	return len(h.config.Images) == 0 && h.config.Firmware == firmwareUEFI
}

func hasFirmware(caps libvirtxml.DomainCaps, name string) bool {
	return caps.OS != nil && slices.ContainsFunc(caps.OS.Enums, func(e libvirtxml.DomainCapsEnum) bool {
		return strings.EqualFold(e.Name, "firmware") && slices.Contains(e.Values, name)
	})
}
