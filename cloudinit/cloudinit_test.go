package cloudinit

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/mail"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kdomanski/iso9660"
)

var update = flag.Bool("update", false, "rewrite testdata")

func zip(t testing.TB, s string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, s)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

const archive = "Content-Type: multipart/mixed; boundary=\"b\"\nMIME-Version: 1.0\n\n--b\nContent-Type: text/cloud-config\n" +
	"Content-Transfer-Encoding: base64\n\nI2Nsb3VkLWNvbmZpZwo=\n--b--\n"

// accepted are documents in every format.
func accepted(t testing.TB) map[string]string {
	return map[string]string{
		"cloud-config":             "#cloud-config\npackages: [squid]\n",
		"cloud-config in capitals": "#Cloud-Config\n{}\n",
		"cloud-config with CRLF":   "#cloud-config\r\nhostname: x\r\n",
		"leading blank lines":      "\n \n#cloud-config\n{}\n",
		"umlauts":                  "#cloud-config\n# schön 日本\n{}\n",
		"script":                   "#!/bin/sh\ntrue\n",
		"boothook":                 "#cloud-boothook\n#!/bin/sh\ntrue\n",
		"include":                  "#include\nhttp://192.0.2.1/x\n",
		"part handler":             "#part-handler\ndef list_types(): return []\n",
		"archive":                  "#cloud-config-archive\n- \"#cloud-config\\n{}\"\n",
		"jinja config":             "## template: jinja\n#cloud-config\nhostname: {{ v1.instance_id }}\n",
		"jinja script":             "## template: jinja\n#!/bin/sh\necho {{ v1.instance_id }}\n",
		"MIME":                     archive,
		"gzip":                     zip(t, "#cloud-config\n{}\n"),
		"gzip of MIME":             zip(t, archive),
		"MIME far down":            "#cloud-config\n" + strings.Repeat("# padding\n", 500) + "# MIME-Version: ü\n",
		"the words MIME in ASCII":  "#cloud-config\n# not MIME-Version: 1.0\n",
	}
}

func TestEveryFormatIsAccepted(t *testing.T) {
	for name, doc := range accepted(t) {
		if err := CheckUserData([]byte(doc), 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWhatCloudInitWouldLoseIsRefusedWithItsProblem(t *testing.T) {
	for name, c := range map[string]struct {
		doc     string
		limit   int
		problem Problem
	}{
		"nothing":               {"", 0, ProblemEmpty},
		"white space":           {" \r\n\t\n", 0, ProblemEmpty},
		"gzip of nothing":       {zip(t, "\n"), 0, ProblemEmpty},
		"too large":             {"#cloud-config\n", 10, ProblemTooLarge},
		"UTF-8 mark":            {"\xef\xbb\xbf#cloud-config\n", 0, ProblemBOM},
		"UTF-16 mark":           {"\xff\xfe#\x00", 0, ProblemBOM},
		"mark in gzip":          {zip(t, "\xef\xbb\xbf#cloud-config\n"), 0, ProblemBOM},
		"no header":             {"packages: [squid]\n", 0, ProblemNoHeader},
		"a comment first":       {"# my config\n#cloud-config\n", 0, ProblemNoHeader},
		"jinja of nothing":      {"## template: jinja\nhello\n", 0, ProblemNoHeader},
		"jinja alone":           {"## template: jinja", 0, ProblemNoHeader},
		"no header in gzip":     {zip(t, "planted: x\n"), 0, ProblemNoHeader},
		"MIME and umlauts":      {"#cloud-config\n# MIME-Version: 1.0\n# schön\n", 0, ProblemMIMENonASCII},
		"MIME and umlauts late": {"#cloud-config\n# mime-version: 1.0\n" + strings.Repeat("x: y\n", 2000) + "# ü\n", 0, ProblemMIMENonASCII},
		"cut gzip":              {zip(t, "#cloud-config\n")[:20], 0, ProblemGzip},
		"no gzip":               {"\x1f\x8bplanted", 0, ProblemGzip},
		"a bomb":                {zip(t, "#cloud-config\n"+strings.Repeat(" ", maxUnpacked)), 0, ProblemGzip},
	} {
		err := CheckUserData([]byte(c.doc), c.limit)
		refused, ok := errors.AsType[*DocumentError](err)
		if !ok || refused.Problem != c.problem || refused.Detail == "" {
			t.Errorf("%s: got %v, want %s", name, err, c.problem)
		}
		if err != nil && strings.Contains(err.Error(), "planted") {
			t.Errorf("%s: the error shows the document: %v", name, err)
		}
	}
}

func TestVendorDataThatIsSwitchedOffIsWarnedOf(t *testing.T) {
	for doc, want := range map[string]int{
		"#cloud-config\nvendor_data: {enabled: false}\n":                           1,
		"#cloud-config\nvendor_data: { prefix: x, enabled: 'no' }\n":               1,
		"#cloud-config\nvendor_data:\n  enabled: false\n":                          1,
		"#cloud-config\r\nvendor_data: # off\r\n  prefix: x\r\n  enabled: no\r\n":  1,
		"#cloud-config\nvendor_data: {enabled: true}\n":                            0,
		"#cloud-config\nvendor_data:\n  enabled: true\n":                           0,
		"#cloud-config\nother:\n  vendor_data: {enabled: false}\n":                 0,
		"#cloud-config\nvendor_data:\n  enabled: true\nother:\n  enabled: false\n": 0,
		"#cloud-config\n# vendor_data: {enabled: false}\n":                         0,
		"#!/bin/sh\nvendor_data: {enabled: false}\n":                               0,
		zip(t, "#cloud-config\nvendor_data: {enabled: false}\n"):                   1,
		archive: 0, "": 0, "\x1f\x8b": 0,
	} {
		if got := Warnings([]byte(doc)); len(got) != want {
			t.Errorf("%q: got %v", doc, got)
		}
	}
}

func TestTheGuestAgentScriptIsPlain(t *testing.T) {
	script := string(GuestAgentScript())
	if !strings.HasPrefix(script, "#!/bin/sh\n") || strings.Contains(strings.ToLower(script), "mime-version:") || strings.Contains(script, "\r") {
		t.Error("not a plain script")
	}
	for i := range len(script) {
		if script[i] >= 0x80 {
			t.Fatalf("byte %d is not ASCII", i)
		}
	}
	if err := CheckUserData([]byte(script), 0); err != nil {
		t.Error(err)
	}
	a := GuestAgentScript()
	a[0] = 'x'
	if GuestAgentScript()[0] != '#' {
		t.Error("a caller can change the script")
	}
}

// parts reads what VendorData made with Go's own MIME reader.
func parts(t *testing.T, doc []byte) map[string]string {
	t.Helper()
	m, err := mail.ReadMessage(bytes.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	var read func(contentType string, r io.Reader)
	read = func(contentType string, r io.Reader) {
		_, params, err := mime.ParseMediaType(contentType)
		if err != nil {
			t.Fatal(err)
		}
		mr := multipart.NewReader(r, params["boundary"])
		for {
			p, err := mr.NextRawPart()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			kind, _, err := mime.ParseMediaType(p.Header.Get("Content-Type"))
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(kind, "multipart/") {
				read(p.Header.Get("Content-Type"), p)
				continue
			}
			body, err := io.ReadAll(base64.NewDecoder(base64.StdEncoding, p))
			if err != nil {
				t.Fatal(err)
			}
			all[kind] = string(body)
		}
	}
	read(m.Header.Get("Content-Type"), m.Body)
	return all
}

func TestVendorDataIsAScriptAloneOrAnArchiveOfBoth(t *testing.T) {
	none, err := VendorData(Vendor{})
	if err != nil || none != nil {
		t.Errorf("nothing gives %q, %v", none, err)
	}
	alone, err := VendorData(Vendor{InstallGuestAgent: true})
	if err != nil || !bytes.Equal(alone, agentScript) {
		t.Errorf("the script alone gives %q, %v", alone, err)
	}
	for name, doc := range accepted(t) {
		own, err := VendorData(Vendor{Document: []byte(doc)})
		if err != nil || string(own) != doc {
			t.Errorf("%s alone: %v", name, err)
		}
		both, err := VendorData(Vendor{Document: []byte(doc), InstallGuestAgent: true})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		again, _ := VendorData(Vendor{Document: []byte(doc), InstallGuestAgent: true})
		if !bytes.Equal(both, again) {
			t.Errorf("%s: not the same twice", name)
		}
		if err := CheckUserData(both, 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := parts(t, both)
		if got["text/x-shellscript"] != string(agentScript) {
			t.Errorf("%s: the script is not in it", name)
		}
		plain, _ := unpack([]byte(doc))
		if startsWithHeader(plain) {
			if got["text/cloud-config"] != "#cloud-config\n" {
				t.Errorf("%s: got %v", name, got)
			}
		} else if got["text/plain"] != string(plain) {
			t.Errorf("%s: got %q", name, got["text/plain"])
		}
	}
	if _, err := VendorData(Vendor{Document: []byte("no header"), InstallGuestAgent: true}); !errors.As(err, new(*DocumentError)) {
		t.Errorf("a bad document: %v", err)
	}
}

func TestMetaDataNamesTheGuest(t *testing.T) {
	id := InstanceID("crawl--crawl-01--3", "abcdefghijklmnopqrstuvwxyz")
	got, err := MetaData{InstanceID: id, LocalHostname: "crawl--crawl-01--3"}.Render()
	if want := "instance-id: \"crawl--crawl-01--3.abcdefghijklmnop\"\nlocal-hostname: \"crawl--crawl-01--3\"\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v", got, err)
	}
	if InstanceID("a", "x") == InstanceID("a", "y") {
		t.Error("another spec gives the same id")
	}
	for _, m := range []MetaData{{}, {InstanceID: "a"}, {LocalHostname: "a"}, {InstanceID: "a\nb: c", LocalHostname: "a"}, {InstanceID: "a", LocalHostname: "a.b"}, {InstanceID: "a", LocalHostname: "-a"}, {InstanceID: "a", LocalHostname: strings.Repeat("a", 64)}} {
		if got, err := m.Render(); err == nil {
			t.Errorf("%+v gives %q", m, got)
		}
	}
}

func network() Network {
	return Network{
		Addresses:     []netip.Prefix{netip.MustParsePrefix("192.0.2.5/24"), netip.MustParsePrefix("2001:db8::5/64")},
		Gateways:      []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fe80::1")},
		Nameservers:   []netip.Addr{netip.MustParseAddr("192.0.2.53")},
		SearchDomains: []string{"crawl.example"},
	}
}

var mac = net.HardwareAddr{0x52, 0x54, 0, 1, 2, 3}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s has changed:\n%s", name, got)
	}
}

func TestTheNetworkConfigIsVersionTwo(t *testing.T) {
	got, err := network().Render(mac)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "network-config.golden", got)
}

func TestAnImpossibleNetworkIsRefused(t *testing.T) {
	for want, change := range map[string]func(*Network){
		"Addresses is empty":            func(n *Network) { n.Addresses = nil },
		"want an address and a prefix":  func(n *Network) { n.Addresses = []netip.Prefix{{}} },
		"which no host can have":        func(n *Network) { n.Addresses[0] = netip.MustParsePrefix("224.0.0.1/24") },
		"the network's own address":     func(n *Network) { n.Addresses[0] = netip.MustParsePrefix("192.0.2.0/24") },
		"192.0.2.5 twice":               func(n *Network) { n.Addresses[1] = n.Addresses[0] },
		"another one of its family":     func(n *Network) { n.Gateways[1] = netip.MustParseAddr("192.0.2.2") },
		"in none of the prefixes":       func(n *Network) { n.Gateways[0] = netip.MustParseAddr("198.51.100.1") },
		"another host's address":        func(n *Network) { n.Gateways[0] = netip.MustParseAddr("192.0.2.5") },
		"Nameservers has":               func(n *Network) { n.Nameservers = []netip.Addr{{}} },
		"SearchDomains has \"a b\"":     func(n *Network) { n.SearchDomains = []string{"a b"} },
		"SearchDomains has \"x\\n  y\"": func(n *Network) { n.SearchDomains = []string{"x\n  y"} },
	} {
		n := network()
		change(&n)
		if err := n.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
		if _, err := n.Render(mac); err == nil {
			t.Errorf("%s: rendered", want)
		}
	}
	for _, bad := range []net.HardwareAddr{nil, {1, 2, 3, 4, 5, 6}, {2, 3}} {
		if _, err := network().Render(bad); err == nil {
			t.Errorf("hardware address %s is accepted", bad)
		}
	}
}

// readISO reads an image with an independent reader.
func readISO(t testing.TB, image []byte) map[string]string {
	t.Helper()
	disk, err := iso9660.OpenImage(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	if label, err := disk.Label(); err != nil || label != "cidata" {
		t.Fatalf("label %q, %v", label, err)
	}
	root, err := disk.RootDir()
	if err != nil {
		t.Fatal(err)
	}
	children, err := root.GetChildren()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, c := range children {
		content, err := io.ReadAll(c.Reader())
		if err != nil {
			t.Fatal(err)
		}
		files[strings.ToLower(strings.TrimSuffix(strings.TrimSuffix(c.Name(), ";1"), "."))] = string(content)
	}
	return files
}

func seed() Seed {
	return Seed{
		UserData: []byte("#cloud-config\n# schön\n"), MetaData: []byte("instance-id: i\nlocal-hostname: h\n"),
		VendorData: []byte("#!/bin/sh\ntrue\n"), NetworkConfig: []byte("version: 2\n"),
	}
}

func TestASeedIsReadBackAsItWasWritten(t *testing.T) {
	large := seed()
	large.UserData = append([]byte("#!/bin/sh\n"), bytes.Repeat([]byte("0123456789abcdef"), 200_000)...)
	edge := seed()
	edge.UserData = bytes.Repeat([]byte("x"), 2*sectorSize)
	few := Seed{MetaData: []byte("instance-id: i\n"), UserData: []byte("#cloud-config\n")}
	empty := seed()
	empty.VendorData, empty.NetworkConfig, empty.UserData = []byte{}, nil, nil
	for _, s := range []Seed{seed(), large, edge, few, empty} {
		image, err := s.ISO()
		if err != nil {
			t.Fatal(err)
		}
		if len(image)%sectorSize != 0 {
			t.Errorf("%d bytes are no whole sectors", len(image))
		}
		again, _ := s.ISO()
		if !bytes.Equal(image, again) {
			t.Error("not the same twice")
		}
		got := readISO(t, image)
		want := map[string][]byte{"meta-data": s.MetaData, "user-data": s.UserData}
		if s.VendorData != nil {
			want["vendor-data"] = s.VendorData
		}
		if s.NetworkConfig != nil {
			want["network-config"] = s.NetworkConfig
		}
		if len(got) != len(want) {
			t.Errorf("got %d files, want %d", len(got), len(want))
		}
		for name, content := range want {
			if got[name] != string(content) {
				t.Errorf("%s has %d bytes, want %d", name, len(got[name]), len(content))
			}
		}
	}
}

func TestTheBytesOfASeedAreThoseOfEveryBuild(t *testing.T) {
	image, err := seed().ISO()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(image)
	golden(t, "seed.sha256", []byte(hex.EncodeToString(sum[:])+"\n"))
}

func TestABadSeedIsRefusedWithoutShowingIt(t *testing.T) {
	if _, err := (Seed{UserData: []byte("x")}).ISO(); err == nil {
		t.Error("a seed without meta data")
	}
	s := seed()
	s.UserData = make([]byte, MaxSeedFile+1)
	if _, err := s.ISO(); err == nil || !strings.Contains(err.Error(), "user-data has 67108865 bytes") {
		t.Errorf("got %v", err)
	}
}

// tool returns the path of a program or skips.
func tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
			t.Fatalf("%s is not installed", name)
		}
		t.Skipf("%s is not installed", name)
	}
	return path
}

func TestOtherReadersSeeTheExactNames(t *testing.T) {
	image, err := seed().ISO()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "seed.iso")
	if err := os.WriteFile(file, image, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("isoinfo", func(t *testing.T) {
		out, err := exec.Command(tool(t, "isoinfo"), "-R", "-f", "-i", file).CombinedOutput()
		names := strings.Fields(string(out))
		slices.Sort(names)
		if want := "/meta-data /network-config /user-data /vendor-data"; err != nil || strings.Join(names, " ") != want {
			t.Errorf("got %s, %v", out, err)
		}
		out, err = exec.Command(tool(t, "isoinfo"), "-R", "-x", "/user-data", "-i", file).Output()
		if err != nil || string(out) != string(seed().UserData) {
			t.Errorf("got %q, %v", out, err)
		}
		out, err = exec.Command(tool(t, "isoinfo"), "-d", "-i", file).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "Volume id: cidata") || !strings.Contains(string(out), "Rock Ridge signatures version 1 found") {
			t.Errorf("got %s, %v", out, err)
		}
	})
	t.Run("xorriso", func(t *testing.T) {
		dir := t.TempDir()
		out, err := exec.Command(tool(t, "xorriso"), "-osirrox", "on", "-indev", file, "-extract", "/", dir).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for name, want := range map[string][]byte{"user-data": seed().UserData, "meta-data": seed().MetaData, "vendor-data": seed().VendorData, "network-config": seed().NetworkConfig} {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: got %q, %v", name, got, err)
			}
		}
	})
	t.Run("blkid", func(t *testing.T) {
		out, err := exec.Command(tool(t, "blkid"), "-p", "-o", "export", file).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "LABEL=cidata") || !strings.Contains(string(out), "TYPE=iso9660") {
			t.Errorf("got %s, %v", out, err)
		}
	})
}

func FuzzCheckUserData(f *testing.F) {
	for _, doc := range accepted(f) {
		f.Add([]byte(doc), 100)
	}
	f.Fuzz(func(t *testing.T, doc []byte, limit int) {
		err := CheckUserData(doc, limit)
		if err != nil && !errors.As(err, new(*DocumentError)) {
			t.Errorf("got %T", err)
		}
		Warnings(doc)
		both, vendorErr := VendorData(Vendor{Document: doc, InstallGuestAgent: true})
		if len(doc) > 0 && (vendorErr == nil) != (CheckUserData(doc, 0) == nil) {
			t.Errorf("the check says %v, VendorData %v", err, vendorErr)
		}
		if vendorErr == nil {
			if err := CheckUserData(both, 0); err != nil {
				t.Errorf("the archive is refused: %v", err)
			}
		}
	})
}

func FuzzSeed(f *testing.F) {
	f.Add([]byte("u"), []byte("m"), []byte("v"), []byte("n"))
	f.Fuzz(func(t *testing.T, u, m, v, n []byte) {
		image, err := Seed{UserData: u, MetaData: m, VendorData: v, NetworkConfig: n}.ISO()
		if err != nil {
			if len(m) > 0 {
				t.Error(err)
			}
			return
		}
		got := readISO(t, image)
		if got["user-data"] != string(u) || got["meta-data"] != string(m) || got["vendor-data"] != string(v) || got["network-config"] != string(n) {
			t.Error("what was read is not what was written")
		}
	})
}

func FuzzNetwork(f *testing.F) {
	f.Add("192.0.2.5/24", "192.0.2.1", "a.example")
	f.Fuzz(func(t *testing.T, prefix, gateway, domain string) {
		p, _ := netip.ParsePrefix(prefix)
		g, _ := netip.ParseAddr(gateway)
		n := Network{Addresses: []netip.Prefix{p}, Gateways: []netip.Addr{g}, SearchDomains: []string{domain}}
		out, err := n.Render(mac)
		if err == nil && strings.Count(string(out), "\n") != strings.Count(string(out), "\n  ")+2 {
			t.Errorf("a value broke out of its line:\n%s", out)
		}
	})
}

func ExampleVendorData() {
	doc, err := VendorData(Vendor{InstallGuestAgent: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	line, _, _ := strings.Cut(string(doc), "\n")
	fmt.Println(line)
	// Output: #!/bin/sh
}

func ExampleCheckUserData() {
	fmt.Println(CheckUserData([]byte("packages: [squid]\n"), 0))
	// Output: cloudinit: document refused: no header: cloud-init ignores it; want a first line such as #cloud-config, #!/bin/sh or a MIME header
}

func BenchmarkSeed(b *testing.B) {
	s := seed()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.ISO(); err != nil {
			b.Fatal(err)
		}
	}
}

// benchmarkTool makes the same seed with a program, files included, as one would without this package.
func benchmarkTool(b *testing.B, command func(out string) []string) {
	dir := b.TempDir()
	s := seed()
	for b.Loop() {
		for name, content := range map[string][]byte{"user-data": s.UserData, "meta-data": s.MetaData, "vendor-data": s.VendorData, "network-config": s.NetworkConfig} {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
				b.Fatal(err)
			}
		}
		args := command(filepath.Join(b.TempDir(), "seed.iso"))
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
	}
}

func BenchmarkGenisoimage(b *testing.B) {
	path := tool(b, "genisoimage")
	benchmarkTool(b, func(out string) []string {
		return []string{path, "-quiet", "-output", out, "-volid", "cidata", "-rational-rock", "-joliet", "user-data", "meta-data", "vendor-data", "network-config"}
	})
}

func BenchmarkXorriso(b *testing.B) {
	path := tool(b, "xorriso")
	benchmarkTool(b, func(out string) []string {
		return []string{path, "-as", "mkisofs", "-quiet", "-o", out, "-V", "cidata", "-R", "-J", "user-data", "meta-data", "vendor-data", "network-config"}
	})
}
