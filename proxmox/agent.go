package proxmox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"crawl.example.com/egress/provider"
)

// macPattern finds the hardware address in a network interface's option.
var macPattern = regexp.MustCompile(`(?i)(?:^|,)[a-z0-9-]+=((?:[0-9a-f]{2}:){5}[0-9a-f]{2})`)

// address asks the guest agent for the address of the first interface. While there is none, why says what is waited for.
// Only what waiting can't mend is an error.
func (p *Provider) address(ctx context.Context, node string, vmid int, c vmConfig) (address, why string, err error) {
	m := macPattern.FindStringSubmatch(string(c["net0"]))
	if m == nil {
		return "", "the VM has no network interface net0", nil
	}
	var answer struct {
		Result json.RawMessage `json:"result"`
	}
	err = p.get(ctx, node, fmt.Sprintf("/nodes/%s/qemu/%d/agent/network-get-interfaces", node, vmid), &answer)
	if err != nil {
		f := classify(err)
		switch {
		case errors.Is(f.kind, provider.ErrDenied):
			if f.reason == provider.ReasonPermissionDenied {
				f.message += "; the address of a VM takes VM.GuestAgent.Audit on Proxmox VE 9 and VM.Monitor on 8"
			}
			return "", "", f
		case errors.Is(f.kind, provider.ErrPermanent):
			return "", "no address: " + f.message, nil
		case f.code == 0 || f.code >= 501:
			return "", "", f
		}
		return "", "no address yet: " + f.message, nil
	}
	address = pickAddress(answer.Result, m[1])
	if address == "" {
		why = "no address yet: the guest agent knows of none on the interface " + strings.ToLower(m[1])
		if strings.HasPrefix(strings.TrimSpace(string(answer.Result)), "{") {
			why = "no address: the guest agent refuses the command guest-network-get-interfaces; enable it in the guest"
		}
	}
	return address, why, nil
}

// pickAddress returns the address of the interface with the given hardware address, IPv4 first. Link-local ones, which
// come first and lead nowhere, do not count.
func pickAddress(result json.RawMessage, mac string) string {
	var interfaces []struct {
		MAC       text `json:"hardware-address"`
		Addresses []struct {
			Address text `json:"ip-address"`
		} `json:"ip-addresses"`
	}
	if json.Unmarshal(result, &interfaces) != nil {
		return "" // an error object of the agent, for one
	}
	var second string
	for _, i := range interfaces {
		if !strings.EqualFold(string(i.MAC), mac) {
			continue
		}
		for _, a := range i.Addresses {
			ip, err := netip.ParseAddr(string(a.Address))
			if err != nil || !ip.IsGlobalUnicast() || ip.IsLinkLocalUnicast() {
				continue
			}
			if ip.Is4() {
				return ip.String()
			}
			if second == "" {
				second = ip.String()
			}
		}
	}
	return second
}
