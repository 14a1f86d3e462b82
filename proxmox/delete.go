package proxmox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// Delete implements provider.Provider. It stops the VM, removes its seed and destroys it. The seed goes first, so that
// while anything is left there is a VM that says so. Of a VM that is gone already the seed is removed wherever it is.
func (p *Provider) Delete(ctx context.Context, id string) error {
	h, ok := parseHandle(id)
	if !ok {
		return p.wrap("delete", id, "", &fault{kind: provider.ErrNotFound, reason: provider.ReasonUnknown, message: "the id was never given"})
	}
	unlock, err := p.lock(ctx, h.name)
	if err != nil {
		return p.wrap("delete", h.name, "", err)
	}
	defer unlock()
	for range 3 {
		v, _, _, findErr := p.find(ctx, id)
		if errors.Is(classifyNil(findErr).kind, provider.ErrNotFound) {
			if err := p.sweep(ctx, h); err != nil {
				return p.wrap("delete", h.name, "", readable(err))
			}
			return p.wrap("delete", h.name, "", findErr)
		}
		if findErr != nil {
			return p.wrap("delete", h.name, string(v.Node), findErr)
		}
		err = p.destroy(ctx, string(v.Node), h)
		if err == nil {
			return nil
		}
		if !classify(err).absent {
			return p.wrap("delete", h.name, string(v.Node), outcome(err))
		}
		// It has moved to another node, or is gone.
	}
	return p.wrap("delete", h.name, "", readable(err))
}

// destroy removes a VM of ours that was last seen on a node. A fault with absent says that it has moved.
func (p *Provider) destroy(ctx context.Context, node string, h handle) error {
	path := fmt.Sprintf("/nodes/%s/qemu/%d", node, h.vmid)
	c, err := p.ours(ctx, node, h)
	if err != nil {
		return err
	}
	if c["protection"] == "1" && p.attached(c, h) != "" {
		// Ours are made without, so somebody wants to keep this one.
		return permanent(provider.ReasonUnsupported, "VM %d on %s is protected; take the protection away (qm set %d --protection 0) to have it deleted", h.vmid, node, h.vmid)
	}
	if err := p.stop(ctx, node, h); err != nil {
		return err
	}
	if c, err = p.ours(ctx, node, h); err != nil {
		return err
	}
	// While the VM is hibernated its configuration can't be changed, and while it is protected no drive be taken away.
	change := map[string]any{"digest": string(c["digest"])}
	switch drive := p.attached(c, h); {
	case c.lock() != "":
	case c["protection"] == "1":
		change["delete"] = "protection"
	case drive != "":
		change["delete"] = drive
	}
	if change["delete"] != nil {
		if err := p.run(ctx, node, request{method: http.MethodPost, path: path + "/config", body: change}, p.config.TaskTimeout); err != nil {
			return err
		}
	}
	half := p.attached(c, h) == ""
	if half {
		// A create may have been interrupted while its upload was on the way, and the seed be still to come.
		if err := p.uploadsEnd(ctx, node); err != nil {
			return err
		}
	}
	if err := p.removeSeed(ctx, node, h); err != nil {
		return err
	}
	if _, err := p.ours(ctx, node, h); err != nil {
		return err
	}
	// Purge also takes it out of HA, replication and backup jobs, without which an HA resource can't be destroyed.
	err = p.run(ctx, node, request{method: http.MethodDelete, path: path + "?purge=1"}, p.config.TaskTimeout)
	if err != nil && !classify(err).absent && !classify(err).ambiguous {
		return err
	}
	for begin := time.Now(); ; {
		at, whereErr := p.where(ctx, h.vmid)
		if whereErr == nil && at == "" {
			p.unremember(h.vmid)
			if !half {
				return nil
			}
			// The node may have had all of the upload and not yet begun its task when it was asked for those.
			if err := p.uploadsEnd(ctx, node); err != nil {
				return err
			}
			return p.removeSeed(ctx, node, h)
		}
		if err == nil && whereErr == nil {
			err = unavailable(provider.ReasonUnknown, "VM %d is still on %s", h.vmid, at)
		}
		if time.Since(begin) > p.settle() || sleep(ctx, pace(begin)) != nil {
			return or(err, whereErr)
		}
	}
}

// ours reads the configuration of a VM and makes sure that it is the one meant, and that nothing else is at work in it.
func (p *Provider) ours(ctx context.Context, node string, h handle) (vmConfig, error) {
	c, err := p.configOf(ctx, node, h.vmid)
	if err != nil {
		return nil, err
	}
	k := p.identify(h.vmid, c)
	switch lock := c.lock(); {
	case !k.ours || k.note.nonce != h.nonce || k.name != h.name:
		return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, absent: true, message: fmt.Sprintf("VM %d on %s is not the one meant any more", h.vmid, node)}
	case lock == "" || lock == "suspended":
		return c, nil
	case lock == "clone" && p.abandoned(h.vmid):
		return nil, p.orphaned(node, h)
	default:
		return nil, unavailable(provider.ReasonUnknown, "VM %d on %s has the lock %q; it is deleted when that is gone", h.vmid, node, lock)
	}
}

// stop stops the VM and waits until it is off. The task of one that HA manages ends before the VM does.
func (p *Provider) stop(ctx context.Context, node string, h handle) error {
	path := fmt.Sprintf("/nodes/%s/qemu/%d/status/", node, h.vmid)
	running, err := p.isRunning(ctx, node, h.vmid)
	if err != nil || !running {
		return err
	}
	if _, err := p.ours(ctx, node, h); err != nil {
		return err
	}
	err = p.run(ctx, node, request{method: http.MethodPost, path: path + "stop"}, p.config.TaskTimeout)
	if f := classifyNil(err); err != nil && !f.ambiguous && !strings.Contains(f.message, "not running") {
		return err
	}
	for begin := time.Now(); ; {
		running, readErr := p.isRunning(ctx, node, h.vmid)
		if readErr == nil && !running {
			return nil
		}
		if classifyNil(readErr).absent {
			return readErr
		}
		if cause := sleep(ctx, pace(begin)); cause != nil || time.Since(begin) > p.config.TaskTimeout {
			return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: fmt.Sprintf("VM %d has not stopped yet", h.vmid), cause: or(err, readErr)}
		}
	}
}

// uploadsEnd waits until none of the uploads that the token has under way on a node now is still being put into its place.
func (p *Provider) uploadsEnd(ctx context.Context, node string) error {
	var waiting map[text]bool
	for begin := time.Now(); ; {
		var tasks []struct {
			UPID    text `json:"upid"`
			EndTime text `json:"endtime"`
		}
		if err := p.get(ctx, node, "/nodes/"+node+"/tasks?source=active&typefilter=imgcopy&limit=500", &tasks); err != nil {
			return err
		}
		active := map[text]bool{}
		for _, t := range tasks {
			if t.EndTime == "" && strings.Contains(string(t.UPID), ":"+p.config.TokenID+":") && (waiting == nil || waiting[t.UPID]) {
				active[t.UPID] = true
			}
		}
		if len(active) == 0 {
			return nil
		}
		waiting = active
		if err := sleep(ctx, pace(begin)); err != nil || time.Since(begin) > p.config.TaskTimeout {
			return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: "uploads to " + node + " are still under way", cause: err}
		}
	}
}

// removeSeed deletes the seed on a node. The task also succeeds when there is none.
func (p *Provider) removeSeed(ctx context.Context, node string, h handle) error {
	size, err := p.seedSize(ctx, node, h)
	if err != nil {
		if classify(err).reason == provider.ReasonStorageNotFound {
			return nil // no storage on this node, no seed
		}
		return err
	}
	if size < 0 {
		return nil
	}
	path := fmt.Sprintf("/nodes/%s/storage/%s/content/%s", node, p.config.SeedStorage, p.seedVolume(h))
	err = p.run(ctx, node, request{method: http.MethodDelete, path: path}, p.config.TaskTimeout)
	if f := classifyNil(err); err != nil && errors.Is(f.kind, provider.ErrDenied) {
		f.message += "; deleting a seed takes Datastore.Allocate on /storage/" + p.config.SeedStorage
		return f
	}
	return err
}

// sweep removes the seed of a VM that is gone from every node that answers.
func (p *Provider) sweep(ctx context.Context, h handle) error {
	errs := make([]error, len(p.endpoints))
	var removing sync.WaitGroup
	for i, e := range p.endpoints {
		removing.Go(func() { errs[i] = p.removeSeed(ctx, e.node.Name, h) })
	}
	removing.Wait()
	for i, err := range errs {
		if err == nil {
			continue
		}
		f := classify(err)
		if errors.Is(f.kind, provider.ErrDenied) {
			return err
		}
		// A node that is down keeps at most a file of some hundred kilobytes; the VM is gone all the same.
		p.config.Logger.WarnContext(ctx, "proxmox: could not look for the seed of a VM that is gone", "provider", p.config.Name,
			"node", p.endpoints[i].node.Name, "seed", p.seedVolume(h), "error", f.Error())
	}
	return nil
}
