package vmhost

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"path"
	"strings"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
)

// Evict deletes the bases of this provider that no volume stands on, except those that keep holds, and returns their
// names. Errors are *provider.Error; what had been deleted before is returned too.
func (h *Host) Evict(ctx context.Context, keep func(image string) bool) ([]string, error) {
	var gone []string
	err := h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
		pool, _, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		if err := refresh(ctx, s, pool); err != nil {
			return err
		}
		volumes, _, err := s.StoragePoolListAllVolumes(pool, 1, 0)
		if err != nil {
			return err
		}
		for _, vol := range volumes {
			name, ok := strings.CutSuffix(vol.Name, ".qcow2")
			image, ours := strings.CutPrefix(name, h.config.BasePrefix)
			if !ok || !ours || keep(image) {
				continue
			}
			done, err := h.evict(ctx, s, pool, vol, name)
			if err != nil {
				return err
			}
			if done {
				gone = append(gone, name)
				h.log().Info("image evicted", "image", image)
			}
		}
		return h.evictOrphans(s, pool)
	})
	return gone, h.wrap("evict", "", err)
}

func (h *Host) evict(ctx context.Context, s *libvirt.Session, pool golibvirt.StoragePool, vol golibvirt.StorageVol, name string) (bool, error) {
	v, err := volume(s, vol)
	if err != nil {
		return false, err
	}
	if v.BackingStore == nil || v.BackingStore.Format == nil {
		return false, nil
	}
	data, ok := parseDataName(path.Base(v.BackingStore.Path))
	if !ok || data.base != name || data.maker != short(h.config.Maker) {
		return false, nil
	}
	h.mu.Lock()
	busy := h.using[name] > 0
	h.mu.Unlock()
	if busy {
		return false, nil
	}
	if used, err := h.inUse(ctx, s, pool, vol); used || err != nil {
		return false, err
	}
	if err := deleteVolume(s, vol); err != nil {
		return false, err
	}
	// Somebody else's create may have made a disk on it in between. Then the empty overlay is put back: it is the same.
	used, err := h.inUse(ctx, s, pool, vol)
	if used {
		err = makeOverlay(ctx, s, pool, vol.Name, bytesOf(v.Capacity), v.BackingStore.Path, v.BackingStore.Format.Type)
		if taken(err) {
			err = nil
		}
		return false, err
	}
	if err != nil {
		return false, err
	}
	dataVol, err := s.StorageVolLookupByName(pool, path.Base(v.BackingStore.Path))
	if libvirt.Code(err) == golibvirt.ErrNoStorageVol {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return true, deleteVolume(s, dataVol)
}

// evictOrphans deletes data that stands under no base and was not written to for a while: of fetches and evictions that were cut
// short. The next fetch of the same base would do it too, but may never come.
func (h *Host) evictOrphans(s *libvirt.Session, pool golibvirt.StoragePool) error {
	volumes, _, err := s.StoragePoolListAllVolumes(pool, 1, 0)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, vol := range volumes {
		names[vol.Name] = true
	}
	var now time.Time
	for _, vol := range volumes {
		d, ok := parseDataName(vol.Name)
		if !ok || d.maker != short(h.config.Maker) || !strings.HasPrefix(d.base, h.config.BasePrefix) {
			continue
		}
		h.mu.Lock()
		busy := h.using[d.base] > 0
		h.mu.Unlock()
		used, err := isBacking(s, volumes, vol)
		if err == nil && !used && !names[volumeName(d.base)] {
			// Should the base have been lost under a disk, it can be made anew as long as the data is there.
			used, err = isBacking(s, volumes, golibvirt.StorageVol{Name: volumeName(d.base), Key: volumeName(d.base)})
		}
		if err != nil {
			return err
		}
		if busy || used {
			continue
		}
		v, err := volume(s, vol)
		if libvirt.Code(err) != 0 {
			continue // gone since
		}
		if err != nil {
			return err
		}
		if now.IsZero() {
			if now, err = h.hostTime(s, pool, d); err != nil {
				return err
			}
		}
		if m := modified(v); m.IsZero() || now.Sub(m) < staleAfter {
			continue
		}
		if err := h.deleteUnfinished(s, vol); err != nil {
			return err
		}
	}
	return nil
}

// hostTime tells what time it is on the host by a new file, whose name is like that of d, so that it is an orphan too should it stay.
func (h *Host) hostTime(s *libvirt.Session, pool golibvirt.StoragePool, d dataName) (time.Time, error) {
	d.nonce = hex.EncodeToString(binary.BigEndian.AppendUint32(nil, rand.Uint32()))
	vol, err := makeRaw(s, pool, d.String(), 0)
	if err != nil {
		return time.Time{}, err
	}
	v, err := volume(s, vol)
	if err := errors.Join(err, deleteVolume(s, vol)); err != nil {
		return time.Time{}, err
	}
	return modified(v), nil
}

// inUse reports whether any volume of the pool stands on vol.
func (h *Host) inUse(ctx context.Context, s *libvirt.Session, pool golibvirt.StoragePool, vol golibvirt.StorageVol) (bool, error) {
	if err := refresh(ctx, s, pool); err != nil {
		return false, err
	}
	volumes, _, err := s.StoragePoolListAllVolumes(pool, 1, 0)
	if err != nil {
		return false, err
	}
	return isBacking(s, volumes, vol)
}
