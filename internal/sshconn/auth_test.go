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

func TestAnAgentThatDoesNotAnswerDoesNotHoldTheDialUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := newServer()
	defer s.Close()
	config := configFor(s)
	config.Host.Signers, config.Host.Agent, config.Timeout = nil, path, 50*time.Millisecond
	if _, err := sshconn.Dial(t.Context(), config); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want a timeout", err)
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
