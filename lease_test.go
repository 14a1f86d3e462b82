package egress

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// waitLeak collects garbage until a leak is reported, whose place must contain where.
func waitLeak(t *testing.T, leaks <-chan Event, where string) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		runtime.GC()
		select {
		case e := <-leaks:
			if !strings.Contains(e.Message, where) || e.Proxy == "" {
				t.Errorf("got %+v, want a place in %s", e, where)
			}
			return
		case <-deadline:
			t.Fatal("no leak was reported")
		case <-time.After(50 * time.Millisecond):
		}
	}
}
