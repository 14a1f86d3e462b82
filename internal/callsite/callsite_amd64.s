#include "textflag.h"

// func returnAddress() uintptr
//
// BP is the frame pointer of the Go function that calls this one, since this one has no frame. (BP) is that of its
// caller, and the word above a saved frame pointer is a return address.
TEXT ·returnAddress(SB), NOSPLIT|NOFRAME, $0-8
	MOVQ (BP), AX
	MOVQ 8(AX), AX
	MOVQ AX, ret+0(FP)
	RET
