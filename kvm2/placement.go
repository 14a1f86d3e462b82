package kvm2

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/internal/vmhost"
)

// candidate is a host that an instance may be put on.
type candidate struct {
	host *host
	// alike is how many instances of the same spread are on it: those of the placement's group, or those of the owner
	// when there is none.
	alike int
	// sameProxy is how many instances of the same proxy are on it, which the new one may be to replace.
	sameProxy int
	// room is the share of the host that would be left, by what is scarcest, times its weight.
	room float64
	// resting is true while a create has failed there not long ago.
	resting bool
	usage   vmhost.Usage
}

// order sorts candidates, best first. Ties are broken by a hash of the instance's and the host's name, so that the same
// question gets the same answer and many proxies don't all prefer the first host.
func order(candidates []candidate, name string) {
	slices.SortFunc(candidates, func(a, b candidate) int {
		return cmp.Or(
			compareBool(a.resting, b.resting),
			cmp.Compare(a.alike, b.alike),
			cmp.Compare(a.sameProxy, b.sameProxy),
			cmp.Compare(b.room, a.room),
			cmp.Compare(tie(name, a.host.config.Name), tie(name, b.host.config.Name)),
			cmp.Compare(a.host.config.Name, b.host.config.Name),
		)
	})
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// tie is a number that is as good as random, and the same each time. FNV is not: names that differ in their last letter
// would come in the same order on most hosts.
func tie(name, host string) uint64 {
	sum := sha256.Sum256([]byte(name + " " + host))
	return binary.BigEndian.Uint64(sum[:])
}

// roomOf is the share of the host that is left when plan is put on it, in tenths of a percent, so that a few MiB don't
// outweigh everything that comes after.
func roomOf(u vmhost.Usage, plan *vmhost.Plan, weight float64) float64 {
	room := 1.0
	if u.TotalMemoryMiB > 0 {
		room = min(room, float64(u.TotalMemoryMiB-u.MemoryMiB-plan.MemoryMiB)/float64(u.TotalMemoryMiB))
	}
	if u.TotalCPUs > 0 {
		// Processors are shared: a host whose processors are all promised still has room, only less.
		room *= 1 / (1 + float64(u.CPUs)/float64(u.TotalCPUs))
	}
	return float64(int(room*weight*1000)) / 1000
}

// explain says why a host was chosen.
func (c candidate) explain(group string, of int) string {
	var b strings.Builder
	config := c.host.is() // SetHosts may be changing it
	fmt.Fprintf(&b, "on %s of %d hosts that fit: ", config.Name, of)
	if group != "" {
		fmt.Fprintf(&b, "%d others of group %s, ", c.alike, group)
	} else {
		fmt.Fprintf(&b, "%d others of ours, ", c.alike)
	}
	fmt.Fprintf(&b, "%d of %d MiB and %d of %d CPUs spoken for", c.usage.MemoryMiB, c.usage.TotalMemoryMiB, c.usage.CPUs, c.usage.TotalCPUs)
	if config.weight() != 1 {
		fmt.Fprintf(&b, ", weight %v", config.weight())
	}
	if c.resting {
		b.WriteString(", though a create failed there not long ago")
	}
	return b.String()
}

// rest is how long a host comes last after that many failures in a row.
func rest(failures int, base time.Duration) time.Duration {
	return base << min(failures-1, 4)
}
