package libvirt

import (
	"fmt"
	"net/url"
	"path"
	"strings"

	"crawl.example.com/egress/internal/sshconn"
)

// URI is a libvirt connection URI of the kinds that this package speaks.
type URI struct {
	// SSH is the SSH server of the host. The zero value is this machine.
	SSH sshconn.Address
	// Socket is the path of libvirt's socket on the host. Empty means the usual ones.
	Socket string
}

// Local reports whether the host is this machine.
func (u URI) Local() bool { return u.SSH == sshconn.Address{} }

// String returns the URI in its shortest form.
func (u URI) String() string {
	text := "qemu:///system"
	if !u.Local() {
		text = "qemu+ssh://" + u.SSH.String() + "/system"
	}
	if u.Socket != "" {
		text += "?socket=" + url.QueryEscape(u.Socket)
	}
	return text
}

// ParseURI reads qemu+ssh://[user@]host[:port]/system, qemu:///system and qemu+unix:///system, each perhaps with
// ?socket=PATH. What else libvirt's own URIs may say about SSH is said in a Config here, so other parameters are refused.
// No error repeats what stands before the @.
func ParseURI(text string) (URI, error) {
	parsed, err := url.Parse(text)
	if err != nil {
		return URI{}, fmt.Errorf("is no URI, want qemu+ssh://user@host/system or qemu:///system")
	}
	var u URI
	switch parsed.Scheme {
	case "qemu+ssh":
		if parsed.Host == "" {
			return URI{}, fmt.Errorf("names no host, want qemu+ssh://user@host/system")
		}
		address := strings.TrimPrefix(text, "qemu+ssh://")
		address, _, _ = strings.Cut(address, "/")
		if u.SSH, err = sshconn.ParseAddress(address); err != nil {
			return URI{}, err
		}
	case "qemu", "qemu+unix":
		if parsed.Host != "" || parsed.User != nil {
			return URI{}, fmt.Errorf("names a host without saying how to reach it, want qemu+ssh://user@host/system")
		}
	default:
		return URI{}, fmt.Errorf("has scheme %q, want qemu+ssh, qemu or qemu+unix", parsed.Scheme)
	}
	if parsed.Path != "/system" {
		return URI{}, fmt.Errorf("has path %q, want /system: a session has neither networks nor autostart", parsed.Path)
	}
	if parsed.Fragment != "" {
		return URI{}, fmt.Errorf("has a fragment, want none")
	}
	query, err := url.ParseQuery(parsed.RawQuery)
	if err != nil {
		return URI{}, fmt.Errorf("has parameters that can't be read, want none or socket=PATH")
	}
	for key, values := range query {
		if key != "socket" || len(values) != 1 || !path.IsAbs(values[0]) {
			return URI{}, fmt.Errorf("has parameter %q, want none or socket=PATH: keys and known hosts have fields of their own", key)
		}
		u.Socket = values[0]
	}
	return u, nil
}
