package provider

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strconv"
	"time"
)

// Provider creates, finds and deletes the instances of one backend entry. All methods are safe for
// concurrent use.
type Provider interface {
	// Name returns the entry name: what a proxy's Provider field refers to. It never changes and does
	// no I/O. Several entries of one kind may live in one pool under different names.
	Name() string

	// Validate reports whether this backend could create spec, without any I/O. The error names each
	// field that is wrong, its value unless it is secret, and what would be right. Keys of Spec.Options
	// that the backend does not know are errors.
	Validate(spec Spec) error

	// Create makes the instance req.Name and returns once the backend would still have it after a
	// crash of either side. It does not wait for the boot.
	//
	// Create is repeated with the same name until it succeeds or the pool no longer wants it, so what
	// an earlier attempt left half made is finished or removed, never doubled. When the name is taken
	// by an instance with the same owner, proxy and generation the error matches [ErrAlreadyExists];
	// when anything else holds the name it matches [ErrPermanent]. When it is not known whether the
	// instance was made it matches [ErrOutcomeUnknown].
	Create(ctx context.Context, req CreateRequest) (Instance, error)

	// Get returns the state and the address of one instance now. The error matches [ErrNotFound] only
	// when the backend is sure that the instance is gone.
	Get(ctx context.Context, id string) (Instance, error)

	// List returns every instance that carries owner, in any state, with its mark. That includes what
	// an unfinished Create left behind when it holds resources, so that it can be deleted. Addresses
	// may be missing; the pool asks Get for those. List is cheap: the pool calls it every few seconds.
	//
	// When some hosts could not be asked, List returns what it saw together with a *[PartialError] that
	// names them. Any other error means that nothing is known.
	List(ctx context.Context, owner string) ([]Instance, error)

	// Delete asks for the removal of one instance and all that belongs to it. A nil error means that
	// the request was accepted; the instance counts as gone when Get or Delete says [ErrNotFound] or a
	// complete List no longer has it. Delete is repeated until then. An id that was never there is
	// ErrNotFound. An instance without a mark is refused with [ErrPermanent]; the pool passes ids only
	// that a List of its own owner gave.
	Delete(ctx context.Context, id string) error
}

// Checker is implemented by a Provider that can tell how its hosts are. Without it the pool has no health
// to report of the provider, and nothing else changes.
type Checker interface {
	// Check looks at every target of the backend concurrently and returns one result for each, in a
	// stable order, when all have answered or ctx has ended. A target that did not answer in time is
	// returned with ReasonTimeout; Check itself never fails. It creates and changes nothing.
	Check(ctx context.Context) []TargetHealth
}

// Warner is implemented by a Provider that sees things in a spec which are allowed but probably not meant.
// Without it no such warnings are given.
type Warner interface {
	// Warnings returns one sentence for each finding, without any secret. It does no I/O.
	Warnings(spec Spec) []string
}

// Prober is implemented by a Provider whose proxies can't be probed over a network, such as one in memory. Without it
// the pool sends its probes through the proxies.
type Prober interface {
	// Probe returns nil when the proxy on x works, and why not otherwise. An error that matches
	// errors.ErrUnsupported has the pool probe x over the network after all. It heeds ctx.
	Probe(ctx context.Context, x Instance) error
}

// CreateRequest asks for one instance.
type CreateRequest struct {
	// Name is the instance's name: a DNS label, unique to owner, proxy and generation. See
	// [InstanceName].
	Name string
	// Mark is stored with the instance and returned by Get and List.
	Mark Mark
	// Spec is what to make. It has passed Validate.
	Spec Spec
}

// State is what a backend says about an instance. Whether the proxy on it works is a different question,
// and only a probe answers it.
type State string

// The states of an instance.
const (
	StateUnknown  State = "unknown"  // the backend could not tell; neither fit nor gone
	StatePending  State = "pending"  // being made or starting; may become running by itself
	StateRunning  State = "running"  // switched on
	StateStopped  State = "stopped"  // exists, but off, paused, preempted or hibernated
	StateDeleting State = "deleting" // on its way out; may still be listed for a while
	StateFailed   State = "failed"   // half made or broken; will never run, has to be deleted
)

// Instance is one VM, as its backend sees it.
type Instance struct {
	// ID is the backend's handle for Get and Delete. It is never empty, unique within the provider,
	// and not used again for another instance name.
	ID string
	// Name is the name that Create was asked for.
	Name string
	// Mark is what Create stored.
	Mark Mark
	// State is the state now.
	State State
	// Address is an IP address or host name the proxy can be reached at, without a port. Empty while
	// it is not known.
	Address string
	// Port is the proxy's TCP port when it is not the one of the spec. Zero means the spec's.
	Port int
	// Host names the target that the instance is on, as in TargetHealth.Target.
	Host string
	// Created is when the backend made the instance. Zero when it does not know.
	Created time.Time
	// Evacuate asks the pool to replace the instance in the way a changed spec has it replaced, because
	// its host is to be emptied. The replacement must not be put there again.
	Evacuate bool
	// Message says in a sentence what an operator would like to know: why this host, why it failed.
	Message string
}

// Spec says what an instance is. Two specs with the same hash give interchangeable instances.
type Spec struct {
	// Provider is the entry name of the provider that the spec is for.
	Provider string
	// Image names the disk image or template, in the backend's own terms.
	Image string
	// CPUs is the number of virtual processors. Zero leaves it to the backend.
	CPUs int
	// MemoryMiB is the memory in MiB. Zero leaves it to the backend.
	MemoryMiB int
	// DiskGiB is the size of the root disk in GiB. Zero keeps the image's.
	DiskGiB int
	// Placement says where.
	Placement Placement
	// CloudInit holds the documents for the guest, with all secrets resolved.
	CloudInit CloudInit
	// Port is the TCP port that the proxy listens on.
	Port int
	// Options holds what only this backend understands. Unknown keys are errors.
	Options map[string]string
}

// Placement says which of a backend's hosts may carry an instance. The zero value leaves it to the backend.
type Placement struct {
	// Host names one target. Empty means any.
	Host string
	// Labels must all be present on the host.
	Labels map[string]string
	// Group names instances that should be spread over different hosts.
	Group string
}

// CloudInit holds the documents for the guest. The bytes reach it unchanged.
type CloudInit struct {
	// UserData is the operator's document. Secret: never log it.
	UserData []byte
	// VendorData is a second document of the operator's, run before UserData's scripts. Secret.
	VendorData []byte
	// InstallGuestAgent adds the script that installs the guest agent where the backend uses one.
	InstallGuestAgent bool
	// Network asks for a static address. Nil means DHCP or whatever the backend gives.
	Network *Network
}

// String returns the sizes of the documents and never their content. So do Format, for every verb of fmt, MarshalJSON and
// LogValue. An unexported field of this type is out of their reach: fmt prints it as it is.
func (c CloudInit) String() string { return cloudInitSummary(c) }

// Format implements fmt.Formatter.
func (c CloudInit) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, cloudInitSummary(c)) }

// MarshalJSON implements json.Marshaler.
func (c CloudInit) MarshalJSON() ([]byte, error) {
	return strconv.AppendQuote(nil, cloudInitSummary(c)), nil
}

// LogValue implements slog.LogValuer.
func (c CloudInit) LogValue() slog.Value { return slog.StringValue(cloudInitSummary(c)) }

// Network is a static network configuration of an instance's only interface.
type Network struct {
	// Addresses are the interface's addresses with their prefix lengths.
	Addresses []netip.Prefix
	// Gateways are the default gateways, at most one for each address family.
	Gateways []netip.Addr
	// Nameservers are the DNS servers.
	Nameservers []netip.Addr
	// SearchDomains are the DNS search domains.
	SearchDomains []string
}
