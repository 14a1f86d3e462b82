package vmhost

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/provider"
)

const (
	// packet is how much of an upload is sent at once. Measured over SSH, 256 KiB are the fastest; the client's own 4 MiB are
	// half as fast and keep everything else on the connection waiting.
	packet = 256 << 10
	// firstPacket is how much is sent before that. libvirtd has memory for packets of more than 128 KiB mapped anew each time,
	// which takes it four times as long as all it does with them, until its allocator has seen a larger one come and go
	// (mallopt(3), M_MMAP_THRESHOLD).
	firstPacket = 1 << 20
	// staleAfter is how long data that nobody published may lie untouched before somebody else removes it. A download that
	// stands still is given up after stallTimeout.
	staleAfter = 15 * time.Minute
	// uploadStall is how long the host may take nothing of an upload. Storage that hangs would otherwise hold one of the few
	// uploads for ever, while libvirt itself answers; a disk that is slow to flush what it took is given its time.
	uploadStall = 5 * time.Minute
	// discardTimeout bounds the removal of data that is not going to be published.
	discardTimeout = 5 * time.Second
	// getPhysical makes StorageVolGetInfoFlags return the size of the file (VIR_STORAGE_VOL_GET_PHYSICAL).
	getPhysical = 1
)

// base is a published image.
type base struct {
	name     string
	path     string
	capacity uint64
	release  func()
}

// dataName is the name of a base's data: which base, made for whom, from what, by whom, and a random part.
type dataName struct {
	base, maker, digest, uploader, nonce string
}

func (d dataName) String() string {
	return strings.Join([]string{d.base, d.maker, d.digest, d.uploader, d.nonce, "img"}, ".")
}

// parseDataName reads what String wrote.
func parseDataName(text string) (dataName, bool) {
	parts := strings.Split(text, ".")
	n := len(parts)
	if n < 6 || parts[n-1] != "img" {
		return dataName{}, false
	}
	d := dataName{strings.Join(parts[:n-5], "."), parts[n-5], parts[n-4], parts[n-3], parts[n-2]}
	return d, d.base != "" && len(d.maker) == 8 && len(d.uploader) == 8 && len(d.nonce) == 8 && d.digest != ""
}

// short is a part of a name that stands for a longer text.
func short(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:4])
}

// undeclared stands for the digest of an image that was configured without.
const undeclared = "any"

// digestTag is the digest in a name: at most 64 digits of it, which is enough to tell and leaves room for the rest.
func digestTag(image Image) string {
	_, want := digestOf(image)
	if want == "" {
		return undeclared
	}
	algorithm, digest, _ := strings.Cut(want, ":")
	return algorithm + "-" + digest[:64]
}

func (h *Host) baseName(plan *Plan) string { return h.config.BasePrefix + plan.key }

// volumeName is the volume that instances are made on.
func volumeName(base string) string { return base + ".qcow2" }

// base returns the image of plan, which is fetched when the host hasn't got it. However many ask, it is fetched once, and
// goes on when they have gone. The base is not evicted before release is called.
func (h *Host) base(ctx context.Context, plan *Plan, owner string) (*base, error) {
	name := h.baseName(plan)
	release := sync.OnceFunc(h.note(h.using, name))
	found, err := h.findBase(ctx, name, plan)
	if err == nil && found == nil {
		found, err = h.awaitFetch(ctx, name, plan, owner)
	}
	if err != nil {
		release()
		return nil, err
	}
	b := *found
	b.release = release
	return &b, nil
}

// fetch is one image on its way.
type fetch struct {
	image Image // what was declared
	done  chan struct{}
	base  *base
	err   error
}

func (h *Host) awaitFetch(ctx context.Context, name string, plan *Plan, owner string) (*base, error) {
	f, first := h.joinFetch(name, plan)
	if first {
		end := h.note(h.using, name)
		finish := func() {
			h.mu.Lock()
			delete(h.fetches, name)
			h.mu.Unlock()
			end()
			close(f.done)
		}
		started := h.spawn(func(ctx context.Context) {
			defer finish()
			f.base, f.err = h.fetch(ctx, name, plan, owner)
		})
		if !started {
			f.err = errClosed
			finish()
		}
	}
	select {
	case <-f.done:
		if f.image == plan.Image {
			if f.err != nil {
				return nil, judge(f.err)
			}
			return f.base, nil
		}
		// It was fetched for somebody who wanted something else, of whose mistakes nothing follows.
		found, err := h.findBase(ctx, name, plan)
		if err == nil && found == nil {
			err = fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "the image %s was on its way as another spec has it, and did not get there; try again", name)
		}
		return found, err
	case <-ctx.Done():
		return nil, fault(provider.ErrUnavailable, provider.ReasonTimeout, "the image %s is still on its way to the host, and goes on: %v", name, context.Cause(ctx))
	}
}

// joinFetch returns the fetch of that base, and whether the caller is the one to carry it out.
func (h *Host) joinFetch(name string, plan *Plan) (f *fetch, first bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.fetches[name]; f != nil {
		return f, false
	}
	f = &fetch{image: plan.Image, done: make(chan struct{})}
	h.fetches[name] = f
	return f, true
}

// findBase looks whether the image is there and what was wanted. It returns nil when it is not there.
func (h *Host) findBase(ctx context.Context, name string, plan *Plan) (found *base, err error) {
	err = h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
		pool, _, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		found, err = h.lookAtBase(s, pool, name, plan.Image)
		return err
	})
	return found, err
}

func (h *Host) lookAtBase(s *libvirt.Session, pool golibvirt.StoragePool, name string, image Image) (*base, error) {
	vol, err := s.StorageVolLookupByName(pool, volumeName(name))
	if libvirt.Code(err) == golibvirt.ErrNoStorageVol {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	v, err := volume(s, vol)
	if err != nil {
		return nil, err
	}
	var data dataName
	ok := false
	if v.BackingStore != nil {
		data, ok = parseDataName(path.Base(v.BackingStore.Path))
	}
	if !ok || data.base != name || v.Capacity == nil || v.Target == nil {
		return nil, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "the volume %s is no base of ours; rename it, or give the image another name in Images", vol.Name)
	}
	if data.maker != short(h.config.Maker) {
		return nil, fault(provider.ErrPermanent, provider.ReasonImageNotFound, "the base %s belongs to another provider; give the image another name in Images", vol.Name)
	}
	dataVol, err := s.StorageVolLookupByName(pool, path.Base(v.BackingStore.Path))
	if libvirt.Code(err) == golibvirt.ErrNoStorageVol {
		return nil, fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "the data %s of the base %s is gone: delete the base too, and it is fetched again", path.Base(v.BackingStore.Path), vol.Name)
	}
	if err != nil {
		return nil, err
	}
	if err := h.compareDigest(s, dataVol, data, image); err != nil {
		return nil, err
	}
	return &base{name: name, path: v.Target.Path, capacity: bytesOf(v.Capacity)}, nil
}

// compareDigest makes sure that a base was made from what the configuration declares. When the base does not say, its data
// is read.
func (h *Host) compareDigest(s *libvirt.Session, vol golibvirt.StorageVol, data dataName, image Image) error {
	want := digestTag(image)
	if want == undeclared || want == data.digest {
		return nil
	}
	_, declared := digestOf(image)
	got := strings.Replace(data.digest, "-", ":", 1)
	algorithm, _, _ := strings.Cut(want, "-")
	if !strings.HasPrefix(data.digest, algorithm+"-") {
		if image.Compression != "" {
			return fault(provider.ErrPermanent, provider.ReasonImageNotFound,
				"the base %s was made without a digest that can be compared to %s; give the image another name in Images", volumeName(data.base), declared)
		}
		h.mu.Lock()
		got = h.measured[vol.Name+" "+algorithm]
		h.mu.Unlock()
		if got == "" {
			sum, _ := digestOf(image)
			if err := s.StorageVolDownload(vol, sum, 0, 0, 0); err != nil {
				return &libvirt.StreamError{Err: err}
			}
			got = algorithm + ":" + hex.EncodeToString(sum.Sum(nil))
			h.mu.Lock()
			h.measured[vol.Name+" "+algorithm] = got
			h.mu.Unlock()
		}
		if got == declared {
			return nil
		}
	}
	return fault(provider.ErrPermanent, provider.ReasonImageNotFound,
		"the base %s was made from %s and the configuration wants %s; bases are never overwritten, so give the new image another name in Images", volumeName(data.base), got, declared)
}

// fetch brings an image to the host and publishes it.
func (h *Host) fetch(ctx context.Context, name string, plan *Plan, owner string) (*base, error) {
	select {
	case h.config.Uploads <- struct{}{}:
		defer func() { <-h.config.Uploads }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	// It may have been published since somebody looked, by us or by others.
	if found, err := h.findBase(ctx, name, plan); found != nil || err != nil {
		return found, err
	}
	begin := time.Now()
	data := dataName{base: name, maker: short(h.config.Maker), digest: digestTag(plan.Image), uploader: short(owner + "/" + h.config.Entry)}
	var nonce [4]byte
	rand.Read(nonce[:])
	data.nonce = hex.EncodeToString(nonce[:])

	report := h.reporter(plan.key)
	h.log().Info("fetching an image", "image", plan.key, "from", showURL(plan.Image.URL))
	found, size, err := h.transfer(ctx, data, plan.Image, report)
	unknown := false
	if err == nil && found == nil {
		found, err = h.publish(ctx, data, plan.Image, size)
		unknown = err != nil && !isAnswer(err)
	}
	switch {
	case unknown: // the base may stand on the data by now; if not, the next fetch deletes it
	case found == nil || path.Base(found.data) != data.String():
		h.discard(data) // or have the next fetch do it
	default:
		h.mu.Lock()
		delete(h.mine, data.String())
		h.mu.Unlock()
	}
	report(size.bytes, size.bytes, true, err)
	if err != nil {
		h.log().Warn("an image could not be fetched", "image", plan.key, "error", err)
		return nil, err
	}
	took := time.Since(begin)
	h.log().Info("image published", "image", plan.key, "bytes", size.bytes, "took", took.Round(time.Millisecond))
	return &found.base, nil
}

// sizes are those of an image that was transferred.
type sizes struct {
	bytes    int64
	capacity uint64
}

// published is a base with the path of its data.
type published struct {
	base
	data string
}

// transfer brings the content to a volume of its own. It returns a base when somebody else has published it meanwhile.
func (h *Host) transfer(ctx context.Context, data dataName, image Image, report reporter) (*published, sizes, error) {
	onHost := h.config.FetchOnHost && image.Compression == ""
	var src *source
	var content *content
	if !onHost {
		var err error
		if src, err = openSource(ctx, h.config.HTTP, image, func(read, total int64) { report(read, total, false, nil) }); err != nil {
			return nil, sizes{}, err
		}
		defer src.Close()
		if content, err = openContent(src, image); err != nil {
			return nil, sizes{}, err
		}
	}
	var found *published
	var free int64
	var target string
	var vol golibvirt.StorageVol
	err := h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
		pool, folder, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		if err := refresh(ctx, s, pool); err != nil {
			return err
		}
		b, err := h.lookAtBase(s, pool, data.base, image)
		if err != nil {
			return err
		}
		if b != nil {
			found = &published{base: *b}
			return nil
		}
		if err := h.sweep(s, pool, data, time.Time{}); err != nil {
			return err
		}
		_, _, _, available, err := s.StoragePoolGetInfo(pool)
		if err != nil {
			return err
		}
		free = int64(available) - h.reserve()
		need := int64(1)
		if content != nil && content.size > 0 {
			need = content.size
		}
		if free < need {
			return fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the storage pool %s has %d MiB free, of which %d MiB are kept, and the image takes %d MiB", h.config.Pool, available>>20, h.reserve()>>20, need>>20)
		}
		size := uint64(0)
		if content != nil && content.size > 0 {
			size = uint64(content.size)
		}
		h.mu.Lock()
		h.mine[data.String()] = true
		h.mu.Unlock()
		if vol, err = makeRaw(s, pool, data.String(), size); err != nil {
			return err
		}
		target = folder + "/" + data.String()
		v, err := volume(s, vol)
		if err != nil {
			return err
		}
		// Our own new file tells what time it is on the host.
		return h.sweep(s, pool, data, modified(v))
	})
	if err != nil || found != nil {
		return found, sizes{}, err
	}
	if onHost {
		size, err := h.pull(ctx, vol, target, image, free)
		return nil, size, err
	}
	limited := &limit{content, free}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err = h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		stall := time.AfterFunc(uploadStall, func() {
			cancel(fault(provider.ErrUnavailable, provider.ReasonTimeout, "the host has taken nothing of the image for %s: does the storage pool %s hang?", uploadStall, h.config.Pool))
		})
		defer stall.Stop()
		return upload(s, vol, &watchedReader{limited, stall})
	})
	if err != nil {
		return nil, sizes{}, err
	}
	size := sizes{content.read, content.capacity}
	if size.capacity == 0 {
		size.capacity = uint64(content.read)
	}
	return nil, size, nil
}

// watchedReader has a timer run from when something was given to when more is asked for: how long the source may take is its own
// to say.
type watchedReader struct {
	io.Reader
	timer *time.Timer
}

func (w *watchedReader) Read(p []byte) (int, error) {
	w.timer.Stop()
	n, err := w.Reader.Read(p)
	w.timer.Reset(uploadStall)
	return n, err
}

// limit fails when more comes than there is room for.
type limit struct {
	*content
	left int64
}

func (l *limit) Read(p []byte) (int, error) {
	n, err := l.content.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return n, fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the image does not fit into the storage pool: %d bytes and more", l.read)
	}
	return n, err
}

func (h *Host) reserve() int64 { return int64(max(h.config.MinFreeGiB, 0)) << 30 }

// sweep deletes data that was never published: our own of before, and once now is known anybody's that has not been
// written to for a while.
func (h *Host) sweep(s *libvirt.Session, pool golibvirt.StoragePool, current dataName, now time.Time) error {
	volumes, _, err := s.StoragePoolListAllVolumes(pool, 1, 0)
	if err != nil {
		return err
	}
	for _, vol := range volumes {
		d, ok := parseDataName(vol.Name)
		if !ok || d.base != current.base || d == current {
			continue
		}
		h.mu.Lock()
		ours := d.uploader == current.uploader || h.mine[vol.Name]
		h.mu.Unlock()
		if !ours {
			if now.IsZero() {
				continue
			}
			v, err := volume(s, vol)
			if err != nil {
				if libvirt.Code(err) != 0 {
					continue // gone since
				}
				return err
			}
			if m := modified(v); m.IsZero() || now.Sub(m) < staleAfter {
				continue
			}
		}
		if used, err := isBacking(s, volumes, vol); used || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		if err := h.deleteUnfinished(s, vol); err != nil {
			return err
		}
	}
	return nil
}

// deleteUnfinished deletes data that was never published.
func (h *Host) deleteUnfinished(s *libvirt.Session, vol golibvirt.StorageVol) error {
	h.log().Info("deleting an image that was never finished", "volume", vol.Name)
	if err := deleteVolume(s, vol); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.mine, vol.Name)
	h.mu.Unlock()
	return nil
}

// isBacking reports whether any of volumes stands on vol, or may: one that is there and can't be read could.
func isBacking(s *libvirt.Session, volumes []golibvirt.StorageVol, vol golibvirt.StorageVol) (bool, error) {
	for _, other := range volumes {
		v, err := volume(s, other)
		if err != nil {
			if gone(err) {
				continue
			}
			if libvirt.Code(err) != 0 {
				return true, nil
			}
			return false, err
		}
		if v.BackingStore != nil && (v.BackingStore.Path == vol.Key || path.Base(v.BackingStore.Path) == vol.Name) {
			return true, nil
		}
	}
	return false, nil
}

// publish makes the volume that instances are made on, once the data is what it should be.
func (h *Host) publish(ctx context.Context, data dataName, image Image, size sizes) (found *published, err error) {
	err = h.do(ctx, func(ctx context.Context, s *libvirt.Session) error {
		pool, folder, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		vol, err := s.StorageVolLookupByName(pool, data.String())
		if err != nil {
			return err
		}
		_, _, physical, err := s.StorageVolGetInfoFlags(vol, getPhysical)
		if err != nil {
			return err
		}
		if int64(physical) != size.bytes {
			return fault(provider.ErrUnavailable, provider.ReasonUnknown, "%d bytes were sent and the host has %d", size.bytes, physical)
		}
		target := folder + "/" + data.String()
		err = makeOverlay(ctx, s, pool, volumeName(data.base), size.capacity, target, image.Format)
		if taken(err) {
			if err := refresh(ctx, s, pool); err != nil {
				return err
			}
			b, err := h.lookAtBase(s, pool, data.base, image)
			if err != nil {
				return err
			}
			if b == nil {
				return fault(provider.ErrUnavailable, provider.ReasonUnknown, "the base %s was published and deleted again by somebody else", data.base)
			}
			found = &published{base: *b}
			return nil
		}
		if err != nil {
			return err
		}
		found = &published{base{name: data.base, path: folder + "/" + volumeName(data.base), capacity: size.capacity}, target}
		return nil
	})
	return found, err
}

// taken reports whether a volume's name is in use: known to the pool, or a file that it has not seen yet.
func taken(err error) bool {
	return libvirt.Code(err) == golibvirt.ErrStorageVolExist ||
		libvirt.Code(err) == golibvirt.ErrOperationInvalid && strings.Contains(err.Error(), "already exists")
}

// discard deletes data that is not going to be published. When that fails the next fetch does it.
func (h *Host) discard(data dataName) {
	h.mu.Lock()
	mine := h.mine[data.String()]
	h.mu.Unlock()
	if !mine {
		return
	}
	// Those who wait for the image are waiting for this too.
	ctx, cancel := context.WithTimeoutCause(h.ctx, discardTimeout, errors.New("no time left to clean up"))
	defer cancel()
	err := h.do(ctx, func(_ context.Context, s *libvirt.Session) error {
		pool, _, err := findPool(s, h.config.Pool)
		if err != nil {
			return err
		}
		vol, err := s.StorageVolLookupByName(pool, data.String())
		if libvirt.Code(err) == golibvirt.ErrNoStorageVol {
			return nil
		}
		if err != nil {
			return err
		}
		return deleteVolume(s, vol)
	})
	if err != nil {
		h.log().Warn("what came of an image could not be deleted yet", "volume", data.String(), "error", err)
		return
	}
	h.mu.Lock()
	delete(h.mine, data.String())
	h.mu.Unlock()
}

// upload sends content to a volume, which grows as needed. It blocks until the host has it all.
func upload(s *libvirt.Session, vol golibvirt.StorageVol, content io.Reader) error {
	r := &packets{source: content}
	paced := newPace(r, func() { _, _ = s.ConnectGetLibVersion() }) // that it comes back is all
	err := s.StorageVolUpload(vol, paced, 0, 0, 0)
	cause := r.end()
	if err == nil {
		paced.answered() // the session is used again
		return nil
	}
	// The session is not, and what is still asked ends with it: a host that refuses an image need not answer the rest.
	if cause != nil {
		err = cause // why the stream was broken off, which the host can't know
	}
	return &libvirt.StreamError{Err: err}
}

// packets gives its source out in packets that are as large as they should be. go-libvirt may still read after the upload
// has failed, when it gets nothing any more.
type packets struct {
	// mu guards what follows.
	mu     sync.Mutex
	source io.Reader
	begun  bool
	err    error

	last bool // nothing comes behind what Read has returned; for whoever calls Read
}

func (p *packets) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return 0, p.err
	}
	size := packet
	if !p.begun {
		size = firstPacket
	}
	p.begun = true
	n, err := io.ReadFull(p.source, b[:min(len(b), size)])
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	p.err, p.last = err, err != nil
	if n > 0 {
		return n, nil
	}
	return n, err
}

// end gives nothing out any more, and returns why the source failed, if it did.
func (p *packets) end() error {
	// A source that stands still must not hold up whoever has given up on it.
	if !p.mu.TryLock() {
		return nil
	}
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = errors.New("the upload has ended")
		return nil
	}
	if errors.Is(p.err, io.EOF) {
		return nil
	}
	return p.err
}

func volume(s *libvirt.Session, vol golibvirt.StorageVol) (*libvirtxml.StorageVolume, error) {
	text, err := s.StorageVolGetXMLDesc(vol, 0)
	if err != nil {
		return nil, err
	}
	var v libvirtxml.StorageVolume
	if err := v.Unmarshal(text); err != nil {
		return nil, fault(provider.ErrUnavailable, provider.ReasonUnsupported, "what libvirt says about the volume %s can't be read: %v", vol.Name, err)
	}
	return &v, nil
}

func bytesOf(size *libvirtxml.StorageVolumeSize) uint64 {
	if size == nil {
		return 0
	}
	switch size.Unit {
	case "KiB":
		return size.Value << 10
	case "MiB":
		return size.Value << 20
	case "GiB":
		return size.Value << 30
	}
	return size.Value
}

// modified is when a volume was last written to, by the host's clock.
func modified(v *libvirtxml.StorageVolume) time.Time {
	if v.Target == nil || v.Target.Timestamps == nil {
		return time.Time{}
	}
	seconds, err := strconv.ParseFloat(v.Target.Timestamps.Mtime, 64)
	if err != nil || seconds <= 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(seconds * 1000))
}

type reporter func(read, total int64, done bool, err error)

// reporter tells whoever wants to know how far an image is, at most once a second, and nothing after that it is done. An upload
// that ends early may still be read for.
func (h *Host) reporter(image string) reporter {
	var mu sync.Mutex
	last, ended := time.Now(), false
	return func(read, total int64, done bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		if h.config.Progress == nil || ended || !done && time.Since(last) < time.Second {
			return
		}
		last, ended = time.Now(), done
		h.config.Progress(Progress{Host: h.config.Target, Image: image, Bytes: read, Total: total, Done: done, Err: err})
	}
}
