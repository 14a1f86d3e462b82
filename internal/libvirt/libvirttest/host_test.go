package libvirttest

import (
	"errors"
	"io"
	"net"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
)

type dialer struct{ conn net.Conn }

func (d dialer) Dial() (net.Conn, error) { return d.conn, nil }

// inBubble runs f with a client of a host in fake time.
func inBubble(t *testing.T, f func(t *testing.T, h *Host, c *golibvirt.Libvirt)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Latency: time.Second})
		defer h.Close()
		conn, err := h.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c := golibvirt.NewWithDialer(dialer{conn})
		if err := c.ConnectToURI(golibvirt.QEMUSystem); err != nil {
			t.Fatal(err)
		}
		f(t, h, c)
	})
}

func TestAClientHasFiveCallsAtATimeAndEachTakesTheLatency(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Host, c *golibvirt.Libvirt) {
		begin := time.Now()
		var all sync.WaitGroup
		for range 2 * maxRequests {
			all.Go(func() {
				if v, err := c.ConnectGetLibVersion(); err != nil || v != 9_000_000 {
					t.Errorf("version %d, %v", v, err)
				}
			})
		}
		all.Wait()
		if took := time.Since(begin); took != 2*time.Second {
			t.Errorf("ten calls of a second took %s", took)
		}
		if n := h.Calls()["ConnectGetLibVersion"]; n != 2*maxRequests || h.Conns() != 1 || h.Dials() != 1 {
			t.Errorf("%d calls, %d connections of %d", n, h.Conns(), h.Dials())
		}
	})
}

func TestWhatIsNotThereIsUnsupportedAndGarbageEndsTheConnection(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Host, c *golibvirt.Libvirt) {
		if _, err := c.ConnectGetHostname(); !errors.Is(err, golibvirt.ErrUnsupported) {
			t.Errorf("a procedure that is not there: %v", err)
		}
		conn, err := h.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte("GET / HTTP/1.1\r\nHost: libvirt\r\n\r\n")) // into memory
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("after garbage: %v", err)
		}
		h.SetDown(true)
		if _, err := h.Dial(t.Context()); err == nil {
			t.Error("a host that is down was dialled")
		}
	})
}

func TestADownloadGivesWhatAnUploadSent(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Host, c *golibvirt.Libvirt) {
		pool, err := c.StoragePoolLookupByName("default")
		if err != nil {
			t.Fatal(err)
		}
		v, err := c.StorageVolCreateXML(pool, "<volume><name>v</name><capacity>0</capacity></volume>", 0)
		if err != nil {
			t.Fatal(err)
		}
		read, write := io.Pipe()
		go func() {
			for range 3 {
				_, _ = write.Write(make([]byte, 300<<10)) // until the reader is done
			}
			_ = write.Close() // always nil
		}()
		if err := c.StorageVolUpload(v, read, 0, 0, 0); err != nil {
			t.Fatal(err)
		}
		n := &counter{}
		if err := c.StorageVolDownload(v, n, 0, 0, 0); err != nil || n.bytes != 900<<10 {
			t.Errorf("%d bytes, %v", n.bytes, err)
		}
		if _, err := c.StorageVolCreateXML(pool, "<volume><name>v</name></volume>", 0); !isCode(err, golibvirt.ErrStorageVolExist) {
			t.Errorf("the same name again: %v", err)
		}
		if err := c.StorageVolUpload(v, io.LimitReader(zeros{}, 20), 0, 10, 0); !isCode(err, golibvirt.ErrSystemError) {
			t.Errorf("more than was declared: %v", err)
		}
		boom := errors.New("boom")
		if err := c.StorageVolUpload(v, io.MultiReader(io.LimitReader(zeros{}, 20), broken{boom}), 0, 0, 0); !errors.Is(err, boom) {
			t.Errorf("a source that breaks: %v", err)
		}
		if _, err := c.ConnectGetLibVersion(); err != nil {
			t.Errorf("after that: %v", err)
		}
	})
}

func isCode(err error, code golibvirt.ErrorNumber) bool {
	e, ok := errors.AsType[golibvirt.Error](err)
	return ok && golibvirt.ErrorNumber(e.Code) == code
}

type counter struct{ bytes int }

func (c *counter) Write(p []byte) (int, error) { c.bytes += len(p); return len(p), nil }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

func FuzzDecode(f *testing.F) {
	f.Add(encode(nil, reflect.ValueOf(golibvirt.DomainSetMetadataArgs{Dom: golibvirt.Domain{Name: "a"}, Metadata: golibvirt.OptString{"<x/>"}})))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, payload []byte) {
		args, err := arguments[golibvirt.DomainSetMetadataArgs](payload)
		if err != nil {
			return
		}
		again, err := arguments[golibvirt.DomainSetMetadataArgs](encode(nil, reflect.ValueOf(args)))
		if err != nil || !reflect.DeepEqual(again, args) {
			t.Fatalf("%+v is read back as %+v: %v", args, again, err)
		}
	})
}
