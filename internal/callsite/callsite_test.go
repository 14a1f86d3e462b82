package callsite

import (
	"runtime"
	"testing"
)

//go:noinline
func whoCalls() uintptr { return Caller() }

func TestTheCallerIsTheLineOfTheCall(t *testing.T) {
	pc := whoCalls()
	_, wantFile, line, _ := runtime.Caller(0)
	file, got := Describe(pc)
	if file != wantFile || got != line-1 {
		t.Fatalf("got %s:%d, want %s:%d", file, got, wantFile, line-1)
	}
}

func TestTheSlowWayGivesTheSame(t *testing.T) {
	was := fast
	defer func() { fast = was }()
	fast = false
	pc := whoCalls()
	_, _, line, _ := runtime.Caller(0)
	if _, got := Describe(pc); got != line-1 {
		t.Fatalf("got line %d, want %d", got, line-1)
	}
}

func TestAmd64ReadsTheFrame(t *testing.T) {
	if runtime.GOARCH == "amd64" && !fast {
		t.Error("the return address on the stack disagrees with runtime.Callers")
	}
}

func TestNoProgramCounterIsUnknown(t *testing.T) {
	if file, line := Describe(0); file != "unknown" || line != 0 {
		t.Errorf("got %s:%d", file, line)
	}
}

func BenchmarkCaller(b *testing.B) {
	for b.Loop() {
		whoCalls()
	}
}
