package egress

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestASecretDirIsReadAnewEachTime(t *testing.T) {
	dir := t.TempDir()
	secrets := SecretDir(dir)
	for _, want := range []string{"one", "two, which is longer"} {
		writeFile(t, filepath.Join(dir, "squid.yaml"), want)
		got, err := secrets.Secret(t.Context(), "squid.yaml")
		if err != nil || string(got) != want {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
	}
}

func TestASecretDirFollowsASymlinkSwapOfTheWholeDirectory(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "..2026_01", "user"), "old")
	writeFile(t, filepath.Join(dir, "..2026_02", "user"), "new")
	link := func(target, name string) {
		t.Helper()
		tmp := filepath.Join(dir, "tmp")
		if err := os.Symlink(target, tmp); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	link("..2026_01", "..data")
	link("..data/user", "user")
	secrets := SecretDir(dir)
	if got, err := secrets.Secret(t.Context(), "user"); err != nil || string(got) != "old" {
		t.Fatalf("got %q, %v", got, err)
	}
	link("..2026_02", "..data")
	if got, err := secrets.Secret(t.Context(), "user"); err != nil || string(got) != "new" {
		t.Fatalf("after the swap got %q, %v", got, err)
	}
}

func TestASecretDirRefusesWhatIsNotAFileBelowIt(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "secrets")
	writeFile(t, filepath.Join(parent, "outside"), "planted-secret")
	writeFile(t, filepath.Join(dir, "sub", "file"), "x")
	writeFile(t, filepath.Join(dir, "big"), strings.Repeat("planted-secret", MaxSecretBytes/14+1))
	if err := os.Symlink("../outside", filepath.Join(dir, "escape")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(parent, "outside"), filepath.Join(dir, "absolute")); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{
		"", "..", "../outside", "sub/../../outside", `..\outside`, "/etc/passwd", "sub", "escape", "absolute", "big",
		"sub//file", "./sub", "line\nbreak", "nul\x00",
	} {
		got, err := SecretDir(dir).Secret(t.Context(), ref)
		if err == nil {
			t.Errorf("%q gave %d bytes", ref, len(got))
			continue
		}
		if errors.Is(err, ErrSecretNotFound) {
			t.Errorf("%q: %v, want a refusal and not ErrSecretNotFound", ref, err)
		}
		if strings.Contains(err.Error(), "planted-secret") {
			t.Errorf("%q: the error holds the content", ref)
		}
	}
}

func TestAMissingSecretIsItsOwnError(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Join(dir, "no-such-directory")} {
		_, err := SecretDir(d).Secret(t.Context(), "nothing")
		if !errors.Is(err, ErrSecretNotFound) || !strings.Contains(err.Error(), `"nothing"`) {
			t.Errorf("got %v, want ErrSecretNotFound with the reference in it", err)
		}
	}
}

func TestASecretDirHeedsItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("closing")
	cancel(cause)
	if _, err := SecretDir(t.TempDir()).Secret(ctx, "x"); !errors.Is(err, cause) {
		t.Fatalf("got %v, want the cause", err)
	}
}
