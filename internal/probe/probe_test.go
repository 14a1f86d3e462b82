package probe

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/internal/forwardproxy"
	"crawl.example.com/egress/internal/upstream"
)

func proxy(t *testing.T, c forwardproxy.Config) (*forwardproxy.Server, upstream.Endpoint) {
	t.Helper()
	s, err := forwardproxy.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	e := upstream.Endpoint{Scheme: "http", Host: "127.0.0.1", Port: s.Port(), Username: c.Username, Password: c.Password}
	if c.Protocol == forwardproxy.SOCKS5 {
		e.Scheme = "socks5"
	}
	return s, e
}

func TestEveryFailureHasItsReason(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/204":
			w.WriteHeader(http.StatusNoContent)
		case "/missing":
			w.WriteHeader(http.StatusNotFound)
		default:
			io.WriteString(w, r.Method+" is well")
		}
	}))
	defer origin.Close()
	untrusted := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer untrusted.Close()
	untrusted.Config.ErrorLog = nil
	secure := strings.Replace(origin.URL, "http:", "https:", 1)
	for _, c := range []struct {
		name   string
		check  Check
		faults forwardproxy.Faults
		want   Reason
	}{
		{"a good answer", Check{URL: origin.URL}, forwardproxy.Faults{}, ReasonOK},
		{"the wanted status", Check{URL: origin.URL + "/204", Status: 204}, forwardproxy.Faults{}, ReasonOK},
		{"the wanted body and method", Check{URL: origin.URL, Method: "POST", Body: "POST is well"}, forwardproxy.Faults{}, ReasonOK},
		{"another status", Check{URL: origin.URL, Status: 204}, forwardproxy.Faults{}, ReasonWrongStatus},
		{"no good status", Check{URL: origin.URL + "/missing"}, forwardproxy.Faults{}, ReasonWrongStatus},
		{"another body", Check{URL: origin.URL, Body: "ill"}, forwardproxy.Faults{}, ReasonWrongBody},
		{"a closed port", Check{URL: origin.URL}, forwardproxy.Faults{Refuse: true}, ReasonRefused},
		{"a closed port without a URL", Check{}, forwardproxy.Faults{Refuse: true}, ReasonRefused},
		{"an open port without a URL", Check{}, forwardproxy.Faults{}, ReasonOK},
		{"407", Check{URL: origin.URL}, forwardproxy.Faults{Deny: true}, ReasonProxyAuth},
		{"407 to CONNECT", Check{URL: secure}, forwardproxy.Faults{Deny: true}, ReasonProxyAuth},
		{"DNS at the proxy", Check{URL: origin.URL}, forwardproxy.Faults{NoDNS: true}, ReasonDNSAtProxy},
		{"DNS at the proxy and CONNECT", Check{URL: secure}, forwardproxy.Faults{NoDNS: true}, ReasonDNSAtProxy},
		{"an error of the proxy", Check{URL: secure}, forwardproxy.Faults{Status: 503}, ReasonProxyError},
		{"a certificate that nobody trusts", Check{URL: untrusted.URL}, forwardproxy.Faults{}, ReasonTLS},
		{"an answer that is cut", Check{URL: origin.URL}, forwardproxy.Faults{CutAfter: 20}, ReasonInterrupted},
		{"no answer in time", Check{URL: origin.URL, Timeout: 50 * time.Millisecond}, forwardproxy.Faults{Delay: time.Hour}, ReasonTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, e := proxy(t, forwardproxy.Config{Username: "u", Password: "planted"})
			s.SetFaults(c.faults)
			r := Do(t.Context(), e, c.check)
			if r.Reason != c.want || r.OK != (c.want == ReasonOK) || r.Message == "" {
				t.Errorf("got %+v, want %s", r, c.want)
			}
			if strings.Contains(r.Message, "planted") {
				t.Errorf("the message shows the password: %s", r.Message)
			}
		})
	}
}

func TestASOCKSProxyIsProbedToo(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer origin.Close()
	s, e := proxy(t, forwardproxy.Config{Protocol: forwardproxy.SOCKS5, Username: "u", Password: "p"})
	for _, c := range []struct {
		url    string
		faults forwardproxy.Faults
		want   Reason
	}{
		{"", forwardproxy.Faults{}, ReasonOK},
		{origin.URL, forwardproxy.Faults{}, ReasonOK},
		{"", forwardproxy.Faults{Deny: true}, ReasonProxyAuth},
		{origin.URL, forwardproxy.Faults{Deny: true}, ReasonProxyAuth},
		{origin.URL, forwardproxy.Faults{NoDNS: true}, ReasonDNSAtProxy},
		{origin.URL, forwardproxy.Faults{Status: 500}, ReasonProxyError},
	} {
		s.SetFaults(c.faults)
		if r := Do(t.Context(), e, Check{URL: c.url}); r.Reason != c.want {
			t.Errorf("%q with %+v: got %+v, want %s", c.url, c.faults, r, c.want)
		}
	}
}

func TestTheEgressAddressIsLearned(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		io.WriteString(w, `{"ip": "`+host+`"}`)
	}))
	defer origin.Close()
	_, e := proxy(t, forwardproxy.Config{})
	r := Do(t.Context(), e, Check{URL: origin.URL, EchoURL: origin.URL})
	if !r.OK || r.EgressIP.String() != "127.0.0.1" {
		t.Errorf("got %+v", r)
	}
	// A broken echo service is no verdict about the proxy.
	r = Do(t.Context(), e, Check{EchoURL: "http://127.0.0.1:1/"})
	if !r.OK || r.EgressIP.IsValid() || !strings.Contains(r.Message, "not known") {
		t.Errorf("got %+v", r)
	}
}

func TestEchoAnswersAreRead(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.7\n": "192.0.2.7", `{"origin": "192.0.2.7"}`: "192.0.2.7", "<p>Your IP: 2001:db8::7.</p>": "2001:db8::7",
		"::ffff:192.0.2.7": "192.0.2.7", "ip=192.0.2.7": "192.0.2.7", "none": "", "": "", "1.2.3": "", "12:34:56": "",
	} {
		got, err := parseEcho([]byte(text))
		if (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("%q gives %s, %v, want %q", text, got, err, want)
		}
	}
}

func FuzzParseEcho(f *testing.F) {
	f.Add([]byte("192.0.2.7"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ip, err := parseEcho(b); err == nil && !ip.IsValid() {
			t.Error("no error and no address")
		}
	})
}

func TestACancelledProbeSaysNothingAboutTheProxy(t *testing.T) {
	_, e := proxy(t, forwardproxy.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, url := range []string{"", "http://127.0.0.1:1/"} {
		if r := Do(ctx, e, Check{URL: url}); r.OK || r.Reason != ReasonCanceled {
			t.Errorf("got %+v", r)
		}
	}
}

func TestEveryProbeUsesANewConnection(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer origin.Close()
	s, e := proxy(t, forwardproxy.Config{})
	if r := Do(t.Context(), e, Check{URL: origin.URL}); !r.OK {
		t.Fatalf("got %+v", r)
	}
	s.SetFaults(forwardproxy.Faults{Refuse: true})
	if r := Do(t.Context(), e, Check{URL: origin.URL}); r.Reason != ReasonRefused {
		t.Errorf("got %+v", r)
	}
}
