package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestTheExampleFetchesItsPagesThroughTheFake(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), options{zones: "europe-west3-a,europe-west3-b", proxies: 3, pages: 20}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "20 pages through 3 proxies") {
		t.Error(out.String())
	}
}
