package proxmox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	pve "github.com/luthermonson/go-proxmox"

	"crawl.example.com/egress/provider"
)

// This file is the only one that calls go-proxmox v0.9.0, and deals with what does not suit us in it:
//
//   - A client is changed by its own requests (Version, sessions) and changes the http.Client it is given, without any
//     lock: so every request has a client and an http.Client of its own, over a shared transport.
//   - Uploads take no context: an interceptor puts ours into the request.
//   - Its retries repeat a POST whose answer was lost, which makes a second clone: they are not used.
//   - Its failover sends an upload to another node than the one it is meant for: neither is that.
//   - At debug level its logger prints bodies: it gets one that drops everything.
//   - A 401 makes it log in again where it has a password: it has a token only.
//   - Node, storage and volume names go into paths as they are: all of ours are checked by pattern beforehand.
//   - Its lists and VMs are strict about types, and one odd VM fails the whole list: only raw requests are used, with
//     the lenient types below.
//   - NewTask panics on a text that is no UPID, and Task.Wait gives up at the first lost connection: see wait.
//   - IsNotFound is also true of a missing bridge or storage: it is not used. See classifyText.
//   - WithTimeout and the TLS options have no effect on other RoundTrippers and write to the shared one: not used.

// timings of the connections.
const (
	// dialTimeout is how long a node may take to accept a connection.
	dialTimeout = 5 * time.Second
	// idleTimeout is shorter than the 5 s after which pveproxy closes an idle connection, so that no POST races it.
	idleTimeout = 3 * time.Second
	// anyTimeout bounds a request that another node could answer as well. It is longer than the 3 s for which
	// pveproxy holds back a 401.
	anyTimeout = 10 * time.Second
	// silentTimeout is how long looks wait for a node that did not answer the last time, and silentFor how long that goes
	// on before one waits the full time again: a node that is down must not slow down every list.
	silentTimeout = time.Second
	silentFor     = 30 * time.Second
)

// endpoint is the API on one node.
type endpoint struct {
	node      Node
	transport *http.Transport
	silent    atomic.Int64 // since when, in nanoseconds of Unix time, it has not answered a look that had its full time; zero when it has
}

func newEndpoint(c *Config, n Node) *endpoint {
	// Proxmox closes connections so soon that most requests need a handshake: resumed ones are cheap.
	config := &tls.Config{MinVersion: tls.VersionTLS12, ClientSessionCache: tls.NewLRUClientSessionCache(8)}
	if c.CA != nil {
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(c.CA)
	}
	if n.Fingerprint != "" {
		// VerifyConnection runs for resumed sessions too, unlike VerifyPeerCertificate.
		config.InsecureSkipVerify = true
		config.VerifyConnection = func(s tls.ConnectionState) error {
			if sum := sha256.Sum256(s.PeerCertificates[0].Raw); hex.EncodeToString(sum[:]) != n.Fingerprint {
				return errCertificate
			}
			return nil
		}
	}
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		conn, err := c.DialContext(ctx, network, address)
		if err != nil {
			// Whatever made the connection, nothing was sent.
			return nil, &net.OpError{Op: "dial", Net: network, Err: err}
		}
		return conn, nil
	}
	return &endpoint{node: n, transport: &http.Transport{
		DialContext: dial, TLSClientConfig: config, TLSHandshakeTimeout: dialTimeout, IdleConnTimeout: idleTimeout, MaxIdleConnsPerHost: 8,
	}}
}

type quiet struct{}

func (quiet) Debugf(string, ...any) {}
func (quiet) Infof(string, ...any)  {}
func (quiet) Warnf(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}

// client returns a client for one request.
func (e *endpoint) client(id, secret string, more ...pve.Option) *pve.Client {
	h := &http.Client{Transport: e.transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	options := append([]pve.Option{pve.WithHTTPClient(h), pve.WithAPIToken(id, secret), pve.WithLogger(quiet{}), pve.WithUserAgent("egress")}, more...)
	return pve.NewClient(e.node.Endpoint+"/api2/json", options...)
}

// secret is the cached token secret.
type secret struct{ value string }

// token returns the secret, after a refusal a fresh one.
func (p *Provider) token(ctx context.Context) (*secret, error) {
	select {
	case p.asking <- struct{}{}:
		defer func() { <-p.asking }()
	case <-ctx.Done():
		return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: context.Cause(ctx)}
	}
	if s := p.secret.Load(); s != nil {
		return s, nil
	}
	got, err := p.config.Secret(ctx)
	text := strings.TrimSpace(string(got))
	switch {
	case err != nil:
		return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonCredentialsUnavailable, message: "Secret gave none", cause: err}
	case !secretPattern.MatchString(text):
		return nil, unavailable(provider.ReasonCredentialsUnavailable, "Secret gave %d characters that are no token's secret, want a UUID", len(text))
	}
	s := &secret{text}
	p.secret.Store(s)
	return s, nil
}

// request is one call of the API.
type request struct {
	method, path string
	body         map[string]any // of POST and PUT
	seed         []byte         // an upload when it is not nil
	file         string
}

// send sends one request to an endpoint and decodes the data of the answer into result.
func (p *Provider) send(ctx context.Context, e *endpoint, r request, result any) error {
	if p.closed.Load() {
		return unavailable(provider.ReasonUnreachable, "the provider is closed")
	}
	s, err := p.token(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, p.config.RequestTimeout)
	defer cancel()
	begin := time.Now()
	var data json.RawMessage
	switch {
	case r.seed != nil:
		sum := sha256.Sum256(r.seed)
		fields := map[string]string{"content": "iso", "checksum-algorithm": "sha256", "checksum": hex.EncodeToString(sum[:])}
		with := pve.WithRequestInterceptor(func(q *http.Request) error {
			*q = *q.WithContext(ctx)
			return nil
		})
		err = e.client(p.config.TokenID, s.value, with).UploadReader(r.path, fields, r.file, bytes.NewReader(r.seed), int64(len(r.seed)), &data)
	case r.method == http.MethodGet:
		err = e.client(p.config.TokenID, s.value).Get(ctx, r.path, &data)
	case r.method == http.MethodDelete:
		err = e.client(p.config.TokenID, s.value).Delete(ctx, r.path, &data)
	case r.method == http.MethodPut:
		err = e.client(p.config.TokenID, s.value).Put(ctx, r.path, body(r.body), &data)
	default:
		err = e.client(p.config.TokenID, s.value).Post(ctx, r.path, body(r.body), &data)
	}
	if err == nil {
		err = decode(r, data, result)
	}
	log := p.config.Logger.With("provider", p.config.Name, "node", e.node.Name, "method", r.method, "path", r.path, "took", time.Since(begin))
	if err == nil {
		log.DebugContext(ctx, "proxmox: request")
		return nil
	}
	f := classify(err)
	if r.method == http.MethodGet {
		f.ambiguous = false // a read changes nothing
	}
	if f.code == http.StatusUnauthorized {
		p.secret.CompareAndSwap(s, nil)
	}
	log.DebugContext(ctx, "proxmox: request failed", "status", f.code, "error", f.Error())
	return f
}

// decode reads what an answer holds. The library takes null for anything, even for a list: to us an empty list is VMs that are
// gone, so what was asked for has to be there.
func decode(r request, data json.RawMessage, result any) error {
	if len(data) == 0 {
		if r.method == http.MethodGet {
			return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnsupported, cause: errNothing}
		}
		return nil
	}
	return json.Unmarshal(data, result)
}

// body is nil for a request without one.
func body(m map[string]any) any {
	if len(m) == 0 {
		return nil
	}
	return m
}

// endpointOf returns the endpoint of a node, or nil when the node is not among those configured.
func (p *Provider) endpointOf(node string) *endpoint {
	for _, e := range p.endpoints {
		if e.node.Name == node {
			return e
		}
	}
	return nil
}

// on sends a request about node to its own endpoint. What is about a node that is not configured goes through any.
func (p *Provider) on(ctx context.Context, node string, r request, result any) error {
	if e := p.endpointOf(node); e != nil {
		return p.send(ctx, e, r, result)
	}
	return p.any(ctx, r, result)
}

// get reads from node.
func (p *Provider) get(ctx context.Context, node, path string, result any) error {
	return p.on(ctx, node, request{method: http.MethodGet, path: path}, result)
}

// look reads through an endpoint for something that does not wait for slow nodes.
func (p *Provider) look(ctx context.Context, e *endpoint, path string, result any) error {
	limit := min(anyTimeout, p.config.RequestTimeout)
	full := true
	if since := e.silent.Load(); since != 0 && time.Since(time.Unix(0, since)) < silentFor {
		limit, full = min(limit, silentTimeout), false
	}
	try, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	err := p.send(try, e, request{method: http.MethodGet, path: path}, result)
	switch {
	case err == nil || classify(err).code != 0:
		e.silent.Store(0)
	case full && ctx.Err() == nil && time.Since(begin) > silentTimeout:
		e.silent.Store(time.Now().UnixNano())
	}
	return err
}

// lookOn is look for a node, which need not be among those that are configured.
func (p *Provider) lookOn(ctx context.Context, node, path string, result any) error {
	if e := p.endpointOf(node); e != nil {
		return p.look(ctx, e, path, result)
	}
	return p.any(ctx, request{method: http.MethodGet, path: path}, result)
}

// any sends a request to the endpoint that answered last, and to the others when that can't be reached or, asked about the
// cluster, is not well. A request that changes something is not sent twice.
func (p *Provider) any(ctx context.Context, r request, result any) error {
	first := int(p.preferred.Load())
	var worst error
	for i := range p.endpoints {
		at := (first + i) % len(p.endpoints)
		try, cancel := context.WithTimeout(ctx, min(anyTimeout, p.config.RequestTimeout))
		err := p.send(try, p.endpoints[at], r, result)
		cancel()
		if err == nil {
			p.preferred.Store(int32(at))
			return nil
		}
		f := classify(err)
		if f.code == http.StatusUnauthorized {
			// Maybe it has lost its own file system, where the tokens are. The next call asks another one.
			p.preferred.CompareAndSwap(int32(at), int32((at+1)%len(p.endpoints)))
		}
		unreached := f.code == 0 && !errors.Is(f.kind, provider.ErrDenied) && f.reason != provider.ReasonCredentialsUnavailable
		unwell := f.code >= http.StatusInternalServerError && r.method == http.MethodGet && !strings.HasPrefix(r.path, "/nodes/")
		if !unreached && !unwell || ctx.Err() != nil || r.method != http.MethodGet && f.ambiguous {
			return err
		}
		if worst == nil {
			worst = err
		}
	}
	return worst
}

// text is a string that may come as a number.
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(b []byte) error {
	s := string(b)
	switch {
	case s == "null":
		*t = ""
	case s[0] == '"':
		var v string
		if err := json.Unmarshal(b, &v); err != nil {
			return err
		}
		*t = text(v)
	case s == "true":
		*t = "1"
	case s == "false":
		*t = "0"
	default:
		*t = text(s)
	}
	return nil
}

// number is a number that may come as a text, as a fraction, as a boolean or as null.
type number int64

// UnmarshalJSON implements json.Unmarshaler.
func (n *number) UnmarshalJSON(b []byte) error {
	var t text
	if err := t.UnmarshalJSON(b); err != nil {
		return err
	}
	f, err := strconv.ParseFloat(string(t), 64)
	if err != nil {
		f = 0 // an object, or a text that is none: of no use to us, and no reason to fail a list
	}
	*n = number(f)
	return nil
}

// connections are the parts of Provider that this file uses.
type connections struct {
	endpoints []*endpoint
	preferred atomic.Int32
	asking    chan struct{} // held while Secret is called
	secret    atomic.Pointer[secret]
	closed    atomic.Bool
}

// wait polls a task until it has ended, over lost connections and nodes that are gone for a while, and says whether
// it has succeeded. The polls become rarer, up to one in 2 s.
func (p *Provider) wait(ctx context.Context, upid string, timeout time.Duration) error {
	parts := strings.Split(upid, ":")
	if len(parts) != 9 || parts[0] != "UPID" || !nodePattern.MatchString(parts[1]) || strings.ContainsAny(upid, "/?#% ") {
		return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, message: fmt.Sprintf("%q is no task's name", shorten(upid)), ambiguous: true}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("task %s has not ended within %s: %w", parts[5], timeout, context.DeadlineExceeded))
	defer cancel()
	for pause := 50 * time.Millisecond; ; pause = min(2*time.Second, pause*3/2) {
		var status struct {
			Status     text `json:"status"`
			ExitStatus text `json:"exitstatus"`
		}
		last := p.get(ctx, parts[1], "/nodes/"+parts[1]+"/tasks/"+upid+"/status", &status)
		if last != nil {
			f := classify(last)
			if f.lostTask || errors.Is(f.kind, provider.ErrDenied) {
				f.ambiguous = true
				return f
			}
		} else if status.Status == "stopped" {
			return p.ended(ctx, parts, string(status.ExitStatus))
		}
		if err := sleep(ctx, pause); err != nil {
			if last != nil {
				err = errors.Join(err, last)
			}
			return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: err, ambiguous: true}
		}
	}
}

// untold matches what Proxmox says of a task when its log does not tell how it ended: the worker died, at any point of its work, or
// the log is gone. Version 9 has the first two, 8 the others.
var untold = regexp.MustCompile(`^$|^unexpected status$|^unable to (get last line|open file|extract last line|read tail)`)

func (p *Provider) ended(ctx context.Context, upid []string, exit string) error {
	switch {
	case exit == "OK":
		return nil
	case strings.HasPrefix(exit, "WARNINGS"):
		p.config.Logger.WarnContext(ctx, "proxmox: a task succeeded with warnings, which are in its log", "provider", p.config.Name,
			"node", upid[1], "task", upid[5], "vmid", upid[6], "status", exit)
		return nil
	}
	f := &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnknown, message: shorten(exit)}
	if untold.MatchString(exit) {
		f.ambiguous = true
		f.message = fmt.Sprintf("how task %s ended is not known: %q", upid[5], f.message)
		return f
	}
	classifyText(f, false)
	f.message = "task " + upid[5] + " failed: " + f.message
	return f
}

// sleep waits, and returns the cause when ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run starts a task and waits for it. Both the request and the wait may leave the outcome unknown, which the fault says.
func (p *Provider) run(ctx context.Context, node string, r request, timeout time.Duration) error {
	var upid text
	if err := p.on(ctx, node, r, &upid); err != nil {
		return err
	}
	if upid == "" {
		return nil // done already
	}
	return p.wait(ctx, string(upid), timeout)
}
