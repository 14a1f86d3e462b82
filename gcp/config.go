package gcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"crawl.example.com/egress/provider"
)

// External says which external IPv4 address instances get.
type External string

// The kinds of external addresses.
const (
	// ExternalEphemeral gives an address that Google picks. It changes when the instance is stopped and started.
	ExternalEphemeral External = "ephemeral"
	// ExternalStatic gives one of Config.StaticAddresses.
	ExternalStatic External = "static"
	// ExternalNone gives none: the crawler must reach the network's internal addresses.
	ExternalNone External = "none"
)

// Config is one Google Cloud project used as a provider.
type Config struct {
	// Name is the entry name that a proxy's Provider field refers to. Required.
	Name string
	// Project is the project's id, as in "my-crawler-123". Required.
	Project string
	// Zones are where instances may be made, most wanted first. A zone without capacity or quota is
	// passed over in favour of the next. Required.
	Zones []string
	// DrainZones are listed and deleted from but get no new instances. Keep a zone that was in Zones
	// here until its instances are gone, else nobody sees them any more. Defaults to none.
	DrainZones []string
	// Spread starts each instance at a zone picked by its name instead of the first one, and falls back
	// from there. Defaults to false, except for specs with Placement.Group, which always spread.
	Spread bool

	// Image is the boot image of specs that name none: projects/PROJECT/global/images/NAME,
	// projects/PROJECT/global/images/family/FAMILY, or the same from "global/" on for the own project.
	// Defaults to DefaultImage.
	Image string
	// MachineType is the type of specs that ask for no size, as in "e2-small". Defaults to "e2-micro".
	MachineType string
	// DiskType is the boot disk's type. Defaults to "pd-balanced".
	DiskType string

	// Network is the VPC network: a name, or projects/PROJECT/global/networks/NAME. Defaults to
	// "default", unless Subnetwork is set.
	Network string
	// Subnetwork is a name, looked up in the region of each zone, or
	// projects/PROJECT/regions/REGION/subnetworks/NAME. Defaults to the network's own choice.
	Subnetwork string
	// Tags are network tags, which firewall rules select by. Defaults to none.
	Tags []string
	// External says which external IPv4 address instances get. Defaults to ExternalEphemeral.
	External External
	// StaticAddresses are reserved external IPv4 addresses, in any of the zones' regions. Required with
	// ExternalStatic, else it must be empty.
	StaticAddresses []netip.Addr
	// IPv6 adds an external IPv6 address; the subnetwork must be dual-stack with external IPv6. The
	// proxy is then still reached by IPv4. Defaults to false.
	IPv6 bool
	// NetworkTier is "PREMIUM" or "STANDARD". Defaults to the project's default.
	NetworkTier string

	// Spot makes instances of Google's surplus, which may be taken away at any time. Defaults to false.
	Spot bool
	// SpotTermination is what becomes of a Spot instance that is taken away: "DELETE" or "STOP".
	// Defaults to "DELETE", which leaves no disk to pay for.
	SpotTermination string
	// DeletionProtection makes instances that nobody can delete before an operator clears the
	// protection by hand, this package included. Defaults to false.
	DeletionProtection bool
	// Labels are put on every instance besides our own. Keys starting with "egress-" are ours. Defaults
	// to none.
	Labels map[string]string
	// BootstrapCloudInit installs cloud-init with apt in the first boot of an image that lacks it, as
	// Google's own Debian images do, and boots again. Defaults to false.
	BootstrapCloudInit bool

	// CredentialsFile is a credentials JSON file. Defaults to Application Default Credentials. Excludes
	// Credentials.
	CredentialsFile string
	// Credentials returns credentials JSON. It is called at the first use and again after Google
	// refused the last ones, never concurrently, with the context of the call that needs them. Defaults
	// to CredentialsFile.
	Credentials func(ctx context.Context) ([]byte, error)
	// Endpoint is the base URL of the Compute API. Defaults to Google's own.
	Endpoint string
	// WithoutAuthentication sends no credentials. Only an Endpoint that is not Google's takes that.
	// Defaults to false.
	WithoutAuthentication bool
	// RequestsPerSecond bounds the requests of this provider, as an average. Defaults to 10, below half
	// of the 1,500 a minute that Google grants a project for most groups of requests.
	RequestsPerSecond float64
	// OperationTimeout bounds the wait for a create to be decided. Defaults to 5 minutes.
	OperationTimeout time.Duration

	// Logger gets one debug record for each request and a warning for each one that failed. Defaults to
	// discarding.
	Logger *slog.Logger
}

// DefaultImage is the image of specs that name none. It has cloud-init, which Google's Debian images have not.
const DefaultImage = "projects/ubuntu-os-cloud/global/images/family/ubuntu-minimal-2404-lts-amd64"

var (
	zonePattern    = regexp.MustCompile(`^[a-z]+-[a-z]+[0-9]+-[a-z]$`)
	projectPattern = regexp.MustCompile(`^([a-z][a-z0-9.-]{0,61}:)?[a-z][-a-z0-9]{4,61}[a-z0-9]$`)
	namePattern    = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`) // of most Compute resources
	labelKey       = regexp.MustCompile(`^[a-z][-_a-z0-9]{0,62}$`)
	labelValue     = regexp.MustCompile(`^[-_a-z0-9]{0,63}$`)
	imagePattern   = regexp.MustCompile(`^(?:projects/([^/]+)/)?global/images/(family/)?([a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)$`)
	networkPattern = regexp.MustCompile(`^(?:projects/([^/]+)/global/networks/)?([a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)$`)
	subnetPattern  = regexp.MustCompile(`^(?:projects/([^/]+)/regions/([a-z]+-[a-z]+[0-9]+)/subnetworks/)?([a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)$`)
)

// filled returns c with its defaults, or every fault of it.
func (c Config) filled() (Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf("gcp: "+format, args...)) }
	if err := provider.CheckName(c.Name); err != nil {
		fault("Name %w", err)
	}
	if !projectPattern.MatchString(c.Project) {
		fault("Project %q is no project id, want one such as my-crawler-123", c.Project)
	}
	if len(c.Zones) == 0 {
		fault("Zones is empty, want at least one such as europe-west3-a")
	}
	c.Zones, c.DrainZones = slices.Clone(c.Zones), slices.Clone(c.DrainZones)
	seen := map[string]bool{}
	for _, z := range append(slices.Clone(c.Zones), c.DrainZones...) {
		if !zonePattern.MatchString(z) {
			fault("zone %q is no zone, want one such as europe-west3-a", z)
		}
		if seen[z] {
			fault("zone %q is named twice", z)
		}
		seen[z] = true
	}
	c.Image = or(c.Image, DefaultImage)
	if err := checkImage(c.Image); err != nil {
		fault("Image %w", err)
	}
	c.MachineType, c.DiskType = or(c.MachineType, "e2-micro"), or(c.DiskType, "pd-balanced")
	for field, v := range map[string]string{"MachineType": c.MachineType, "DiskType": c.DiskType} {
		if !namePattern.MatchString(v) {
			fault("%s %q is no type's name, want one such as e2-small or pd-balanced", field, v)
		}
	}
	if c.Network == "" && c.Subnetwork == "" {
		c.Network = "default"
	}
	if c.Network != "" && !networkPattern.MatchString(c.Network) {
		fault("Network %q, want a name or projects/PROJECT/global/networks/NAME", c.Network)
	}
	if c.Subnetwork != "" && !subnetPattern.MatchString(c.Subnetwork) {
		fault("Subnetwork %q, want a name or projects/PROJECT/regions/REGION/subnetworks/NAME", c.Subnetwork)
	}
	for _, t := range c.Tags {
		if !namePattern.MatchString(t) {
			fault("Tags has %q, want lower-case letters, digits and hyphens, a letter first", t)
		}
	}
	c.Tags = slices.Clone(c.Tags)
	c.External = External(or(string(c.External), string(ExternalEphemeral)))
	switch c.External {
	case ExternalEphemeral, ExternalStatic, ExternalNone:
	default:
		fault("External %q, want ephemeral, static or none", c.External)
	}
	if (c.External == ExternalStatic) != (len(c.StaticAddresses) > 0) {
		fault("StaticAddresses has %d addresses with External %q; static needs some and the others none", len(c.StaticAddresses), c.External)
	}
	c.StaticAddresses = slices.Clone(c.StaticAddresses)
	twice := map[netip.Addr]bool{}
	for _, a := range c.StaticAddresses {
		if !a.Is4() || twice[a] {
			fault("StaticAddresses has %s, want each IPv4 address once", a)
		}
		twice[a] = true
	}
	if !slices.Contains([]string{"", "PREMIUM", "STANDARD"}, c.NetworkTier) {
		fault("NetworkTier %q, want PREMIUM or STANDARD", c.NetworkTier)
	}
	c.SpotTermination = or(c.SpotTermination, "DELETE")
	if c.SpotTermination != "DELETE" && c.SpotTermination != "STOP" {
		fault("SpotTermination %q, want DELETE or STOP", c.SpotTermination)
	}
	labels := map[string]string{}
	for k, v := range c.Labels {
		labels[k] = v
		if !labelKey.MatchString(k) || strings.HasPrefix(k, labelPrefix) || !labelValue.MatchString(v) {
			fault("Labels has %q: %q, want at most 63 lower-case letters, digits, _ and -, and a key that does not start with %s", k, v, labelPrefix)
		}
	}
	c.Labels = labels
	// Google allows 64 labels on a resource; five are ours.
	if len(labels) > 64-5 {
		fault("Labels has %d labels, want at most %d", len(labels), 64-5)
	}
	if c.CredentialsFile != "" && c.Credentials != nil {
		fault("CredentialsFile and Credentials are both set, want one")
	}
	if c.Endpoint != "" {
		if u, err := url.Parse(c.Endpoint); err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" || u.User != nil {
			fault("Endpoint is no http or https URL without credentials")
		} else if u.Scheme == "http" && !c.WithoutAuthentication {
			fault("Endpoint %q would carry credentials in clear, want https or WithoutAuthentication", c.Endpoint)
		}
	}
	if c.WithoutAuthentication && c.Endpoint == "" {
		fault("WithoutAuthentication needs an Endpoint: Google refuses such requests")
	}
	if c.RequestsPerSecond < 0 || c.OperationTimeout < 0 {
		fault("RequestsPerSecond %v and OperationTimeout %s must not be negative", c.RequestsPerSecond, c.OperationTimeout)
	}
	if c.RequestsPerSecond == 0 {
		c.RequestsPerSecond = 10
	}
	if c.OperationTimeout == 0 {
		c.OperationTimeout = 5 * time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(faults...)
}

func checkImage(image string) error {
	m := imagePattern.FindStringSubmatch(image)
	if m == nil || m[1] != "" && !projectPattern.MatchString(m[1]) {
		return fmt.Errorf("%q, want projects/PROJECT/global/images/NAME or projects/PROJECT/global/images/family/FAMILY", image)
	}
	return nil
}

func or(value, instead string) string {
	if value == "" {
		return instead
	}
	return value
}

// regionOf returns the region of a valid zone.
func regionOf(zone string) string { return zone[:strings.LastIndexByte(zone, '-')] }
