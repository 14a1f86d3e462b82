package egress

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

// ask sends a request to the handler without a network.
func ask(h http.Handler, method, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w
}

// reportOf is what status.json says.
func reportOf(t *testing.T, h http.Handler) StatusReport {
	t.Helper()
	w := ask(h, http.MethodGet, "/status.json")
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("got %d %v", w.Code, w.Header())
	}
	in := json.NewDecoder(w.Body)
	in.DisallowUnknownFields()
	var r StatusReport
	if err := in.Decode(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

func wantHealth(t *testing.T, h http.Handler, status int, text string) {
	t.Helper()
	w := ask(h, http.MethodGet, "/healthz")
	if w.Code != status || w.Body.String() != text+"\n" {
		t.Errorf("got %d %q, want %d %q", w.Code, w.Body, status, text)
	}
	if r := reportOf(t, h); r.Health != text || r.Healthy != (status == http.StatusOK) {
		t.Errorf("status.json says %t %q", r.Healthy, r.Health)
	}
}

func TestHealthzSaysWhetherProxiesCanBeLeasedAndWhyNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: 10 * time.Second})
		p, err := newPool(Config{Name: "test", Providers: []provider.Provider{f}}, aliveProber(f))
		if err != nil {
			t.Fatal(err)
		}
		h := p.Handler()
		wantHealth(t, h, 503, "the pool is not started")
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantHealth(t, h, 200, "ok: no proxy is wanted")
		if err := p.Apply(t.Context(), fleet(3)...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		wantHealth(t, h, 503, "none of 3 proxies is ready; 3 Booting")
		waitReady(t, p, 3)
		wantHealth(t, h, 200, "ok: 3 of 3 proxies are ready")
		if err := f.Kill(f.Instances()[0].ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		wantHealth(t, h, 200, "ok: 2 of 3 proxies are ready; 1 Unhealthy")
		for _, x := range f.Instances() {
			if err := f.Kill(x.ID); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * time.Minute)
		if w := ask(h, http.MethodGet, "/healthz"); !strings.HasSuffix(w.Body.String(), "; most probes fail at once, so the probe site is suspect\n") {
			t.Errorf("got %d %q", w.Code, w.Body)
		}
		if r := reportOf(t, h); !r.Suspect {
			t.Errorf("got %+v", r)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantHealth(t, h, 503, "the pool is closed")
		if r := reportOf(t, h); r.State != "closed" {
			t.Errorf("got %+v", r)
		}
	})
}

func TestStatusJSONHoldsPoolLeasesProvidersAndProxies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{Hosts: []string{"a", "b"}})
		f.SetHealth(func(context.Context) []provider.TargetHealth {
			now := time.Now()
			return []provider.TargetHealth{
				{Target: "a", Ready: true, Reason: provider.ReasonReady, Duration: 1500 * time.Millisecond, CheckedAt: now},
				{Target: "b", Reason: provider.ReasonTimeout, Message: "no answer in time", CheckedAt: now},
			}
		})
		proxies := fleet(2)
		proxies[0].Labels = map[string]string{"country": "cz"}
		p := started(t, f, nil, append(proxies, Proxy{Name: "theirs", Mode: External, Endpoint: "192.0.2.7:8080"})...)
		h := p.Handler()
		waitReady(t, p, 2)
		lease, err := p.TryAcquire(Request{Labels: map[string]string{"country": "cz"}, Target: "shop.example"})
		if err != nil {
			t.Fatal(err)
		}
		defer lease.Release()
		lease.Report(Banned(time.Hour))
		f.FailNext(fake.OpList, errors.New("the wire is cut"), 100)
		time.Sleep(time.Minute)

		r := reportOf(t, h)
		if r.Pool != "test" || r.State != "started" || !r.Time.Equal(time.Now()) {
			t.Errorf("got %+v", r)
		}
		if r.Leases.Held != 1 || r.Leases.Granted != 1 || r.Instances.Wanted != 3 || r.Instances.Ready != 2 || r.Instances.Created != 2 || r.Probes.Done == 0 {
			t.Errorf("got %+v %+v %+v", r.Leases, r.Instances, r.Probes)
		}
		home := r.Providers[0]
		if len(r.Providers) != 1 || home.Name != "fake" || home.Listed.IsZero() || !strings.HasSuffix(home.ListError, "the wire is cut") {
			t.Errorf("got %+v", r.Providers)
		}
		if a, b := home.Targets[0], home.Targets[1]; !a.Ready || a.DurationSeconds != 1.5 || b.Ready || b.Reason != "Timeout" || b.Message != "no answer in time" {
			t.Errorf("got %+v", home.Targets)
		}
		if len(r.Proxies) != 3 {
			t.Fatalf("got %+v", r.Proxies)
		}
		x := r.Proxies[0]
		if x.Name != "p-001" || x.Mode != "managed" || x.Provider != "fake" || x.Labels["country"] != "cz" || !x.Wanted || x.Phase != PhaseReady ||
			x.Instance != "test--p-001--1" || x.Generation != 1 || !strings.HasSuffix(x.Address, ":3128") || x.Host == "" ||
			x.Leases != 1 || x.MaxLeases != DefaultMaxLeases || x.Granted != 1 || x.LastProbe == nil || !x.LastProbe.OK {
			t.Errorf("got %+v", x)
		}
		if until := x.Cooling["shop.example"].Sub(r.Time); until < 58*time.Minute || until > time.Hour {
			t.Errorf("banned for %s", until)
		}
		if x := r.Proxies[2]; x.Name != "theirs" || x.Mode != "external" || x.Provider != "" || x.Address != "192.0.2.7:8080" || x.LastProbe.OK {
			t.Errorf("got %+v", x)
		}
		page := ask(h, http.MethodGet, "/").Body.String()
		for _, want := range []string{
			"<title>ok · test · egress</title>", "ok: 2 of 3 proxies are ready", "can’t be listed", "the wire is cut", "no answer in time",
			"p-001", "country=cz", "banned by shop.example for 59\u00a0min", "192.0.2.7:8080", "1 of 5",
		} {
			if !strings.Contains(page, want) {
				t.Errorf("the page lacks %q", want)
			}
		}
	})
}

// The names are a promise to whoever reads the file.
func TestTheFieldsOfStatusJSONKeepTheirNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		p := started(t, f, nil, fleet(1)...)
		waitReady(t, p, 1)
		var top map[string]any
		if err := json.Unmarshal(ask(p.Handler(), http.MethodGet, "/status.json").Body.Bytes(), &top); err != nil {
			t.Fatal(err)
		}
		first := func(key string, in map[string]any) map[string]any { return in[key].([]any)[0].(map[string]any) }
		for _, c := range []struct {
			name  string
			have  map[string]any
			names string
		}{
			{"top", top, "health healthy instances leases pool probes providers proxies state suspect time"},
			{"leases", top["leases"].(map[string]any), "exhausted granted held leaked revoked wait_max_seconds wait_total_seconds waited waiting"},
			{"instances", top["instances"].(map[string]any), "adopted create_errors created deleted known provider_calls ready replaced wanted"},
			{"probes", top["probes"].(map[string]any), "done failed"},
			{"provider", first("providers", top), "denied full listed name targets"},
			{"target", first("targets", first("providers", top)), "checked duration_seconds ready reason since target"},
			{"proxy", first("proxies", top), "address failures generation granted host instance last_probe leases max_leases mode name phase provider since wanted"},
			{"probe", first("proxies", top)["last_probe"].(map[string]any), "duration_seconds message ok reason time"},
		} {
			for name := range strings.FieldsSeq(c.names) {
				if _, ok := c.have[name]; !ok {
					t.Errorf("%s lacks %s: %v", c.name, name, c.have)
				}
			}
		}
	})
}

const script = `"'><script>alert(1)</script>`

func TestNamesAndMessagesFromOutsideAreEscapedOnThePage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{Name: script, Hosts: []string{script}})
		f.SetHealth(func(context.Context) []provider.TargetHealth {
			return []provider.TargetHealth{{Target: script, Reason: script, Message: script, CheckedAt: time.Now()}}
		})
		f.FailNext(fake.OpCreate, fmt.Errorf("%w: %s", provider.ErrPermanent, script), 1)
		proxies := fleet(2)
		for i := range proxies {
			proxies[i].Provider, proxies[i].Labels = script, map[string]string{script: script}
		}
		p := started(t, f, nil, proxies...)
		waitReady(t, p, 1)
		lease, err := p.TryAcquire(Request{Target: script})
		if err != nil {
			t.Fatal(err)
		}
		lease.Report(Banned(time.Hour))
		lease.Release()
		f.FailNext(fake.OpList, errors.New(script), 100)
		time.Sleep(time.Minute)
		h := p.Handler()
		page := ask(h, http.MethodGet, "/").Body.String()
		if n := strings.Count(page, "&lt;script&gt;"); n < 9 {
			t.Errorf("%d messages are on the page, want all of them:\n%s", n, page)
		}
		if strings.Contains(page, "<script") {
			t.Errorf("a script is on the page:\n%s", page)
		}
		if raw := ask(h, http.MethodGet, "/status.json").Body.String(); strings.Contains(raw, "<script") {
			t.Errorf("a script is in status.json:\n%s", raw)
		}
		if r := reportOf(t, h); r.Providers[0].Targets[0].Message != script {
			t.Errorf("got %+v", r.Providers)
		}
	})
}

func TestTheStatusShowsNoSecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{})
		secrets := SecretFunc(func(_ context.Context, ref string) ([]byte, error) {
			if ref == "gone" {
				return nil, fmt.Errorf("%w: %q", ErrSecretNotFound, ref)
			}
			return []byte("hidden-user:hidden-" + ref), nil
		})
		inline, secret, gone := managed("inline"), managed("secret"), managed("gone")
		inline.CloudInit = CloudInit{Inline: "#cloud-config\n# hidden-inline\n", Vendor: "#!/bin/sh\n# hidden-vendor\n"}
		inline.Auth = Credentials{Username: "hidden-user", Password: "hidden-password"}
		secret.CloudInit = CloudInit{Secret: "document"}
		secret.Auth = Credentials{Secret: "auth"}
		gone.CloudInit = CloudInit{Secret: "gone"}
		theirs := Proxy{Name: "theirs", Mode: External, Endpoint: "http://hidden-user:hidden-endpoint@192.0.2.7:8080"}
		p := started(t, f, func(c *Config) { c.Secrets, c.HashKey = secrets, []byte("hidden-key") }, inline, secret, gone, theirs)
		waitReady(t, p, 2)
		h := p.Handler()
		for _, path := range []string{"/", "/healthz", "/status.json"} {
			text := ask(h, http.MethodGet, path).Body.String()
			if strings.Contains(text, "hidden") {
				t.Errorf("%s shows a secret:\n%s", path, text)
			}
			for _, s := range p.Proxies() {
				if s.SpecHash != "" && strings.Contains(text, s.SpecHash) {
					t.Errorf("%s shows a spec hash", path)
				}
			}
		}
		if w := ask(h, http.MethodGet, "/"); !strings.Contains(w.Body.String(), "secret not found: &#34;gone&#34;") {
			t.Errorf("the page does not say which secret is missing:\n%s", w.Body)
		}
	})
}

func TestTheHandlerServesThreePathsByGetAndHeadOnly(t *testing.T) {
	p, err := New(Config{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", p.Handler())
	mux.Handle("/below/", http.StripPrefix("/below", p.Handler()))
	server := httptest.NewServer(mux)
	defer server.Close()
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/", 200}, {"HEAD", "/", 200}, {"GET", "/status.json", 200}, {"HEAD", "/status.json", 200},
		{"GET", "/healthz", 503}, {"HEAD", "/healthz", 503}, {"GET", "/?x=1", 200},
		{"GET", "/below", 200}, {"GET", "/below/", 200}, {"GET", "/below/status.json", 200}, {"GET", "/below/healthz", 503},
		{"POST", "/", 405}, {"PUT", "/healthz", 405}, {"DELETE", "/status.json", 405}, {"OPTIONS", "/", 405}, {"POST", "/other", 405},
		{"GET", "/other", 404}, {"GET", "/healthz/", 404}, {"GET", "/status", 404}, {"GET", "/below/other", 404}, {"GET", "/favicon.ico", 404},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != c.status || (len(body) == 0) != (c.method == "HEAD") {
			t.Errorf("%s %s: got %s with %d bytes, %v, want %d", c.method, c.path, resp.Status, len(body), err, c.status)
		}
		if c.method == "HEAD" && resp.ContentLength <= 0 {
			t.Errorf("%s %s has no length", c.method, c.path)
		}
		if allow := resp.Header.Get("Allow"); (allow == "GET, HEAD") != (c.status == 405) {
			t.Errorf("%s %s allows %q", c.method, c.path, allow)
		}
		h := resp.Header
		if h.Get("Cache-Control") != "no-store" || h.Get("X-Content-Type-Options") != "nosniff" || !strings.HasPrefix(h.Get("Content-Security-Policy"), "default-src 'none'; ") {
			t.Errorf("%s %s has %v", c.method, c.path, h)
		}
	}
}

func TestThePagesOnlyStyleIsTheOneThatItsPolicyAllowsAndItsLinksAreRelative(t *testing.T) {
	p, err := New(Config{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	w := ask(p.Handler(), http.MethodGet, "/")
	page := w.Body.Bytes()
	styles := regexp.MustCompile(`(?s)<style>(.*?)</style>`).FindAllSubmatch(page, -1)
	if len(styles) != 1 || bytes.Contains(page, []byte("style=")) {
		t.Fatalf("%d style sheets", len(styles))
	}
	sum := sha256.Sum256(styles[0][1])
	want := "style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	if policy := w.Header().Get("Content-Security-Policy"); !strings.Contains(policy, want) {
		t.Errorf("got %s, want %s in it", policy, want)
	}
	links := regexp.MustCompile(`(?:href|src|action)="([^"]*)"`).FindAllSubmatch(page, -1)
	if len(links) == 0 {
		t.Error("there are no links")
	}
	for _, l := range links {
		if link := string(l[1]); link != "healthz" && link != "status.json" {
			t.Errorf("there is a link to %q", link)
		}
	}
}

func TestALargeFleetsPageShowsThoseInTroubleAndCountsTheRest(t *testing.T) {
	r := StatusReport{Time: time.Now()}
	for i := range 2 * maxRows {
		x := ProxyReport{Name: fmt.Sprintf("p-%04d", i), Phase: PhaseReady}
		if i%10 == 9 {
			x.Phase = PhaseUnhealthy
		}
		r.Proxies = append(r.Proxies, x)
	}
	v := viewOf(r)
	bad := 0
	for i, row := range v.Rows {
		if row.Phase == PhaseUnhealthy {
			bad++
		}
		if i > 0 && row.Name <= v.Rows[i-1].Name {
			t.Errorf("%s comes after %s", row.Name, v.Rows[i-1].Name)
		}
	}
	if len(v.Rows) != maxRows || v.Left != maxRows || bad != 2*maxRows/10 {
		t.Errorf("%d rows, %d of them bad, %d left", len(v.Rows), bad, v.Left)
	}
}

func TestTheStatusOfABusyPoolCanBeReadAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fake.New(fake.Config{BootTime: time.Second, DeleteTime: time.Second})
		p := started(t, f, func(c *Config) { c.ListInterval, c.StoppedGrace = time.Second, time.Second }, fleet(5)...)
		waitReady(t, p, 5)
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
		defer stop()
		var workers sync.WaitGroup
		for i := range 4 {
			workers.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					_ = p.Do(ctx, Request{Target: fmt.Sprint(n % 7)}, func(_ context.Context, l *Lease) error {
						time.Sleep(100 * time.Millisecond)
						if n%9 == i {
							l.Report(Banned(time.Second))
						}
						return nil
					})
				}
			})
		}
		workers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				time.Sleep(5 * time.Second)
				if err := p.Apply(ctx, fleet(4+n%3)...); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
				_ = f.Preempt(f.Instances()[0].ID)
			}
		})
		h := p.Handler()
		for ctx.Err() == nil {
			time.Sleep(70 * time.Millisecond)
			for _, path := range []string{"/", "/healthz"} {
				if w := ask(h, http.MethodGet, path); w.Code != http.StatusOK {
					t.Fatalf("%s: %d %s", path, w.Code, w.Body)
				}
			}
			reportOf(t, h)
		}
		workers.Wait()
	})
}
