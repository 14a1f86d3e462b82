//go:build live

package kvm_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/provider"
)

const (
	// rivalCipher is what Go's client and sshd agree on. The others, which would take another, are told to use it too.
	rivalCipher = "aes128-gcm@openssh.com"
	// attempts is how often a comparison is made anew before it counts, since other work on the machine can hit one side only.
	attempts = 3
	poolDir  = "/var/lib/libvirt/images"
)

// rivals are the programs that do the same by hand. All of them go to the host over SSH with the same key and known_hosts.
type rivals struct {
	h   *testhost.Host
	ssh []string // options of ssh and scp
	uri string
}

func newRivals(t *testing.T, h *testhost.Host) *rivals {
	t.Helper()
	r := &rivals{h: h, ssh: []string{
		"-F", "none", "-q", "-c", rivalCipher, "-i", h.KeyFile(), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
		"-o", "UserKnownHostsFile=" + h.KnownHosts(), "-o", "StrictHostKeyChecking=yes",
	}}
	// virsh takes no options for ssh, but another program in its place.
	command := filepath.Join(t.TempDir(), "ssh")
	if err := os.WriteFile(command, []byte("#!/bin/sh\nexec ssh "+strings.Join(r.ssh, " ")+" \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.uri = h.URI() + "?no_tty=1&command=" + command
	return r
}

// run runs a program and returns how long it took.
func run(t *testing.T, name string, args ...string) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	begin := time.Now()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	took := time.Since(begin)
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return took
}

// virsh runs commands over one connection.
func (r *rivals) virsh(t *testing.T, commands ...string) time.Duration {
	t.Helper()
	return run(t, "virsh", "-q", "-c", r.uri, strings.Join(commands, "; "))
}

func median(of []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[len(sorted)/2]
}

// byHand makes guests as an operator would, from a domain that egress has made.
type byHand struct {
	*rivals
	dir   string
	model string // its XML without what is its own
	n     int
}

var ownXML = regexp.MustCompile(`(?s)<metadata>.*?</metadata>|<uuid>.*?</uuid>|<mac address=.*?/>`)

func newByHand(t *testing.T, r *rivals, made provider.Instance) *byHand {
	t.Helper()
	b := &byHand{rivals: r, dir: t.TempDir()}
	b.model = ownXML.ReplaceAllString(r.h.Virsh(t, "dumpxml", "--inactive", made.Name), "")
	b.model = strings.ReplaceAll(b.model, made.Name+"."+made.ID[:8]+".", "NAME.")
	b.model = strings.ReplaceAll(b.model, made.Name, "NAME")
	for name, text := range map[string]string{"user-data": string(idleSpec().CloudInit.UserData), "meta-data": "instance-id: rival\nlocal-hostname: rival\n"} {
		if err := os.WriteFile(filepath.Join(b.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *byHand) next() string {
	b.n++
	return fmt.Sprintf("rival%d", b.n)
}

// virshCreate does it with virsh over one connection, which is as fast as virsh gets.
func (b *byHand) virshCreate(t *testing.T) (name string, took time.Duration) {
	t.Helper()
	name = b.next()
	domain, seed := filepath.Join(b.dir, "domain.xml"), filepath.Join(b.dir, "seed.iso")
	if err := os.WriteFile(domain, []byte(strings.ReplaceAll(b.model, "NAME", name)), 0o600); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	run(t, "genisoimage", "-quiet", "-output", seed, "-volid", "cidata", "-joliet", "-rock", filepath.Join(b.dir, "user-data"), filepath.Join(b.dir, "meta-data"))
	size, err := os.Stat(seed)
	if err != nil {
		t.Fatal(err)
	}
	b.virsh(t,
		"vol-create-as default "+name+".qcow2 1M --format qcow2 --backing-vol base-idle.qcow2 --backing-vol-format qcow2",
		fmt.Sprintf("vol-create-as default %s.seed.iso %d --format raw", name, size.Size()),
		"vol-upload "+name+".seed.iso "+seed+" --pool default",
		"define "+domain,
		"start "+name,
	)
	return name, time.Since(begin)
}

// virtInstall does it with virt-install, which makes and uploads the seed itself.
func (b *byHand) virtInstall(t *testing.T) (name string, took time.Duration) {
	t.Helper()
	name = b.next()
	begin := time.Now()
	run(t, "virt-install", "--connect", b.uri, "--name", name, "--memory", "64", "--vcpus", "1", "--import", "--noautoconsole",
		"--virt-type", "qemu", "--cpu", "mode=maximum", "--graphics", "none", "--network", "network=default,model=virtio",
		"--osinfo", "detect=off,require=off", "--boot", "hd",
		"--disk", "vol=default/"+b.disk(t, name)+",bus=virtio",
		"--cloud-init", "user-data="+filepath.Join(b.dir, "user-data")+",meta-data="+filepath.Join(b.dir, "meta-data"))
	return name, time.Since(begin)
}

// disk makes the disk for virt-install, whose own overlays want to know more about the base than libvirt says.
func (b *byHand) disk(t *testing.T, name string) string {
	t.Helper()
	b.virsh(t, "vol-create-as default "+name+".qcow2 1M --format qcow2 --backing-vol base-idle.qcow2 --backing-vol-format qcow2")
	return name + ".qcow2"
}

// remove leaves nothing of a guest.
func (b *byHand) remove(t *testing.T, name string) {
	t.Helper()
	_, _ = b.h.Run("virsh", "-q", "destroy", name) // virt-install's may have ended
	b.h.Virsh(t, "undefine", name)
	if _, err := b.h.Run("sh", "-c", "rm -f "+poolDir+"/"+name+".*"+" "+poolDir+"/"+name+"-*"); err != nil {
		t.Fatal(err)
	}
	b.h.Virsh(t, "pool-refresh", "default")
}

func TestLiveCreateOverheadBesideVirtInstallAndVirsh(t *testing.T) {
	h := shared(t)
	const rounds = 5
	p := open(t, configOf(t, h))
	// The first brings the image, and finds out that there is no KVM.
	first, err := p.Create(t.Context(), request("beside", "first", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	b := newByHand(t, newRivals(t, h), first)
	if err := p.Delete(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	type way struct {
		name string
		once func() time.Duration
	}
	hand := func(create func(*testing.T) (string, time.Duration)) func() time.Duration {
		return func() time.Duration {
			name, took := create(t)
			b.remove(t, name)
			return took
		}
	}
	n := 0
	ways := []way{{"egress", func() time.Duration {
		n++
		req := request("beside", fmt.Sprintf("p%d", n), idleSpec())
		begin := time.Now()
		made, err := p.Create(t.Context(), req)
		took := time.Since(begin)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Delete(t.Context(), made.ID); err != nil {
			t.Fatal(err)
		}
		return took
	}}}
	need(t, "genisoimage")
	ways = append(ways, way{"genisoimage, virsh", hand(b.virshCreate)})
	if _, err := exec.LookPath("virt-install"); err == nil {
		ways = append(ways, way{"virt-install", hand(b.virtInstall)})
		t.Cleanup(func() { _, _ = h.Run("sh", "-c", "virsh pool-destroy boot-scratch; virsh pool-undefine boot-scratch") }) // virt-install's own
	} else {
		t.Log("no row for virt-install: it is not installed (apt install virtinst)")
	}
	for attempt := 1; ; attempt++ {
		took := make([][]time.Duration, len(ways))
		for range rounds {
			for i, way := range ways {
				took[i] = append(took[i], way.once())
			}
		}
		ours := median(took[0])
		t.Logf("an idle guest whose image is on the host already, over SSH, medians of %d", rounds)
		t.Logf("%-18s %10s %15s", "", "time", "egress takes")
		for i, way := range ways {
			m := median(took[i])
			t.Logf("%-18s %10s %14.2fx", way.name, m.Round(time.Millisecond), ours.Seconds()/m.Seconds())
		}
		if ours <= median(took[1]) {
			break
		}
		if attempt == attempts {
			t.Error("a create takes longer than by hand")
			break
		}
	}
	nothingLeft(t, h)
}

// need skips the test without a program, or fails it when everything is to run.
func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
		t.Fatalf("%s is not installed", program)
	}
	t.Skipf("%s is not installed", program)
}
