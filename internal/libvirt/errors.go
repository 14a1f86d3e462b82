package libvirt

import (
	"errors"
	"strings"

	golibvirt "github.com/digitalocean/go-libvirt"
)

// Code returns the number of libvirt's own error in err's tree, or 0 when there is none: then err is about the
// connection or the context.
func Code(err error) golibvirt.ErrorNumber {
	if e, ok := errors.AsType[golibvirt.Error](err); ok {
		return golibvirt.ErrorNumber(e.Code)
	}
	return 0
}

// Answered reports whether libvirt itself gave the error, which then says nothing against the connection.
func Answered(err error) bool {
	return Code(err) != 0 || errors.Is(err, golibvirt.ErrUnsupported)
}

// Full reports whether err says that a disk of the host is full. There is no code for that, only the system's text, which
// is in English unless the daemon runs in another locale.
func Full(err error) bool {
	code := Code(err)
	return (code == golibvirt.ErrSystemError || code == golibvirt.ErrInternalError || code == golibvirt.ErrOperationFailed) &&
		(strings.Contains(err.Error(), "No space left on device") || strings.Contains(err.Error(), "Disk quota exceeded"))
}

// Denied reports whether err says that the user lacks a right.
func Denied(err error) bool {
	switch Code(err) {
	case golibvirt.ErrAuthFailed, golibvirt.ErrAuthCancelled, golibvirt.ErrAuthUnavailable, golibvirt.ErrAccessDenied, golibvirt.ErrOperationDenied:
		return true
	}
	// Where polkit is to decide and can't be asked, nobody but root may do anything.
	return Code(err) == golibvirt.ErrInternalError && strings.Contains(err.Error(), "system bus")
}

// quote makes one word of text for a shell.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
