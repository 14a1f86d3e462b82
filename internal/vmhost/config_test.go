package vmhost

import (
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
)

// valid is a configuration without a fault.
func valid() Config {
	return Config{Entry: "home", Target: "attic", URI: "qemu:///system", Maker: "kvm", BasePrefix: "base-", Uploads: make(chan struct{}, 1)}
}

func TestEachFaultOfAConfigNamesItsField(t *testing.T) {
	image := func(change func(*Image)) func(*Config) {
		return func(c *Config) {
			i := Image{URL: "https://images.example/a.qcow2"}
			change(&i)
			c.Images = map[string]Image{"debian": i}
		}
	}
	digest := strings.Repeat("a", 64)
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.URI = "" }, `URI has scheme ""`},
		{func(c *Config) { c.URI = "qemu+tcp://a/system" }, `URI has scheme "qemu+tcp"`},
		{func(c *Config) { c.URI = "qemu+ssh://root@a/system"; c.SSH.PinnedKeys = []string{"nonsense"} }, "SSH: "},
		{func(c *Config) { c.Pool = "../other" }, `StoragePool "../other"`},
		{func(c *Config) { c.Network = "a b" }, `Network "a b"`},
		{func(c *Config) { c.Bridge = "br/0" }, `Bridge "br/0"`},
		{func(c *Config) { c.Network, c.Bridge = "n", "br0" }, `Network "n" and Bridge "br0" are both set`},
		{func(c *Config) { c.Firmware = "UEFI" }, `Firmware "UEFI"`},
		{func(c *Config) { c.Images = map[string]Image{"a/b": {URL: "https://images.example/a"}} }, `Images has "a/b"`},
		{func(c *Config) { c.Images = map[string]Image{"": {URL: "https://images.example/a"}} }, `Images has ""`},
		{image(func(i *Image) { i.URL = "" }), "Images debian: URL"},
		{image(func(i *Image) { i.URL = "file:///etc/shadow" }), "Images debian: URL"},
		{image(func(i *Image) { i.URL = "https://images.example/a#b" }), "Images debian: URL"},
		{image(func(i *Image) { i.URL = "http://images.example/a" }), "Images debian: URL is http without SHA256 or SHA512"},
		{image(func(i *Image) { i.SHA256 = digest[1:] }), "Images debian: SHA256"},
		{image(func(i *Image) { i.SHA256 = strings.ToUpper(digest) }), "Images debian: SHA256"},
		{image(func(i *Image) { i.SHA512 = digest }), "Images debian: SHA512"},
		{image(func(i *Image) { i.SHA256, i.SHA512 = digest, digest+digest }), "Images debian: SHA256 and SHA512 are both set"},
		{image(func(i *Image) { i.Format = "vmdk" }), `Images debian: Format "vmdk"`},
		{image(func(i *Image) { i.Compression = "xz" }), `Images debian: Compression "xz"`},
		{image(func(i *Image) { i.Firmware = "ofw" }), `Images debian: Firmware "ofw"`},
		{func(c *Config) { c.MaxInstances = -1 }, "MaxInstances -1"},
		{func(c *Config) { c.MaxMemoryMiB = -1 }, "MaxMemoryMiB -1"},
		{func(c *Config) { c.MaxCPUs = -1 }, "MaxCPUs -1"},
		{func(c *Config) { c.ShutdownGrace = 11 * time.Minute }, "ShutdownGrace 11m0s"},
		{func(c *Config) { c.SSH.KeepaliveInterval = -1 }, "SSH.KeepaliveInterval -1ns"},
		{func(c *Config) { c.FetchOnHost = true }, "FetchOnHost needs a host"},
	} {
		config := valid()
		c.change(&config)
		if _, err := New(config); err == nil || !strings.HasPrefix(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want %q and nothing more", err, c.want)
		}
	}
}

func TestAllFaultsOfAConfigAreJoined(t *testing.T) {
	config := valid()
	config.URI, config.Pool, config.Firmware, config.MaxCPUs = "xen:///", "a/b", "c", -4
	config.Images = map[string]Image{"UP": {Format: "x", Firmware: "y"}}
	_, err := New(config)
	for _, want := range []string{"URI ", "StoragePool ", "Firmware ", "MaxCPUs ", `Images has "UP"`, "Images UP: URL", `Format "x"`, `Firmware "y"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
}

func TestDefaultsAreFilledIn(t *testing.T) {
	config := valid()
	config.Images = map[string]Image{"a": {URL: "http://10.0.0.1/a"}, "b": {URL: "http://localhost/b", Firmware: "bios", Format: "raw"}}
	c, err := config.filled()
	if err != nil {
		t.Fatal(err)
	}
	if c.Pool != "default" || c.Network != "default" || c.Firmware != "uefi" || c.MinFreeGiB != 1 || c.HTTP == nil || c.Logger == nil {
		t.Errorf("filled: %+v", c)
	}
	if a, b := c.Images["a"], c.Images["b"]; a.Format != "qcow2" || a.Firmware != "uefi" || b.Firmware != "bios" || b.Format != "raw" {
		t.Errorf("images: %+v", c.Images)
	}
	config.Bridge, config.MinFreeGiB = "br0", -1
	if c, err := config.filled(); err != nil || c.Network != "" || c.MinFreeGiB != -1 {
		t.Errorf("with a bridge: %+v, %v", c, err)
	}
}

func TestJumpsAreLookedUpInKnownHostsAndNotInTheHostsPins(t *testing.T) {
	config := valid()
	config.URI = "qemu+ssh://far.example:2222/system"
	config.SSH = SSH{PinnedKeys: []string{"SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}, KnownHosts: []string{"/k"}, Jumps: []string{"me@gate.example"}}
	h, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	ssh := h.config.connection(h.uri).SSH
	if ssh.Host.Address != "far.example:2222" || ssh.Host.User != "root" || len(ssh.Host.PinnedKeys) != 1 {
		t.Errorf("the host: %+v", ssh.Host)
	}
	if len(ssh.Jumps) != 1 || ssh.Jumps[0].Address != "me@gate.example" || len(ssh.Jumps[0].PinnedKeys) != 0 || len(ssh.Jumps[0].KnownHosts) != 1 {
		t.Errorf("the jumps: %+v", ssh.Jumps)
	}
}

func TestAJumpWithoutAUserIsLoggedInToAsTheHost(t *testing.T) {
	config := valid()
	config.URI, config.SSH = "qemu+ssh://me@host.example/system", SSH{Jumps: []string{"gate.example", "you@inner.example"}}
	h, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if jumps := h.config.connection(h.uri).SSH.Jumps; jumps[0].User != "me" || jumps[1].User != "" {
		t.Errorf("the jumps: %+v", jumps)
	}
}

func TestEachFaultOfASpecNamesItsField(t *testing.T) {
	config := valid()
	config.Images = map[string]Image{"debian": {URL: "https://images.example/a.qcow2"}}
	config, err := config.filled()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*provider.Spec)
		want   string
	}{
		{func(s *provider.Spec) { s.Image = "" }, "Image is empty, want one of debian or a URL"},
		{func(s *provider.Spec) { s.Image = "ubuntu" }, `Image "ubuntu", want one of debian or a URL`},
		{func(s *provider.Spec) { s.Image = "ftp://images.example/a" }, "Image: URL is no http or https URL"},
		{func(s *provider.Spec) { s.Image = "http://images.example/a" }, "Image: URL is http without SHA256"},
		{func(s *provider.Spec) { s.CPUs = -1 }, "CPUs -1"},
		{func(s *provider.Spec) { s.CPUs = maxCPUs + 1 }, "CPUs 1025"},
		{func(s *provider.Spec) { s.MemoryMiB = 31 }, "MemoryMiB 31"},
		{func(s *provider.Spec) { s.MemoryMiB = -1 }, "MemoryMiB -1"},
		{func(s *provider.Spec) { s.DiskGiB = -1 }, "DiskGiB -1"},
		{func(s *provider.Spec) { s.DiskGiB = maxDiskGiB + 1 }, "DiskGiB 65537"},
		{func(s *provider.Spec) { s.Port = 65536 }, "Port 65536"},
		{func(s *provider.Spec) { s.Options = map[string]string{"nested": "yes"} }, `Options has unknown key "nested"`},
		{func(s *provider.Spec) { s.Options = map[string]string{OptionFirmware: "x"} }, `Options firmware "x"`},
		{func(s *provider.Spec) { s.Options = map[string]string{OptionSHA256: strings.Repeat("a", 64)} }, "Options sha256 and format are for images that are given as a URL"},
		{func(s *provider.Spec) {
			s.Image, s.Options = "https://images.example/b", map[string]string{OptionFormat: "iso"}
		}, `Image: Format "iso"`},
		{func(s *provider.Spec) { s.CloudInit.UserData = []byte("no header") }, "CloudInit.UserData: "},
		{func(s *provider.Spec) { s.CloudInit.VendorData = []byte("no header") }, "CloudInit.VendorData: "},
		{func(s *provider.Spec) { s.CloudInit.Network = &provider.Network{} }, "CloudInit.Network: "},
	} {
		s := provider.Spec{Image: "debian"}
		c.change(&s)
		if _, err := config.plan(s); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	_, err = config.plan(provider.Spec{CPUs: -1, MemoryMiB: 1, DiskGiB: -1, Port: -1, Options: map[string]string{"a": "", "b": ""}})
	for _, want := range []string{"Image is empty", "CPUs -1", "MemoryMiB 1", "DiskGiB -1", "Port -1", `unknown key "a"`, `unknown key "b"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q:\n%v", want, err)
		}
	}
}

func TestAPlanHasTheSpecsSizesOrTheDefaults(t *testing.T) {
	config := valid()
	config.Images = map[string]Image{"debian": {URL: "https://images.example/a.qcow2", Firmware: "bios"}}
	config, err := config.filled()
	if err != nil {
		t.Fatal(err)
	}
	p, err := config.plan(provider.Spec{Image: "debian"})
	if err != nil || p.CPUs != 1 || p.MemoryMiB != 512 || p.diskBytes != 0 || p.key != "debian" || p.firmware != "bios" {
		t.Errorf("%+v, %v", p, err)
	}
	url := "https://images.example/b.img?token=secret"
	p, err = config.plan(provider.Spec{Image: url, CPUs: 4, MemoryMiB: 64, DiskGiB: 2, Options: map[string]string{OptionFormat: "raw", OptionFirmware: "bios", OptionSHA256: strings.Repeat("b", 64)}})
	if err != nil || p.CPUs != 4 || p.MemoryMiB != 64 || p.diskBytes != 2<<30 || p.firmware != "bios" || p.Image.Format != "raw" || p.Image.SHA256 == "" {
		t.Errorf("%+v, %v", p, err)
	}
	if p.key != sum([]byte(url))[:16] {
		t.Errorf("the key of a URL is %q", p.key)
	}
}

func TestPlacementIsComparedWithTheHostsNameAndLabels(t *testing.T) {
	labels := map[string]string{"rack": "1", "disk": "ssd"}
	for _, c := range []struct {
		placement provider.Placement
		want      string
	}{
		{provider.Placement{}, ""},
		{provider.Placement{Host: "attic", Labels: map[string]string{"rack": "1"}}, ""},
		{provider.Placement{Host: "cellar"}, `Placement.Host "cellar", want "attic" or nothing`},
		{provider.Placement{Labels: map[string]string{"rack": "2"}}, "Placement.Labels rack=2, which attic has not"},
		{provider.Placement{Labels: map[string]string{"gpu": ""}}, "Placement.Labels gpu=, which attic has not"},
	} {
		err := Allowed(c.placement, "attic", labels)
		if got := errorText(err); got != c.want {
			t.Errorf("%+v: %q, want %q", c.placement, got, c.want)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
