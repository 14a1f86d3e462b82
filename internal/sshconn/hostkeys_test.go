package sshconn_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
)

var (
	ed25519Key = sshtest.NewKey("ed25519")
	ecdsaKey   = sshtest.NewKey("ecdsa")
	rsaKey     = sshtest.NewKey("rsa")
	otherKey   = sshtest.NewKey("ed25519")
	authority  = sshtest.NewKey("ecdsa")
)

// line returns a line of a known_hosts file.
func line(names string, key ssh.Signer) string { return names + " " + authorized(key) }

func hashed(name string, key ssh.Signer) string {
	return line(knownhosts.HashHostname(name), key)
}

func forever(key, by ssh.Signer, names ...string) ssh.Signer {
	return sshtest.NewCertificate(key, by, 0, ssh.CertTimeInfinity, names...)
}

func TestAHostIsKnownByItsKeyOrRefused(t *testing.T) {
	all := []ssh.Signer{ed25519Key, ecdsaKey, rsaKey}
	fingerprint := func(key ssh.Signer) string { return ssh.FingerprintSHA256(key.PublicKey()) }
	for name, test := range map[string]struct {
		address  string // host:22 when empty
		server   []ssh.Signer
		lines    []string
		pins     []string
		insecure bool
		want     error
		says     string // a part of the error
	}{
		"the only key":                              {server: all[:1], lines: []string{line("host", ed25519Key)}},
		"ed25519 of three keys":                     {server: all, lines: []string{line("host", ed25519Key)}},
		"ecdsa of three keys":                       {server: all, lines: []string{line("host", ecdsaKey)}},
		"rsa of three keys":                         {server: all, lines: []string{line("host", rsaKey)}},
		"one of several known keys":                 {server: all[2:], lines: []string{line("host", otherKey), line("host", rsaKey)}},
		"a hashed name":                             {server: all, lines: []string{hashed("other", otherKey), hashed("host", rsaKey)}},
		"a pattern":                                 {server: all, lines: []string{line("*.example,h?st", rsaKey)}},
		"a name in capitals":                        {address: "HOST", server: all, lines: []string{line("host", rsaKey)}},
		"another port in brackets":                  {address: "host:2222", server: all, lines: []string{line("[host]:2222", rsaKey)}},
		"a hashed name with a port":                 {address: "host:2222", server: all, lines: []string{hashed("[host]:2222", rsaKey)}},
		"an IPv6 address":                           {address: "[2001:db8::1]:22", server: all, lines: []string{line("2001:db8::1", rsaKey)}},
		"another port without brackets":             {address: "host:2222", server: all, lines: []string{line("host", rsaKey)}, want: sshconn.ErrUnknownHostKey, says: "[host]:2222 ssh-ed25519"},
		"an empty file":                             {server: all[:1], lines: []string{}, want: sshconn.ErrUnknownHostKey, says: fingerprint(ed25519Key)},
		"other hosts only":                          {server: all[:1], lines: []string{line("other", ed25519Key)}, want: sshconn.ErrUnknownHostKey, says: "console"},
		"a name that is excluded":                   {server: all[:1], lines: []string{line("h*,!host", ed25519Key)}, want: sshconn.ErrUnknownHostKey},
		"another key of the same type":              {server: all[:1], lines: []string{line("host", otherKey)}, want: sshconn.ErrChangedHostKey, says: fingerprint(otherKey)},
		"only a key of a type that was not known":   {server: all[2:], lines: []string{line("host", ed25519Key)}, want: sshconn.ErrChangedHostKey, says: "ssh-keygen -R 'host'"},
		"a revoked key":                             {server: all[:1], lines: []string{line("host", ed25519Key), line("@revoked *", ed25519Key)}, want: sshconn.ErrRevokedHostKey, says: "@revoked"},
		"a key beside a revoked one":                {server: all[1:2], lines: []string{line("host", ecdsaKey), line("@revoked *", ed25519Key)}},
		"a certificate":                             {server: []ssh.Signer{forever(ed25519Key, authority, "host")}, lines: []string{line("@cert-authority host", authority)}},
		"an rsa certificate":                        {server: []ssh.Signer{forever(rsaKey, authority, "host")}, lines: []string{line("@cert-authority *", authority)}},
		"a certificate beside bare keys":            {server: append([]ssh.Signer{forever(ed25519Key, authority, "host")}, all...), lines: []string{line("@cert-authority host", authority), line("host", otherKey)}},
		"a certificate on another port":             {address: "host:2222", server: []ssh.Signer{forever(ed25519Key, authority, "host")}, lines: []string{line("@cert-authority [host]:2222", authority)}},
		"a bare key that is known beside a CA":      {server: all, lines: []string{line("@cert-authority host", authority), line("host", rsaKey)}},
		"a certificate for another name":            {server: []ssh.Signer{forever(ed25519Key, authority, "other")}, lines: []string{line("@cert-authority host", authority)}, want: sshconn.ErrHostCertificate, says: "host"},
		"an expired certificate":                    {server: []ssh.Signer{sshtest.NewCertificate(ed25519Key, authority, 0, 1, "host")}, lines: []string{line("@cert-authority host", authority)}, want: sshconn.ErrHostCertificate, says: "expired"},
		"a certificate by somebody else":            {server: []ssh.Signer{forever(ed25519Key, otherKey, "host")}, lines: []string{line("@cert-authority host", authority)}, want: sshconn.ErrHostCertificate},
		"a bad certificate on a known key":          {server: []ssh.Signer{forever(ed25519Key, otherKey, "host")}, lines: []string{line("@cert-authority host", authority), line("host", ed25519Key)}},
		"a certificate whose authority is revoked":  {server: []ssh.Signer{forever(ed25519Key, authority, "host")}, lines: []string{line("@cert-authority host", authority), line("@revoked *", authority)}, want: sshconn.ErrHostCertificate},
		"a certificate on a revoked key":            {server: []ssh.Signer{forever(ed25519Key, authority, "host")}, lines: []string{line("@cert-authority host", authority), line("@revoked *", ed25519Key)}, want: sshconn.ErrRevokedHostKey},
		"a certificate and no authority":            {server: []ssh.Signer{forever(ed25519Key, authority, "host")}, lines: []string{}, want: sshconn.ErrUnknownHostKey},
		"a bare key where a certificate should be":  {server: all[:1], lines: []string{line("@cert-authority host", authority)}, want: sshconn.ErrUnknownHostKey, says: "HostCertificate"},
		"the authority's key as the host's own":     {server: []ssh.Signer{authority}, lines: []string{line("@cert-authority host", authority)}, want: sshconn.ErrUnknownHostKey},
		"a pinned key":                              {server: all, pins: []string{authorized(rsaKey) + " of the host\n"}},
		"a pinned ed25519 fingerprint":              {server: all, pins: []string{fingerprint(ed25519Key)}},
		"a pinned ecdsa fingerprint":                {server: all, pins: []string{fingerprint(ecdsaKey)}},
		"a pinned rsa fingerprint":                  {server: all, pins: []string{fingerprint(otherKey), fingerprint(rsaKey)}},
		"a pinned fingerprint of nobody":            {server: all, pins: []string{fingerprint(otherKey)}, want: sshconn.ErrChangedHostKey, says: "PinnedKeys"},
		"a pinned fingerprint of nobody, one key":   {server: all[:1], pins: []string{fingerprint(otherKey)}, want: sshconn.ErrChangedHostKey, says: fingerprint(ed25519Key)},
		"another key than the pinned":               {server: all, pins: []string{authorized(otherKey)}, want: sshconn.ErrChangedHostKey},
		"a pinned key under a certificate":          {server: []ssh.Signer{forever(ed25519Key, otherKey, "x")}, pins: []string{authorized(ed25519Key)}},
		"a pin, and known hosts that know the host": {server: all, pins: []string{authorized(otherKey)}, lines: []string{line("host", ed25519Key)}, want: sshconn.ErrChangedHostKey},
		"any key, when told so":                     {server: all, insecure: true, lines: []string{line("host", otherKey)}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "known_hosts")
			if err := os.WriteFile(file, []byte("# known\n\n"+strings.Join(test.lines, "\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				s := newServer()
				defer s.Close()
				s.HostKeys = test.server
				config := configFor(s)
				if test.address != "" {
					config.Host.Address = "root@" + test.address
				}
				config.Host.PinnedKeys, config.Host.KnownHosts, config.Host.InsecureIgnoreHostKey = test.pins, []string{file}, test.insecure
				c, err := sshconn.Dial(t.Context(), config)
				if err == nil {
					c.Close()
				}
				if !errors.Is(err, test.want) {
					t.Fatalf("got %v, want %v", err, test.want)
				}
				if test.want == nil {
					return
				}
				if _, ok := errors.AsType[*sshconn.HostKeyError](err); !ok || sshconn.Reason(err) != "CertificateInvalid" {
					t.Errorf("%T with reason %s, want a *HostKeyError", err, sshconn.Reason(err))
				}
				if !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), "host") {
					t.Errorf("%v\ndoes not say %q", err, test.says)
				}
			})
		})
	}
}

func TestEveryFileOfKnownHostsCountsAndAMissingOneIsNamed(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	os.WriteFile(one, []byte(line("host", otherKey)+"\n"), 0o600)
	os.WriteFile(two, []byte(line("host", hostKey)+"\n"), 0o600)
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		defer s.Close()
		config := configFor(s)
		config.Host.PinnedKeys, config.Host.KnownHosts = nil, []string{one, two}
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		config.Host.KnownHosts = []string{one, filepath.Join(dir, "three")}
		_, err = sshconn.Dial(t.Context(), config)
		if _, ok := errors.AsType[*sshconn.CredentialsError](err); !ok || !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "three") {
			t.Errorf("got %v, want the missing file's name", err)
		}
		if s.Dials() != 1 {
			t.Errorf("dialled %d times, want no dial without known hosts", s.Dials())
		}
	})
}

func TestTheUsualFilesAreReadWhenNoneIsNamed(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		defer s.Close()
		config := configFor(s)
		config.Host.PinnedKeys = nil
		if _, err := sshconn.Dial(t.Context(), config); !errors.Is(err, sshconn.ErrUnknownHostKey) {
			t.Errorf("without a file: %v, want an unknown key", err)
		}
		os.Mkdir(filepath.Join(home, ".ssh"), 0o700)
		os.WriteFile(filepath.Join(home, ".ssh", "known_hosts"), []byte(line("host", hostKey)+"\n"), 0o600)
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
}

func TestTheLineThatTheErrorAdvisesMakesTheHostKnown(t *testing.T) {
	file := filepath.Join(t.TempDir(), "known_hosts")
	os.WriteFile(file, nil, 0o600)
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		defer s.Close()
		config := configFor(s)
		config.Host.Address = "root@host:2222"
		config.Host.PinnedKeys, config.Host.KnownHosts = nil, []string{file}
		_, err := sshconn.Dial(t.Context(), config)
		var advised string
		if _, rest, ok := strings.Cut(fmt.Sprint(err), "the line \""); ok {
			advised, _, _ = strings.Cut(rest, "\"")
		}
		os.WriteFile(file, []byte(advised+"\n"), 0o600)
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatalf("after adding %q: %v", advised, err)
		}
		c.Close()
	})
}

func TestATimeOfAHostCertificateIsHeeded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "known_hosts")
	os.WriteFile(file, []byte(line("@cert-authority *", authority)+"\n"), 0o600)
	synctest.Test(t, func(t *testing.T) {
		now := uint64(time.Now().Unix())
		s := newServer()
		defer s.Close()
		s.HostKeys = []ssh.Signer{sshtest.NewCertificate(ed25519Key, authority, now, now+3600, "host")}
		config := configFor(s)
		config.Host.PinnedKeys, config.Host.KnownHosts = nil, []string{file}
		c, err := sshconn.Dial(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		time.Sleep(2 * time.Hour)
		if _, err := sshconn.Dial(t.Context(), config); !errors.Is(err, sshconn.ErrHostCertificate) {
			t.Errorf("two hours later: %v, want an expired certificate", err)
		}
	})
}
