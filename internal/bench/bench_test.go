package main

import (
	"strings"
	"testing"
)

func BenchmarkAll(b *testing.B) {
	for _, m := range measurements() {
		b.Run(strings.ReplaceAll(m.name, " ", "_"), m.run)
	}
}

func TestNoProxyHasTwoHoldersWhenItBearsOneLease(t *testing.T) {
	if n := overlap(); n != 1 {
		t.Errorf("%d holders at once", n)
	}
}
