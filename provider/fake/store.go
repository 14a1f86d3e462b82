package fake

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// Store holds the instances of a backend, apart from the Provider that works on them, so that a test can throw a
// Provider or a whole process away and look what its successor finds. It is safe for concurrent use.
type Store struct {
	// dir is where each row is a file; empty for a store in memory.
	dir string

	// mu guards the fields below.
	mu      sync.Mutex
	all     map[string]row
	address int
}

// NewStore returns an empty store in memory.
func NewStore() *Store { return &Store{all: map[string]row{}} }

// Dir returns a store that keeps every instance as a file in dir, which must exist. What one process has written
// another one sees, one at a time.
func Dir(dir string) *Store { return &Store{dir: dir, all: map[string]row{}} }

// row is an instance as it really is.
type row struct {
	ID       string
	Name     string
	Mark     provider.Mark
	Host     string
	Address  string
	Number   int // of its address
	Created  time.Time
	Half     bool          // Create has not finished
	Boots    time.Duration // from Created
	Killed   bool          // runs, but its proxy does not answer
	Stopped  time.Time     // zero while it is switched on
	Removing time.Time     // zero while nobody has asked for its removal
	Gone     time.Time     // zero while it is there
}

// visible reports whether the row is there at t.
func (r row) visible(t time.Time) bool {
	return !t.Before(r.Created) && (r.Gone.IsZero() || t.Before(r.Gone))
}

// instance describes the row at t.
func (r row) instance(t time.Time) provider.Instance {
	x := provider.Instance{ID: r.ID, Name: r.Name, Mark: r.Mark, Host: r.Host, Created: r.Created, State: provider.StateRunning}
	switch {
	case !r.Removing.IsZero() && !t.Before(r.Removing):
		x.State = provider.StateDeleting
	case r.Half:
		x.State = provider.StateFailed
		x.Message = "its create was never finished"
	case !r.Stopped.IsZero() && !t.Before(r.Stopped):
		x.State = provider.StateStopped
	case t.Before(r.Created.Add(r.Boots)):
		x.State = provider.StatePending
	default:
		x.Address = r.Address
	}
	return x
}

// keepGone is how long rows that are gone are remembered, for lists that lag.
const keepGone = time.Hour

// loadLocked reads the rows of a directory.
func (s *Store) loadLocked() error {
	if s.dir == "" {
		return nil
	}
	clear(s.all)
	files, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var r row
		if err == nil {
			err = json.Unmarshal(text, &r)
		}
		if err != nil {
			return fmt.Errorf("fake: %s: %w", file, err)
		}
		s.all[r.ID] = r
	}
	return nil
}

// putLocked keeps a row.
func (s *Store) putLocked(r row) error {
	s.all[r.ID] = r
	if s.dir == "" {
		return nil
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file := s.file(r.ID)
	if err := os.WriteFile(file+".tmp", text, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".tmp", file)
}

func (s *Store) file(id string) string {
	return filepath.Join(s.dir, strings.ReplaceAll(id, "/", "_")+".json")
}

// rows returns what is there at t, sorted by creation and id.
func (s *Store) rows(t time.Time) []row {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	var all []row
	for _, r := range s.all {
		if r.visible(t) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b row) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// size returns how many rows are there at t.
func (s *Store) size(t time.Time) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	n := 0
	for _, r := range s.all {
		if r.visible(t) {
			n++
		}
	}
	return n
}

// alive reports whether an instance with that address runs at t and was not killed.
func (s *Store) alive(address string, t time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	for _, r := range s.all {
		if r.Address == address && r.visible(t) && !r.Killed && r.instance(t).State == provider.StateRunning {
			return true
		}
	}
	return false
}

func (s *Store) mustLoadLocked() {
	if err := s.loadLocked(); err != nil {
		panic(err)
	}
}

func (s *Store) row(id string, t time.Time) (row, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	r, ok := s.all[id]
	return r, ok && r.visible(t)
}

// reserve begins a create: it finds room and writes a half-made row, or finds the half-made row of an earlier try.
func (s *Store) reserve(req provider.CreateRequest, c Config, down map[string]bool) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	now := time.Now()
	load := map[string]int{}
	live := 0
	for id, r := range s.all {
		if !r.Gone.IsZero() && now.Sub(r.Gone) > keepGone {
			delete(s.all, id)
			if s.dir != "" {
				os.Remove(s.file(id))
			}
		}
		if !r.visible(now) {
			continue
		}
		if r.Name == req.Name {
			same := r.Mark.Owner == req.Mark.Owner && r.Mark.Proxy == req.Mark.Proxy && r.Mark.Generation == req.Mark.Generation
			switch {
			case !same:
				return "", fmt.Errorf("%w: the name is taken by an instance that is not ours", provider.ErrPermanent)
			case !r.Half || !r.Removing.IsZero():
				return "", provider.ErrAlreadyExists
			}
			r.Mark = req.Mark
			return r.ID, s.putLocked(r)
		}
		live++
		load[r.Host]++
	}
	if c.Capacity > 0 && live >= c.Capacity {
		return "", fmt.Errorf("%w: %d of %d instances are there", provider.ErrNoCapacity, live, c.Capacity)
	}
	host := ""
	for _, h := range c.Hosts {
		if down[h] || req.Spec.Placement.Host != "" && h != req.Spec.Placement.Host {
			continue
		}
		if host == "" || load[h] < load[host] {
			host = h
		}
	}
	if host == "" {
		return "", fmt.Errorf("%w: no allowed host answers", provider.ErrUnavailable)
	}
	r := row{
		ID: req.Name + "." + strings.ToLower(rand.Text()[:8]), Name: req.Name, Mark: req.Mark, Host: host,
		Created: now, Half: true,
	}
	s.address++
	for _, r := range s.all {
		s.address = max(s.address, r.Number+1) // a store in a directory outlives its counter
	}
	if len(c.Addresses) > 0 {
		r.Address = c.Addresses[(s.address-1)%len(c.Addresses)]
	} else {
		r.Address = fmt.Sprintf("10.%d.%d.%d", s.address>>16&0xff, s.address>>8&0xff, s.address&0xff)
	}
	r.Number = s.address
	return r.ID, s.putLocked(r)
}

// finish ends a create.
func (s *Store) finish(id string, boots time.Duration) (row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	r, ok := s.all[id]
	if !ok || !r.visible(time.Now()) {
		return row{}, fmt.Errorf("%w: it was removed while it was being made", provider.ErrUnavailable)
	}
	r.Half = false
	r.Boots = time.Since(r.Created) + boots
	return r, s.putLocked(r)
}

// remove begins a delete.
func (s *Store) remove(id string, wait time.Duration, stuck bool) error {
	return s.change(id, func(r *row) {
		now := time.Now()
		if r.Removing.IsZero() {
			r.Removing = now
			r.Gone = now.Add(wait)
			if stuck {
				r.Gone = time.Time{}
			}
		}
	})
}

// change changes one row that is there.
func (s *Store) change(id string, f func(*row)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mustLoadLocked()
	r, ok := s.all[id]
	if !ok || !r.visible(time.Now()) {
		return provider.ErrNotFound
	}
	f(&r)
	return s.putLocked(r)
}

// Instances returns everything that is really there now, whoever owns it.
func (s *Store) Instances() []provider.Instance {
	now := time.Now()
	var all []provider.Instance
	for _, r := range s.rows(now) {
		all = append(all, r.instance(now))
	}
	return all
}
