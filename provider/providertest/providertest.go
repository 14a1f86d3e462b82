// Package providertest is the conformance suite that every backend runs in its own tests: what the pool relies on,
// one case a sentence.
//
//	func TestConformance(t *testing.T) {
//		providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness { … }})
//	}
package providertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
)

// Config says what is tested.
type Config struct {
	// New returns a fresh backend for one case, and cleans up after it with t.Cleanup. Required.
	New func(t *testing.T) Harness
	// Patience bounds how long the suite waits for what the backend promises in the end. Defaults to 10 s.
	Patience time.Duration
	// Parallel is how many instances the suite makes at once. Defaults to 8.
	Parallel int
	// Live says that skipped cases are failures when EGRESS_REQUIRE_LIVE=1 is set: the backend is the
	// real thing and every hook is expected. Defaults to false.
	Live bool
	// Skip are the names of cases that can't be shown, with the reason, which is printed. Defaults to
	// none.
	Skip map[string]string
}

// Harness is one backend under test.
type Harness struct {
	// Provider is the backend. Required.
	Provider provider.Provider
	// Owner is the owner that the suite uses. Defaults to "conform".
	Owner string
	// Spec is a valid spec; it should make the smallest instance that exists. Required.
	Spec provider.Spec
	// Invalid is a spec that Validate refuses for another reason than its options. Defaults to none,
	// which skips a case.
	Invalid *provider.Spec
	// AddForeign makes something without a mark under the given name, as if an operator had made it by
	// hand, and returns its id. Defaults to none, which skips cases.
	AddForeign func(t *testing.T, name string) (id string)
	// Exists reports whether id is really there, without asking Provider. Defaults to none, which skips
	// cases.
	Exists func(t *testing.T, id string) bool
	// LoseAnswer makes the next create succeed and its answer get lost. Defaults to none, which skips a
	// case.
	LoseAnswer func(t *testing.T)
	// LeaveHalf makes the next create stop half way and leave something behind. Defaults to none, which
	// skips a case.
	LeaveHalf func(t *testing.T)
	// Break makes the backend unreachable, or, with a host, one host of it; the returned function mends
	// it. Hosts are those that Check names. Defaults to none, which skips cases.
	Break func(t *testing.T, host string) (mend func())
	// NoBoot says that what Create makes never runs, so that no address is waited for. Defaults to false.
	NoBoot bool
	// Deny makes the backend refuse the credentials until the returned function is called. Defaults to
	// none, which skips a case.
	Deny func(t *testing.T) (allow func())
	// Fill leaves no room for another instance until the returned function is called. Defaults to none,
	// which skips a case.
	Fill func(t *testing.T) (empty func())
}

// Case is one requirement.
type Case struct {
	// Name is the subtest's.
	Name string
	// Requirement is the sentence that a backend fails.
	Requirement string
	run         func(*suite)
}

// Run runs every case as a subtest, one after the other, each with a backend of its own from config.New. A case that the
// harness can't show is skipped and says what is missing; one that fails prints the requirement. It deletes what it made.
func Run(t *testing.T, config Config) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			if why, ok := config.Skip[c.Name]; ok {
				t.Skip(why)
			}
			s := &suite{T: t, config: config, harness: config.New(t), requirement: c.Requirement}
			s.fill()
			c.run(s)
		})
	}
}

// suite runs one case.
type suite struct {
	*testing.T
	config      Config
	harness     Harness
	requirement string
	made        []string // ids to delete in the end
}

func (s *suite) fill() {
	if s.harness.Owner == "" {
		s.harness.Owner = "conform"
	}
	if s.config.Patience == 0 {
		s.config.Patience = 10 * time.Second
	}
	if s.config.Parallel == 0 {
		s.config.Parallel = 8
	}
	s.Cleanup(s.cleanUp)
}

// fail says which requirement is not met, and how.
func (s *suite) fail(format string, args ...any) {
	s.Helper()
	s.Fatalf("requirement: %s\ngot: %s", s.requirement, fmt.Sprintf(format, args...))
}

// needs skips the case when the harness can't show what it takes.
func (s *suite) needs(have bool, what string) {
	s.Helper()
	if have {
		return
	}
	if s.config.Live && os.Getenv("EGRESS_REQUIRE_LIVE") == "1" {
		s.Fatalf("the harness of a live backend has no %s", what)
	}
	s.Skipf("the harness has no %s", what)
}

func (s *suite) provider() provider.Provider { return s.harness.Provider }

// context bounds one call.
func (s *suite) context() context.Context {
	ctx, cancel := context.WithTimeout(s.Context(), 6*s.config.Patience)
	s.Cleanup(cancel)
	return ctx
}

// request asks for generation g of a proxy.
func (s *suite) request(proxy string, g int64) provider.CreateRequest {
	spec := s.harness.Spec
	return provider.CreateRequest{
		Name: provider.InstanceName(s.harness.Owner, proxy, g),
		Mark: provider.Mark{Owner: s.harness.Owner, Proxy: proxy, Generation: g, HashVersion: provider.HashVersion, Hash: spec.Hash(nil)},
		Spec: spec,
	}
}

// create must succeed. A backend that is short of something for a moment is asked again.
func (s *suite) create(req provider.CreateRequest) provider.Instance {
	s.Helper()
	var made provider.Instance
	s.eventually("create of "+req.Name, func() (bool, error) {
		var err error
		made, err = s.provider().Create(s.context(), req)
		if err != nil {
			s.sentinel("Create", err)
		}
		return err == nil, err
	})
	s.made = append(s.made, made.ID)
	return made
}

// eventually calls f until it reports true, or patience is over.
func (s *suite) eventually(what string, f func() (bool, error)) {
	s.Helper()
	deadline := time.Now().Add(s.config.Patience)
	for {
		ok, err := f()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.fail("%s did not come about within %s: %v", what, s.config.Patience, err)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// list lists everything of the owner, completely.
func (s *suite) list() []provider.Instance {
	s.Helper()
	all, err := s.provider().List(s.context(), s.harness.Owner)
	if err != nil {
		s.sentinel("List", err)
		s.fail("List: %v", err)
	}
	seen := map[string]bool{}
	for _, x := range all {
		if x.ID == "" || seen[x.ID] {
			s.fail("List has an empty or repeated id %q", x.ID)
		}
		seen[x.ID] = true
		if x.Mark.Owner != s.harness.Owner {
			s.fail("List of %s has an instance of %q", s.harness.Owner, x.Mark.Owner)
		}
	}
	return all
}

func find(all []provider.Instance, name string) (provider.Instance, bool) {
	i := slices.IndexFunc(all, func(x provider.Instance) bool { return x.Name == name })
	if i < 0 {
		return provider.Instance{}, false
	}
	return all[i], true
}

// listed waits until the list has the instance.
func (s *suite) listed(name string) provider.Instance {
	s.Helper()
	var found provider.Instance
	s.eventually(name+" in the list", func() (bool, error) {
		var ok bool
		found, ok = find(s.list(), name)
		return ok, nil
	})
	return found
}

// exactly waits until the list has n instances.
func (s *suite) exactly(n int) {
	s.Helper()
	s.eventually(fmt.Sprintf("a list of %d instances", n), func() (bool, error) {
		got := len(s.list())
		return got == n, fmt.Errorf("%d are listed", got)
	})
	// What a list that lags still hides would show up later.
	for range 10 {
		<-time.After(20 * time.Millisecond)
		if got := len(s.list()); got != n {
			s.fail("%d instances a moment later, want %d", got, n)
		}
	}
}

// gone deletes an instance and waits until that is sure.
func (s *suite) gone(id string) {
	s.Helper()
	s.eventually("removal of "+id, func() (bool, error) {
		err := s.provider().Delete(s.context(), id)
		if err != nil && !errors.Is(err, provider.ErrNotFound) {
			s.sentinel("Delete", err)
		}
		if errors.Is(err, provider.ErrNotFound) {
			return true, nil
		}
		_, err = s.provider().Get(s.context(), id)
		return errors.Is(err, provider.ErrNotFound), err
	})
}

// sentinel checks the form of an error.
func (s *suite) sentinel(op string, err error) {
	s.Helper()
	if provider.Kind(err) == nil {
		s.fail("the error of %s matches no sentinel: %v", op, err)
	}
	secret := string(s.harness.Spec.CloudInit.UserData)
	if len(secret) > 20 && strings.Contains(err.Error(), secret) {
		s.fail("the error of %s shows the user data", op)
	}
}

// cleanUp deletes what the case made.
func (s *suite) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), 6*s.config.Patience)
	defer cancel()
	// A case that failed may have made what it does not know of.
	if left, err := s.provider().List(ctx, s.harness.Owner); err == nil {
		for _, x := range left {
			s.made = append(s.made, x.ID)
		}
	}
	for _, id := range s.made {
		for ctx.Err() == nil {
			if err := s.provider().Delete(ctx, id); errors.Is(err, provider.ErrNotFound) || err != nil && !errors.Is(err, provider.ErrUnavailable) {
				break
			}
			if _, err := s.provider().Get(ctx, id); errors.Is(err, provider.ErrNotFound) {
				break
			}
			<-time.After(20 * time.Millisecond)
		}
	}
}

// together runs f n times at once.
func together(n int, f func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { f(i) })
	}
	all.Wait()
}
