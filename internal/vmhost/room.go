package vmhost

import (
	"context"
	"fmt"
	"maps"
	"slices"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

// hostReserveMiB is the memory that is left to the host itself when nothing else is configured.
const hostReserveMiB = 512

// promise is what a create that is under way is going to use.
type promise struct {
	memoryMiB, cpus int
}

// promises are those of a host. One that ends while somebody is asking what is in use still counts there: the answer may be
// from before its domain was defined. The zero value is ready for use.
type promises struct {
	kept  map[string]promise // by instance name
	ended []endedPromise
	asked int          // questions that have begun
	open  map[int]bool // questions under way, by when they began
}

type endedPromise struct {
	promise
	name string
	at   int // questions that had begun by then
}

func (p *promises) begin() (question int) {
	if p.open == nil {
		p.open = map[int]bool{}
	}
	p.asked++
	p.open[p.asked] = true
	return p.asked
}

func (p *promises) end(question int) {
	delete(p.open, question)
	oldest := p.asked + 1
	for q := range p.open {
		oldest = min(oldest, q)
	}
	p.ended = slices.DeleteFunc(p.ended, func(e endedPromise) bool { return e.at < oldest })
}

func (p *promises) keep(name string, what promise) {
	if p.kept == nil {
		p.kept = map[string]promise{}
	}
	p.kept[name] = what
}

func (p *promises) release(name string) {
	if len(p.open) > 0 {
		p.ended = append(p.ended, endedPromise{p.kept[name], name, p.asked})
	}
	delete(p.kept, name)
}

// of returns what counts for a question, by name.
func (p *promises) of(question int) map[string]promise {
	all := map[string]promise{}
	for _, e := range p.ended {
		if e.at >= question {
			all[e.name] = e.promise
		}
	}
	maps.Copy(all, p.kept)
	return all
}

// Usage is what a host has and what of it is spoken for, by whomever.
type Usage struct {
	// Instances are the domains that carry our mark, of any owner, and the creates under way.
	Instances int
	// MemoryMiB and CPUs are what all domains may use, running or not, and the creates under way.
	MemoryMiB, CPUs int
	// TotalMemoryMiB and TotalCPUs are what there is to give.
	TotalMemoryMiB, TotalCPUs int
	// FreeBytes is what the storage pool has left above its reserve.
	FreeBytes int64
}

// Room reports what is in use, and why an instance of that plan does not fit, or nothing when it does. Creates by
// others are taken into account as far as they are known.
func (h *Host) Room(ctx context.Context, plan *Plan) (used Usage, why string, err error) {
	err = h.spokenFor(ctx, "", func(u Usage) { used, why = u, h.lacking(u, plan) })
	return used, why, h.wrap("create", "", err)
}

// promise makes sure that there is room for an instance and keeps it until release is called.
func (h *Host) promise(ctx context.Context, name string, plan *Plan) (release func(), err error) {
	why := ""
	err = h.spokenFor(ctx, name, func(used Usage) {
		if why = h.lacking(used, plan); why == "" {
			h.promises.keep(name, promise{plan.MemoryMiB, plan.CPUs})
		}
	})
	if err != nil {
		return nil, err
	}
	if why != "" {
		return nil, fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "%s", why)
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.promises.release(name)
	}, nil
}

// spokenFor asks the host what is in use, adds the creates whose domains it did not name yet, but for one, and calls decide
// while h.mu is held, so that nothing is promised meanwhile.
func (h *Host) spokenFor(ctx context.Context, except string, decide func(Usage)) error {
	h.mu.Lock()
	question := h.promises.begin()
	h.mu.Unlock()
	used, names, err := h.usage(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.promises.end(question)
	if err != nil {
		return err
	}
	for name, p := range h.promises.of(question) {
		if name != except && !names[name] {
			used.Instances++
			used.MemoryMiB += p.memoryMiB
			used.CPUs += p.cpus
		}
	}
	decide(used)
	return nil
}

func (h *Host) lacking(used Usage, plan *Plan) string {
	c := h.config
	switch {
	case c.MaxInstances > 0 && used.Instances >= c.MaxInstances:
		return fmt.Sprintf("%d of MaxInstances %d are there", used.Instances, c.MaxInstances)
	case c.MaxCPUs > 0 && used.CPUs+plan.CPUs > c.MaxCPUs:
		return fmt.Sprintf("%d of MaxCPUs %d are spoken for, and %d are wanted", used.CPUs, c.MaxCPUs, plan.CPUs)
	case used.TotalMemoryMiB > 0 && used.MemoryMiB+plan.MemoryMiB > used.TotalMemoryMiB:
		return fmt.Sprintf("%d of %d MiB of memory are spoken for, and %d are wanted", used.MemoryMiB, used.TotalMemoryMiB, plan.MemoryMiB)
	case used.FreeBytes <= 0:
		return fmt.Sprintf("the storage pool %s has no more than the %d MiB free that are kept (MinFreeGiB)", c.Pool, h.reserve()>>20)
	}
	return ""
}

// usage asks the host. Besides it returns the names of all domains.
func (h *Host) usage(ctx context.Context) (used Usage, names map[string]bool, err error) {
	err = h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
		used, names = Usage{TotalMemoryMiB: h.config.MaxMemoryMiB, TotalCPUs: h.config.MaxCPUs}, map[string]bool{}
		records, err := s.ConnectGetAllDomainStats(nil, statsState|statsBalloon|statsVCPU, statsNowait)
		if err != nil {
			return err
		}
		for _, r := range records {
			names[r.Dom.Name] = true
			who, err := h.identify(s, r.Dom)
			if err != nil && libvirt.Code(err) == 0 {
				return err
			}
			if who.ours {
				used.Instances++
			}
			used.MemoryMiB += int(number(r.Params, "balloon.maximum") >> 10)
			used.CPUs += int(number(r.Params, "vcpu.maximum"))
		}
		if err := h.totals(s, &used); err != nil {
			return err
		}
		pool, _, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		if used.FreeBytes, err = h.free(s, pool); err != nil || used.FreeBytes > 0 {
			return err
		}
		// What others have deleted meanwhile is seen only when the pool is read anew.
		if err := refresh(ctx, s, pool); err != nil {
			return err
		}
		used.FreeBytes, err = h.free(s, pool)
		return err
	})
	return used, names, err
}

// free is what is left in the pool above the reserve, as of when it was last read.
func (h *Host) free(s *libvirt.Session, pool golibvirt.StoragePool) (int64, error) {
	_, _, _, available, err := s.StoragePoolGetInfo(pool)
	return int64(available) - h.reserve(), err
}

// totals fills in what the host has, where the configuration sets no bounds.
func (h *Host) totals(s *libvirt.Session, used *Usage) error {
	if used.TotalCPUs == 0 {
		_, _, cpus, _, _, _, _, _, err := s.NodeGetInfo()
		if err != nil {
			return err
		}
		used.TotalCPUs = int(cpus)
	}
	if used.TotalMemoryMiB > 0 {
		return nil
	}
	// NodeGetInfo adds up the memory of the NUMA nodes, which comes out wrong in some virtual machines.
	const allCells = -1
	_, n, err := s.NodeGetMemoryStats(0, allCells, 0)
	if err != nil {
		return err
	}
	stats, _, err := s.NodeGetMemoryStats(n, allCells, 0)
	if err != nil {
		return err
	}
	for _, stat := range stats {
		if stat.Field == "total" {
			used.TotalMemoryMiB = max(int(stat.Value>>10)-hostReserveMiB, 0)
		}
	}
	return nil
}

func number(params []golibvirt.TypedParam, name string) uint64 {
	for _, p := range params {
		if p.Field != name {
			continue
		}
		switch v := p.Value.I.(type) {
		case int32:
			return uint64(max(v, 0))
		case uint32:
			return uint64(v)
		case int64:
			return uint64(max(v, 0))
		case uint64:
			return v
		}
	}
	return 0
}
