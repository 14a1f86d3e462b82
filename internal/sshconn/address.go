package sshconn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// defaultPort is the port of SSH in IANA's registry.
const defaultPort = 22

// Address names an SSH server and perhaps who logs in there.
type Address struct {
	// User is empty when the text named none.
	User string
	// Host is a name or an IP address, in lower case as in known_hosts, without brackets. An IPv6 zone keeps its case.
	Host string
	// Port is 22 when the text named none.
	Port int
}

// String returns user@host:port, with brackets around an IPv6 address.
func (a Address) String() string {
	if a.User == "" {
		return a.HostPort()
	}
	return a.User + "@" + a.HostPort()
}

// HostPort returns host:port as package net wants it.
func (a Address) HostPort() string { return net.JoinHostPort(a.Host, strconv.Itoa(a.Port)) }

// ParseAddress reads [ssh://][user@]host[:port]. An IPv6 address stands in brackets, and may stand without when no port
// follows. A password is refused; no error repeats what stands before the @.
func ParseAddress(text string) (Address, error) {
	a := Address{Port: defaultPort}
	rest, isURL := text, false
	if scheme, after, ok := strings.Cut(text, "://"); ok {
		if !strings.EqualFold(scheme, "ssh") {
			return Address{}, errors.New("sshconn: address has a scheme that is not ssh, want ssh://user@host:port or user@host:port")
		}
		rest, isURL = strings.TrimSuffix(after, "/"), true
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user := rest[:at]
		rest = rest[at+1:]
		if strings.Contains(user, ":") {
			return Address{}, errors.New("sshconn: address has a colon before the @: passwords are not used, want user@host:port and a key")
		}
		if isURL {
			decoded, err := url.PathUnescape(user)
			if err != nil {
				return Address{}, errors.New("sshconn: address has a user with a broken %-escape, want user@host:port")
			}
			user = decoded
		}
		if user == "" || strings.HasPrefix(user, "-") || strings.ContainsFunc(user, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return Address{}, errors.New("sshconn: address has an empty user or one with spaces, control characters or a leading dash")
		}
		a.User = user
	}
	port := ""
	switch {
	case strings.HasPrefix(rest, "["):
		host, after, ok := strings.Cut(rest[1:], "]")
		if !ok || (after != "" && after[0] != ':') || !strings.Contains(host, ":") {
			return Address{}, fmt.Errorf("sshconn: address %q: want [ipv6]:port", rest)
		}
		a.Host = host
		if after != "" {
			port = after[1:]
			if port == "" {
				port = "none"
			}
		}
	case strings.Count(rest, ":") == 1:
		a.Host, port, _ = strings.Cut(rest, ":")
		if port == "" {
			port = "none"
		}
	default:
		a.Host = rest
	}
	if strings.Contains(a.Host, ":") {
		if ip, zone, ok := strings.Cut(a.Host, "%25"); ok && isURL {
			a.Host = ip + "%" + zone // RFC 6874
		}
		ip, err := netip.ParseAddr(a.Host)
		if err != nil || (ip.Zone() != "" && !isHostName(strings.ToLower(ip.Zone()))) {
			return Address{}, fmt.Errorf("sshconn: address %q: %q is not an IPv6 address", rest, a.Host)
		}
		a.Host = ip.String()
	} else if a.Host = strings.ToLower(a.Host); !isHostName(a.Host) {
		return Address{}, fmt.Errorf("sshconn: address %q: %q is not a host name, want letters, digits, dots, dashes and underscores", rest, a.Host)
	}
	if port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || strings.Trim(port, "0123456789") != "" {
			return Address{}, fmt.Errorf("sshconn: address %q: want a port from 1 to 65535", rest)
		}
		a.Port = int(n)
	}
	return a, nil
}

func isHostName(s string) bool {
	if s == "" || len(s) > 253 || s[0] == '-' || s[0] == '.' {
		return false
	}
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '.', r == '-', r == '_':
		default:
			return false
		}
	}
	return true
}
