//go:build live

package cloudinit

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// stages are what cloud-init's own stages did with a seed.
type stages struct {
	trace, log, failed string
	userData           []byte
}

// runStages has the installed cloud-init run all its stages on the documents, in namespaces of their own. Package managers
// and systemctl are stubs that write to the trace.
func runStages(t *testing.T, userData, vendorData []byte) stages {
	t.Helper()
	tool(t, "cloud-init")
	tool(t, "unshare")
	if os.Getuid() != 0 {
		if os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
			t.Fatal("not root")
		}
		t.Skip("not root, which mounting takes")
	}
	seedDir, out, stubs := t.TempDir(), t.TempDir(), t.TempDir()
	meta, err := MetaData{InstanceID: InstanceID("guest", "hash"), LocalHostname: "guest"}.Render()
	if err != nil {
		t.Fatal(err)
	}
	write := func(dir, name string, content []byte, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, mode); err != nil {
			t.Fatal(err)
		}
	}
	// The documents travel in the image, as they do to a guest; only the mounting is libisoburn's, since not every kernel
	// that tests run on has the driver.
	image, err := Seed{UserData: userData, MetaData: meta, VendorData: vendorData}.ISO()
	if err != nil {
		t.Fatal(err)
	}
	write(stubs, "seed.iso", image, 0o600)
	extract := exec.Command(tool(t, "xorriso"), "-osirrox", "on", "-indev", filepath.Join(stubs, "seed.iso"), "-extract", "/", seedDir)
	if text, err := extract.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, name := range []string{"apt-get", "systemctl", "eatmydata"} {
		run := ""
		if name == "eatmydata" {
			run = "exec \"$@\"\n"
		}
		write(stubs, name, []byte("#!/bin/sh\n[ "+name+" = eatmydata ] || echo \""+name+" $*\" >> \"$TRACE\"\n"+run+"exit 0\n"), 0o700)
	}
	script, err := filepath.Abs("testdata/stages.sh")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bash", script)
	cmd.Env = append(os.Environ(), "SEED="+seedDir, "OUT="+out, "STUBS="+stubs)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	read := func(name string) []byte {
		content, err := os.ReadFile(filepath.Join(out, name))
		if err != nil && name != "user-data.txt" {
			t.Fatal(err)
		}
		return content
	}
	return stages{string(read("trace")), string(read("cloud-init.log")), strings.TrimSpace(string(read("result"))), read("user-data.txt")}
}

var complaints = regexp.MustCompile(`(?m)^.*(WARNING|ERROR|Traceback).*$`)

// clean asserts that cloud-init took the user data as it is and complained of nothing.
func (s stages) clean(t *testing.T, userData []byte) {
	t.Helper()
	if s.failed != "none" {
		t.Errorf("the stage %s failed", s.failed)
	}
	if !bytes.Equal(s.userData, userData) {
		t.Errorf("the user data has %d bytes in the guest, want the %d that were given", len(s.userData), len(userData))
	}
	if found := complaints.FindAllString(s.log, -1); len(found) > 0 {
		t.Errorf("cloud-init complains:\n%s", strings.Join(found, "\n"))
	}
}

// shapes are user data in every format, each of which says user in the trace.
func shapes(t *testing.T) map[string]string {
	config := "#cloud-config\npackages: [squid]\nruncmd:\n  - echo user >> $TRACE\n"
	script := "#!/bin/sh\necho user >> $TRACE\n"
	return map[string]string{
		"config":       config,
		"umlauts":      config + "# schön 日本\n",
		"CRLF":         strings.ReplaceAll(config, "\n", "\r\n"),
		"script":       script,
		"gzip":         zip(t, config),
		"boothook":     "#cloud-boothook\n" + script,
		"jinja":        "## template: jinja\n#cloud-config\nruncmd:\n  - echo user {{ v1.instance_id }} >> $TRACE\n",
		"archive":      "#cloud-config-archive\n- |\n  #cloud-config\n  runcmd: [ \"echo user >> $TRACE\" ]\n",
		"MIME":         string(mustMIME(t, []byte(config))),
		"gzip of MIME": zip(t, string(mustMIME(t, []byte(script)))),
		"part handler": "#part-handler\ndef list_types():\n    return ['text/x-none']\ndef handle_part(data, ctype, filename, payload):\n    import os\n    if ctype == '__begin__':\n        open(os.environ['TRACE'], 'a').write('user\\n')\n",
	}
}

// mustMIME is an archive with one document.
func mustMIME(t *testing.T, doc []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	fmt.Fprint(&b, "Content-Type: multipart/mixed; boundary=\"xx\"\nMIME-Version: 1.0\n\n")
	writePart(&b, "xx", "text/plain", "part", doc)
	fmt.Fprint(&b, "--xx--\n")
	return b.Bytes()
}

// vendors are vendor documents of an operator, each of which says vendor in the trace.
func vendors(t *testing.T) map[string]string {
	return map[string]string{
		"none":   "",
		"script": "#!/bin/sh\n# schön\necho vendor >> $TRACE\n",
		"config": "#cloud-config\n# schön\nbootcmd:\n  - echo vendor >> $TRACE\n",
		"gzip":   zip(t, "#!/bin/sh\necho vendor >> $TRACE\n"),
		"MIME":   string(mustMIME(t, []byte("#!/bin/sh\necho vendor >> $TRACE\n"))),
	}
}

const agentLine = "apt-get -q -y -o DPkg::Lock::Timeout=60 --no-install-recommends install qemu-guest-agent"

func TestCloudInitTakesEveryDocumentAsItIs(t *testing.T) {
	all, byVendor := shapes(t), vendors(t)
	type pair struct{ user, vendor string }
	var pairs []pair
	for user := range all {
		pairs = append(pairs, pair{user, "none"})
	}
	for vendor := range byVendor {
		if vendor != "none" {
			pairs = append(pairs, pair{"config", vendor}, pair{"script", vendor})
		}
	}
	for _, c := range pairs {
		t.Run(c.user+" with vendor "+c.vendor, func(t *testing.T) {
			userData := []byte(all[c.user])
			if err := CheckUserData(userData, 0); err != nil {
				t.Fatal(err)
			}
			vendorData, err := VendorData(Vendor{Document: []byte(byVendor[c.vendor]), InstallGuestAgent: true})
			if err != nil {
				t.Fatal(err)
			}
			s := runStages(t, userData, vendorData)
			s.clean(t, userData)
			if !strings.Contains(s.trace, agentLine) || !strings.Contains(s.trace, "systemctl start qemu-guest-agent") {
				t.Errorf("our script did not run:\n%s", s.trace)
			}
			if !strings.Contains(s.trace, "user") {
				t.Errorf("the user data did nothing:\n%s", s.trace)
			}
			if c.vendor != "none" && !strings.Contains(s.trace, "vendor") {
				t.Errorf("the vendor document did nothing:\n%s", s.trace)
			}
			if c.user != "config" {
				return
			}
			// The user's packages come first, then our script, then the user's commands.
			packages, agent, user := strings.Index(s.trace, "squid"), strings.Index(s.trace, agentLine), strings.LastIndex(s.trace, "user\n")
			if packages < 0 || packages > agent || agent > user {
				t.Errorf("packages at %d, our script at %d, runcmd at %d:\n%s", packages, agent, user, s.trace)
			}
		})
	}
}

func TestCloudInitReallyLosesWhatIsRefused(t *testing.T) {
	for name, doc := range map[string]string{
		"no header":        "runcmd:\n  - echo user >> $TRACE\n",
		"byte order mark":  "\xef\xbb\xbf#cloud-config\nruncmd:\n  - echo user >> $TRACE\n",
		"MIME and umlauts": "#cloud-config\n# MIME-Version: 1.0\n# schön\nruncmd:\n  - echo user >> $TRACE\n",
		"comment first":    "# mine\n#cloud-config\nruncmd:\n  - echo user >> $TRACE\n",
		"jinja of nothing": "## template: jinja\nruncmd:\n  - echo user >> $TRACE\n",
		"white space":      " \n",
		"cut gzip":         zip(t, "#cloud-config\nruncmd:\n  - echo user >> $TRACE\n")[:40],
	} {
		t.Run(name, func(t *testing.T) {
			if CheckUserData([]byte(doc), 0) == nil {
				t.Error("it is accepted")
			}
			if s := runStages(t, []byte(doc), nil); strings.Contains(s.trace, "user") {
				t.Errorf("cloud-init did use it, so it need not be refused:\n%s", s.trace)
			}
		})
	}
}

func TestSwitchedOffVendorDataReallyDropsOurScript(t *testing.T) {
	for _, doc := range []string{
		"#cloud-config\nvendor_data: {enabled: false}\n", "#cloud-config\nvendor_data:\n  enabled: false\n",
	} {
		if len(Warnings([]byte(doc))) != 1 {
			t.Error("no warning")
		}
		if s := runStages(t, []byte(doc), GuestAgentScript()); strings.Contains(s.trace, "qemu") {
			t.Errorf("our script ran all the same:\n%s", s.trace)
		}
	}
}

func TestASeedIsBuiltWithAReadOnlyRoot(t *testing.T) {
	tool(t, "unshare")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Every file system that this process sees is remounted read-only, in a namespace of its own.
	script := `for m in $(awk '{print $2}' /proc/self/mounts | sort -r); do mount -o remount,bind,ro "$m" 2>/dev/null || true; done
if touch /tmp/egress-probe 2>/dev/null; then echo "still writable"; exit 1; fi
exec "$0" -test.run '^TestASeedNeedsNoDisk$'`
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script, self)
	cmd.Env = append(os.Environ(), "EGRESS_NO_DISK=1")
	cmd.Dir = "/"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
