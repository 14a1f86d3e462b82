package cloudinit

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"fmt"
)

//go:embed agent.sh
var agentScript []byte

// GuestAgentScript returns the script that installs and starts the QEMU guest agent on Debian, Ubuntu, Fedora and its
// relatives, openSUSE and Alpine. It is plain ASCII for any POSIX shell, waits for locks of package managers for a
// bounded time, and ends with 0 whatever happens.
func GuestAgentScript() []byte { return bytes.Clone(agentScript) }

// Vendor says what goes into vendor-data.
type Vendor struct {
	// Document is the operator's own vendor document, in any format of cloud-init's. Defaults to none.
	Document []byte
	// InstallGuestAgent adds GuestAgentScript. Defaults to false.
	InstallGuestAgent bool
}

// VendorData returns the vendor-data document: the script or the operator's document as it is when it is alone, a MIME
// archive of both when both are wanted, and nil when nothing is. The error is a *[DocumentError] when the operator's
// document would be lost.
//
// In the archive the operator's document is declared as text/plain, by which cloud-init is told to find out itself, and
// every part is in base64, without which one letter outside ASCII would cost the whole part.
func VendorData(v Vendor) ([]byte, error) {
	if len(v.Document) > 0 {
		if err := CheckUserData(v.Document, 0); err != nil {
			return nil, err
		}
	}
	switch {
	case len(v.Document) == 0 && !v.InstallGuestAgent:
		return nil, nil
	case len(v.Document) == 0:
		return GuestAgentScript(), nil
	case !v.InstallGuestAgent:
		return bytes.Clone(v.Document), nil
	}
	digest := sha256.New()
	digest.Write(agentScript)
	digest.Write(v.Document)
	boundary := "egress-" + hex.EncodeToString(digest.Sum(nil)[:16])
	var b bytes.Buffer
	fmt.Fprintf(&b, "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=%q\n\n", boundary)
	// Scripts are run in the order of their names.
	writePart(&b, boundary, "text/x-shellscript", "00-egress-guest-agent.sh", agentScript)
	plain, err := unpack(v.Document)
	if err != nil {
		return nil, err
	}
	switch {
	case isMIME(plain) && startsWithHeader(plain):
		// An archive is a part with headers of its own. CheckUserData has seen that it is ASCII.
		fmt.Fprintf(&b, "--%s\n", boundary)
		b.Write(bytes.TrimLeft(plain, "\r\n"))
		b.WriteString("\n")
	default:
		writePart(&b, boundary, "text/plain", "50-vendor", plain)
	}
	fmt.Fprintf(&b, "--%s--\n", boundary)
	return b.Bytes(), nil
}

// startsWithHeader reports whether a document begins like an e-mail, and not only speaks of one.
func startsWithHeader(plain []byte) bool {
	line, _, _ := bytes.Cut(bytes.TrimLeft(plain, "\r\n"), []byte("\n"))
	name, _, ok := bytes.Cut(line, []byte(":"))
	return ok && plainName(string(name), "")
}

// base64Line is the longest line that RFC 2045 allows in base64.
const base64Line = 76

func writePart(b *bytes.Buffer, boundary, contentType, name string, data []byte) {
	fmt.Fprintf(b, "--%s\nMIME-Version: 1.0\nContent-Type: %s; charset=\"utf-8\"\nContent-Transfer-Encoding: base64\n"+
		"Content-Disposition: attachment; filename=%q\n\n", boundary, contentType, name)
	text := base64.StdEncoding.EncodeToString(data)
	for len(text) > 0 {
		n := min(len(text), base64Line)
		b.WriteString(text[:n])
		b.WriteByte('\n')
		text = text[n:]
	}
}
