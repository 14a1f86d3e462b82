// Package callsite finds out who called, fast enough to do it for every lease.
//
// runtime.Callers costs more than granting a lease. Where Go keeps frame pointers the return address is read from
// the stack instead; elsewhere, and if that should ever give another answer, runtime.Callers is used.
package callsite

import "runtime"

// Caller returns the program counter, for runtime.CallersFrames, of the call to the function that calls Caller.
// That function must not be inlined.
//
//go:noinline
func Caller() uintptr {
	if fast {
		return returnAddress()
	}
	return slow(3)
}

func slow(skip int) uintptr {
	var pc [1]uintptr
	runtime.Callers(skip+1, pc[:])
	return pc[0]
}

// Describe returns file:line of a program counter that Caller returned, or unknown.
func Describe(pc uintptr) (file string, line int) {
	if pc == 0 {
		return "unknown", 0
	}
	frame, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	if frame.File == "" {
		return "unknown", 0
	}
	return frame.File, frame.Line
}

// fast is whether returnAddress agrees with runtime.Callers in this build.
var fast = agree()

//go:noinline
func agree() bool {
	if !framePointers {
		return false
	}
	a, b := both()
	return a == b && a != 0
}

//go:noinline
func both() (uintptr, uintptr) { return viaFrame(), slow(2) }

//go:noinline
func viaFrame() uintptr { return returnAddress() }
