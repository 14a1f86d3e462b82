package fakepve

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"crawl.example.com/egress/internal/memconn"
)

const (
	// requestsPerConnection and maxBody are pveproxy's.
	requestsPerConnection = 100
	maxBody               = 512 << 10
	// proxyTimeout is how long pveproxy waits for another node.
	proxyTimeout = 30 * time.Second
)

// request is one under way. Its handler runs with the cluster's lock held.
type request struct {
	c      *Cluster
	node   string // connected to
	method string
	path   string
	token  *token
	vars   map[string]string // of the path
	params map[string]string // of query and body, without vars
	upload *upload
}

// failure is an error answer of the API.
type failure struct {
	status  int
	message string
	errors  map[string]string
}

func fail(format string, args ...any) *failure {
	return &failure{status: 500, message: fmt.Sprintf(format, args...)}
}

func badParam(name, format string, args ...any) *failure {
	return &failure{status: 400, message: "Parameter verification failed.", errors: map[string]string{name: fmt.Sprintf(format, args...)}}
}

type response struct {
	status int
	reason string
	kind   string // content type
	body   []byte
	drop   bool
}

func (f *failure) response() response {
	body := map[string]any{"data": nil, "message": f.message + "\n"}
	if f.errors != nil {
		body["errors"] = f.errors
	}
	encoded, _ := json.Marshal(body)
	reason, _, _ := strings.Cut(f.message, "\n")
	return response{status: f.status, reason: reason, body: encoded}
}

// serve answers the requests of one connection. It writes answers itself: net/http has no way to send a reason phrase.
func (c *Cluster) serve(n *node, raw *memconn.Conn) {
	defer func() {
		_ = raw.Close()
		c.mu.Lock()
		delete(c.conns, raw)
		c.mu.Unlock()
	}()
	conn := tls.Server(raw, c.tls[n.name])
	reader := bufio.NewReader(conn)
	for i := range requestsPerConnection {
		_ = conn.SetReadDeadline(time.Now().Add(c.config.IdleTimeout))
		req, err := http.ReadRequest(reader)
		if err != nil {
			_ = conn.Close()
			return
		}
		_ = conn.SetReadDeadline(time.Time{})
		r := c.answer(n, req)
		if r.drop {
			return
		}
		keep := r.status < 400 && i < requestsPerConnection-1 && !req.Close
		if err := write(conn, r, keep); err != nil {
			return
		}
		if !keep {
			_ = conn.Close()
			return
		}
	}
}

func write(w io.Writer, r response, keep bool) error {
	var b bytes.Buffer
	if r.reason == "" {
		r.reason = http.StatusText(r.status)
	}
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", r.status, r.reason)
	connection := "close"
	if keep {
		connection = "Keep-Alive"
	}
	kind := r.kind
	if kind == "" {
		kind = "application/json;charset=UTF-8"
	}
	fmt.Fprintf(&b, "Cache-Control: max-age=0\r\nConnection: %s\r\nServer: pve-api-daemon/3.0\r\nContent-Length: %d\r\nContent-Type: %s\r\n\r\n",
		connection, len(r.body), kind)
	b.Write(r.body)
	_, err := w.Write(b.Bytes())
	return err
}

// answer handles one request, faults included.
func (c *Cluster) answer(n *node, req *http.Request) response {
	path, isAPI := strings.CutPrefix(req.URL.Path, "/api2/json")
	c.mu.Lock()
	f := c.faultLocked(n.name, req.Method, path)
	c.mu.Unlock()
	if f == nil {
		f = &Fault{}
	}
	if f.Delay > 0 && !c.sleep(f.Delay) {
		return response{drop: true}
	}
	if f.Do != nil {
		f.Do()
	}
	instead := f.Drop || f.Status != 0 || f.HTML || f.Body != ""
	var r response
	if !instead || f.Carry {
		if !isAPI {
			r = fail("no such file '%s'", req.URL.Path).response()
		} else {
			r = c.handle(n, req, path)
		}
	} else {
		_, _ = io.Copy(io.Discard, req.Body)
	}
	switch {
	case f.Drop:
		r = response{drop: true}
	case f.HTML:
		r = response{status: max(f.Status, 200), reason: f.Reason, kind: "text/html", body: []byte("<!DOCTYPE html><html>hello</html>")}
	case f.Body != "":
		r = response{status: max(f.Status, 200), reason: f.Reason, body: []byte(f.Body)}
	case f.Status != 0:
		r = (&failure{status: f.Status, message: f.Reason}).response()
		if f.Status >= 595 || f.Status == 401 {
			r.body = nil
		}
	}
	c.mu.Lock()
	seen := Request{Node: n.name, Method: req.Method, Path: path, Status: r.status}
	c.requests = append(c.requests, seen)
	c.mu.Unlock()
	return r
}

// handle does what pveproxy does with a request: authenticate, find the method, check privileges, forward, check
// parameters, carry out.
func (c *Cluster) handle(n *node, req *http.Request, path string) response {
	c.mu.Lock()
	t := c.authenticateLocked(req.Header.Get("Authorization"))
	c.mu.Unlock()
	if t == nil {
		// Nothing of the body is read: who sends a large one sees a broken pipe.
		text := "No ticket"
		if req.Header.Get("Authorization") != "" {
			text = "Authentication failed!"
		}
		return c.held(401, text)
	}
	if len(req.TransferEncoding) > 0 {
		return fail501("chunked transfer encoding not supported")
	}
	m, vars := find(req.Method, path)
	if m == nil {
		return fail501("Method '%s %s' not implemented", req.Method, path)
	}
	q := &request{c: c, node: n.name, method: req.Method, path: path, token: t, vars: vars, params: map[string]string{}}
	for k, v := range req.URL.Query() {
		q.params[k] = v[0]
	}
	if m.upload {
		return c.takeUpload(q, m, req)
	}
	if req.ContentLength > maxBody {
		return fail501("for data too large")
	}
	if req.ContentLength > 0 && (req.Method == http.MethodGet || req.Method == http.MethodDelete) {
		return fail501("Unexpected content for method '%s'", req.Method)
	}
	if err := q.readBody(req); err != nil {
		return (&failure{status: 400, message: err.Error()}).response()
	}
	c.mu.Lock()
	f := q.allowedLocked(m)
	c.mu.Unlock()
	if f != nil {
		return f.response()
	}
	if r, ok := c.forward(q, m); !ok {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.carryOutLocked(m)
}

func fail501(format string, args ...any) response {
	f := fail(format, args...)
	f.status = 501
	return f.response()
}

// held answers with an empty body after the time for which pveproxy holds back refusals.
func (c *Cluster) held(status int, text string) response {
	if !c.sleep(c.config.AuthDelay) {
		return response{drop: true}
	}
	return response{status: status, reason: text}
}

func (q *request) allowedLocked(m *method) *failure {
	if m.may == nil {
		return nil
	}
	return m.may(q)
}

// carryOutLocked checks the parameters and runs the handler.
func (q *request) carryOutLocked(m *method) response {
	if f := q.check(m); f != nil {
		return f.response()
	}
	data, f := m.do(q)
	if f != nil {
		return f.response()
	}
	body, err := json.Marshal(map[string]any{"data": data})
	if err != nil {
		return fail("%v", err).response()
	}
	return response{status: 200, reason: "OK", body: body}
}

// forward stands for the way to another node. It reports false with the answer when there is none.
func (c *Cluster) forward(q *request, m *method) (response, bool) {
	target := q.vars["node"]
	if target == "" || target == q.node || target == "localhost" || m.local {
		if target == "localhost" {
			q.vars["node"] = q.node
		}
		return response{}, true
	}
	c.mu.Lock()
	n := c.nodes[target]
	mode := NodeUp
	if n != nil {
		mode = n.mode
		if n.alone != nil || c.nodes[q.node].alone != nil {
			mode = NodeRefuses
		}
	}
	c.mu.Unlock()
	switch {
	case n == nil:
		return fail("hostname lookup '%s' failed - failed to get address info for: %s: Name or service not known", target, target).response(), false
	case mode == NodeRefuses:
		return response{status: 595, reason: "Connection refused"}, false
	case mode == NodeSilent:
		if !c.sleep(proxyTimeout) {
			return response{drop: true}, false
		}
		return response{status: 596, reason: "Connection timed out"}, false
	}
	return response{}, true
}

// readBody adds what a JSON object or a form holds to the parameters. Perl has no booleans: true is 1.
func (q *request) readBody(req *http.Request) error {
	body, err := io.ReadAll(io.LimitReader(req.Body, maxBody+1))
	if err != nil || len(body) == 0 {
		return err
	}
	if strings.HasPrefix(req.Header.Get("Content-Type"), "application/json") {
		var values map[string]any
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		if err := d.Decode(&values); err != nil {
			return errors.New("malformed JSON string")
		}
		for k, v := range values {
			switch v := v.(type) {
			case string:
				q.params[k] = v
			case json.Number:
				q.params[k] = v.String()
			case bool:
				q.params[k] = strconv.Itoa(map[bool]int{true: 1}[v])
			default:
				return fmt.Errorf("value of %s is neither text nor a number", k)
			}
		}
		return nil
	}
	form, err := url.ParseQuery(string(body))
	for k, v := range form {
		q.params[k] = v[0]
	}
	return err
}
