package provider

import (
	"fmt"
	"strconv"
	"strings"
)

// Mark is what a backend stores with each instance it makes, so that a later run recognises it.
type Mark struct {
	// Owner is the name of the pool. Whatever carries another owner is not ours and is never touched.
	Owner string
	// Proxy is the name of the proxy that the instance stands for.
	Proxy string
	// Generation counts the instances of one proxy upwards from 1.
	Generation int64
	// HashVersion says how Hash was made. Hashes of different versions are never compared.
	HashVersion int
	// Hash is the spec's hash. See [Spec.Hash].
	Hash string
}

const markPrefix = "egress/1"

// String returns the mark in the one-line form that [ParseMark] reads, for backends that have a single
// text field to keep it in. It holds no secret.
func (m Mark) String() string {
	return fmt.Sprintf("%s owner=%s proxy=%s generation=%d hash=%d:%s",
		markPrefix, m.Owner, m.Proxy, m.Generation, m.HashVersion, m.Hash)
}

// ParseMark reads what [Mark.String] wrote. The line may stand among others and may have blanks around it.
// It reports false when there is no mark or more than one, or when it is damaged: such an instance is not
// ours.
func ParseMark(text string) (Mark, bool) {
	var found Mark
	n := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != markPrefix {
			continue
		}
		m, ok := parseMarkFields(fields[1:])
		if !ok {
			return Mark{}, false
		}
		found = m
		n++
	}
	return found, n == 1
}

func parseMarkFields(fields []string) (Mark, bool) {
	if len(fields) != 4 {
		return Mark{}, false
	}
	var values [4]string
	for i, key := range []string{"owner=", "proxy=", "generation=", "hash="} {
		v, ok := strings.CutPrefix(fields[i], key)
		if !ok || v == "" {
			return Mark{}, false
		}
		values[i] = v
	}
	generation, err := strconv.ParseInt(values[2], 10, 64)
	if err != nil || generation < 1 {
		return Mark{}, false
	}
	version, hash, ok := strings.Cut(values[3], ":")
	if !ok || hash == "" {
		return Mark{}, false
	}
	v, err := strconv.Atoi(version)
	if err != nil || v < 1 {
		return Mark{}, false
	}
	return Mark{Owner: values[0], Proxy: values[1], Generation: generation, HashVersion: v, Hash: hash}, true
}

// InstanceName returns the name of generation g of a proxy: owner, proxy and generation joined by double
// hyphens. Owner and proxy hold no double hyphen themselves (see [CheckName]), so two different instances
// never share a name.
func InstanceName(owner, proxy string, generation int64) string {
	return owner + "--" + proxy + "--" + strconv.FormatInt(generation, 10)
}

// MaxNames is the most bytes that an owner's and a proxy's name may have together: a DNS label's 63 (RFC
// 1035) less two separators and a generation of nine digits.
const MaxNames = 50

// CheckName reports whether name can be an owner's or a proxy's: a lower-case DNS label that starts with a
// letter, ends with a letter or digit and has no double hyphen. That is the narrowest rule among the
// backends (Google's instance names). The error names what is wrong, without a package prefix.
func CheckName(name string) error {
	if name == "" {
		return fmt.Errorf("is empty, want a DNS label such as crawl-01")
	}
	if len(name) > MaxNames {
		return fmt.Errorf("%q has %d characters, want at most %d", name, len(name), MaxNames)
	}
	for i := range len(name) {
		c := name[i]
		if c >= 'a' && c <= 'z' || i > 0 && (c >= '0' && c <= '9' || c == '-') {
			continue
		}
		return fmt.Errorf("%q is no DNS label, want lower-case letters, digits and hyphens, a letter first", name)
	}
	if name[len(name)-1] == '-' {
		return fmt.Errorf("%q ends with a hyphen, want a letter or digit", name)
	}
	if strings.Contains(name, "--") {
		return fmt.Errorf("%q has a double hyphen, which separates the parts of an instance's name", name)
	}
	return nil
}
