// Package forwardproxy is a small forward proxy for tests, examples and benchmarks: HTTP in absolute form and CONNECT,
// the same over TLS, and SOCKS5, on a loopback port, with faults to switch on. It is not meant to face a network.
package forwardproxy

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Protocol is what a server speaks to its clients.
type Protocol int

// The protocols.
const (
	HTTP   Protocol = iota // HTTP/1.1
	HTTPS                  // HTTP/1.1 over TLS
	SOCKS5                 // RFC 1928, with user name and password of RFC 1929
)

// Config says what a server is.
type Config struct {
	// Name stands in the Via header of what passes through. Defaults to none.
	Name string
	// Protocol is what it speaks. Defaults to HTTP.
	Protocol Protocol
	// Certificate is the server's for HTTPS. Required for HTTPS.
	Certificate tls.Certificate
	// Username and Password must be given by clients. Defaults to none.
	Username, Password string
}

// Faults are what a server does wrong. The zero value is a good server.
type Faults struct {
	// Delay is waited before each request is looked at.
	Delay time.Duration
	// Refuse closes the port and all connections.
	Refuse bool
	// CutAfter ends a connection once so many bytes were written to its client. 0 is never.
	CutAfter int64
	// Deny answers every request with 407.
	Deny bool
	// Status answers every request with this status and Body instead of passing it on. 0 is off.
	Status int
	Body   string
	// NoDNS answers as squid does when it can't resolve the target.
	NoDNS bool
}

// Counters count since the server was made.
type Counters struct {
	Requests  int64 // requests in absolute form
	Connects  int64 // CONNECT requests, or SOCKS5 connections
	AuthFails int64 // requests with wrong or no credentials
	Bytes     int64 // written to clients
	Active    int64 // requests and tunnels now
}

// Server is a running proxy. It is safe for concurrent use.
type Server struct {
	config Config
	port   int // set once by Start
	http   http.Server
	proxy  httputil.ReverseProxy
	origin *http.Transport
	tasks  sync.WaitGroup
	// stopped ends with Close.
	stopped context.Context
	stop    context.CancelFunc

	requests, connects, authFails, bytes, active atomic.Int64
	cutAfter                                     atomic.Int64 // Faults.CutAfter, for every write

	// mu guards the fields below.
	mu       sync.Mutex
	faults   Faults
	listener net.Listener // nil while refusing
	conns    map[net.Conn]bool
	closed   bool
}

// Start listens on a free loopback port and serves until Close.
func Start(config Config) (*Server, error) {
	s := &Server{config: config, conns: map[net.Conn]bool{}}
	s.origin = &http.Transport{
		MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second, DisableCompression: true,
		DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
	}
	s.proxy = httputil.ReverseProxy{
		Rewrite:       s.rewrite,
		Transport:     s.origin,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, err error) { writeError(w, err) },
	}
	s.http = http.Server{Handler: s, ErrorLog: s.proxy.ErrorLog, ReadHeaderTimeout: time.Minute}
	s.stopped, s.stop = context.WithCancel(context.Background())
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s.port = inner.Addr().(*net.TCPAddr).Port
	return s, s.serve(inner)
}

// listen opens the port again.
func (s *Server) listen() error {
	inner, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
	if err != nil {
		return err
	}
	return s.serve(inner)
}

// serve accepts clients of inner, unless the server is closed or refuses by now.
func (s *Server) serve(inner net.Listener) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.faults.Refuse || s.listener != nil {
		inner.Close()
		if s.closed {
			return http.ErrServerClosed
		}
		return nil
	}
	s.listener = inner
	listener := net.Listener(&countingListener{inner, s})
	if s.config.Protocol == HTTPS {
		listener = tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{s.config.Certificate}})
	}
	if s.config.Protocol == SOCKS5 {
		s.tasks.Go(func() { s.serveSOCKS(listener) })
	} else {
		s.tasks.Go(func() { s.http.Serve(listener) })
	}
	return nil
}

// Port returns the loopback port.
func (s *Server) Port() int { return s.port }

// Counters returns the counters now.
func (s *Server) Counters() Counters {
	return Counters{
		Requests: s.requests.Load(), Connects: s.connects.Load(), AuthFails: s.authFails.Load(),
		Bytes: s.bytes.Load(), Active: s.active.Load(),
	}
}

// Faults returns what is switched on.
func (s *Server) Faults() Faults {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.faults
}

// SetFaults switches faults on and off.
func (s *Server) SetFaults(f Faults) error {
	s.mu.Lock()
	was := s.faults
	s.faults = f
	s.cutAfter.Store(f.CutAfter)
	listener := s.listener
	if f.Refuse {
		s.listener = nil
	}
	s.mu.Unlock()
	switch {
	case f.Refuse && listener != nil:
		listener.Close()
		s.cut()
	case was.Refuse && !f.Refuse:
		return s.listen()
	}
	return nil
}

// cut ends all connections.
func (s *Server) cut() {
	s.mu.Lock()
	conns := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range conns {
		c.Close() // which forgets the connection, under the lock
	}
}

// Close ends the server, its connections and its goroutines. It may be called again.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.stop()
	listener := s.listener
	s.listener = nil
	s.mu.Unlock()
	if listener != nil {
		listener.Close()
	}
	s.http.Close()
	s.cut()
	s.tasks.Wait()
	s.origin.CloseIdleConnections()
	return nil
}

// ServeHTTP implements http.Handler for proxy requests.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.enter() {
		return
	}
	defer s.tasks.Done()
	s.active.Add(1)
	defer s.active.Add(-1)
	f := s.Faults()
	if !s.pause(r.Context(), f.Delay) {
		return
	}
	if f.Deny || !s.authorized(r) {
		s.authFails.Add(1)
		w.Header().Set("Proxy-Authenticate", `Basic realm="proxy"`)
		http.Error(w, "proxy authentication required", http.StatusProxyAuthRequired)
		return
	}
	if r.Method == http.MethodConnect {
		s.connects.Add(1)
	} else {
		s.requests.Add(1)
	}
	switch {
	case f.Status != 0:
		w.WriteHeader(f.Status)
		io.WriteString(w, f.Body)
	case f.NoDNS:
		writeError(w, &net.DNSError{Err: "no such host", IsNotFound: true})
	case r.Method == http.MethodConnect:
		s.tunnel(w, r)
	case r.URL.Host == "" || r.URL.Scheme != "http":
		http.Error(w, "this is a proxy: want an absolute http URL", http.StatusBadRequest)
	default:
		s.proxy.ServeHTTP(w, r)
	}
}

// enter counts a request among what Close waits for, unless the server is closed.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.tasks.Add(1)
	return true
}

func (s *Server) rewrite(r *httputil.ProxyRequest) {
	r.Out.Host = r.In.Host
	via := "1.1 " + s.config.Name
	if was := r.In.Header.Get("Via"); was != "" {
		via = was + ", " + via
	}
	r.Out.Header.Set("Via", via)
}

// authorized reports whether r has the credentials that are wanted.
func (s *Server) authorized(r *http.Request) bool {
	if s.config.Username == "" && s.config.Password == "" {
		return true
	}
	given, ok := strings.CutPrefix(r.Header.Get("Proxy-Authorization"), "Basic ")
	if !ok {
		return false
	}
	want := base64.StdEncoding.EncodeToString([]byte(s.config.Username + ":" + s.config.Password))
	return subtle.ConstantTimeCompare([]byte(given), []byte(want)) == 1
}

// pause waits for d unless the client goes away or the server is closed.
func (s *Server) pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-s.stopped.Done():
	}
	return false
}

// writeError answers what kept a request from its target, with the header by which squid tells it.
func writeError(w http.ResponseWriter, err error) {
	status := http.StatusBadGateway
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		w.Header().Set("X-Squid-Error", "ERR_DNS_FAIL 0")
		status = http.StatusServiceUnavailable
	} else if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		status = http.StatusGatewayTimeout
	}
	http.Error(w, "the target can't be reached: "+err.Error(), status)
}

// tunnel serves CONNECT.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) {
	target, err := s.origin.DialContext(r.Context(), "tcp", r.Host)
	if err != nil {
		writeError(w, err)
		return
	}
	defer target.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		writeError(w, err)
		return
	}
	defer client.Close()
	s.track(target, true)
	defer s.track(target, false)
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	if n := buffered.Reader.Buffered(); n > 0 {
		early, _ := buffered.Reader.Peek(n)
		if _, err := target.Write(early); err != nil {
			return
		}
	}
	s.join(client, target)
}

// join copies both ways until both are at their end.
func (s *Server) join(client, target net.Conn) {
	var back sync.WaitGroup
	back.Go(func() { pass(client, target) })
	pass(target, client)
	back.Wait()
}

// pass copies to one side until the other is at its end, and ends that side too: in order after an end in order, and at
// once after a failure, which must not look like an end.
func pass(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		from.Close()
		return
	}
	halfClose(to)
}

func halfClose(c net.Conn) {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		h.CloseWrite()
	} else {
		c.Close()
	}
}

// track keeps a connection so that Close and faults can end it.
func (s *Server) track(c net.Conn, on bool) {
	s.mu.Lock()
	refuse := s.closed || s.faults.Refuse
	if on && !refuse {
		s.conns[c] = true
	} else {
		delete(s.conns, c)
	}
	s.mu.Unlock()
	if on && refuse {
		c.Close()
	}
}

// countingListener wraps what it accepts.
type countingListener struct {
	net.Listener
	server *Server
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	wrapped := &conn{Conn: c, server: l.server}
	l.server.track(wrapped, true)
	return wrapped, nil
}

// conn counts what is written to a client, and cuts it off.
type conn struct {
	net.Conn
	server  *Server
	written atomic.Int64
	once    sync.Once
}

func (c *conn) Write(b []byte) (int, error) {
	limit := c.server.cutAfter.Load()
	if left := limit - c.written.Load(); limit > 0 && int64(len(b)) >= left {
		n, _ := c.Conn.Write(b[:max(0, left)])
		c.Close()
		return n, net.ErrClosed
	}
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	c.server.bytes.Add(int64(n))
	return n, err
}

func (c *conn) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

func (c *conn) Close() error {
	c.once.Do(func() { c.server.track(c, false) })
	return c.Conn.Close()
}
