package vmhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"crawl.example.com/egress/internal/hostpool"
	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/internal/libvirt/libvirttest"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/provider"
)

func TestEveryErrorBecomesAFaultWithWhatToDo(t *testing.T) {
	e := func(code golibvirt.ErrorNumber) error { return golibvirt.Error{Code: uint32(code), Message: "text"} }
	mine := fault(provider.ErrPermanent, provider.ReasonUnsupported, "mine")
	for _, c := range []struct {
		err    error
		kind   error
		reason provider.Reason
		answer bool // says nothing against the connection
		begun  error
	}{
		{mine, provider.ErrPermanent, provider.ReasonUnsupported, true, provider.ErrPermanent},
		{e(golibvirt.ErrNoDomain), provider.ErrNotFound, provider.ReasonUnknown, true, provider.ErrNotFound},
		{e(golibvirt.ErrNoStoragePool), provider.ErrUnavailable, provider.ReasonStorageNotFound, true, provider.ErrUnavailable},
		{e(golibvirt.ErrNoNetwork), provider.ErrUnavailable, provider.ReasonNetworkNotFound, true, provider.ErrUnavailable},
		{e(golibvirt.ErrXMLDetail), provider.ErrPermanent, provider.ReasonUnsupported, true, provider.ErrPermanent},
		{e(golibvirt.ErrNoMemory), provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, true, provider.ErrNoCapacity},
		{e(golibvirt.ErrAgentUnresponsive), provider.ErrUnavailable, provider.ReasonTimeout, true, provider.ErrUnavailable},
		{e(golibvirt.ErrAccessDenied), provider.ErrDenied, provider.ReasonPermissionDenied, true, provider.ErrDenied},
		{e(golibvirt.ErrInternalError), provider.ErrUnavailable, provider.ReasonUnknown, true, provider.ErrUnavailable},
		{golibvirt.ErrUnsupported, provider.ErrPermanent, provider.ReasonUnsupported, true, provider.ErrPermanent},
		{libvirt.ErrNoSocket, provider.ErrUnavailable, provider.ReasonUnreachable, false, provider.ErrOutcomeUnknown},
		{dialError("unix", syscall.EACCES), provider.ErrDenied, provider.ReasonPermissionDenied, false, provider.ErrOutcomeUnknown},
		{dialError("tcp", syscall.EPERM), provider.ErrUnavailable, provider.ReasonUnreachable, false, provider.ErrOutcomeUnknown},
		{sshconn.ErrSocketDenied, provider.ErrDenied, provider.ReasonPermissionDenied, true, provider.ErrOutcomeUnknown},
		{&sshconn.AuthError{Err: io.EOF}, provider.ErrDenied, provider.ReasonAuthenticationFailed, false, provider.ErrOutcomeUnknown},
		{&sshconn.CredentialsError{Err: io.EOF}, provider.ErrDenied, provider.ReasonCredentialsUnavailable, false, provider.ErrOutcomeUnknown},
		{&sshconn.HostKeyError{Kind: io.EOF}, provider.ErrDenied, provider.ReasonCertificateInvalid, false, provider.ErrOutcomeUnknown},
		{libvirt.ErrLost, provider.ErrUnavailable, provider.ReasonUnreachable, false, provider.ErrOutcomeUnknown},
		{hostpool.ErrClosed, provider.ErrUnavailable, provider.ReasonUnreachable, false, provider.ErrOutcomeUnknown},
		{context.DeadlineExceeded, provider.ErrUnavailable, provider.ReasonTimeout, false, provider.ErrOutcomeUnknown},
		{context.Canceled, provider.ErrUnavailable, provider.ReasonTimeout, false, provider.ErrOutcomeUnknown},
		{&libvirt.StreamError{Err: io.ErrUnexpectedEOF}, provider.ErrUnavailable, provider.ReasonUnreachable, true, provider.ErrOutcomeUnknown},
	} {
		wrapped := fmt.Errorf("wrapped: %w", c.err)
		f := judge(wrapped)
		if !errors.Is(f.Kind, c.kind) || f.Reason != c.reason || f.Message == "" {
			t.Errorf("%v: %v, %s, %q", c.err, f.Kind, f.Reason, f.Message)
		}
		if isAnswer(wrapped) != c.answer {
			t.Errorf("%v is an answer: %t", c.err, !c.answer)
		}
		if got := judge(begun(wrapped)); !errors.Is(got.Kind, c.begun) {
			t.Errorf("%v, of something begun: %v, want %v", c.err, got.Kind, c.begun)
		}
	}
	if begun(nil) != nil {
		t.Error("no error has become one")
	}
}

func dialError(network string, cause error) error {
	return &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", cause)}
}

// Whatever is wrong with a file or socket on our own side, and be it that it may not be read, the host has no part in it.
func TestOurOwnFilesAreNotBlamedOnTheHost(t *testing.T) {
	about := func(what string, err error) {
		t.Helper()
		if f := judge(err); !errors.Is(f.Kind, provider.ErrDenied) || f.Reason != provider.ReasonCredentialsUnavailable ||
			!strings.Contains(f.Message, what) || strings.Contains(f.Message, "libvirt") {
			t.Errorf("%v, %s, %q, want it to be about %s", f.Kind, f.Reason, f.Message, what)
		}
	}
	for _, cause := range []error{syscall.EACCES, syscall.EPERM, syscall.ENOENT, syscall.ENOTDIR, syscall.EISDIR, syscall.ECONNREFUSED, syscall.EMFILE, os.ErrDeadlineExceeded} {
		for _, what := range []string{"key file", "known hosts"} {
			file := &fs.PathError{Op: "open", Path: "/the/file", Err: cause}
			about("/the/file", &hostpool.DialError[string]{Host: "attic", Err: &sshconn.CredentialsError{Address: "root@host:22", Err: fmt.Errorf("%s: %w", what, file)}})
		}
		about("/the/agent", &sshconn.CredentialsError{Address: "root@host:22", Err: fmt.Errorf("SSH agent /the/agent: %w", dialError("unix", cause))})
	}

	folder := t.TempDir()
	none, text, locked, socket := filepath.Join(folder, "none"), filepath.Join(folder, "text"), filepath.Join(folder, "locked"), filepath.Join(folder, "socket")
	for _, file := range []string{text, locked} {
		if err := os.WriteFile(file, []byte("@revoked * no key\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(locked, 0); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = listener.Close() // nobody listens there any more
	keys := func(files ...string) SSH { return SSH{InsecureIgnoreHostKey: true, KeyFiles: files} }
	agent := func(socket string) SSH { return SSH{InsecureIgnoreHostKey: true, Agent: socket} }
	known := func(file string) SSH { return SSH{KnownHosts: []string{file}, KeyFiles: []string{none}} }
	for file, all := range map[string][]SSH{
		none:   {keys(none), agent(none), known(none)},
		folder: {keys(folder), agent(folder), known(folder)},
		text:   {keys(text), agent(text), known(text)},
		locked: {keys(locked), agent(locked), known(locked)}, // to root it is text
		socket: {agent(socket)},
	} {
		for _, ssh := range all {
			h, err := New(Config{Entry: "home", Target: "attic", URI: "qemu+ssh://root@host.invalid/system", SSH: ssh, Maker: "kvm", BasePrefix: "base-", Uploads: make(chan struct{}, 1)})
			if err != nil {
				t.Fatal(err)
			}
			_, err = h.List(t.Context(), "own")
			wantKind(t, err, provider.ErrDenied, provider.ReasonCredentialsUnavailable, file)
			if health := h.Check(t.Context()); health.Reason != provider.ReasonCredentialsUnavailable || !strings.Contains(health.Message, file) {
				t.Errorf("%+v, want it to be about %s", health, file)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A create may define its domain and end between the moment in which another asks what is in use and the moment in which that
// one has its answer.
func TestACreateThatEndsWhileAnotherAsksCounts(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.MaxInstances = 1 }, func(t *testing.T, r *rig) {
		first := r.create(t, "first", spec()) // so that the image is there
		if err := r.Delete(t.Context(), first.ID); err != nil {
			t.Fatal(err)
		}
		r.peer.Inject(libvirttest.Fault{Procedure: "NodeGetInfo", Times: 1, Delay: time.Minute})
		failed := make(chan error)
		go func() {
			_, err := r.Create(t.Context(), request("slow", spec()), "")
			failed <- err
		}()
		time.Sleep(time.Second)
		x := r.create(t, "quick", spec())
		wantKind(t, <-failed, provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "1 of MaxInstances 1 are there")
		if len(r.promises.ended) > 0 || len(r.promises.open) > 0 || len(r.promises.kept) > 0 {
			t.Errorf("kept for nobody: %+v", r.promises)
		}
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		r.create(t, "slow", spec())
	})
}

func TestAPoolThatIsBusyIsReadAnewALittleLater(t *testing.T) {
	busy := libvirttest.Fault{Procedure: "StoragePoolRefresh", Code: golibvirt.ErrInternalError, Message: "internal error: pool 'default' has asynchronous jobs running."}
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		few := busy
		few.Times = 10
		r.peer.Inject(few)
		begin := time.Now()
		if err := r.Delete(t.Context(), x.ID); err != nil || time.Since(begin) > time.Second || len(r.left()) > 0 {
			t.Errorf("%v after %s, left %q", err, time.Since(begin), r.left())
		}
		x = r.create(t, "b", spec())
		mend := r.peer.Inject(busy)
		begin = time.Now()
		wantKind(t, r.Delete(t.Context(), x.ID), provider.ErrUnavailable, provider.ReasonUnknown, "asynchronous jobs")
		if took := time.Since(begin); took != refreshPatience {
			t.Errorf("it was given up after %s", took)
		}
		mend()
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Error(err)
		}
	})
}

func TestAFileThatIsGoneAlreadyIsDeleted(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		r.peer.Inject(libvirttest.Fault{Procedure: "StorageVolDelete", Times: 1, Code: golibvirt.ErrSystemError, Message: "cannot unlink file: No such file or directory"})
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Error(err)
		}
	})
}

func TestAGuestThatIsWaitedForKeepsNobodyLongerThanTheirContext(t *testing.T) {
	inBubble(t, func(c *Config, _ *libvirttest.Config) { c.ShutdownGrace = time.Minute }, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begin := time.Now()
		err := r.Delete(ctx, x.ID)
		wantKind(t, err, provider.ErrOutcomeUnknown, provider.ReasonTimeout, "")
		if took := time.Since(begin); took != 5*time.Second {
			t.Errorf("it took %s", took)
		}
		// One that is off is not waited for.
		r.peer.ChangeDomain("own--a--1", func(d *libvirttest.Domain) { d.State = golibvirt.DomainShutoff })
		begin = time.Now()
		if err := r.Delete(t.Context(), x.ID); err != nil || time.Since(begin) > 0 {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
	})
}

func TestSizesAreReadInTheirUnits(t *testing.T) {
	for unit, want := range map[string]uint64{"": 3, "bytes": 3, "KiB": 3 << 10, "MiB": 3 << 20, "GiB": 3 << 30} {
		if got := bytesOf(&libvirtxml.StorageVolumeSize{Unit: unit, Value: 3}); got != want {
			t.Errorf("3 %s are %d bytes", unit, got)
		}
	}
	if got := bytesOf(nil); got != 0 {
		t.Errorf("nothing is %d bytes", got)
	}
}

func TestTheGroupOfAnInstanceIsKnown(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.Placement.Group = "g"
		x := r.create(t, "a", s)
		if r.GroupOf(x.ID) != "g" || r.GroupOf("x") != "" || r.GroupOf(formatUUID(newUUID())) != "" || r.Target() != "attic" {
			t.Errorf("%q on %s", r.GroupOf(x.ID), r.Target())
		}
		if w := Warnings(s); len(w) > 0 {
			t.Errorf("%q", w)
		}
		if !strings.Contains(r.peer.Domains()[0].Metadata[metadataURI], "<group>g</group>") {
			t.Error("the group is not kept on the host")
		}
	})
}
