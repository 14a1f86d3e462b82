package leases

// maxBindings is how many sticky keys are remembered. The one longest unused is forgotten first; its next
// request is bound anew, which its lease reports as not moved, because nobody remembers.
const maxBindings = 100_000

// bindings remembers which entry each sticky key uses, with a list from the key used last to the key longest
// unused.
type bindings struct {
	byKey map[string]*binding
	ring  binding // ring.next is the key used last
}

type binding struct {
	key        string
	entry      *Entry // nil when the entry is gone: the next use moves
	prev, next *binding
}

func (b *bindings) init() {
	b.byKey = map[string]*binding{}
	b.ring.prev, b.ring.next = &b.ring, &b.ring
}

func (b *bindings) unlink(x *binding) {
	x.prev.next = x.next
	x.next.prev = x.prev
}

func (b *bindings) front(x *binding) {
	x.prev, x.next = &b.ring, b.ring.next
	x.prev.next, x.next.prev = x, x
}

// find returns the binding of key, or nil.
func (b *bindings) find(key string) *binding { return b.byKey[key] }

// bind binds key to e and reports whether it was bound to another entry before.
func (b *bindings) bind(key string, e *Entry) (moved bool) {
	x := b.byKey[key]
	if x == nil {
		if len(b.byKey) >= maxBindings {
			old := b.ring.prev
			b.unlink(old)
			delete(b.byKey, old.key)
		}
		x = &binding{key: key, entry: e}
		b.byKey[key] = x
		b.front(x)
		return false
	}
	if b.ring.next != x {
		b.unlink(x)
		b.front(x)
	}
	moved = x.entry != e
	x.entry = e
	return moved
}

// forget lets go of an entry that is gone. Its keys are remembered, so that their next leases say that they moved.
func (b *bindings) forget(e *Entry) {
	for _, x := range b.byKey {
		if x.entry == e {
			x.entry = nil
		}
	}
}

func (b *bindings) empty() bool { return len(b.byKey) == 0 }
