package cloudinit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// runAgent runs the script with stubs for commands, each of which logs its call and then does what its body says, and
// returns the log. No other command but the shell's own and those of /usr/bin it needs for text is found.
func runAgent(t *testing.T, shell []string, stubs map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	for name, body := range stubs {
		script := "#!/bin/sh\necho \"" + name + " $*\" >> " + log + "\n" + body + "\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// The script appends the system's directories to PATH, where the real commands are; in the test there are none.
	text := strings.Replace(string(agentScript), `PATH="$PATH:/usr/sbin:/usr/bin:/sbin:/bin"`, "PATH="+dir, 1)
	if text == string(agentScript) {
		t.Fatal("the script has no PATH line")
	}
	file := filepath.Join(dir, "script")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(shell[0], append(shell[1:], file)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the script fails the boot: %v\n%s", err, out)
	}
	calls, err := os.ReadFile(log)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(calls)
}

// shells are the POSIX shells of the distributions: dash or bash as sh, and busybox's.
func shells(t *testing.T) map[string][]string {
	all := map[string][]string{}
	if path, err := exec.LookPath("sh"); err == nil {
		all["sh"] = []string{path}
	}
	if path, err := exec.LookPath("bash"); err == nil {
		all["bash"] = []string{path, "--posix"}
	}
	if path, err := exec.LookPath("busybox"); err == nil {
		all["busybox"] = []string{path, "sh"}
	}
	if len(all) == 0 {
		t.Skip("there is no POSIX shell")
	}
	return all
}

const notRunning = "exit 1"

func TestTheScriptInstallsTheAgentOnEveryDistribution(t *testing.T) {
	for name, shell := range shells(t) {
		for distribution, c := range map[string]struct {
			stubs map[string]string
			want  []string
		}{
			"Debian and Ubuntu": {
				map[string]string{"apt-get": "", "systemctl": ""},
				[]string{"apt-get -q -o DPkg::Lock::Timeout=60 update", agentInstall, "systemctl daemon-reload", "systemctl start qemu-guest-agent"},
			},
			"Fedora and RHEL": {
				map[string]string{"dnf": "", "systemctl": ""},
				[]string{"dnf -q -y install qemu-guest-agent", "systemctl start qemu-guest-agent"},
			},
			"old RHEL": {map[string]string{"yum": "", "systemctl": ""}, []string{"yum -q -y install qemu-guest-agent"}},
			"openSUSE": {map[string]string{"zypper": "", "systemctl": ""}, []string{"zypper -n -q install qemu-guest-agent"}},
			"Alpine": {
				map[string]string{"apk": "", "rc-service": "", "rc-update": ""},
				[]string{"apk add --wait 60 qemu-guest-agent", "rc-update add qemu-guest-agent default", "rc-service qemu-guest-agent start"},
			},
			"an image that has it": {map[string]string{"qemu-ga": "", "apt-get": "", "systemctl": ""}, []string{"systemctl start qemu-guest-agent"}},
		} {
			t.Run(name+" on "+distribution, func(t *testing.T) {
				c.stubs["pidof"] = notRunning
				c.stubs["sleep"] = ""
				calls := runAgent(t, shell, c.stubs)
				at := 0
				for _, want := range c.want {
					i := strings.Index(calls[at:], want)
					if i < 0 {
						t.Fatalf("no %q in its turn:\n%s", want, calls)
					}
					at += i
				}
				if strings.Contains(calls, "sleep") {
					t.Errorf("it waits for nothing:\n%s", calls)
				}
			})
		}
	}
}

const agentInstall = "apt-get -q -y -o DPkg::Lock::Timeout=60 --no-install-recommends install qemu-guest-agent"

func TestTheScriptDoesNothingWhereTheAgentRuns(t *testing.T) {
	for name, shell := range shells(t) {
		for _, how := range []string{"pidof", "pgrep"} {
			calls := runAgent(t, shell, map[string]string{how: "", "apt-get": "", "systemctl": ""})
			if strings.Contains(calls, "apt-get") || strings.Contains(calls, "systemctl") {
				t.Errorf("%s with %s:\n%s", name, how, calls)
			}
		}
	}
}

func TestTheScriptWaitsForALockAndThenGoesOn(t *testing.T) {
	for name, shell := range shells(t) {
		// The lock is free at the third try.
		busy := `case "$*" in *install*) n=$(cat "$0.n" 2>/dev/null || echo 0); n=$((n+1)); echo $n > "$0.n"; [ $n -ge 3 ] || exit 100;; esac`
		busy = strings.ReplaceAll(busy, `$(cat "$0.n" 2>/dev/null || echo 0)`, `$( (read x < "$0.n"; echo ${x:-0}) 2>/dev/null || echo 0)`)
		calls := runAgent(t, shell, map[string]string{"pidof": notRunning, "apt-get": busy, "sleep": "", "systemctl": ""})
		if n := strings.Count(calls, agentInstall); n != 3 || strings.Count(calls, "sleep 6") != 2 || !strings.Contains(calls, "systemctl start") {
			t.Errorf("%s: %d tries:\n%s", name, n, calls)
		}
	}
}

func TestTheScriptNeverFailsTheBoot(t *testing.T) {
	for _, shell := range shells(t) {
		// Everything fails, for ever.
		calls := runAgent(t, shell, map[string]string{"pidof": notRunning, "apt-get": "exit 100", "sleep": "", "systemctl": "exit 5"})
		if n := strings.Count(calls, agentInstall); n != 10 {
			t.Errorf("%d tries, want 10", n)
		}
		runAgent(t, shell, map[string]string{"pidof": notRunning, "dnf": "", "systemctl": "exit 1"})
		runAgent(t, shell, map[string]string{"pidof": notRunning}) // no package manager at all
		runAgent(t, shell, nil)
	}
}

// TestASeedNeedsNoDisk is run again by itself as a process that could write nothing if it tried.
func TestASeedNeedsNoDisk(t *testing.T) {
	if os.Getenv("EGRESS_NO_DISK") == "1" {
		if _, err := os.MkdirTemp("", "x"); err == nil {
			t.Fatal("there is a writable temporary directory")
		}
		image, err := seed().ISO()
		if err != nil || len(image) == 0 {
			t.Fatalf("%d bytes, %v", len(image), err)
		}
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run", "^TestASeedNeedsNoDisk$")
	cmd.Env = append(os.Environ(), "EGRESS_NO_DISK=1", "TMPDIR=/nonexistent", "HOME=/nonexistent")
	cmd.Dir = "/"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
