package provider_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
)

var update = flag.Bool("update", false, "rewrite testdata/hashes.golden")

// specs are the specs whose hashes are pinned.
func specs() []provider.Spec {
	base := provider.Spec{Provider: "home", Image: "debian-13", CPUs: 1, MemoryMiB: 512, Port: 3128,
		CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\n"), InstallGuestAgent: true}}
	with := func(change func(*provider.Spec)) provider.Spec {
		s := base
		change(&s)
		return s
	}
	return []provider.Spec{
		{},
		base,
		with(func(s *provider.Spec) { s.Provider = "gce" }),
		with(func(s *provider.Spec) { s.Image = "debian-12" }),
		with(func(s *provider.Spec) { s.CPUs = 2 }),
		with(func(s *provider.Spec) { s.MemoryMiB = 1024 }),
		with(func(s *provider.Spec) { s.DiskGiB = 10 }),
		with(func(s *provider.Spec) { s.Port = 8080 }),
		with(func(s *provider.Spec) { s.Placement.Host = "beelink" }),
		with(func(s *provider.Spec) { s.Placement.Labels = map[string]string{"a": "1", "b": "2"} }),
		with(func(s *provider.Spec) { s.Placement.Labels = map[string]string{"a": "1b", "": "2"} }),
		with(func(s *provider.Spec) { s.Placement.Group = "beelink" }),
		with(func(s *provider.Spec) { s.CloudInit.UserData = []byte("#cloud-config\n\n") }),
		with(func(s *provider.Spec) { s.CloudInit.VendorData = []byte("#!/bin/sh\n") }),
		with(func(s *provider.Spec) { s.CloudInit.InstallGuestAgent = false }),
		with(func(s *provider.Spec) { s.CloudInit.Network = &provider.Network{} }),
		with(func(s *provider.Spec) {
			s.CloudInit.Network = &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.5/24")}, Gateways: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		}),
		with(func(s *provider.Spec) {
			s.CloudInit.Network = &provider.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.5/24")}, Nameservers: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		}),
		with(func(s *provider.Spec) {
			s.CloudInit.Network = &provider.Network{SearchDomains: []string{"a.example", "b.example"}}
		}),
		with(func(s *provider.Spec) { s.Options = map[string]string{"k": "v"} }),
		with(func(s *provider.Spec) { s.Options = map[string]string{"kv": ""} }),
	}
}

func TestHashesAreThoseThatFleetsWereMadeWith(t *testing.T) {
	var b strings.Builder
	fmt.Fprintf(&b, "version %d\n", provider.HashVersion)
	seen := map[string]int{}
	for i, s := range specs() {
		plain, keyed := s.Hash(nil), s.Hash([]byte("key"))
		fmt.Fprintf(&b, "%d %s %s\n", i, plain, keyed)
		for _, h := range []string{plain, keyed} {
			if j, ok := seen[h]; ok {
				t.Errorf("specs %d and %d have one hash", i, j)
			}
			seen[h] = i
			if len(h) != 52 || strings.Trim(h, "abcdefghijklmnopqrstuvwxyz234567") != "" {
				t.Errorf("hash %q is not 52 letters and digits", h)
			}
		}
	}
	const file = "testdata/hashes.golden"
	if *update {
		old, err := os.ReadFile(file)
		version := fmt.Sprintf("version %d\n", provider.HashVersion)
		if err == nil && strings.HasPrefix(string(old), version) && string(old) != b.String() && !strings.HasPrefix(b.String(), string(old)) {
			t.Fatal("raise provider.HashVersion first: fleets were made with the hashes of this one")
		}
		if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != b.String() {
		t.Errorf("the hashes have changed, which would replace every fleet: raise provider.HashVersion and run this test with -update\ngot\n%s", b.String())
	}
}

func TestNilAndEmptyHashAlike(t *testing.T) {
	a := provider.Spec{}
	b := provider.Spec{
		Options: map[string]string{}, Placement: provider.Placement{Labels: map[string]string{}},
		CloudInit: provider.CloudInit{UserData: []byte{}, VendorData: []byte{}},
	}
	if a.Hash(nil) != b.Hash(nil) || a.Hash([]byte{}) != a.Hash(nil) {
		t.Error("nil and empty differ")
	}
	c, d := provider.Network{}, provider.Network{Addresses: []netip.Prefix{}, SearchDomains: []string{}}
	if (provider.Spec{CloudInit: provider.CloudInit{Network: &c}}).Hash(nil) != (provider.Spec{CloudInit: provider.CloudInit{Network: &d}}).Hash(nil) {
		t.Error("nil and empty networks differ")
	}
}

func FuzzTheHashTellsFieldsApart(f *testing.F) {
	f.Add("a", "b", "c", "d")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		x := provider.Spec{Image: a, Options: map[string]string{b: c}, CloudInit: provider.CloudInit{UserData: []byte(d)}}
		y := provider.Spec{Image: a + b, Options: map[string]string{c: d}}
		if first, again := x.Hash(nil), x.Hash(nil); first != again {
			t.Error("not the same twice")
		}
		if x.Hash(nil) == y.Hash(nil) && !reflect.DeepEqual(x, y) && (b != "" || d != "" || len(x.Options) != len(y.Options)) {
			if x.Image == y.Image && x.Options[b] == y.Options[b] && string(x.CloudInit.UserData) == string(y.CloudInit.UserData) {
				return
			}
			t.Errorf("%+v and %+v have one hash", x, y)
		}
	})
}

func TestADocumentIsNeverPrinted(t *testing.T) {
	spec := provider.Spec{Image: "x", CloudInit: provider.CloudInit{UserData: []byte("planted"), VendorData: []byte("planted")}}
	req := provider.CreateRequest{Name: "n", Spec: spec}
	for _, v := range []any{spec, &spec, req, &req, spec.CloudInit, &spec.CloudInit, []provider.Spec{spec}, map[string]any{"a": spec}} {
		asJSON, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var logged bytes.Buffer
		slog.New(slog.NewJSONHandler(&logged, nil)).Info("x", "v", v)
		if text := string(asJSON) + logged.String(); strings.Contains(text, "planted") || strings.Contains(text, "cGxhbnRlZA") {
			t.Errorf("JSON of %T shows a document: %s", v, text)
		}
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%d", "%x", "%q"} {
			text := fmt.Sprintf(verb, v)
			if strings.Contains(text, "planted") || strings.Contains(text, "112, 108, 97") || strings.Contains(text, "112 108 97") ||
				strings.Contains(text, "0x70, 0x6c") || strings.Contains(text, "706c616e746564") {
				t.Errorf("%s of %T shows a document: %s", verb, v, text)
			}
		}
	}
}

func TestMarksSurviveAnyText(t *testing.T) {
	m := provider.Mark{Owner: "crawl", Proxy: "crawl-01", Generation: 3, HashVersion: 1, Hash: "abc"}
	for _, text := range []string{m.String(), "note\n" + m.String() + "\nnote", "  " + m.String() + "\r\n"} {
		if got, ok := provider.ParseMark(text); !ok || got != m {
			t.Errorf("%q gives %v, %t", text, got, ok)
		}
	}
	for _, text := range []string{
		"", "egress/1", m.String() + "\n" + m.String(), strings.Replace(m.String(), "generation=3", "generation=0", 1),
		strings.Replace(m.String(), "generation=3", "generation=x", 1), strings.Replace(m.String(), "hash=1:", "hash=", 1),
		strings.Replace(m.String(), "owner=crawl", "owner=", 1), m.String() + " more=x", "egress/2" + m.String()[8:], "x" + m.String(),
		strings.Replace(m.String(), "hash=1:abc", "hash=1:", 1), strings.Replace(m.String(), "hash=1:abc", "hash=x:abc", 1),
	} {
		if got, ok := provider.ParseMark(text); ok {
			t.Errorf("%q gives %v", text, got)
		}
	}
}

func FuzzParseMark(f *testing.F) {
	f.Add("egress/1 owner=a proxy=b generation=1 hash=1:x")
	f.Fuzz(func(t *testing.T, s string) {
		m, ok := provider.ParseMark(s)
		if !ok {
			return
		}
		if again, ok := provider.ParseMark(m.String()); !ok || again != m {
			t.Errorf("%q gives %v, which gives %v", s, m, again)
		}
	})
}

func TestInstanceNamesAreDNSLabelsAndTellProxiesApart(t *testing.T) {
	if a, b := provider.InstanceName("a-b", "c", 1), provider.InstanceName("a", "b-c", 1); a == b {
		t.Errorf("two proxies share the name %s", a)
	}
	long := provider.InstanceName("o"+strings.Repeat("x", 19), "p"+strings.Repeat("y", 29), 999_999_999)
	if len(long) > 63 {
		t.Errorf("%s has %d characters", long, len(long))
	}
	for _, name := range []string{"a", "crawl-01", "a1", strings.Repeat("a", provider.MaxNames)} {
		if err := provider.CheckName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"", "1a", "-a", "a-", "a--b", "A", "a_b", "a.b", "ä", "a b", strings.Repeat("a", provider.MaxNames+1)} {
		if err := provider.CheckName(name); err == nil {
			t.Errorf("%q is accepted", name)
		}
	}
}

func TestErrorsMatchTheirKindAndTheirCause(t *testing.T) {
	cause := errors.New("disk is full")
	err := fmt.Errorf("wrapped: %w", &provider.Error{
		Provider: "home", Op: "create", Instance: "i", Target: "h", Kind: provider.ErrNoCapacity,
		Reason: provider.ReasonInsufficientCapacity, RetryAfter: time.Second, Err: cause,
	})
	if !errors.Is(err, provider.ErrNoCapacity) || !errors.Is(err, cause) || errors.Is(err, provider.ErrDenied) {
		t.Errorf("%v matches the wrong things", err)
	}
	if got := err.Error(); got != "wrapped: provider home: create i on h: no capacity: disk is full" {
		t.Errorf("got %q", got)
	}
	if !errors.Is(provider.Kind(err), provider.ErrNoCapacity) || provider.ReasonOf(err) != provider.ReasonInsufficientCapacity {
		t.Errorf("kind %v, reason %v", provider.Kind(err), provider.ReasonOf(err))
	}
	if provider.Kind(cause) != nil || provider.Kind(nil) != nil || provider.ReasonOf(cause) != provider.ReasonUnknown {
		t.Error("an error of somebody else has a kind")
	}
	same := &provider.Error{Provider: "p", Op: "get", Kind: provider.ErrNotFound, Err: provider.ErrNotFound}
	if got := same.Error(); got != "provider p: get: not found" {
		t.Errorf("got %q", got)
	}
	partial := &provider.PartialError{Targets: []provider.TargetError{{Target: "a", Err: cause}, {Target: "b", Err: context.DeadlineExceeded}}}
	if !errors.Is(partial, provider.ErrUnavailable) || !errors.Is(partial, cause) || !partial.Missing("b") || partial.Missing("c") {
		t.Errorf("got %v", partial)
	}
	if got := partial.Error(); got != "provider: partial list: a: disk is full; b: context deadline exceeded" {
		t.Errorf("got %q", got)
	}
}

// backend is a provider with an optional interface and something to close.
type backend struct{ provider.Provider }

func (backend) Name() string                                  { return "backend" }
func (backend) Check(context.Context) []provider.TargetHealth { return nil }
func (backend) Close() error                                  { return nil }

func TestOptionalInterfacesAreSeenThroughSharedButNotItsClose(t *testing.T) {
	var b provider.Provider = backend{}
	shared := provider.Shared(provider.Shared(b))
	if _, ok := provider.As[provider.Checker](shared); !ok {
		t.Error("the checker is hidden")
	}
	if _, ok := provider.As[provider.Warner](shared); ok {
		t.Error("a warner out of nothing")
	}
	if provider.Closer(shared) != nil || provider.Closer(b) == nil {
		t.Error("shared is closed, or the other one is not")
	}
	if shared.Name() != "backend" {
		t.Error("the name is lost")
	}
}

func TestAProviderHasFewMethods(t *testing.T) {
	if n := reflect.TypeFor[provider.Provider]().NumMethod(); n > 6 {
		t.Errorf("%d methods: what is not needed by every backend belongs into an optional interface", n)
	}
}
