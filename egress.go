package egress

import (
	"fmt"
	"log/slog"
	"time"

	"crawl.example.com/egress/provider"
)

// Mode says who runs a proxy.
type Mode int

const (
	// Managed proxies are VMs that the pool creates, replaces and deletes through a provider.
	Managed Mode = iota
	// External proxies are run by somebody else; the pool probes and leases them and touches nothing.
	External
)

// String returns "managed" or "external".
func (m Mode) String() string {
	switch m {
	case Managed:
		return "managed"
	case External:
		return "external"
	}
	return fmt.Sprintf("mode(%d)", int(m))
}

// Scheme is the protocol spoken to a proxy.
type Scheme string

// The schemes of proxies.
const (
	SchemeHTTP   Scheme = "http"   // plain TCP to the proxy; the default
	SchemeHTTPS  Scheme = "https"  // TLS to the proxy
	SchemeSOCKS5 Scheme = "socks5" // SOCKS5; host names are resolved by the proxy
)

// Defaults of a Proxy and its Probe.
const (
	DefaultPort          = 3128 // squid's
	DefaultMaxLeases     = 5
	DefaultProbeInterval = 30 * time.Second
	DefaultProbeTimeout  = 10 * time.Second
	DefaultProbeRise     = 1
	DefaultProbeFall     = 3
)

// Proxy is one named member of the desired state.
type Proxy struct {
	// Name identifies the proxy for good. A lower-case DNS label; see [provider.CheckName]. Required.
	Name string
	// Mode says who runs it. It can't be changed while the name lives. Defaults to Managed.
	Mode Mode

	// Provider is the Name of one of Config.Providers. It can't be changed while the name lives. Required
	// for Managed, forbidden for External.
	Provider string
	// Placement says which of the provider's hosts may carry it. Defaults to any. Managed only.
	Placement provider.Placement
	// Image names the disk image or template in the provider's terms. Required where the provider needs
	// it. Managed only.
	Image string
	// CPUs is the number of virtual processors. Defaults to the provider's choice. Managed only.
	CPUs int
	// MemoryMiB is the memory in MiB. Defaults to the provider's choice. Managed only.
	MemoryMiB int
	// DiskGiB is the size of the root disk in GiB. Defaults to the image's size. Managed only.
	DiskGiB int
	// CloudInit holds the guest's documents. Required for Managed, forbidden for External.
	CloudInit CloudInit
	// Options holds what only the provider understands; it refuses unknown keys. Defaults to none.
	// Managed only.
	Options map[string]string
	// MaxAge is the age at which an instance is replaced, less a random part of up to a tenth so that a
	// fleet does not expire at once. Defaults to 0, never. Managed only.
	MaxAge time.Duration

	// Endpoint is the proxy's address as host, host:port, or scheme://user:password@host:port. Required
	// for External, forbidden for Managed.
	Endpoint string

	// Port is the TCP port that the proxy listens on. Defaults to the endpoint's port, else DefaultPort.
	Port int
	// Scheme is the protocol spoken to the proxy. Defaults to the endpoint's scheme, else SchemeHTTP.
	Scheme Scheme
	// Auth are the credentials for the proxy. Defaults to the endpoint's user information, else none.
	Auth Credentials
	// TLS says how an HTTPS proxy is verified. Defaults to the system's roots and the endpoint's host name.
	TLS ProxyTLS

	// Labels are what a Request selects by. They are not part of the spec: changing them replaces
	// nothing. Defaults to none.
	Labels map[string]string
	// MaxLeases is how many leases the proxy bears at once. An instance that drains and its replacement have
	// as many each. When it is lowered, leases above it stay until they are released. Zero keeps the proxy
	// and leases it to nobody. Defaults to DefaultMaxLeases.
	MaxLeases *int
	// Probe says how the proxy is proven to work. Defaults to a TCP connection to the proxy.
	Probe Probe
}

// CloudInit names the documents for a guest. The bytes reach it unchanged.
type CloudInit struct {
	// Inline is the user-data document itself. Exactly one of Inline and Secret is required.
	Inline string
	// Secret is a reference to the user-data document, resolved by Config.Secrets and read again every
	// Config.SecretInterval. Exactly one of Inline and Secret is required.
	Secret string
	// Vendor is a second document that travels as vendor-data. Defaults to none.
	Vendor string
	// VendorSecret is a reference to such a document. At most one of Vendor and VendorSecret. Defaults to
	// none.
	VendorSecret string
	// InstallGuestAgent adds the script that installs the guest agent where the provider uses one.
	// Defaults to true.
	InstallGuestAgent *bool
	// Network asks for a static address. Defaults to DHCP.
	Network *provider.Network
}

// Credentials authenticate the pool to a proxy. They reach no origin, no log and no error.
type Credentials struct {
	// Username is the user name. Defaults to none.
	Username string
	// Password is the password. Defaults to none.
	Password string
	// Secret is a reference to "username:password", instead of the two above. Defaults to none.
	Secret string
}

// ProxyTLS says how the certificate of an HTTPS proxy is verified.
type ProxyTLS struct {
	// ServerName is the name the certificate must be for. Defaults to the proxy's address.
	ServerName string
	// RootsPEM are the certificate authorities to trust, in PEM. Defaults to the system's.
	RootsPEM []byte
}

// Probe says how a proxy is proven to work. Probes go through the proxy.
type Probe struct {
	// URL is requested through the proxy. Defaults to none: a TCP connection to the proxy (and the greeting
	// of SOCKS5, or the handshake of HTTPS) is proof enough.
	URL string
	// Method is the request's method. Defaults to GET.
	Method string
	// Status is the status the answer must have. Defaults to any from 200 to 399.
	Status int
	// Body must be contained in the first 64 KiB of the answer's body. Defaults to no condition.
	Body string
	// EchoURL answers with the address it is asked from; the pool learns each proxy's egress address from
	// it. Defaults to none.
	EchoURL string
	// Interval is the time between the probes of one proxy, give or take a tenth. Not shorter than
	// Timeout. Defaults to DefaultProbeInterval.
	Interval time.Duration
	// Timeout bounds one probe. Defaults to DefaultProbeTimeout, or Interval when that is shorter.
	Timeout time.Duration
	// Rise is how many probes in a row must succeed before the proxy is fit. Defaults to DefaultProbeRise.
	Rise int
	// Fall is how many probes in a row must fail before a fit proxy is unfit. Defaults to DefaultProbeFall.
	Fall int
}

// Replicate returns n copies of p whose names are format applied to 1 … n, for example "crawl-%02d". It
// returns nil when n is not positive. The copies share p's maps and slices.
func Replicate(n int, format string, p Proxy) []Proxy {
	if n <= 0 {
		return nil
	}
	proxies := make([]Proxy, n)
	for i := range proxies {
		p.Name = fmt.Sprintf(format, i+1)
		proxies[i] = p
	}
	return proxies
}

// String describes the proxy without its documents and credentials.
func (p Proxy) String() string {
	if p.Mode == External {
		return fmt.Sprintf("proxy %s (external, %s)", p.Name, redactedEndpoint(p.Endpoint))
	}
	return fmt.Sprintf("proxy %s (%s, provider %s, image %s)", p.Name, p.Mode, p.Provider, p.Image)
}

// GoString is String, so that %#v leaks nothing either.
func (p Proxy) GoString() string { return p.String() }

// LogValue is String for slog.
func (p Proxy) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String names the source of the user data and its size, never its content.
func (c CloudInit) String() string {
	if c.Secret != "" {
		return fmt.Sprintf("cloud-init{secret %q}", c.Secret)
	}
	return fmt.Sprintf("cloud-init{inline, %d bytes}", len(c.Inline))
}

// GoString is String.
func (c CloudInit) GoString() string { return c.String() }

// LogValue is String for slog.
func (c CloudInit) LogValue() slog.Value { return slog.StringValue(c.String()) }

// String says whether there are credentials, and no more.
func (c Credentials) String() string {
	switch {
	case c.Secret != "":
		return fmt.Sprintf("credentials{secret %q}", c.Secret)
	case c.Username != "" || c.Password != "":
		return "credentials{set}"
	}
	return "credentials{none}"
}

// GoString is String.
func (c Credentials) GoString() string { return c.String() }

// LogValue is String for slog.
func (c Credentials) LogValue() slog.Value { return slog.StringValue(c.String()) }

// redactedEndpoint drops user information. What does not parse is not shown at all: it may hold a password.
func redactedEndpoint(endpoint string) string {
	if endpoint == "" {
		return "no endpoint"
	}
	u, err := parseEndpoint(endpoint)
	if err != nil {
		return "unreadable endpoint"
	}
	return u.Host
}
