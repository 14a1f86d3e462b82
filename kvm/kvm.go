package kvm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"crawl.example.com/egress/internal/vmhost"
	"crawl.example.com/egress/provider"
)

// The values of Config.Firmware, Image.Firmware and the option "firmware".
const (
	FirmwareUEFI = "uefi"
	FirmwareBIOS = "bios"
)

// Keys of provider.Spec.Options.
const (
	// OptionSHA256 is the digest of an image that the spec gives as a URL.
	OptionSHA256 = vmhost.OptionSHA256
	// OptionFormat is the format of an image that the spec gives as a URL: "qcow2" or "raw". Defaults to "qcow2".
	OptionFormat = vmhost.OptionFormat
	// OptionFirmware is "uefi" or "bios", instead of the image's.
	OptionFirmware = vmhost.OptionFirmware
)

// Config is one libvirt host used as a provider.
type Config struct {
	// Name is the entry name that a proxy's Provider field refers to. Required.
	Name string
	// Host is the host's name in check results, and the only Placement.Host there is. Defaults to Name.
	Host string
	// Labels are what Placement.Labels are compared with. Defaults to none.
	Labels map[string]string
	// URI is qemu+ssh://user@host[:port]/system, or qemu:///system for this machine, perhaps with
	// ?socket=PATH. Required.
	URI string
	// SSH is how to log in. Defaults to the user's known hosts and SSH agent.
	SSH SSH

	// StoragePool is the pool for images and disks: of type dir, fs or netfs. Defaults to "default".
	StoragePool string
	// Network is the libvirt network of the instances. Defaults to "default", unless Bridge is set.
	Network string
	// Bridge is a bridge of the host, instead of Network. Defaults to none.
	Bridge string
	// Images are the images by the names that specs use: lower-case letters, digits, '.', '_' and '-'.
	// A spec may also give a URL. Defaults to none.
	Images map[string]Image
	// Firmware is FirmwareUEFI or FirmwareBIOS, for images that don't say. Defaults to FirmwareUEFI.
	Firmware string
	// AllowEmulation runs instances without KVM where that does not work, many times slower. Defaults
	// to false.
	AllowEmulation bool
	// Autostart starts instances when the host boots. Defaults to false: the pool replaces what is off.
	Autostart bool
	// IPv6 has instances reached by IPv6 instead of IPv4. Defaults to false.
	IPv6 bool
	// ShutdownGrace is how long a deleted instance has to shut down, up to 10 m. Defaults to 0, which
	// is not at all: nothing of an instance is kept.
	ShutdownGrace time.Duration

	// MaxInstances bounds the instances of egress on the host, of all owners. Defaults to 0, no bound.
	MaxInstances int
	// MaxMemoryMiB bounds the memory of all virtual machines on the host, in MiB. Defaults to what the
	// host has less 512.
	MaxMemoryMiB int
	// MaxCPUs bounds their virtual processors. Defaults to 0, no bound.
	MaxCPUs int
	// MinFreeGiB is what must stay free in the storage pool, in GiB. Negative is nothing. Defaults to 1.
	MinFreeGiB int

	// FetchOnHost has the host itself fetch images, with curl over SSH, which needs the right to write
	// into the storage pool's folder. Images with Compression are streamed all the same. Defaults to
	// false: they are streamed through this process.
	FetchOnHost bool
	// HTTPClient fetches images. It should neither decompress nor bound the time of a request. Defaults
	// to one of its own, which takes proxies from the environment and gives up on a server that is
	// silent for a minute.
	HTTPClient *http.Client
	// Progress is told how far an image is, about once a second and at the end. It is called from one
	// goroutine at a time for each image and must return soon. Defaults to none.
	Progress func(Progress)
	// Logger gets what an operator wants to know. Defaults to discarding.
	Logger *slog.Logger
}

// SSH says how to log in to the host.
type SSH struct {
	// KnownHosts are files in OpenSSH's format. Defaults to those of /etc/ssh/ssh_known_hosts and
	// ~/.ssh/known_hosts that exist.
	KnownHosts []string
	// PinnedKeys are the host's keys, as lines of an authorized_keys file or as fingerprints
	// (SHA256:…), instead of KnownHosts. Jump hosts are looked up in KnownHosts. Defaults to none.
	PinnedKeys []string
	// InsecureIgnoreHostKey accepts any key, and thus anybody who stands between. Defaults to false.
	InsecureIgnoreHostKey bool
	// KeyFiles are private keys, tried in this order. Defaults to none.
	KeyFiles []string
	// Passphrase returns the passphrase of an encrypted key file, and must heed ctx. Defaults to none.
	Passphrase func(ctx context.Context, file string) ([]byte, error)
	// Agent is the path of an SSH agent's socket. Defaults to $SSH_AUTH_SOCK when there are no KeyFiles.
	Agent string
	// Jumps are the hosts on the way, as [user@]host[:port]; the user is the URI's when there is none.
	// Defaults to none.
	Jumps []string
	// KeepaliveInterval is how long the host may be silent before it is asked for a sign of life; after
	// three of them it is given up. Defaults to 15 s.
	KeepaliveInterval time.Duration
}

// Image is a disk image with cloud-init in it.
type Image struct {
	// URL is where it is, http or https. Plain http to a public address needs a digest. Required.
	URL string
	// SHA256 is the digest of the file at URL, in hexadecimal. Defaults to none.
	SHA256 string
	// SHA512 is the same; one of the two is enough. Defaults to none.
	SHA512 string
	// Format is "qcow2" or "raw". Defaults to "qcow2".
	Format string
	// Compression is "gzip" for a file that is packed besides what qcow2 may do itself. Defaults to none.
	Compression string
	// Firmware is FirmwareUEFI or FirmwareBIOS. Defaults to Config.Firmware.
	Firmware string
}

// Progress is how far an image is on its way to a host.
type Progress struct {
	// Host and Image are the names of both.
	Host, Image string
	// Bytes have been read, and Total are to come; -1 when that is not known.
	Bytes, Total int64
	// Done is set once, in the end, and Err with it when the image did not get there.
	Done bool
	Err  error
}

// Provider makes proxies on one libvirt host. It is a [provider.Provider], [provider.Checker], [provider.Warner] and
// io.Closer. All methods are safe for concurrent use.
type Provider struct {
	config Config
	host   *vmhost.Host
}

// New returns a Provider. It does no I/O: the host is called when it is needed. The error joins every fault of config.
func New(config Config) (*Provider, error) {
	var faults []error
	if err := provider.CheckName(config.Name); err != nil {
		faults = append(faults, fmt.Errorf("kvm: Name %w", err))
	}
	if config.Host == "" {
		config.Host = config.Name
	}
	images := make(map[string]vmhost.Image, len(config.Images))
	for name, image := range config.Images {
		images[name] = vmhost.Image(image)
	}
	hostConfig := vmhost.Config{
		Entry: config.Name, Target: config.Host, URI: config.URI, SSH: vmhost.SSH(config.SSH),
		Pool: config.StoragePool, Network: config.Network, Bridge: config.Bridge,
		Maker: "kvm", BasePrefix: "base-", Images: images, Firmware: config.Firmware,
		AllowEmulation: config.AllowEmulation, Autostart: config.Autostart, IPv6: config.IPv6, ShutdownGrace: config.ShutdownGrace,
		MaxInstances: config.MaxInstances, MaxMemoryMiB: config.MaxMemoryMiB, MaxCPUs: config.MaxCPUs, MinFreeGiB: config.MinFreeGiB,
		FetchOnHost: config.FetchOnHost, HTTP: config.HTTPClient, Uploads: make(chan struct{}, 2), Logger: config.Logger,
	}
	if config.Progress != nil {
		hostConfig.Progress = func(p vmhost.Progress) { config.Progress(Progress(p)) }
	}
	host, err := vmhost.New(hostConfig)
	if err != nil {
		faults = append(faults, fmt.Errorf("kvm: %w", err))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return &Provider{config, host}, nil
}

// Name implements provider.Provider.
func (p *Provider) Name() string { return p.config.Name }

// Validate implements provider.Provider. All faults are joined.
func (p *Provider) Validate(spec provider.Spec) error {
	_, err := p.host.Plan(spec)
	if spec.Provider != "" && spec.Provider != p.config.Name {
		err = errors.Join(err, fmt.Errorf("Provider %q, this one is %q", spec.Provider, p.config.Name))
	}
	if err := errors.Join(err, vmhost.Allowed(spec.Placement, p.config.Host, p.config.Labels)); err != nil {
		return &provider.Error{Provider: p.config.Name, Op: "validate", Kind: provider.ErrPermanent, Reason: provider.ReasonUnsupported, Err: fmt.Errorf("kvm: %w", err)}
	}
	return nil
}

// Warnings implements provider.Warner.
func (p *Provider) Warnings(spec provider.Spec) []string { return vmhost.Warnings(spec) }

// Create implements provider.Provider. It returns when the instance has been started. An image that the host has not got
// yet is fetched before, which may take longer than ctx allows: the error then matches provider.ErrUnavailable, the image
// stays on its way, and a later Create finds it.
func (p *Provider) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	if err := p.Validate(req.Spec); err != nil {
		return provider.Instance{}, err
	}
	return p.host.Create(ctx, req, "")
}

// Get implements provider.Provider.
func (p *Provider) Get(ctx context.Context, id string) (provider.Instance, error) {
	return p.host.Get(ctx, id)
}

// List implements provider.Provider.
func (p *Provider) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	return p.host.List(ctx, owner)
}

// Delete implements provider.Provider. It returns when the instance is gone with its files.
func (p *Provider) Delete(ctx context.Context, id string) error { return p.host.Delete(ctx, id) }

// Check implements provider.Checker. The host is the only target.
func (p *Provider) Check(ctx context.Context) []provider.TargetHealth {
	return []provider.TargetHealth{p.host.Check(ctx)}
}

// EvictImages deletes the images on the host that no disk stands on and Config.Images doesn't name, and returns their
// names. It blocks, within ctx. Nothing is evicted without being asked for. Errors match the sentinels of package provider.
func (p *Provider) EvictImages(ctx context.Context) ([]string, error) {
	return p.host.Evict(ctx, func(image string) bool { _, named := p.config.Images[image]; return named })
}

// Close ends what is under way and the connection to the host. Instances stay. It returns when every goroutine has ended,
// and nil.
func (p *Provider) Close() error { return p.host.Close() }

var (
	_ provider.Provider = (*Provider)(nil)
	_ provider.Checker  = (*Provider)(nil)
	_ provider.Warner   = (*Provider)(nil)
)
