package vmhost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

// undefineFlags remove what hangs on a domain besides its disks. Without them libvirt refuses to undefine what has it.
const undefineFlags = golibvirt.DomainUndefineNvram | golibvirt.DomainUndefineManagedSave |
	golibvirt.DomainUndefineSnapshotsMetadata | golibvirt.DomainUndefineCheckpointsMetadata

// Delete removes an instance with all that belongs to it. It blocks until it is gone, within ctx. Errors are
// *provider.Error.
func (h *Host) Delete(ctx context.Context, id string) error {
	return h.wrap("delete", id, h.delete(ctx, id))
}

func (h *Host) delete(ctx context.Context, id string) error {
	u, ok := parseUUID(id)
	if !ok {
		return fault(provider.ErrNotFound, provider.ReasonUnknown, "id %q was never given", id)
	}
	dom, who, err := h.find(ctx, u, h.readMark)
	if err != nil {
		return err
	}
	unlock, err := h.lock(ctx, dom.Name)
	if err != nil {
		return err
	}
	defer unlock()
	defer h.note(h.removing, dom.Name)()
	// Whoever had the lock before may have removed it, or finished it.
	if h.config.ShutdownGrace > 0 {
		err = h.shutDown(ctx, u, h.config.ShutdownGrace)
	}
	if err == nil {
		err = h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
			again, now, err := lookUp(s, u, h.readMark)
			if absent(err) {
				// Somebody else has removed it, who may know nothing of its files. Nothing else will tell of them.
				return cmp.Or(removeFiles(ctx, s, who.Pool, who.Prefix), err)
			}
			if err != nil {
				return err
			}
			return h.removeDomain(ctx, s, again, now)
		})
	}
	if err != nil {
		if f := judge(err); errors.Is(f.Kind, provider.ErrNotFound) {
			return f
		}
		return begun(err)
	}
	h.log().Info("instance deleted", "instance", dom.Name)
	return nil
}

// find returns the domain with that UUID, which is ours by what whose says.
func (h *Host) find(ctx context.Context, u uuid, whose reader) (dom golibvirt.Domain, who identity, err error) {
	err = h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		dom, who, err = lookUp(s, u, whose)
		return err
	})
	if err == nil && !who.ours {
		err = fault(provider.ErrPermanent, provider.ReasonUnknown, "the domain %s does not carry our mark", dom.Name)
	}
	return dom, who, err
}

// reader says whose a domain is: identify or readMark.
type reader func(*libvirt.Session, golibvirt.Domain) (identity, error)

func lookUp(s *libvirt.Session, u uuid, whose reader) (dom golibvirt.Domain, who identity, err error) {
	dom, err = s.DomainLookupByUUID(u)
	if err == nil {
		who, err = whose(s, dom)
	}
	if libvirt.Code(err) == golibvirt.ErrNoDomain {
		err = fault(provider.ErrNotFound, provider.ReasonUnknown, "there is no domain with the UUID %s", formatUUID(u))
	}
	return dom, who, err
}

// absent reports whether err is lookUp's for a domain that is not there.
func absent(err error) bool {
	f, ok := errors.AsType[*Fault](err)
	return ok && errors.Is(f.Kind, provider.ErrNotFound)
}

// removeDomain removes a domain that is ours. Its files go before it does, so that what fails half way is asked for again.
// Each step takes it for done when it was done before.
func (h *Host) removeDomain(ctx context.Context, s *libvirt.Session, dom golibvirt.Domain, who identity) error {
	if !who.ours {
		return fault(provider.ErrPermanent, provider.ReasonUnknown, "the domain %s does not carry our mark", dom.Name)
	}
	// One without a definition is gone once it is off, so that comes last.
	if who.Why != withoutDefinition {
		if err := destroy(s, dom); err != nil {
			return err
		}
	}
	if err := removeFiles(ctx, s, who.Pool, who.Prefix); err != nil {
		return err
	}
	err := undefine(ctx, s, dom, who)
	h.mu.Lock()
	delete(h.known, dom.UUID)
	delete(h.agent, dom.UUID)
	h.mu.Unlock()
	return err
}

// undefine takes a domain's definition away, after which nobody can start it. Had somebody done so since it was destroyed (an
// operator, or libvirt-guests) it runs on without one, so it is looked for once more. As before, its files go first.
func undefine(ctx context.Context, s *libvirt.Session, dom golibvirt.Domain, who identity) error {
	refused := s.DomainUndefineFlags(dom, undefineFlags)
	if libvirt.Code(refused) == golibvirt.ErrNoDomain {
		return nil
	}
	// That is also the answer when somebody else has undefined it and it runs.
	if refused != nil && libvirt.Code(refused) != golibvirt.ErrOperationInvalid {
		return refused
	}
	_, _, err := s.DomainGetState(dom, 0)
	if libvirt.Code(err) == golibvirt.ErrNoDomain {
		return nil
	}
	if err != nil {
		return err
	}
	if err := removeFiles(ctx, s, who.Pool, who.Prefix); err != nil {
		return err
	}
	if err := destroy(s, dom); err != nil || refused == nil {
		return err
	}
	err = s.DomainUndefineFlags(dom, undefineFlags)
	if libvirt.Code(err) == golibvirt.ErrNoDomain {
		return nil
	}
	return err
}

// destroy switches a domain off that may be off or gone.
func destroy(s *libvirt.Session, dom golibvirt.Domain) error {
	err := s.DomainDestroyFlags(dom, golibvirt.DomainDestroyDefault)
	switch libvirt.Code(err) {
	case golibvirt.ErrNoDomain, golibvirt.ErrOperationInvalid: // gone, or not running
		return nil
	}
	return err
}

// shutDown asks the guest to switch itself off and waits as long as grace. The power button is pressed, since asking the
// guest agent blocks for 30 s when that hangs. Meanwhile it holds no session: there are few, and many guests may be waited for.
func (h *Host) shutDown(ctx context.Context, u uuid, grace time.Duration) error {
	var dom golibvirt.Domain
	asked := false
	err := h.do(ctx, func(_ context.Context, s *libvirt.Session) (err error) {
		var who identity
		dom, who, err = lookUp(s, u, h.readMark)
		if absent(err) {
			return nil // the delete that follows sees to what is left
		}
		if err != nil {
			return err
		}
		if !who.ours {
			return fault(provider.ErrPermanent, provider.ReasonUnknown, "the domain %s does not carry our mark", dom.Name)
		}
		if who.Why == withoutDefinition {
			return nil // it would be gone before its files
		}
		err = s.DomainShutdownFlags(dom, golibvirt.DomainShutdownAcpiPowerBtn)
		asked = err == nil
		if libvirt.Code(err) != 0 {
			return nil // not running, or it can't
		}
		return err
	})
	if err != nil || !asked {
		return err
	}
	deadline := time.NewTimer(grace)
	defer deadline.Stop()
	poll := time.NewTicker(500 * time.Millisecond)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-deadline.C:
			return nil
		case <-poll.C:
		}
		off := false
		err := h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
			state, _, err := s.DomainGetState(dom, 0)
			off = libvirt.Code(err) == golibvirt.ErrNoDomain || err == nil && golibvirt.DomainState(state) == golibvirt.DomainShutoff
			if off {
				return nil
			}
			return err
		})
		if err != nil || off {
			return err
		}
	}
}

// removeFiles deletes every volume whose name begins with prefix. The pool is read anew first: it does not know of the
// serial log, which QEMU made.
func removeFiles(ctx context.Context, s *libvirt.Session, poolName, prefix string) error {
	pool, _, err := findPool(s, poolName)
	if err != nil {
		return err
	}
	if err := refresh(ctx, s, pool); err != nil {
		return fmt.Errorf("read the pool %s anew: %w", poolName, err)
	}
	volumes, _, err := s.StoragePoolListAllVolumes(pool, 1, 0)
	if err != nil {
		return err
	}
	for _, v := range volumes {
		if !strings.HasPrefix(v.Name, prefix) {
			continue
		}
		if err := deleteVolume(s, v); err != nil {
			return err
		}
	}
	return nil
}

func deleteVolume(s *libvirt.Session, v golibvirt.StorageVol) error {
	if err := s.StorageVolDelete(v, 0); err != nil && !gone(err) {
		return err
	}
	return nil
}

// gone reports whether err says that a volume is not there.
func gone(err error) bool {
	return libvirt.Code(err) == golibvirt.ErrNoStorageVol ||
		libvirt.Code(err) == golibvirt.ErrSystemError && strings.Contains(err.Error(), "No such file")
}
