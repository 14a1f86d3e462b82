package proxmox

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// leastFree is what must be free in the storage of the seeds, in bytes.
const leastFree = 16 << 20

// Check implements provider.Checker. Each node is asked at its own endpoint, all at once: certificate and token,
// version, privileges, the node's state, the storages and the templates.
func (p *Provider) Check(ctx context.Context) []provider.TargetHealth {
	all := make([]provider.TargetHealth, len(p.endpoints))
	var asking sync.WaitGroup
	for i, e := range p.endpoints {
		asking.Go(func() {
			begin := time.Now()
			h := provider.TargetHealth{Target: e.node.Name, Ready: true, Reason: provider.ReasonReady}
			if err := p.checkNode(ctx, e); err != nil {
				f := classify(err)
				h.Ready, h.Reason, h.Message = false, f.reason, f.Error()
				if ctx.Err() != nil && f.code == 0 {
					h.Reason = provider.ReasonTimeout
				}
			}
			h.Duration, h.CheckedAt = time.Since(begin), time.Now()
			all[i] = h
		})
	}
	asking.Wait()
	return all
}

func (p *Provider) checkNode(ctx context.Context, e *endpoint) error {
	node := e.node.Name
	get := func(path string, result any) error {
		return p.send(ctx, e, request{method: http.MethodGet, path: path}, result)
	}
	var version struct {
		Version text `json:"version"`
	}
	if err := get("/version", &version); err != nil {
		return err
	}
	major, _ := strconv.Atoi(strings.SplitN(string(version.Version), ".", 2)[0])
	if major < 8 {
		return permanent(provider.ReasonUnsupported, "Proxmox VE %q on %s, want 8 or newer", version.Version, node)
	}
	var nodes []nodeRow
	if err := get("/nodes", &nodes); err != nil {
		return err
	}
	if up := online(nodes); 2*up < len(nodes) {
		return unavailable(provider.ReasonUnreachable, "%s sees %d of %d nodes online, so it has no quorum; look at pvecm status", node, up, len(nodes))
	}
	var vms []row
	if err := get("/nodes/"+node+"/qemu", &vms); err != nil {
		return err
	}
	r, err := p.rights(ctx, e)
	if err != nil {
		return err
	}
	if err := p.checkRights(ctx, r, major); err != nil {
		return err
	}
	var status struct {
		Uptime number `json:"uptime"`
	}
	if err := get("/nodes/"+node+"/status", &status); err != nil {
		return err
	}
	storages := map[string]string{p.config.SeedStorage: "iso"}
	if p.config.DiskStorage != "" {
		storages[p.config.DiskStorage] = "images"
	}
	for _, id := range slices.Sorted(maps.Keys(storages)) {
		if err := p.checkStorage(ctx, e, id, storages[id]); err != nil {
			return err
		}
	}
	return p.checkTemplates(ctx, r, vms)
}

// rights are what an endpoint says that the token may do.
type rights struct {
	p    *Provider
	e    *endpoint
	tree grants
}

// rights asks for the privileges at all paths that have an entry of their own.
func (p *Provider) rights(ctx context.Context, e *endpoint) (*rights, error) {
	r := &rights{p: p, e: e}
	return r, p.send(ctx, e, request{method: http.MethodGet, path: "/access/permissions"}, &r.tree)
}

// have reports whether the token has a privilege at a path. A path without an entry of its own is asked for, once: it may have what
// is granted above it, or an entry that takes everything away, and of those the answer for all paths says nothing.
func (r *rights) have(ctx context.Context, path, privilege string) (bool, error) {
	if _, told := r.tree[path]; !told {
		var one grants
		if err := r.p.send(ctx, r.e, request{method: http.MethodGet, path: "/access/permissions?path=" + path}, &one); err != nil {
			return false, err
		}
		if r.tree == nil {
			r.tree = grants{}
		}
		r.tree[path] = one[path]
	}
	return r.tree.have(path, privilege), nil
}

// need is a set of privileges at a path. Of privileges joined by | one is enough.
type need struct {
	path       string
	privileges []string
}

// needs are the least privileges of the token, as the package comment lists them.
func (p *Provider) needs(major int, node string) []need {
	agent := "VM.GuestAgent.Audit|VM.GuestAgent.Unrestricted"
	if major == 8 {
		agent = "VM.Monitor"
	}
	privileges := []string{"VM.Allocate", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk", "VM.Config.Memory",
		"VM.Config.Options", "VM.PowerMgmt", agent}
	if p.config.Bridge != "" || p.config.VLAN != 0 {
		privileges = append(privileges, "VM.Config.Network")
	}
	at := "/vms"
	if p.config.Pool != "" {
		at = "/pool/" + p.config.Pool
	}
	all := []need{
		{"/vms", []string{"VM.Audit"}}, {at, privileges}, {"/nodes/" + node, []string{"Sys.Audit"}},
		{"/storage/" + p.config.SeedStorage, []string{"Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.Audit|Datastore.AllocateSpace"}},
	}
	if p.config.DiskStorage != "" {
		all = append(all, need{"/storage/" + p.config.DiskStorage, []string{"Datastore.AllocateSpace"}})
	}
	return all
}

func (p *Provider) checkRights(ctx context.Context, r *rights, major int) error {
	var missing []string
	for _, n := range p.needs(major, r.e.node.Name) {
		for _, privileges := range n.privileges {
			found := false
			for one := range strings.SplitSeq(privileges, "|") {
				have, err := r.have(ctx, n.path, one)
				if err != nil {
					return err
				}
				found = found || have
			}
			if !found {
				missing = append(missing, strings.ReplaceAll(privileges, "|", " or ")+" on "+n.path)
			}
		}
	}
	if len(missing) > 0 {
		return &fault{kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied, message: "the token lacks " + strings.Join(missing, ", ")}
	}
	return nil
}

func (p *Provider) checkStorage(ctx context.Context, e *endpoint, id, content string) error {
	var s struct {
		Content text   `json:"content"`
		Enabled number `json:"enabled"`
		Active  number `json:"active"`
		Free    number `json:"avail"`
	}
	node := e.node.Name
	err := p.send(ctx, e, request{method: http.MethodGet, path: fmt.Sprintf("/nodes/%s/storage/%s/status", node, id)}, &s)
	switch {
	case err != nil:
		return err
	case !slices.Contains(strings.Split(string(s.Content), ","), content):
		return permanent(provider.ReasonStorageNotFound, "storage %q on %s takes %q, want %s among it", id, node, s.Content, content)
	case s.Enabled == 0 || s.Active == 0:
		return unavailable(provider.ReasonStorageNotFound, "storage %q on %s is disabled or not active", id, node)
	case s.Free < leastFree:
		return &fault{kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity, message: fmt.Sprintf("storage %q on %s has %d bytes free, want %d", id, node, s.Free, leastFree)}
	}
	return nil
}

// checkTemplates looks for the template of every image that the node should have.
func (p *Provider) checkTemplates(ctx context.Context, r *rights, vms []row) error {
	var cluster []row
	if err := p.send(ctx, r.e, request{method: http.MethodGet, path: "/cluster/resources?type=vm"}, &cluster); err != nil {
		return err
	}
	node := r.e.node.Name
	seen := view{rows: map[int]row{}}
	for _, v := range cluster {
		seen.rows[int(v.VMID)] = v
	}
	for _, v := range vms {
		v.Node, v.live = text(node), true
		seen.rows[int(v.VMID)] = v
	}
	for _, image := range slices.Sorted(maps.Keys(p.config.Templates)) {
		source, id, why := p.template(image, node, &seen)
		if why != "" {
			return permanent(provider.ReasonTemplateNotFound, "%s", why)
		}
		have, err := r.have(ctx, "/vms/"+strconv.Itoa(id), "VM.Clone")
		if err != nil {
			return err
		}
		if !have {
			return &fault{kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied, message: fmt.Sprintf("the token lacks VM.Clone on /vms/%d, the template of image %q", id, image)}
		}
		if source != node {
			continue
		}
		c, err := p.configOf(ctx, node, id)
		if err != nil {
			return err
		}
		if err := p.checkBridges(ctx, r, id, c); err != nil {
			return err
		}
		if p.config.DiskStorage != "" {
			continue
		}
		if err := checkDisks(ctx, r, id, c); err != nil {
			return err
		}
	}
	return nil
}

// checkBridges makes sure that clones may use the template's bridges, and net0 the configured one. What is no plain bridge is in
// some other zone than localnetwork, so any zone will do here.
func (p *Provider) checkBridges(ctx context.Context, r *rights, id int, c vmConfig) error {
	nets := []string{p.network(string(c["net0"]))}
	for _, key := range slices.Sorted(maps.Keys(c)) {
		if strings.HasPrefix(key, "net") {
			nets = append(nets, string(c[key]))
		}
	}
	for _, net := range nets {
		bridge, tag := option(net, "bridge"), option(net, "tag")
		if bridge == "" {
			continue
		}
		path := "/" + bridge
		if tag != "" {
			path += "/" + tag
		}
		have, err := r.have(ctx, "/sdn/zones/localnetwork"+path, "SDN.Use")
		if err != nil {
			return err
		}
		if have {
			continue
		}
		elsewhere := false
		for zone, privileges := range r.tree {
			_, use := privileges["SDN.Use"]
			elsewhere = elsewhere || use && strings.HasPrefix(zone, "/sdn/zones/") && !strings.HasPrefix(zone, "/sdn/zones/localnetwork")
		}
		if !elsewhere {
			return &fault{kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied,
				message: fmt.Sprintf("the token lacks SDN.Use on /sdn/zones/localnetwork%s, the bridge of template %d", path, id)}
		}
	}
	return nil
}

// option returns the value of a part of an option, "" when there is none.
func option(text, key string) string {
	for part := range strings.SplitSeq(text, ",") {
		if v, ok := strings.CutPrefix(part, key+"="); ok {
			return v
		}
	}
	return ""
}

// checkDisks makes sure that the clone of a template may be stored where the template is.
func checkDisks(ctx context.Context, r *rights, id int, c vmConfig) error {
	for _, key := range slices.Sorted(maps.Keys(c)) {
		d := string(c[key])
		storage, _, ok := strings.Cut(d, ":")
		if !drivePattern.MatchString(key) || !ok || isCDROM(d) && !isCloudInit(d) || !storagePattern.MatchString(storage) {
			continue
		}
		have, err := r.have(ctx, "/storage/"+storage, "Datastore.AllocateSpace")
		if err != nil {
			return err
		}
		if !have {
			return &fault{kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied,
				message: fmt.Sprintf("the token lacks Datastore.AllocateSpace on /storage/%s, where %s of template %d is", storage, key, id)}
		}
	}
	return nil
}
