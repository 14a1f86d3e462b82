package fakepve

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Storage is a storage of the cluster.
type Storage struct {
	// ID is its name and Type its kind, such as dir or lvmthin.
	ID, Type string
	// Content is what it may hold: iso, images, vztmpl.
	Content []string
	// Shared says that all nodes see the same.
	Shared bool
	// Nodes restricts it. Empty means all.
	Nodes []string
	// Size is its capacity and Used what others have in it, in bytes.
	Size, Used int64
	// Disabled and Inactive storages take nothing.
	Disabled, Inactive bool
}

// AddStorage adds a storage or replaces the one of that name.
func (c *Cluster) AddStorage(s Storage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.storages[s.ID] = &s
}

// RemoveStorage takes a storage out of the configuration.
func (c *Cluster) RemoveStorage(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.storages, id)
}

// freeLocked returns how much a node could still put into s.
func (c *Cluster) freeLocked(s *Storage, node string) int64 {
	free := s.Size - s.Used
	for _, v := range c.volumes {
		if storageOf(v.volid) == s.ID && (s.Shared || v.node == node) {
			free -= v.size
		}
	}
	return free
}

func (s *Storage) on(node string) bool { return len(s.Nodes) == 0 || slices.Contains(s.Nodes, node) }

// volume is a file or a disk.
type volume struct {
	volid, node string // no node when the storage is shared
	content     string
	size        int64
	vmid        int
	made        time.Time
	data        []byte
}

func storageOf(drive string) string {
	s, _, _ := strings.Cut(drive, ":")
	return s
}

// volumeKey is what Volumes calls a volume.
func (c *Cluster) volumeKey(node, id string) string {
	if s := c.storages[storageOf(id)]; s != nil && s.Shared {
		return id
	}
	return node + ":" + id
}

func (c *Cluster) volumeLocked(node, id string) *volume { return c.volumes[c.volumeKey(node, id)] }

func (c *Cluster) addVolumeLocked(node, id, content string, size int64, vmid int, data []byte) {
	key := c.volumeKey(node, id)
	if s := c.storages[storageOf(id)]; s.Shared {
		node = ""
	}
	c.volumes[key] = &volume{volid: id, node: node, content: content, size: size, vmid: vmid, made: time.Now(), data: data}
}

func (c *Cluster) removeVolumeLocked(node, id string) { delete(c.volumes, c.volumeKey(node, id)) }

var sizeOption = regexp.MustCompile(`(?:^|,)size=([0-9.]+[KMGT]?)`)

func sizeOf(drive string) int64 {
	if m := sizeOption.FindStringSubmatch(drive); m != nil {
		return parseSize(m[1])
	}
	return 0
}

func parseSize(s string) int64 {
	shift := 0
	if i := strings.IndexAny(s, "KMGT"); i >= 0 {
		shift = 10 * (strings.IndexByte("KMGT", s[i]) + 1)
		s = s[:i]
	}
	f, _ := strconv.ParseFloat(s, 64)
	return int64(f * float64(int64(1)<<shift))
}

func (c *Cluster) storageRowLocked(s *Storage, node string) map[string]any {
	flag := func(b bool) int { return map[bool]int{true: 1}[b] }
	free := c.freeLocked(s, node)
	return map[string]any{"type": s.Type, "content": strings.Join(s.Content, ","), "enabled": flag(!s.Disabled),
		"active": flag(!s.Disabled && !s.Inactive), "shared": flag(s.Shared), "total": s.Size, "used": s.Size - free, "avail": free}
}

func getStorages(q *request) (any, *failure) {
	rows := []any{}
	for _, id := range slices.Sorted(maps.Keys(q.c.storages)) {
		s := q.c.storages[id]
		if !s.on(q.vars["node"]) || !q.c.mayLocked(q.token, "/storage/"+id, "Datastore.Audit", "Datastore.AllocateSpace") {
			continue
		}
		if want := q.params["content"]; want != "" && !slices.Contains(s.Content, want) || q.params["storage"] != "" && q.params["storage"] != id {
			continue
		}
		row := q.c.storageRowLocked(s, q.vars["node"])
		row["storage"] = id
		rows = append(rows, row)
	}
	return rows, nil
}

// usableLocked returns the storage of the path or why it can't be used there.
func (q *request) usableLocked() (*Storage, *failure) {
	id, node := q.vars["storage"], q.vars["node"]
	s := q.c.storages[id]
	switch {
	case s == nil:
		return nil, fail("storage '%s' does not exist", id)
	case s.Disabled:
		return nil, fail("storage '%s' is disabled", id)
	case !s.on(node):
		return nil, fail("storage '%s' is not available on node '%s'", id, node)
	}
	return s, nil
}

func getStorageStatus(q *request) (any, *failure) {
	s := q.c.storages[q.vars["storage"]]
	if s == nil || !s.on(q.vars["node"]) {
		return nil, badParam("storage", "No such storage.")
	}
	return q.c.storageRowLocked(s, q.vars["node"]), nil
}

func getContent(q *request) (any, *failure) {
	s, f := q.usableLocked()
	if f != nil {
		return nil, f
	}
	rows := []any{}
	for _, key := range slices.Sorted(maps.Keys(q.c.volumes)) {
		v := q.c.volumes[key]
		if storageOf(v.volid) != s.ID || !s.Shared && v.node != q.vars["node"] || q.params["content"] != "" && q.params["content"] != v.content {
			continue
		}
		row := map[string]any{"volid": v.volid, "content": v.content, "size": v.size, "ctime": v.made.Unix(), "format": "raw"}
		if v.content == "iso" {
			row["format"] = "iso"
		}
		if v.vmid != 0 {
			row["vmid"] = v.vmid
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// volidLocked returns the volume that the path names.
func (q *request) volidLocked() (string, *failure) {
	id := q.vars["volume"]
	storage, _, ok := strings.Cut(id, ":")
	switch {
	case !ok:
		return q.vars["storage"] + ":" + id, nil
	case storage != q.vars["storage"]:
		return "", badParam("volume", "storage ID mismatch")
	}
	return id, nil
}

func getVolume(q *request) (any, *failure) {
	if _, f := q.usableLocked(); f != nil {
		return nil, f
	}
	id, f := q.volidLocked()
	if f != nil {
		return nil, f
	}
	if f := q.needLocked("/storage/"+q.vars["storage"], "Datastore.Audit", "Datastore.AllocateSpace"); f != nil {
		return nil, f
	}
	v := q.c.volumeLocked(q.vars["node"], id)
	if v == nil {
		return nil, fail("volume_size_info on '%s' failed - no format", id)
	}
	return map[string]any{"path": "/var/lib/vz/template/iso/" + id, "size": v.size, "used": v.size, "format": "raw"}, nil
}

func deleteVolume(q *request) (any, *failure) {
	if _, f := q.usableLocked(); f != nil {
		return nil, f
	}
	id, f := q.volidLocked()
	if f != nil {
		return nil, f
	}
	if f := q.needLocked("/storage/"+q.vars["storage"], "Datastore.Allocate"); f != nil {
		return nil, f
	}
	node := q.vars["node"]
	return q.c.startTaskLocked(q, node, "imgdel", "", nil, step{q.c.config.TaskTime, func(t *task) string {
		if q.c.volumeLocked(node, id) == nil {
			t.log = append(t.log, fmt.Sprintf("disk image '%s' does not exist", id))
			return ""
		}
		q.c.removeVolumeLocked(node, id)
		return ""
	}}), nil
}

// upload is the file of an upload and what was said about it.
type upload struct {
	data []byte
	lost bool // its temporary file was removed before the worker came to it
}

// takeUpload receives a file as pveproxy does: fields in a fixed order, the file last, and the handler afterwards.
func (c *Cluster) takeUpload(q *request, m *method, req *http.Request) response {
	c.mu.Lock()
	f := q.allowedLocked(m)
	slow := c.slowUpload
	c.mu.Unlock()
	if f != nil {
		return c.held(f.status, f.message)
	}
	kind, options, err := mime.ParseMediaType(req.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" {
		return response{status: 400, reason: "upload is no multipart/form-data"}
	}
	body, err := io.ReadAll(req.Body)
	if err != nil || int64(len(body)) != req.ContentLength {
		return response{drop: true}
	}
	data, ok := q.parseParts(body, options["boundary"])
	if !ok {
		return response{status: 400}
	}
	c.mu.Lock()
	if c.damaged > 0 && len(data) > 0 {
		c.damaged--
		data[len(data)/2] ^= 1
	}
	c.mu.Unlock()
	q.upload = &upload{data: data}
	if slow > c.config.IdleTimeout {
		// The inactivity timer of the connection is not stopped while the handler runs.
		if !c.sleep(c.config.IdleTimeout) {
			return response{drop: true}
		}
		q.upload.lost = true
		c.mu.Lock()
		defer c.mu.Unlock()
		q.carryOutLocked(m)
		return response{drop: true}
	}
	if slow > 0 && !c.sleep(slow) {
		return response{drop: true}
	}
	if r, ok := c.forwardUpload(q); !ok {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.carryOutLocked(m)
}

// forwardUpload stands for the copy to another node by SSH.
func (c *Cluster) forwardUpload(q *request) (response, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[q.vars["node"]]
	if n == nil {
		return fail("hostname lookup '%s' failed", q.vars["node"]).response(), false
	}
	if n.mode != NodeUp {
		return fail("command '/usr/bin/ssh' failed: exit code 255").response(), false
	}
	return response{}, true
}

var (
	fieldPattern = regexp.MustCompile(`(?i)^Content-Disposition: form-data; name="(content|checksum-algorithm|checksum)"(?:\r\n|$)`)
	filePattern  = regexp.MustCompile(`(?i)^Content-Disposition: form-data; name="[^"]*"; filename="([^"]+)"(?:\r\n|$)`)
	unsafe       = regexp.MustCompile(`[^a-zA-Z0-9_.-]`)
)

// parseParts reads the parts in the only order that the real server understands. Anything else ends the reading, and
// what is missing then is missed by the schema or answered with an empty 400.
func (q *request) parseParts(body []byte, boundary string) ([]byte, bool) {
	order := []string{"content", "checksum-algorithm", "checksum"}
	for {
		rest, ok := bytes.CutPrefix(body, []byte("--"+boundary+"\r\n"))
		if !ok {
			return nil, false
		}
		header, rest, ok := bytes.Cut(rest, []byte("\r\n\r\n"))
		if !ok {
			return nil, false
		}
		value, rest, ok := bytes.Cut(rest, []byte("\r\n--"+boundary))
		if !ok {
			return nil, false
		}
		if m := filePattern.FindSubmatch(header); m != nil {
			name := string(m[1])
			name = name[strings.LastIndexAny(name, `/\`)+1:]
			q.params["filename"] = unsafe.ReplaceAllString(name, "_")
			return value, true
		}
		m := fieldPattern.FindSubmatch(header)
		if m == nil {
			return nil, false
		}
		i := slices.Index(order, string(m[1]))
		if i < 0 {
			return nil, false
		}
		order = order[i+1:]
		q.params[string(m[1])] = string(value)
		body = append([]byte("--"+boundary), rest...)
	}
}

func finishUpload(q *request) (any, *failure) {
	s, f := q.usableLocked()
	if f != nil {
		return nil, f
	}
	content, name, node := q.params["content"], q.params["filename"], q.vars["node"]
	if !slices.Contains(s.Content, content) {
		if s.Type == "rbd" || s.Type == "lvmthin" {
			return nil, fail("can't upload to storage type '%s'", s.Type)
		}
		return nil, fail("storage '%s' does not support '%s' content", s.ID, content)
	}
	lower := strings.ToLower(name)
	if content == "iso" && !strings.HasSuffix(lower, ".iso") && !strings.HasSuffix(lower, ".img") {
		return nil, badParam("filename", "wrong file extension")
	}
	id := fmt.Sprintf("%s:%s/%s", s.ID, content, name)
	return q.c.startTaskLocked(q, q.node, "imgcopy", "", nil, step{q.c.config.TaskTime, func(*task) string {
		if q.upload.lost {
			return "failed to stat '/var/tmp/pveupload-0123456789abcdef0123456789abcdef'"
		}
		if want := q.params["checksum"]; want != "" {
			got := ""
			switch q.params["checksum-algorithm"] {
			case "sha256":
				sum := sha256.Sum256(q.upload.data)
				got = hex.EncodeToString(sum[:])
			case "sha512":
				sum := sha512.Sum512(q.upload.data)
				got = hex.EncodeToString(sum[:])
			}
			if !strings.EqualFold(got, want) {
				return fmt.Sprintf("checksum mismatch: got '%s' != expect '%s'", got, want)
			}
		}
		if q.c.freeLocked(s, node) < int64(len(q.upload.data)) {
			return "import failed: No space left on device"
		}
		q.c.addVolumeLocked(node, id, content, int64(len(q.upload.data)), 0, q.upload.data)
		return ""
	}}), nil
}
