package libvirttest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"reflect"
	"sync"
	"time"

	golibvirt "github.com/digitalocean/go-libvirt"
)

// libvirt's protocol (src/rpc/virnetprotocol.x): the length of a packet, a header of six words, and the arguments.
const (
	program   = 0x20008086
	version   = 1
	headerLen = 28
	maxPacket = 32 << 20

	typeCall   = 0
	typeReply  = 1
	typeStream = 3

	statusOK       = 0
	statusError    = 1
	statusContinue = 2

	// maxRequests is max_client_requests of libvirtd.conf: how many calls of one client are under way at a time.
	maxRequests = 5
)

// peer is the daemon's end of one connection.
type peer struct {
	host   *Host
	conn   io.ReadWriteCloser
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	done   chan struct{}
	turns  chan struct{}
	calls  sync.WaitGroup

	// writing is held while a packet is sent.
	writing sync.Mutex

	// mu guards uploads.
	mu      sync.Mutex
	uploads map[int32]*incoming
}

// incoming is a stream from the client. Packets come from the connection's reader one after another.
type incoming struct {
	volume *Volume
	offset int64
	limit  int64 // 0 is none
	fault  Fault
	failed bool
}

type packet struct {
	procedure, kind uint32
	serial          int32
	status          uint32
	payload         []byte
}

// Serve speaks with a client over conn, such as a channel of an SSH connection, until either ends it.
func (h *Host) Serve(conn io.ReadWriteCloser) {
	if p := h.serve(conn); p != nil {
		<-p.done
		return
	}
	_ = conn.Close() // nobody is there
}

// serve takes a connection, and returns nil when the host is down.
func (h *Host) serve(conn io.ReadWriteCloser) *peer {
	p := &peer{host: h, conn: conn, done: make(chan struct{}), turns: make(chan struct{}, maxRequests), uploads: map[int32]*incoming{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.down {
		return nil
	}
	p.ctx, p.cancel = context.WithCancel(h.ctx)
	h.conns[p] = struct{}{}
	h.dials++
	h.running.Go(func() {
		defer close(p.done)
		p.run()
		p.close()
		p.calls.Wait()
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.conns, p)
	})
	return p
}

func (p *peer) close() {
	p.cancel()
	_ = p.conn.Close() // it is given up
}

// run reads packets until the connection ends.
func (p *peer) run() {
	header, r := make([]byte, headerLen), bufio.NewReaderSize(p.conn, 32<<10)
	for {
		if _, err := io.ReadFull(r, header); err != nil {
			return
		}
		word := func(i int) uint32 { return binary.BigEndian.Uint32(header[4*i:]) }
		if word(0) < headerLen || word(0) > maxPacket || word(1) != program || word(2) != version {
			return
		}
		q := packet{procedure: word(3), kind: word(4), serial: int32(word(5)), status: word(6), payload: make([]byte, word(0)-headerLen)}
		if _, err := io.ReadFull(r, q.payload); err != nil {
			return
		}
		switch q.kind {
		case typeStream:
			p.receive(q)
		case typeCall:
			select {
			case p.turns <- struct{}{}:
			case <-p.ctx.Done():
				return
			}
			p.calls.Go(func() {
				defer func() { <-p.turns }()
				p.answer(q)
			})
		default:
			return
		}
	}
}

func (p *peer) send(q packet) {
	b := make([]byte, 0, headerLen+len(q.payload))
	for _, w := range []uint32{uint32(headerLen + len(q.payload)), program, version, q.procedure, q.kind, uint32(q.serial), q.status} {
		b = binary.BigEndian.AppendUint32(b, w)
	}
	b = append(b, q.payload...)
	p.writing.Lock()
	defer p.writing.Unlock()
	if _, err := p.conn.Write(b); err != nil {
		p.cancel()
	}
}

// refuse answers with an error.
func (p *peer) refuse(q packet, kind uint32, err error) {
	e, ok := errors.AsType[golibvirt.Error](err)
	if !ok {
		e = golibvirt.Error{Code: uint32(golibvirt.ErrInternalError), Message: "internal error: " + err.Error()}
	}
	// remote_error of src/remote/remote_protocol.x, with everything optional left out but the message.
	body := encode(nil, reflect.ValueOf(struct {
		Code, Domain uint32
		Message      golibvirt.OptString
		Level        uint32
		Absent       [7]uint32 // domain, three texts, two numbers, network
	}{e.Code, 10, golibvirt.OptString{e.Message}, 2, [7]uint32{}}))
	p.send(packet{q.procedure, kind, q.serial, statusError, body})
}

// wait returns false when the connection ended meanwhile.
func (p *peer) wait(d time.Duration) bool {
	if d <= 0 {
		return p.ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// answer carries out a call.
func (p *peer) answer(q packet) {
	proc, ok := procedures[q.procedure]
	if !ok {
		p.refuse(q, typeReply, fail(golibvirt.ErrRPC, "unknown procedure: %d", q.procedure))
		return
	}
	f := p.host.faultOf(proc.name)
	p.host.mu.Lock()
	latency := p.host.config.Latency
	p.host.mu.Unlock()
	if !p.wait(latency) {
		return
	}
	if proc.name == "StorageVolUpload" {
		p.accept(q, f)
		return
	}
	if !p.happens(f) {
		return
	}
	if f.Code != 0 {
		p.refuse(q, typeReply, fail(f.Code, "%s", f.Message))
		return
	}
	p.host.mu.Lock()
	result, err := proc.callLocked(p.host, q.payload)
	content, isDownload := result.(download)
	var body []byte
	if err == nil && result != nil && !isDownload {
		body = encode(nil, reflect.ValueOf(result))
	}
	p.host.mu.Unlock()
	if !p.wait(f.Late) {
		return
	}
	switch {
	case f.Lose:
		p.close()
	case err != nil:
		p.refuse(q, typeReply, err)
	default:
		p.send(packet{q.procedure, typeReply, q.serial, statusOK, body})
		if isDownload {
			p.transmit(q, content)
		}
	}
}

// happens has a fault's side effects happen, and reports whether the call goes on.
func (p *peer) happens(f Fault) bool {
	if f.Do != nil {
		f.Do()
	}
	if !p.wait(f.Delay) {
		return false
	}
	if f.Hang {
		<-p.ctx.Done()
		return false
	}
	if f.Cut {
		p.close()
		return false
	}
	return true
}

// accept begins an upload.
func (p *peer) accept(q packet, f Fault) {
	if f.Bytes == 0 {
		if !p.happens(f) {
			return
		}
		if f.Code != 0 {
			p.refuse(q, typeReply, fail(f.Code, "%s", f.Message))
			return
		}
		f = Fault{Lose: f.Lose}
	}
	args, err := arguments[golibvirt.StorageVolUploadArgs](q.payload)
	if err != nil {
		p.refuse(q, typeReply, err)
		return
	}
	p.host.mu.Lock()
	_, v, err := p.host.volumeLocked(args.Vol)
	p.host.mu.Unlock()
	if err != nil {
		p.refuse(q, typeReply, err)
		return
	}
	p.mu.Lock()
	p.uploads[q.serial] = &incoming{volume: v, offset: int64(args.Offset), limit: int64(args.Length), fault: f}
	p.mu.Unlock()
	p.send(packet{q.procedure, typeReply, q.serial, statusOK, nil})
}

// receive takes a packet of an upload.
func (p *peer) receive(q packet) {
	p.mu.Lock()
	in := p.uploads[q.serial]
	if q.status != statusContinue {
		delete(p.uploads, q.serial)
	}
	p.mu.Unlock()
	if in == nil || in.failed {
		return
	}
	if q.status != statusContinue {
		if in.fault.Lose && q.status == statusOK {
			p.close()
			return
		}
		p.send(packet{q.procedure, typeStream, q.serial, statusOK, nil})
		return
	}
	if f := in.fault; f.Bytes > 0 && in.offset+int64(len(q.payload)) > f.Bytes {
		in.fault = Fault{}
		if !p.happens(f) {
			return
		}
		if f.Code != 0 {
			in.failed = true
			p.refuse(q, typeStream, fail(f.Code, "%s", f.Message))
			return
		}
	}
	err := p.host.write(in, q.payload)
	if err != nil {
		in.failed = true
		p.refuse(q, typeStream, err)
	}
}

// transmit sends the content of a volume. The end is an empty packet: what the real daemon would send after it nobody waits for.
func (p *peer) transmit(q packet, content []byte) {
	for len(content) > 0 && p.ctx.Err() == nil {
		n := min(len(content), 256<<10)
		p.send(packet{q.procedure, typeStream, q.serial, statusContinue, content[:n]})
		content = content[n:]
	}
	p.send(packet{q.procedure, typeStream, q.serial, statusContinue, nil})
}
