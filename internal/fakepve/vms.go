package fakepve

import (
	"cmp"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // the digest that Proxmox itself makes of a configuration
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// vm is a VM or a template.
type vm struct {
	id         int
	node, pool string
	config     map[string]string
	running    bool
	started    time.Time
	ha         bool
	container  bool // of the other kind, which has its VMID from the same numbers
	agent      AgentMode
	shown      shown // what /cluster/resources knew before the last change
	changed    time.Time
}

type shown struct {
	name, status string
	template     bool
}

func (v *vm) status() string {
	if v.running {
		return "running"
	}
	return "stopped"
}

func (v *vm) now() shown {
	return shown{v.config["name"], v.status(), v.config["template"] == "1"}
}

// changeLocked comes before a change that /cluster/resources is late to show.
func (v *vm) changeLocked() {
	v.shown, v.changed = v.now(), time.Now()
}

func (v *vm) file() string { return fmt.Sprintf("nodes/%s/qemu-server/%d.conf", v.node, v.id) }

// vmLocked finds the VM of the path on the node of the path, and nowhere else.
func (q *request) vmLocked() (*vm, *failure) {
	id := atoi(q.vars["vmid"])
	v := q.c.vms[id]
	if v == nil || v.node != q.vars["node"] || v.container {
		return nil, fail("Configuration file 'nodes/%s/qemu-server/%d.conf' does not exist", q.vars["node"], id)
	}
	return v, nil
}

func (v *vm) checkLock() *failure {
	if l := v.config["lock"]; l != "" {
		return fail("VM is locked (%s)", l)
	}
	return nil
}

func getVersion(q *request) (any, *failure) {
	v := map[int]string{8: "8.4.14", 9: "9.1.3"}[q.c.config.Version]
	return map[string]string{"version": v, "release": v[:3], "repoid": "4a1cd6c3"}, nil
}

func getNextID(q *request) (any, *failure) {
	if want := q.params["vmid"]; want != "" {
		if q.c.vms[atoi(want)] != nil {
			return nil, badParam("vmid", "VM %s already exists", want)
		}
		return want, nil
	}
	for id := 100; ; id++ {
		if q.c.vms[id] == nil {
			return strconv.Itoa(id), nil
		}
	}
}

func getPools(q *request) (any, *failure) {
	pools := []map[string]any{}
	for _, p := range slices.Sorted(maps.Keys(q.c.pools)) {
		if q.c.mayLocked(q.token, "/pool/"+p, "Pool.Audit") && (q.params["poolid"] == "" || q.params["poolid"] == p) {
			pools = append(pools, map[string]any{"poolid": p})
		}
	}
	return pools, nil
}

// memoryUsedLocked returns what a node uses, in bytes.
func (c *Cluster) memoryUsedLocked(n *node) int64 {
	used := int64(n.memUsed) << 20
	for _, v := range c.vms {
		if v.node == n.name && v.running {
			used += int64(atoi(v.config["memory"])) << 20
		}
	}
	return used
}

func (c *Cluster) nodeRowLocked(q *request, n *node) map[string]any {
	row := map[string]any{"node": n.name, "type": "node", "id": "node/" + n.name, "status": "online"}
	if n.mode != NodeUp || n.name != q.node && (n.alone != nil || c.nodes[q.node].alone != nil) {
		row["status"] = "offline"
		return row
	}
	if c.mayLocked(q.token, "/nodes/"+n.name, "Sys.Audit") {
		row["maxmem"], row["mem"], row["maxcpu"], row["cpu"] = int64(c.config.NodeMemoryMiB)<<20, c.memoryUsedLocked(n), 16, 0.04
	}
	return row
}

func getNodes(q *request) (any, *failure) {
	var rows []any
	for _, n := range q.c.config.Nodes {
		rows = append(rows, q.c.nodeRowLocked(q, q.c.nodes[n]))
	}
	return rows, nil
}

func getNodeStatus(q *request) (any, *failure) {
	n := q.c.nodes[q.vars["node"]]
	total, used := int64(q.c.config.NodeMemoryMiB)<<20, q.c.memoryUsedLocked(n)
	return map[string]any{
		"memory": map[string]any{"total": total, "used": used, "free": total - used}, "uptime": 86400, "cpu": 0.04,
		"cpuinfo": map[string]any{"cpus": 16}, "pveversion": "pve-manager/" + strconv.Itoa(q.c.config.Version), "loadavg": []string{"0.1", "0.1", "0.1"},
	}, nil
}

func getResources(q *request) (any, *failure) {
	rows := []any{}
	if kind := q.params["type"]; kind == "" || kind == "node" {
		for _, n := range q.c.config.Nodes {
			rows = append(rows, q.c.nodeRowLocked(q, q.c.nodes[n]))
		}
	}
	if kind := q.params["type"]; kind == "" || kind == "vm" {
		vms := q.c.vms
		if alone := q.c.nodes[q.node].alone; alone != nil {
			vms = alone
		}
		for _, id := range slices.Sorted(maps.Keys(vms)) {
			v := vms[id]
			if !q.c.mayLocked(q.token, "/vms/"+strconv.Itoa(id), "VM.Audit") {
				continue
			}
			kind := map[bool]string{false: "qemu", true: "lxc"}[v.container]
			row := map[string]any{"id": kind + "/" + strconv.Itoa(id), "type": kind, "vmid": id, "node": v.node}
			for _, k := range []string{"lock", "tags"} {
				if v.config[k] != "" {
					row[k] = v.config[k]
				}
			}
			s := v.now()
			if time.Since(v.changed) < q.c.config.Stale {
				s = v.shown
			}
			if q.c.nodes[v.node].mode != NodeUp {
				s = shown{}
			}
			if s.name != "" {
				row["name"] = s.name
			}
			row["status"], row["template"] = cmp.Or(s.status, "unknown"), map[bool]int{true: 1}[s.template]
			if v.pool != "" {
				row["pool"] = v.pool
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func getVMs(q *request) (any, *failure) {
	rows := []any{}
	for _, id := range slices.Sorted(maps.Keys(q.c.vms)) {
		v := q.c.vms[id]
		if v.node != q.vars["node"] || v.container || !q.c.mayLocked(q.token, "/vms/"+strconv.Itoa(id), "VM.Audit") {
			continue
		}
		row := map[string]any{"vmid": id, "name": cmp.Or(v.config["name"], "VM "+strconv.Itoa(id)), "status": v.status(),
			"cpus": json.Number(cmp.Or(v.config["cores"], "1")), "maxmem": int64(atoi(v.config["memory"])) << 20}
		for _, k := range []string{"lock", "tags"} {
			if v.config[k] != "" {
				row[k] = v.config[k]
			}
		}
		if v.config["template"] == "1" {
			row["template"] = 1
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (v *vm) digest() string {
	h := sha1.New() //nolint:gosec // see above
	for _, k := range slices.Sorted(maps.Keys(v.config)) {
		h.Write(fmt.Appendf(nil, "%s: %s\n", k, v.config[k]))
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// numeric are the options that come back as numbers.
var numeric = []string{"template", "cores", "sockets", "onboot", "protection", "numa", "balloon", "acpi", "kvm", "tablet", "vcpus"}

func getConfig(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	answer := map[string]any{"digest": v.digest()}
	for k, value := range v.config {
		answer[k] = value
		if slices.Contains(numeric, k) {
			answer[k] = json.Number(value)
		}
	}
	if d := v.config["description"]; d != "" {
		answer["description"] = strings.TrimRight(d, " \t\r\n")
	}
	return answer, nil
}

func getCurrent(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	answer := map[string]any{"vmid": v.id, "name": cmp.Or(v.config["name"], "VM "+strconv.Itoa(v.id)), "status": v.status(), "qmpstatus": v.status(),
		"ha": map[string]any{"managed": map[bool]int{true: 1}[v.ha]}, "maxmem": int64(atoi(v.config["memory"])) << 20}
	for _, k := range []string{"lock", "tags"} {
		if v.config[k] != "" {
			answer[k] = v.config[k]
		}
	}
	if v.config["template"] == "1" {
		answer["template"] = 1
	}
	if v.running {
		answer["uptime"] = int(time.Since(v.started).Seconds())
	}
	return answer, nil
}

func mayClone(q *request) *failure {
	if f := q.needLocked("/vms/"+q.vars["vmid"], "VM.Clone"); f != nil {
		return f
	}
	if p := q.params["pool"]; p != "" && q.c.mayLocked(q.token, "/pool/"+p, "VM.Allocate") {
		return nil
	}
	return q.needLocked("/vms/"+q.params["newid"], "VM.Allocate")
}

var bridgeOf = regexp.MustCompile(`(?:^|,)bridge=([^,]+)`)

func (q *request) mayUseBridgeLocked(netSpec string) *failure {
	if m := bridgeOf.FindStringSubmatch(netSpec); m != nil {
		return q.needLocked("/sdn/zones/localnetwork/"+m[1], "SDN.Use")
	}
	return nil
}

// diskKey matches the options that hold a drive.
var diskKey = regexp.MustCompile(`^(ide|sata|scsi|virtio)[0-9]+$|^efidisk0$|^tpmstate0$`)

func isCDROM(drive string) bool { return strings.Contains(","+drive, ",media=cdrom") }

func isCloudInit(drive string) bool {
	volid, _, _ := strings.Cut(drive, ",")
	return strings.HasSuffix(volid, "-cloudinit") || strings.HasSuffix(volid, ":cloudinit")
}

func volid(drive string) string {
	id, _, _ := strings.Cut(drive, ",")
	if storage, rest, ok := strings.Cut(id, ":"); ok && strings.Contains(rest, "/") && !strings.HasPrefix(rest, "iso/") {
		return storage + ":" + rest[strings.LastIndexByte(rest, '/')+1:]
	}
	return id
}

func cloneVM(q *request) (any, *failure) {
	c := q.c
	source, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	if c.noQuorum {
		return nil, fail("cluster not ready - no quorum?")
	}
	if p := q.params["pool"]; p != "" && !c.pools[p] {
		return nil, badParam("pool", "pool '%s' does not exist", p)
	}
	if f := source.checkLock(); f != nil {
		return nil, f
	}
	full := q.params["full"] == "1" || source.config["template"] != "1"
	if !full && (q.params["storage"] != "" || q.params["format"] != "") {
		return nil, fail("parameter 'storage' not allowed for linked clones")
	}
	target := cmp.Or(q.params["target"], source.node)
	if c.nodes[target] == nil {
		return nil, fail("no such cluster node '%s'", target)
	}
	newid := atoi(q.params["newid"])
	if other := c.vms[newid]; other != nil {
		return nil, fail("unable to create VM %d: config file already exists", newid)
	}
	for key, drive := range source.config {
		if strings.HasPrefix(key, "net") {
			if f := q.mayUseBridgeLocked(drive); f != nil {
				return nil, f
			}
		}
		if !diskKey.MatchString(key) || isCDROM(drive) && !isCloudInit(drive) {
			continue
		}
		storage := storageOf(drive)
		if q.params["storage"] != "" {
			storage = q.params["storage"]
		}
		s := c.storages[storage]
		if s == nil {
			return nil, fail("storage '%s' does not exist", storage)
		}
		if f := q.needLocked("/storage/"+storage, "Datastore.AllocateSpace"); f != nil {
			return nil, f
		}
		if target != source.node && !c.storages[storageOf(drive)].Shared {
			return nil, fail("can't clone VM to node '%s' (VM uses local storage)", target)
		}
	}
	// The configuration is there with nothing but the lock before the answer is sent.
	v := &vm{id: newid, node: target, pool: q.params["pool"], config: map[string]string{"lock": "clone"}, changed: time.Now()}
	c.vms[newid] = v
	name := cmp.Or(q.params["name"], "Copy-of-VM-"+source.config["name"])
	description, hasDescription := q.params["description"]
	undo := func() {
		c.clones[source.node]--
		c.removeLocked(newid)
	}
	c.clones[source.node]++
	c.maxClones[source.node] = max(c.maxClones[source.node], c.clones[source.node])
	third := min(c.config.CloneTime/3, time.Second) // however slow the storage is
	describe := step{third, func(t *task) string {
		for k, value := range source.config {
			if k == "template" || k == "lock" || strings.HasPrefix(k, "unused") || diskKey.MatchString(k) {
				continue
			}
			v.config[k] = value
		}
		v.config["name"] = name
		delete(v.config, "description")
		if source.config["description"] != "" {
			v.config["description"] = source.config["description"]
		}
		if hasDescription {
			v.config["description"] = description
		}
		v.config["smbios1"] = "uuid=" + newUUID()
		for k := range v.config {
			if strings.HasPrefix(k, "net") {
				v.config[k] = freshMAC(v.config[k])
			}
		}
		t.log = append(t.log, "create linked clone of drive scsi0")
		return ""
	}}
	copyDisks := step{c.config.CloneTime - 2*third, func(*task) string {
		n := 0
		for _, key := range slices.Sorted(maps.Keys(source.config)) {
			drive := source.config[key]
			if !diskKey.MatchString(key) {
				continue
			}
			if isCDROM(drive) && !isCloudInit(drive) {
				v.config[key] = drive
				continue
			}
			storage := cmp.Or(q.params["storage"], storageOf(drive))
			_, options, _ := strings.Cut(drive, ",")
			id := fmt.Sprintf("%s:vm-%d-disk-%d", storage, newid, n)
			inConfig := id
			switch {
			case isCloudInit(drive):
				id = fmt.Sprintf("%s:vm-%d-cloudinit", storage, newid)
				inConfig = id
			case !full:
				base := volid(drive)
				_, baseName, _ := strings.Cut(base, ":")
				inConfig = fmt.Sprintf("%s:%s/vm-%d-disk-%d", storage, baseName, newid, n)
				n++
			default:
				n++
			}
			size := sizeOf(drive)
			if c.freeLocked(c.storages[storage], target) < size {
				undo()
				return fmt.Sprintf("clone failed: storage '%s' error: insufficient free space", storage)
			}
			c.addVolumeLocked(target, id, "images", size, newid, nil)
			v.config[key] = inConfig + "," + options
		}
		return ""
	}}
	unlock := step{third, func(*task) string {
		c.clones[source.node]--
		delete(v.config, "lock")
		return ""
	}}
	return c.startTaskLocked(q, q.vars["node"], "qmclone", q.vars["vmid"], undo, describe, copyDisks, unlock), nil
}

var optionPrivileges = []struct {
	key       *regexp.Regexp
	privilege string
}{
	{regexp.MustCompile(`^(cores|sockets|cpu|vcpus|cpulimit|cpuunits|numa|affinity)`), "VM.Config.CPU"},
	{regexp.MustCompile(`^(memory|balloon|shares|hugepages|allow-ksm)$`), "VM.Config.Memory"},
	{regexp.MustCompile(`^net[0-9]+$`), "VM.Config.Network"},
	{regexp.MustCompile(`^(ci|ipconfig|nameserver|searchdomain|sshkeys)`), "VM.Config.Cloudinit"},
	{regexp.MustCompile(`^(machine|bios|vga|scsihw|serial|usb|watchdog|rng0|audio0|hostpci|args)`), "VM.Config.HWType"},
	{regexp.MustCompile(`.`), "VM.Config.Options"},
}

func (q *request) mayConfigureLocked(v *vm, key string) *failure {
	path := "/vms/" + strconv.Itoa(v.id)
	if diskKey.MatchString(key) {
		return nil // see mayChangeDriveLocked
	}
	for _, o := range optionPrivileges {
		if o.key.MatchString(key) {
			return q.needLocked(path, o.privilege)
		}
	}
	return nil
}

// mayChangeDriveLocked is asked by the worker, of the drive that goes and of the one that comes.
func (q *request) mayChangeDriveLocked(v *vm, drives ...string) *failure {
	for _, drive := range drives {
		needs := []string{"VM.Config.Disk"}
		switch {
		case drive == "":
			continue
		case isCloudInit(drive):
			needs = []string{"VM.Config.Cloudinit", "VM.Config.CDROM"}
		case isCDROM(drive):
			needs = []string{"VM.Config.CDROM"}
		}
		for _, n := range needs {
			if f := q.needLocked("/vms/"+strconv.Itoa(v.id), n); f != nil {
				return f
			}
		}
	}
	return nil
}

// configureLocked checks and returns a change of the configuration, which is to be made later.
func (q *request) configureLocked(v *vm) (func() *failure, *failure) {
	c := q.c
	set, remove := map[string]string{}, []string{}
	for k, value := range q.params {
		switch k {
		case "digest", "background_delay", "force":
		case "skiplock":
			return nil, badParam(k, "Only root may use this option.")
		case "delete":
			remove = strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune(",; ", r) })
		default:
			set[k] = value
		}
	}
	for k, value := range set {
		if f := q.mayConfigureLocked(v, k); f != nil {
			return nil, f
		}
		if strings.HasPrefix(k, "net") {
			if f := q.mayUseBridgeLocked(value); f != nil {
				return nil, f
			}
		}
		if k == "boot" && !regexp.MustCompile(`^(order=.*|[acdn]{1,4})$`).MatchString(value) {
			return nil, badParam("boot", "invalid format - format error\nboot.legacy: value does not match the regex pattern")
		}
		if k == "tags" {
			if c.mayNotTag {
				return nil, &failure{status: http.StatusForbidden, message: fmt.Sprintf("Permission check failed (/, Sys.Modify for modifying tag '%s')", value)}
			}
			set[k] = sortTags(value)
		}
		if !diskKey.MatchString(k) || strings.HasPrefix(value, "none") {
			continue
		}
		storage := storageOf(value)
		if c.storages[storage] == nil {
			return nil, fail("storage '%s' does not exist", storage)
		}
		if f := q.needLocked("/storage/"+storage, "Datastore.Audit", "Datastore.AllocateSpace"); f != nil {
			return nil, f
		}
		if strings.Contains(value, ":iso/") && !isCDROM(value) {
			return nil, fail("explicit 'media=cdrom' is required for iso images")
		}
	}
	for _, k := range remove {
		if f := q.mayConfigureLocked(v, k); f != nil {
			return nil, f
		}
	}
	return func() *failure {
		if c.vms[v.id] != v {
			return fail("Configuration file '%s' does not exist", v.file())
		}
		if f := q.fresh(v); f != nil {
			return f
		}
		if f := v.checkLock(); f != nil {
			return f
		}
		for _, k := range remove {
			if diskKey.MatchString(k) {
				if v.config["protection"] == "1" {
					return fail("can't remove drive '%s' - protection mode enabled", k)
				}
				if f := q.mayChangeDriveLocked(v, v.config[k]); f != nil {
					return f
				}
			}
		}
		for k, value := range set {
			if diskKey.MatchString(k) {
				if f := q.mayChangeDriveLocked(v, v.config[k], value); f != nil {
					return f
				}
			}
		}
		v.changeLocked()
		for _, k := range remove {
			c.detachLocked(v, k)
			delete(v.config, k)
		}
		for k, value := range set {
			if diskKey.MatchString(k) {
				c.detachLocked(v, k)
			}
			v.config[k] = value
		}
		return nil
	}, nil
}

// fresh compares the digest that a request may carry.
func (q *request) fresh(v *vm) *failure {
	if d := q.params["digest"]; d == "" || d == v.digest() {
		return nil
	}
	if q.c.config.Version < 9 {
		return fail("checksum missmatch (file change by other user?)") // sic
	}
	return fail("checksum mismatch (file change by other user?)")
}

// detachLocked frees a cloud-init drive and keeps any other disk as an unused one.
func (c *Cluster) detachLocked(v *vm, key string) {
	drive := v.config[key]
	switch {
	case !diskKey.MatchString(key) || drive == "":
	case isCloudInit(drive):
		c.removeVolumeLocked(v.node, volid(drive))
	case !isCDROM(drive):
		for i := 0; ; i++ {
			if k := "unused" + strconv.Itoa(i); v.config[k] == "" {
				v.config[k] = volid(drive)
				return
			}
		}
	}
}

// sortTags is what Proxmox makes of a list of tags.
func sortTags(list string) string {
	tags := strings.FieldsFunc(strings.ToLower(list), func(r rune) bool { return strings.ContainsRune(",; ", r) })
	slices.Sort(tags)
	return strings.Join(slices.Compact(tags), ";")
}

// RestrictTags makes the cluster refuse tags, as user-tag-access: none does.
func (c *Cluster) RestrictTags(refuse bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mayNotTag = refuse
}

func postConfig(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	apply, f := q.configureLocked(v)
	if f != nil {
		return nil, f
	}
	return q.c.startTaskLocked(q, v.node, "qmconfig", q.vars["vmid"], nil, step{q.c.config.TaskTime, func(*task) string {
		if f := apply(); f != nil {
			return f.message
		}
		return ""
	}}), nil
}

func putConfig(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	apply, f := q.configureLocked(v)
	if f != nil {
		return nil, f
	}
	return nil, apply()
}

func resizeDisk(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	drive := v.config[q.params["disk"]]
	if drive == "" {
		return nil, fail("disk '%s' does not exist", q.params["disk"])
	}
	want, relative := strings.CutPrefix(q.params["size"], "+")
	size := parseSize(want)
	if relative {
		size += sizeOf(drive)
	}
	if size < sizeOf(drive) {
		return nil, fail("shrinking disks is not supported")
	}
	return q.c.startTaskLocked(q, v.node, "resize", q.vars["vmid"], nil, step{q.c.config.TaskTime, func(*task) string {
		if c := q.c.vms[v.id]; c != v {
			return fmt.Sprintf("Configuration file '%s' does not exist", v.file())
		}
		if f := q.fresh(v); f != nil {
			return f.message
		}
		if f := v.checkLock(); f != nil {
			return f.message
		}
		id, _, _ := strings.Cut(drive, ",")
		v.config[q.params["disk"]] = fmt.Sprintf("%s,size=%dG", id, size>>30)
		return ""
	}}), nil
}

func startVM(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	c := q.c
	if c.noQuorum {
		return nil, fail("cluster not ready - no quorum?")
	}
	run := step{c.config.TaskTime, func(*task) string {
		switch l := v.config["lock"]; {
		case c.vms[v.id] != v:
			return fmt.Sprintf("Configuration file '%s' does not exist", v.file())
		case v.config["template"] == "1":
			return "you can't start a vm if it's a template"
		case v.running:
			return fmt.Sprintf("VM %d already running", v.id)
		case l == "suspended":
			delete(v.config, "lock") // resumes the saved state
			delete(v.config, "vmstate")
		case l != "":
			return fmt.Sprintf("VM is locked (%s)", l)
		}
		for k, drive := range v.config {
			if diskKey.MatchString(k) && !strings.HasPrefix(drive, "none") && c.volumeLocked(v.node, volid(drive)) == nil {
				return fmt.Sprintf("volume '%s' does not exist", volid(drive))
			}
		}
		v.changeLocked()
		v.running, v.started = true, time.Now()
		return ""
	}}
	if v.ha {
		return c.startHALocked(q, v, "hastart", run), nil
	}
	return c.startTaskLocked(q, v.node, "qmstart", q.vars["vmid"], nil, run), nil
}

// startHALocked returns a task that only tells the HA manager: what it wants happens later.
func (c *Cluster) startHALocked(q *request, v *vm, kind string, later step) string {
	c.startTaskLocked(q, v.node, "ha-"+kind, strconv.Itoa(v.id), nil, step{10 * c.config.TaskTime, later.do})
	return c.startTaskLocked(q, v.node, kind, strconv.Itoa(v.id), nil, step{c.config.TaskTime, func(*task) string { return "" }})
}

func stopVM(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	c := q.c
	halt := step{c.config.TaskTime, func(*task) string {
		if !v.running {
			return ""
		}
		if f := v.checkLock(); f != nil {
			return f.message
		}
		v.changeLocked()
		v.running = false
		return ""
	}}
	if v.ha {
		return c.startHALocked(q, v, "hastop", halt), nil
	}
	kind := "qmstop"
	if strings.HasSuffix(q.path, "/shutdown") {
		kind = "qmshutdown"
	}
	return c.startTaskLocked(q, v.node, kind, q.vars["vmid"], nil, halt), nil
}

func deleteVM(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	c := q.c
	check := func() *failure {
		switch l := v.config["lock"]; {
		case l != "" && l != "suspended":
			return fail("VM is locked (%s)", l)
		case v.config["protection"] == "1":
			return fail("can't remove VM %d - protection mode enabled", v.id)
		case v.running:
			return fail("VM %d is running - destroy failed", v.id)
		case v.ha && q.params["purge"] != "1":
			return fail("unable to remove VM %d - used in HA resources and purge parameter not set.", v.id)
		}
		return nil
	}
	if f := check(); f != nil {
		return nil, f
	}
	return c.startTaskLocked(q, v.node, "qmdestroy", q.vars["vmid"], nil,
		step{c.config.TaskTime / 2, func(*task) string {
			if c.vms[v.id] != v {
				return fmt.Sprintf("Configuration file '%s' does not exist", v.file())
			}
			if f := check(); f != nil {
				return f.message
			}
			v.config = map[string]string{"lock": "destroyed"}
			return ""
		}},
		step{c.config.TaskTime / 2, func(*task) string {
			c.removeLocked(v.id)
			return ""
		}}), nil
}

func mayAskAgent(q *request) *failure {
	if q.c.config.Version < 9 {
		return q.needLocked("/vms/"+q.vars["vmid"], "VM.Monitor")
	}
	return q.needLocked("/vms/"+q.vars["vmid"], "VM.GuestAgent.Audit", "VM.GuestAgent.Unrestricted")
}

var macOf = regexp.MustCompile(`=([0-9A-Fa-f:]{17})`)

func getInterfaces(q *request) (any, *failure) {
	v, f := q.vmLocked()
	if f != nil {
		return nil, f
	}
	agent := v.config["agent"]
	switch {
	case !v.running:
		return nil, fail("VM %d is not running", v.id)
	case agent == "" || strings.HasPrefix(agent, "0") || strings.Contains(agent, "enabled=0"):
		return nil, fail("No QEMU guest agent configured")
	case v.agent == AgentAbsent || time.Since(v.started) < q.c.config.BootTime:
		return nil, fail("QEMU guest agent is not running")
	case v.agent == AgentHangs:
		return nil, fail("VM %d qmp command 'guest-network-get-interfaces' failed - got timeout", v.id)
	case v.agent == AgentDisabled:
		return map[string]any{"result": map[string]any{"error": map[string]any{"class": "CommandNotFound", "desc": "Command guest-network-get-interfaces has been disabled"}}}, nil
	}
	mac := ""
	if m := macOf.FindStringSubmatch(v.config["net0"]); m != nil {
		mac = strings.ToLower(m[1])
	}
	address := func(kind, ip string, prefix int) map[string]any {
		return map[string]any{"ip-address-type": kind, "ip-address": ip, "prefix": prefix}
	}
	eth := map[string]any{"name": "eth0", "hardware-address": mac}
	addresses := []any{address("ipv6", "fe80::be24:11ff:fe00:1", 64), address("ipv4", "169.254.7.7", 16)}
	if v.agent != AgentLinkLocal {
		addresses = append(addresses, address("ipv4", q.c.config.Address(v.id), 8))
	}
	if v.agent != AgentNoList {
		eth["ip-addresses"] = addresses
	}
	return map[string]any{"result": []any{
		map[string]any{"name": "lo", "hardware-address": "00:00:00:00:00:00", "ip-addresses": []any{address("ipv4", "127.0.0.1", 8), address("ipv6", "::1", 128)}},
		map[string]any{"name": "docker0", "hardware-address": "02:42:ac:11:00:01", "ip-addresses": []any{address("ipv4", "172.17.0.1", 16)}},
		map[string]any{"name": "veth12", "hardware-address": "02:42:ac:11:00:02"},
		eth,
	}}, nil
}

// newMAC returns an address with Proxmox's own prefix.
func newMAC() string {
	var b [3]byte
	_, _ = rand.Read(b[:])
	return fmt.Sprintf("BC:24:11:%02X:%02X:%02X", b[0], b[1], b[2])
}

func freshMAC(spec string) string { return macOf.ReplaceAllString(spec, "="+newMAC()) }

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
