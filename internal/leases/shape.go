package leases

import (
	"maps"
	"slices"
)

// label is one key and value of a selector.
type label struct{ key, value string }

// shape is one set of selecting labels, with the entries that match it in buckets by load. All requests with
// the same labels share a shape, and wait in its queue.
type shape struct {
	labels  map[string]string
	name    string // key in table.multi; empty in table.single and for table.all
	size    int    // entries that match, fit or not
	used    uint64 // table.seq at the last use
	buckets []bucket
	lowest  int // no bucket below it holds anything
	queue   waiterList
}

// bucket is a list of the slots with one load. The head is the one that has waited longest, so ties rotate.
type bucket struct{ head, tail *slot }

// slot is an entry's place in one shape.
type slot struct {
	entry      *Entry
	shape      *shape
	prev, next *slot
	load       int // the bucket it is in while entry.roomy
}

func (s *shape) insert(x *slot, load int) {
	for load >= len(s.buckets) {
		s.buckets = append(s.buckets, bucket{})
	}
	b := &s.buckets[load]
	x.load = load
	x.prev = b.tail
	x.next = nil
	if b.tail != nil {
		b.tail.next = x
	} else {
		b.head = x
	}
	b.tail = x
	if load < s.lowest {
		s.lowest = load
	}
}

func (s *shape) remove(x *slot) {
	b := &s.buckets[x.load]
	if x.prev != nil {
		x.prev.next = x.next
	} else {
		b.head = x.next
	}
	if x.next != nil {
		x.next.prev = x.prev
	} else {
		b.tail = x.prev
	}
	x.prev, x.next = nil, nil
}

// first returns the least loaded entry with room, or nil.
func (s *shape) first() *Entry {
	for ; s.lowest < len(s.buckets); s.lowest++ {
		if x := s.buckets[s.lowest].head; x != nil {
			return x.entry
		}
	}
	return nil
}

// firstThat returns the least loaded entry with room that ok accepts, or nil.
func (s *shape) firstThat(ok func(*Entry) bool) *Entry {
	if s.first() == nil {
		return nil
	}
	for i := s.lowest; i < len(s.buckets); i++ {
		for x := s.buckets[i].head; x != nil; x = x.next {
			if ok(x.entry) {
				return x.entry
			}
		}
	}
	return nil
}

func (s *shape) matches(labels map[string]string) bool {
	for k, v := range s.labels {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// maxShapes is how many shapes are kept. Each costs every entry that matches it a slot, and each lease a move in
// it; a crawler has a handful. Above the number those longest unused are dropped.
const maxShapes = 64

// shapeLocked returns the shape for labels. Table.mu must be held.
func (t *Table) shapeLocked(labels map[string]string) *shape {
	if len(labels) == 0 {
		return t.all
	}
	t.seq++
	if len(labels) == 1 {
		for k, v := range labels {
			s := t.single[label{k, v}]
			if s == nil {
				s = t.newShapeLocked(labels)
				t.single[label{k, v}] = s
			}
			s.used = t.seq
			return s
		}
	}
	var space [256]byte
	name := appendSelector(space[:0], labels)
	s := t.multi[string(name)]
	if s == nil {
		s = t.newShapeLocked(labels)
		s.name = string(name)
		t.multi[s.name] = s
	}
	s.used = t.seq
	return s
}

// appendSelector appends a text that is the same for equal labels only.
func appendSelector(b []byte, labels map[string]string) []byte {
	var space [8]string
	keys := space[:0]
	for k := range labels {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		b = appendText(appendText(b, k), labels[k])
	}
	return b
}

func appendText(b []byte, s string) []byte {
	n := len(s)
	b = append(b, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	return append(b, s...)
}

func (t *Table) newShapeLocked(labels map[string]string) *shape {
	if len(t.single)+len(t.multi) >= maxShapes {
		t.dropOldestShapeLocked()
	}
	s := &shape{labels: maps.Clone(labels)}
	for _, e := range t.entries {
		t.joinLocked(e, s)
	}
	return s
}

// dropOldestShapeLocked drops the shape that is longest unused, if there is one that nobody waits in.
func (t *Table) dropOldestShapeLocked() {
	var oldest *shape
	for _, s := range t.shapesLocked() {
		if s.queue.head == nil && (oldest == nil || s.used < oldest.used) {
			oldest = s
		}
	}
	if oldest == nil {
		return
	}
	if oldest.name != "" {
		delete(t.multi, oldest.name)
	} else {
		for k, v := range oldest.labels {
			delete(t.single, label{k, v})
		}
	}
	for _, e := range t.entries {
		for i, x := range e.slots {
			if x.shape == oldest {
				e.slots = slices.Delete(e.slots, i, i+1)
				break
			}
		}
	}
}

// shapesLocked returns all shapes but table.all.
func (t *Table) shapesLocked() []*shape {
	all := make([]*shape, 0, len(t.single)+len(t.multi))
	for _, s := range t.single {
		all = append(all, s)
	}
	for _, s := range t.multi {
		all = append(all, s)
	}
	return all
}

func (t *Table) joinLocked(e *Entry, s *shape) {
	if !s.matches(e.member.Labels) {
		return
	}
	x := &slot{entry: e, shape: s}
	e.slots = append(e.slots, x)
	s.size++
	if e.roomy {
		s.insert(x, e.load)
	}
}

func (t *Table) joinShapesLocked(e *Entry) {
	for _, s := range t.shapesLocked() {
		t.joinLocked(e, s)
	}
}

// leaveShapesLocked takes e out of every shape but table.all.
func (t *Table) leaveShapesLocked(e *Entry) {
	for _, x := range e.slots[1:] {
		if e.roomy {
			x.shape.remove(x)
		}
		x.shape.size--
	}
	clear(e.slots[1:])
	e.slots = e.slots[:1]
}

// placeLocked puts e into the buckets of its load, or takes it out of them when it may not be leased.
func (t *Table) placeLocked(e *Entry) {
	room := e.fit && e.load < e.max
	for _, x := range e.slots {
		if e.roomy {
			x.shape.remove(x)
		}
		if room {
			x.shape.insert(x, e.load)
		}
	}
	e.roomy = room
}
