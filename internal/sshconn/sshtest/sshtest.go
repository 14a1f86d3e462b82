// Package sshtest is an SSH server in memory, for tests that run the real protocol in fake time. What it can't show,
// such as sshd's own limits, is tested against sshd.
package sshtest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/crypto/ssh"

	"crawl.example.com/egress/internal/memconn"
)

// Server is an SSH server. Set the fields before the first Dial.
type Server struct {
	// HostKeys are its keys or certificates. Required.
	HostKeys []ssh.Signer
	// Users are the public keys that may log in, as anybody. Required.
	Users []ssh.PublicKey
	// Exec runs a command and returns its exit status; negative closes the session without one. killed is closed when the
	// client sends SIGKILL or closes the session. Defaults to status 0 at once.
	Exec func(command string, ch ssh.Channel, killed <-chan struct{}) int
	// Socket serves a connection to the unix socket path. Defaults to refusing.
	Socket func(path string, conn io.ReadWriteCloser)
	// DialTCP makes the server a jump host. Defaults to refusing.
	DialTCP func(address string) (net.Conn, error)
	// MaxSessions is how many sessions a connection may have. Defaults to 0, any number.
	MaxSessions int
	// Reset is how many connections are reset at once before one is served. Defaults to 0.
	Reset int
	// RefuseExec refuses every command, as a restricted key does. Defaults to false.
	RefuseExec bool

	// Requests counts global requests, which are keepalives.
	Requests atomic.Int64

	running sync.WaitGroup
	// mu guards the fields below.
	mu      sync.Mutex
	dials   int
	conns   [][2]*memconn.Conn // client's end, server's end
	servers []*ssh.ServerConn
}

// Dial connects to the server. It fits sshconn.Config.Dial and ignores the address.
func (s *Server) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	client, server := memconn.Pair("client:0", address)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dials++
	s.conns = append(s.conns, [2]*memconn.Conn{client, server})
	if s.dials <= s.Reset {
		client.Cut()
		return client, nil
	}
	s.running.Go(func() { s.serve(server) })
	return client, nil
}

// Dials returns how often Dial was called.
func (s *Server) Dials() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dials
}

// Freeze makes the network between the server and all its clients swallow everything, without a reset.
func (s *Server) Freeze() {
	s.each(func(c *memconn.Conn) { c.Freeze() })
}

// Thaw undoes Freeze.
func (s *Server) Thaw() {
	s.each(func(c *memconn.Conn) { c.Thaw() })
}

// Cut resets every connection.
func (s *Server) Cut() {
	s.each(func(c *memconn.Conn) { c.Cut() })
}

func (s *Server) each(f func(*memconn.Conn)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, pair := range s.conns {
		f(pair[0])
		f(pair[1])
	}
}

// Ping asks every client for a sign of life, as sshd does with ClientAliveInterval, and returns how many answered.
func (s *Server) Ping() int {
	s.mu.Lock()
	servers := slices.Clone(s.servers)
	s.mu.Unlock()
	answers := 0
	for _, c := range servers {
		if _, _, err := c.SendRequest("keepalive@openssh.com", true, nil); err == nil {
			answers++
		}
	}
	return answers
}

// Close resets every connection and waits for every goroutine.
func (s *Server) Close() {
	s.Cut()
	s.running.Wait()
}

func (s *Server) serve(conn net.Conn) {
	defer conn.Close()
	config := &ssh.ServerConfig{
		PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			for _, user := range s.Users {
				if bytes.Equal(user.Marshal(), key.Marshal()) {
					return nil, nil
				}
			}
			return nil, errors.New("not authorized")
		},
	}
	for _, key := range s.HostKeys {
		config.AddHostKey(key)
	}
	server, chans, reqs, err := ssh.NewServerConn(conn, config)
	if err != nil {
		return
	}
	defer server.Close()
	s.mu.Lock()
	s.servers = append(s.servers, server)
	s.mu.Unlock()
	s.running.Go(func() {
		for req := range reqs {
			s.Requests.Add(1)
			if req.WantReply {
				req.Reply(false, nil) // as OpenSSH does
			}
		}
	})
	var open atomic.Int64
	for nc := range chans {
		switch nc.ChannelType() {
		case "session":
			if n := open.Add(1); s.MaxSessions > 0 && n > int64(s.MaxSessions) {
				open.Add(-1)
				nc.Reject(ssh.ConnectionFailed, "open failed")
				continue
			}
			s.running.Go(func() {
				defer open.Add(-1)
				s.session(nc)
			})
		case "direct-streamlocal@openssh.com":
			s.running.Go(func() { s.streamLocal(nc) })
		case "direct-tcpip":
			s.running.Go(func() { s.directTCP(nc) })
		default:
			nc.Reject(ssh.UnknownChannelType, "")
		}
	}
}

func (s *Server) session(nc ssh.NewChannel) {
	ch, reqs, err := nc.Accept()
	if err != nil {
		return
	}
	killed := make(chan struct{})
	kill := sync.OnceFunc(func() { close(killed) })
	var command sync.WaitGroup
	for req := range reqs {
		switch {
		case req.Type == "exec" && !s.RefuseExec:
			var msg struct{ Command string }
			if ssh.Unmarshal(req.Payload, &msg) != nil {
				req.Reply(false, nil)
				continue
			}
			req.Reply(true, nil)
			command.Go(func() {
				status := 0
				if s.Exec != nil {
					status = s.Exec(msg.Command, ch, killed)
				}
				select {
				case <-killed:
					ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
						Signal string
						Core   bool
						Error  string
						Lang   string
					}{Signal: "KILL"}))
				default:
					if status >= 0 {
						ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(status)}))
					}
				}
				ch.Close()
			})
		case req.Type == "signal":
			kill()
		default:
			if req.WantReply {
				req.Reply(false, nil)
			}
		}
	}
	kill()
	command.Wait()
	ch.Close()
}

func (s *Server) streamLocal(nc ssh.NewChannel) {
	var msg struct {
		Path      string
		Reserved0 string
		Reserved1 uint32
	}
	if s.Socket == nil || ssh.Unmarshal(nc.ExtraData(), &msg) != nil {
		nc.Reject(ssh.ConnectionFailed, "open failed")
		return
	}
	ch, reqs, err := nc.Accept()
	if err != nil {
		return
	}
	s.running.Go(func() { ssh.DiscardRequests(reqs) })
	defer ch.Close()
	s.Socket(msg.Path, ch)
}

func (s *Server) directTCP(nc ssh.NewChannel) {
	var msg struct {
		Host       string
		Port       uint32
		OriginHost string
		OriginPort uint32
	}
	if s.DialTCP == nil || ssh.Unmarshal(nc.ExtraData(), &msg) != nil {
		nc.Reject(ssh.Prohibited, "open failed")
		return
	}
	conn, err := s.DialTCP(msg.Host)
	if err != nil {
		nc.Reject(ssh.ConnectionFailed, err.Error())
		return
	}
	defer conn.Close()
	ch, reqs, err := nc.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	s.running.Go(func() { ssh.DiscardRequests(reqs) })
	var out sync.WaitGroup
	out.Go(func() {
		io.Copy(ch, conn)
		ch.CloseWrite()
		ch.Close()
	})
	io.Copy(conn, ch)
	conn.Close()
	out.Wait()
}

// NewKey returns a new key of type ed25519, ecdsa or rsa.
func NewKey(kind string) ssh.Signer {
	signer, err := ssh.NewSignerFromKey(newKey(kind))
	if err != nil {
		panic(err)
	}
	return signer
}

// NewKeyFile returns a new key and the text of its file, encrypted when there is a passphrase.
func NewKeyFile(kind, passphrase string) (ssh.Signer, []byte) {
	key := newKey(kind)
	var block *pem.Block
	var err error
	if passphrase == "" {
		block, err = ssh.MarshalPrivateKey(key, "test")
	} else {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(key, "test", []byte(passphrase))
	}
	if err != nil {
		panic(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		panic(err)
	}
	return signer, pem.EncodeToMemory(block)
}

func newKey(kind string) any {
	var key any
	var err error
	switch kind {
	case "ed25519":
		var private ed25519.PrivateKey
		_, private, err = ed25519.GenerateKey(rand.Reader)
		key = private
	case "ecdsa":
		key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "rsa":
		key, err = rsa.GenerateKey(rand.Reader, 2048)
	default:
		panic("sshtest: key type " + kind + ", want ed25519, ecdsa or rsa")
	}
	if err != nil {
		panic(err)
	}
	return key
}

// NewCertificate returns key with a host certificate by authority for the names, good from and to the Unix times given.
func NewCertificate(key, authority ssh.Signer, from, to uint64, names ...string) ssh.Signer {
	cert := &ssh.Certificate{
		Key: key.PublicKey(), CertType: ssh.HostCert, KeyId: "test", ValidPrincipals: names, ValidAfter: from, ValidBefore: to,
	}
	if err := cert.SignCert(rand.Reader, authority); err != nil {
		panic(err)
	}
	signer, err := ssh.NewCertSigner(cert, key)
	if err != nil {
		panic(err)
	}
	return signer
}
