package forwardproxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
)

func start(t *testing.T, c Config) (*Server, *http.Client) {
	t.Helper()
	s, err := Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	u := &url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", s.Port())}
	if c.Username != "" {
		u.User = url.UserPassword(c.Username, c.Password)
	}
	transport := &http.Transport{Proxy: http.ProxyURL(u)}
	t.Cleanup(transport.CloseIdleConnections)
	return s, &http.Client{Transport: transport}
}

func TestHopByHopHeadersEndAtTheProxy(t *testing.T) {
	var seen http.Header
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.Header.Clone()
		w.Header().Set("Connection", "X-Private")
		w.Header().Set("X-Private", "hop")
		io.WriteString(w, "hello")
	}))
	defer origin.Close()
	_, client := start(t, Config{Name: "via-me", Username: "u", Password: "p"})
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, origin.URL, nil)
	req.Header.Set("Connection", "X-Mine")
	req.Header.Set("X-Mine", "hop")
	req.Header.Set("X-Kept", "yes")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for _, name := range []string{"Proxy-Authorization", "Proxy-Connection", "X-Mine", "X-Forwarded-For"} {
		if seen.Get(name) != "" {
			t.Errorf("the origin got %s: %s", name, seen.Get(name))
		}
	}
	if seen.Get("X-Kept") != "yes" || !strings.Contains(seen.Get("Via"), "via-me") || resp.Header.Get("X-Private") != "" {
		t.Errorf("origin got %v, client %v", seen, resp.Header)
	}
}

func TestATunnelClosesEachSideByItself(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		c, err := listener.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		all, _ := io.ReadAll(c) // until the client has closed its side
		fmt.Fprintf(c, "got %s", all)
	}()
	s, _ := start(t, Config{})
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.Port()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// What comes right behind the request belongs to the target.
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\nearly ", listener.Addr())
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("got %v, %v", resp, err)
	}
	fmt.Fprint(c, "late")
	c.(*net.TCPConn).CloseWrite()
	if got, err := io.ReadAll(r); err != nil || string(got) != "got early late" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestFaultsAreSwitchedOnAndOff(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat("x", 1000)) }))
	defer origin.Close()
	s, client := start(t, Config{})
	status := func() int {
		resp, err := client.Get(origin.URL)
		if err != nil {
			return 0
		}
		defer resp.Body.Close()
		if _, err := io.ReadAll(resp.Body); err != nil {
			return -1
		}
		return resp.StatusCode
	}
	for _, c := range []struct {
		faults Faults
		want   int
	}{
		{Faults{}, 200}, {Faults{Deny: true}, 407}, {Faults{Status: 418}, 418}, {Faults{NoDNS: true}, 503},
		{Faults{Refuse: true}, 0}, {Faults{}, 200}, {Faults{CutAfter: 500}, -1}, {Faults{}, 200},
	} {
		if err := s.SetFaults(c.faults); err != nil {
			t.Fatal(err)
		}
		if got := status(); got != c.want {
			t.Errorf("%+v: got %d, want %d", c.faults, got, c.want)
		}
		client.CloseIdleConnections()
	}
	s.SetFaults(Faults{Delay: 50 * time.Millisecond})
	if begin := time.Now(); status() != 200 || time.Since(begin) < 50*time.Millisecond {
		t.Error("not delayed")
	}
	if c := s.Counters(); c.Requests == 0 || c.AuthFails != 1 || c.Active != 0 {
		t.Errorf("got %+v", c)
	}
}

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	arrived := make(chan struct{})
	origin := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
	}))
	defer origin.Close()
	s, client := start(t, Config{})
	failed := make(chan error, 1)
	go func() {
		resp, err := client.Get(origin.URL)
		if err == nil {
			resp.Body.Close()
		}
		failed <- err
	}()
	<-arrived
	s.Close()
	s.Close()
	if <-failed == nil {
		t.Error("the request was answered")
	}
}

func FuzzReadSOCKSRequest(f *testing.F) {
	f.Add([]byte("\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x03\x01a\x00\x50"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if address, err := readSOCKSRequest(strings.NewReader(string(b))); err == nil && address == "" {
			t.Error("no error and no address")
		}
	})
}
