package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"

	"crawl.example.com/egress/internal/forwardproxy"
)

// sites are what requests go to and through.
type sites struct {
	Origin  string   // a URL
	Proxies []string // addresses
	Squid   string   // the address of squid in front of them, when there is one
	Chain   string   // and of proxy-chain
}

// manyProxies is how many real proxies there are.
const manyProxies = 4

// openSites opens a site and the proxies in this process.
func openSites() (s sites, closeAll func()) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	s.Origin = origin.URL
	servers := make([]*forwardproxy.Server, manyProxies)
	for i := range servers {
		servers[i] = must(forwardproxy.Start(forwardproxy.Config{}))
		s.Proxies = append(s.Proxies, fmt.Sprintf("127.0.0.1:%d", servers[i].Port()))
	}
	return s, func() {
		for _, server := range servers {
			server.Close()
		}
		origin.Close()
	}
}

// serveSites is the process that has them. It says where they are and ends with its input.
func serveSites(in io.Reader, out io.Writer) {
	s, closeAll := openSites()
	defer closeAll()
	must(0, json.NewEncoder(out).Encode(s))
	bufio.NewReader(in).ReadByte()
}

// startSites starts that process.
func startSites(ctx context.Context) (*child, sites, error) {
	var s sites
	self, err := os.Executable()
	if err != nil {
		return nil, s, err
	}
	c, first, err := start(ctx, []string{serveEnv + "=1"}, "", self)
	if err != nil {
		return nil, s, err
	}
	return c, s, json.Unmarshal([]byte(first), &s)
}

// freePort returns an address on loopback that nobody listens on.
func freePort() string {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return l.Addr().String()
}
