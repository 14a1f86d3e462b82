package egress

import (
	"testing"
	"unsafe"
)

// The runtime adds a word to what is above 512 bytes and holds pointers, and rounds up to 640, 704, 768 and 896.
func TestAProxyFitsItsSizeClasses(t *testing.T) {
	if n := unsafe.Sizeof(member{}) + 8; n > 768 {
		t.Errorf("a member has %d bytes, want at most 768: the next size is 896", n)
	}
	if n := unsafe.Sizeof(instance{}) + 8; n > 640 {
		t.Errorf("an instance has %d bytes, want at most 640: the next size is 704", n)
	}
}
