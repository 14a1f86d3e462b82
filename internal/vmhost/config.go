// Package vmhost makes, finds and deletes instances on one libvirt host, and publishes the images they boot from. The
// backends for one host and for many are both made of it.
//
// # What is on a host
//
// An instance is a domain with our mark in its metadata and three files in the storage pool, whose names begin with the
// domain's own name and a part of its UUID: the disk, the seed and the serial log. The domain is defined first and undefined
// last, so whatever a crash leaves behind still hangs on a marked domain, and nothing is ever recognised by a name
// alone.
//
// A base image is two volumes: the data, whose name nobody else will ever use, and an empty overlay on it with the base's
// name, which is made when the data is complete and verified. libvirt makes a volume or says that the name is taken, and
// knows nothing of renaming, so the overlay is what publishes. Instances boot from overlays of the overlay.
package vmhost

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"sync"
	"time"

	"crawl.example.com/egress/internal/hostpool"
	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/provider"
)

// SSH says how to log in to a host. The backends have a type of the same fields, in which they are described.
type SSH struct {
	KnownHosts            []string
	PinnedKeys            []string
	InsecureIgnoreHostKey bool
	KeyFiles              []string
	Passphrase            func(ctx context.Context, file string) ([]byte, error)
	Agent                 string
	Jumps                 []string
	KeepaliveInterval     time.Duration
}

// Image is a disk image. The backends have a type of the same fields, in which they are described.
type Image struct {
	URL         string
	SHA256      string
	SHA512      string
	Format      string
	Compression string
	Firmware    string
}

// Progress is how far an image is. The backends have a type of the same fields, in which they are described.
type Progress struct {
	Host, Image string
	Bytes       int64
	Total       int64
	Done        bool
	Err         error
}

// Config says what a host is used for. The backends fill in their defaults and check what they offer their users with
// Validate.
type Config struct {
	// Entry is the provider's name, and Target the host's, in errors and results. Required.
	Entry, Target string
	// URI is the host. Required.
	URI string
	// SSH is how to log in there.
	SSH SSH
	// Pool is the storage pool. Defaults to "default".
	Pool string
	// Network is the libvirt network, and Bridge a bridge of the host's instead. Defaults to "default" when neither is set.
	Network, Bridge string
	// Maker is part of every base's data, and tells whose it is. BasePrefix starts the names of bases. Required.
	Maker, BasePrefix string
	// Images are the images by name.
	Images map[string]Image
	// Firmware is "uefi" or "bios", for images that don't say. Defaults to "uefi".
	Firmware string
	// AllowEmulation runs instances without KVM where that does not work.
	AllowEmulation bool
	// Autostart starts instances when the host boots. Defaults to false.
	Autostart bool
	// IPv6 has instances reached by IPv6.
	IPv6 bool
	// ShutdownGrace is how long a deleted instance has to shut down. Zero is not at all.
	ShutdownGrace time.Duration
	// MaxInstances, MaxMemoryMiB and MaxCPUs bound what runs on the host. Zero is no bound.
	MaxInstances, MaxMemoryMiB, MaxCPUs int
	// MinFreeGiB is what must stay free in the pool. Defaults to 1; negative is nothing.
	MinFreeGiB int
	// FetchOnHost has the host itself fetch images, with curl.
	FetchOnHost bool
	// HTTP fetches images. Defaults to a client of its own.
	HTTP *http.Client
	// Uploads is held by one image that is being fetched. Required.
	Uploads chan struct{}
	// Progress hears of images being fetched.
	Progress func(Progress)
	// Dial opens connections to libvirt's socket instead of all that. For tests.
	Dial func(ctx context.Context) (net.Conn, error)
	// Logger gets what an operator wants to know. Defaults to discarding.
	Logger *slog.Logger
}

// Formats of images.
const (
	formatQcow2 = "qcow2"
	formatRaw   = "raw"
)

// Firmwares.
const (
	firmwareUEFI = "uefi"
	firmwareBIOS = "bios"
)

var (
	keyPattern  = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$`)
	hexPattern  = regexp.MustCompile(`^[0-9a-f]*$`)
	namePattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$`) // of pools, networks and bridges
)

// filled returns c with its defaults, or every fault of it.
func (c Config) filled() (Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	uri, err := libvirt.ParseURI(c.URI)
	if err != nil {
		fault("URI %w", err)
	} else if err := c.connection(uri).SSH.Validate(); !uri.Local() && err != nil {
		fault("SSH: %w", err)
	}
	if c.Pool == "" {
		c.Pool = "default"
	}
	if c.Network == "" && c.Bridge == "" {
		c.Network = "default"
	}
	if c.Network != "" && c.Bridge != "" {
		fault("Network %q and Bridge %q are both set, want one", c.Network, c.Bridge)
	}
	for _, name := range []struct{ field, value string }{{"StoragePool", c.Pool}, {"Network", c.Network}, {"Bridge", c.Bridge}} {
		if name.value != "" && !namePattern.MatchString(name.value) {
			fault("%s %q, want letters, digits, '_', '.' and '-'", name.field, name.value)
		}
	}
	if c.Firmware == "" {
		c.Firmware = firmwareUEFI
	}
	if !slices.Contains([]string{firmwareUEFI, firmwareBIOS}, c.Firmware) {
		fault("Firmware %q, want uefi or bios", c.Firmware)
	}
	images := map[string]Image{}
	for key, image := range c.Images {
		if !keyPattern.MatchString(key) {
			fault("Images has %q, want lower-case letters, digits, '.', '_' and '-', at most 64", key)
		}
		filled, err := image.filled(c.Firmware)
		if err != nil {
			fault("Images %s: %w", key, err)
		}
		images[key] = filled
	}
	c.Images = images
	for _, n := range []struct {
		field string
		value int
	}{{"MaxInstances", c.MaxInstances}, {"MaxMemoryMiB", c.MaxMemoryMiB}, {"MaxCPUs", c.MaxCPUs}} {
		if n.value < 0 {
			fault("%s %d, want 0 for no bound or more", n.field, n.value)
		}
	}
	if c.ShutdownGrace < 0 || c.ShutdownGrace > 10*time.Minute {
		fault("ShutdownGrace %s, want 0 to 10m", c.ShutdownGrace)
	}
	if c.SSH.KeepaliveInterval < 0 {
		fault("SSH.KeepaliveInterval %s, want 0 for the default or more", c.SSH.KeepaliveInterval)
	}
	// Negative is no reserve.
	if c.MinFreeGiB == 0 {
		c.MinFreeGiB = 1
	}
	if c.FetchOnHost && uri.Local() {
		fault("FetchOnHost needs a host that is reached over SSH")
	}
	if c.HTTP == nil {
		c.HTTP = imageClient()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(faults...)
}

func (i Image) filled(firmware string) (Image, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if u, err := url.Parse(i.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Fragment != "" {
		fault("URL is no http or https URL")
	} else if u.Scheme == "http" && i.SHA256 == "" && i.SHA512 == "" && !private(u.Hostname()) {
		fault("URL is http without SHA256 or SHA512, so anybody on the way could change the image; want https or a digest")
	}
	for _, d := range []struct {
		field, value string
		size         int
	}{{"SHA256", i.SHA256, 64}, {"SHA512", i.SHA512, 128}} {
		if d.value != "" && (len(d.value) != d.size || !hexPattern.MatchString(d.value)) {
			fault("%s %q, want %d lower-case hexadecimal digits", d.field, d.value, d.size)
		}
	}
	if i.SHA256 != "" && i.SHA512 != "" {
		fault("SHA256 and SHA512 are both set, want one")
	}
	if i.Format == "" {
		i.Format = formatQcow2
	}
	if i.Format != formatQcow2 && i.Format != formatRaw {
		fault("Format %q, want qcow2 or raw", i.Format)
	}
	if i.Compression != "" && i.Compression != "gzip" {
		fault("Compression %q, want gzip or nothing; other compressions are undone with qemu-img beforehand", i.Compression)
	}
	if i.Firmware == "" {
		i.Firmware = firmware
	}
	if i.Firmware != firmwareUEFI && i.Firmware != firmwareBIOS {
		fault("Firmware %q, want uefi or bios", i.Firmware)
	}
	return i, errors.Join(faults...)
}

// private reports whether host is an address of a network that nobody else is on.
func private(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && (ip.IsLoopback() || ip.IsPrivate() || ip.IsLinkLocalUnicast())
}

// connection is how to reach the host.
func (c Config) connection(uri libvirt.URI) libvirt.Config {
	host := func(address string) sshconn.Host {
		return sshconn.Host{
			Address: address, KnownHosts: c.SSH.KnownHosts, PinnedKeys: c.SSH.PinnedKeys,
			InsecureIgnoreHostKey: c.SSH.InsecureIgnoreHostKey, KeyFiles: c.SSH.KeyFiles, Passphrase: c.SSH.Passphrase, Agent: c.SSH.Agent,
		}
	}
	conn := libvirt.Config{URI: uri, Dial: c.Dial}
	if uri.Local() {
		return conn
	}
	conn.SSH = sshconn.Config{Host: host(uri.SSH.String()), KeepaliveInterval: c.SSH.KeepaliveInterval}
	if conn.SSH.Host.User = uri.SSH.User; conn.SSH.Host.User == "" {
		conn.SSH.Host.User = "root"
	}
	for _, jump := range c.SSH.Jumps {
		h := host(jump)
		h.PinnedKeys = nil // they are the host's
		if a, err := sshconn.ParseAddress(jump); err == nil && a.User == "" {
			h.User = conn.SSH.Host.User
		}
		conn.SSH.Jumps = append(conn.SSH.Jumps, h)
	}
	return conn
}

// Host is one host in use. It is safe for concurrent use.
type Host struct {
	config Config
	uri    libvirt.URI
	pool   *hostpool.Pool[string, *libvirt.Conn]
	ctx    context.Context // of everything that no caller waits for
	cancel context.CancelCauseFunc
	tasks  sync.WaitGroup
	agents chan struct{} // one for each question to a guest agent

	// mu guards what follows.
	mu       sync.Mutex
	closed   bool
	names    map[string]*turn     // of instances that something is being done to
	making   map[string]int       // instances that a Create is at, by name
	removing map[string]int       // the same of Delete
	known    map[uuid]identity    // what the metadata of domains said
	agent    map[uuid]agentRecord // how guest agents did
	fetches  map[string]*fetch    // images being published, by base name
	using    map[string]int       // bases that must stay, by name
	measured map[string]string    // digests of data that was read, by volume and algorithm
	mine     map[string]bool      // data volumes of this process that are not published, by name
	promises promises             // what creates are going to use
	noKVM    bool                 // KVM was tried and does not work
	hasKVM   bool                 // an instance was started with it
}

// New checks config and returns its Host. It does no I/O.
func New(config Config) (*Host, error) {
	config, err := config.filled()
	if err != nil {
		return nil, err
	}
	uri, err := libvirt.ParseURI(config.URI)
	if err != nil {
		return nil, err // filled has parsed it
	}
	h := &Host{
		config: config, uri: uri, agents: make(chan struct{}, maxAgents),
		names: map[string]*turn{}, making: map[string]int{}, removing: map[string]int{}, known: map[uuid]identity{}, agent: map[uuid]agentRecord{},
		fetches: map[string]*fetch{}, using: map[string]int{}, measured: map[string]string{}, mine: map[string]bool{},
	}
	h.ctx, h.cancel = context.WithCancelCause(context.Background())
	how := config.connection(uri)
	interval := config.SSH.KeepaliveInterval // zero is hostpool's default too
	h.pool = hostpool.New(hostpool.Config[string, *libvirt.Conn]{
		Dial:  func(ctx context.Context, _ string) (*libvirt.Conn, error) { return libvirt.Dial(ctx, how) },
		Local: isAnswer,
		// SSH looks after itself. This finds a libvirtd that hangs.
		Keepalive:         func(ctx context.Context, conn *libvirt.Conn) error { return conn.Probe(ctx, alive) },
		KeepaliveInterval: interval,
		KeepaliveTimeout:  2 * interval,
		Logger:            config.Logger,
	})
	return h, nil
}

func alive(s *libvirt.Session) error {
	_, err := s.ConnectGetLibVersion()
	return err
}

// Target returns the host's name.
func (h *Host) Target() string { return h.config.Target }

// Close ends everything that is under way, and the connection, and returns when every goroutine has ended. It may be
// called again. It returns nil.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.cancel(errClosed)
	_ = h.pool.Close() // always nil
	h.tasks.Wait()
	return nil
}

var errClosed = errors.New("the provider is closed")

// spawn runs f for as long as the host is in use, or not at all once it is closed.
func (h *Host) spawn(f func(ctx context.Context)) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.tasks.Go(func() { f(h.ctx) })
	return true
}

// do calls f with a session, as hostpool.Pool.Do and libvirt.Conn.Do do. Errors about the connection come back bare.
func (h *Host) do(ctx context.Context, f func(ctx context.Context, s *libvirt.Session) error) error {
	return h.pool.Do(ctx, h.config.Target, func(ctx context.Context, conn *libvirt.Conn) error {
		return conn.Do(ctx, func(s *libvirt.Session) error { return f(ctx, s) })
	})
}

// log adds what every record has.
func (h *Host) log() *slog.Logger {
	return h.config.Logger.With("provider", h.config.Entry, "host", h.config.Target)
}

// wrap makes err one of the provider package's.
func (h *Host) wrap(op, instance string, err error) error {
	if err == nil {
		return nil
	}
	f := judge(err)
	return &provider.Error{Provider: h.config.Entry, Op: op, Instance: instance, Target: h.config.Target, Kind: f.Kind, Reason: f.Reason, Err: f}
}
