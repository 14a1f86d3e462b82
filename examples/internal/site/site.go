// Package site is the origin that the examples crawl: numbered pages on a loopback port that link to each other. It is as
// awkward as real ones are, and counts what it sees of its visitors.
package site

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
)

// Site is a running site. It is safe for concurrent use.
type Site struct {
	// URL is the site's, without a slash at its end. The first page is URL + "/page/1".
	URL string

	pages   int
	visitor string // the value of the cookie
	server  *httptest.Server

	// mu guards seen.
	mu   sync.Mutex
	seen Report
}

// Report is what the site has seen.
type Report struct {
	// Served counts how often each page was given to a visitor.
	Served map[int]int
	// Busy counts how often each page was refused with 503.
	Busy map[int]int
	// Strangers counts requests for other pages than the first without the cookie that it sets.
	Strangers int
	// Direct counts requests that came without a proxy.
	Direct int
	// Proxies counts requests by the proxy they came through, as its Via header names it.
	Proxies map[string]int
}

// busyEvery is the share of pages that are refused when they are first asked for.
const busyEvery = 50

// New starts a site. Page n links to 2n, 2n+1 and one page that is elsewhere, so that every page can be reached from the
// first. The first page sets a cookie that all others want, or answer 403. Every fiftieth page answers 503 once.
func New(pages int) *Site {
	s := &Site{pages: pages, visitor: rand.Text(), seen: Report{Served: map[int]int{}, Busy: map[int]int{}, Proxies: map[string]int{}}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /page/{n}", s.page)
	mux.HandleFunc("GET /204", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	s.server = httptest.NewServer(mux)
	s.URL = s.server.URL
	return s
}

// Close ends the site.
func (s *Site) Close() { s.server.Close() }

func (s *Site) page(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 1 || n > s.pages {
		http.NotFound(w, r)
		return
	}
	switch s.look(n, r) {
	case http.StatusForbidden:
		http.Error(w, "begin with the first page", http.StatusForbidden)
		return
	case http.StatusServiceUnavailable:
		http.Error(w, "come back in a moment", http.StatusServiceUnavailable)
		return
	}
	if n == 1 {
		http.SetCookie(w, &http.Cookie{Name: "visitor", Value: s.visitor, Path: "/", HttpOnly: true})
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	fmt.Fprintf(w, "<!DOCTYPE html>\n<title>Page %d</title>\n", n)
	for _, link := range []int{2 * n, 2*n + 1, n*7%s.pages + 1} {
		if link <= s.pages {
			fmt.Fprintf(w, "<a href=\"/page/%d\">page %d</a>\n", link, link)
		}
	}
}

// look counts a request and returns the status of its answer.
func (s *Site) look(n int, r *http.Request) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if via := strings.Fields(r.Header.Get("Via")); len(via) == 2 {
		s.seen.Proxies[via[1]]++
	} else {
		s.seen.Direct++
	}
	if c, err := r.Cookie("visitor"); n > 1 && (err != nil || c.Value != s.visitor) {
		s.seen.Strangers++
		return http.StatusForbidden
	}
	if n%busyEvery == 0 && s.seen.Busy[n] == 0 {
		s.seen.Busy[n]++
		return http.StatusServiceUnavailable
	}
	s.seen.Served[n]++
	return http.StatusOK
}

// Check returns what the site has seen, and an error unless every page was served once, to one visitor who kept the
// cookie, came back after each 503, and used at least so many proxies and nothing else.
func (s *Site) Check(proxies int) (Report, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.pages {
		if times := s.seen.Served[n+1]; times != 1 {
			return s.seen, fmt.Errorf("page %d was served %d times, want once", n+1, times)
		}
	}
	switch {
	case s.seen.Strangers > 0:
		return s.seen, fmt.Errorf("%d requests came without the cookie", s.seen.Strangers)
	case len(s.seen.Busy) != s.pages/busyEvery:
		return s.seen, fmt.Errorf("%d pages were refused once, want %d", len(s.seen.Busy), s.pages/busyEvery)
	case s.seen.Direct > 0:
		return s.seen, fmt.Errorf("%d requests came without a proxy", s.seen.Direct)
	case len(s.seen.Proxies) < proxies:
		return s.seen, fmt.Errorf("requests came through %d proxies, want %d at least", len(s.seen.Proxies), proxies)
	}
	return s.seen, nil
}
