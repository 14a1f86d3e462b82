package fake

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/provider"
)

func request(proxy string) provider.CreateRequest {
	return provider.CreateRequest{
		Name: provider.InstanceName("o", proxy, 1),
		Mark: provider.Mark{Owner: "o", Proxy: proxy, Generation: 1, HashVersion: 1, Hash: "h"},
	}
}

func TestAnInstanceBootsHidesAndGoesInFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(Config{CreateTime: time.Minute, BootTime: time.Hour, ListLag: 25 * time.Second, DeleteTime: time.Minute})
		begin := time.Now()
		x, err := p.Create(t.Context(), request("a"))
		if err != nil || time.Since(begin) != time.Minute || x.State != provider.StatePending || x.Address != "" {
			t.Fatalf("%+v, %v after %s", x, err, time.Since(begin))
		}
		time.Sleep(time.Hour)
		if got, err := p.Get(t.Context(), x.ID); err != nil || got.State != provider.StateRunning || got.Address == "" || !p.Alive(got.Address) {
			t.Fatalf("%+v, %v", got, err)
		}
		if all, _ := p.List(t.Context(), "o"); len(all) != 1 || all[0].State != provider.StatePending {
			t.Errorf("a list that lags shows %+v", all)
		}
		if err := p.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Get(t.Context(), x.ID); err != nil || got.State != provider.StateDeleting {
			t.Errorf("%+v, %v", got, err)
		}
		time.Sleep(time.Minute)
		if _, err := p.Get(t.Context(), x.ID); !errors.Is(err, provider.ErrNotFound) {
			t.Errorf("got %v", err)
		}
		if all, _ := p.List(t.Context(), "o"); len(all) != 1 {
			t.Errorf("a list that lags has forgotten already: %+v", all)
		}
		time.Sleep(25 * time.Second)
		if all, _ := p.List(t.Context(), "o"); len(all) != 0 {
			t.Errorf("got %+v", all)
		}
	})
}

func TestADirectoryIsSeenByTheNextProvider(t *testing.T) {
	dir := t.TempDir()
	x, err := New(Config{Store: Dir(dir)}).Create(t.Context(), request("a"))
	if err != nil {
		t.Fatal(err)
	}
	next := New(Config{Store: Dir(dir)})
	if got, err := next.Get(t.Context(), x.ID); err != nil || got.Mark != x.Mark || got.Address != x.Address {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestFaultsDoWhatTheySay(t *testing.T) {
	p := New(Config{Capacity: 2})
	p.FailNext(OpCreate, provider.ErrUnavailable, 1)
	if _, err := p.Create(t.Context(), request("a")); !errors.Is(err, provider.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	p.CreateThenFail(provider.ErrOutcomeUnknown, 1)
	if _, err := p.Create(t.Context(), request("a")); !errors.Is(err, provider.ErrOutcomeUnknown) || len(p.Instances()) != 1 {
		t.Errorf("got %v with %d instances", err, len(p.Instances()))
	}
	b, err := p.Create(t.Context(), request("b"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Create(t.Context(), request("c")); !errors.Is(err, provider.ErrNoCapacity) {
		t.Errorf("got %v", err)
	}
	if err := p.Kill(b.ID); err != nil || p.Alive(b.Address) {
		t.Errorf("killed and alive, %v", err)
	}
	if err := p.Revive(b.ID); err != nil || !p.Alive(b.Address) {
		t.Errorf("revived and dead, %v", err)
	}
	p.Preempt(b.ID)
	if got, _ := p.Get(t.Context(), b.ID); got.State != provider.StateStopped || p.Alive(b.Address) {
		t.Errorf("got %+v", got)
	}
	p.Vanish(b.ID)
	if _, err := p.Get(t.Context(), b.ID); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if calls := p.Calls(OpCreate); len(calls) != 4 || calls[0].Err == nil || calls[2].Err != nil || p.MostInstances() != 2 {
		t.Errorf("calls %+v, most %d", calls, p.MostInstances())
	}
}

func TestAServedInstanceIsARealProxyWithFaultsAndCounters(t *testing.T) {
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	defer origin.Close()
	p := New(Config{Serve: true, Username: "u", Password: "p"})
	defer p.Close()
	x, err := p.Create(t.Context(), request("a"))
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableKeepAlives: true, Proxy: http.ProxyURL(&url.URL{
		Scheme: "http", Host: net.JoinHostPort(x.Address, strconv.Itoa(x.Port)), User: url.UserPassword("u", "p"),
	})}
	status := func() int {
		resp, err := (&http.Client{Transport: transport}).Get(origin.URL)
		if err != nil {
			return 0
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	for _, c := range []struct {
		faults Faults
		want   int
	}{{Faults{}, 200}, {Faults{Deny: true}, 407}, {Faults{Status: 503, Body: "later"}, 503}, {Faults{Refuse: true}, 0}, {Faults{}, 200}} {
		if err := p.SetFaults(x.ID, c.faults); err != nil {
			t.Fatal(err)
		}
		if got := status(); got != c.want {
			t.Errorf("%+v: got %d, want %d", c.faults, got, c.want)
		}
	}
	if c := p.Counters(x.ID); c.Requests != 3 || c.AuthFails != 1 || c.Bytes == 0 {
		t.Errorf("got %+v", c)
	}
	if err := p.SetFaults("nobody", Faults{}); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}
