package main

import (
	"context"
	"net/http"
	"regexp"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
)

func TestConformance(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		l := NewLocal("here", 100)
		t.Cleanup(func() { l.Close() })
		spec := provider.Spec{Provider: "here", CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n# a document that is secret\n")}}
		invalid := spec
		invalid.Placement.Host = "elsewhere"
		return providertest.Harness{
			Provider: l, Spec: spec, Invalid: &invalid,
			AddForeign: func(_ *testing.T, name string) string {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.machines["by-hand"] = &machine{
					Instance: provider.Instance{ID: "by-hand", Name: name, State: provider.StateRunning}, server: &http.Server{},
				}
				return "by-hand"
			},
			Exists: func(_ *testing.T, id string) bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				return l.machines[id] != nil
			},
			Fill: func(*testing.T) func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				was := l.room
				l.room = len(l.machines)
				return func() {
					l.mu.Lock()
					defer l.mu.Unlock()
					l.room = was
				}
			},
		}
	}})
}

func TestAPageComesThroughAMachineThatTheBackendMade(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	page, err := run(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^hello to somebody who comes via "1.1 demo--proxy-[12]--1"$`).MatchString(page) {
		t.Errorf("got %s", page)
	}
}
