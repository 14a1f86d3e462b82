//go:build live

package kvm_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress/internal/testhost"
	"crawl.example.com/egress/kvm"
	"crawl.example.com/egress/provider"
)

// imageServer serves an image, and not always as it should.
type imageServer struct {
	content []byte
	gets    atomic.Int64
	// before is called before each chunk with the offset in the file. An error breaks the connection there.
	before func(offset int64) error
	// noRanges answers with the whole file, whatever was asked for.
	noRanges bool
}

func (s *imageServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.gets.Add(1)
	from := int64(0)
	if asked := r.Header.Get("Range"); asked != "" && !s.noRanges {
		from, _ = strconv.ParseInt(strings.TrimSuffix(strings.TrimPrefix(asked, "bytes="), "-"), 10, 64)
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(s.content)-1, len(s.content)))
	}
	w.Header().Set("ETag", `"1"`)
	w.Header().Set("Content-Length", strconv.FormatInt(int64(len(s.content))-from, 10))
	if from > 0 {
		w.WriteHeader(http.StatusPartialContent)
	}
	const chunk = 64 << 10
	for offset := from; offset < int64(len(s.content)); offset += chunk {
		if s.before != nil {
			if err := s.before(offset); err != nil {
				panic(http.ErrAbortHandler)
			}
		}
		if _, err := w.Write(s.content[offset:min(offset+chunk, int64(len(s.content)))]); err != nil {
			return
		}
		w.(http.Flusher).Flush()
	}
}

// bigIdle is an image of some MiB that can't be squeezed, and does nothing.
func bigIdle(mib int) []byte {
	disk := make([]byte, mib<<20)
	rand.Read(disk)
	copy(disk, testhost.IdleImage()[:512])
	return disk
}

func withImage(t *testing.T, h *testhost.Host, s *imageServer, digest string) kvm.Config {
	config := configOf(t, h)
	config.Images = map[string]kvm.Image{"idle": {URL: h.Serve(t, s) + "/idle.img?token=secret", SHA256: digest, Format: "raw", Firmware: kvm.FirmwareBIOS}}
	return config
}

// evict removes every base.
func evict(t *testing.T, config kvm.Config) {
	t.Helper()
	config.Images = nil
	p := open(t, config)
	defer p.Close()
	if _, err := p.EvictImages(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func noVolumes(t *testing.T, h *testhost.Host) {
	t.Helper()
	until(t, "nothing of the image is left: "+strings.Join(leftovers(t, h, true), " "), func() bool { return len(leftovers(t, h, true)) == 0 })
}

func TestLiveAnImageThatDoesNotArriveWholeIsNeverThere(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	content := bigIdle(8)
	good := sum(content)
	broken := errors.New("broken off")
	for name, test := range map[string]struct {
		server *imageServer
		digest string
		kind   error
		says   string
	}{
		"a short body": {&imageServer{content: content, noRanges: true, before: func(o int64) error {
			if o > 5<<20 {
				return broken
			}
			return nil
		}}, good, provider.ErrUnavailable, "byte"},
		"broken off at the first byte": {&imageServer{content: content, noRanges: true, before: func(int64) error { return broken }}, good, provider.ErrUnavailable, ""},
		"a wrong digest":               {&imageServer{content: content}, strings.Repeat("0", 64), provider.ErrPermanent, good},
		"another format":               {&imageServer{content: append([]byte("QFI\xfb"), content[4:]...)}, "", provider.ErrPermanent, "qcow2"},
		"nothing":                      {&imageServer{}, "", provider.ErrPermanent, "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			p := open(t, withImage(t, h, test.server, test.digest))
			_, err := p.Create(t.Context(), request("cut", "a", idleSpec()))
			if !errors.Is(err, test.kind) || !strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %v, want %v that says %q and no token", err, test.kind, test.says)
			}
			if left := leftovers(t, h, true); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func TestLiveADownloadThatBreaksOffIsTakenUpAgain(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	server := &imageServer{content: bigIdle(8)}
	breaks := map[int64]bool{1 << 20: true, 3<<20 + 64<<10: true, 7 << 20: true}
	var mu sync.Mutex
	server.before = func(offset int64) error {
		mu.Lock()
		defer mu.Unlock()
		if breaks[offset] {
			delete(breaks, offset)
			return errors.New("broken off")
		}
		return nil
	}
	p := open(t, withImage(t, h, server, sum(server.content)))
	made, err := p.Create(t.Context(), request("cut", "a", idleSpec()))
	if err != nil || server.gets.Load() != 4 {
		t.Fatalf("%v after %d requests, want 4", err, server.gets.Load())
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	evict(t, configOf(t, h))
	noVolumes(t, h)
}

// TestLiveAFaultInTheMiddleOfAnUpload has the host fail when half of the image is there.
func TestLiveAFaultInTheMiddleOfAnUploadLeavesNothingAndTheNextTryIsClean(t *testing.T) {
	h := shared(t)
	for name, test := range map[string]struct{ fail, mend string }{
		"libvirtd killed":        {"kill", "start"},
		"link cut without a RST": {"cut", "mend"},
		"disk full":              {"fill", "empty"},
		"libvirtd hangs":         {"freeze", "thaw"},
	} {
		t.Run(name, func(t *testing.T) {
			evict(t, configOf(t, h))
			half, on := make(chan struct{}), make(chan struct{})
			var once sync.Once
			server := &imageServer{content: bigIdle(8), before: func(offset int64) error {
				if offset == 4<<20 {
					once.Do(func() { close(half) })
					<-on
				}
				return nil
			}}
			config := withImage(t, h, server, sum(server.content))
			p := open(t, config)
			failed := make(chan error, 1)
			go func() {
				_, err := p.Create(t.Context(), request("cut", "a", idleSpec()))
				failed <- err
			}()
			<-half
			h.Must(t, test.fail)
			close(on)
			begin := time.Now()
			err := <-failed
			t.Logf("after %s: %v", time.Since(begin).Round(time.Millisecond), err)
			// Three intervals of silence are the end; a daemon that hangs gets one and two more. Cleaning up may take 5 s.
			if took := time.Since(begin); took > 5*keepalive+6*time.Second {
				t.Errorf("noticed after %s", took)
			}
			if err == nil || errors.Is(err, provider.ErrPermanent) {
				t.Errorf("got %v", err)
			}
			h.Must(t, test.mend)
			ready(t, p)
			made, err := p.Create(t.Context(), request("cut", "a", idleSpec()))
			for ; err != nil; made, err = p.Create(t.Context(), request("cut", "a", idleSpec())) {
				t.Log(err)
				<-time.After(time.Second)
			}
			n := 0
			for _, left := range leftovers(t, h, true) {
				if strings.Contains(left, ".img") {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%q: want the data of one image", leftovers(t, h, true))
			}
			if err := p.Delete(t.Context(), made.ID); err != nil {
				t.Error(err)
			}
			evict(t, configOf(t, h))
			noVolumes(t, h)
		})
	}
}

func TestLiveAnImageOfAnEarlierProcessThatWasKilledIsSweptAway(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	half := make(chan struct{})
	var once sync.Once
	stuck := &imageServer{content: bigIdle(8)}
	stuck.before = func(offset int64) error {
		if offset == 4<<20 {
			once.Do(func() { close(half) })
			<-t.Context().Done()
		}
		return nil
	}
	config := withImage(t, h, stuck, sum(stuck.content))
	run := exec.Command(os.Args[0], "-test.run=^TestHelperCreate$", "-test.timeout=5m")
	run.Env = append(os.Environ(), "EGRESS_HELPER=create", "EGRESS_URL="+config.Images["idle"].URL, "EGRESS_SHA256="+sum(stuck.content),
		"EGRESS_URI="+h.URI(), "EGRESS_KNOWN="+h.KnownHosts(), "EGRESS_KEY="+h.KeyFile(), "EGRESS_OWNER=sweep")
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	<-half
	_ = run.Process.Kill()
	_ = run.Wait() // it was killed
	fine := &imageServer{content: stuck.content}
	p := open(t, withImage(t, h, fine, sum(fine.content)))
	if left := leftovers(t, h, true); len(left) != 1 {
		t.Fatalf("left by the one that was killed: %q", left)
	}
	made, err := p.Create(t.Context(), request("sweep", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	evict(t, configOf(t, h))
	noVolumes(t, h)
}

// TestHelperCreate is another process.
func TestHelperCreate(t *testing.T) {
	mode := os.Getenv("EGRESS_HELPER")
	if mode == "" {
		return // it is the parent's run of all tests
	}
	config := kvm.Config{
		Name: "home", URI: os.Getenv("EGRESS_URI"), SSH: kvm.SSH{KnownHosts: []string{os.Getenv("EGRESS_KNOWN")}, KeyFiles: []string{os.Getenv("EGRESS_KEY")}},
		Images:         map[string]kvm.Image{"idle": {URL: os.Getenv("EGRESS_URL"), SHA256: os.Getenv("EGRESS_SHA256"), Format: "raw", Firmware: kvm.FirmwareBIOS}},
		AllowEmulation: true, MinFreeGiB: -1,
	}
	p, err := kvm.New(config)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	owner := os.Getenv("EGRESS_OWNER")
	if mode == "create" {
		_, err := p.Create(t.Context(), request(owner, "a", idleSpec()))
		t.Fatalf("it was to be killed: %v", err)
	}
	// Churn: make and delete, and see nothing but one's own.
	for i := range 4 {
		var ids []string
		for j := range 2 {
			made, err := p.Create(t.Context(), request(owner, fmt.Sprintf("p%d-%d", i, j), idleSpec()))
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, made.ID)
		}
		all, err := p.List(t.Context(), owner)
		if err != nil || len(all) != 2 {
			t.Fatalf("%d instances of %s, %v, want 2", len(all), owner, err)
		}
		for _, x := range all {
			if x.Mark.Owner != owner || x.State != provider.StateRunning {
				t.Fatalf("got %+v", x)
			}
		}
		for _, id := range ids {
			if err := p.Delete(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestLiveTwoProcessesOfDifferentOwnersNeverTouchEachOthers(t *testing.T) {
	h := shared(t)
	config := configOf(t, h)
	evict(t, config)
	var both sync.WaitGroup
	for _, owner := range []string{"alpha", "beta"} {
		both.Go(func() {
			run := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHelperCreate$", "-test.timeout=5m", "-test.v")
			image := config.Images["idle"]
			run.Env = append(os.Environ(), "EGRESS_HELPER=churn", "EGRESS_URL="+image.URL, "EGRESS_SHA256="+image.SHA256,
				"EGRESS_URI="+h.URI(), "EGRESS_KNOWN="+h.KnownHosts(), "EGRESS_KEY="+h.KeyFile(), "EGRESS_OWNER="+owner)
			if out, err := run.CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", owner, err, out)
			}
		})
	}
	both.Wait()
	nothingLeft(t, h)
	bases := 0
	for _, left := range leftovers(t, h, true) {
		if strings.HasPrefix(left, "volume base-") {
			bases++
		}
	}
	if bases != 2 { // the data and what stands on it
		t.Errorf("%q: want one base, which both use", leftovers(t, h, true))
	}
	evict(t, config)
	noVolumes(t, h)
}

func TestLiveTenCreatesAtOnceFetchTheImageOnceOverOneConnection(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	server := &imageServer{content: bigIdle(16)}
	p := open(t, withImage(t, h, server, sum(server.content)))
	var most atomic.Int64
	watching, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		for watching.Err() == nil {
			out, err := h.Run("ss", "-Htn", "state", "established", "sport", "=", ":22")
			if n := int64(len(strings.FieldsFunc(out, func(r rune) bool { return r == '\n' }))); err == nil && n > most.Load() {
				most.Store(n)
			}
			<-time.After(20 * time.Millisecond)
		}
	})
	ids := make([]string, 10)
	var creates sync.WaitGroup
	for i := range ids {
		creates.Go(func() {
			made, err := p.Create(t.Context(), request("ten", fmt.Sprintf("p%d", i), idleSpec()))
			if err != nil {
				t.Error(err)
			}
			ids[i] = made.ID
		})
	}
	creates.Wait()
	stop()
	all.Wait()
	if got := server.gets.Load(); got != 1 {
		t.Errorf("the image was asked for %d times", got)
	}
	if got := most.Load(); got != 1 {
		t.Errorf("%d SSH connections at once, want one", got)
	}
	listed, err := p.List(t.Context(), "ten")
	if err != nil || len(listed) != 10 {
		t.Errorf("%d instances, %v", len(listed), err)
	}
	for _, id := range ids {
		creates.Go(func() {
			if err := p.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
	creates.Wait()
	evict(t, configOf(t, h))
	noVolumes(t, h)
}

func TestLiveStatesOfADomainAreToldApart(t *testing.T) {
	h := shared(t)
	p := open(t, configOf(t, h))
	made, err := p.Create(t.Context(), request("states", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		virsh string
		state provider.State
		says  string
	}{
		{"suspend", provider.StateStopped, "paused by hand"},
		{"resume", provider.StateRunning, ""},
		{"managedsave", provider.StateStopped, "hibernated"},
		{"start", provider.StateRunning, ""},
		{"destroy", provider.StateStopped, "off"},
	} {
		h.Virsh(t, step.virsh, made.Name)
		x, err := p.Get(t.Context(), made.ID)
		if err != nil || x.State != step.state || !strings.Contains(x.Message, step.says) {
			t.Errorf("after %s: %+v, %v, want %s that says %q", step.virsh, x, err, step.state, step.says)
		}
		listed, err := p.List(t.Context(), "states")
		if err != nil || len(listed) != 1 || listed[0].State != step.state {
			t.Errorf("after %s: %+v, %v", step.virsh, listed, err)
		}
	}
	h.Virsh(t, "start", made.Name)
	h.Virsh(t, "managedsave", made.Name)
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Errorf("delete of one that hibernates: %v", err)
	}
	nothingLeft(t, h)
}

func TestLiveADomainThatLostItsDefinitionIsFoundAndDeletedOrMadeAnew(t *testing.T) {
	h := shared(t)
	lost := func() (provider.Instance, *kvm.Provider) {
		made, err := open(t, configOf(t, h)).Create(t.Context(), request("lost", "a", idleSpec()))
		if err != nil {
			t.Fatal(err)
		}
		h.Virsh(t, "undefine", made.Name)
		return made, open(t, configOf(t, h)) // which has never seen it
	}
	made, p := lost()
	listed, err := p.List(t.Context(), "lost")
	if err != nil || len(listed) != 1 || listed[0].ID != made.ID || listed[0].State != provider.StateFailed || !strings.Contains(listed[0].Message, "definition") {
		t.Errorf("%+v, %v", listed, err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, h)

	made, p = lost()
	anew, err := p.Create(t.Context(), request("lost", "a", idleSpec()))
	if err != nil || anew.ID == made.ID {
		t.Fatalf("%+v, %v", anew, err)
	}
	if err := p.Delete(t.Context(), anew.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, h)
}

func TestLiveWhatIsWrongWithAHostHasItsReason(t *testing.T) {
	h := shared(t)
	good := configOf(t, h)
	with := func(change func(*kvm.Config)) kvm.Config {
		c := good
		change(&c)
		return c
	}
	for name, test := range map[string]struct {
		config kvm.Config
		reason provider.Reason
		kind   error
		before string
		after  string
	}{
		"no such pool":           {with(func(c *kvm.Config) { c.StoragePool = "nowhere" }), provider.ReasonStorageNotFound, provider.ErrUnavailable, "", ""},
		"inactive pool":          {good, provider.ReasonStorageNotFound, provider.ErrUnavailable, "pool-destroy default", "pool-start default"},
		"no such network":        {with(func(c *kvm.Config) { c.Network = "nowhere" }), provider.ReasonNetworkNotFound, provider.ErrUnavailable, "", ""},
		"inactive network":       {good, provider.ReasonNetworkNotFound, provider.ErrUnavailable, "net-destroy default", "net-start default"},
		"too little room":        {with(func(c *kvm.Config) { c.MinFreeGiB = 100 }), provider.ReasonInsufficientCapacity, provider.ErrNoCapacity, "", ""},
		"no right to the socket": {with(func(c *kvm.Config) { c.URI = strings.Replace(c.URI, "root@", "visitor@", 1) }), provider.ReasonPermissionDenied, provider.ErrDenied, "", ""},
		"no such socket":         {with(func(c *kvm.Config) { c.URI += "?socket=/run/nothing" }), provider.ReasonUnreachable, provider.ErrUnavailable, "", ""},
		"no such user":           {with(func(c *kvm.Config) { c.URI = strings.Replace(c.URI, "root@", "nobody-of-that-name@", 1) }), provider.ReasonAuthenticationFailed, provider.ErrDenied, "", ""},
		"no key file":            {with(func(c *kvm.Config) { c.SSH.KeyFiles = []string{"/nowhere"} }), provider.ReasonCredentialsUnavailable, provider.ErrDenied, "", ""},
		"unknown host key":       {with(func(c *kvm.Config) { c.SSH.KnownHosts = []string{"/dev/null"} }), provider.ReasonCertificateInvalid, provider.ErrDenied, "", ""},
		"nobody listens":         {with(func(c *kvm.Config) { c.URI = strings.Replace(c.URI, "/system", ":1/system", 1) }), provider.ReasonUnreachable, provider.ErrUnavailable, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if test.before != "" {
				h.Virsh(t, strings.Fields(test.before)...)
			}
			p := open(t, test.config)
			health := p.Check(t.Context())[0]
			_, err := p.Create(t.Context(), request("reasons", "a", idleSpec()))
			if test.after != "" {
				h.Virsh(t, strings.Fields(test.after)...)
			}
			if health.Ready || health.Reason != test.reason || health.Message == "" {
				t.Errorf("check: %+v, want %s", health, test.reason)
			}
			if !errors.Is(err, test.kind) || provider.ReasonOf(err) != test.reason {
				t.Errorf("create: %v (%s), want %v and %s", err, provider.ReasonOf(err), test.kind, test.reason)
			}
			t.Log(health.Message)
		})
	}
	t.Run("no firmware", func(t *testing.T) {
		// libvirt finds firmware by the descriptors in these folders.
		for _, folder := range []string{"/usr/share/qemu/firmware", "/etc/qemu/firmware"} {
			if _, err := h.Run("sh", "-c", "mkdir -p /run/empty && if [ -d "+folder+" ]; then mount --bind /run/empty "+folder+"; fi"); err != nil {
				t.Fatal(err)
			}
		}
		conf := filepath.Join(h.Folder, "etc", "qemu.conf")
		before, err := os.ReadFile(conf)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(conf, append(before, "\nnvram = []\n"...), 0o600); err != nil {
			t.Fatal(err)
		}
		h.Must(t, "kill")
		h.Must(t, "start")
		p := open(t, with(func(c *kvm.Config) {
			c.Firmware = kvm.FirmwareUEFI
			c.Images = map[string]kvm.Image{"idle": {URL: good.Images["idle"].URL, Format: "raw"}}
		}))
		health := p.Check(t.Context())[0]
		_, createErr := p.Create(t.Context(), request("reasons", "a", idleSpec()))
		if err := os.WriteFile(conf, before, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Run("sh", "-c", "umount /usr/share/qemu/firmware; umount /etc/qemu/firmware; true"); err != nil {
			t.Fatal(err)
		}
		h.Must(t, "kill")
		h.Must(t, "start")
		if health.Ready || health.Reason != provider.ReasonUnsupported || !strings.Contains(health.Message, "UEFI") {
			t.Errorf("check: %+v", health)
		}
		if !errors.Is(createErr, provider.ErrUnavailable) || provider.ReasonOf(createErr) != provider.ReasonUnsupported || !strings.Contains(createErr.Error(), "UEFI") {
			t.Errorf("create: %v", createErr)
		}
	})
	t.Run("no KVM", func(t *testing.T) {
		p := open(t, with(func(c *kvm.Config) { c.AllowEmulation = false }))
		_, err := p.Create(t.Context(), request("reasons", "a", idleSpec()))
		if !errors.Is(err, provider.ErrUnavailable) || provider.ReasonOf(err) != provider.ReasonUnsupported || !strings.Contains(err.Error(), "AllowEmulation") {
			t.Errorf("got %v", err)
		}
	})
	nothingLeft(t, h)
}

func TestLiveWithoutForwardingOfSocketsAHelperOnTheHostIsUsed(t *testing.T) {
	h := shared(t)
	config := configOf(t, h)
	config.URI = strings.Replace(config.URI, "/system", ":2222/system", 1)
	p := open(t, config)
	made, err := p.Create(t.Context(), request("helper", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, h)
}

func TestLiveAHostThatFetchesItselfVerifiesToo(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	server := &imageServer{content: bigIdle(8)}
	config := withImage(t, h, server, strings.Repeat("0", 64))
	config.FetchOnHost = true
	_, err := open(t, config).Create(t.Context(), request("pull", "a", idleSpec()))
	if !errors.Is(err, provider.ErrPermanent) || !strings.Contains(err.Error(), sum(server.content)) {
		t.Errorf("a wrong digest: %v", err)
	}
	noVolumes(t, h)
	config = withImage(t, h, server, sum(server.content))
	config.FetchOnHost = true
	p := open(t, config)
	made, err := p.Create(t.Context(), request("pull", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	evict(t, configOf(t, h))
	noVolumes(t, h)
}

func TestLiveABaseIsNeverOverwrittenAndNeverEvictedWhileADiskStandsOnIt(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	first, second := &imageServer{content: bigIdle(2)}, &imageServer{content: bigIdle(2)}
	p := open(t, withImage(t, h, first, sum(first.content)))
	made, err := p.Create(t.Context(), request("base", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	other := withImage(t, h, second, sum(second.content))
	_, err = open(t, other).Create(t.Context(), request("base", "b", idleSpec()))
	if !errors.Is(err, provider.ErrPermanent) || !strings.Contains(err.Error(), sum(first.content)) || !strings.Contains(err.Error(), sum(second.content)) {
		t.Errorf("another digest: %v, want both digests", err)
	}
	other.Images = nil
	if gone, err := open(t, other).EvictImages(t.Context()); err != nil || len(gone) != 0 {
		t.Errorf("evicted %q, %v", gone, err)
	}
	if x, err := p.Get(t.Context(), made.ID); err != nil || x.State != provider.StateRunning {
		t.Errorf("%+v, %v", x, err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	if gone, err := open(t, other).EvictImages(t.Context()); err != nil || len(gone) != 1 {
		t.Errorf("evicted %q, %v", gone, err)
	}
	noVolumes(t, h)
}

func TestLiveADaemonThatHangsIsATimeoutAndOthersAreNotTakenAlong(t *testing.T) {
	h := shared(t)
	p := open(t, configOf(t, h))
	ready(t, p)
	h.Must(t, "freeze")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	begin := time.Now()
	health := p.Check(ctx)[0]
	cancel()
	if took := time.Since(begin); health.Ready || health.Reason != provider.ReasonTimeout || took > 2*time.Second {
		t.Errorf("%+v after %s", health, took)
	}
	begin = time.Now()
	_, err := p.List(t.Context(), "x")
	if took := time.Since(begin); !errors.Is(err, provider.ErrUnavailable) || took > 15*time.Second {
		t.Errorf("a list without an end of its own: %v after %s", err, took)
	}
	h.Must(t, "thaw")
	ready(t, p)
}

func TestLiveInstancesOutliveTheDaemonAndSlowLinksAreFine(t *testing.T) {
	h := shared(t)
	config := configOf(t, h)
	address, known := h.Delay(t, 20*time.Millisecond)
	config.URI, config.SSH.KnownHosts = "qemu+ssh://root@"+address+"/system", []string{known}
	p := open(t, config)
	h.Must(t, "lose 0.02")
	defer func() { h.Must(t, "keep") }()
	made, err := p.Create(t.Context(), request("slow", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	h.Must(t, "kill")
	if _, err := p.Get(t.Context(), made.ID); !errors.Is(err, provider.ErrUnavailable) {
		t.Errorf("without a daemon: %v", err)
	}
	h.Must(t, "start")
	ready(t, p)
	if x, err := p.Get(t.Context(), made.ID); err != nil || x.State != provider.StateRunning {
		t.Errorf("%+v, %v", x, err)
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	nothingLeft(t, h)
}

func TestLiveAnUploadTakesAConstantAmountOfMemory(t *testing.T) {
	h := shared(t)
	evict(t, configOf(t, h))
	const size = 512 << 20
	block := bigIdle(1)
	server := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(size))
		for range size / len(block) {
			if _, err := io.Copy(w, bytes.NewReader(block)); err != nil {
				return
			}
		}
	})
	config := configOf(t, h)
	config.Images = map[string]kvm.Image{"idle": {URL: h.Serve(t, server) + "/big.img", Format: "raw", Firmware: kvm.FirmwareBIOS}}
	var most uint64
	config.Progress = func(kvm.Progress) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapInuse)
	}
	p := open(t, config)
	made, err := p.Create(t.Context(), request("memory", "a", idleSpec()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MiB of heap in use at most while %d MiB were uploaded", most>>20, size>>20)
	if most > 64<<20 {
		t.Error("that grows with the image")
	}
	if err := p.Delete(t.Context(), made.ID); err != nil {
		t.Error(err)
	}
	evict(t, configOf(t, h))
}
