package egress

import (
	"bytes"
	"context"
	"crypto/pbkdf2"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/internal/upstream"
	"crawl.example.com/egress/provider"
)

// secret is the newest reading of one reference.
type secret struct {
	value []byte
	err   error  // set when it has never been read
	key   []byte // derived from value; see hashKey
}

// secretReaders is how many secrets are read at once.
const secretReaders = 8

// refs returns the references of d.
func (d *declaration) refs() []string {
	var all []string
	for _, ref := range []string{d.CloudInit.Secret, d.CloudInit.VendorSecret, d.Auth.Secret} {
		if ref != "" {
			all = append(all, ref)
		}
	}
	return all
}

// readSecrets reads everything that declarations refer to. What can't be read keeps its last value.
func (p *Pool) readSecrets(ctx context.Context, declarations []declaration) map[string]secret {
	p.mu.Lock()
	old := p.secrets
	p.mu.Unlock()
	values := map[string]secret{}
	for i := range declarations {
		if declarations[i].faulty {
			continue
		}
		for _, ref := range declarations[i].refs() {
			values[ref] = secret{}
		}
	}
	var mu sync.Mutex // guards values
	var readers sync.WaitGroup
	places := make(chan struct{}, secretReaders)
	refs := make([]string, 0, len(values))
	for ref := range values {
		refs = append(refs, ref)
	}
	for _, ref := range refs {
		places <- struct{}{}
		readers.Go(func() {
			defer func() { <-places }()
			s := p.readSecret(ctx, ref, old[ref])
			mu.Lock()
			defer mu.Unlock()
			values[ref] = s
		})
	}
	readers.Wait()
	return values
}

func (p *Pool) readSecret(ctx context.Context, ref string, old secret) secret {
	value, err := p.askSecret(ctx, ref)
	if err == nil && len(value) == 0 {
		err = fmt.Errorf("egress: secret %q is empty", ref)
	}
	if err != nil {
		if old.value != nil {
			p.logger.Warn("secret can't be read again; its last value stays", "secret", ref, "error", err)
			return old
		}
		return secret{err: err}
	}
	if bytes.Equal(value, old.value) {
		return old
	}
	return secret{value: bytes.Clone(value), key: p.hashKey(value)}
}

func (p *Pool) askSecret(ctx context.Context, ref string) (value []byte, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("egress: secret %q: the source panicked", ref)
		}
	}()
	return p.config.Secrets.Secret(ctx, ref)
}

// keyRounds makes each guess at a secret document cost tens of milliseconds instead of microseconds, at the price
// of as much for each secret that changes.
const keyRounds = 100_000

// hashKey returns the key for hashes of specs that hold value.
func (p *Pool) hashKey(value []byte) []byte {
	if len(p.config.HashKey) > 0 {
		return p.config.HashKey
	}
	key, err := pbkdf2.Key(sha256.New, string(value), []byte("egress hash key of "+p.config.Name), keyRounds, sha256.Size)
	if err != nil {
		panic("egress: bug: pbkdf2 refused its parameters: " + err.Error())
	}
	return key
}

// madeSpec is a spec, or why there is none.
type madeSpec struct {
	hash     string
	err      error
	refused  bool         // the provider refuses it, which only a new declaration or a new secret can change
	auth     *Credentials // nil while they can't be read
	warnings []string
}

// spec puts together what the provider gets. key is the hash's.
func (d *declaration) spec(values map[string]secret) (spec provider.Spec, key []byte, err error) {
	spec = provider.Spec{
		Provider: d.Provider, Image: d.Image, CPUs: d.CPUs, MemoryMiB: d.MemoryMiB, DiskGiB: d.DiskGiB,
		Placement: d.Placement, Port: d.Port, Options: d.Options,
	}
	ci := &d.CloudInit
	spec.CloudInit.InstallGuestAgent = ci.InstallGuestAgent == nil || *ci.InstallGuestAgent
	spec.CloudInit.Network = ci.Network
	document := func(inline, ref string) []byte {
		if ref == "" {
			if inline == "" {
				return nil
			}
			return []byte(inline)
		}
		s := values[ref]
		if s.value == nil && err == nil {
			err = s.err
			if err == nil {
				err = fmt.Errorf("%w: %q", ErrSecretNotFound, ref)
			}
		}
		key = append(key[:len(key):len(key)], s.key...)
		return s.value
	}
	spec.CloudInit.UserData = document(ci.Inline, ci.Secret)
	spec.CloudInit.VendorData = document(ci.Vendor, ci.VendorSecret)
	return spec, key, err
}

// makeSpec makes d's hash and asks its provider whether it would do.
func (p *Pool) makeSpec(d *declaration, values map[string]secret) madeSpec {
	var made madeSpec
	auth, err := credentials(d, values)
	if err == nil {
		made.auth = &auth
	}
	made.err = err
	if d.Mode == External {
		return made
	}
	spec, key, err := d.spec(values)
	if err != nil {
		made.err = err
		return made
	}
	s := p.sources[d.provider]
	if err := p.validate(s, spec); err != nil {
		made.err, made.refused = err, true
		return made
	}
	if s.warner != nil {
		made.warnings = s.warner.Warnings(spec)
	}
	made.hash = spec.Hash(key)
	return made
}

func (p *Pool) validate(s *source, spec provider.Spec) (err error) {
	defer p.recovered(s, "validate", &err)
	return s.provider.Validate(spec)
}

// credentials resolves d.Auth.
func credentials(d *declaration, values map[string]secret) (Credentials, error) {
	if d.Auth.Secret == "" {
		return d.Auth, nil
	}
	s := values[d.Auth.Secret]
	if s.value == nil {
		return Credentials{}, s.err
	}
	username, password, ok := strings.Cut(strings.TrimRight(string(s.value), "\r\n"), ":")
	if !ok {
		return Credentials{}, fmt.Errorf("egress: secret %q: want username:password in one line", d.Auth.Secret)
	}
	return Credentials{Username: username, Password: password}, nil
}

// setSpecLocked takes a new spec over.
func (p *Pool) setSpecLocked(m *member, made madeSpec) {
	name := m.decl.Name
	if made.auth != nil {
		m.auth = *made.auth
	}
	if made.err != nil {
		if m.specErr == nil || m.specErr.Error() != made.err.Error() {
			p.later(func() { p.logger.Error("spec can't be made", "proxy", name, "error", made.err) })
			p.emit(Event{Kind: EventSpecError, Proxy: name, Err: made.err})
		}
		m.specErr = made.err
		if made.hash == "" {
			return // the last good spec stays in force
		}
	} else {
		m.specErr = nil
	}
	if made.hash == m.hash {
		return
	}
	if m.hash != "" {
		m.changed = true
		p.emit(Event{Kind: EventSpecChanged, Proxy: name, Provider: m.decl.Provider})
	}
	m.hash = made.hash
	m.permanent, m.failures, m.notBefore, m.lastErr = nil, 0, time.Time{}, nil
	for _, w := range made.warnings {
		p.later(func() { p.logger.Warn("spec is odd", "proxy", name, "warning", w) })
	}
}

// refreshSecretsForever reads the secrets again and again.
func (p *Pool) refreshSecretsForever() {
	ticker := time.NewTicker(p.config.SecretInterval)
	defer ticker.Stop()
	for {
		select {
		case <-p.running.Done():
			return
		case <-ticker.C:
			p.refreshSecrets()
		}
	}
}

func (p *Pool) refreshSecrets() {
	declarations, _ := p.secretive()
	if len(declarations) == 0 {
		return
	}
	// A source that hangs must not hold up an Apply, so the turn to change things is taken after the reading.
	ctx, cancel := context.WithTimeout(p.running, p.config.CallTimeout)
	values := p.readSecrets(ctx, declarations)
	cancel()
	select {
	case p.applying <- struct{}{}:
		defer func() { <-p.applying }()
	case <-p.running.Done():
		return
	}
	declarations, old := p.secretive()
	for i := range declarations {
		for _, ref := range declarations[i].refs() {
			if _, ok := values[ref]; !ok {
				values[ref] = old[ref] // declared meanwhile, and read then
			}
		}
	}
	if p.running.Err() != nil || sameSecrets(old, values) {
		return
	}
	made := make([]madeSpec, len(declarations))
	for i := range declarations {
		made[i] = p.makeSpec(&declarations[i], values)
	}
	p.mu.Lock()
	defer p.unlock()
	if p.destroying {
		return
	}
	p.secrets = values
	for i := range declarations {
		if m := p.members[declarations[i].Name]; m != nil {
			p.setSpecLocked(m, made[i])
		}
	}
	p.externalsLocked(time.Now())
	for _, x := range p.instances {
		p.refreshEndpointLocked(x)
	}
	p.wake()
}

// secretive returns the declarations that refer to secrets, and what was last read.
func (p *Pool) secretive() ([]declaration, map[string]secret) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var declarations []declaration
	for _, m := range p.order {
		if len(m.decl.refs()) > 0 {
			declarations = append(declarations, m.decl)
		}
	}
	return declarations, p.secrets
}

func sameSecrets(a, b map[string]secret) bool {
	for ref, s := range b {
		old, ok := a[ref]
		if !ok || !bytes.Equal(old.value, s.value) || (old.err == nil) != (s.err == nil) {
			return false
		}
	}
	return true
}

// endpointOf returns how to reach x as its declaration wants it.
func endpointOf(d *declaration, auth Credentials, x *instance) upstream.Endpoint {
	e := upstream.Endpoint{
		Scheme: string(d.Scheme), Host: x.address, Port: d.Port,
		Username: auth.Username, Password: auth.Password,
	}
	if x.port != 0 {
		e.Port = x.port
	}
	if d.Scheme == SchemeHTTPS && (d.TLS.ServerName != "" || len(d.TLS.RootsPEM) > 0) {
		e.TLS = &tls.Config{ServerName: d.TLS.ServerName}
		if len(d.TLS.RootsPEM) > 0 {
			e.TLS.RootCAs = x509.NewCertPool()
			e.TLS.RootCAs.AppendCertsFromPEM(d.TLS.RootsPEM)
		}
	}
	return e
}

// sameEndpoint reports whether connections to a serve for b.
func sameEndpoint(a, b upstream.Endpoint) bool {
	if (a.TLS == nil) != (b.TLS == nil) {
		return false
	}
	if a.TLS != nil && (a.TLS.ServerName != b.TLS.ServerName || !a.TLS.RootCAs.Equal(b.TLS.RootCAs)) {
		return false
	}
	a.TLS, b.TLS = nil, nil
	return a == b
}

// refreshEndpointLocked follows a changed address, port, scheme or credential of x. Leases on the old ones are revoked.
// An instance whose spec is not the wanted one any more keeps what it was made with.
func (p *Pool) refreshEndpointLocked(x *instance) {
	if x.member == nil || x.address == "" {
		return
	}
	d := &x.member.decl
	if x.entry != nil {
		x.entry.Update(d.Labels, d.maxLeases)
	}
	known := x.endpoint != nil
	next := endpointOf(d, x.member.auth, x)
	if known && (x.source == nil || x.hash != x.member.hash) {
		next = *x.endpoint
		next.Host = x.address
	}
	if known && sameEndpoint(*x.endpoint, next) {
		return
	}
	x.endpoint = &next
	if known {
		p.unleaseLocked(x, "address or credentials changed", nil)
		x.fit, x.streak = false, 0
	}
	p.probeNowLocked(x)
}
