// Package libvirttest is a libvirt daemon in memory, for tests of what talks to one. It speaks libvirt's protocol over any
// connection, keeps domains, volumes, networks and leases as the real one does as far as package vmhost can tell, and fails in
// the ways that its real counterpart was seen to fail. Nothing starts: a domain that runs is one whose state says so.
//
// Over Dial it uses no operating system's socket and nothing but the standard clock, so it works in testing/synctest bubbles.
package libvirttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/memconn"
)

// Config says what the host is like.
type Config struct {
	// Version is libvirt's, such as 9_000_000 for 9.0.0. Defaults to that.
	Version uint64
	// MemoryMiB and CPUs are what the host has. Default to 65536 and 16.
	MemoryMiB, CPUs int
	// PoolBytes is the size of the storage pool. Defaults to 1 TiB.
	PoolBytes int64
	// NoKVM has domains of type kvm defined and not started, as on a host whose /dev/kvm can't be used.
	NoKVM bool
	// NoUEFI has the host without UEFI firmware.
	NoUEFI bool
	// Address gives the IPv4 address that the agent of a running guest knows, by the hardware address. Defaults to no agent.
	Address func(mac string) string
	// Latency passes before each call is carried out. Defaults to 0.
	Latency time.Duration
}

// Host is the fake. All methods are safe for concurrent use. Close it.
type Host struct {
	config  Config
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup

	// mu guards everything below, and the fields of what is in there.
	mu        sync.Mutex
	down      bool
	listeners []net.Listener
	conns     map[*peer]struct{}
	domains   map[string]*Domain
	pools     map[string]*Pool
	networks  map[string]*Network
	faults    []*Fault
	calls     map[string]int
	history   []string
	dials     int
}

// Pool is a storage pool.
type Pool struct {
	// Name and Type are libvirt's. Path is its folder.
	Name, Type, Path string
	// Inactive pools are defined and not started.
	Inactive bool

	volumes map[string]*Volume
}

// Network is a libvirt network.
type Network struct {
	// Name is libvirt's.
	Name string
	// Inactive networks are defined and not started.
	Inactive bool
	// Leases are what its DHCP server has given out.
	Leases []golibvirt.NetworkDhcpLease
}

// New returns a host with a storage pool and a network named default.
func New(config Config) *Host {
	if config.Version == 0 {
		config.Version = 9_000_000
	}
	if config.MemoryMiB == 0 {
		config.MemoryMiB = 65536
	}
	if config.CPUs == 0 {
		config.CPUs = 16
	}
	if config.PoolBytes == 0 {
		config.PoolBytes = 1 << 40
	}
	h := &Host{
		config: config, conns: map[*peer]struct{}{}, domains: map[string]*Domain{}, calls: map[string]int{},
		pools:    map[string]*Pool{"default": {Name: "default", Type: "dir", Path: "/var/lib/libvirt/images", volumes: map[string]*Volume{}}},
		networks: map[string]*Network{"default": {Name: "default"}},
	}
	h.ctx, h.stop = context.WithCancel(context.Background())
	return h
}

// Close ends all connections and calls and waits for them.
func (h *Host) Close() {
	h.stop()
	h.SetDown(true)
	h.running.Wait()
}

// SetDown has the daemon die, with all its connections, or start again with everything it knew. Guests outlive it. A listener
// is gone for good.
func (h *Host) SetDown(down bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.down = down
	if down {
		for _, l := range h.listeners {
			_ = l.Close() // it is given up
		}
		h.listeners = nil
		h.cutLocked()
	}
}

// Cut ends every connection there is. New ones are welcome.
func (h *Host) Cut() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cutLocked()
}

func (h *Host) cutLocked() {
	for p := range h.conns {
		p.close()
	}
}

// Dial opens a connection in memory.
func (h *Host) Dial(ctx context.Context) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	ours, theirs := memconn.Pair("libvirtd", "client")
	if h.serve(ours) == nil {
		return nil, &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
	}
	return theirs, nil
}

// Listen takes connections at a Unix socket.
func (h *Host) Listen(path string) error {
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.down {
		_ = l.Close() // it is given up
		return errors.New("libvirttest: the host is down")
	}
	h.listeners = append(h.listeners, l)
	h.running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if h.serve(conn) == nil {
				_ = conn.Close() // nobody is there
			}
		}
	})
	return nil
}

// Fault is what happens to calls of a procedure.
type Fault struct {
	// Procedure is the one, by go-libvirt's name, such as DomainCreateWithFlags. Empty means every one.
	Procedure string
	// Skip is how many calls pass before. Defaults to 0.
	Skip int
	// Times is how many calls it happens to. Defaults to 0, which is all.
	Times int
	// Bytes is how much of an upload passes before. Defaults to 0.
	Bytes int64
	// Do is called first, without locks. Defaults to nothing.
	Do func()
	// Delay passes next. Defaults to 0.
	Delay time.Duration
	// Late passes between the carrying out of a call and its answer. Defaults to 0.
	Late time.Duration
	// Code and Message are libvirt's answer. Default to none, so that the call is carried out.
	Code    golibvirt.ErrorNumber
	Message string
	// Hang leaves the call without an answer until its connection ends. It is not carried out.
	Hang bool
	// Cut ends the connection instead.
	Cut bool
	// Lose has the call carried out and ends the connection before the answer.
	Lose bool
}

// Inject adds a fault until the returned function is called. Of several that fit the first happens.
func (h *Host) Inject(f Fault) (mend func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := &f
	if p.Times == 0 {
		p.Times = -1
	}
	h.faults = append(h.faults, p)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.faults = slices.DeleteFunc(h.faults, func(q *Fault) bool { return q == p })
	}
}

// Mend removes every fault.
func (h *Host) Mend() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = nil
}

// faultOf counts a call and returns what is to happen to it.
func (h *Host) faultOf(name string) Fault {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls[name]++
	h.history = append(h.history, name)
	for _, f := range h.faults {
		if f.Procedure != "" && f.Procedure != name || f.Times == 0 {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.Times > 0 {
			f.Times--
		}
		return *f
	}
	return Fault{}
}

// Calls returns how often each procedure was called.
func (h *Host) Calls() map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.calls)
}

// History returns the calls of all connections in their order.
func (h *Host) History() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.history)
}

// Dials returns how many connections there have been.
func (h *Host) Dials() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.dials
}

// Conns returns how many connections there are.
func (h *Host) Conns() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.conns)
}

// SetPool adds a storage pool, or changes all of it but its volumes.
func (h *Host) SetPool(p Pool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.volumes = map[string]*Volume{}
	if old := h.pools[p.Name]; old != nil {
		p.volumes = old.volumes
	}
	h.pools[p.Name] = &p
}

// RemovePool removes a storage pool.
func (h *Host) RemovePool(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pools, name)
}

// SetNetwork adds a network, or replaces it.
func (h *Host) SetNetwork(n Network) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.networks[n.Name] = &n
}

// RemoveNetwork removes a network.
func (h *Host) RemoveNetwork(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.networks, name)
}

// SetConfig changes what the host is like from now on.
func (h *Host) SetConfig(change func(*Config)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.config)
}

func fail(code golibvirt.ErrorNumber, format string, args ...any) error {
	return golibvirt.Error{Code: uint32(code), Message: fmt.Sprintf(format, args...)}
}
