package sshconn_test

import (
	"strings"
	"testing"

	"crawl.example.com/egress/internal/sshconn"
)

func TestAddressesAreReadInEveryUsualForm(t *testing.T) {
	for text, want := range map[string]string{
		"host":                          "host:22",
		"root@host":                     "root@host:22",
		"root@Host.Example:2222":        "root@host.example:2222",
		"ssh://root@host":               "root@host:22",
		"SSH://root@host:2222/":         "root@host:2222",
		"ssh://first%2Elast@host":       "first.last@host:22",
		"user@realm@host":               "user@realm@host:22",
		"192.0.2.1:22":                  "192.0.2.1:22",
		"2001:DB8::1":                   "[2001:db8::1]:22",
		"root@[2001:db8:0:0::1]:2222":   "root@[2001:db8::1]:2222",
		"ssh://root@[fe80::1%eth0]:222": "root@[fe80::1%eth0]:222",
		"ssh://root@[fe80::1%25eth0]":   "root@[fe80::1%eth0]:22",
		"fe80::1%Eth0":                  "[fe80::1%Eth0]:22",
	} {
		a, err := sshconn.ParseAddress(text)
		if err != nil || a.String() != want {
			t.Errorf("%q: got %v and %v, want %s", text, a, err, want)
		}
	}
}

func TestAddressesThatCannotBeMeantAreRefused(t *testing.T) {
	for _, text := range []string{
		"", "@host", "root@", ":22", "host:", "host:0", "host:65536", "host:ssh", "host:+22", "host:-1", "[::1", "[::1]22", "[host]:22", "::1:22:x",
		"http://host", "ssh://host/path", "ssh://host?x=y", "-oProxyCommand=x", "-x@host", "root@-x", "ho st", "host\n", "a b@host", "host#x", "ssh://%zz@host",
		"host/", "hö.example", "ssh://", "::%]", "::1%", strings.Repeat("a", 254),
	} {
		if a, err := sshconn.ParseAddress(text); err == nil {
			t.Errorf("%q was read as %v", text, a)
		} else if !strings.HasPrefix(err.Error(), "sshconn: address") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestAPasswordInAnAddressIsRefusedAndNotRepeated(t *testing.T) {
	for _, text := range []string{"root:hunter2@host", "ssh://root:hunter2@host:22", "root:hunter2@", "http://root:hunter2@host", "root:hunter2@host:x"} {
		if _, err := sshconn.ParseAddress(text); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("got %v, want a refusal without the password", err)
		}
	}
}

func TestSettingsAreCheckedBeforeAnythingIsDone(t *testing.T) {
	good := sshconn.Host{Address: "root@host"}
	for says, config := range map[string]sshconn.Config{
		"names no user":                       {Host: sshconn.Host{Address: "host"}},
		"sshconn: address":                    {},
		"Jumps[1]: sshconn: address":          {Host: good, Jumps: []sshconn.Host{good, {}}},
		"PinnedKeys[1]: \"SHA256:short\"":     {Host: sshconn.Host{Address: "root@host", PinnedKeys: []string{authorized(hostKey), "SHA256:short"}}},
		"PinnedKeys[0]: \"ssh-ed25519 junk\"": {Host: sshconn.Host{Address: "root@host", PinnedKeys: []string{"ssh-ed25519 junk"}}},
		"PinnedKeys[0]: \"cert-authority ":    {Host: sshconn.Host{Address: "root@host", PinnedKeys: []string{"cert-authority " + authorized(hostKey)}}},
	} {
		if err := config.Validate(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want it to say %s", err, says)
		}
		if _, err := sshconn.Dial(t.Context(), config); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("Dial: got %v, want it to say %s", err, says)
		}
	}
	if err := (sshconn.Config{Host: sshconn.Host{Address: "host", User: "root"}}).Validate(); err != nil {
		t.Error(err)
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, text := range []string{"host", "root@host:22", "ssh://u%40v@[::1]:22/", "[fe80::1%25eth0]", "a:b@c", "@", "[", "::ffff:1.2.3.4"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := sshconn.ParseAddress(text)
		if err != nil {
			return
		}
		if a.Port < 1 || a.Port > 65535 || a.Host == "" || a.Host[0] == '-' || a.Host != strings.ToLower(a.Host) && !strings.Contains(a.Host, "%") {
			t.Errorf("%q was read as %#v", text, a)
		}
		again, err := sshconn.ParseAddress(a.String())
		if err != nil || again != a {
			t.Errorf("%q was read as %#v, and that as %#v and %v", text, a, again, err)
		}
	})
}
