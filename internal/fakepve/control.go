package fakepve

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fault changes what happens to requests.
type Fault struct {
	// Method and Path select requests. Path is a pattern of path.Match on what follows /api2/json, as in
	// "/nodes/*/qemu/*/clone". An empty one matches all.
	Method, Path string
	// Node selects the node that is connected to. Empty matches all.
	Node string
	// Skip lets that many requests pass first.
	Skip int
	// Times is how many are hit. Zero means all.
	Times int
	// Delay waits before anything else.
	Delay time.Duration
	// Carry carries the request out although its answer is another one.
	Carry bool
	// Drop closes the connection instead of an answer.
	Drop bool
	// Status and Reason are the answer. Zero leaves it as it is.
	Status int
	Reason string
	// HTML answers with a page instead of JSON, with status 200 when Status is zero.
	HTML bool
	// Body answers with this instead, with status 200 when Status is zero.
	Body string
	// Do is called before the request is carried out. It may change the cluster.
	Do func()

	passed, hit int
	off         bool
}

// Fault puts f in place. The returned function takes it away.
func (c *Cluster) Fault(f Fault) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = append(c.faults, &f)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		f.off = true
	}
}

func (c *Cluster) faultLocked(node, method, p string) *Fault {
	for _, f := range c.faults {
		if f.off || f.Method != "" && f.Method != method || f.Node != "" && f.Node != node || f.Times > 0 && f.hit >= f.Times {
			continue
		}
		if ok, _ := path.Match(f.Path, p); f.Path != "" && !ok {
			continue
		}
		if f.passed < f.Skip {
			f.passed++
			continue
		}
		f.hit++
		return f
	}
	return nil
}

// TaskFault changes how tasks end.
type TaskFault struct {
	// Type is the task's, such as qmclone, qmstart, qmstop, qmdestroy, qmconfig, resize, imgdel or imgcopy.
	Type string
	// Skip lets that many pass first, and Times is how many are hit; zero means all.
	Skip, Times int
	// Exit is the exit status. With "WARNINGS: 1" the work is done, with any other it is undone.
	Exit string
	// Kill leaves the work half done and the lock in place, as when the worker is killed.
	Kill bool
	// Delay makes the task take longer.
	Delay time.Duration

	passed, hit int
	off         bool
}

// TaskFault puts f in place. The returned function takes it away.
func (c *Cluster) TaskFault(f TaskFault) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taskFaults = append(c.taskFaults, &f)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		f.off = true
	}
}

func (c *Cluster) taskFaultLocked(kind string) TaskFault {
	for _, f := range c.taskFaults {
		if f.off || f.Type != kind || f.Times > 0 && f.hit >= f.Times {
			continue
		}
		if f.passed < f.Skip {
			f.passed++
			continue
		}
		f.hit++
		return *f
	}
	return TaskFault{}
}

// Request is one that was received.
type Request struct {
	// Node was connected to.
	Node string
	// Method and Path are the request's, without /api2/json and without the query.
	Method, Path string
	// Status is that of the answer; zero when there was none.
	Status int
}

// Requests returns what was received and answered so far.
func (c *Cluster) Requests() []Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.requests)
}

// Count returns how many requests matched, as in Fault.
func (c *Cluster) Count(method, pattern string) int {
	n := 0
	for _, r := range c.Requests() {
		if ok, _ := path.Match(pattern, r.Path); ok && r.Method == method {
			n++
		}
	}
	return n
}

// MaxClones returns the most clones that ran at once on a node.
func (c *Cluster) MaxClones(node string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.maxClones[node]
}

// SetNode changes how a node can be reached. Connections to it are cut.
func (c *Cluster) SetNode(name string, mode NodeMode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[name].mode = mode
	if mode == NodeUp {
		return
	}
	for conn := range c.conns {
		if conn.LocalAddr().String() == host(name)+":8006" {
			conn.Close()
		}
	}
}

// CutOff separates a node from the others: it still answers, knows of no change to the cluster since, and says that the
// others are offline. False joins it again.
func (c *Cluster) CutOff(name string, alone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[name].alone = nil
	if alone {
		c.nodes[name].alone = maps.Clone(c.vms)
	}
}

// SetMemoryUsed sets how much of a node's memory is used by other things than VMs, in MiB.
func (c *Cluster) SetMemoryUsed(node string, mib int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[node].memUsed = mib
}

// SetQuorum takes the quorum away or gives it back.
func (c *Cluster) SetQuorum(have bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noQuorum = !have
}

// SlowUploads makes what comes after the last byte of an upload take d. When that is longer than the idle timeout the
// connection is closed, and the task no longer finds its file.
func (c *Cluster) SlowUploads(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slowUpload = d
}

// DamageUploads has the next n uploads arrive with as many bytes as were sent and one of them another.
func (c *Cluster) DamageUploads(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.damaged = n
}

// Template says what a template has besides its name.
type Template struct {
	// Storage of its disk. Defaults to local-lvm.
	Storage string
	// DiskGiB defaults to 4.
	DiskGiB int
	// Config is added to the defaults.
	Config map[string]string
}

// AddTemplate makes a template with a disk on scsi0, a cloud-init drive on ide0, net0 on vmbr0, and the agent enabled.
func (c *Cluster) AddTemplate(node string, vmid int, name string, t Template) {
	c.mu.Lock()
	defer c.mu.Unlock()
	storage, size := cmp.Or(t.Storage, "local-lvm"), cmp.Or(t.DiskGiB, 4)
	disk := fmt.Sprintf("%s:base-%d-disk-0", storage, vmid)
	cloudinit := fmt.Sprintf("%s:vm-%d-cloudinit", storage, vmid)
	config := map[string]string{
		"name": name, "template": "1", "cores": "1", "memory": "1024", "agent": "1", "boot": "order=scsi0", "ostype": "l26",
		"scsihw": "virtio-scsi-pci", "scsi0": fmt.Sprintf("%s,size=%dG", disk, size), "ide0": cloudinit + ",media=cdrom,size=4M",
		"net0": "virtio=" + newMAC() + ",bridge=vmbr0", "tags": "template", "smbios1": "uuid=" + newUUID(), "description": "made by hand\n",
	}
	maps.Copy(config, t.Config)
	c.vms[vmid] = &vm{id: vmid, node: node, config: config}
	c.addVolumeLocked(node, disk, "images", int64(size)<<30, vmid, nil)
	c.addVolumeLocked(node, cloudinit, "images", 4<<20, vmid, nil)
}

// AddVM makes a VM as somebody else would. The pool is optional.
func (c *Cluster) AddVM(node string, vmid int, name, pool string, config map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[string]string{"cores": "1", "memory": "512", "smbios1": "uuid=" + newUUID()}
	if name != "" {
		all["name"] = name
	}
	maps.Copy(all, config)
	c.vms[vmid] = &vm{id: vmid, node: node, pool: pool, config: all}
}

// AddContainer makes a container, which takes a VMID and is no VM.
func (c *Cluster) AddContainer(node string, vmid int, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vms[vmid] = &vm{id: vmid, node: node, container: true, config: map[string]string{"hostname": name}}
}

// VM is a VM as it is.
type VM struct {
	ID         int
	Node, Pool string
	Running    bool
	Config     map[string]string
}

// VM returns one VM, and whether there is one.
func (c *Cluster) VM(vmid int) (VM, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.vms[vmid]
	if !ok {
		return VM{}, false
	}
	return v.export(), true
}

// VMs returns all VMs that are neither templates nor containers, by VMID.
func (c *Cluster) VMs() []VM {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []VM
	for _, v := range c.vms {
		if v.config["template"] != "1" && !v.container {
			all = append(all, v.export())
		}
	}
	slices.SortFunc(all, func(a, b VM) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func (v *vm) export() VM {
	return VM{ID: v.id, Node: v.node, Pool: v.pool, Running: v.running, Config: maps.Clone(v.config)}
}

// Volumes returns every volume as node:storage:name, or storage:name where the storage is shared.
func (c *Cluster) Volumes() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.volumes))
}

// Volume returns the bytes of an uploaded file by what Volumes calls it.
func (c *Cluster) Volume(name string) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v := c.volumes[name]; v != nil {
		return slices.Clone(v.data)
	}
	return nil
}

// Edit changes a VM's configuration behind everybody's back: an empty value removes the key.
func (c *Cluster) Edit(vmid int, key, value string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.vms[vmid]
	v.changeLocked()
	if value == "" {
		delete(v.config, key)
		return
	}
	v.config[key] = value
}

// PowerOff stops a VM as if its guest had.
func (c *Cluster) PowerOff(vmid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vms[vmid].changeLocked()
	c.vms[vmid].running = false
}

// Hibernate suspends a VM to disk.
func (c *Cluster) Hibernate(vmid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.vms[vmid]
	v.changeLocked()
	v.running = false
	v.config["lock"] = "suspended"
	v.config["vmstate"] = fmt.Sprintf("local-lvm:vm-%d-state-suspend", vmid)
}

// Migrate moves a VM to another node, its local volumes with it.
func (c *Cluster) Migrate(vmid int, node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.vms[vmid]
	v.changeLocked()
	for key, vol := range c.volumes {
		if vol.vmid == vmid && vol.node == v.node {
			delete(c.volumes, key)
			vol.node = node
			c.volumes[node+":"+vol.volid] = vol
		}
	}
	v.node = node
}

// SetHA makes a VM a resource of the HA manager.
func (c *Cluster) SetHA(vmid int, managed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vms[vmid].ha = managed
}

// SetAgent sets what the guest agent of a VM does.
func (c *Cluster) SetAgent(vmid int, mode AgentMode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vms[vmid].agent = mode
}

// AgentMode says what a guest agent does.
type AgentMode int

// The modes of a guest agent.
const (
	AgentWorks     AgentMode = iota
	AgentAbsent              // never answers
	AgentHangs               // qmp command failed - got timeout
	AgentDisabled            // the command is disabled: an error object instead of a list
	AgentLinkLocal           // no address but link-local ones
	AgentNoList              // interfaces without any addresses
)

// Remove makes a VM vanish with its disks, as if an operator had destroyed it.
func (c *Cluster) Remove(vmid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeLocked(vmid)
}

func (c *Cluster) removeLocked(vmid int) {
	delete(c.vms, vmid)
	for key, vol := range c.volumes {
		if vol.vmid == vmid {
			delete(c.volumes, key)
		}
	}
}

// Wait waits until no task runs.
func (c *Cluster) Wait() {
	for {
		c.mu.Lock()
		busy := false
		for _, t := range c.tasks {
			busy = busy || t.exit == ""
		}
		c.mu.Unlock()
		if !busy || !c.sleep(10*time.Millisecond) {
			return
		}
	}
}

func atoi(s string) int {
	n, _ := strconv.Atoi(strings.TrimSpace(s))
	return n
}
