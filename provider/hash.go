package provider

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"hash"
	"maps"
	"slices"
)

// HashVersion is the version of the encoding that [Spec.Hash] hashes. It is raised whenever the same spec
// would hash differently, which includes a new field whose zero value is written, another order, and
// another default that is filled in before hashing.
const HashVersion = 1

// hashEncoding gives 52 lower-case characters, which fit in a Google label's 63 and in a DNS label.
var hashEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// Hash returns the canonical hash of all fields of s in 52 lower-case letters and digits. Nil and empty
// slices and maps hash alike, and the order of maps does not count.
//
// With an empty key it is a SHA-256; with a key it is an HMAC-SHA-256, from which nobody without the key can
// confirm a guess at secret content. The same spec must be hashed with the same key for ever.
func (s Spec) Hash(key []byte) string {
	var h hash.Hash
	if len(key) == 0 {
		h = sha256.New()
	} else {
		h = hmac.New(sha256.New, key)
	}
	w := hashWriter{h}
	w.text("egress spec")
	w.number(HashVersion)
	w.text(s.Provider)
	w.text(s.Image)
	w.number(s.CPUs)
	w.number(s.MemoryMiB)
	w.number(s.DiskGiB)
	w.text(s.Placement.Host)
	w.pairs(s.Placement.Labels)
	w.text(s.Placement.Group)
	w.bytes(s.CloudInit.UserData)
	w.bytes(s.CloudInit.VendorData)
	w.flag(s.CloudInit.InstallGuestAgent)
	w.flag(s.CloudInit.Network != nil)
	if n := s.CloudInit.Network; n != nil {
		list(w, n.Addresses)
		list(w, n.Gateways)
		list(w, n.Nameservers)
		w.number(len(n.SearchDomains))
		for _, d := range n.SearchDomains {
			w.text(d)
		}
	}
	w.number(s.Port)
	w.pairs(s.Options)
	return hashEncoding.EncodeToString(h.Sum(nil))
}

// hashWriter writes values with their lengths before them, so that no two different specs give the same
// bytes.
type hashWriter struct{ h hash.Hash }

func (w hashWriter) number(n int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	w.h.Write(b[:])
}

func (w hashWriter) bytes(b []byte) {
	w.number(len(b))
	w.h.Write(b)
}

func (w hashWriter) text(s string) { w.bytes([]byte(s)) }

func (w hashWriter) flag(b bool) {
	if b {
		w.number(1)
	} else {
		w.number(0)
	}
}

func (w hashWriter) pairs(m map[string]string) {
	w.number(len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		w.text(k)
		w.text(m[k])
	}
}

func list[T fmt.Stringer](w hashWriter, items []T) {
	w.number(len(items))
	for _, item := range items {
		w.text(item.String())
	}
}

func cloudInitSummary(c CloudInit) string {
	return fmt.Sprintf("cloud-init{user-data: %d bytes, vendor-data: %d bytes, guest agent: %t, static address: %t}",
		len(c.UserData), len(c.VendorData), c.InstallGuestAgent, c.Network != nil)
}
