package gcp_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"crawl.example.com/egress/gcp"
	"crawl.example.com/egress/gcp/internal/fakecompute"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/providertest"
)

const (
	zoneA = "europe-west3-a"
	zoneB = "europe-west3-b"
)

const planted = "planted-in-the-user-data"

// project starts a fake that holds all traffic against the schema, and a provider for it.
func project(t *testing.T, fake fakecompute.Config, config gcp.Config) (*fakecompute.Server, *gcp.Provider) {
	t.Helper()
	schema, err := fakecompute.Load()
	if err != nil {
		t.Skipf("Google's schema can't be found, as in a vendored build: %v", err)
	}
	fake.Schema, fake.Project = schema, "my-crawler"
	if fake.Zones == nil {
		fake.Zones = []string{zoneA, zoneB}
	}
	s := fakecompute.New(fake)
	server := httptest.NewServer(s)
	config.Name, config.Project = "gce", "my-crawler"
	if config.Zones == nil {
		config.Zones = []string{zoneA, zoneB}
	}
	if config.Endpoint == "" {
		config.Endpoint = server.URL
	}
	config.WithoutAuthentication = config.Credentials == nil && config.CredentialsFile == ""
	config.RequestsPerSecond = 1000
	p, err := gcp.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		server.CloseClientConnections()
		server.Close()
		for _, v := range s.Violations() {
			t.Errorf("schema: %s", v)
		}
	})
	return s, p
}

func spec() provider.Spec {
	return provider.Spec{Provider: "gce", Port: 3128, CloudInit: provider.CloudInit{
		UserData: []byte("#cloud-config\npassword: " + planted + "\n"), InstallGuestAgent: true,
	}}
}

func request(proxy string, generation int64, s provider.Spec) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName("crawl", proxy, generation), Spec: s,
		Mark: provider.Mark{Owner: "crawl", Proxy: proxy, Generation: generation, HashVersion: provider.HashVersion, Hash: s.Hash(nil)},
	}
}

func create(t *testing.T, p *gcp.Provider, req provider.CreateRequest) provider.Instance {
	t.Helper()
	made, err := p.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestConformance(t *testing.T) {
	providertest.Run(t, providertest.Config{New: func(t *testing.T) providertest.Harness {
		var spoil atomic.Pointer[func(method, zone, name string) *fakecompute.Failure]
		set := func(f func(method, zone, name string) *fakecompute.Failure) func() {
			spoil.Store(&f)
			return func() { spoil.Store(nil) }
		}
		s, p := project(t, fakecompute.Config{
			OperationTime: 20 * time.Millisecond, BootTime: 10 * time.Millisecond,
			Intercept: func(method, zone, name string) *fakecompute.Failure {
				if f := spoil.Load(); f != nil {
					return (*f)(method, zone, name)
				}
				return nil
			},
		}, gcp.Config{Spread: true})
		invalid := spec()
		invalid.Image = "no image"
		return providertest.Harness{
			Provider: p, Spec: spec(), Invalid: &invalid,
			AddForeign: func(_ *testing.T, name string) string {
				return fmt.Sprintf("%s/%s/%d", zoneA, name, s.Add(zoneA, name, map[string]string{"made-by": "hand"}))
			},
			Exists: func(_ *testing.T, id string) bool {
				parts := strings.Split(id, "/")
				return s.Instance(parts[0], parts[1]) != nil
			},
			LoseAnswer: func(*testing.T) {
				var inserts atomic.Int32
				set(func(method, _, _ string) *fakecompute.Failure {
					if method == "compute.instances.insert" && inserts.Add(1) <= 4 { // as often as one call tries
						return &fakecompute.Failure{Done: true}
					}
					return nil
				})
			},
			LeaveHalf: func(*testing.T) {
				// The insert is accepted, and nobody learns how it ends.
				var waits atomic.Int32
				set(func(method, _, _ string) *fakecompute.Failure {
					if method == "compute.zoneOperations.wait" && waits.Add(1) <= 1 {
						return &fakecompute.Failure{Status: 403, Reason: "forbidden", Message: "no right to wait"}
					}
					return nil
				})
				s.Set(func(c *fakecompute.Config) {
					var once atomic.Bool
					c.Operation = func(_, _ string) *fakecompute.OperationFailure {
						if once.CompareAndSwap(false, true) {
							return &fakecompute.OperationFailure{Code: "INTERNAL_ERROR", Message: "it broke half way"}
						}
						return nil
					}
				})
			},
			Break: func(_ *testing.T, host string) func() {
				return set(func(_, zone, _ string) *fakecompute.Failure {
					if host == "" || zone == host {
						return &fakecompute.Failure{}
					}
					return nil
				})
			},
			Deny: func(*testing.T) func() {
				return set(func(_, _, _ string) *fakecompute.Failure {
					return &fakecompute.Failure{Status: 403, Reason: "forbidden", Message: "Required 'compute.instances.get' permission"}
				})
			},
			Fill: func(*testing.T) func() {
				s.Set(func(c *fakecompute.Config) {
					c.Operation = func(_, _ string) *fakecompute.OperationFailure {
						return &fakecompute.OperationFailure{Code: "ZONE_RESOURCE_POOL_EXHAUSTED", Message: "try another zone", Status: 503}
					}
				})
				return func() { s.Set(func(c *fakecompute.Config) { c.Operation = nil }) }
			},
		}
	}})
}

func TestEachAnswerOfGoogleIsToldApart(t *testing.T) {
	for name, test := range map[string]struct {
		answer fakecompute.Failure
		op     fakecompute.OperationFailure
		kind   error
		reason provider.Reason
		after  time.Duration // at least
	}{
		"stockout in a zone":   {op: fakecompute.OperationFailure{Code: "ZONE_RESOURCE_POOL_EXHAUSTED", Status: 503}, kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity, after: time.Minute},
		"stockout, no status":  {op: fakecompute.OperationFailure{Code: "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"}, kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity},
		"stockout in a region": {op: fakecompute.OperationFailure{Code: "REGION_RESOURCE_POOL_EXHAUSTED"}, kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity},
		"stockout at once":     {answer: fakecompute.Failure{Status: 503, Reason: "insufficientCapacity"}, kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity},
		"preempted while made": {op: fakecompute.OperationFailure{Code: "UNSUPPORTED_OPERATION"}, kind: provider.ErrNoCapacity, reason: provider.ReasonInsufficientCapacity},
		"quota late":           {op: fakecompute.OperationFailure{Code: "QUOTA_EXCEEDED", Status: 403}, kind: provider.ErrNoCapacity, reason: provider.ReasonQuotaExceeded},
		"quota at once":        {answer: fakecompute.Failure{Status: 403, Reason: "quotaExceeded", Message: "Quota 'CPUS' exceeded"}, kind: provider.ErrNoCapacity, reason: provider.ReasonQuotaExceeded},
		"rate":                 {answer: fakecompute.Failure{Status: 403, Reason: "rateLimitExceeded"}, kind: provider.ErrUnavailable, reason: provider.ReasonQuotaExceeded, after: 1},
		"too many requests":    {answer: fakecompute.Failure{Status: 429}, kind: provider.ErrUnavailable, reason: provider.ReasonQuotaExceeded, after: 1},
		"permission":           {answer: fakecompute.Failure{Status: 403, Reason: "forbidden"}, kind: provider.ErrDenied, reason: provider.ReasonPermissionDenied},
		"bad token":            {answer: fakecompute.Failure{Status: 401, Reason: "authError"}, kind: provider.ErrDenied, reason: provider.ReasonAuthenticationFailed},
		"no such image":        {answer: fakecompute.Failure{Status: 404, Reason: "notFound", Message: "The resource 'projects/x/global/images/y' was not found"}, kind: provider.ErrPermanent, reason: provider.ReasonImageNotFound},
		"constraint":           {answer: fakecompute.Failure{Status: 412, Reason: "conditionNotMet", Message: "Constraint constraints/compute.vmExternalIpAccess violated"}, kind: provider.ErrPermanent, reason: provider.ReasonPermissionDenied},
		"stale":                {answer: fakecompute.Failure{Status: 412, Reason: "conditionNotMet"}, kind: provider.ErrUnavailable, reason: provider.ReasonUnknown},
		"invalid":              {answer: fakecompute.Failure{Status: 400, Reason: "invalid"}, kind: provider.ErrPermanent, reason: provider.ReasonUnknown},
		"not ready":            {answer: fakecompute.Failure{Status: 400, Reason: "resourceNotReady"}, kind: provider.ErrUnavailable, reason: provider.ReasonUnknown},
		"overload":             {answer: fakecompute.Failure{Status: 503, Reason: "backendError"}, kind: provider.ErrOutcomeUnknown, reason: provider.ReasonUnreachable},
		"no answer":            {answer: fakecompute.Failure{Message: "cut"}, kind: provider.ErrOutcomeUnknown, reason: provider.ReasonUnreachable},
		"addresses used up":    {op: fakecompute.OperationFailure{Code: "IP_SPACE_EXHAUSTED_WITH_DETAILS"}, kind: provider.ErrPermanent, reason: provider.ReasonInsufficientCapacity},
		"permission late":      {op: fakecompute.OperationFailure{Code: "PERMISSIONS_ERROR"}, kind: provider.ErrPermanent, reason: provider.ReasonPermissionDenied},
		"constraint late":      {op: fakecompute.OperationFailure{Code: "CONDITION_NOT_MET", Message: "constraints/compute.vmExternalIpAccess"}, kind: provider.ErrPermanent, reason: provider.ReasonPermissionDenied},
		"internal, no status":  {op: fakecompute.OperationFailure{Code: "INTERNAL_ERROR"}, kind: provider.ErrUnavailable, reason: provider.ReasonUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := fakecompute.Config{OperationTime: 5 * time.Millisecond}
			if test.op.Code != "" {
				config.Operation = func(_, _ string) *fakecompute.OperationFailure { return &test.op }
			} else {
				config.Intercept = func(method, _, _ string) *fakecompute.Failure {
					if method == "compute.instances.insert" {
						return &test.answer
					}
					return nil
				}
			}
			_, p := project(t, config, gcp.Config{})
			_, err := p.Create(t.Context(), request("a", 1, spec()))
			if !errors.Is(provider.Kind(err), test.kind) || provider.ReasonOf(err) != test.reason {
				t.Fatalf("got %v, %s: %v", provider.Kind(err), provider.ReasonOf(err), err)
			}
			for _, kind := range []error{provider.ErrPermanent, provider.ErrNotFound, provider.ErrAlreadyExists, provider.ErrNoCapacity, provider.ErrUnavailable, provider.ErrDenied, provider.ErrOutcomeUnknown} {
				if !errors.Is(kind, test.kind) && errors.Is(err, kind) {
					t.Errorf("%v is also %v", err, kind)
				}
			}
			e, _ := errors.AsType[*provider.Error](err)
			if e == nil || e.RetryAfter < test.after || e.RetryAfter > 3*time.Minute {
				t.Errorf("retry after: %+v, want at least %s", e, test.after)
			}
		})
	}
}

func TestAZoneWithoutMachinesIsPassedOver(t *testing.T) {
	s, p := project(t, fakecompute.Config{Operation: func(zone, _ string) *fakecompute.OperationFailure {
		if zone == zoneA {
			return &fakecompute.OperationFailure{Code: "ZONE_RESOURCE_POOL_EXHAUSTED"}
		}
		return nil
	}}, gcp.Config{})
	if made := create(t, p, request("a", 1, spec())); made.Host != zoneB {
		t.Errorf("it is in %s", made.Host)
	}
	// Once there is room in the first zone, the name is still found in the second.
	s.Set(func(c *fakecompute.Config) { c.Operation = nil })
	if _, err := p.Create(t.Context(), request("a", 1, spec())); !errors.Is(err, provider.ErrAlreadyExists) {
		t.Errorf("again: %v", err)
	}
	if s.Len() != 1 {
		t.Errorf("%d instances", s.Len())
	}
}

func TestAFailureThatTheServerRemembersIsNotRepeatedForEver(t *testing.T) {
	var full atomic.Bool
	full.Store(true)
	_, p := project(t, fakecompute.Config{Operation: func(_, _ string) *fakecompute.OperationFailure {
		if full.Load() {
			return &fakecompute.OperationFailure{Code: "ZONE_RESOURCE_POOL_EXHAUSTED"}
		}
		return nil
	}}, gcp.Config{})
	if _, err := p.Create(t.Context(), request("a", 1, spec())); !errors.Is(err, provider.ErrNoCapacity) {
		t.Fatal(err)
	}
	full.Store(false)
	create(t, p, request("a", 1, spec()))
}

func TestARetryAfterACrashMakesOneInstance(t *testing.T) {
	s, first := project(t, fakecompute.Config{OperationTime: 200 * time.Millisecond}, gcp.Config{})
	ctx, crash := context.WithCancel(t.Context())
	s.Set(func(c *fakecompute.Config) {
		c.Intercept = func(method, _, _ string) *fakecompute.Failure {
			if method == "compute.zoneOperations.wait" {
				crash()
			}
			return nil
		}
	})
	if _, err := first.Create(ctx, request("a", 1, spec())); !errors.Is(err, provider.ErrOutcomeUnknown) {
		t.Fatalf("the create that crashed: %v", err)
	}
	server := httptest.NewServer(s)
	defer server.Close()
	second, err := gcp.New(gcp.Config{Name: "gce", Project: "my-crawler", Zones: []string{zoneA, zoneB}, Endpoint: server.URL, WithoutAuthentication: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Create(t.Context(), request("a", 1, spec())); err != nil && !errors.Is(err, provider.ErrAlreadyExists) {
		t.Errorf("the second create: %v", err)
	}
	if s.Len() != 1 {
		t.Errorf("%d instances", s.Len())
	}
}

func TestARestartedProcessSendsTheSameRequestID(t *testing.T) {
	var mu sync.Mutex
	ids := map[string]int{}
	var s *fakecompute.Server
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/instances") {
			mu.Lock()
			ids[r.URL.Query().Get("requestId")]++
			mu.Unlock()
		}
		s.ServeHTTP(w, r)
	}))
	defer server.Close()
	for range 2 {
		var p *gcp.Provider
		s, p = project(t, fakecompute.Config{}, gcp.Config{Endpoint: server.URL})
		create(t, p, request("a", 1, spec()))
	}
	if len(ids) != 1 {
		t.Errorf("ids: %v", ids)
	}
}

func TestAnInstanceThatWasDeletedMeanwhileIsMadeAnew(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	first := create(t, p, request("a", 1, spec()))
	s.Vanish(zoneA, first.Name)
	second := create(t, p, request("a", 1, spec()))
	if second.ID == first.ID {
		t.Error("the answer of the first insert was taken for the second")
	}
	if n := s.Count("compute.instances.insert"); n != 3 {
		t.Errorf("%d inserts, want one, one that is answered from memory, and one with another id", n)
	}
}

func TestAnIDIsNeverThatOfALaterInstanceWithTheSameName(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	first := create(t, p, request("a", 1, spec()))
	s.Vanish(zoneA, first.Name)
	second := create(t, p, request("a", 1, spec()))
	if _, err := p.Get(t.Context(), first.ID); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("Get: %v", err)
	}
	if err := p.Delete(t.Context(), first.ID); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("Delete: %v", err)
	}
	if _, err := p.Get(t.Context(), second.ID); err != nil {
		t.Errorf("the second is gone: %v", err)
	}
}

func TestADrainedZoneIsListedAndGetsNothingNew(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{Zones: []string{zoneA}, DrainZones: []string{zoneB}, Spread: true})
	old := request("old", 1, spec())
	s.Add(zoneB, old.Name, map[string]string{
		"egress-owner": "crawl", "egress-proxy": "old", "egress-generation": "1", "egress-hash-version": "1", "egress-hash": "abc",
	})
	for i := range 5 {
		if made := create(t, p, request(fmt.Sprintf("p%d", i), 1, spec())); made.Host != zoneA {
			t.Errorf("%s is in %s", made.Name, made.Host)
		}
	}
	if all, err := p.List(t.Context(), "crawl"); err != nil || len(all) != 6 {
		t.Errorf("%d, %v", len(all), err)
	}
	if _, err := p.Create(t.Context(), old); !errors.Is(err, provider.ErrAlreadyExists) {
		t.Errorf("a name that the drained zone holds: %v", err)
	}
}

func TestWhatIsSent(t *testing.T) {
	binary := compressed([]byte("#cloud-config\n"))
	for name, test := range map[string]struct {
		config gcp.Config
		change func(*provider.Spec)
		want   map[string]string // substrings of the instance, by its fields
	}{
		"plain": {want: map[string]string{
			"machineType": "zones/europe-west3-a/machineTypes/e2-micro", "metadata": planted,
			"networkInterfaces": "ONE_TO_ONE_NAT", "scheduling": "STANDARD", "disks": "ubuntu-os-cloud", "labels": "egress-owner:crawl",
		}},
		"binary user data": {change: func(s *provider.Spec) { s.CloudInit.UserData = binary }, want: map[string]string{
			"metadata": "key:user-data-encoding value:base64",
		}},
		"spot": {config: gcp.Config{Spot: true}, want: map[string]string{"scheduling": "instanceTerminationAction:DELETE"}},
		"spot by option, protected, tagged, labelled": {
			config: gcp.Config{SpotTermination: "STOP", DeletionProtection: true, Tags: []string{"proxy"}, Labels: map[string]string{"team": "crawl"}},
			change: func(s *provider.Spec) {
				s.Options = map[string]string{gcp.OptionSpot: "true", gcp.OptionMachineType: "n2-standard-2"}
			},
			want: map[string]string{"scheduling": "instanceTerminationAction:STOP", "deletionProtection": "true", "tags": "proxy",
				"labels": "team:crawl", "machineType": "n2-standard-2"},
		},
		"sizes": {change: func(s *provider.Spec) { s.CPUs, s.MemoryMiB, s.DiskGiB = 1, 1500, 20 }, want: map[string]string{
			"machineType": "e2-small", "disks": "diskSizeGb:20",
		}},
		"no external address, subnetwork": {config: gcp.Config{External: gcp.ExternalNone, Subnetwork: "crawlers"}, want: map[string]string{
			"networkInterfaces": "regions/europe-west3/subnetworks/crawlers",
		}},
		"IPv6": {config: gcp.Config{IPv6: true, NetworkTier: "PREMIUM"}, want: map[string]string{"networkInterfaces": "DIRECT_IPV6"}},
		"vendor script": {change: func(s *provider.Spec) { s.CloudInit.VendorData = []byte("#!/bin/sh\necho vendor\n") }, want: map[string]string{
			"metadata": base64.StdEncoding.EncodeToString([]byte("#!/bin/sh\necho vendor\n")),
		}},
		"bootstrap": {config: gcp.Config{BootstrapCloudInit: true}, want: map[string]string{"metadata": "cloud-init status --wait"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, p := project(t, fakecompute.Config{}, test.config)
			sp := spec()
			if test.change != nil {
				test.change(&sp)
			}
			if err := p.Validate(sp); err != nil {
				t.Fatal(err)
			}
			made := create(t, p, request("a", 1, sp))
			x := s.Instance(zoneA, made.Name)
			for field, want := range test.want {
				if got := fmt.Sprint(x[field]); !strings.Contains(got, want) {
					t.Errorf("%s is %s, want %s in it", field, got, want)
				}
			}
			if x["serviceAccounts"] != nil {
				t.Errorf("service accounts: %v", x["serviceAccounts"])
			}
			if made.Address == "" || made.State != provider.StateRunning || made.Created.IsZero() {
				t.Errorf("made %+v", made)
			}
		})
	}
}

func TestTheStartupScriptIsOneThatAShellReads(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{BootstrapCloudInit: true})
	sp := spec()
	sp.CloudInit.VendorData = []byte("#!/bin/sh\n" + strings.Repeat("# a long script\n", 50))
	made := create(t, p, request("a", 1, sp))
	items := s.Instance(zoneA, made.Name)["metadata"].(map[string]any)["items"].([]any)
	checked := false
	for _, item := range items {
		if item := item.(map[string]any); item["key"] == "startup-script" {
			shell := exec.Command("sh", "-n")
			shell.Stdin = strings.NewReader(item["value"].(string))
			if out, err := shell.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			checked = true
		}
	}
	if !checked {
		t.Error("there is none")
	}
}

func TestAServiceAccountThatNobodyAskedForIsRefused(t *testing.T) {
	s, p := project(t, fakecompute.Config{ServiceAccount: "default@example.iam.gserviceaccount.com"}, gcp.Config{})
	if _, err := p.Create(t.Context(), request("a", 1, spec())); !errors.Is(err, provider.ErrPermanent) {
		t.Errorf("got %v", err)
	}
	if s.Len() != 0 {
		t.Error("the instance stays")
	}
}

func TestDeletionProtectionIsRespected(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{DeletionProtection: true})
	made := create(t, p, request("a", 1, spec()))
	err := p.Delete(t.Context(), made.ID)
	if !errors.Is(err, provider.ErrPermanent) || !strings.Contains(err.Error(), "--no-deletion-protection") {
		t.Errorf("got %v", err)
	}
	if s.Count("compute.instances.delete") != 0 || s.Len() != 1 {
		t.Error("a delete was sent")
	}
}

func TestEverythingButRunningIsUnfitAndNothingListedIsGone(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	made := create(t, p, request("a", 1, spec()))
	for status, want := range map[string]provider.State{
		"RUNNING": provider.StateRunning, "PROVISIONING": provider.StatePending, "STAGING": provider.StatePending,
		"PENDING": provider.StatePending, "REPAIRING": provider.StatePending, "STOPPING": provider.StateStopped,
		"PENDING_STOP": provider.StateStopped, "STOPPED": provider.StateStopped, "TERMINATED": provider.StateStopped,
		"SUSPENDING": provider.StateStopped, "SUSPENDED": provider.StateStopped, "DEPROVISIONING": provider.StateDeleting,
	} {
		s.Status(zoneA, made.Name, status)
		all, err := p.List(t.Context(), "crawl")
		if err != nil || len(all) != 1 || all[0].State != want {
			t.Errorf("%s: %+v, %v; want %s", status, all, err, want)
		}
	}
	s.Status(zoneA, made.Name, "RUNNING")
	s.Readdress(zoneA, made.Name)
	if again, err := p.Get(t.Context(), made.ID); err != nil || again.Address == made.Address || again.Address == "" {
		t.Errorf("after a restart: %+v, %v", again, err)
	}
	s.Vanish(zoneA, made.Name)
	if all, err := p.List(t.Context(), "crawl"); err != nil || len(all) != 0 {
		t.Errorf("after a preemption: %+v, %v", all, err)
	}
	if _, err := p.Get(t.Context(), made.ID); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("after a preemption: %v", err)
	}
}

func TestAProjectThatIsNotFoundMakesNoInstanceGone(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	made := create(t, p, request("a", 1, spec()))
	s.Set(func(c *fakecompute.Config) { c.Project = "another" })
	if _, err := p.Get(t.Context(), made.ID); !errors.Is(err, provider.ErrUnavailable) || errors.Is(err, provider.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := p.List(t.Context(), "crawl"); !errors.Is(err, provider.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestAZoneWhoseListIsIncompleteIsNamed(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	create(t, p, request("a", 1, spec()))
	s.SetPartial(zoneB, true)
	all, err := p.List(t.Context(), "crawl")
	partial, ok := errors.AsType[*provider.PartialError](err)
	if !ok || !partial.Missing(zoneB) || partial.Missing(zoneA) || len(all) != 1 {
		t.Errorf("got %v, %v", all, err)
	}
}

func TestTwoThousandInstancesAreListedInFewRequests(t *testing.T) {
	s, p := project(t, fakecompute.Config{}, gcp.Config{})
	for i := range 2000 {
		zone := []string{zoneA, zoneB}[i%2]
		proxy := fmt.Sprintf("p%d", i)
		s.Add(zone, provider.InstanceName("crawl", proxy, 1), map[string]string{
			"egress-owner": "crawl", "egress-proxy": proxy, "egress-generation": "1", "egress-hash-version": "1", "egress-hash": "abc",
		})
	}
	all, err := p.List(t.Context(), "crawl")
	if err != nil || len(all) != 2000 {
		t.Fatalf("%d, %v", len(all), err)
	}
	if n := s.Count("compute.instances.list"); n != 4 {
		t.Errorf("%d requests, want 4: 500 instances in each", n)
	}
}

func TestStaticAddressesAreNeverUsedTwice(t *testing.T) {
	var addresses []netip.Addr
	var texts []string
	for i := range 4 {
		a := netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)})
		addresses, texts = append(addresses, a), append(texts, a.String())
	}
	_, p := project(t, fakecompute.Config{OperationTime: 20 * time.Millisecond, Addresses: map[string][]string{"europe-west3": texts}},
		gcp.Config{External: gcp.ExternalStatic, StaticAddresses: addresses})
	var creating sync.WaitGroup
	made := make([]provider.Instance, 5)
	errs := make([]error, 5)
	for i := range made {
		creating.Go(func() { made[i], errs[i] = p.Create(t.Context(), request(fmt.Sprintf("p%d", i), 1, spec())) })
	}
	creating.Wait()
	seen := map[string]bool{}
	refused := 0
	for i := range made {
		switch {
		case errors.Is(errs[i], provider.ErrNoCapacity):
			refused++
		case errs[i] != nil:
			t.Error(errs[i])
		case seen[made[i].Address] || !strings.HasPrefix(made[i].Address, "203.0.113."):
			t.Errorf("%s has the address %s", made[i].Name, made[i].Address)
		default:
			seen[made[i].Address] = true
		}
	}
	if refused != 1 {
		t.Errorf("%d were refused, want 1", refused)
	}
}

func TestTheLastCauseIsNotHiddenBehindADeadline(t *testing.T) {
	_, p := project(t, fakecompute.Config{Intercept: func(string, string, string) *fakecompute.Failure {
		return &fakecompute.Failure{Status: 503, Reason: "backendError", Message: "the backend is on fire"}
	}}, gcp.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	_, err := p.Get(ctx, zoneA+"/crawl--a--1/7")
	if !errors.Is(err, provider.ErrUnavailable) || !strings.Contains(err.Error(), "the backend is on fire") {
		t.Errorf("got %v", err)
	}
}

func TestAShortOutageIsSurvivedWithTheSameRequestID(t *testing.T) {
	var inserts atomic.Int32
	s, p := project(t, fakecompute.Config{Intercept: func(method, _, _ string) *fakecompute.Failure {
		if method == "compute.instances.insert" && inserts.Add(1) <= 2 {
			return &fakecompute.Failure{Status: 503, Reason: "backendError", Done: true}
		}
		return nil
	}}, gcp.Config{})
	create(t, p, request("a", 1, spec()))
	if s.Len() != 1 {
		t.Errorf("%d instances", s.Len())
	}
}

func TestRequestsAreLoggedWithoutSecrets(t *testing.T) {
	var mu sync.Mutex
	var text bytes.Buffer
	logger := slog.New(slog.NewTextHandler(locked{&mu, &text}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var once atomic.Bool
	_, p := project(t, fakecompute.Config{Intercept: func(method, _, _ string) *fakecompute.Failure {
		if method == "compute.instances.insert" && once.CompareAndSwap(false, true) {
			return &fakecompute.Failure{Status: 400, Reason: "invalid", Message: "Invalid value for field 'resource.metadata.items[0].value': '#cloud-config\npassword: " + planted + "'"}
		}
		return nil
	}}, gcp.Config{Logger: logger})
	_, err := p.Create(t.Context(), request("a", 1, spec()))
	if err == nil || strings.Contains(fmt.Sprintf("%v %+v %#v", err, err, err), planted) || !strings.Contains(err.Error(), "[redacted]") {
		t.Errorf("the error: %v", err)
	}
	create(t, p, request("a", 1, spec()))
	mu.Lock()
	defer mu.Unlock()
	logged := text.String()
	if strings.Contains(logged, planted) {
		t.Errorf("the log has the secret: %s", logged)
	}
	for _, want := range []string{"method=instances.insert", "target=europe-west3-a/crawl--a--1", "attempt=1", "status=400", "duration="} {
		if !strings.Contains(logged, want) {
			t.Errorf("the log lacks %s: %s", want, logged)
		}
	}
}

type locked struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// TestTheDebugSwitchOfGooglesLibrariesLeaksNothing runs itself with the switch on.
func TestTheDebugSwitchOfGooglesLibrariesLeaksNothing(t *testing.T) {
	if os.Getenv("GOOGLE_SDK_GO_LOGGING_LEVEL") == "debug" {
		_, p := project(t, fakecompute.Config{}, gcp.Config{})
		create(t, p, request("a", 1, spec()))
		return
	}
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), "GOOGLE_SDK_GO_LOGGING_LEVEL=debug")
	out, err := child.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Fatalf("%v: %s", err, out)
	}
	if bytes.Contains(out, []byte(planted)) || bytes.Contains(out, []byte("user-data")) {
		t.Errorf("it leaks: %s", out)
	}
}

func TestCheckTellsWhatIsWrong(t *testing.T) {
	for name, test := range map[string]struct {
		config gcp.Config
		spoil  func(*fakecompute.Server)
		want   provider.Reason
	}{
		"zone down":      {spoil: func(s *fakecompute.Server) { s.SetZone(zoneA, "DOWN") }, want: provider.ReasonUnreachable},
		"quota":          {spoil: func(s *fakecompute.Server) { s.SetQuota("IN_USE_ADDRESSES", 8, 8) }, want: provider.ReasonQuotaExceeded},
		"image":          {spoil: func(s *fakecompute.Server) { s.SetMissing("ubuntu-minimal-2404-lts-amd64", true) }, want: provider.ReasonImageNotFound},
		"network":        {spoil: func(s *fakecompute.Server) { s.SetMissing("default", true) }, want: provider.ReasonUnknown},
		"subnetwork":     {config: gcp.Config{Subnetwork: "crawlers"}, spoil: func(s *fakecompute.Server) { s.SetMissing("crawlers", true) }, want: provider.ReasonUnknown},
		"no permission":  {spoil: answer(403, "forbidden"), want: provider.ReasonPermissionDenied},
		"bad token":      {spoil: answer(401, "authError"), want: provider.ReasonAuthenticationFailed},
		"no credentials": {config: gcp.Config{CredentialsFile: "/nonexistent", Endpoint: "https://127.0.0.1:1"}, want: provider.ReasonCredentialsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s, p := project(t, fakecompute.Config{}, test.config)
			if test.spoil != nil {
				test.spoil(s)
			}
			h := p.Check(t.Context())[0]
			if h.Ready || h.Reason != test.want || h.Target != zoneA || h.Message == "" {
				t.Errorf("got %+v", h)
			}
		})
	}
}

func answer(status int, reason string) func(*fakecompute.Server) {
	return func(s *fakecompute.Server) {
		s.Set(func(c *fakecompute.Config) {
			c.Intercept = func(string, string, string) *fakecompute.Failure {
				return &fakecompute.Failure{Status: status, Reason: reason}
			}
		})
	}
}

func TestACertificateNobodySignedIsNotTrusted(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	defer server.Close()
	_, p := project(t, fakecompute.Config{}, gcp.Config{Endpoint: server.URL})
	if h := p.Check(t.Context())[0]; h.Reason != provider.ReasonCertificateInvalid {
		t.Errorf("got %+v", h)
	}
}

func TestBadCredentialsAreReadAgainAndNeverShown(t *testing.T) {
	var reads atomic.Int32
	_, p := project(t, fakecompute.Config{}, gcp.Config{Endpoint: "https://127.0.0.1:1", Credentials: func(context.Context) ([]byte, error) {
		reads.Add(1)
		return []byte(`{"type":"service_account","private_key":"` + planted + `"`), nil
	}})
	for range 2 {
		_, err := p.List(t.Context(), "crawl")
		if !errors.Is(err, provider.ErrDenied) || provider.ReasonOf(err) != provider.ReasonCredentialsUnavailable || strings.Contains(err.Error(), planted) {
			t.Errorf("got %v", err)
		}
	}
	if reads.Load() < 2 {
		t.Errorf("they were read %d times", reads.Load())
	}
}

func TestValidateNamesEveryFault(t *testing.T) {
	_, p := project(t, fakecompute.Config{}, gcp.Config{})
	for name, test := range map[string]struct {
		change func(*provider.Spec)
		want   string
	}{
		"provider":        {func(s *provider.Spec) { s.Provider = "home" }, "home"},
		"image":           {func(s *provider.Spec) { s.Image = "../x" }, "../x"},
		"zone":            {func(s *provider.Spec) { s.Placement.Host = "mars-1-a" }, "mars-1-a"},
		"region":          {func(s *provider.Spec) { s.Placement.Labels = map[string]string{"region": "us-east1"} }, "none of the zones"},
		"label":           {func(s *provider.Spec) { s.Placement.Labels = map[string]string{"rack": "1"} }, "rack"},
		"size":            {func(s *provider.Spec) { s.CPUs = 999 }, "999"},
		"size twice":      {func(s *provider.Spec) { s.CPUs, s.Options = 1, map[string]string{"machine-type": "e2-small"} }, "machine-type"},
		"spot":            {func(s *provider.Spec) { s.Options = map[string]string{"spot": "yes"} }, "yes"},
		"static address":  {func(s *provider.Spec) { s.CloudInit.Network = &provider.Network{} }, "Network"},
		"vendor config":   {func(s *provider.Spec) { s.CloudInit.VendorData = []byte("#cloud-config\n") }, "VendorData"},
		"byte order mark": {func(s *provider.Spec) { s.CloudInit.UserData = []byte("\xef\xbb\xbf#cloud-config\n") }, "UTF-8 without one"},
		"no header":       {func(s *provider.Spec) { s.CloudInit.UserData = []byte("password: " + planted) }, "UserData"},
		"MIME, not ASCII": {func(s *provider.Spec) { s.CloudInit.UserData = []byte("#cloud-config\n# MIME-Version: é\n") }, "MIME-Version"},
		"too large": {func(s *provider.Spec) {
			s.CloudInit.UserData = append([]byte("#!/bin/sh\n#"), bytes.Repeat([]byte("a"), 262144)...)
		}, "262144"},
		"binary too large": {func(s *provider.Spec) {
			s.CloudInit.UserData = compressed(append([]byte("#!/bin/sh\n# "), noise(200000)...))
		}, "262144"},
	} {
		t.Run(name, func(t *testing.T) {
			s := spec()
			test.change(&s)
			err := p.Validate(s)
			if !errors.Is(err, provider.ErrPermanent) || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), planted) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func compressed(plain []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(plain)
	w.Close()
	return b.Bytes()
}

// noise returns n bytes that gzip can't make smaller.
func noise(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func TestNewNamesEveryFault(t *testing.T) {
	_, err := gcp.New(gcp.Config{
		Name: "Bad", Project: "x", Zones: []string{"a", zoneA, zoneA}, Image: "i", MachineType: "A", Network: "../n", Subnetwork: "S",
		Tags: []string{"T"}, External: "some", StaticAddresses: []netip.Addr{netip.IPv6Loopback()}, NetworkTier: "gold", SpotTermination: "KILL",
		Labels: map[string]string{"egress-owner": "x"}, CredentialsFile: "f", Credentials: func(context.Context) ([]byte, error) { return nil, nil },
		Endpoint: "ftp://x", RequestsPerSecond: -1,
	})
	for _, want := range []string{"Name", "Project", "zone \"a\"", "named twice", "Image", "MachineType", "Network ", "Subnetwork", "Tags", "External",
		"StaticAddresses", "NetworkTier", "SpotTermination", "Labels", "CredentialsFile", "Endpoint", "RequestsPerSecond"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named: %v", want, err)
		}
	}
}

func TestACrawlerWithoutThisBackendGetsNothingOfGoogles(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	source := "package main\n\nimport (\n\t_ \"crawl.example.com/egress\"\n"
	for _, backend := range []string{"kvm", "kvm2", "proxmox"} {
		if files, _ := filepath.Glob(filepath.Join(root, backend, "*.go")); len(files) > 0 {
			source += "\t_ \"crawl.example.com/egress/" + backend + "\"\n"
		}
	}
	dir := t.TempDir()
	write := func(name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("main.go", source+")\n\nfunc main() {}\n")
	write("go.mod", "module crawler\n\ngo 1.26.0\n\nrequire crawl.example.com/egress v0.0.0\n\nreplace crawl.example.com/egress => "+root+"\n")
	rootSums, err := os.ReadFile("../go.sum")
	if err != nil {
		t.Fatal(err)
	}
	write("go.sum", string(rootSums)) // so that nobody has to be asked for them
	list := exec.Command("go", "list", "-mod=mod", "-deps", "-f", "{{.ImportPath}} {{with .Module}}{{.Path}}{{end}}", ".")
	list.Dir, list.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=", "GOPROXY=off")
	packages, err := list.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, packages)
	}
	sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for what, text := range map[string][]byte{"packages": packages, "go.sum": sums, "the root's go.sum": rootSums} {
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "cloud.google.com/") || strings.Contains(line, "google.golang.org/") || strings.Contains(line, "github.com/googleapis/") {
				t.Errorf("%s: %s", what, line)
			}
		}
	}
}

// FuzzGet shows that no id leads to a request for anything but an instance.
func FuzzGet(f *testing.F) {
	f.Add("europe-west3-a/crawl--a--1/7")
	f.Add("europe-west3-a/../7")
	f.Add("../../7")
	var bad atomic.Value
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/compute/v1/projects/my-crawler/zones/") || strings.Contains(r.URL.Path, "..") {
			bad.Store(r.URL.Path)
		}
		http.Error(w, "{}", http.StatusBadRequest)
	}))
	f.Cleanup(server.Close)
	p, err := gcp.New(gcp.Config{Name: "gce", Project: "my-crawler", Zones: []string{zoneA}, Endpoint: server.URL, WithoutAuthentication: true, RequestsPerSecond: 1e6})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, id string) {
		if _, err := p.Get(t.Context(), id); err == nil {
			t.Error("no error")
		}
		if path := bad.Load(); path != nil {
			t.Errorf("%q asks for %v", id, path)
		}
	})
}
