package sshconn

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// loadSigners returns the keys to offer to the server, those of files first, and what to call when the login is over.
// The agent signs as long as ctx lives and no longer, since it may wait for somebody to touch a token.
func loadSigners(ctx context.Context, h Host, address string) (signers []ssh.Signer, done func(), err error) {
	done = func() {}
	fail := func(err error) ([]ssh.Signer, func(), error) {
		done()
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, nil, fmt.Errorf("sshconn: %s: loading keys: %w", address, ended(ctx))
		}
		return nil, nil, &CredentialsError{Address: address, Err: err}
	}
	if ctx.Err() != nil {
		return nil, nil, fmt.Errorf("sshconn: %s: loading keys: %w", address, ended(ctx))
	}
	signers = slices.Clone(h.Signers)
	socket := h.Agent
	if socket == "" && len(h.KeyFiles) == 0 && len(h.Signers) == 0 {
		socket = os.Getenv("SSH_AUTH_SOCK")
		if socket == "" {
			return fail(errors.New("KeyFiles and Agent are empty and SSH_AUTH_SOCK is not set, want a key to log in with"))
		}
	}
	var held []ssh.Signer
	if socket != "" {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err != nil {
			return fail(fmt.Errorf("SSH agent %s: %w", socket, because(ctx, err)))
		}
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		done = func() {
			stop()
			conn.Close()
		}
		if held, err = agent.NewClient(conn).Signers(); err != nil {
			return fail(fmt.Errorf("SSH agent %s: %w", socket, because(ctx, err)))
		}
		for i, s := range held {
			if s, ok := s.(ssh.AlgorithmSigner); ok { // all of the library's are
				held[i] = agentSigner{s, func(err error) error {
					key := s.PublicKey()
					err = fmt.Errorf("SSH agent %s: signing with %s %s: %w", socket, key.Type(), ssh.FingerprintSHA256(key), because(ctx, err))
					return &CredentialsError{Address: address, Err: err}
				}}
			}
		}
	}
	for _, file := range h.KeyFiles {
		signer, err := readKey(ctx, h, file, held)
		if err != nil {
			return fail(err)
		}
		if signer != nil {
			signers = append(signers, signer)
		}
	}
	for _, s := range held {
		if !slices.ContainsFunc(signers, func(o ssh.Signer) bool { return sameKey(o.PublicKey(), s.PublicKey()) }) {
			signers = append(signers, s)
		}
	}
	if len(signers) == 0 {
		return fail(fmt.Errorf("SSH agent %s holds no key, want one (ssh-add)", socket))
	}
	return signers, done, nil
}

// agentSigner is a key that an agent holds. That it can't sign is our side's fault and not the server's.
type agentSigner struct {
	ssh.AlgorithmSigner
	fail func(error) error
}

func (a agentSigner) SignWithAlgorithm(rand io.Reader, data []byte, algorithm string) (*ssh.Signature, error) {
	signature, err := a.AlgorithmSigner.SignWithAlgorithm(rand, data, algorithm)
	if err != nil {
		return nil, a.fail(err)
	}
	return signature, nil
}

// because returns why ctx ended when it has, since err is then what came of that.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer: %w", ended(ctx))
	}
	return err
}

// readKey returns the key in file; nil when it is encrypted, no passphrase is to be had, and the agent holds it.
func readKey(ctx context.Context, h Host, file string, held []ssh.Signer) (ssh.Signer, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	signer, err := ssh.ParsePrivateKey(content)
	if err == nil {
		return signer, nil
	}
	encrypted, ok := errors.AsType[*ssh.PassphraseMissingError](err)
	if !ok {
		// The library's text is about the format only.
		return nil, fmt.Errorf("key file %s: %w, want a private key as ssh-keygen writes it", file, err)
	}
	if h.Passphrase == nil {
		if encrypted.PublicKey != nil && slices.ContainsFunc(held, func(s ssh.Signer) bool { return sameKey(s.PublicKey(), encrypted.PublicKey) }) {
			return nil, nil
		}
		return nil, fmt.Errorf("key file %s is encrypted, want Passphrase, or the key in the agent", file)
	}
	passphrase, err := h.Passphrase(ctx, file)
	if err != nil {
		return nil, fmt.Errorf("passphrase of key file %s: %w", file, because(ctx, err))
	}
	signer, err = ssh.ParsePrivateKeyWithPassphrase(content, passphrase)
	clear(passphrase)
	if errors.Is(err, x509.IncorrectPasswordError) {
		return nil, fmt.Errorf("key file %s: the passphrase is wrong", file)
	}
	if err != nil {
		return nil, fmt.Errorf("key file %s: %w", file, err)
	}
	return signer, nil
}
