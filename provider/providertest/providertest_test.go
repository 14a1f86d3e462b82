package providertest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
	"crawl.example.com/egress/provider/providertest"
)

// harness is a fake with every hook.
func harness(t *testing.T, f *fake.Provider, p provider.Provider) providertest.Harness {
	invalid := provider.Spec{Image: "invalid"}
	return providertest.Harness{
		Provider: p,
		Spec:     provider.Spec{Provider: p.Name(), Image: "small", CloudInit: provider.CloudInit{UserData: []byte("#cloud-config\npassword: planted-in-the-user-data\n")}},
		Invalid:  &invalid,
		AddForeign: func(_ *testing.T, name string) string {
			return f.AddForeign(name, provider.Mark{})
		},
		Exists: func(_ *testing.T, id string) bool {
			return slices.ContainsFunc(f.Instances(), func(x provider.Instance) bool { return x.ID == id })
		},
		LoseAnswer: func(*testing.T) { f.CreateThenFail(provider.ErrOutcomeUnknown, 1) },
		LeaveHalf:  func(*testing.T) { f.FailHalfway(1) },
		Break: func(_ *testing.T, host string) func() {
			if host != "" {
				f.SetHostDown(host, true)
				return func() { f.SetHostDown(host, false) }
			}
			for _, op := range []fake.Op{fake.OpGet, fake.OpDelete, fake.OpList} {
				f.FailNext(op, provider.ErrUnavailable, 1)
			}
			return func() {}
		},
		Deny: func(*testing.T) func() {
			f.SetDenied(true)
			return func() { f.SetDenied(false) }
		},
		Fill: func(*testing.T) func() {
			f.Set(func(c *fake.Config) { c.Capacity = 1 })
			id := f.AddForeign("filler", provider.Mark{})
			return func() { f.Vanish(id) }
		},
	}
}

func newFake() *fake.Provider {
	return fake.New(fake.Config{
		Hosts: []string{"a", "b", "c"}, ListLag: 30 * time.Millisecond, BootTime: 20 * time.Millisecond, DeleteTime: 30 * time.Millisecond,
	})
}

func TestConformance(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		f := newFake()
		return harness(t, f, f)
	}})
}

func TestConformanceOfAServingFake(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		f := fake.New(fake.Config{Hosts: []string{"a", "b"}, Serve: true})
		t.Cleanup(func() { f.Close() })
		return harness(t, f, f)
	}})
}

func TestConformanceOfAFakeInADirectory(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		f := fake.New(fake.Config{Store: fake.Dir(t.TempDir())})
		return harness(t, f, f)
	}})
}

// broken wraps a fake and gets one thing wrong.
type broken struct {
	*fake.Provider
	how   string
	calls int
}

func (b *broken) is(how string) bool { return b.how == how }

func (b *broken) Name() string {
	b.calls++
	if b.is("changes its name") {
		return fmt.Sprint("fake", b.calls)
	}
	return b.Provider.Name()
}

func (b *broken) Validate(spec provider.Spec) error {
	if b.is("ignores unknown options") {
		spec.Options = nil
	}
	if b.is("validates nothing") {
		return nil
	}
	return b.Provider.Validate(spec)
}

func (b *broken) Create(ctx context.Context, req provider.CreateRequest) (provider.Instance, error) {
	switch {
	case b.is("adopts foreigners"):
		if i := slices.IndexFunc(b.Instances(), func(x provider.Instance) bool { return x.Name == req.Name }); i >= 0 {
			return b.Instances()[i], nil
		}
	case b.is("loses the mark"):
		req.Mark.HashVersion = 1
	case b.is("makes a second one"):
		made, err := b.Provider.Create(ctx, req)
		if errors.Is(err, provider.ErrAlreadyExists) {
			id := b.AddForeign(req.Name, req.Mark)
			return provider.Instance{ID: id, Name: req.Name, Mark: req.Mark}, nil
		}
		return made, err
	case b.is("creates without its context"):
		ctx = context.WithoutCancel(ctx)
	}
	made, err := b.Provider.Create(ctx, req)
	switch {
	case err == nil:
	case b.is("claims that nothing was made") && errors.Is(err, provider.ErrOutcomeUnknown):
		err = fmt.Errorf("%w: lost", provider.ErrUnavailable)
	case b.is("has errors of its own"):
		err = errors.New("something is wrong")
	case b.is("shows the user data"):
		err = fmt.Errorf("%w: %s", provider.ErrUnavailable, req.Spec.CloudInit.UserData)
	case b.is("calls a lack of room permanent") && errors.Is(err, provider.ErrNoCapacity):
		err = provider.ErrPermanent
	}
	return made, err
}

func (b *broken) Get(ctx context.Context, id string) (provider.Instance, error) {
	got, err := b.Provider.Get(ctx, id)
	switch {
	case b.is("takes an outage for gone") && errors.Is(err, provider.ErrUnavailable),
		b.is("takes refused credentials for gone") && errors.Is(err, provider.ErrDenied):
		return got, provider.ErrNotFound
	case b.is("never finds an address"):
		got.Address = ""
	case b.is("takes gone for an outage") && errors.Is(err, provider.ErrNotFound):
		return got, provider.ErrUnavailable
	}
	return got, err
}

func (b *broken) List(ctx context.Context, owner string) ([]provider.Instance, error) {
	all, err := b.Provider.List(ctx, owner)
	switch _, partial := errors.AsType[*provider.PartialError](err); {
	case b.is("keeps quiet about a host") && partial:
		return all, nil
	case b.is("gives up when one host is down") && partial:
		return nil, provider.ErrUnavailable
	case b.is("lists twice") && len(all) > 0:
		return append(all, all[0]), err
	case b.is("lists everybody's"):
		return b.Instances(), err
	case b.is("forgets to list") && len(all) > 1:
		return all[:1], err
	}
	return all, err
}

func (b *broken) Delete(ctx context.Context, id string) error {
	switch {
	case b.is("deletes nothing"):
		return nil
	case b.is("deletes too much"):
		for _, x := range b.Instances() {
			b.Vanish(x.ID)
		}
		return nil
	case b.is("says yes to any id"):
		if err := b.Provider.Delete(ctx, id); !errors.Is(err, provider.ErrNotFound) {
			return err
		}
		return nil
	}
	return b.Provider.Delete(ctx, id)
}

func (b *broken) Check(ctx context.Context) []provider.TargetHealth {
	all := b.Provider.Check(context.WithoutCancel(ctx))
	b.calls++
	switch {
	case b.is("checks in any order") && b.calls%2 == 0:
		slices.Reverse(all)
	case b.is("gives no reason"):
		all[0].Reason = ""
	case b.is("drops targets that are late") && ctx.Err() != nil:
		return all[:1]
	}
	return all
}

// variants are the broken ones, and the case that each must fail.
var variants = map[string]string{
	"never finds an address":             "boot",
	"changes its name":                   "name",
	"ignores unknown options":            "validate",
	"validates nothing":                  "invalid",
	"loses the mark":                     "marks",
	"makes a second one":                 "create again",
	"claims that nothing was made":       "lost answer",
	"adopts foreigners":                  "foreign",
	"lists everybody's":                  "other owner",
	"lists twice":                        "create",
	"forgets to list":                    "parallel",
	"deletes nothing":                    "delete",
	"deletes too much":                   "delete",
	"says yes to any id":                 "unknown",
	"takes gone for an outage":           "unknown",
	"creates without its context":        "context",
	"has errors of its own":              "context",
	"shows the user data":                "context",
	"calls a lack of room permanent":     "no capacity",
	"takes refused credentials for gone": "denied",
	"takes an outage for gone":           "unreachable",
	"keeps quiet about a host":           "one host down",
	"gives up when one host is down":     "one host down",
	"checks in any order":                "check",
	"gives no reason":                    "check",
	"drops targets that are late":        "check context",
}

const brokenEnv = "EGRESS_BROKEN_BACKEND"

// TestBrokenBackend is the child of the test below, and nothing in a run of its own.
func TestBrokenBackend(t *testing.T) {
	how := os.Getenv(brokenEnv)
	if how == "" {
		t.Skip("is the child process of TestEachBrokenBackendFailsTheCaseMeantForIt")
	}
	providertest.Run(t, providertest.Config{
		Patience: 500 * time.Millisecond,
		New: func(t *testing.T) providertest.Harness {
			f := newFake()
			return harness(t, f, &broken{Provider: f, how: how})
		},
	})
}

func TestEachBrokenBackendFailsTheCaseMeantForIt(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	requirements := map[string]string{}
	for _, c := range providertest.Cases() {
		requirements[c.Name] = c.Requirement
	}
	for how, name := range variants {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), self, "-test.run", "^TestBrokenBackend$/^"+strings.ReplaceAll(name, " ", "_")+"$")
			cmd.Env = append(os.Environ(), brokenEnv+"="+how)
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatalf("it passes %q:\n%s", name, out)
			}
			if !strings.Contains(string(out), "requirement: "+requirements[name]) {
				t.Fatalf("it fails, but not with the requirement of %q:\n%s", name, out)
			}
		})
	}
}
