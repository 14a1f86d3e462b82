package sshconn

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// hostKeys decides whether a host is who it should be.
type hostKeys struct {
	address string // host:port
	// insecure accepts every key.
	insecure bool
	// pinned, when there are any pins, are all that counts.
	pins         []string        // as configured
	pinned       []ssh.PublicKey // whole keys
	fingerprints []string        // SHA256:… only
	// files, check, known and authorities come from known_hosts.
	files       []string
	check       ssh.HostKeyCallback
	known       []knownhosts.KnownKey
	authorities []knownhosts.KnownKey
}

// newHostKeys reads what is known about h.
func newHostKeys(h Host, address string) (*hostKeys, error) {
	k := &hostKeys{address: address, insecure: h.InsecureIgnoreHostKey, pins: h.PinnedKeys}
	if k.insecure {
		return k, nil
	}
	for i, pin := range h.PinnedKeys {
		if err := k.pin(strings.TrimSpace(pin)); err != nil {
			return nil, fmt.Errorf("sshconn: %s: PinnedKeys[%d]: %w", address, i, err)
		}
	}
	if len(h.PinnedKeys) > 0 {
		return k, nil
	}
	k.files = h.KnownHosts
	if len(k.files) == 0 {
		k.files = defaultKnownHosts()
	}
	check, err := knownhosts.New(k.files...)
	if err != nil {
		return nil, &CredentialsError{Address: address, Err: fmt.Errorf("known hosts: %w", err)}
	}
	k.check = check
	return k, k.lookUp()
}

// defaultKnownHosts returns those of OpenSSH's usual files that exist.
func defaultKnownHosts() []string {
	files := []string{"/etc/ssh/ssh_known_hosts"}
	if home, err := os.UserHomeDir(); err == nil {
		files = append(files, filepath.Join(home, ".ssh", "known_hosts"))
	}
	return slices.DeleteFunc(files, func(file string) bool {
		_, err := os.Stat(file)
		return errors.Is(err, fs.ErrNotExist)
	})
}

func (k *hostKeys) pin(pin string) error {
	if hash, ok := strings.CutPrefix(pin, "SHA256:"); ok {
		if len(hash) != 43 { // 32 bytes in base64 without padding
			return fmt.Errorf("%q: want SHA256: and 43 characters, as ssh-keygen -l prints", pin)
		}
		k.fingerprints = append(k.fingerprints, pin)
		return nil
	}
	key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(pin))
	if err != nil || len(options) > 0 {
		return fmt.Errorf("%.40q: want a public key such as \"ssh-ed25519 AAAA…\", or its fingerprint SHA256:…", pin)
	}
	k.pinned = append(k.pinned, key)
	return nil
}

// lookUp finds the known keys of the host by asking for one that can't be known, and sorts out those that belong to
// certificate authorities, which the library doesn't tell apart.
func (k *hostKeys) lookUp() error {
	var found *knownhosts.KeyError
	if err := k.check(k.address, noAddr, noKey{}); !errors.As(err, &found) {
		return fmt.Errorf("sshconn: %s: known hosts: %w", k.address, err)
	}
	contents := map[string][][]byte{}
	for _, known := range found.Want {
		if contents[known.Filename] == nil {
			content, err := os.ReadFile(known.Filename)
			if err != nil {
				return &CredentialsError{Address: k.address, Err: fmt.Errorf("known hosts: %w", err)}
			}
			contents[known.Filename] = bytes.Split(content, []byte("\n"))
		}
		lines := contents[known.Filename]
		if known.Line > len(lines) {
			return &CredentialsError{Address: k.address, Err: fmt.Errorf("known hosts: %s changed while it was read", known.Filename)}
		}
		if bytes.HasPrefix(bytes.TrimSpace(lines[known.Line-1]), []byte("@cert-authority")) {
			k.authorities = append(k.authorities, known)
		} else {
			k.known = append(k.known, known)
		}
	}
	return nil
}

// noAddr stands for the peer's IP address, which is not looked up: the name decides.
var noAddr = &net.TCPAddr{}

// noKey is a key that no file holds.
type noKey struct{}

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("sshconn: not a key") }

// algorithms returns what to offer for the host's key, those of known keys first: a server shows only one of its keys,
// by the order in which we ask. What is not known comes last, so that a changed key is seen and named instead of ending
// in "no common algorithm". Types in without are left out.
func (k *hostKeys) algorithms(without []string) []string {
	types := map[string]bool{}
	for _, key := range k.pinned {
		types[key.Type()] = true
	}
	for _, known := range k.known {
		types[known.Key.Type()] = true
	}
	rank := func(algorithm string) int {
		isCert := strings.Contains(algorithm, "-cert-")
		switch {
		case isCert && len(k.authorities) > 0:
			return 0
		case types[keyType(algorithm)] && !isCert:
			return 1
		case !isCert:
			return 2
		default:
			return 3
		}
	}
	all := slices.DeleteFunc(ssh.SupportedAlgorithms().HostKeys, func(algorithm string) bool {
		return slices.Contains(without, keyType(algorithm))
	})
	slices.SortStableFunc(all, func(a, b string) int { return cmp.Or(rank(a)-rank(b), taste(a)-taste(b)) })
	return all
}

// taste orders what nothing is known about as OpenSSH does, so that both show the same key of a new host.
func taste(algorithm string) int {
	switch keyType(algorithm) {
	case ssh.KeyAlgoED25519:
		return 0
	case ssh.KeyAlgoRSA:
		return 2
	default:
		return 1
	}
}

// keyType returns the type of key that signs with algorithm, leaving certificates aside.
func keyType(algorithm string) string {
	if before, _, ok := strings.Cut(algorithm, "-cert-"); ok {
		algorithm = before
	}
	if algorithm == ssh.KeyAlgoRSASHA256 || algorithm == ssh.KeyAlgoRSASHA512 {
		return ssh.KeyAlgoRSA
	}
	return algorithm
}

// verify returns nil or a *HostKeyError.
func (k *hostKeys) verify(key ssh.PublicKey) error {
	if k.insecure {
		return nil
	}
	plain, isCert := key, false
	if cert, ok := key.(*ssh.Certificate); ok {
		plain, isCert = cert.Key, true
	}
	if len(k.pins) > 0 {
		if slices.Contains(k.fingerprints, ssh.FingerprintSHA256(plain)) ||
			slices.ContainsFunc(k.pinned, func(pinned ssh.PublicKey) bool { return sameKey(pinned, plain) }) {
			return nil
		}
		return k.refuse(plain, ErrChangedHostKey, "PinnedKeys holds none like it. "+
			"If the host was installed anew, compare this fingerprint on the host's own console and pin it; if not, somebody stands between")
	}
	err := k.check(k.address, noAddr, plain)
	if _, ok := errors.AsType[*knownhosts.RevokedError](err); ok {
		return k.refuse(plain, ErrRevokedHostKey, "a @revoked line forbids it. Give the host a new key, and make that one known")
	}
	// The library also takes an authority's key as a host's own, which OpenSSH does not.
	if err == nil && slices.ContainsFunc(k.known, func(known knownhosts.KnownKey) bool { return sameKey(known.Key, plain) }) {
		return nil
	}
	if isCert {
		err := k.check(k.address, noAddr, key)
		if err == nil {
			return nil
		}
		if len(k.authorities) > 0 {
			return k.refuse(plain, ErrHostCertificate, fmt.Sprintf("%v. Sign it anew, for the name by which it is dialled, by %s", err, places(k.authorities)))
		}
	}
	if len(k.known) > 0 {
		return k.refuse(plain, ErrChangedHostKey, fmt.Sprintf("known are %s. If the host was installed anew, compare this fingerprint on the host's own console "+
			"and put the new key in the place of those (ssh-keygen -R '%s' removes them); if not, somebody stands between", places(k.known), knownhosts.Normalize(k.address)))
	}
	if len(k.authorities) > 0 {
		return k.refuse(plain, ErrUnknownHostKey, "it should have shown a certificate by "+places(k.authorities)+" (sshd's HostCertificate)")
	}
	file := "a file named in KnownHosts"
	if len(k.files) > 0 {
		file = k.files[len(k.files)-1]
	}
	return k.refuse(plain, ErrUnknownHostKey, fmt.Sprintf("compare this fingerprint on the host's own console and then add to %s the line %q", file,
		knownhosts.Line([]string{k.address}, plain)))
}

func (k *hostKeys) refuse(key ssh.PublicKey, kind error, advice string) error {
	return &HostKeyError{Address: k.address, Kind: kind, KeyType: key.Type(), Fingerprint: ssh.FingerprintSHA256(key), Advice: advice}
}

// places names known keys by where they stand.
func places(keys []knownhosts.KnownKey) string {
	var all []string
	for _, k := range keys {
		all = append(all, fmt.Sprintf("%s %s (%s:%d)", k.Key.Type(), ssh.FingerprintSHA256(k.Key), k.Filename, k.Line))
	}
	return strings.Join(all, ", ")
}

func sameKey(a, b ssh.PublicKey) bool { return bytes.Equal(a.Marshal(), b.Marshal()) }
