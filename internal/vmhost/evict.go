package vmhost

import (
	"context"
	"path"
	"strings"

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
		return nil
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
		err = makeOverlay(s, pool, vol.Name, bytesOf(v.Capacity), v.BackingStore.Path, v.BackingStore.Format.Type)
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
