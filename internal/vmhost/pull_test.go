package vmhost

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"

	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
	"crawl.example.com/egress/provider"
)

// shell is what the host's shell does with a command and its input.
type shell func(command, input string) (out, stderr string, status int)

// overSSH returns a Host that is reached over SSH and has its images fetched there.
func overSSH(t *testing.T, run shell) (*Host, *libvirttest.Host) {
	t.Helper()
	hostKey := sshtest.NewKey("ed25519")
	userKey, file := sshtest.NewKeyFile("ed25519", "")
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, file, 0o600); err != nil {
		t.Fatal(err)
	}
	peer := libvirttest.New(libvirttest.Config{})
	server := &sshtest.Server{
		HostKeys: []ssh.Signer{hostKey}, Users: []ssh.PublicKey{userKey.PublicKey()},
		Socket: func(_ string, conn io.ReadWriteCloser) { peer.Serve(conn) },
		Exec: func(command string, ch ssh.Channel, _ <-chan struct{}) int {
			if command == "true" { // of every new connection
				return 0
			}
			input, _ := io.ReadAll(ch)
			out, stderr, status := run(command, string(input))
			_, _ = io.WriteString(ch, out)
			_, _ = io.WriteString(ch.Stderr(), stderr)
			return status
		},
	}
	// The server is in memory, and the client wants an address.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			inside, err := server.Dial(t.Context(), "tcp", "host:22")
			if err != nil {
				conn.Close()
				return
			}
			running.Go(func() { _, _ = io.Copy(inside, conn); inside.Close() })
			running.Go(func() { _, _ = io.Copy(conn, inside); conn.Close() })
		}
	})
	config := valid()
	config.URI, config.FetchOnHost = "qemu+ssh://root@"+listener.Addr().String()+"/system", true
	config.SSH = SSH{KeyFiles: []string{keyFile}, PinnedKeys: []string{strings.TrimSpace(string(ssh.MarshalAuthorizedKey(hostKey.PublicKey())))}}
	config.Images = map[string]Image{
		"debian": {URL: `https://images.example/it's "new"?token=secret`, SHA256: sum(qcow2(1<<30, imageBytes))},
		"raw":    {URL: "https://images.example/raw", Format: "raw", Firmware: "bios"},
	}
	h, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = h.Close() // always nil
		listener.Close()
		server.Close()
		peer.Close()
		running.Wait()
	})
	return h, peer
}

// curl puts content into the volume that the command names, and answers as the host would.
func curl(peer **libvirttest.Host, content []byte, seen *[]string) shell {
	return func(command, input string) (string, string, int) {
		*seen = append(*seen, command, input)
		_, rest, _ := strings.Cut(input, `output = "`+folder)
		name, _, _ := strings.Cut(rest, `"`)
		(*peer).ChangeVolume(name, func(v *libvirttest.Volume) { v.Content = content })
		return fmt.Sprintf("%s  %s\n%d\n", sum(content), folder+name, len(content)), "", 0
	}
}

func TestAHostThatFetchesImagesItselfVerifiesThemToo(t *testing.T) {
	good := qcow2(1<<30, imageBytes)
	var peer *libvirttest.Host
	var seen []string
	h, host := overSSH(t, func(command, input string) (string, string, int) { return curl(&peer, good, &seen)(command, input) })
	peer = host
	if _, err := h.Create(t.Context(), request("a", spec()), ""); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 2 || strings.Contains(seen[0], "secret") || strings.Contains(seen[0], "images.example") {
		t.Errorf("the command shows the URL to others on the host: %q", seen[0])
	}
	if !strings.Contains(seen[0], "--proto-redir '=https' ") {
		t.Errorf("curl may be sent from https to http: %q", seen[0])
	}
	if want := `url = "https://images.example/it's \"new\"?token=secret"` + "\n"; !strings.HasPrefix(seen[1], want) {
		t.Errorf("curl is told %q, want %q", seen[1], want)
	}
	var base libvirttest.Volume
	for _, v := range host.Volumes() {
		if v.Name == "base-debian.qcow2" {
			base = v
		}
	}
	if base.Capacity != 1<<30 {
		t.Errorf("published as %+v", base)
	}
	s := spec()
	s.Image, s.DiskGiB = "raw", 0
	if _, err := h.Create(t.Context(), request("b", s), ""); err == nil || !strings.Contains(err.Error(), "is a qcow2 image, and Format says raw") {
		t.Errorf("an image of another format: %v", err)
	}
}

func TestWhatAHostFetchesWrongIsNotPublished(t *testing.T) {
	for _, c := range []struct {
		what   string
		run    func(peer **libvirttest.Host) shell
		kind   error
		reason provider.Reason
		text   string
	}{
		{"another digest", func(peer **libvirttest.Host) shell { return curl(peer, []byte("other"), new([]string)) },
			provider.ErrPermanent, provider.ReasonImageNotFound, "and the configuration says " + sum(qcow2(1<<30, imageBytes))},
		{"no curl", func(**libvirttest.Host) shell {
			return func(string, string) (string, string, int) { return "", "curl: not found", 127 }
		}, provider.ErrUnavailable, provider.ReasonUnsupported, "the host has no curl"},
		{"not there", func(**libvirttest.Host) shell {
			return func(string, string) (string, string, int) {
				return "", "curl: (22) The requested URL returned error: 404", 22
			}
		}, provider.ErrUnavailable, provider.ReasonImageNotFound, "404"},
		{"gone for good", func(**libvirttest.Host) shell {
			return func(string, string) (string, string, int) {
				return "", "curl: (22) The requested URL returned error: 410", 22
			}
		}, provider.ErrPermanent, provider.ReasonImageNotFound, "410"},
		{"nonsense", func(**libvirttest.Host) shell {
			return func(string, string) (string, string, int) { return "Welcome!\n", "", 0 }
		}, provider.ErrUnavailable, provider.ReasonUnknown, `the host said "Welcome!\n"`},
		{"no size", func(**libvirttest.Host) shell {
			return func(string, string) (string, string, int) {
				return sum(qcow2(1<<30, imageBytes)) + " f many\n", "", 0
			}
		}, provider.ErrUnavailable, provider.ReasonUnknown, `the host said "many"`},
	} {
		var peer *libvirttest.Host
		run := c.run(&peer)
		h, host := overSSH(t, func(command, input string) (string, string, int) { return run(command, input) })
		peer = host
		_, err := h.Create(t.Context(), request("a", spec()), "")
		wantKind(t, err, c.kind, c.reason, c.text)
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error holds the URL's secret: %v", c.what, err)
		}
		if v := host.Volumes(); len(v) > 0 {
			t.Errorf("%s: left %+v", c.what, v)
		}
	}
}

func TestCurlsExitStatusIsTold(t *testing.T) {
	for status, want := range map[int]struct {
		kind   error
		reason provider.Reason
		text   string
	}{
		6:   {provider.ErrUnavailable, provider.ReasonImageNotFound, "the host could not get shown: said"},
		22:  {provider.ErrUnavailable, provider.ReasonImageNotFound, "the host could not get shown"},
		23:  {provider.ErrUnavailable, provider.ReasonPermissionDenied, "the right to write into the storage pool's folder"},
		63:  {provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "does not fit"},
		127: {provider.ErrUnavailable, provider.ReasonUnsupported, "no curl"},
	} {
		err := pullFault(&sshconn.ExitError{Status: status, Stderr: "said"}, "shown")
		f, ok := errors.AsType[*Fault](err)
		if !ok || !errors.Is(f.Kind, want.kind) || f.Reason != want.reason || !strings.Contains(f.Message, want.text) {
			t.Errorf("%d: %+v", status, f)
		}
	}
	if err := pullFault(io.EOF, "shown"); !errors.Is(err, io.EOF) {
		t.Errorf("no exit at all: %v", err)
	}
}

func TestTextsAreQuotedForCurlAndTheShell(t *testing.T) {
	if got := curlQuote("a\"b\\c\nd\re\tf"); got != `"a\"b\\c\nd\re\tf"` {
		t.Errorf("curl: %s", got)
	}
	if got := shellQuote("a'b $(c)"); got != `'a'\''b $(c)'` {
		t.Errorf("shell: %s", got)
	}
	lines := slices.Collect(strings.Lines(curlQuote("https://x/\noutput = /etc/passwd")))
	if len(lines) != 1 {
		t.Errorf("a URL has %d lines of curl's configuration", len(lines))
	}
}
