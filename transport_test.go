package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress/internal/forwardproxy"
)

// proxyServer starts a forward proxy for the test.
func proxyServer(t testing.TB, config forwardproxy.Config) *forwardproxy.Server {
	t.Helper()
	s, err := forwardproxy.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// externalPool returns a started pool of external proxies that are all ready.
func externalPool(t testing.TB, change func(*Config), proxies ...Proxy) *Pool {
	t.Helper()
	config := Config{Name: "test"}
	if change != nil {
		change(&config)
	}
	p, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	if err := p.Apply(t.Context(), proxies...); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := p.WaitReady(ctx, len(proxies)); err != nil {
		t.Fatalf("%v: %+v", err, p.Proxies())
	}
	return p
}

func external(name string, s *forwardproxy.Server) Proxy {
	return Proxy{Name: name, Mode: External, Endpoint: fmt.Sprintf("127.0.0.1:%d", s.Port())}
}

func hello(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }

func get(t *testing.T, c *http.Client, url string) string {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// trusting makes the forwarders' clients trust a test server.
func trusting(t *testing.T, p *Pool, s *httptest.Server) {
	t.Helper()
	roots := s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.instances {
		if x.forward == nil {
			t.Fatal("an instance has not been leased yet")
		}
		x.forward.transport().TLSClientConfig = &tls.Config{RootCAs: roots, NextProtos: []string{"h2", "http/1.1"}}
	}
}

func TestRequestsGoThroughEveryKindOfProxy(t *testing.T) {
	plain := httptest.NewServer(http.HandlerFunc(hello))
	defer plain.Close()
	secure := httptest.NewTLSServer(http.HandlerFunc(hello))
	defer secure.Close()
	certificate, rootsPEM := selfSigned(t)
	for _, protocol := range []forwardproxy.Protocol{forwardproxy.HTTP, forwardproxy.HTTPS, forwardproxy.SOCKS5} {
		for _, password := range []string{"", "p@ss: /%wörd"} {
			scheme := map[forwardproxy.Protocol]Scheme{
				forwardproxy.HTTP: SchemeHTTP, forwardproxy.HTTPS: SchemeHTTPS, forwardproxy.SOCKS5: SchemeSOCKS5,
			}[protocol]
			t.Run(fmt.Sprintf("%s with password %q", scheme, password), func(t *testing.T) {
				config := forwardproxy.Config{Protocol: protocol, Certificate: certificate, Password: password}
				if password != "" {
					config.Username = "us@er /%"
				}
				s := proxyServer(t, config)
				x := external("a", s)
				x.Scheme = scheme
				x.Auth = Credentials{Username: config.Username, Password: password}
				if protocol == forwardproxy.HTTPS {
					x.TLS = ProxyTLS{RootsPEM: rootsPEM, ServerName: "proxy.test"}
				}
				p := externalPool(t, nil, x)
				client := p.Client(Request{})
				if got := get(t, client, plain.URL); got != "hello" {
					t.Errorf("got %q", got)
				}
				trusting(t, p, secure)
				if got := get(t, client, secure.URL); got != "hello" {
					t.Errorf("got %q over TLS", got)
				}
				c := s.Counters()
				if c.Requests+c.Connects != 2 || c.AuthFails != 0 {
					t.Errorf("the proxy saw %+v", c)
				}
				if s := p.Stats(); s.Leases != 0 || s.Granted != 2 {
					t.Errorf("got %+v", s)
				}
			})
		}
	}
}

func selfSigned(t *testing.T) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "proxy.test"}, DNSNames: []string{"proxy.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key},
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestHTTP2RequestsReallyAlternateBetweenProxies(t *testing.T) {
	origin := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) }))
	origin.EnableHTTP2 = true
	origin.StartTLS()
	defer origin.Close()
	a, b := proxyServer(t, forwardproxy.Config{}), proxyServer(t, forwardproxy.Config{})
	p := externalPool(t, nil, external("a", a), external("b", b))
	trusting(t, p, origin)
	requests := map[string]int{}
	for range 20 {
		l, err := p.Acquire(t.Context(), Request{})
		if err != nil {
			t.Fatal(err)
		}
		if got := get(t, l.Client(), origin.URL); got != "HTTP/2.0" {
			t.Fatalf("got %s", got)
		}
		requests[l.Proxy()]++
		l.Release()
	}
	if requests["a"] != 10 || requests["b"] != 10 || a.Counters().Connects != 1 || b.Counters().Connects != 1 {
		t.Errorf("requests %v, connections %d and %d; want ten over one connection through each",
			requests, a.Counters().Connects, b.Counters().Connects)
	}
	if a.Counters().Bytes < 1000 || b.Counters().Bytes < 1000 {
		t.Errorf("bytes %d and %d: one of the proxies carried nothing", a.Counters().Bytes, b.Counters().Bytes)
	}
}

func TestTheLeaseIsReleasedAtTheEndOfTheBody(t *testing.T) {
	more := make(chan struct{})
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow":
			io.WriteString(w, "begin")
			w.(http.Flusher).Flush()
			<-more
		case "/empty":
			w.WriteHeader(http.StatusNoContent)
		default:
			io.WriteString(w, strings.Repeat("x", 100_000))
		}
	}))
	defer origin.Close()
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	client := p.Client(Request{})
	held := func() int { return p.Stats().Leases }

	resp, err := client.Get(origin.URL + "/slow")
	if err != nil {
		t.Fatal(err)
	}
	if held() != 1 {
		t.Fatalf("%d leases held while the body is open", held())
	}
	close(more)
	io.Copy(io.Discard, resp.Body)
	if held() != 0 {
		t.Errorf("%d leases held at the end of the body", held())
	}
	resp.Body.Close()

	resp, err = client.Get(origin.URL + "/large")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Read(make([]byte, 10))
	resp.Body.Close()
	if held() != 0 {
		t.Errorf("%d leases held after Close in the middle", held())
	}
	if resp, err = client.Get(origin.URL + "/empty"); err != nil {
		t.Fatal(err)
	}
	if held() != 0 {
		t.Errorf("%d leases held for an answer without a body", held())
	}
	resp.Body.Close()
	if resp, err = client.Head(origin.URL + "/large"); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if held() != 0 {
		t.Errorf("%d leases held after HEAD", held())
	}
}

func TestACancelledRequestReleasesItsLease(t *testing.T) {
	arrived := make(chan struct{}, 1)
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write([]byte("x"))
		w.(http.Flusher).Flush()
		arrived <- struct{}{}
		<-r.Context().Done()
	}))
	defer origin.Close()
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, origin.URL, nil)
	resp, err := p.Client(Request{}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	<-arrived
	cancel(cause)
	if _, err := io.ReadAll(resp.Body); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	if n := p.Stats().Leases; n != 0 {
		t.Errorf("%d leases held", n)
	}
	// The caller's impatience is not held against the proxy.
	if s := p.Proxies()[0]; s.Failures != 0 || s.Phase != PhaseReady {
		t.Errorf("got %+v", s)
	}
}

func TestARequestIsNeverSentWithoutItsProxy(t *testing.T) {
	var direct atomic.Int64
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Via") == "" {
			direct.Add(1)
		}
	}))
	defer origin.Close()
	s := proxyServer(t, forwardproxy.Config{Name: "p"})
	p := externalPool(t, nil, external("a", s))
	get(t, p.Client(Request{}), origin.URL)
	l, err := p.Acquire(t.Context(), Request{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	s.SetFaults(forwardproxy.Faults{Refuse: true})
	for _, target := range []string{origin.URL, strings.Replace(origin.URL, "http:", "https:", 1), strings.Replace(origin.URL, "127.0.0.1", "localhost", 1)} {
		_, err := l.Client().Get(target)
		if _, ok := errors.AsType[*ProxyError](err); !ok {
			t.Errorf("%s: got %v, want a ProxyError", target, err)
		}
	}
	if direct.Load() != 0 {
		t.Error("the origin was reached directly")
	}
	// A closed port takes the proxy out at once.
	if _, err := p.TryAcquire(Request{}); !errors.Is(err, ErrExhausted) {
		t.Errorf("got %v", err)
	}
	s.SetFaults(forwardproxy.Faults{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	again, err := p.Acquire(ctx, Request{})
	if err != nil {
		t.Fatalf("the proxy did not come back: %v", err)
	}
	again.Release()
}

func TestWhatFailsAtTheProxyIsAProxyErrorWithAReason(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(hello))
	defer origin.Close()
	secure := strings.Replace(origin.URL, "http:", "https:", 1)
	for _, c := range []struct {
		name   string
		faults forwardproxy.Faults
		url    string
		reason string
	}{
		{"407 to an http request", forwardproxy.Faults{Deny: true}, origin.URL, "auth"},
		{"407 to CONNECT", forwardproxy.Faults{Deny: true}, secure, "auth"},
		{"DNS at the proxy", forwardproxy.Faults{NoDNS: true}, secure, "target-dns"},
		{"another status to CONNECT", forwardproxy.Faults{Status: 500}, secure, "proxy-status"},
		{"cut in the middle", forwardproxy.Faults{CutAfter: 10}, origin.URL, "interrupted"},
		{"refused", forwardproxy.Faults{Refuse: true}, origin.URL, "refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := proxyServer(t, forwardproxy.Config{})
			p := externalPool(t, nil, external("a", s))
			s.SetFaults(c.faults)
			_, err := p.Client(Request{}).Get(c.url)
			failed, ok := errors.AsType[*ProxyError](err)
			if !ok || failed.Reason != c.reason || failed.Proxy != "a" {
				t.Fatalf("got %v, want a ProxyError because of %s", err, c.reason)
			}
			if p.Stats().Leases != 0 {
				t.Error("the lease is still held")
			}
			if s := p.Proxies()[0]; s.Failures != 1 {
				t.Errorf("%d failures are counted", s.Failures)
			}
		})
	}
}

func TestRetriesUseOtherProxiesWhereThatIsSafe(t *testing.T) {
	var posts, gets atomic.Int64
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method == http.MethodPost {
			posts.Add(1)
		} else {
			gets.Add(1)
		}
		fmt.Fprintf(w, "%s %s", r.Method, body)
	}))
	defer origin.Close()
	bad, good := proxyServer(t, forwardproxy.Config{}), proxyServer(t, forwardproxy.Config{})
	p := externalPool(t, nil, external("bad", bad), external("good", good))
	// rotate has the next lease go to the proxy that fails.
	rotate := func(f forwardproxy.Faults) {
		t.Helper()
		bad.SetFaults(forwardproxy.Faults{})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if err := p.WaitReady(ctx, 2); err != nil {
			t.Fatal(err)
		}
		l, err := p.Acquire(ctx, Request{Exclude: []string{"good"}})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
		if l, err = p.Acquire(ctx, Request{Exclude: []string{"bad"}}); err != nil {
			t.Fatal(err)
		}
		l.Release()
		bad.SetFaults(f)
	}
	rotate(forwardproxy.Faults{Refuse: true})
	if _, err := p.Client(Request{}).Get(origin.URL); err == nil {
		t.Error("retried without being asked to")
	}
	rotate(forwardproxy.Faults{Refuse: true})
	if got := get(t, p.Client(Request{Retries: 1}), origin.URL); got != "GET " {
		t.Errorf("got %q", got)
	}
	// Nothing was sent yet, so even a POST is safe to send again.
	rotate(forwardproxy.Faults{Refuse: true})
	resp, err := p.Client(Request{Retries: 1}).Post(origin.URL, "text/plain", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	if body, _ := io.ReadAll(resp.Body); string(body) != "POST body" {
		t.Errorf("got %q", body)
	}
	resp.Body.Close()
	if posts.Load() != 1 {
		t.Errorf("%d POSTs arrived", posts.Load())
	}
	// The answer was cut: the POST may have been carried out.
	rotate(forwardproxy.Faults{CutAfter: 5})
	if _, err := p.Client(Request{Retries: 1}).Post(origin.URL, "text/plain", strings.NewReader("body")); err == nil {
		t.Error("a POST that may have arrived was sent again")
	}
	rotate(forwardproxy.Faults{CutAfter: 5})
	if got := get(t, p.Client(Request{Retries: 1}), origin.URL); got != "GET " {
		t.Errorf("got %q", got)
	}
	// A body that can't be replayed is not.
	rotate(forwardproxy.Faults{Refuse: true})
	if _, err := p.Client(Request{Retries: 1}).Post(origin.URL, "text/plain", io.MultiReader(strings.NewReader("once"))); err == nil {
		t.Error("a body without GetBody was sent again")
	}
}

func TestCredentialsReachNoOriginErrorLogOrString(t *testing.T) {
	const username, password = "us@er", "p@ss:/ %planted"
	planted := []string{"planted", url.QueryEscape(password), url.PathEscape(password), "cEBzcz"}
	var seen bytes.Buffer
	var mu sync.Mutex
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		r.Write(&seen)
	}))
	defer origin.Close()
	s := proxyServer(t, forwardproxy.Config{Username: username, Password: password})
	var log lockedBuffer
	x := external("a", s)
	x.Endpoint = fmt.Sprintf("http://%s@127.0.0.1:%d", url.UserPassword(username, password), s.Port())
	p := externalPool(t, func(c *Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}, x)
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, origin.URL, nil)
	req.Header.Set("Proxy-Authorization", "Basic planted")
	req.Header.Set("Proxy-Connection", "planted")
	resp, err := p.Client(Request{}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	l, err := p.Acquire(t.Context(), Request{})
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{seen.String(), fmt.Sprintf("%v %+v %#v", x, x, x), fmt.Sprintf("%v %+v", l, l), fmt.Sprintf("%+v", p.Proxies())}
	s.SetFaults(forwardproxy.Faults{Refuse: true})
	_, err = l.Client().Get(origin.URL)
	texts = append(texts, fmt.Sprintf("%v %+v", err, err))
	s.SetFaults(forwardproxy.Faults{Deny: true})
	_, err = l.Client().Get("https" + strings.TrimPrefix(origin.URL, "http"))
	texts = append(texts, fmt.Sprintf("%v %+v", err, err))
	l.Release()
	for _, endpoint := range []string{"http://u:planted@", "http://u:planted@h:99999", "socks9://u:planted@h", "http://u:planted@h/path", "http://u:planted@h o"} {
		err := p.Apply(t.Context(), Proxy{Name: "b", Mode: External, Endpoint: endpoint})
		if err == nil {
			t.Errorf("%s was accepted", endpoint)
		}
		texts = append(texts, fmt.Sprint(err))
	}
	texts = append(texts, log.String())
	for i, text := range texts {
		for _, secret := range planted {
			if strings.Contains(text, secret) {
				t.Errorf("text %d holds %q: %s", i, secret, text)
			}
		}
	}
	if p.Stats().Granted < 2 {
		t.Error("nothing went through the proxy")
	}
}

type lockedBuffer struct {
	mu sync.Mutex // guards buffer
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// upgrader answers with a switch of protocols and then echoes lines.
func upgrader(w http.ResponseWriter, r *http.Request) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	for {
		line, err := buffered.ReadString('\n')
		if err != nil {
			return
		}
		io.WriteString(conn, "echo "+line)
	}
}

func TestAnUpgradedConnectionHoldsItsLeaseUntilItIsClosed(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(upgrader))
	defer origin.Close()
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	dial := func() io.ReadWriteCloser {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, origin.URL, nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := p.Transport(Request{}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("got %s", resp.Status)
		}
		return resp.Body.(io.ReadWriteCloser)
	}
	conn := dial()
	lines := bufio.NewReader(conn)
	for range 3 {
		fmt.Fprintln(conn, "ping")
		if line, err := lines.ReadString('\n'); err != nil || line != "echo ping\n" {
			t.Fatalf("got %q, %v", line, err)
		}
	}
	if n := p.Stats().Leases; n != 1 {
		t.Fatalf("%d leases held", n)
	}
	conn.Close()
	if n := p.Stats().Leases; n != 0 {
		t.Fatalf("%d leases held after Close", n)
	}
	// A revoked lease ends the connection and tells why.
	conn = dial()
	fmt.Fprintln(conn, "ping")
	bufio.NewReader(io.LimitReader(conn, 10)).ReadString('\n')
	ended := make(chan error, 1)
	go func() { _, err := conn.Read(make([]byte, 1)); ended <- err }()
	if err := p.Apply(t.Context()); err != nil { // removes the proxy
		t.Fatal(err)
	}
	closing, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.Close(closing); err != nil {
		t.Fatal(err)
	}
	if _, ok := errors.AsType[*RevokedError](<-ended); !ok {
		t.Error("the reader was not told that the lease was revoked")
	}
	conn.Close()
}

func TestARevokedLeaseCutsItsRequestsWithTheCause(t *testing.T) {
	arrived := make(chan struct{}, 2)
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "begin")
		w.(http.Flusher).Flush()
		arrived <- struct{}{}
		<-r.Context().Done()
	}))
	defer origin.Close()
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	l, err := p.Acquire(t.Context(), Request{TTL: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := l.Client().Get(origin.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-arrived
	_, err = io.ReadAll(resp.Body)
	revoked, ok := errors.AsType[*RevokedError](err)
	if !ok || revoked.Reason != "ttl" {
		t.Fatalf("got %v", err)
	}
	if _, err := l.Client().Get(origin.URL); !errors.As(err, new(*RevokedError)) {
		t.Errorf("a request on a revoked lease: %v", err)
	}
	l.Release()
	released, err := p.Acquire(t.Context(), Request{})
	if err != nil {
		t.Fatal(err)
	}
	released.Release()
	if _, err := released.Client().Get(origin.URL); !errors.Is(err, ErrReleased) {
		t.Errorf("a request on a released lease: %v", err)
	}
}

func TestEachHopOfARedirectIsALeaseOfItsOwn(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			http.Redirect(w, r, "/end", http.StatusFound)
			return
		}
		io.WriteString(w, "end")
	}))
	defer origin.Close()
	one := 1
	x := external("a", proxyServer(t, forwardproxy.Config{}))
	x.MaxLeases = &one
	p := externalPool(t, nil, x)
	if got := get(t, p.Client(Request{}), origin.URL); got != "end" {
		t.Fatalf("got %q", got)
	}
	if s := p.Stats(); s.Granted != 2 || s.Leases != 0 {
		t.Fatalf("got %+v", s)
	}
}

func TestABanByHostNameAppliesToTheTransportToo(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(hello))
	defer origin.Close()
	a, b := proxyServer(t, forwardproxy.Config{}), proxyServer(t, forwardproxy.Config{})
	p := externalPool(t, nil, external("a", a), external("b", b))
	l, err := p.Acquire(t.Context(), Request{Target: "127.0.0.1", Exclude: []string{"b"}})
	if err != nil {
		t.Fatal(err)
	}
	l.Report(Banned(time.Hour))
	l.Release()
	for range 6 {
		get(t, p.Client(Request{}), origin.URL)
	}
	if a.Counters().Requests != 0 || b.Counters().Requests != 6 {
		t.Errorf("requests %d and %d, want all through b", a.Counters().Requests, b.Counters().Requests)
	}
}

func TestDoReleasesOnPanicAndEndsItsContextWithTheCaller(t *testing.T) {
	p := externalPool(t, nil, external("a", proxyServer(t, forwardproxy.Config{})))
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		p.Do(t.Context(), Request{}, func(context.Context, *Lease) error { panic("boom") })
	}()
	if n := p.Stats().Leases; n != 0 {
		t.Fatalf("%d leases held after a panic", n)
	}
	want := errors.New("mine")
	ctx, cancel := context.WithCancel(t.Context())
	err := p.Do(ctx, Request{}, func(inner context.Context, l *Lease) error {
		cancel()
		<-inner.Done()
		return want
	})
	if !errors.Is(err, want) || p.Stats().Leases != 0 {
		t.Fatalf("got %v", err)
	}
}

//go:noinline
func forget(t *testing.T, p *Pool) {
	if _, err := p.Acquire(t.Context(), Request{}); err != nil { // the line that leaks
		t.Fatal(err)
	}
}

func TestALeakedLeaseIsLoggedWithTheLineThatAcquiredIt(t *testing.T) {
	var log lockedBuffer
	leaks := make(chan Event, 1)
	p := externalPool(t, func(c *Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Observer = func(e Event) {
			if e.Kind == EventLeaseLeaked {
				leaks <- e
			}
		}
	}, external("a", proxyServer(t, forwardproxy.Config{})))
	forget(t, p)
	waitLeak(t, leaks, "transport_test.go:")
	if !strings.Contains(log.String(), "never released") {
		t.Errorf("the log says nothing:\n%s", log.String())
	}
	// A response whose body is dropped is a leak too, at the line of the request.
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, strings.Repeat("x", 1<<20))
	}))
	defer origin.Close()
	dropBody(t, p, origin.URL)
	waitLeak(t, leaks, "transport_test.go:")
	if s := p.Stats(); s.Leases != 0 || s.Leaked != 2 {
		t.Errorf("got %+v", s)
	}
}

//go:noinline
func dropBody(t *testing.T, p *Pool, url string) {
	if _, err := p.Client(Request{}).Get(url); err != nil {
		t.Fatal(err)
	}
}

func TestClientsThatTakeAProxyURLGetOneWithCredentials(t *testing.T) {
	s := proxyServer(t, forwardproxy.Config{Username: "u", Password: "p w"})
	x := external("a", s)
	x.Auth = Credentials{Username: "u", Password: "p w"}
	p := externalPool(t, nil, x)
	l, err := p.Acquire(t.Context(), Request{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	u, err := url.Parse(l.ProxyURL())
	if err != nil {
		t.Fatal(err)
	}
	origin := httptest.NewServer(http.HandlerFunc(hello))
	defer origin.Close()
	transport := &http.Transport{Proxy: http.ProxyURL(u)}
	defer transport.CloseIdleConnections()
	if got := get(t, &http.Client{Transport: transport}, origin.URL); got != "hello" {
		t.Errorf("got %q", got)
	}
	if _, port, _ := net.SplitHostPort(u.Host); port != fmt.Sprint(s.Port()) {
		t.Errorf("got %s", u.Host)
	}
}
