package memconn_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/memconn"
)

func TestWhatOneEndWritesTheOtherReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := memconn.Pair("a", "b")
		var wg sync.WaitGroup
		want := bytes.Repeat([]byte("0123456789"), 1000)
		wg.Go(func() {
			for chunk := range slices.Chunk(want, 7) {
				if _, err := a.Write(chunk); err != nil {
					t.Error(err)
				}
			}
			a.Close()
		})
		got, err := io.ReadAll(b)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("read %d bytes and %v, want %d bytes and no error", len(got), err, len(want))
		}
		wg.Wait()
		if a.LocalAddr().String() != "a" || a.RemoteAddr().String() != "b" || b.LocalAddr().String() != "b" {
			t.Errorf("addresses are %v and %v", a.LocalAddr(), a.RemoteAddr())
		}
	})
}

func TestADeadlineEndsAReadThatWaitsAlready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := memconn.Pair("a", "b")
		defer a.Close()
		defer b.Close()
		start := time.Now()
		time.AfterFunc(time.Second, func() { a.SetReadDeadline(time.Now().Add(2 * time.Second)) })
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
		}
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("took %s, want 3s", took)
		}
		var timeout net.Error
		a.SetDeadline(time.Now().Add(-time.Second))
		if _, err := a.Write([]byte("x")); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("write after its deadline: got %v, want a timeout", err)
		}
		a.SetDeadline(time.Time{})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Errorf("write after the deadline was removed: %v", err)
		}
	})
}

func TestAFrozenEndIsSilentAndItsBytesArriveAfterTheThaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := memconn.Pair("a", "b")
		defer b.Close()
		a.Freeze()
		if _, err := a.Write([]byte("late")); err != nil {
			t.Fatal(err)
		}
		a.Close()
		b.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := b.Read(make([]byte, 8)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v, want silence until the deadline", err)
		}
		if _, err := b.Write([]byte("x")); err != nil {
			t.Errorf("a write to a peer whose end has not been heard of: %v", err)
		}
		b.SetReadDeadline(time.Time{})
		a.Thaw()
		if got, err := io.ReadAll(b); string(got) != "late" || err != nil {
			t.Errorf("after the thaw: %q and %v", got, err)
		}
		if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("a write to a peer known to be closed: got %v, want EPIPE", err)
		}
	})
}

func TestACutFailsBothEndsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := memconn.Pair("a", "b")
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want ECONNRESET", err)
			}
		})
		synctest.Wait()
		a.Cut()
		wg.Wait()
		if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want ECONNRESET", err)
		}
	})
}

func TestCloseEndsTheOwnReadAndIsRepeatable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := memconn.Pair("a", "b")
		a.SetDeadline(time.Now().Add(time.Hour))
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Errorf("got %v, want net.ErrClosed", err)
			}
		})
		synctest.Wait()
		a.Close()
		a.Close()
		wg.Wait()
		if _, err := a.Write(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want net.ErrClosed", err)
		}
	})
}
