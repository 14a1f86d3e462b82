package vmhost

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/provider"
)

// download reads all of an image as transfer would.
func (w *web) download(ctx context.Context, image Image) ([]byte, *content, error) {
	if image.URL == "" {
		image.URL = "https://images.example/image?token=secret"
	}
	if image.Format == "" {
		image.Format = formatRaw
	}
	src, err := openSource(ctx, w.client, image, func(int64, int64) {})
	if err != nil {
		return nil, nil, err
	}
	defer src.Close()
	c, err := openContent(src, image)
	if err != nil {
		return nil, nil, err
	}
	b, err := io.ReadAll(c)
	return b, c, err
}

// withWeb runs f with a server in fake time.
func withWeb(t *testing.T, f func(t *testing.T, w *web)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWeb()
		defer w.close()
		f(t, w)
	})
}

var payload = bytes.Repeat([]byte("0123456789abcdef"), 4096)

func packed(content []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write(content) // into memory
	_ = z.Close()
	return b.Bytes()
}

func TestAnImageIsReadWholeWithAndWithoutItsLength(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		w.mux.HandleFunc("/image", func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("chunked") != "" {
				rw.(http.Flusher).Flush()
			}
			_, _ = rw.Write(payload)
		})
		sha512sum := sha512.Sum512(payload)
		for _, image := range []Image{
			{}, {SHA256: sum(payload)}, {SHA512: hex.EncodeToString(sha512sum[:])},
			{URL: "https://images.example/image?chunked=1"}, {URL: "https://images.example/image?chunked=1", SHA256: sum(payload)},
		} {
			b, c, err := w.download(t.Context(), image)
			if err != nil || !bytes.Equal(b, payload) || c.read != int64(len(payload)) {
				t.Errorf("%+v: %d bytes, %v", image, len(b), err)
			}
		}
	})
}

func TestWhatEndsWithTheConnectionIsNotTakenForWhole(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		length := len(payload) / 2
		w.mux.HandleFunc("/image", func(rw http.ResponseWriter, r *http.Request) {
			conn, _, err := rw.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = conn.Write([]byte("HTTP/1.0 200 OK\r\n\r\n"))
			_, _ = conn.Write(payload[:length])
		})
		_, _, err := w.download(t.Context(), Image{})
		wantKind(t, (&Host{}).wrap("create", "", err), provider.ErrUnavailable, provider.ReasonUnsupported, "or a digest")
		_, _, err = w.download(t.Context(), Image{SHA256: sum(payload)})
		wantKind(t, (&Host{}).wrap("create", "", err), provider.ErrUnavailable, provider.ReasonImageNotFound, "may have broken before the end")
		length = len(payload)
		if b, _, err := w.download(t.Context(), Image{SHA256: sum(payload)}); err != nil || !bytes.Equal(b, payload) {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	})
}

func TestADownloadThatBreaksOffGoesOnWhereItWas(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		w.mux.HandleFunc("/image", func(rw http.ResponseWriter, r *http.Request) {
			begin := 0
			if from := r.Header.Get("Range"); from != "" {
				_, _ = fmt.Sscanf(from, "bytes=%d-", &begin)
				if r.Header.Get("If-Range") != `"v1"` {
					t.Errorf("asked to go on with If-Range %q", r.Header.Get("If-Range"))
				}
				rw.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", begin, len(payload)-1, len(payload)))
			}
			rw.Header().Set("ETag", `"v1"`)
			rw.Header().Set("Content-Length", fmt.Sprint(len(payload)-begin))
			if begin > 0 {
				rw.WriteHeader(http.StatusPartialContent)
			}
			_, _ = rw.Write(payload[begin:min(begin+9000, len(payload))])
		})
		b, _, err := w.download(t.Context(), Image{SHA256: sum(payload)})
		if err != nil || !bytes.Equal(b, payload) {
			t.Errorf("%d bytes, %v", len(b), err)
		}
		if n, want := w.asked("/image"), (len(payload)+8999)/9000; n != want {
			t.Errorf("asked %d times, want %d", n, want)
		}
	})
}

func TestADownloadThatCantGoOnFails(t *testing.T) {
	begin := func(rw http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") != "" {
			return false
		}
		rw.Header().Set("Content-Length", fmt.Sprint(len(payload)))
		_, _ = rw.Write(payload[:5000])
		return true
	}
	partial := func(rw http.ResponseWriter, from string, length int) {
		rw.Header().Set("Content-Range", from)
		rw.Header().Set("Content-Length", fmt.Sprint(length))
		rw.WriteHeader(http.StatusPartialContent)
	}
	for _, c := range []struct {
		what    string
		handler http.HandlerFunc
		image   Image
		kind    error
		reason  provider.Reason
		want    string
		asked   int
	}{
		{"always the whole", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				_, _ = rw.Write(payload)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "broke at byte 5000 and the server can't go on", 2},
		{"somewhere else", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				partial(rw, "bytes 0-9/10", 10)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "asked to go on at byte 5000, the server did not", 2},
		{"another length", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				partial(rw, "bytes 5000-5009/5010", 10)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "it has changed during the download", 2},
		{"gone meanwhile", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				http.NotFound(rw, r)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "404", 2},
		{"out of order meanwhile", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				http.Error(rw, "later", http.StatusServiceUnavailable)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "broke off at byte 5000 of 65536: get https://images.example/image: 503", 1 + maxResumes},
		{"nothing more", func(rw http.ResponseWriter, r *http.Request) {
			if !begin(rw, r) {
				partial(rw, fmt.Sprintf("bytes 5000-%d/%d", len(payload)-1, len(payload)), len(payload)-5000)
			}
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "broke off at byte 5000 of 65536", 1 + maxResumes},
		{"short without a length", func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = rw.Write(payload[:5000])
			rw.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "broke off at byte 5000", 1},
		{"another digest", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(payload[:5000]) },
			Image{SHA256: sum(payload)}, provider.ErrPermanent, provider.ReasonImageNotFound, sum(payload[:5000]) + ", and the configuration says " + sum(payload), 1},
		{"not there", http.NotFound, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "404", 1},
		{"gone for good", func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusGone) },
			Image{}, provider.ErrPermanent, provider.ReasonImageNotFound, "410", 1},
		{"forbidden", func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusForbidden) },
			Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "403", 1},
		{"nothing in it", func(http.ResponseWriter, *http.Request) {}, Image{}, provider.ErrPermanent, provider.ReasonImageNotFound, "is empty", 1},
		{"silent", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "timeout awaiting response headers", 1},
		{"silent in the middle", func(rw http.ResponseWriter, r *http.Request) {
			_, _ = rw.Write(payload[:5000])
			rw.(http.Flusher).Flush()
			<-r.Context().Done()
		}, Image{}, provider.ErrUnavailable, provider.ReasonTimeout, "nothing for 1m0s", 1},
		{"sent elsewhere in the clear", func(rw http.ResponseWriter, r *http.Request) {
			http.Redirect(rw, r, "http://images.example/image", http.StatusFound)
		}, Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "redirected from https to http", 1},
		{"sent around", func(rw http.ResponseWriter, r *http.Request) { http.Redirect(rw, r, "/image", http.StatusFound) },
			Image{}, provider.ErrUnavailable, provider.ReasonImageNotFound, "more than ten redirects", 10},
		{"no gzip", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(payload) },
			Image{Compression: "gzip"}, provider.ErrPermanent, provider.ReasonImageNotFound, "is no gzip file", 1},
		{"half a gzip", func(rw http.ResponseWriter, _ *http.Request) {
			b := packed(payload)
			_, _ = rw.Write(b[:len(b)-10])
		}, Image{Compression: "gzip"}, provider.ErrPermanent, provider.ReasonImageNotFound, "is a broken gzip file", 1},
		{"a gzip of another digest", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(packed(payload)) },
			Image{Compression: "gzip", SHA256: sum(payload)}, provider.ErrPermanent, provider.ReasonImageNotFound, "the configuration says " + sum(payload), 1},
		{"a raw disk that is qcow2", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(qcow2(1<<20, 4096)) },
			Image{}, provider.ErrPermanent, provider.ReasonImageNotFound, "is a qcow2 image, and Format says raw", 1},
		{"a qcow2 disk that is none", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write([]byte("<html>")) },
			Image{Format: formatQcow2}, provider.ErrPermanent, provider.ReasonImageNotFound, `is no qcow2 image: it begins with "<html>"`, 1},
	} {
		withWeb(t, func(t *testing.T, w *web) {
			w.mux.HandleFunc("/image", c.handler)
			_, _, err := w.download(t.Context(), c.image)
			f, ok := errors.AsType[*Fault](err)
			if !ok || !errors.Is(f.Kind, c.kind) || f.Reason != c.reason || !strings.Contains(f.Message, c.want) {
				t.Errorf("%s: %v, want %q: %+v", c.what, err, c.want, f)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: the error holds the URL's secret: %v", c.what, err)
			}
			if n := w.asked("/image"); n != c.asked {
				t.Errorf("%s: asked %d times, want %d", c.what, n, c.asked)
			}
		})
	}
}

func TestARedirectWithinHTTPSIsFollowed(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		w.mux.HandleFunc("/image", func(rw http.ResponseWriter, r *http.Request) {
			http.Redirect(rw, r, "https://mirror.example/there", http.StatusFound)
		})
		w.serve("/there", payload)
		if b, _, err := w.download(t.Context(), Image{SHA256: sum(payload)}); err != nil || len(b) != len(payload) {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	})
}

func TestADownloadEndsWithItsContext(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		w.mux.HandleFunc("/image", func(rw http.ResponseWriter, r *http.Request) {
			_, _ = rw.Write(payload[:5000])
			rw.(http.Flusher).Flush()
			<-r.Context().Done()
		})
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, cause)
		defer cancel()
		begin := time.Now()
		if _, _, err := w.download(ctx, Image{}); !errors.Is(err, cause) || time.Since(begin) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
	})
}

func TestAPackedImageIsUnpackedAndItsDigestIsThatOfTheFile(t *testing.T) {
	withWeb(t, func(t *testing.T, w *web) {
		file := append(packed(payload[:1000]), packed(payload[1000:])...) // as pigz and others write it
		w.serve("/image", file)
		b, c, err := w.download(t.Context(), Image{Compression: "gzip", SHA256: sum(file)})
		if err != nil || !bytes.Equal(b, payload) || c.size != -1 || c.read != int64(len(payload)) {
			t.Errorf("%d bytes, %+v, %v", len(b), c, err)
		}
	})
}

func TestAHeaderIsReadAndWhatPointsElsewhereRefused(t *testing.T) {
	change := func(f func(b []byte)) []byte {
		b := qcow2(5<<30, 512)
		f(b)
		return b
	}
	for _, c := range []struct {
		header []byte
		format string
		size   uint64
		want   string
	}{
		{qcow2(5<<30, 512), formatQcow2, 5 << 30, ""},
		{change(func(b []byte) { binary.BigEndian.PutUint32(b[4:], 2) })[:72], formatQcow2, 5 << 30, ""},
		{[]byte("MBR"), formatRaw, 0, ""},
		{nil, formatRaw, 0, "is empty"},
		{nil, formatQcow2, 0, "is no qcow2 image"},
		{qcow2(5<<30, 512)[:71], formatQcow2, 0, "is no qcow2 image"},
		{qcow2(5<<30, 512)[:103], formatQcow2, 0, "version 3"},
		{change(func(b []byte) { binary.BigEndian.PutUint32(b[4:], 1) }), formatQcow2, 0, "version 1, want 2 or 3"},
		{change(func(b []byte) { binary.BigEndian.PutUint64(b[8:], 512) }), formatQcow2, 0, "on top of another file"},
		{change(func(b []byte) { b[79] = 4 }), formatQcow2, 0, "whose data is in another file"},
		{change(func(b []byte) { b[35] = 1 }), formatQcow2, 0, "encrypted"},
		{qcow2(0, 512), formatQcow2, 0, "a disk of 0 bytes"},
		{qcow2(maxVirtualBytes+1, 512), formatQcow2, 0, "want up to"},
		{qcow2(5<<30, 512), formatRaw, 0, "Format says raw"},
	} {
		size, err := checkHeader(c.header, c.format)
		if size != c.size || (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q as %s: %d, %v, want %d and %q", c.header[:min(len(c.header), 16)], c.format, size, err, c.size, c.want)
		}
	}
}

func FuzzCheckHeader(f *testing.F) {
	f.Add(qcow2(5<<30, headerBytes), formatQcow2)
	f.Add(qcow2(5<<30, headerBytes)[:72], formatQcow2)
	f.Add([]byte("MBR"), formatRaw)
	f.Add([]byte("QFI\xfb"), formatQcow2)
	f.Fuzz(func(t *testing.T, header []byte, format string) {
		size, err := checkHeader(header, format)
		if err != nil || format == formatRaw {
			if size != 0 {
				t.Fatalf("a size of %d with %v", size, err)
			}
			return
		}
		if size == 0 || size > maxVirtualBytes || binary.BigEndian.Uint64(header[8:]) != 0 || binary.BigEndian.Uint32(header[32:]) != 0 {
			t.Fatalf("%q is taken, with a size of %d", header, size)
		}
	})
}
