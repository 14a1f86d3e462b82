package main

import (
	"context"
	"testing"
	"time"
)

func TestAThousandPagesComeOnceEachThroughProxiesOnlyWithTheCookieAndAfterRetries(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	report, err := run(ctx, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Served) != 1000 || len(report.Busy) != 20 || len(report.Proxies) != proxies || report.Direct != 0 || report.Strangers != 0 {
		t.Errorf("got %+v", report)
	}
}

func TestACrawlThatIsInterruptedEndsWithAnError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := run(ctx, 100); err == nil {
		t.Error("there is no error")
	}
}
