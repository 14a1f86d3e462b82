package libvirt

import (
	"strings"
	"testing"

	"crawl.example.com/egress/internal/sshconn"
)

func TestURIsAreReadAndWrittenInTheirShortestForm(t *testing.T) {
	for text, want := range map[string]struct {
		uri     URI
		written string
	}{
		"qemu:///system":      {URI{}, "qemu:///system"},
		"qemu+unix:///system": {URI{}, "qemu:///system"},
		"qemu+unix:///system?socket=/run/user/libvirt.sock": {URI{Socket: "/run/user/libvirt.sock"}, "qemu:///system?socket=%2Frun%2Fuser%2Flibvirt.sock"},
		"qemu:///system?socket=%2Fa%20b%26c":                {URI{Socket: "/a b&c"}, "qemu:///system?socket=%2Fa+b%26c"},
		"qemu+ssh://Host.example/system":                    {URI{SSH: sshconn.Address{Host: "host.example", Port: 22}}, "qemu+ssh://host.example:22/system"},
		"qemu+ssh://root@10.0.0.1:2222/system":              {URI{SSH: sshconn.Address{User: "root", Host: "10.0.0.1", Port: 2222}}, "qemu+ssh://root@10.0.0.1:2222/system"},
		"qemu+ssh://root@[2001:db8::1]/system?socket=/s":    {URI{SSH: sshconn.Address{User: "root", Host: "2001:db8::1", Port: 22}, Socket: "/s"}, "qemu+ssh://root@[2001:db8::1]:22/system?socket=%2Fs"},
	} {
		got, err := ParseURI(text)
		if err != nil || got != want.uri || got.String() != want.written {
			t.Errorf("%s is read as %+v and written as %s, want %+v and %s: %v", text, got, got, want.uri, want.written, err)
		}
		if again, err := ParseURI(want.written); err != nil || again != want.uri {
			t.Errorf("%s is read as %+v: %v", want.written, again, err)
		}
		if got.Local() != !strings.Contains(text, "ssh") {
			t.Errorf("%s is local: %t", text, got.Local())
		}
	}
}

func TestOtherURIsAreRefusedWithWhatIsWanted(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "want qemu+ssh, qemu or qemu+unix",
		"qemu+tcp://host/system":               `has scheme "qemu+tcp"`,
		"xen:///system":                        `has scheme "xen"`,
		"://":                                  "is no URI",
		"qemu+ssh:///system":                   "names no host",
		"qemu://host/system":                   "names a host without saying how to reach it",
		"qemu+unix://host/system":              "names a host without saying how to reach it",
		"qemu+ssh://host/session":              `has path "/session"`,
		"qemu:///":                             `has path "/"`,
		"qemu:///system#x":                     "has a fragment",
		"qemu:///system?socket=a":              `has parameter "socket"`,
		"qemu:///system?socket=":               `has parameter "socket"`,
		"qemu:///system?socket=/a&socket=/b":   `has parameter "socket"`,
		"qemu+ssh://host/system?keyfile=/k":    `has parameter "keyfile"`,
		"qemu+ssh://host/system?no_verify=1":   `has parameter "no_verify"`,
		"qemu:///system?a;b":                   "has parameters that can't be read",
		"qemu+ssh://root:hunter2@host/system":  "passwords are not used",
		"qemu+ssh://root@host:0/system":        "want a port",
		"qemu+ssh://root@ho st/system":         "is no URI",
		"qemu+ssh://hunter2@/system":           "host",
		"qemu+ssh://hunter2@host%/system":      "",
		"qemu+ssh://hunter2@host/system?x=%zz": "has parameters that can't be read",
	} {
		u, err := ParseURI(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is read as %+v: %v, want %q", text, u, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error repeats what stands before the @: %v", err)
		}
	}
}

func FuzzParseURI(f *testing.F) {
	for _, text := range []string{
		"qemu:///system", "qemu+unix:///system?socket=/a%20b", "qemu+ssh://root@host:22/system", "qemu+ssh://[fe80::1%25eth0]/system?socket=/x", "qemu+ssh://a%40b@host/system",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		u, err := ParseURI(text)
		if err != nil {
			return
		}
		if again, err := ParseURI(u.String()); err != nil || again != u {
			t.Fatalf("%q is read as %+v, which is written as %q and read as %+v: %v", text, u, u, again, err)
		}
	})
}
