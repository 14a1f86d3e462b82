package site

import (
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"testing"
)

// visit asks for a page as if through a proxy, or directly when proxy is empty, and returns the status.
func visit(t *testing.T, s *Site, jar http.CookieJar, n int, proxy string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("%s/page/%d", s.URL, n), nil)
	if err != nil {
		t.Fatal(err)
	}
	if proxy != "" {
		req.Header.Set("Via", "1.1 "+proxy)
	}
	resp, err := (&http.Client{Jar: jar}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

func TestASiteNoticesWhatACrawlerDoesWrong(t *testing.T) {
	for _, c := range []struct {
		name  string
		wrong func(t *testing.T, s *Site, jar http.CookieJar)
		want  string // part of the error
	}{
		{"nothing", func(*testing.T, *Site, http.CookieJar) {}, ""},
		{"a page twice", func(t *testing.T, s *Site, jar http.CookieJar) { visit(t, s, jar, 7, "a") }, "page 7 was served 2 times"},
		{"no cookie", func(t *testing.T, s *Site, _ http.CookieJar) {
			if status := visit(t, s, nil, 7, "a"); status != http.StatusForbidden {
				t.Errorf("got %d", status)
			}
		}, "1 requests came without the cookie"},
		{"no proxy", func(t *testing.T, s *Site, _ http.CookieJar) { visit(t, s, nil, 7, "") }, "without"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := New(60)
			defer s.Close()
			jar, err := cookiejar.New(nil)
			if err != nil {
				t.Fatal(err)
			}
			for n := 1; n <= 60; n++ {
				status := visit(t, s, jar, n, "ab"[n%2:n%2+1])
				if status == http.StatusServiceUnavailable && n == 50 {
					status = visit(t, s, jar, n, "a")
				}
				if status != http.StatusOK {
					t.Errorf("page %d answers %d", n, status)
				}
			}
			c.wrong(t, s, jar)
			if _, err := s.Check(2); c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if _, err := s.Check(3); err == nil {
				t.Error("two proxies count as three")
			}
		})
	}
}
