package callsite

const framePointers = true

func returnAddress() uintptr
