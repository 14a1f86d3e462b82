package sshconn_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/internal/sshconn/sshtest"
)

func write(t *testing.T, name string, content []byte) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// serveAgent serves an agent with keys on a socket, and returns its path. It says for which keys it signs.
func serveAgent(t *testing.T, keys ...any) string {
	t.Helper()
	ring := agent.NewKeyring()
	for _, key := range keys {
		if err := ring.Add(agent.AddedKey{PrivateKey: key}); err != nil {
			t.Fatal(err)
		}
	}
	return serveThisAgent(t, ring)
}

func serveThisAgent(t *testing.T, ring agent.Agent) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				agent.ServeAgent(ring, conn)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return path
}

func raw(t *testing.T, file []byte) any {
	t.Helper()
	key, err := ssh.ParseRawPrivateKey(file)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

const passphrase = "correct horse battery staple"

func givePassphrase(text string) func(context.Context, string) ([]byte, error) {
	return func(context.Context, string) ([]byte, error) { return []byte(text), nil }
}

func TestAKeyIsFoundInFilesAndInTheAgent(t *testing.T) {
	good, goodFile := sshtest.NewKeyFile("ed25519", "")
	goodRSA, goodRSAFile := sshtest.NewKeyFile("rsa", "")
	sealed, sealedFile := sshtest.NewKeyFile("ed25519", passphrase)
	_, wrongFile := sshtest.NewKeyFile("ecdsa", "")
	sealedRaw, err := ssh.ParseRawPrivateKeyWithPassphrase(sealedFile, []byte(passphrase))
	if err != nil {
		t.Fatal(err)
	}
	goodPath, rsaPath, sealedPath, wrongPath := write(t, "good", goodFile), write(t, "rsa", goodRSAFile), write(t, "sealed", sealedFile), write(t, "wrong", wrongFile)
	goodAgent, wrongAgent, emptyAgent := serveAgent(t, raw(t, wrongFile), raw(t, goodFile), raw(t, goodRSAFile)), serveAgent(t, raw(t, wrongFile)), serveAgent(t)
	sealedAgent := serveAgent(t, sealedRaw)
	t.Setenv("SSH_AUTH_SOCK", goodAgent)

	var many []any
	for range 8 {
		_, file := sshtest.NewKeyFile("ed25519", "")
		many = append(many, raw(t, file))
	}
	var credentials *sshconn.CredentialsError
	var auth *sshconn.AuthError
	for name, test := range map[string]struct {
		user ssh.Signer
		host sshconn.Host
		want any    // the error's type
		says string // a part of the error
	}{
		"a file":                                {user: good, host: sshconn.Host{KeyFiles: []string{goodPath}}},
		"an RSA file":                           {user: goodRSA, host: sshconn.Host{KeyFiles: []string{rsaPath}}},
		"the second file":                       {user: good, host: sshconn.Host{KeyFiles: []string{wrongPath, goodPath}}},
		"an encrypted file":                     {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}, Passphrase: givePassphrase(passphrase)}},
		"the agent of the environment":          {user: good, host: sshconn.Host{}},
		"an agent that is named":                {user: good, host: sshconn.Host{Agent: goodAgent}},
		"an RSA key in the agent":               {user: goodRSA, host: sshconn.Host{Agent: goodAgent}},
		"a wrong file, then the agent":          {user: good, host: sshconn.Host{KeyFiles: []string{wrongPath}, Agent: goodAgent}},
		"a file, and a wrong agent":             {user: good, host: sshconn.Host{KeyFiles: []string{goodPath}, Agent: wrongAgent}},
		"a file, and an agent without keys":     {user: good, host: sshconn.Host{KeyFiles: []string{goodPath}, Agent: emptyAgent}},
		"an encrypted file, open in the agent":  {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}, Agent: sealedAgent}},
		"a file, before an agent with too many": {user: good, host: sshconn.Host{KeyFiles: []string{goodPath}, Agent: serveAgent(t, many...)}},

		"no such file":                             {user: good, host: sshconn.Host{KeyFiles: []string{"/no/such/key"}}, want: &credentials, says: "/no/such/key"},
		"a file that is no key":                    {user: good, host: sshconn.Host{KeyFiles: []string{write(t, "text", []byte("hunter2"))}}, want: &credentials, says: "text"},
		"an encrypted file without a passphrase":   {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}}, want: &credentials, says: "encrypted"},
		"an encrypted file, and another's agent":   {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}, Agent: wrongAgent}, want: &credentials, says: "encrypted"},
		"a wrong passphrase":                       {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}, Passphrase: givePassphrase("hunter2")}, want: &credentials, says: "passphrase is wrong"},
		"a passphrase that is not to be had":       {user: sealed, host: sshconn.Host{KeyFiles: []string{sealedPath}, Passphrase: func(context.Context, string) ([]byte, error) { return nil, io.ErrUnexpectedEOF }}, want: &credentials, says: "unexpected EOF"},
		"no such agent":                            {user: good, host: sshconn.Host{Agent: "/no/such/agent"}, want: &credentials, says: "/no/such/agent"},
		"an agent without keys":                    {user: good, host: sshconn.Host{Agent: emptyAgent}, want: &credentials, says: "ssh-add"},
		"an agent of somebody else":                {user: good, host: sshconn.Host{Agent: wrongAgent}, want: &auth, says: "SHA256:"},
		"a named file only, not the agent as well": {user: good, host: sshconn.Host{KeyFiles: []string{wrongPath}}, want: &auth, says: "authorized_keys"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer()
			defer s.Close()
			s.Users = []ssh.PublicKey{test.user.PublicKey()}
			config := configFor(s)
			test.host.Address, test.host.PinnedKeys = config.Host.Address, config.Host.PinnedKeys
			config.Host = test.host
			c, err := sshconn.Dial(t.Context(), config)
			if err == nil {
				c.Close()
			}
			if test.want == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !errors.As(err, test.want) {
				t.Fatalf("got %v, want a %T", err, test.want)
			}
			if !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), "root@host:22") {
				t.Errorf("%v\ndoes not say %q and where", err, test.says)
			}
			for _, secret := range []string{passphrase, "hunter2", "PRIVATE"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("a secret stands in the error: %v", err)
				}
			}
		})
	}
}

func TestWithoutAnyKeyNothingIsDialled(t *testing.T) {
	t.Setenv("SSH_AUTH_SOCK", "")
	s := newServer()
	defer s.Close()
	config := configFor(s)
	config.Host.Signers = nil
	_, err := sshconn.Dial(t.Context(), config)
	if _, ok := errors.AsType[*sshconn.CredentialsError](err); !ok || sshconn.Reason(err) != "CredentialsUnavailable" || s.Dials() != 0 {
		t.Errorf("after %d dials: %v", s.Dials(), err)
	}
}

// reluctant is an agent that lists its keys and calls sign instead of signing.
type reluctant struct {
	agent.Agent
	sign func() error
}

func (r reluctant) Sign(ssh.PublicKey, []byte) (*ssh.Signature, error) { return nil, r.sign() }

// What our own side does not do in time, or refuses, is not the server's fault, whenever in the login it is.
func TestAnAgentThatRefusesOrIsSilentIsNamed(t *testing.T) {
	user, file := sshtest.NewKeyFile("ed25519", "")
	_, sealed := sshtest.NewKeyFile("ed25519", passphrase)
	sealedPath := write(t, "sealed", sealed)
	ring := agent.NewKeyring()
	if err := ring.Add(agent.AddedKey{PrivateKey: raw(t, file)}); err != nil {
		t.Fatal(err)
	}
	silent := filepath.Join(t.TempDir(), "silent")
	l, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	touched := make(chan struct{}) // the token that the key is in
	refusing := serveThisAgent(t, reluctant{ring, func() error { return errors.New("locked") }})
	waiting := serveThisAgent(t, reluctant{ring, func() error { <-touched; return errors.New("too late") }})
	t.Cleanup(func() { close(touched) })
	asking := func(ctx context.Context, _ string) ([]byte, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for name, test := range map[string]struct {
		host sshconn.Host
		says string
		late bool
	}{
		"refuses to sign":              {sshconn.Host{Agent: refusing}, "SSH agent " + refusing + ": signing with ssh-ed25519 SHA256:", false},
		"does not sign":                {sshconn.Host{Agent: waiting}, "SSH agent " + waiting + ": signing with ssh-ed25519 SHA256:", true},
		"does not list its keys":       {sshconn.Host{Agent: silent}, "SSH agent " + silent + ": no answer", true},
		"nobody enters the passphrase": {sshconn.Host{KeyFiles: []string{sealedPath}, Passphrase: asking}, "key file " + sealedPath + ": no answer", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait
			s := newServer()
			defer s.Close()
			s.Users = []ssh.PublicKey{user.PublicKey()}
			config := configFor(s)
			test.host.Address, test.host.PinnedKeys = config.Host.Address, config.Host.PinnedKeys
			config.Host = test.host
			if test.late {
				config.Timeout = 5 * time.Second // enough for the handshake before it
			}
			_, err := sshconn.Dial(t.Context(), config)
			if _, ok := errors.AsType[*sshconn.CredentialsError](err); !ok || sshconn.Reason(err) != "CredentialsUnavailable" || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want it to say %q", err, test.says)
			}
			if errors.Is(err, context.DeadlineExceeded) != test.late {
				t.Errorf("%v is a timeout: %t", err, !test.late)
			}
			if !test.late {
				return
			}
			// Whoever gives up has no fault to find.
			ctx, cancel := context.WithCancel(t.Context())
			config.Timeout = 0
			time.AfterFunc(20*time.Millisecond, cancel)
			_, err = sshconn.Dial(ctx, config)
			if _, ok := errors.AsType[*sshconn.CredentialsError](err); ok || !errors.Is(err, context.Canceled) {
				t.Errorf("when it is given up: %v", err)
			}
		})
	}
}

func TestThePassphraseIsOverwrittenOnceUsed(t *testing.T) {
	user, file := sshtest.NewKeyFile("ed25519", passphrase)
	s := newServer()
	defer s.Close()
	s.Users = []ssh.PublicKey{user.PublicKey()}
	config := configFor(s)
	given := []byte(passphrase)
	config.Host.Signers, config.Host.KeyFiles = nil, []string{write(t, "key", file)}
	config.Host.Passphrase = func(context.Context, string) ([]byte, error) { return given, nil }
	c, err := sshconn.Dial(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if strings.Trim(string(given), "\x00") != "" {
		t.Error("the passphrase is still there")
	}
}

func TestARefusedLoginIsAnErrorOfItsOwn(t *testing.T) {
	s := newServer()
	defer s.Close()
	s.Users = nil
	_, err := sshconn.Dial(t.Context(), configFor(s))
	auth, ok := errors.AsType[*sshconn.AuthError](err)
	if !ok || auth.Address != "root@host:22" || len(auth.Keys) != 1 || sshconn.Reason(err) != "AuthenticationFailed" {
		t.Errorf("got %v", err)
	}
}
