package fakepve

import (
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// param says what a parameter may be.
type param struct {
	kind     string // integer, number, boolean or string
	required bool
	min, max int            // of an integer; both zero for no bounds
	maxLen   int            // of a string; zero for none
	pattern  *regexp.Regexp // of the whole value
	enum     []string
	since    int // the version that brought it
}

// method is one of the API's.
type method struct {
	verb, path string
	local      bool // answered by the node that is connected to, whatever the path says
	upload     bool
	params     map[string]param
	may        func(q *request) *failure // with the lock held
	do         func(q *request) (any, *failure)
}

var (
	dnsName     = regexp.MustCompile(`^([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$`)
	nodeName    = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?$`)
	storageID   = regexp.MustCompile(`(?i)^[a-z][a-z0-9._-]*[a-z0-9]$`)
	poolID      = regexp.MustCompile(`^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$`)
	configID    = regexp.MustCompile(`(?i)^[a-z][a-z0-9_-]+$`)
	configIDs   = regexp.MustCompile(`(?i)^[a-z][a-z0-9_-]+([,; ][a-z][a-z0-9_-]+)*$`)
	tagList     = regexp.MustCompile(`(?i)^([a-z0-9_][a-z0-9_.+-]*([,; ]+[a-z0-9_][a-z0-9_.+-]*)*)?$`)
	sizePattern = regexp.MustCompile(`^\+?\d+(\.\d+)?[KMGT]?$`)
	diskName    = regexp.MustCompile(`^(ide[0-3]|sata[0-5]|scsi([0-9]|[12][0-9]|30)|virtio([0-9]|1[0-5])|efidisk0|tpmstate0)$`)
	netPattern  = regexp.MustCompile(`^(virtio|e1000|e1000e|rtl8139|vmxnet3)(=[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5})?(,(bridge|tag|firewall|link_down|mtu|queues|rate|trunks|macaddr|model)=[^,]+)*$`)
	checksum    = regexp.MustCompile(`^[0-9a-fA-F]+$`)
)

func text() param                   { return param{kind: "string"} }
func match(r *regexp.Regexp) param  { return param{kind: "string", pattern: r} }
func oneOf(values ...string) param  { return param{kind: "string", enum: values} }
func boolean() param                { return param{kind: "boolean"} }
func integer(low, high int) param   { return param{kind: "integer", min: low, max: high} }
func (p param) must() param         { p.required = true; return p }
func (p param) longest(n int) param { p.maxLen = n; return p }
func (p param) from(v int) param    { p.since = v; return p }
func vmid() param                   { return integer(100, 999999999) }
func with(more ...map[string]param) map[string]param {
	all := map[string]param{}
	for _, m := range more {
		maps.Copy(all, m)
	}
	return all
}

// configParams are the options of a VM. A name that ends in [n] stands for the name with a number.
var configParams = map[string]param{
	"acpi": boolean(), "affinity": text(), "agent": text(), "allow-ksm": boolean().from(9), "arch": oneOf("x86_64", "aarch64"), "args": text(),
	"autostart": boolean(), "balloon": integer(0, 1<<31), "bios": oneOf("seabios", "ovmf"), "boot": text(), "cdrom": text(), "cicustom": text(),
	"cipassword": text(), "citype": oneOf("configdrive2", "nocloud", "opennebula"), "ciupgrade": boolean(), "ciuser": text(),
	"cores": integer(1, 1<<31), "cpu": text(), "cpulimit": {kind: "number"}, "cpuunits": integer(1, 262144), "delete": match(configIDs),
	"description": text().longest(8192), "digest": text().longest(40), "efidisk0": text(), "force": boolean(), "hotplug": text(), "ide[n]": text(),
	"ipconfig[n]": text(), "kvm": boolean(), "lock": oneOf("backup", "clone", "create", "migrate", "rollback", "snapshot", "snapshot-delete", "suspending", "suspended"),
	"machine": text(), "memory": text(), "name": match(dnsName), "nameserver": text(), "net[n]": match(netPattern), "numa": boolean(), "onboot": boolean(),
	"ostype": oneOf("l24", "l26", "other", "solaris", "w2k", "w2k3", "w2k8", "win10", "win11", "win7", "win8", "wvista", "wxp"), "protection": boolean(), "revert": match(configIDs), "rng0": text(), "sata[n]": text(), "scsi[n]": text(), "scsihw": oneOf("lsi", "lsi53c810", "megasas", "pvscsi", "virtio-scsi-pci", "virtio-scsi-single"),
	"searchdomain": text(), "serial[n]": text(), "shares": integer(0, 50000), "skiplock": boolean(), "smbios1": text().longest(512),
	"sockets": integer(1, 1<<31), "sshkeys": text(), "startup": text(), "tablet": boolean(), "tags": match(tagList), "template": boolean(),
	"unused[n]": text(), "usb[n]": text(), "vcpus": integer(1, 1<<31), "vga": text(), "virtio[n]": text(), "vmgenid": text(), "watchdog": text(),
}

// methods are the endpoints that a backend needs.
var methods []*method

func init() {
	on := func(format string, names []string, privileges ...string) func(q *request) *failure {
		return func(q *request) *failure {
			args := make([]any, len(names))
			for i, n := range names {
				args[i] = q.vars[n]
			}
			return q.needLocked(fmt.Sprintf(format, args...), privileges...)
		}
	}
	vm, storage := []string{"vmid"}, []string{"storage"}
	configPrivileges := []string{"VM.Config.Disk", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Memory", "VM.Config.Network",
		"VM.Config.HWType", "VM.Config.Options", "VM.Config.Cloudinit"}
	methods = []*method{
		{verb: "GET", path: "/version", do: getVersion},
		{verb: "GET", path: "/access/permissions", do: getPermissions, params: map[string]param{"path": text(), "userid": text()}},
		{verb: "GET", path: "/cluster/resources", do: getResources, params: map[string]param{"type": oneOf("vm", "storage", "node", "sdn")}},
		{verb: "GET", path: "/cluster/nextid", do: getNextID, params: map[string]param{"vmid": vmid()}},
		{verb: "GET", path: "/pools", do: getPools, params: map[string]param{"poolid": match(poolID), "type": oneOf("qemu", "lxc", "storage")}},
		{verb: "GET", path: "/nodes", do: getNodes},
		{verb: "GET", path: "/nodes/{node}/version", do: getVersion},
		{verb: "GET", path: "/nodes/{node}/status", do: getNodeStatus, may: on("/nodes/%s", []string{"node"}, "Sys.Audit")},
		{verb: "GET", path: "/nodes/{node}/qemu", do: getVMs, params: map[string]param{"full": boolean()}},
		{verb: "DELETE", path: "/nodes/{node}/qemu/{vmid}", do: deleteVM, may: on("/vms/%s", vm, "VM.Allocate"),
			params: map[string]param{"destroy-unreferenced-disks": boolean(), "purge": boolean(), "skiplock": boolean()}},
		{verb: "POST", path: "/nodes/{node}/qemu/{vmid}/clone", do: cloneVM, may: mayClone, params: map[string]param{
			"bwlimit": integer(0, 1<<31), "description": text(), "format": oneOf("raw", "qcow2", "vmdk"), "full": boolean(), "name": match(dnsName),
			"newid": vmid().must(), "pool": match(poolID), "snapname": match(configID).longest(40), "storage": match(storageID), "target": match(nodeName)}},
		{verb: "GET", path: "/nodes/{node}/qemu/{vmid}/config", do: getConfig, may: on("/vms/%s", vm, "VM.Audit"),
			params: map[string]param{"current": boolean(), "snapshot": match(configID).longest(40)}},
		{verb: "POST", path: "/nodes/{node}/qemu/{vmid}/config", do: postConfig, may: on("/vms/%s", vm, configPrivileges...),
			params: with(configParams, map[string]param{"background_delay": integer(1, 30)})},
		{verb: "PUT", path: "/nodes/{node}/qemu/{vmid}/config", do: putConfig, may: on("/vms/%s", vm, configPrivileges...), params: configParams},
		{verb: "PUT", path: "/nodes/{node}/qemu/{vmid}/resize", do: resizeDisk, may: on("/vms/%s", vm, "VM.Config.Disk"),
			params: map[string]param{"digest": text().longest(40), "disk": match(diskName).must(), "size": match(sizePattern).must(), "skiplock": boolean()}},
		{verb: "GET", path: "/nodes/{node}/qemu/{vmid}/status/current", do: getCurrent, may: on("/vms/%s", vm, "VM.Audit")},
		{verb: "POST", path: "/nodes/{node}/qemu/{vmid}/status/start", do: startVM, may: on("/vms/%s", vm, "VM.PowerMgmt"),
			params: map[string]param{"force-cpu": text(), "machine": text(), "skiplock": boolean(), "timeout": integer(0, 1<<31)}},
		{verb: "POST", path: "/nodes/{node}/qemu/{vmid}/status/stop", do: stopVM, may: on("/vms/%s", vm, "VM.PowerMgmt"),
			params: map[string]param{"keepActive": boolean(), "overrule-shutdown": boolean(), "skiplock": boolean(), "timeout": integer(0, 1<<31)}},
		{verb: "POST", path: "/nodes/{node}/qemu/{vmid}/status/shutdown", do: stopVM, may: on("/vms/%s", vm, "VM.PowerMgmt"),
			params: map[string]param{"forceStop": boolean(), "keepActive": boolean(), "skiplock": boolean(), "timeout": integer(0, 1<<31)}},
		{verb: "GET", path: "/nodes/{node}/qemu/{vmid}/agent/network-get-interfaces", do: getInterfaces, may: mayAskAgent},
		{verb: "GET", path: "/nodes/{node}/tasks", do: getTasks, params: map[string]param{
			"errors": boolean(), "limit": integer(0, 1<<31), "since": integer(0, 1<<31), "source": oneOf("archive", "active", "all"), "start": integer(0, 1<<31),
			"statusfilter": text(), "typefilter": text(), "until": integer(0, 1<<31), "userfilter": text(), "vmid": vmid()}},
		{verb: "GET", path: "/nodes/{node}/tasks/{upid}/status", do: getTaskStatus},
		{verb: "GET", path: "/nodes/{node}/tasks/{upid}/log", do: getTaskLog,
			params: map[string]param{"download": boolean(), "limit": integer(0, 1<<31), "start": integer(0, 1<<31)}},
		{verb: "DELETE", path: "/nodes/{node}/tasks/{upid}", do: stopTask},
		{verb: "GET", path: "/nodes/{node}/storage", do: getStorages, params: map[string]param{
			"content": text(), "enabled": boolean(), "format": boolean(), "storage": match(storageID), "target": match(nodeName)}},
		{verb: "GET", path: "/nodes/{node}/storage/{storage}/status", do: getStorageStatus, may: on("/storage/%s", storage, "Datastore.Audit", "Datastore.AllocateSpace")},
		{verb: "GET", path: "/nodes/{node}/storage/{storage}/content", do: getContent, may: on("/storage/%s", storage, "Datastore.Audit", "Datastore.AllocateSpace"),
			params: map[string]param{"content": text(), "vmid": vmid()}},
		{verb: "GET", path: "/nodes/{node}/storage/{storage}/content/{volume}", do: getVolume},
		{verb: "DELETE", path: "/nodes/{node}/storage/{storage}/content/{volume}", do: deleteVolume, params: map[string]param{"delay": integer(1, 30)}},
		{verb: "POST", path: "/nodes/{node}/storage/{storage}/upload", do: finishUpload, may: on("/storage/%s", storage, "Datastore.AllocateTemplate"),
			local: true, upload: true, params: map[string]param{"checksum": match(checksum), "content": oneOf("iso", "vztmpl", "import").must(),
				"checksum-algorithm": oneOf("md5", "sha1", "sha224", "sha256", "sha384", "sha512"), "filename": text().longest(255).must(), "tmpfilename": text()}},
	}
}

// find returns the method and what its path's variables stand for. A variable at the end of content takes slashes too.
func find(verb, path string) (*method, map[string]string) {
	parts := strings.Split(path, "/")
	for _, m := range methods {
		pattern := strings.Split(m.path, "/")
		if m.verb != verb || len(parts) < len(pattern) || len(parts) > len(pattern) && pattern[len(pattern)-1] != "{volume}" {
			continue
		}
		vars, ok := map[string]string{}, true
		for i, p := range pattern {
			name, isVar := strings.CutPrefix(p, "{")
			switch {
			case !isVar:
				ok = ok && p == parts[i]
			case i == len(pattern)-1:
				vars[strings.TrimSuffix(name, "}")] = strings.Join(parts[i:], "/")
			default:
				vars[strings.TrimSuffix(name, "}")] = parts[i]
			}
		}
		if ok {
			return m, vars
		}
	}
	return nil, nil
}

var number = regexp.MustCompile(`[0-9]+$`)

// paramOf returns the schema of a parameter by its name, which may end in a number.
func (m *method) paramOf(name string, version int) (param, bool) {
	p, ok := m.params[name]
	if !ok && m.params != nil {
		p, ok = m.params[number.ReplaceAllString(name, "")+"[n]"]
		ok = ok && number.MatchString(name)
	}
	return p, ok && p.since <= version
}

// check compares the parameters with the schema and returns all that is wrong.
func (q *request) check(m *method) *failure {
	wrong := map[string]string{}
	for k, v := range q.params {
		p, ok := m.paramOf(k, q.c.config.Version)
		if !ok {
			wrong[k] = "property is not defined in schema and the schema does not allow additional properties"
			continue
		}
		if text := p.wrong(v); text != "" {
			wrong[k] = text
		}
	}
	for k, p := range m.params {
		if _, ok := q.params[k]; p.required && !ok {
			wrong[k] = "property is missing and it is not optional"
		}
	}
	if id, ok := q.vars["vmid"]; ok {
		if text := vmid().wrong(id); text != "" {
			wrong["vmid"] = "invalid format - value does not look like a valid VM ID"
		}
	}
	for name, pattern := range map[string]*regexp.Regexp{"node": nodeName, "storage": storageID} {
		if v, ok := q.vars[name]; ok && !pattern.MatchString(v) {
			wrong[name] = "invalid format - value does not look like a valid " + name + " name"
		}
	}
	if len(wrong) > 0 {
		return &failure{status: http.StatusBadRequest, message: "Parameter verification failed.", errors: wrong}
	}
	return nil
}

// wrong says what is wrong with a value, in Proxmox's words.
func (p param) wrong(v string) string {
	switch p.kind {
	case "integer":
		n, err := strconv.Atoi(v)
		switch {
		case err != nil:
			return fmt.Sprintf("type check ('integer') failed - got '%s'", v)
		case (p.min != 0 || p.max != 0) && n < p.min:
			return fmt.Sprintf("value must have a minimum value of %d", p.min)
		case p.max != 0 && n > p.max:
			return fmt.Sprintf("value must have a maximum value of %d", p.max)
		}
	case "number":
		if _, err := strconv.ParseFloat(v, 64); err != nil {
			return fmt.Sprintf("type check ('number') failed - got '%s'", v)
		}
	case "boolean":
		if v != "0" && v != "1" {
			return fmt.Sprintf("type check ('boolean') failed - got '%s'", v)
		}
	case "string":
		switch {
		case p.maxLen > 0 && len(v) > p.maxLen:
			return fmt.Sprintf("value may only be %d characters long", p.maxLen)
		case p.enum != nil && !slices.Contains(p.enum, v):
			return fmt.Sprintf("value '%s' does not have a value in the enumeration '%s'", v, strings.Join(p.enum, ", "))
		case p.pattern != nil && !p.pattern.MatchString(v):
			return "invalid format - value does not match the regex pattern"
		}
	}
	return ""
}
