package providertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"crawl.example.com/egress/provider"
)

// promptly is how soon a call must return once its context has ended.
const promptly = 3 * time.Second

// Cases returns every requirement, in the order in which they are tested.
func Cases() []Case {
	return []Case{
		{"name", "Name is not empty and never changes", func(s *suite) {
			first := s.provider().Name()
			if again := s.provider().Name(); first == "" || again != first {
				s.fail("%q and then %q", first, again)
			}
		}},
		{"validate", "Validate accepts a good spec and refuses unknown options by name", func(s *suite) {
			if err := s.provider().Validate(s.harness.Spec); err != nil {
				s.fail("the good spec: %v", err)
			}
			bad := s.harness.Spec
			bad.Options = map[string]string{"no-such-option": "x"}
			if err := s.provider().Validate(bad); err == nil || !strings.Contains(err.Error(), "no-such-option") {
				s.fail("an unknown option: %v", err)
			}
		}},
		{"invalid", "Validate refuses what the backend could not make, and Create refuses it for good", func(s *suite) {
			s.needs(s.harness.Invalid != nil, "Invalid spec")
			if err := s.provider().Validate(*s.harness.Invalid); err == nil {
				s.fail("Validate accepts it")
			}
			req := s.request("invalid", 1)
			req.Spec = *s.harness.Invalid
			made, err := s.provider().Create(s.context(), req)
			if err == nil {
				s.made = append(s.made, made.ID)
			}
			if !errors.Is(err, provider.ErrPermanent) {
				s.fail("Create: %v, want ErrPermanent", err)
			}
		}},
		{"create", "what Create made is listed with its name and mark, and Get agrees", func(s *suite) {
			req := s.request("a", 1)
			made := s.create(req)
			if made.ID == "" || made.Name != req.Name || made.Mark != req.Mark {
				s.fail("Create returned %+v", made)
			}
			x := s.listed(req.Name)
			if x.ID != made.ID || x.Mark != req.Mark {
				s.fail("List has %+v, want the id %s and the mark %v", x, made.ID, req.Mark)
			}
			got, err := s.provider().Get(s.context(), made.ID)
			if err != nil || got.ID != made.ID || got.Name != req.Name || got.Mark != req.Mark {
				s.fail("Get: %+v, %v", got, err)
			}
		}},
		{"boot", "an instance runs and has an address in the end, and another one has another", func(s *suite) {
			s.needs(!s.harness.NoBoot, "instances that boot")
			seen := map[string]bool{}
			for _, proxy := range []string{"a", "b"} {
				made := s.create(s.request(proxy, 1))
				s.eventually("an address of "+made.Name, func() (bool, error) {
					x, err := s.provider().Get(s.context(), made.ID)
					if err == nil && x.State == provider.StateRunning && x.Address != "" {
						at := fmt.Sprintf("%s %d", x.Address, x.Port)
						if seen[at] {
							s.fail("two instances at %s", at)
						}
						seen[at] = true
						return true, nil
					}
					return false, err
				})
			}
		}},
		{"create again", "a name that is taken by the same instance is ErrAlreadyExists and makes no second one", func(s *suite) {
			req := s.request("a", 1)
			s.create(req)
			_, err := s.provider().Create(s.context(), req)
			if !errors.Is(err, provider.ErrAlreadyExists) {
				s.fail("the second create: %v", err)
			}
			s.listed(req.Name)
			s.exactly(1)
		}},
		{"create again with another spec", "a name that is taken keeps its mark when the spec has changed", func(s *suite) {
			req := s.request("a", 1)
			s.create(req)
			changed := req
			changed.Mark.Hash = strings.Repeat("b", len(req.Mark.Hash))
			if _, err := s.provider().Create(s.context(), changed); !errors.Is(err, provider.ErrAlreadyExists) {
				s.fail("the create with another hash: %v", err)
			}
			if x := s.listed(req.Name); x.Mark != req.Mark {
				s.fail("the mark is now %v", x.Mark)
			}
		}},
		{"marks", "owner, proxy, generation, hash and hash version come back as they were given", func(s *suite) {
			long := "p" + strings.Repeat("x", provider.MaxNames-len(s.harness.Owner)-1)
			for i, req := range []provider.CreateRequest{s.request("a-1-b", 1), s.request("a-1-b", 2), s.request(long, 123456789)} {
				req.Mark.HashVersion = 7 + i
				s.create(req)
				if x := s.listed(req.Name); x.Mark != req.Mark {
					s.fail("gave %v, got %v", req.Mark, x.Mark)
				}
			}
		}},
		{"lost answer", "a create whose answer was lost is repeated without a second instance", func(s *suite) {
			s.needs(s.harness.LoseAnswer != nil, "LoseAnswer")
			req := s.request("a", 1)
			s.harness.LoseAnswer(s.T)
			_, err := s.provider().Create(s.context(), req)
			if err == nil || errors.Is(err, provider.ErrPermanent) || errors.Is(err, provider.ErrNoCapacity) || errors.Is(err, provider.ErrUnavailable) {
				s.fail("Create: %v, want an error that does not claim that nothing was made", err)
			}
			s.sentinel("Create", err)
			s.eventually("one instance after the second create", func() (bool, error) {
				made, err := s.provider().Create(s.context(), req)
				if err == nil {
					s.made = append(s.made, made.ID)
				}
				return err == nil || errors.Is(err, provider.ErrAlreadyExists), err
			})
			x := s.listed(req.Name)
			s.made = append(s.made, x.ID)
			s.exactly(1)
		}},
		{"half made", "what a create left half made is finished or replaced by the next, or listed so that it can be deleted", func(s *suite) {
			s.needs(s.harness.LeaveHalf != nil, "LeaveHalf")
			req, other := s.request("a", 1), s.request("b", 1)
			s.harness.LeaveHalf(s.T)
			if _, err := s.provider().Create(s.context(), req); err == nil {
				s.fail("the create that was to stop half way succeeded")
			}
			s.create(req)
			s.listed(req.Name)
			s.harness.LeaveHalf(s.T)
			if _, err := s.provider().Create(s.context(), other); err == nil {
				s.fail("the create that was to stop half way succeeded")
			}
			// What stopped the create may keep the backend away for a while.
			s.eventually("a list after that", func() (bool, error) {
				_, err := s.provider().List(s.context(), s.harness.Owner)
				return err == nil, err
			})
			if x, ok := find(s.list(), other.Name); ok {
				if x.State == provider.StateRunning {
					s.fail("what is half made is said to run: %+v", x)
				}
				s.gone(x.ID)
			}
			s.create(other)
			s.exactly(2)
		}},
		{"foreign", "what does not carry the owner is neither listed nor deleted nor taken for ours", func(s *suite) {
			s.needs(s.harness.AddForeign != nil, "AddForeign")
			req := s.request("a", 1)
			id := s.harness.AddForeign(s.T, req.Name)
			if x, ok := find(s.list(), req.Name); ok {
				s.fail("it is listed: %+v", x)
			}
			made, err := s.provider().Create(s.context(), req)
			if err == nil {
				s.made = append(s.made, made.ID)
				if made.ID == id {
					s.fail("Create took it for ours")
				}
			} else if !errors.Is(err, provider.ErrPermanent) {
				s.fail("Create of a name that somebody else holds: %v, want ErrPermanent", err)
			}
			if err := s.provider().Delete(s.context(), id); err == nil || errors.Is(err, provider.ErrNotFound) {
				s.fail("Delete: %v, want a refusal", err)
			}
			s.needs(s.harness.Exists != nil, "Exists")
			if !s.harness.Exists(s.T, id) {
				s.fail("it is gone")
			}
		}},
		{"other owner", "List of one owner holds nothing of another's", func(s *suite) {
			s.create(s.request("a", 1))
			other, err := s.provider().List(s.context(), s.harness.Owner+"2")
			if err != nil || len(other) != 0 {
				s.fail("%v, %v", other, err)
			}
		}},
		{"delete", "an accepted delete ends in ErrNotFound from Get and Delete, and in a list without it", func(s *suite) {
			made := s.create(s.request("a", 1))
			keep := s.create(s.request("b", 1))
			if err := s.provider().Delete(s.context(), made.ID); err != nil {
				s.fail("Delete: %v", err)
			}
			s.gone(made.ID)
			s.eventually("a list without it", func() (bool, error) {
				_, ok := find(s.list(), made.Name)
				return !ok, nil
			})
			if err := s.provider().Delete(s.context(), made.ID); !errors.Is(err, provider.ErrNotFound) {
				s.fail("Delete of what is gone: %v", err)
			}
			if s.harness.Exists != nil && s.harness.Exists(s.T, made.ID) {
				s.fail("it is said to be gone and is still there")
			}
			if x := s.listed(keep.Name); x.ID != keep.ID {
				s.fail("another instance went with it")
			}
		}},
		{"unknown", "an id that was never there is ErrNotFound for Get and Delete", func(s *suite) {
			id := "0000-no-such-instance"
			if _, err := s.provider().Get(s.context(), id); !errors.Is(err, provider.ErrNotFound) {
				s.fail("Get: %v", err)
			}
			if err := s.provider().Delete(s.context(), id); !errors.Is(err, provider.ErrNotFound) {
				s.fail("Delete: %v", err)
			}
		}},
		{"name again", "a name can be used again once its instance is gone, and the new one is not the old one", func(s *suite) {
			req := s.request("a", 1)
			first := s.create(req)
			s.gone(first.ID)
			second := s.create(req)
			s.eventually("the new one, alone in the list", func() (bool, error) {
				all := s.list()
				return len(all) == 1 && all[0].ID == second.ID, nil
			})
		}},
		{"context", "a call whose context has ended returns soon, with a sentinel, and changes nothing", func(s *suite) {
			made := s.create(s.request("a", 1))
			ctx, cancel := context.WithCancel(s.Context())
			cancel()
			begin := time.Now()
			req := s.request("b", 1)
			created, err := s.provider().Create(ctx, req)
			if err == nil {
				s.made = append(s.made, created.ID)
				s.fail("Create succeeded")
			}
			s.sentinel("Create", err)
			if errors.Is(err, provider.ErrPermanent) || errors.Is(err, provider.ErrDenied) {
				s.fail("Create: %v, want an error that is tried again", err)
			}
			if _, err := s.provider().List(ctx, s.harness.Owner); err == nil {
				s.fail("List succeeded")
			}
			if _, err := s.provider().Get(ctx, made.ID); err == nil || errors.Is(err, provider.ErrNotFound) {
				s.fail("Get: %v", err)
			}
			if err := s.provider().Delete(ctx, made.ID); err == nil || errors.Is(err, provider.ErrNotFound) {
				s.fail("Delete: %v", err)
			}
			if took := time.Since(begin); took > 4*promptly {
				s.fail("the four calls took %s", took)
			}
			if x := s.listed(made.Name); x.ID != made.ID || x.State == provider.StateDeleting {
				s.fail("it was deleted: %+v", x)
			}
		}},
		{"parallel", "creates, lists and deletes may run at once, and every instance is its own", func(s *suite) {
			n := s.config.Parallel
			ids := make([]string, n)
			var mu sync.Mutex
			var errs []error
			together(n, func(i int) {
				req := s.request(fmt.Sprintf("p%d", i), 1)
				made, err := s.provider().Create(s.context(), req)
				for tries := 0; err != nil && tries < 5; tries++ {
					<-time.After(100 * time.Millisecond)
					made, err = s.provider().Create(s.context(), req)
				}
				_, listErr := s.provider().List(s.context(), s.harness.Owner)
				mu.Lock()
				defer mu.Unlock()
				ids[i] = made.ID
				if err == nil {
					s.made = append(s.made, made.ID)
				}
				errs = append(errs, err, listErr)
			})
			if err := errors.Join(errs...); err != nil {
				s.fail("%v", err)
			}
			s.eventually("all of them in the list", func() (bool, error) { return len(s.list()) == n, nil })
			addresses := map[string]string{}
			for _, x := range s.list() {
				if other := addresses[x.Address]; x.Address != "" && x.Port == 0 && other != "" {
					s.fail("%s and %s have the address %s", other, x.Name, x.Address)
				}
				addresses[x.Address] = x.Name
			}
			together(n, func(i int) {
				together(2, func(int) { s.provider().Delete(s.context(), ids[i]) })
			})
			for _, id := range ids {
				s.gone(id)
			}
			s.eventually("an empty list", func() (bool, error) { return len(s.list()) == 0, nil })
		}},
		{"one name at once", "creates of one name at once make one instance", func(s *suite) {
			req := s.request("a", 1)
			var mu sync.Mutex
			ids := map[string]bool{}
			var bad error
			together(4, func(int) {
				made, err := s.provider().Create(s.context(), req)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					ids[made.ID] = true
					s.made = append(s.made, made.ID)
				} else if !errors.Is(err, provider.ErrAlreadyExists) && !errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) {
					bad = err
				}
			})
			if bad != nil || len(ids) > 1 {
				s.fail("%d ids, %v", len(ids), bad)
			}
			s.listed(req.Name)
			s.exactly(1)
		}},
		{"no capacity", "a create without room is ErrNoCapacity and leaves nothing behind", func(s *suite) {
			s.needs(s.harness.Fill != nil, "Fill")
			empty := s.harness.Fill(s.T)
			before := len(s.list())
			made, err := s.provider().Create(s.context(), s.request("a", 1))
			if err == nil {
				s.made = append(s.made, made.ID)
			}
			if !errors.Is(err, provider.ErrNoCapacity) {
				s.fail("Create: %v", err)
			}
			if after := len(s.list()); after != before {
				s.fail("%d instances, were %d", after, before)
			}
			empty()
			s.create(s.request("a", 1))
		}},
		{"denied", "refused credentials are ErrDenied everywhere, and nothing is taken for gone", func(s *suite) {
			s.needs(s.harness.Deny != nil, "Deny")
			made := s.create(s.request("a", 1))
			allow := s.harness.Deny(s.T)
			_, createErr := s.provider().Create(s.context(), s.request("b", 1))
			_, listErr := s.provider().List(s.context(), s.harness.Owner)
			_, getErr := s.provider().Get(s.context(), made.ID)
			deleteErr := s.provider().Delete(s.context(), made.ID)
			allow()
			for op, err := range map[string]error{"Create": createErr, "List": listErr, "Get": getErr, "Delete": deleteErr} {
				if !errors.Is(err, provider.ErrDenied) {
					s.fail("%s: %v", op, err)
				}
			}
			s.listed(made.Name)
		}},
		{"unreachable", "a backend that can't be reached is ErrUnavailable or ErrOutcomeUnknown, never ErrNotFound", func(s *suite) {
			s.needs(s.harness.Break != nil, "Break")
			made := s.create(s.request("a", 1))
			mend := s.harness.Break(s.T, "")
			_, getErr := s.provider().Get(s.context(), made.ID)
			deleteErr := s.provider().Delete(s.context(), made.ID)
			all, listErr := s.provider().List(s.context(), s.harness.Owner)
			mend()
			for op, err := range map[string]error{"Get": getErr, "Delete": deleteErr, "List": listErr} {
				if !errors.Is(err, provider.ErrUnavailable) && !errors.Is(err, provider.ErrOutcomeUnknown) {
					s.fail("%s: %v", op, err)
				}
				if errors.Is(err, provider.ErrNotFound) {
					s.fail("%s: %v also says not found", op, err)
				}
			}
			if len(all) > 0 {
				s.fail("List has %d instances and %v", len(all), listErr)
			}
			s.listed(made.Name)
		}},
		{"one host down", "with one host down List gives the others and a PartialError that names it", func(s *suite) {
			checker, ok := provider.As[provider.Checker](s.provider())
			s.needs(ok && s.harness.Break != nil, "Checker with Break")
			targets := checker.Check(s.context())
			s.needs(len(targets) > 1, "second host")
			made := map[string]provider.Instance{}
			for i := 0; len(made) < len(targets) && i < 4*len(targets); i++ {
				x := s.create(s.request(fmt.Sprintf("p%d", i), 1))
				made[x.Host] = x
			}
			if len(made) < 2 {
				s.fail("all instances are on one of %d hosts", len(targets))
			}
			for _, x := range made {
				s.listed(x.Name)
			}
			down := targets[0].Target
			mend := s.harness.Break(s.T, down)
			all, err := s.provider().List(s.context(), s.harness.Owner)
			_, getErr := s.provider().Get(s.context(), made[down].ID)
			deleteErr := s.provider().Delete(s.context(), made[down].ID)
			mend()
			partial, isPartial := errors.AsType[*provider.PartialError](err)
			if !isPartial || !partial.Missing(down) || len(partial.Targets) != 1 {
				s.fail("List: %v, want a PartialError that names %s", err, down)
			}
			for host, x := range made {
				if _, ok := find(all, x.Name); ok == (host == down) {
					s.fail("List has an instance on %s: %t", host, ok)
				}
			}
			if errors.Is(getErr, provider.ErrNotFound) || getErr == nil || errors.Is(deleteErr, provider.ErrNotFound) || deleteErr == nil {
				s.fail("Get: %v, Delete: %v of an instance on the host that is down", getErr, deleteErr)
			}
			s.listed(made[down].Name)
		}},
		{"check", "Check gives each target once, in a stable order, ready exactly when its reason is Ready", func(s *suite) {
			checker, ok := provider.As[provider.Checker](s.provider())
			s.needs(ok, "Checker")
			first, again := checker.Check(s.context()), checker.Check(s.context())
			if len(first) == 0 || len(first) != len(again) {
				s.fail("%d targets and then %d", len(first), len(again))
			}
			seen := map[string]bool{}
			for i, h := range first {
				switch {
				case h.Target == "" || seen[h.Target]:
					s.fail("target %q is empty or repeated", h.Target)
				case h.Target != again[i].Target:
					s.fail("target %d is %s and then %s", i, h.Target, again[i].Target)
				case h.Ready != (h.Reason == provider.ReasonReady) || h.Reason == "":
					s.fail("%s: ready %t with reason %q", h.Target, h.Ready, h.Reason)
				case !h.Ready:
					s.fail("%s is not ready: %s: %s", h.Target, h.Reason, h.Message)
				}
				seen[h.Target] = true
			}
		}},
		{"check context", "Check returns soon when its context ends, with every target", func(s *suite) {
			checker, ok := provider.As[provider.Checker](s.provider())
			s.needs(ok, "Checker")
			want := len(checker.Check(s.context()))
			ctx, cancel := context.WithCancel(s.Context())
			cancel()
			begin := time.Now()
			got := checker.Check(ctx)
			if took := time.Since(begin); took > promptly || len(got) != want {
				s.fail("%d targets after %s, want %d", len(got), took, want)
			}
		}},
	}
}
