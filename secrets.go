package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// Secrets resolves the secret references of proxies. The pool reads each reference at every Apply and again every
// Config.SecretInterval, and keeps the last good value when a read fails. Several references are read at once, so it must
// be safe for concurrent use.
//
// Secret returns the whole content. It blocks until it has it or ctx ends: at Apply that is Apply's context, later one
// that Config.CallTimeout bounds. A reference that leads nowhere gives an error that matches [ErrSecretNotFound]. Errors
// name the reference and never the content. The pool does not change the result and the implementation must not either.
type Secrets interface {
	Secret(ctx context.Context, ref string) ([]byte, error)
}

// ErrSecretNotFound says that a secret reference leads nowhere.
var ErrSecretNotFound = errors.New("egress: secret not found")

// MaxSecretBytes is the size above which SecretDir refuses a file. It is above every backend's limit for
// user data; the largest of those is Google's, 256 KiB.
const MaxSecretBytes = 1 << 20

// SecretFunc lets a function be Secrets. It must be safe for concurrent use.
type SecretFunc func(ctx context.Context, ref string) ([]byte, error)

// Secret calls f.
func (f SecretFunc) Secret(ctx context.Context, ref string) ([]byte, error) { return f(ctx, ref) }

// SecretDir resolves references as slash-separated paths of files below dir. The files are opened anew at each
// read, so that a directory whose content is swapped by symbolic links, as Kubernetes does with mounted secrets,
// is seen as it is now and each file is read whole in one version. Links must not lead out of dir.
//
// SecretDir itself does no I/O. It is safe for concurrent use. Its errors match ErrSecretNotFound when there is
// no such file, and name the reference.
func SecretDir(dir string) Secrets { return secretDir(dir) }

type secretDir string

func (d secretDir) Secret(ctx context.Context, ref string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	if err := checkSecretRef(ref); err != nil {
		return nil, fmt.Errorf("egress: secret %w", err)
	}
	if !fs.ValidPath(ref) {
		return nil, fmt.Errorf("egress: secret %q: want a slash-separated path below the secret directory", ref)
	}
	content, err := d.read(ref)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %q", ErrSecretNotFound, ref)
	case err != nil:
		return nil, fmt.Errorf("egress: secret %q: %w", ref, err)
	}
	return content, nil
}

func (d secretDir) read(ref string) ([]byte, error) {
	f, err := os.OpenInRoot(string(d), ref)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	content, err := io.ReadAll(io.LimitReader(f, MaxSecretBytes+1))
	if err != nil {
		return nil, err
	}
	if len(content) > MaxSecretBytes {
		return nil, fmt.Errorf("more than %d bytes", MaxSecretBytes)
	}
	return content, nil
}

// checkSecretRef refuses what no source of secrets should be asked for. A reference may be anything else, since
// a SecretFunc gives it its meaning. The error has no package prefix.
func checkSecretRef(ref string) error {
	if ref == "" {
		return errors.New("reference is empty")
	}
	for element := range strings.FieldsFuncSeq(ref, func(r rune) bool { return r == '/' || r == '\\' }) {
		if element == ".." {
			return fmt.Errorf("reference %q has a .. element, want a path that stays below the source", ref)
		}
	}
	for _, r := range ref {
		if r < ' ' || r == 0x7f {
			return fmt.Errorf("reference %q has a control character", ref)
		}
	}
	return nil
}
