package gcp

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestMessagesKeepNamesAndLoseValues(t *testing.T) {
	for message, want := range map[string]string{
		"The resource 'projects/p/zones/z/instances/i' was not found":               "The resource 'projects/p/zones/z/instances/i' was not found",
		"Invalid value for field 'resource.metadata.items[0].value': 'a: secret'":   "Invalid value for field 'resource.metadata.items[0].value': [redacted]",
		"Invalid value for field 'resource.metadata.items[0].value': \"a: secret\"": "Invalid value for field 'resource.metadata.items[0].value': [redacted]",
		"Metadata: secret":                      "Metadata: [redacted]",
		"Value 'a secret' is too long":          "Value [redacted] is too long",
		"it is wrong\nsecret":                   "it is wrong [redacted]",
		"Quota 'CPUS' exceeded.  Limit: 8.0 in": "Quota 'CPUS' exceeded.  Limit: 8.0 in",
	} {
		if got := scrub(message); got != want {
			t.Errorf("%q becomes %q, want %q", message, got, want)
		}
	}
}

func FuzzScrub(f *testing.F) {
	f.Add("Invalid value for field 'resource.metadata.items[0].value': ", "#cloud-config\n")
	f.Add("İmetadata", ":")
	f.Fuzz(func(t *testing.T, before, after string) {
		const secret = "Planted Secret"
		got := scrub(before + " metadata: " + after + secret)
		if strings.Contains(got, secret) {
			t.Errorf("%q", got)
		}
		if utf8.ValidString(before) && utf8.ValidString(after) && !utf8.ValidString(got) {
			t.Errorf("%q is no UTF-8", got)
		}
	})
}
