package libvirttest

import (
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"
)

// Volume is a file in a storage pool.
type Volume struct {
	// Name is the file's.
	Name string
	// Content is what is in it. An overlay has none.
	Content []byte
	// Capacity is the size of the disk in it, or the file's own.
	Capacity uint64
	// Format is "raw" or "qcow2".
	Format string
	// Backing and BackingFormat are the file that an overlay is on. Empty for none.
	Backing, BackingFormat string
	// Mode is that of the file, such as 0600.
	Mode string
	// Modified is when it was last written to.
	Modified time.Time
	// Unseen files appear as volumes when the pool is next refreshed.
	Unseen bool
}

// download is the result of a call that is followed by a stream.
type download []byte

// AddVolume puts a file into the pool named default.
func (h *Host) AddVolume(v Volume) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v.Modified.IsZero() {
		v.Modified = time.Now()
	}
	if v.Format == "" {
		v.Format = "raw"
	}
	h.pools["default"].volumes[v.Name] = &v
}

// RemoveVolume removes a file from the pool named default.
func (h *Host) RemoveVolume(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pools["default"].volumes, name)
}

// ChangeVolume changes a file of the pool named default, if it is there.
func (h *Host) ChangeVolume(name string, change func(*Volume)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.pools["default"].volumes[name]; v != nil {
		change(v)
	}
}

// Volumes returns copies of the files in the pool named default, by name.
func (h *Host) Volumes() []Volume {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Volume
	volumes := h.pools["default"].volumes
	for _, name := range slices.Sorted(maps.Keys(volumes)) {
		v := *volumes[name]
		v.Content = slices.Clone(v.Content)
		all = append(all, v)
	}
	return all
}

func (h *Host) poolLocked(p golibvirt.StoragePool) (*Pool, error) {
	if found := h.pools[p.Name]; found != nil {
		return found, nil
	}
	return nil, fail(golibvirt.ErrNoStoragePool, "Storage pool not found: no storage pool with matching name '%s'", p.Name)
}

func (h *Host) activePoolLocked(p golibvirt.StoragePool) (*Pool, error) {
	found, err := h.poolLocked(p)
	if err == nil && found.Inactive {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: storage pool '%s' is not active", p.Name)
	}
	return found, err
}

func (h *Host) volumeLocked(v golibvirt.StorageVol) (*Pool, *Volume, error) {
	p, err := h.activePoolLocked(golibvirt.StoragePool{Name: v.Pool})
	if err != nil {
		return nil, nil, err
	}
	found := p.volumes[v.Name]
	if found == nil || found.Unseen {
		return nil, nil, fail(golibvirt.ErrNoStorageVol, "Storage volume not found: no storage vol with matching name '%s'", v.Name)
	}
	return p, found, nil
}

// fileLocked returns the file of that path, seen or not.
func (h *Host) fileLocked(file string) *Volume {
	for _, p := range h.pools {
		if path.Dir(file) == p.Path {
			return p.volumes[path.Base(file)]
		}
	}
	return nil
}

func (p *Pool) refLocked(v *Volume) golibvirt.StorageVol {
	return golibvirt.StorageVol{Pool: p.Name, Name: v.Name, Key: p.Path + "/" + v.Name}
}

func (h *Host) poolByNameLocked(args golibvirt.StoragePoolLookupByNameArgs) (any, error) {
	ref := golibvirt.StoragePool{Name: args.Name}
	if _, err := h.poolLocked(ref); err != nil {
		return nil, err
	}
	return golibvirt.StoragePoolLookupByNameRet{Pool: ref}, nil
}

func (h *Host) poolActiveLocked(args golibvirt.StoragePoolIsActiveArgs) (any, error) {
	p, err := h.poolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	return golibvirt.StoragePoolIsActiveRet{Active: number(!p.Inactive)}, nil
}

func (h *Host) poolXMLLocked(args golibvirt.StoragePoolGetXMLDescArgs) (any, error) {
	p, err := h.poolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	x := libvirtxml.StoragePool{Type: p.Type, Name: p.Name}
	if p.Path != "" {
		x.Target = &libvirtxml.StoragePoolTarget{Path: p.Path}
	}
	text, err := x.Marshal()
	return golibvirt.StoragePoolGetXMLDescRet{XML: text}, err
}

func (h *Host) refreshLocked(args golibvirt.StoragePoolRefreshArgs) (any, error) {
	p, err := h.activePoolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	for _, v := range p.volumes {
		v.Unseen = false
	}
	return nil, nil
}

func (h *Host) poolInfoLocked(args golibvirt.StoragePoolGetInfoArgs) (any, error) {
	p, err := h.poolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	used := p.usedLocked()
	return golibvirt.StoragePoolGetInfoRet{
		State: 2, Capacity: uint64(h.config.PoolBytes), Allocation: uint64(used), Available: uint64(max(h.config.PoolBytes-used, 0)),
	}, nil
}

func (p *Pool) usedLocked() int64 {
	used := int64(0)
	for _, v := range p.volumes {
		used += int64(len(v.Content))
	}
	return used
}

func (h *Host) listVolumesLocked(args golibvirt.StoragePoolListAllVolumesArgs) (any, error) {
	p, err := h.activePoolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	var ret golibvirt.StoragePoolListAllVolumesRet
	for _, name := range slices.Sorted(maps.Keys(p.volumes)) {
		if v := p.volumes[name]; !v.Unseen {
			ret.Vols = append(ret.Vols, p.refLocked(v))
			ret.Ret++
		}
	}
	return ret, nil
}

func (h *Host) volumeByNameLocked(args golibvirt.StorageVolLookupByNameArgs) (any, error) {
	p, v, err := h.volumeLocked(golibvirt.StorageVol{Pool: args.Pool.Name, Name: args.Name})
	if err != nil {
		return nil, err
	}
	return golibvirt.StorageVolLookupByNameRet{Vol: p.refLocked(v)}, nil
}

func (h *Host) createVolumeLocked(args golibvirt.StorageVolCreateXMLArgs) (any, error) {
	p, err := h.activePoolLocked(args.Pool)
	if err != nil {
		return nil, err
	}
	var x libvirtxml.StorageVolume
	if err := x.Unmarshal(args.XML); err != nil {
		return nil, fail(golibvirt.ErrXMLDetail, "(storage_volume_definition):1: %v", err)
	}
	if x.Name == "" || strings.Contains(x.Name, "/") {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: volume name '%s' cannot contain '/'", x.Name)
	}
	if old := p.volumes[x.Name]; old != nil {
		if old.Unseen {
			return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: volume target path '%s/%s' already exists", p.Path, x.Name)
		}
		return nil, fail(golibvirt.ErrStorageVolExist, "storage volume '%s' exists already", x.Name)
	}
	v := &Volume{Name: x.Name, Format: "raw", Modified: time.Now()}
	if x.Capacity != nil {
		v.Capacity = x.Capacity.Value
	}
	if x.Target != nil && x.Target.Format != nil {
		v.Format = x.Target.Format.Type
	}
	if x.Target != nil && x.Target.Permissions != nil {
		v.Mode = x.Target.Permissions.Mode
	}
	if x.BackingStore != nil {
		if h.fileLocked(x.BackingStore.Path) == nil {
			return nil, fail(golibvirt.ErrSystemError, "inaccessible backing store volume %s: No such file or directory", x.BackingStore.Path)
		}
		v.Backing, v.BackingFormat = x.BackingStore.Path, "raw"
		if x.BackingStore.Format != nil {
			v.BackingFormat = x.BackingStore.Format.Type
		}
	}
	p.volumes[v.Name] = v
	return golibvirt.StorageVolCreateXMLRet{Vol: p.refLocked(v)}, nil
}

func (h *Host) deleteVolumeLocked(args golibvirt.StorageVolDeleteArgs) (any, error) {
	p, v, err := h.volumeLocked(args.Vol)
	if err != nil {
		return nil, err
	}
	delete(p.volumes, v.Name)
	return nil, nil
}

func (h *Host) volumeXMLLocked(args golibvirt.StorageVolGetXMLDescArgs) (any, error) {
	p, v, err := h.volumeLocked(args.Vol)
	if err != nil {
		return nil, err
	}
	file := p.Path + "/" + v.Name
	x := libvirtxml.StorageVolume{
		Type: "file", Name: v.Name, Key: file, Capacity: &libvirtxml.StorageVolumeSize{Unit: "bytes", Value: v.Capacity},
		Target: &libvirtxml.StorageVolumeTarget{
			Path: file, Format: &libvirtxml.StorageVolumeTargetFormat{Type: v.Format},
			Timestamps: &libvirtxml.StorageVolumeTargetTimestamps{Mtime: strconv.FormatFloat(float64(v.Modified.UnixMilli())/1000, 'f', 3, 64)},
		},
	}
	if v.Backing != "" {
		x.BackingStore = &libvirtxml.StorageVolumeBackingStore{Path: v.Backing, Format: &libvirtxml.StorageVolumeTargetFormat{Type: v.BackingFormat}}
	}
	text, err := x.Marshal()
	return golibvirt.StorageVolGetXMLDescRet{XML: text}, err
}

func (h *Host) volumeInfoLocked(args golibvirt.StorageVolGetInfoFlagsArgs) (any, error) {
	_, v, err := h.volumeLocked(args.Vol)
	if err != nil {
		return nil, err
	}
	return golibvirt.StorageVolGetInfoFlagsRet{Capacity: v.Capacity, Allocation: uint64(len(v.Content))}, nil
}

func (h *Host) downloadLocked(args golibvirt.StorageVolDownloadArgs) (any, error) {
	_, v, err := h.volumeLocked(args.Vol)
	if err != nil {
		return nil, err
	}
	content := v.Content[min(args.Offset, uint64(len(v.Content))):]
	if args.Length > 0 {
		content = content[:min(args.Length, uint64(len(content)))]
	}
	return download(slices.Clone(content)), nil
}

// write is what an upload does with a packet. A volume grows as needed, unless the upload said how much comes.
func (h *Host) write(in *incoming, p []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	end := in.offset + int64(len(p))
	grown := end - int64(len(in.volume.Content))
	if in.limit > 0 && end > in.limit || grown > 0 && h.pools["default"].usedLocked()+grown > h.config.PoolBytes {
		return fail(golibvirt.ErrSystemError, "cannot write to stream: No space left on device")
	}
	if grown > 0 {
		in.volume.Content = append(in.volume.Content, make([]byte, grown)...)
	}
	copy(in.volume.Content[in.offset:], p)
	in.offset = end
	in.volume.Capacity = max(in.volume.Capacity, uint64(len(in.volume.Content)))
	in.volume.Modified = time.Now()
	return nil
}
