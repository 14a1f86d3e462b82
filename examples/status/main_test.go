package main

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestThePageIsServedAndEverythingEndsInTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var out strings.Builder
	if err := run(ctx, "127.0.0.1:0", &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if !regexp.MustCompile(`(?s)status page: http://127.0.0.1:\d+/\nhealthz: ok: \d of 7 proxies .*status.json: \d+ proxies, \d+ leases granted\n$`).MatchString(out.String()) {
		t.Errorf("got %s", out.String())
	}
}

func TestAnAddressThatCannotBeListenedOnIsAnError(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := run(ctx, "192.0.2.1:80", &strings.Builder{}); err == nil || ctx.Err() != nil {
		t.Errorf("got %v", err)
	}
}
