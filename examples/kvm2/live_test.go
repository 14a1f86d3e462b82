//go:build live

package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"crawl.example.com/egress/internal/testhost"
)

func TestLiveAHostIsEmptiedWhileACrawlGoesOn(t *testing.T) {
	testhost.Require(t)
	var out bytes.Buffer
	err := run(t.Context(), options{testhost: true, proxies: 2, pages: 20, memory: 1024}, io.MultiWriter(&out, t.Output()))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"generation 1 at 10.232.", "on alpha", "on beta", "alpha is empty", "images deleted"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the output", want)
		}
	}
	if _, after, _ := strings.Cut(out.String(), "alpha is empty"); strings.Contains(after, "on alpha,") {
		t.Errorf("a proxy is on alpha in the end: %s", after)
	}
}
