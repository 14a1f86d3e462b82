package egress_test

import (
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/provider/fake"
)

func TestACrawlersOwnTestsNeedNoNetworkAndNoRealTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		backend := fake.New(fake.Config{BootTime: time.Hour})
		pool, err := egress.New(egress.Config{Name: "test", Providers: []provider.Provider{backend}, BootTimeout: 2 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		proxy := egress.Proxy{Name: "a", Provider: "fake", CloudInit: egress.CloudInit{Inline: "#cloud-config\n"}}
		if err := pool.Apply(t.Context(), proxy); err != nil {
			t.Fatal(err)
		}
		if err := pool.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		lease, err := pool.Acquire(t.Context(), egress.Request{})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < time.Hour || took > 61*time.Minute {
			t.Errorf("the lease took %s", took)
		}
		lease.Release()
		if err := backend.Kill(backend.Instances()[0].ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Hour)
		if s := pool.Proxies()[0]; s.Generation != 2 || s.Phase != egress.PhaseReady {
			t.Errorf("got %+v", s)
		}
		if err := pool.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
