// Package upstream speaks to one forward proxy: it builds the http.Transport that sends everything through
// that proxy and never around it, and tells what went wrong at the proxy from what went wrong behind it.
package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Endpoint is where a proxy listens and how it is spoken to.
type Endpoint struct {
	// Scheme is http, https or socks5.
	Scheme string
	// Host is a host name or an IP address; IPv6 without brackets.
	Host string
	// Port is the TCP port.
	Port int
	// Username and Password are for the proxy. Both empty means none.
	Username, Password string
	// TLS verifies an https proxy. Nil means the system's roots and Host.
	TLS *tls.Config
}

// Addr returns host:port, with brackets around an IPv6 address.
func (e Endpoint) Addr() string { return net.JoinHostPort(e.Host, strconv.Itoa(e.Port)) }

// URL returns the endpoint's URL with the credentials in it. It is a secret when there are any.
func (e Endpoint) URL() *url.URL {
	u := &url.URL{Scheme: e.Scheme, Host: e.Addr()}
	if e.Username != "" || e.Password != "" {
		u.User = url.UserPassword(e.Username, e.Password)
	}
	return u
}

// String returns scheme://host:port without the credentials.
func (e Endpoint) String() string { return e.Scheme + "://" + e.Addr() }

// GoString is String.
func (e Endpoint) GoString() string { return e.String() }

// dialTimeout bounds the TCP connection to the proxy; a proxy that takes longer is as good as gone.
const dialTimeout = 10 * time.Second

// NewTransport returns a transport whose every connection goes through e: absolute-form requests for http
// targets, CONNECT for https targets, SOCKS5 with names resolved at the proxy. It tries HTTP/2 with https
// targets. One transport must serve one proxy only: net/http keeps an HTTP/2 connection to a target for the
// proxy that it first used.
func NewTransport(e Endpoint) *http.Transport {
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	t := &http.Transport{
		Proxy:                  http.ProxyURL(e.URL()),
		DialContext:            dialer.DialContext,
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    15 * time.Second,
		MaxIdleConns:           0,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        60 * time.Second,
		ExpectContinueTimeout:  time.Second,
		OnProxyConnectResponse: connectAnswer,
	}
	if e.Scheme == "https" {
		proxyTLS := e.TLS
		// A Transport verifies the proxy and the targets with the same TLSClientConfig, so the proxy's own
		// handshake is made here and the transport is told that it speaks plain http to the result.
		t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: e.Addr(), User: e.URL().User})
		t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialTLS(ctx, dialer, network, addr, e.Host, proxyTLS)
		}
	}
	return t
}

func dialTLS(ctx context.Context, dialer *net.Dialer, network, addr, host string, config *tls.Config) (net.Conn, error) {
	conn, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if config == nil {
		config = &tls.Config{}
	} else {
		config = config.Clone()
	}
	if config.ServerName == "" {
		config.ServerName = host
	}
	config.NextProtos = []string{"http/1.1"}
	ctx, cancel := context.WithTimeoutCause(ctx, 15*time.Second, os.ErrDeadlineExceeded)
	defer cancel()
	tlsConn := tls.Client(conn, config)
	if err := tlsConn.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, &TLSError{Err: err}
	}
	return tlsConn, nil
}

// Kind says at which step a request through a proxy failed.
type Kind string

// The kinds of failure. Those up to KindProxyStatus are the proxy's own; the others may as well be the
// target's.
const (
	KindRefused      Kind = "refused"      // the proxy's port is closed
	KindUnreachable  Kind = "unreachable"  // no route to the proxy, or its name is unknown
	KindTimeout      Kind = "timeout"      // no answer in time
	KindAuth         Kind = "auth"         // 407, or SOCKS5 credentials refused
	KindTLS          Kind = "tls"          // a handshake failed
	KindTargetDNS    Kind = "target-dns"   // the proxy could not resolve the target's name
	KindProxyStatus  Kind = "proxy-status" // the proxy answered CONNECT with another status than 200
	KindInterrupted  Kind = "interrupted"  // the connection ended in the middle
	KindCanceled     Kind = "canceled"     // the caller gave up
	KindUnclassified Kind = "unclassified"
)

// TLSError is a failed handshake with the proxy itself.
type TLSError struct{ Err error }

// Error names the cause.
func (e *TLSError) Error() string { return "tls handshake with the proxy: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *TLSError) Unwrap() error { return e.Err }

// StatusError is a proxy's refusal of a CONNECT request.
type StatusError struct {
	// Code is the HTTP status.
	Code int
	// DNS is true when the proxy said that it could not resolve the target's name.
	DNS bool
}

// Error names the status.
func (e *StatusError) Error() string {
	text := fmt.Sprintf("the proxy answered %d %s to CONNECT", e.Code, http.StatusText(e.Code))
	if e.DNS {
		text += ": it can't resolve the target's name"
	}
	return text
}

func connectAnswer(_ context.Context, _ *url.URL, _ *http.Request, answer *http.Response) error {
	if answer.StatusCode == http.StatusOK {
		return nil
	}
	return &StatusError{Code: answer.StatusCode, DNS: SaysDNSFailure(answer.Header)}
}

// SaysDNSFailure reports whether a proxy's answer says that it could not resolve the target's name: squid's
// X-Squid-Error, or Proxy-Status of RFC 9209.
func SaysDNSFailure(h http.Header) bool {
	if strings.HasPrefix(h.Get("X-Squid-Error"), "ERR_DNS_FAIL") {
		return true
	}
	status := h.Get("Proxy-Status")
	return strings.Contains(status, "error=dns_error") || strings.Contains(status, "error=dns_timeout")
}

// AtProxy reports whether err, of a RoundTrip through a transport of NewTransport, is for certain the proxy's own
// failure, and the request has not reached any target.
func AtProxy(err error) bool {
	if status, ok := errors.AsType[*StatusError](err); ok {
		return status.Code == http.StatusProxyAuthRequired
	}
	if _, ok := errors.AsType[*TLSError](err); ok {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "proxyconnect" || op.Op == "socks connect" && classifySOCKS(op.Err) == KindAuth)
}

// Classify says what kind of failure err, an error of a RoundTrip through a transport of NewTransport, is.
func Classify(err error) Kind {
	if status, ok := errors.AsType[*StatusError](err); ok {
		switch {
		case status.Code == http.StatusProxyAuthRequired:
			return KindAuth
		case status.DNS:
			return KindTargetDNS
		}
		return KindProxyStatus
	}
	if _, ok := errors.AsType[*TLSError](err); ok && !isTimeout(err) {
		return KindTLS
	}
	switch {
	case errors.Is(err, context.Canceled):
		return KindCanceled
	case isTimeout(err):
		return KindTimeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return KindRefused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return KindUnreachable
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "socks connect" {
		return classifySOCKS(op.Err)
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return KindUnreachable
	}
	if isTLS(err) {
		return KindTLS
	}
	text := err.Error()
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || strings.HasSuffix(text, "EOF") ||
		strings.Contains(text, "server closed") || strings.Contains(text, "transport connection broken") {
		return KindInterrupted
	}
	return KindUnclassified
}

// classifySOCKS reads the texts of net/http's SOCKS client, which has no typed errors; they are those of
// golang.org/x/net/internal/socks.
func classifySOCKS(err error) Kind {
	text := err.Error()
	switch {
	case strings.Contains(text, "authentication"):
		return KindAuth
	case strings.Contains(text, "host unreachable"):
		return KindTargetDNS
	case strings.HasSuffix(text, "EOF"):
		return KindInterrupted
	}
	return KindProxyStatus
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

func isTLS(err error) bool {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.AlertError](err); ok {
		return true
	}
	return strings.Contains(err.Error(), "tls: ")
}

// Text returns err in one line without the URL of the request, which may hold what a log should not.
func Text(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return strings.Join(strings.Fields(err.Error()), " ")
}

// Connect opens a connection to the proxy and goes as far as the protocol goes without a target: TCP for http,
// the TLS handshake for https, the greeting and the credentials for socks5. The caller closes the connection.
func Connect(ctx context.Context, e Endpoint) (net.Conn, error) {
	dialer := &net.Dialer{Timeout: dialTimeout}
	if e.Scheme == "https" {
		return dialTLS(ctx, dialer, "tcp", e.Addr(), e.Host, e.TLS)
	}
	conn, err := dialer.DialContext(ctx, "tcp", e.Addr())
	if err != nil || e.Scheme != "socks5" {
		return conn, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := greetSOCKS(conn, e.Username, e.Password); err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, &net.OpError{Op: "socks connect", Net: "tcp", Err: err}
	}
	return conn, nil
}

// greetSOCKS negotiates the method (RFC 1928 section 3) and the credentials (RFC 1929).
func greetSOCKS(conn net.Conn, username, password string) error {
	withPassword := username != "" || password != ""
	hello := []byte{5, 1, 0}
	if withPassword {
		hello = []byte{5, 2, 0, 2}
	}
	if _, err := conn.Write(hello); err != nil {
		return err
	}
	var answer [2]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return err
	}
	switch {
	case answer[0] != 5:
		return errors.New("not a SOCKS5 proxy")
	case answer[1] == 0:
		return nil
	case answer[1] != 2 || !withPassword:
		return errors.New("no acceptable authentication methods")
	}
	if len(username) > 255 || len(password) > 255 {
		return errors.New("authentication with more than 255 bytes")
	}
	msg := append([]byte{1, byte(len(username))}, username...)
	msg = append(append(msg, byte(len(password))), password...)
	if _, err := conn.Write(msg); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return err
	}
	if answer[1] != 0 {
		return errors.New("username/password authentication failed")
	}
	return nil
}
