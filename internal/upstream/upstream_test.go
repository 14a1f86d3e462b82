package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"crawl.example.com/egress/internal/upstream"
)

func TestAnEndpointShowsNoCredentials(t *testing.T) {
	e := upstream.Endpoint{Scheme: "http", Host: "2001:db8::1", Port: 3128, Username: "us@er", Password: "p:a/s s%"}
	for _, text := range []string{e.String(), fmt.Sprintf("%v", e), fmt.Sprintf("%+v", e), fmt.Sprintf("%#v", e)} {
		if text != "http://[2001:db8::1]:3128" {
			t.Errorf("got %q", text)
		}
	}
	u := e.URL()
	password, _ := u.User.Password()
	if u.User.Username() != e.Username || password != e.Password {
		t.Errorf("the URL carries %q and %q", u.User.Username(), password)
	}
}

func TestConnectGreetsASOCKSProxy(t *testing.T) {
	type exchange struct{ want, answer string }
	for name, c := range map[string]struct {
		username, password string
		exchanges          []exchange
		kind               upstream.Kind
	}{
		"without credentials":        {"", "", []exchange{{"\x05\x01\x00", "\x05\x00"}}, ""},
		"with credentials":           {"u", "pw", []exchange{{"\x05\x02\x00\x02", "\x05\x02"}, {"\x01\x01u\x02pw", "\x01\x00"}}, ""},
		"credentials not asked for":  {"u", "pw", []exchange{{"\x05\x02\x00\x02", "\x05\x00"}}, ""},
		"credentials refused":        {"u", "pw", []exchange{{"\x05\x02\x00\x02", "\x05\x02"}, {"\x01\x01u\x02pw", "\x01\x01"}}, upstream.KindAuth},
		"credentials wanted":         {"", "", []exchange{{"\x05\x01\x00", "\x05\xff"}}, upstream.KindAuth},
		"not a SOCKS proxy":          {"", "", []exchange{{"\x05\x01\x00", "HT"}}, upstream.KindProxyStatus},
		"closed in the middle":       {"", "", []exchange{{"\x05\x01\x00", "\x05"}}, upstream.KindInterrupted},
		"closed before the greeting": {"", "", []exchange{{"\x05\x01\x00", ""}}, upstream.KindInterrupted},
	} {
		t.Run(name, func(t *testing.T) {
			e := listen(t, func(conn net.Conn) {
				for _, x := range c.exchanges {
					got := make([]byte, len(x.want))
					if _, err := readFull(conn, got); err != nil || string(got) != x.want {
						t.Errorf("got %q, %v, want %q", got, err, x.want)
					}
					conn.Write([]byte(x.answer))
				}
			})
			e.Scheme, e.Username, e.Password = "socks5", c.username, c.password
			conn, err := upstream.Connect(t.Context(), e)
			if c.kind == "" {
				if err != nil {
					t.Fatal(err)
				}
				conn.Close()
				return
			}
			if err == nil || upstream.Classify(err) != c.kind {
				t.Fatalf("got %v, of kind %q, want %q", err, upstream.Classify(err), c.kind)
			}
		})
	}
}

func TestConnectEndsWithItsContext(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	greeted := make(chan struct{})
	e := listen(t, func(conn net.Conn) {
		readFull(conn, make([]byte, 3))
		close(greeted)
		<-release
	})
	e.Scheme = "socks5"
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-greeted; cancel() }()
	if _, err := upstream.Connect(ctx, e); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}
}

func TestEveryRefusalOfACONNECTHasItsKind(t *testing.T) {
	for answer, want := range map[string]upstream.Kind{
		"HTTP/1.1 407 Proxy Authentication Required\r\n":                        upstream.KindAuth,
		"HTTP/1.1 502 Bad Gateway\r\n":                                          upstream.KindProxyStatus,
		"HTTP/1.1 503 Service Unavailable\r\nX-Squid-Error: ERR_DNS_FAIL 0\r\n": upstream.KindTargetDNS,
		"HTTP/1.1 502 Bad Gateway\r\nProxy-Status: p; error=dns_error\r\n":      upstream.KindTargetDNS,
		"": upstream.KindInterrupted,
	} {
		e := listen(t, func(conn net.Conn) {
			buffer := make([]byte, 4096)
			conn.Read(buffer)
			if answer != "" {
				conn.Write([]byte(answer + "Content-Length: 0\r\n\r\n"))
			}
		})
		transport := upstream.NewTransport(e)
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://target.invalid/", nil)
		_, err := transport.RoundTrip(req)
		transport.CloseIdleConnections()
		if err == nil || upstream.Classify(err) != want {
			t.Errorf("%q: got %v, of kind %q, want %q", answer, err, upstream.Classify(err), want)
		}
	}
}

func TestATargetIsNeverReachedWithoutTheProxy(t *testing.T) {
	reached := false
	origin := listen(t, func(net.Conn) { reached = true })
	closed := listen(t, nil)
	for _, scheme := range []string{"http", "https", "socks5"} {
		e := closed
		e.Scheme = scheme
		transport := upstream.NewTransport(e)
		for _, url := range []string{"http://" + origin.Addr() + "/", "https://" + origin.Addr() + "/", "http://localhost:1/"} {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
			_, err := transport.RoundTrip(req)
			if kind := upstream.Classify(err); kind != upstream.KindRefused {
				t.Errorf("%s to %s: got %v, of kind %q, want refused", scheme, url, err, kind)
			}
		}
	}
	if reached {
		t.Error("the origin was reached directly")
	}
}

func TestTextDropsTheURL(t *testing.T) {
	client := &http.Client{Transport: upstream.NewTransport(listen(t, nil))}
	_, err := client.Get("http://user:planted@host.invalid/?token=planted")
	if got := upstream.Text(err); strings.Contains(got, "planted") || got == "" {
		t.Errorf("got %q", got)
	}
}

// listen serves each connection with serve on a loopback port and returns the endpoint; with a nil serve the
// port is closed again first.
func listen(t *testing.T, serve func(net.Conn)) upstream.Endpoint {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if serve == nil {
		listener.Close()
	} else {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				serve(conn)
				conn.Close()
			}
		}()
		t.Cleanup(func() { listener.Close(); <-done })
	}
	return upstream.Endpoint{Scheme: "http", Host: "127.0.0.1", Port: port}
}

func readFull(conn net.Conn, b []byte) (int, error) {
	n := 0
	for n < len(b) {
		k, err := conn.Read(b[n:])
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, nil
}
