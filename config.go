package egress

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"crawl.example.com/egress/internal/checks"
	"crawl.example.com/egress/provider"
)

// Defaults of a Config.
const (
	DefaultSurge          = 1
	DefaultMaxUnavailable = 1
	DefaultMaxParallel    = 10
	DefaultDrainDeadline  = 5 * time.Minute
	DefaultBootTimeout    = 10 * time.Minute
	DefaultUnhealthyGrace = 2 * time.Minute
	DefaultStoppedGrace   = 30 * time.Second
	DefaultLostGrace      = 2 * time.Minute
	DefaultOrphanGrace    = 2 * time.Minute
	DefaultSuspectDelay   = 15 * time.Minute
	DefaultListInterval   = 10 * time.Second
	DefaultListTimeout    = 30 * time.Second
	DefaultCreateTimeout  = 30 * time.Minute
	DefaultCallTimeout    = time.Minute
	DefaultBackoffMin     = time.Second
	DefaultBackoffMax     = 5 * time.Minute
	DefaultSecretInterval = time.Minute
	DefaultCheckInterval  = time.Minute
	DefaultProbeParallel  = 256
)

// Config says how a Pool works. It is copied by New.
type Config struct {
	// Name is the pool's name and the owner mark on every instance. Two pools with one name on one backend
	// would fight over the instances. A lower-case DNS label; with a proxy's name at most
	// [provider.MaxNames] characters. Required.
	Name string
	// Providers are the backends, found by their Name. The pool closes those that are an io.Closer when
	// it is closed; see [provider.Shared]. Defaults to none, which leaves external proxies.
	Providers []provider.Provider
	// Secrets resolves the references in proxies. Required when a proxy has a reference.
	Secrets Secrets
	// HashKey keys the stored hash of a spec that was made from secrets, so that nobody who can read
	// the backend can confirm a guess at them. Changing it replaces those instances. Defaults to a key
	// that is derived slowly (PBKDF2, 100,000 rounds) from the secret documents themselves and Name,
	// which makes each guess dear, but not impossible for a document that is guessable as a whole.
	HashKey []byte
	// Logger gets one line for each thing that an operator may want to know. Defaults to discarding.
	Logger *slog.Logger
	// Observer is called with every event, from one goroutine, without any lock and in order. A slow one
	// delays other events, which are kept in memory until then, and nothing else. Defaults to nothing.
	Observer func(Event)

	// Surge is how many instances each provider may have above the number wanted of it, to make a
	// replacement before the old instance goes. Defaults to DefaultSurge.
	Surge *int
	// MaxUnavailable is how many proxies may be without a working instance because the pool takes old ones
	// away before the new ones are made. It does so only where there is no room for a surge. Surge and
	// MaxUnavailable must not both be 0. Defaults to DefaultMaxUnavailable.
	MaxUnavailable *int
	// MaxParallel is how many instances of each provider may be on their way from create to ready.
	// Defaults to DefaultMaxParallel.
	MaxParallel int
	// DrainDeadline is how long leases on an instance that goes may be held until they are revoked.
	// Defaults to DefaultDrainDeadline.
	DrainDeadline time.Duration
	// BootTimeout is how long an instance may take from create to its first good probe before it is
	// deleted and made anew. Defaults to DefaultBootTimeout.
	BootTimeout time.Duration
	// UnhealthyGrace is how long the probes of a proxy may fail before its instance is replaced.
	// Defaults to DefaultUnhealthyGrace.
	UnhealthyGrace time.Duration
	// StoppedGrace is how long an instance may be seen switched off before it is replaced. Defaults to
	// DefaultStoppedGrace.
	StoppedGrace time.Duration
	// LostGrace is how long a host may be out of reach before what was on it, and does not work, is
	// replaced elsewhere. Defaults to DefaultLostGrace.
	LostGrace time.Duration
	// OrphanGrace is how long an instance of this pool's that no proxy wants is left alone after it was
	// first seen. Instances of proxies that Apply removed need no grace. Defaults to
	// DefaultOrphanGrace.
	OrphanGrace time.Duration
	// SuspectDelay is how long nothing unhealthy is replaced after most proxies began to fail at once;
	// after it one is replaced at a time. Defaults to DefaultSuspectDelay.
	SuspectDelay time.Duration
	// ListInterval is the time between two lists of one provider. Defaults to DefaultListInterval.
	ListInterval time.Duration
	// ListTimeout bounds a list. Defaults to DefaultListTimeout.
	ListTimeout time.Duration
	// CreateTimeout bounds a create, which may have to bring an image to a host, and a delete, which
	// may have to wait for a guest. Defaults to DefaultCreateTimeout.
	CreateTimeout time.Duration
	// CallTimeout bounds any other call to a provider. Defaults to DefaultCallTimeout.
	CallTimeout time.Duration
	// BackoffMin and BackoffMax bound the wait after failures, which doubles with each and is drawn at
	// random from its whole length. Default to DefaultBackoffMin and DefaultBackoffMax.
	BackoffMin, BackoffMax time.Duration
	// SecretInterval is the time between two readings of the secrets. Defaults to DefaultSecretInterval.
	SecretInterval time.Duration
	// CheckInterval is the time between two rounds of provider checks: 0 turns them off, else at least
	// 10 s. Defaults to DefaultCheckInterval.
	CheckInterval *time.Duration
	// CheckTimeout bounds a round; not above CheckInterval. Defaults to 15 s or CheckInterval,
	// whichever is shorter.
	CheckTimeout time.Duration
	// ProbeParallel is how many probes may be under way at once. Defaults to DefaultProbeParallel.
	ProbeParallel int
	// DestroyOnClose makes Close delete all instances. Defaults to false: they live on and are adopted
	// by the next pool of this name.
	DestroyOnClose bool
}

// String names the pool and shows nothing else: a Config may hold a key.
func (c Config) String() string { return fmt.Sprintf("egress.Config{Name: %q}", c.Name) }

// GoString is String.
func (c Config) GoString() string { return c.String() }

// LogValue is String for slog.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// faults collects what is wrong with an input, so that all of it is said at once.
type faults struct {
	prefix string
	list   []error
}

func (f *faults) add(format string, args ...any) {
	f.list = append(f.list, fmt.Errorf(f.prefix+format, args...))
}

func (f *faults) err() error { return errors.Join(f.list...) }

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

func pointerOr[T any](p *T, def T) *T {
	if p != nil {
		def = *p
	}
	return &def
}

// withDefaults returns a copy with every default filled in.
func (c Config) withDefaults() Config {
	c.Providers = slices.Clone(c.Providers)
	c.HashKey = slices.Clone(c.HashKey)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Surge = pointerOr(c.Surge, DefaultSurge)
	c.MaxUnavailable = pointerOr(c.MaxUnavailable, DefaultMaxUnavailable)
	c.CheckInterval = pointerOr(c.CheckInterval, DefaultCheckInterval)
	c.MaxParallel = orDefault(c.MaxParallel, DefaultMaxParallel)
	c.ProbeParallel = orDefault(c.ProbeParallel, DefaultProbeParallel)
	c.DrainDeadline = orDefault(c.DrainDeadline, DefaultDrainDeadline)
	c.BootTimeout = orDefault(c.BootTimeout, DefaultBootTimeout)
	c.UnhealthyGrace = orDefault(c.UnhealthyGrace, DefaultUnhealthyGrace)
	c.StoppedGrace = orDefault(c.StoppedGrace, DefaultStoppedGrace)
	c.LostGrace = orDefault(c.LostGrace, DefaultLostGrace)
	c.OrphanGrace = orDefault(c.OrphanGrace, DefaultOrphanGrace)
	c.SuspectDelay = orDefault(c.SuspectDelay, DefaultSuspectDelay)
	c.ListInterval = orDefault(c.ListInterval, DefaultListInterval)
	c.ListTimeout = orDefault(c.ListTimeout, DefaultListTimeout)
	c.CreateTimeout = orDefault(c.CreateTimeout, DefaultCreateTimeout)
	c.CallTimeout = orDefault(c.CallTimeout, DefaultCallTimeout)
	c.BackoffMin = orDefault(c.BackoffMin, DefaultBackoffMin)
	c.BackoffMax = orDefault(c.BackoffMax, max(DefaultBackoffMax, c.BackoffMin))
	c.SecretInterval = orDefault(c.SecretInterval, DefaultSecretInterval)
	return c
}

// validate checks a config with defaults.
func (c *Config) validate() error {
	f := faults{prefix: "egress: config: "}
	if err := provider.CheckName(c.Name); err != nil {
		f.add("Name %v", err)
	} else if len(c.Name) > provider.MaxNames-1 {
		f.add("Name has %d characters, want at most %d to leave room for a proxy's", len(c.Name), provider.MaxNames-1)
	}
	seen := map[string]bool{}
	for i, p := range c.Providers {
		if p == nil {
			f.add("Providers[%d] is nil", i)
			continue
		}
		name := p.Name()
		if name == "" {
			f.add("Providers[%d] has no name", i)
		}
		if seen[name] {
			f.add("Providers[%d] is the second one named %q", i, name)
		}
		seen[name] = true
	}
	for _, n := range []struct {
		name  string
		value int
		least int
	}{
		{"Surge", *c.Surge, 0}, {"MaxUnavailable", *c.MaxUnavailable, 0},
		{"MaxParallel", c.MaxParallel, 1}, {"ProbeParallel", c.ProbeParallel, 1},
	} {
		if n.value < n.least {
			f.add("%s is %d, want at least %d", n.name, n.value, n.least)
		}
	}
	if *c.Surge == 0 && *c.MaxUnavailable == 0 {
		f.add("Surge and MaxUnavailable are both 0, so nothing could ever be replaced; want one of them above 0")
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"DrainDeadline", c.DrainDeadline}, {"BootTimeout", c.BootTimeout}, {"UnhealthyGrace", c.UnhealthyGrace},
		{"StoppedGrace", c.StoppedGrace}, {"LostGrace", c.LostGrace}, {"OrphanGrace", c.OrphanGrace},
		{"SuspectDelay", c.SuspectDelay}, {"ListInterval", c.ListInterval}, {"ListTimeout", c.ListTimeout},
		{"CreateTimeout", c.CreateTimeout}, {"CallTimeout", c.CallTimeout}, {"BackoffMin", c.BackoffMin},
		{"BackoffMax", c.BackoffMax}, {"SecretInterval", c.SecretInterval},
	} {
		if d.value < 0 {
			f.add("%s is %s, want a positive duration", d.name, d.value)
		}
	}
	if c.BackoffMax < c.BackoffMin {
		f.add("BackoffMax is %s, want at least BackoffMin, which is %s", c.BackoffMax, c.BackoffMin)
	}
	if every := *c.CheckInterval; every != 0 && every < checks.MinInterval {
		f.add("CheckInterval is %s, want 0 for none or at least %s", every, checks.MinInterval)
	} else if c.CheckTimeout < 0 || every > 0 && c.CheckTimeout > every {
		f.add("CheckTimeout is %s, want 0 or at most CheckInterval, which is %s", c.CheckTimeout, every)
	}
	return f.err()
}

// declaration is a Proxy that was checked, with its defaults filled in and its endpoint taken apart.
type declaration struct {
	Proxy
	faulty    bool   // something is wrong with it
	host      string // of an external proxy
	maxLeases int
	provider  int // index into Config.Providers; -1 for External
}

// declare checks proxies and fills in their defaults. The error holds every fault of every one of them.
func (c *Config) declare(proxies []Proxy) ([]declaration, error) {
	f := faults{prefix: "egress: "}
	seen := map[string]bool{}
	shared := map[string]map[string]string{}
	all := make([]declaration, 0, len(proxies))
	for i, p := range proxies {
		f.prefix = fmt.Sprintf("egress: proxy %q: ", p.Name)
		if err := provider.CheckName(p.Name); err != nil {
			f.prefix = fmt.Sprintf("egress: proxies[%d]: ", i)
			f.add("Name %v", err)
		} else if n := len(p.Name) + len(c.Name); n > provider.MaxNames {
			f.add("Name and the pool's name have %d characters, want at most %d", n, provider.MaxNames)
		}
		if seen[p.Name] && p.Name != "" {
			f.add("Name is used twice, want unique names")
		}
		seen[p.Name] = true
		before := len(f.list)
		d := c.declareOne(&f, p)
		d.Labels = shareLabels(shared, p.Labels)
		d.faulty = len(f.list) > before
		all = append(all, d)
	}
	return all, f.err()
}

// shareLabels returns a copy of labels, the same one for equal labels: in a large fleet most are.
func shareLabels(shared map[string]map[string]string, labels map[string]string) map[string]string {
	if len(labels) == 0 {
		return nil
	}
	var key strings.Builder
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&key, "%q=%q ", k, labels[k])
	}
	if same, ok := shared[key.String()]; ok {
		return same
	}
	shared[key.String()] = maps.Clone(labels)
	return shared[key.String()]
}

func (c *Config) declareOne(f *faults, p Proxy) declaration {
	d := declaration{Proxy: p, provider: -1}
	d.Options = maps.Clone(p.Options)
	d.TLS.RootsPEM = slices.Clone(p.TLS.RootsPEM)
	if n := p.CloudInit.Network; n != nil {
		d.CloudInit.Network = &provider.Network{
			Addresses: slices.Clone(n.Addresses), Gateways: slices.Clone(n.Gateways),
			Nameservers: slices.Clone(n.Nameservers), SearchDomains: slices.Clone(n.SearchDomains),
		}
	}
	if install := p.CloudInit.InstallGuestAgent; install != nil {
		d.CloudInit.InstallGuestAgent = pointerOr(install, true)
	}
	d.Placement.Labels = maps.Clone(p.Placement.Labels)
	switch p.Mode {
	case Managed:
		c.declareManaged(f, &d)
	case External:
		declareExternal(f, &d)
	default:
		f.add("Mode is %d, want Managed or External", int(p.Mode))
	}
	d.Scheme = orDefault(d.Scheme, SchemeHTTP)
	if d.Scheme != SchemeHTTP && d.Scheme != SchemeHTTPS && d.Scheme != SchemeSOCKS5 {
		f.add("Scheme is %q, want %s, %s or %s", d.Scheme, SchemeHTTP, SchemeHTTPS, SchemeSOCKS5)
	}
	d.Port = orDefault(d.Port, DefaultPort)
	if d.Port < 1 || d.Port > 65535 {
		f.add("Port is %d, want 1 to 65535", d.Port)
	}
	if d.Scheme == SchemeSOCKS5 && (len(d.Auth.Username) > 255 || len(d.Auth.Password) > 255) {
		f.add("Auth is longer than the 255 bytes that SOCKS5 has room for")
	}
	if strings.Contains(d.Auth.Username, ":") && d.Scheme != SchemeSOCKS5 {
		f.add("Auth.Username has a colon, which ends the user name in HTTP's Basic authentication")
	}
	if d.Auth.Secret != "" {
		if d.Auth.Username != "" || d.Auth.Password != "" {
			f.add("Auth has both a Secret and a user name or password, want one of them")
		}
		c.checkRef(f, "Auth.Secret", d.Auth.Secret)
	}
	if len(d.TLS.RootsPEM) > 0 && !x509.NewCertPool().AppendCertsFromPEM(d.TLS.RootsPEM) {
		f.add("TLS.RootsPEM holds no certificate, want one or more in PEM")
	}
	d.maxLeases = DefaultMaxLeases
	if p.MaxLeases != nil {
		d.maxLeases = *p.MaxLeases
	}
	if d.maxLeases < 0 {
		f.add("MaxLeases is %d, want 0 or more", d.maxLeases)
	}
	for k := range d.Labels {
		if k == "" {
			f.add("Labels has an empty key")
		}
	}
	declareProbe(f, &d.Probe)
	return d
}

func (c *Config) declareManaged(f *faults, d *declaration) {
	if d.Endpoint != "" {
		f.add("Endpoint is set, want it empty: a managed proxy's address is found out")
	}
	switch d.provider = slices.IndexFunc(c.Providers, func(p provider.Provider) bool { return p.Name() == d.Provider }); {
	case d.Provider == "":
		f.add("Provider is empty, want one of %s", c.providerNames())
	case d.provider < 0:
		f.add("Provider %q is unknown, want one of %s", d.Provider, c.providerNames())
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"CPUs", d.CPUs}, {"MemoryMiB", d.MemoryMiB}, {"DiskGiB", d.DiskGiB}} {
		if n.value < 0 {
			f.add("%s is %d, want 0 for the default or more", n.name, n.value)
		}
	}
	if d.MaxAge < 0 {
		f.add("MaxAge is %s, want 0 for never or more", d.MaxAge)
	}
	ci := &d.CloudInit
	if (ci.Inline == "") == (ci.Secret == "") {
		f.add("CloudInit has %s, want exactly one of Inline and Secret", map[bool]string{true: "neither source", false: "both sources"}[ci.Inline == ""])
	}
	if ci.Vendor != "" && ci.VendorSecret != "" {
		f.add("CloudInit has both Vendor and VendorSecret, want at most one of them")
	}
	if ci.Secret != "" {
		c.checkRef(f, "CloudInit.Secret", ci.Secret)
	}
	if ci.VendorSecret != "" {
		c.checkRef(f, "CloudInit.VendorSecret", ci.VendorSecret)
	}
}

func (c *Config) checkRef(f *faults, field, ref string) {
	if err := checkSecretRef(ref); err != nil {
		f.add("%s: %v", field, err)
	} else if c.Secrets == nil {
		f.add("%s is %q, but Config.Secrets is nil", field, ref)
	}
}

func (c *Config) providerNames() string {
	names := make([]string, 0, len(c.Providers))
	for _, p := range c.Providers {
		names = append(names, strconv.Quote(p.Name()))
	}
	if len(names) == 0 {
		return "Config.Providers, which is empty"
	}
	return strings.Join(names, ", ")
}

// declareExternal takes the endpoint apart. No error shows the endpoint itself, which may hold a password.
func declareExternal(f *faults, d *declaration) {
	p := &d.Proxy
	for _, x := range []struct {
		name string
		set  bool
	}{
		{"Provider", p.Provider != ""}, {"Image", p.Image != ""}, {"CPUs", p.CPUs != 0}, {"MemoryMiB", p.MemoryMiB != 0},
		{"DiskGiB", p.DiskGiB != 0}, {"CloudInit", p.CloudInit != CloudInit{}}, {"Options", len(p.Options) > 0},
		{"MaxAge", p.MaxAge != 0}, {"Placement", p.Placement.Host != "" || p.Placement.Group != "" || len(p.Placement.Labels) > 0},
	} {
		if x.set {
			f.add("%s is set, want it empty: an external proxy is run by somebody else", x.name)
		}
	}
	if p.Endpoint == "" {
		f.add("Endpoint is empty, want host, host:port or scheme://user:password@host:port")
		return
	}
	u, err := parseEndpoint(p.Endpoint)
	if err != nil {
		f.add("Endpoint %v, want host, host:port or scheme://user:password@host:port", err)
		return
	}
	d.host = u.Hostname()
	if u.Scheme != "" {
		if p.Scheme != "" && string(p.Scheme) != u.Scheme {
			f.add("Scheme is %q and Endpoint says %q, want the same or one of them empty", p.Scheme, u.Scheme)
		}
		d.Scheme = Scheme(u.Scheme)
	}
	if text := u.Port(); text != "" {
		port, err := strconv.Atoi(text)
		switch {
		case err != nil || port < 1 || port > 65535:
			f.add("Endpoint has port %q, want 1 to 65535", text)
		case p.Port != 0 && p.Port != port:
			f.add("Port is %d and Endpoint says %d, want the same or one of them empty", p.Port, port)
		default:
			d.Port = port
		}
	}
	if u.User != nil {
		if p.Auth != (Credentials{}) {
			f.add("Auth is set and Endpoint has credentials too, want one of them")
		}
		password, _ := u.User.Password()
		d.Auth = Credentials{Username: u.User.Username(), Password: password}
	}
}

// parseEndpoint reads host, host:port or a URL. Its errors never show the text.
func parseEndpoint(endpoint string) (*url.URL, error) {
	if ip, err := netip.ParseAddr(endpoint); err == nil {
		host := ip.String()
		if ip.Is6() {
			host = "[" + host + "]"
		}
		return &url.URL{Host: host}, nil
	}
	text := endpoint
	if !strings.Contains(text, "://") {
		text = "//" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, errors.New("can't be read")
	case u.Hostname() == "":
		return nil, errors.New("has no host")
	case u.Path != "" && u.Path != "/", u.RawQuery != "", u.Fragment != "":
		return nil, errors.New("has more than a host and a port")
	case strings.ContainsAny(u.Hostname(), " \t\r\n"):
		return nil, errors.New("has a blank in its host")
	}
	if _, _, err := net.SplitHostPort(u.Host); err != nil && strings.Count(u.Host, ":") > 0 && !strings.HasSuffix(u.Host, "]") {
		return nil, errors.New("has a host that can't be read")
	}
	return u, nil
}

func declareProbe(f *faults, p *Probe) {
	checkURL := func(field, text string) {
		if text == "" {
			return
		}
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			f.add("%s is no http or https URL with a host", field)
		}
	}
	checkURL("Probe.URL", p.URL)
	checkURL("Probe.EchoURL", p.EchoURL)
	if p.URL == "" && (p.Method != "" || p.Status != 0 || p.Body != "") {
		f.add("Probe has a condition on an answer but no URL to ask")
	}
	for _, r := range p.Method {
		if r < 'A' || r > 'Z' {
			f.add("Probe.Method is %q, want upper-case letters such as GET", p.Method)
			break
		}
	}
	if p.Status != 0 && (p.Status < 100 || p.Status > 599) {
		f.add("Probe.Status is %d, want 100 to 599, or 0 for any from 200 to 399", p.Status)
	}
	if p.Interval < 0 || p.Timeout < 0 {
		f.add("Probe.Interval is %s and Probe.Timeout %s, want no negative durations", p.Interval, p.Timeout)
	}
	p.Interval = orDefault(p.Interval, DefaultProbeInterval)
	p.Timeout = orDefault(p.Timeout, min(DefaultProbeTimeout, p.Interval))
	if p.Interval < p.Timeout {
		f.add("Probe.Interval is %s, want at least Probe.Timeout, which is %s", p.Interval, p.Timeout)
	}
	if p.Rise < 0 || p.Fall < 0 {
		f.add("Probe.Rise is %d and Probe.Fall %d, want 0 for the default or more", p.Rise, p.Fall)
	}
	p.Rise = orDefault(p.Rise, DefaultProbeRise)
	p.Fall = orDefault(p.Fall, DefaultProbeFall)
}
