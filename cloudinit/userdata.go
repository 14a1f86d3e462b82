package cloudinit

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Problem says why a document is refused.
type Problem string

// The problems.
const (
	ProblemEmpty        Problem = "empty"               // nothing in it
	ProblemTooLarge     Problem = "too large"           // over the limit of the backend
	ProblemBOM          Problem = "byte order mark"     // cloud-init does not recognise what follows it
	ProblemNoHeader     Problem = "no header"           // cloud-init ignores what has no known first line
	ProblemMIMENonASCII Problem = "MIME with non-ASCII" // read as an e-mail, and decoded wrongly
	ProblemGzip         Problem = "bad gzip"            // can't be unpacked, or to far too much
)

// DocumentError is why a document is refused. It never shows the document.
type DocumentError struct {
	// Problem is the reason.
	Problem Problem
	// Detail is a sentence that says what would be right.
	Detail string
}

// Error returns problem and detail.
func (e *DocumentError) Error() string {
	return fmt.Sprintf("cloudinit: document refused: %s: %s", e.Problem, e.Detail)
}

func refuse(p Problem, format string, args ...any) error {
	return &DocumentError{Problem: p, Detail: fmt.Sprintf(format, args...)}
}

// mimeWindow is how far into a document cloud-init looks for a MIME header (user_data.py, convert_string).
const mimeWindow = 4096

// maxUnpacked bounds what a compressed document may unpack to. It is far above any backend's limit for what is packed,
// and keeps a hostile document from filling the memory.
const maxUnpacked = 16 << 20

// starts are the beginnings that cloud-init recognises, in lower case, after leading white space (handlers/__init__.py,
// INCLUSION_TYPES_MAP).
var starts = []string{
	"#cloud-config", "#!", "#include", "#cloud-boothook", "#part-handler", "## template: jinja",
}

// CheckUserData reports whether cloud-init will use a user-data document as it is. Any format is accepted: cloud-config,
// script, boothook, include, part handler, jinja template, cloud-config archive, MIME archive, and all of those in gzip.
// The error is a *[DocumentError] that says what cloud-init would do to the document. A limit of 0 is none; else it is
// the most bytes that the backend takes.
func CheckUserData(data []byte, limit int) error {
	if limit > 0 && len(data) > limit {
		return refuse(ProblemTooLarge, "it has %d bytes, want at most %d", len(data), limit)
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return refuse(ProblemEmpty, "want a document with a first line such as #cloud-config or #!/bin/sh")
	}
	plain, err := unpack(data)
	if err != nil {
		return err
	}
	for _, bom := range []string{"\xef\xbb\xbf", "\xff\xfe", "\xfe\xff"} {
		if bytes.HasPrefix(plain, []byte(bom)) {
			return refuse(ProblemBOM, "cloud-init does not recognise a first line behind it; save the document as UTF-8 without one")
		}
	}
	if isMIME(plain) {
		return checkMIME(plain)
	}
	return checkHeader(plain)
}

// unpack returns what is in data, be it compressed or not.
func unpack(data []byte) ([]byte, error) {
	if !bytes.HasPrefix(data, []byte("\x1f\x8b")) {
		return data, nil
	}
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, refuse(ProblemGzip, "it begins like gzip and is not")
	}
	plain, err := io.ReadAll(io.LimitReader(r, maxUnpacked+1))
	switch {
	case err != nil:
		return nil, refuse(ProblemGzip, "it is cut off or damaged")
	case len(plain) > maxUnpacked:
		return nil, refuse(ProblemGzip, "it unpacks to more than %d bytes", maxUnpacked)
	case len(bytes.TrimSpace(plain)) == 0:
		return nil, refuse(ProblemEmpty, "it unpacks to nothing")
	}
	return plain, nil
}

// isMIME reports whether cloud-init takes a document for a MIME archive: it looks for the header near the top and no
// further.
func isMIME(plain []byte) bool {
	return bytes.Contains(bytes.ToLower(plain[:min(len(plain), mimeWindow)]), []byte("mime-version:"))
}

func checkMIME(plain []byte) error {
	for _, c := range plain {
		if c >= utf8.RuneSelf {
			return refuse(ProblemMIMENonASCII, "it has MIME-Version: in its first %d bytes, so cloud-init reads it as an e-mail and "+
				"loses what is not ASCII; encode the parts in base64, or move the words MIME-Version: out of the way", mimeWindow)
		}
	}
	return nil
}

func checkHeader(plain []byte) error {
	text := bytes.TrimLeftFunc(plain[:min(len(plain), mimeWindow)], unicode.IsSpace)
	lower := strings.ToLower(string(text[:min(len(text), 64)]))
	for _, start := range starts {
		if !strings.HasPrefix(lower, start) {
			continue
		}
		if start != "## template: jinja" {
			return nil
		}
		_, rest, _ := bytes.Cut(text, []byte("\n"))
		if err := checkHeader(rest); err != nil {
			return refuse(ProblemNoHeader, "a jinja template wants a second line such as #cloud-config or #!/bin/sh")
		}
		return nil
	}
	return refuse(ProblemNoHeader, "cloud-init ignores it; want a first line such as #cloud-config, #!/bin/sh or a MIME header")
}

var (
	vendorInline = regexp.MustCompile(`(?mi)^vendor_data:[ \t]*\{[^}\n]*\benabled['"]?[ \t]*:[ \t]*['"]?(false|no|off|0)\b`)
	vendorBlock  = regexp.MustCompile(`(?mi)^vendor_data:[ \t]*(?:#.*)?\r?\n(?:[ \t]+.*\r?\n|[ \t]*\r?\n)*?[ \t]+['"]?enabled['"]?[ \t]*:[ \t]*['"]?(false|no|off|0)\b`)
)

// Warnings returns a sentence for each thing in a user-data document that is allowed and probably not meant. So far that
// is vendor_data with enabled: false in a cloud-config, which drops the vendor data and with it the guest agent.
func Warnings(userData []byte) []string {
	plain, err := unpack(userData)
	if err != nil || isMIME(plain) {
		return nil
	}
	text := bytes.TrimLeftFunc(plain, unicode.IsSpace)
	if len(text) < 13 || !strings.EqualFold(string(text[:13]), "#cloud-config") {
		return nil
	}
	if vendorInline.Match(plain) || vendorBlock.Match(plain) {
		return []string{"the user data says vendor_data: {enabled: false}, so the guest agent and any vendor document are not installed"}
	}
	return nil
}
