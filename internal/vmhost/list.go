package vmhost

import (
	"context"
	"maps"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

// Statistics of ConnectGetAllDomainStats (virDomainStatsTypes), and the flag that keeps it from waiting for domains
// that are busy.
const (
	statsState   = 1 << 0
	statsBalloon = 1 << 2
	statsVCPU    = 1 << 3
	statsNowait  = 1 << 29
)

// List returns every instance of owner, in two requests once the domains are known. Errors are *provider.Error.
func (h *Host) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	var all []provider.Instance
	err := h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		all = nil
		making := h.beingMade()
		records, err := s.ConnectGetAllDomainStats(nil, statsState, statsNowait)
		if err != nil {
			return err
		}
		seen := make(map[uuid]bool, len(records))
		for _, r := range records {
			seen[r.Dom.UUID] = true
			who, err := h.identify(s, r.Dom)
			if libvirt.Code(err) == golibvirt.ErrNoDomain {
				continue // gone since
			}
			if err != nil {
				return err
			}
			if !who.ours || who.mark.Owner != owner {
				continue
			}
			state, reason := parameter(r.Params, "state.state"), parameter(r.Params, "state.reason")
			if who.Why == withoutDefinition && arriving(state, reason) {
				continue
			}
			all = append(all, making.see(h.describe(r.Dom, who, state, reason)))
		}
		h.forget(seen)
		return nil
	})
	if err != nil {
		return nil, h.wrap("list", "", err)
	}
	return all, nil
}

// arriving reports whether a domain is on its way here by a migration, which defines it in the end.
func arriving(state, reason int32) bool {
	if golibvirt.DomainState(state) != golibvirt.DomainPaused {
		return false
	}
	switch golibvirt.DomainPausedReason(reason) {
	case golibvirt.DomainPausedMigration, golibvirt.DomainPausedStartingUp, golibvirt.DomainPausedPostcopy:
		return true
	}
	return false
}

// beingMade are the names of instances that creates were at when a question began. An answer from before such a create ended
// may be read when it has, and would have a good instance look half made or switched off.
type beingMade map[string]int

func (h *Host) beingMade() beingMade {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.making)
}

// see returns x as far as the question's answers can be believed.
func (b beingMade) see(x provider.Instance) provider.Instance {
	if b[x.Name] > 0 && x.State != provider.StateRunning && x.State != provider.StateDeleting {
		x.State, x.Message = provider.StatePending, pending
	}
	return x
}

const pending = "being made"

// withoutDefinition is the Why of a domain that has lost its definition and runs on.
const withoutDefinition = "runs without a definition: it was started while it was being deleted, or was undefined by hand"

// GroupOf returns the placement group that a listed instance was made with.
func (h *Host) GroupOf(id string) string {
	u, ok := parseUUID(id)
	if !ok {
		return ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known[u].Group
}

// HalfMade reports whether a listed instance was never finished.
func (h *Host) HalfMade(id string) bool {
	u, ok := parseUUID(id)
	h.mu.Lock()
	defer h.mu.Unlock()
	return ok && h.known[u].ours && h.known[u].Made == ""
}

func parameter(params []golibvirt.TypedParam, name string) int32 {
	for _, p := range params {
		if p.Field != name {
			continue
		}
		switch v := p.Value.I.(type) {
		case int32:
			return v
		case uint32:
			return int32(v)
		}
	}
	return 0
}

// forget drops what is known of domains that are gone.
func (h *Host) forget(seen map[uuid]bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for u := range h.known {
		if !seen[u] {
			delete(h.known, u)
		}
	}
	for u := range h.agent {
		if !seen[u] {
			delete(h.agent, u)
		}
	}
}

// Get returns one instance with its address. Errors are *provider.Error.
func (h *Host) Get(ctx context.Context, id string) (provider.Instance, error) {
	x, err := h.get(ctx, id)
	return x, h.wrap("get", id, err)
}

func (h *Host) get(ctx context.Context, id string) (provider.Instance, error) {
	u, ok := parseUUID(id)
	if !ok {
		return provider.Instance{}, fault(provider.ErrNotFound, provider.ReasonUnknown, "id %q was never given", id)
	}
	making := h.beingMade()
	dom, who, err := h.find(ctx, u, h.identify)
	if err != nil {
		return provider.Instance{}, err
	}
	var state, reason int32
	saved := false
	err = h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		var err error
		state, reason, err = s.DomainGetState(dom, 0)
		if err == nil && golibvirt.DomainState(state) == golibvirt.DomainShutoff {
			var has int32
			if has, err = s.DomainHasManagedSaveImage(dom, 0); libvirt.Code(err) != 0 {
				err = nil
			}
			saved = has != 0
		}
		if libvirt.Code(err) == golibvirt.ErrNoDomain {
			return fault(provider.ErrNotFound, provider.ReasonUnknown, "the domain is gone")
		}
		return err
	})
	if err != nil {
		return provider.Instance{}, err
	}
	x := making.see(h.describe(dom, who, state, reason))
	if saved {
		x.Message = "hibernated: its memory was saved to disk by hand or at a shutdown of the host"
	}
	if x.State == provider.StateRunning {
		if x.Address, err = h.address(ctx, dom, who); err != nil {
			return provider.Instance{}, err
		}
	}
	return x, nil
}

// describe turns a domain into an instance.
func (h *Host) describe(dom golibvirt.Domain, who identity, state, reason int32) provider.Instance {
	h.mu.Lock()
	making, removing := h.making[dom.Name] > 0, h.removing[dom.Name] > 0
	h.mu.Unlock()
	x := provider.Instance{
		ID: formatUUID(dom.UUID), Name: dom.Name, Mark: who.mark, Host: h.config.Target, Created: who.created,
		State: provider.StateUnknown, Message: who.Why,
	}
	switch golibvirt.DomainState(state) {
	case golibvirt.DomainRunning, golibvirt.DomainBlocked:
		x.State = provider.StateRunning
	case golibvirt.DomainPaused:
		x.State, x.Message = provider.StateStopped, "paused by hand: virsh resume"
		switch golibvirt.DomainPausedReason(reason) {
		case golibvirt.DomainPausedIoerror:
			x.Message = "paused for an I/O error: is the storage pool full?"
		case golibvirt.DomainPausedStartingUp:
			x.State, x.Message = provider.StatePending, "starting"
		case golibvirt.DomainPausedMigration, golibvirt.DomainPausedPostcopy, golibvirt.DomainPausedPostcopyFailed:
			x.Message = "paused for a migration"
		case golibvirt.DomainPausedSave, golibvirt.DomainPausedDump, golibvirt.DomainPausedSnapshot:
			x.Message = "paused while it is saved"
		case golibvirt.DomainPausedCrashed, golibvirt.DomainPausedWatchdog, golibvirt.DomainPausedAPIError:
			x.State, x.Message = provider.StateFailed, "paused because the guest crashed"
		}
	case golibvirt.DomainShutdown:
		x.State, x.Message = provider.StateStopped, "shutting down"
	case golibvirt.DomainShutoff:
		x.State, x.Message = provider.StateStopped, "switched off"
		switch golibvirt.DomainShutoffReason(reason) {
		case golibvirt.DomainShutoffCrashed, golibvirt.DomainShutoffFailed:
			x.State, x.Message = provider.StateFailed, "QEMU crashed or did not start: see its log on the host"
		case golibvirt.DomainShutoffSaved:
			x.Message = "hibernated: its memory was saved to disk by hand or at a shutdown of the host"
		}
	case golibvirt.DomainCrashed:
		x.State, x.Message = provider.StateFailed, "crashed"
	case golibvirt.DomainPmsuspended:
		x.State, x.Message = provider.StateStopped, "suspended by the guest"
	}
	if who.Made == "" {
		x.State, x.Message = provider.StateFailed, "half made by a create that was cut short"
		switch {
		case making:
			x.State, x.Message = provider.StatePending, pending
		case who.Why == withoutDefinition:
			x.Message = who.Why
		}
	}
	if removing {
		x.State, x.Message = provider.StateDeleting, "being deleted"
	}
	return x
}
