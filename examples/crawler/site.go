package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// site is the demo's origin: numbered pages that link to each other, on a loopback port. It refuses visitors
// that it has been told to ban, as a shop would that is tired of a crawler's address.
type site struct {
	pages  int
	server *http.Server
	url    string
	served sync.WaitGroup

	// mu guards the fields below.
	mu     sync.Mutex
	banned map[string]bool
	hits   map[int]int
}

// thinkTime is what the site takes for a page, so that a crawl lasts long enough to watch.
const thinkTime = 100 * time.Millisecond

func newSite(pages int) (*site, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &site{pages: pages, url: "http://" + listener.Addr().String(), banned: map[string]bool{}, hits: map[int]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /page/{n}", s.page)
	mux.HandleFunc("GET /204", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	s.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	s.served.Go(func() {
		if err := s.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			fmt.Println("demo site:", err)
		}
	})
	return s, nil
}

// ban makes the site refuse everything that comes through the named proxy.
func (s *site) ban(proxy string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.banned[proxy] = true
}

func (s *site) page(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 1 || n > s.pages {
		http.NotFound(w, r)
		return
	}
	s.mu.Lock()
	banned := false
	for proxy := range s.banned {
		banned = banned || strings.Contains(r.Header.Get("Via"), " "+proxy)
	}
	if !banned {
		s.hits[n]++
	}
	s.mu.Unlock()
	if banned {
		http.Error(w, "you have been here too often", http.StatusTooManyRequests)
		return
	}
	time.Sleep(thinkTime)
	// A tree keeps every page within reach of the first; the third link makes it a web.
	fmt.Fprintf(w, "<html><title>Page %d</title>\n", n)
	for _, link := range []int{2 * n, 2*n + 1, n*7%s.pages + 1} {
		if link <= s.pages {
			fmt.Fprintf(w, "<a href=\"/page/%d\">page %d</a>\n", link, link)
		}
	}
}

func (s *site) close(ctx context.Context) error {
	err := s.server.Shutdown(ctx)
	s.served.Wait()
	return err
}
