package kvm2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"regexp"
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

// Config is a fleet of libvirt hosts used as one provider.
type Config struct {
	// Name is the entry name that a proxy's Provider field refers to. It is part of file names on the
	// hosts: lower-case letters and digits, a letter first, at most 20. Required.
	Name string
	// Hosts are the hosts. They can be changed later, see [Provider.SetHosts]. Required.
	Hosts []Host
	// SSH is how to log in to hosts that don't say. Defaults to the user's known hosts and SSH agent.
	SSH SSH

	// Images are the images by the names that specs use, the same for all hosts: lower-case letters,
	// digits, '.', '_' and '-'. A spec may also give a URL. Defaults to none.
	Images map[string]Image
	// Firmware is FirmwareUEFI or FirmwareBIOS, for images that don't say. Defaults to FirmwareUEFI.
	Firmware string
	// AllowEmulation runs instances without KVM where that does not work, many times slower. Defaults
	// to false.
	AllowEmulation bool
	// Autostart starts instances when their host boots. Defaults to false: the pool replaces what is off.
	Autostart bool
	// IPv6 has instances reached by IPv6 instead of IPv4. Defaults to false.
	IPv6 bool
	// ShutdownGrace is how long a deleted instance has to shut down, up to 10 m. Defaults to 0, not at
	// all.
	ShutdownGrace time.Duration

	// MaxUploads is how many images are brought to hosts at a time. Defaults to 2.
	MaxUploads int
	// FetchOnHost has the hosts themselves fetch images, with curl over SSH, which needs the right to
	// write into the storage pool's folder. Images with Compression are streamed all the same. Defaults
	// to false: they are streamed through this process, once for each host.
	FetchOnHost bool
	// HTTPClient fetches images. It should neither decompress nor bound the time of a request. Defaults
	// to one of its own.
	HTTPClient *http.Client
	// Progress is told how far an image is, about once a second and at the end. It may be called for
	// several hosts at once and must return soon. Defaults to none.
	Progress func(Progress)
	// ListTimeout is how long a host may take for a list, and for a look at who has a name, before it
	// is taken for absent this time. Defaults to 5 s.
	ListTimeout time.Duration
	// HostBackoff is how long a host on which a create has failed comes after all others, doubled with
	// each further failure up to 16 times that. Defaults to 30 s.
	HostBackoff time.Duration
	// Logger gets what an operator wants to know. Defaults to discarding.
	Logger *slog.Logger
}

// Host is one libvirt host.
type Host struct {
	// Name is the host's name in check results and for Placement.Host. It is part of instance ids and
	// must not be given to another machine while instances are left on this one: lower-case letters,
	// digits, '.' and '-'. Required.
	Name string
	// URI is qemu+ssh://user@host[:port]/system, or qemu:///system for this machine, perhaps with
	// ?socket=PATH. Required.
	URI string
	// SSH is how to log in. Defaults to Config.SSH.
	SSH *SSH
	// Labels are what Placement.Labels are compared with. Defaults to none.
	Labels map[string]string
	// Weight is how much the host is preferred to others, as a factor to the room that it has. Defaults
	// to 1.
	Weight float64
	// Cordoned hosts get nothing new. Defaults to false.
	Cordoned bool
	// Drained hosts are cordoned, and the pool replaces what is on them elsewhere. Defaults to false.
	Drained bool

	// StoragePool is the pool for images and disks: of type dir, fs or netfs. Defaults to "default".
	StoragePool string
	// Network is the libvirt network of the instances. Defaults to "default", unless Bridge is set.
	Network string
	// Bridge is a bridge of the host, instead of Network. Defaults to none.
	Bridge string
	// MaxInstances bounds the instances of egress on the host, of all owners. Defaults to 0, no bound.
	MaxInstances int
	// MaxMemoryMiB bounds the memory of all virtual machines on the host, in MiB. Defaults to what the
	// host has less 512.
	MaxMemoryMiB int
	// MaxCPUs bounds their virtual processors. Defaults to 0, no bound.
	MaxCPUs int
	// MinFreeGiB is what must stay free in the storage pool, in GiB. Negative is nothing. Defaults to 1.
	MinFreeGiB int
}

// SSH says how to log in to a host.
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

var (
	entryPattern = regexp.MustCompile(`^[a-z][a-z0-9]{0,19}$`)
	hostPattern  = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?$`)
)

// filled returns c with its defaults, or every fault of what is not a host's.
func (c Config) filled() (Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("kvm2: "+format, args...)) }
	if !entryPattern.MatchString(c.Name) {
		fault("Name %q, want at most 20 lower-case letters and digits, a letter first", c.Name)
	}
	if c.MaxUploads < 0 || c.ListTimeout < 0 || c.HostBackoff < 0 {
		fault("MaxUploads %d, ListTimeout %s and HostBackoff %s must not be negative", c.MaxUploads, c.ListTimeout, c.HostBackoff)
	}
	if c.MaxUploads == 0 {
		c.MaxUploads = 2
	}
	if c.ListTimeout == 0 {
		c.ListTimeout = 5 * time.Second
	}
	if c.HostBackoff == 0 {
		c.HostBackoff = 30 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Images = maps.Clone(c.Images)
	return c, errors.Join(faults...)
}

// vmhostConfig is what one host is made of.
func (c Config) vmhostConfig(h Host, uploads chan struct{}) vmhost.Config {
	ssh := c.SSH
	if h.SSH != nil {
		ssh = *h.SSH
	}
	images := make(map[string]vmhost.Image, len(c.Images))
	for name, image := range c.Images {
		images[name] = vmhost.Image(image)
	}
	made := vmhost.Config{
		Entry: c.Name, Target: h.Name, URI: h.URI, SSH: vmhost.SSH(ssh), Pool: h.StoragePool, Network: h.Network, Bridge: h.Bridge,
		Maker: "kvm2 " + c.Name, BasePrefix: "base-" + c.Name + "-", Images: images, Firmware: c.Firmware,
		AllowEmulation: c.AllowEmulation, Autostart: c.Autostart, IPv6: c.IPv6, ShutdownGrace: c.ShutdownGrace,
		MaxInstances: h.MaxInstances, MaxMemoryMiB: h.MaxMemoryMiB, MaxCPUs: h.MaxCPUs, MinFreeGiB: h.MinFreeGiB,
		FetchOnHost: c.FetchOnHost, HTTP: c.HTTPClient, Uploads: uploads, Logger: c.Logger,
	}
	if c.Progress != nil {
		made.Progress = func(p vmhost.Progress) { c.Progress(Progress(p)) }
	}
	return made
}

// checkHosts reports every fault of hosts, but for those that vmhost finds.
func checkHosts(hosts []Host) error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("kvm2: "+format, args...)) }
	if len(hosts) == 0 {
		fault("Hosts is empty, want at least one")
	}
	seen := map[string]bool{}
	for _, h := range hosts {
		if !hostPattern.MatchString(h.Name) {
			fault("Hosts has the Name %q, want at most 64 lower-case letters, digits, '.' and '-'", h.Name)
		}
		if seen[h.Name] {
			fault("Hosts has the Name %q twice", h.Name)
		}
		seen[h.Name] = true
		if !(h.Weight >= 0) || math.IsInf(h.Weight, 0) {
			fault("host %s: Weight %v, want more than 0, or 0 for 1", h.Name, h.Weight)
		}
	}
	return errors.Join(faults...)
}

// weight is the host's, with its default.
func (h Host) weight() float64 {
	if h.Weight == 0 {
		return 1
	}
	return h.Weight
}

var _ provider.Provider = (*Provider)(nil)
