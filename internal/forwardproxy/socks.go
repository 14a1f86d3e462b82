package forwardproxy

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"time"
)

// serveSOCKS accepts SOCKS5 clients until the listener is closed.
func (s *Server) serveSOCKS(listener net.Listener) {
	for {
		c, err := listener.Accept()
		if err != nil {
			return
		}
		s.tasks.Go(func() {
			defer c.Close()
			s.active.Add(1)
			defer s.active.Add(-1)
			s.socks(c)
		})
	}
}

// The parts of RFC 1928 and RFC 1929 that are spoken here.
const (
	socksVersion    = 5
	socksNoAuth     = 0
	socksPassword   = 2
	socksNoneFits   = 0xff
	socksConnect    = 1
	socksIPv4       = 1
	socksName       = 3
	socksIPv6       = 4
	socksGranted    = 0
	socksFailure    = 1
	socksNoHost     = 4
	socksRefused    = 5
	socksNoCommand  = 7
	socksHandshakes = 10 * time.Second
)

func (s *Server) socks(c net.Conn) {
	f := s.Faults()
	if !s.pause(s.stopped, f.Delay) {
		return
	}
	c.SetDeadline(time.Now().Add(socksHandshakes))
	if !s.socksGreet(c, f) {
		return
	}
	address, err := readSOCKSRequest(c)
	if err != nil {
		replySOCKS(c, socksNoCommand)
		return
	}
	s.connects.Add(1)
	if f.NoDNS {
		replySOCKS(c, socksNoHost)
		return
	}
	target, err := s.origin.DialContext(s.stopped, "tcp", address)
	if err != nil {
		code := byte(socksRefused)
		if _, ok := errors.AsType[*net.DNSError](err); ok {
			code = socksNoHost
		}
		replySOCKS(c, code)
		return
	}
	defer target.Close()
	s.track(target, true)
	defer s.track(target, false)
	if f.Status != 0 {
		replySOCKS(c, socksFailure)
		return
	}
	replySOCKS(c, socksGranted)
	c.SetDeadline(time.Time{})
	s.join(c, target)
}

// socksGreet agrees on a method and checks the credentials.
func (s *Server) socksGreet(c net.Conn, f Faults) bool {
	methods, err := readCounted(c, socksVersion)
	if err != nil {
		return false
	}
	want := byte(socksNoAuth)
	if s.config.Username != "" || s.config.Password != "" || f.Deny {
		want = socksPassword
	}
	offered := false
	for _, m := range methods {
		offered = offered || m == want
	}
	if !offered {
		s.authFails.Add(1)
		c.Write([]byte{socksVersion, socksNoneFits})
		return false
	}
	c.Write([]byte{socksVersion, want})
	if want == socksNoAuth {
		return true
	}
	username, err := readCounted(c, 1)
	if err != nil {
		return false
	}
	password, err := readLengthed(c)
	if err != nil {
		return false
	}
	if f.Deny || string(username) != s.config.Username || string(password) != s.config.Password {
		s.authFails.Add(1)
		c.Write([]byte{1, 1})
		return false
	}
	c.Write([]byte{1, 0})
	return true
}

// readCounted reads a version byte, a length and as many bytes.
func readCounted(r io.Reader, version byte) ([]byte, error) {
	var v [1]byte
	if _, err := io.ReadFull(r, v[:]); err != nil {
		return nil, err
	}
	if v[0] != version {
		return nil, errors.New("wrong version")
	}
	return readLengthed(r)
}

func readLengthed(r io.Reader) ([]byte, error) {
	var n [1]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, n[0])
	_, err := io.ReadFull(r, b)
	return b, err
}

// readSOCKSRequest reads a CONNECT request and returns host:port.
func readSOCKSRequest(r io.Reader) (string, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return "", err
	}
	if head[0] != socksVersion || head[1] != socksConnect {
		return "", errors.New("not a CONNECT of version 5")
	}
	var host string
	switch head[3] {
	case socksIPv4, socksIPv6:
		b := make([]byte, map[byte]int{socksIPv4: net.IPv4len, socksIPv6: net.IPv6len}[head[3]])
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		host = net.IP(b).String()
	case socksName:
		b, err := readLengthed(r)
		if err != nil {
			return "", err
		}
		host = string(b)
	default:
		return "", errors.New("unknown kind of address")
	}
	var port [2]byte
	if _, err := io.ReadFull(r, port[:]); err != nil {
		return "", err
	}
	return net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(port[:])))), nil
}

func replySOCKS(w io.Writer, code byte) {
	w.Write([]byte{socksVersion, code, 0, socksIPv4, 0, 0, 0, 0, 0, 0})
}
