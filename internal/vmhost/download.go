package vmhost

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"crawl.example.com/egress/provider"
)

const (
	// stallTimeout is how long a server may send nothing.
	stallTimeout = time.Minute
	// maxResumes is how often in a row a download is taken up again without a byte having come.
	maxResumes = 5
	// maxVirtualBytes bounds the disk that an image says it is.
	maxVirtualBytes = 64 << 40
	// headerBytes are the first bytes of an image, which say what it is: version 3 of qcow2 has 104.
	headerBytes = 104
)

// imageClient returns a client for images: bytes as they are on the server, no limit in time, but one on silence.
func imageClient() *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DisableCompression = true
	t.ResponseHeaderTimeout = stallTimeout
	return &http.Client{Transport: t, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return errors.New("more than ten redirects")
		}
		if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
			return errors.New("redirected from https to " + req.URL.Scheme)
		}
		return nil
	}}
}

// source reads an image from its URL. It takes the download up again where it broke off, checks what it gives, and ends with
// io.EOF only when everything has come and is what was declared.
type source struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	client *http.Client
	url    string
	shown  string // the URL without what may be secret

	body      io.ReadCloser
	validator string // for If-Range
	offset    int64
	total     int64 // -1 when the server does not say
	unsure    bool  // the server does not say where the image ends
	fruitless int
	broke     error // why it was not taken up again
	ended     error

	sum      hash.Hash
	want     string // "sha256:…", or nothing
	progress func(read, total int64)
}

// openSource asks for the image.
func openSource(ctx context.Context, client *http.Client, image Image, progress func(read, total int64)) (*source, error) {
	s := &source{client: client, url: image.URL, shown: showURL(image.URL), total: -1, progress: progress}
	s.sum, s.want = digestOf(image)
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	if _, err := s.request(); err != nil {
		s.cancel(nil)
		return nil, err
	}
	return s, nil
}

// digestOf returns the declared digest and what computes one like it.
func digestOf(image Image) (hash.Hash, string) {
	switch {
	case image.SHA512 != "":
		return sha512.New(), "sha512:" + image.SHA512
	case image.SHA256 != "":
		return sha256.New(), "sha256:" + image.SHA256
	}
	return sha256.New(), ""
}

// showURL leaves out what may hold a secret.
func showURL(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return "the image's URL"
	}
	return u.Scheme + "://" + u.Host + u.EscapedPath()
}

// request asks for what is missing, and reports whether it may be asked again when that fails.
func (s *source) request() (again bool, err error) {
	req, err := http.NewRequestWithContext(s.ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return false, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "URL of the image: %s can't be asked for", s.shown)
	}
	if s.offset > 0 {
		req.Header.Set("Range", "bytes="+strconv.FormatInt(s.offset, 10)+"-")
		if s.validator != "" {
			req.Header.Set("If-Range", s.validator)
		}
	}
	resp, err := s.client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the URL may hold a secret
		}
		if s.ctx.Err() != nil {
			return false, context.Cause(s.ctx)
		}
		return true, fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: %v", s.shown, err)
	}
	if err := s.accept(resp); err != nil {
		_ = resp.Body.Close() // it is not read
		return resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests, err
	}
	s.body = resp.Body
	return false, nil
}

func (s *source) accept(resp *http.Response) error {
	switch {
	case resp.StatusCode == http.StatusGone: // for good; what is not found may be on its way to a mirror
		return fault(provider.ErrPermanent, provider.ReasonImageNotFound, "get %s: %s", s.shown, resp.Status)
	case s.offset == 0 && resp.StatusCode == http.StatusOK:
		s.total = resp.ContentLength
		// Then the end of the connection is that of the image, and a broken one looks the same.
		if s.unsure = s.total < 0 && resp.ProtoMajor < 2 && !resp.Uncompressed && !slices.Contains(resp.TransferEncoding, "chunked"); s.unsure && s.want == "" {
			return fault(provider.ErrUnavailable, provider.ReasonUnsupported, "get %s: the server does not say how long the image is, so a part of it could be taken for the whole; want a server that does, or a digest", s.shown)
		}
		if tag := resp.Header.Get("ETag"); tag != "" && !strings.HasPrefix(tag, "W/") {
			s.validator = tag
		} else {
			s.validator = resp.Header.Get("Last-Modified")
		}
		return nil
	case s.offset > 0 && resp.StatusCode == http.StatusPartialContent:
		want := fmt.Sprintf("bytes %d-", s.offset)
		if !strings.HasPrefix(resp.Header.Get("Content-Range"), want) {
			return fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: asked to go on at byte %d, the server did not", s.shown, s.offset)
		}
		if s.total >= 0 && resp.ContentLength >= 0 && s.offset+resp.ContentLength != s.total {
			return fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: it has changed during the download", s.shown)
		}
		return nil
	case s.offset > 0 && resp.StatusCode == http.StatusOK:
		return fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: the connection broke at byte %d and the server can't go on from there, or the image has changed", s.shown, s.offset)
	}
	return fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: %s", s.shown, resp.Status)
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	for s.ended == nil {
		stall := time.AfterFunc(stallTimeout, func() {
			s.cancel(fault(provider.ErrUnavailable, provider.ReasonTimeout, "get %s: nothing for %s", s.shown, stallTimeout))
		})
		n, err := s.body.Read(p)
		stall.Stop()
		if n > 0 {
			s.fruitless = 0
			s.offset += int64(n)
			s.sum.Write(p[:n])
			s.progress(s.offset, s.total)
			if s.total >= 0 && s.offset > s.total {
				s.end(fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: more than the %d bytes that were announced", s.shown, s.total))
				break
			}
			return n, nil // an error comes again
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) && (s.total < 0 || s.offset == s.total):
			s.end(s.verify())
		case s.ctx.Err() != nil:
			s.end(context.Cause(s.ctx))
		case s.fruitless >= maxResumes || s.total < 0:
			if s.broke != nil {
				err = s.broke
			}
			s.end(fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "get %s: broke off at byte %d of %d: %v", s.shown, s.offset, s.total, err))
		default:
			_ = s.body.Close() // it broke
			s.body = http.NoBody
			s.fruitless++
			if err := s.pause(); err != nil {
				s.end(err)
			} else if again, err := s.request(); err != nil && !again {
				s.end(err)
			} else {
				s.broke = err
			}
		}
	}
	return 0, s.ended
}

// pause waits before the download is taken up again.
func (s *source) pause() error {
	timer := time.NewTimer(time.Duration(s.fruitless*s.fruitless) * 100 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

func (s *source) end(err error) { s.ended = err }

func (s *source) verify() error {
	algorithm, digest, declared := strings.Cut(s.want, ":")
	got := hex.EncodeToString(s.sum.Sum(nil))
	if declared && got != digest && s.unsure {
		return fault(provider.ErrUnavailable, provider.ReasonImageNotFound,
			"%s has %s %s after %d bytes, and the configuration says %s; the connection may have broken before the end, which the server does not let us see", s.shown, algorithm, got, s.offset, digest)
	}
	if declared && got != digest {
		return fault(provider.ErrPermanent, provider.ReasonImageNotFound,
			"%s has %s %s, and the configuration says %s; if the image was meant to change, give it a new name in Images with the new digest", s.shown, algorithm, got, digest)
	}
	return io.EOF
}

// Close ends the download.
func (s *source) Close() {
	s.cancel(errors.New("the download is closed"))
	_ = s.body.Close() // what was wanted has been read
}

// content is an image's content as it goes to the host: decompressed, with its header checked.
type content struct {
	io.Reader
	size     int64  // -1 when it is not known before the end
	capacity uint64 // of the disk; 0 for a raw one of unknown size
	read     int64
}

func (c *content) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.read += int64(n)
	return n, err
}

// openContent looks at the beginning of the image.
func openContent(s *source, image Image) (*content, error) {
	c := &content{size: s.total, Reader: s}
	if image.Compression == "gzip" {
		unpacked, err := gzip.NewReader(s)
		if err != nil {
			if s.ended != nil && !errors.Is(s.ended, io.EOF) {
				return nil, s.ended
			}
			return nil, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "%s is no gzip file: %v", s.shown, err)
		}
		c.size, c.Reader = -1, &gunzip{unpacked, s}
	}
	header := make([]byte, headerBytes)
	n, err := io.ReadFull(c.Reader, header)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return nil, err
	}
	header = header[:n]
	if c.capacity, err = checkHeader(header, image.Format); err != nil {
		return nil, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "%s %v", s.shown, err)
	}
	if image.Format == formatRaw && c.size >= 0 {
		c.capacity = uint64(c.size)
	}
	c.Reader = io.MultiReader(bytes.NewReader(header), c.Reader)
	return c, nil
}

// gunzip reads what is packed, and has the rest of the file read before it ends, so that the digest is of all of it.
type gunzip struct {
	*gzip.Reader
	source *source
}

func (g *gunzip) Read(p []byte) (int, error) {
	n, err := g.Reader.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		_, err = io.Copy(io.Discard, g.source)
		if err == nil {
			return 0, io.EOF
		}
		return 0, err
	}
	if g.source.ended != nil && !errors.Is(g.source.ended, io.EOF) {
		return 0, g.source.ended
	}
	return 0, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "%s is a broken gzip file: %v", g.source.shown, err)
}

// checkHeader returns the size of the disk in a qcow2 image. An image that points to other files is refused: QEMU would
// open whatever it names on the host and show it to the guest.
func checkHeader(header []byte, format string) (uint64, error) {
	isQcow2 := bytes.HasPrefix(header, []byte("QFI\xfb"))
	if format == formatRaw {
		if isQcow2 {
			return 0, errors.New("is a qcow2 image, and Format says raw")
		}
		if len(header) == 0 {
			return 0, errors.New("is empty")
		}
		return 0, nil
	}
	if !isQcow2 || len(header) < 72 {
		return 0, fmt.Errorf("is no qcow2 image: it begins with %q", header[:min(len(header), 16)])
	}
	version := binary.BigEndian.Uint32(header[4:])
	if version != 2 && version != 3 || version == 3 && len(header) < headerBytes {
		return 0, fmt.Errorf("is a qcow2 image of version %d, want 2 or 3", version)
	}
	if binary.BigEndian.Uint64(header[8:]) != 0 {
		return 0, errors.New("is a qcow2 image on top of another file, want one that stands alone (qemu-img convert)")
	}
	const externalData = 1 << 2
	if version == 3 && binary.BigEndian.Uint64(header[72:])&externalData != 0 {
		return 0, errors.New("is a qcow2 image whose data is in another file, want one that stands alone (qemu-img convert)")
	}
	if binary.BigEndian.Uint32(header[32:]) != 0 {
		return 0, errors.New("is an encrypted qcow2 image, want a plain one")
	}
	size := binary.BigEndian.Uint64(header[24:])
	if size == 0 || size > maxVirtualBytes {
		return 0, fmt.Errorf("is a qcow2 image of a disk of %d bytes, want up to %d", size, uint64(maxVirtualBytes))
	}
	return size, nil
}
