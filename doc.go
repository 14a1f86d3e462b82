// Package egress gives a crawler its own fleet of forward proxies.
//
// A crawler states which proxies it wants. A [Pool] creates them as small virtual machines through its providers, or
// takes external ones, proves that they work, replaces them when their spec changes or they break, and leases them to
// the crawler's workers: never to more holders than allowed, and never one that is unfit.
//
// # Quick start
//
//	pool, err := egress.New(egress.Config{
//		Name:      "crawl", // the owner mark on every instance
//		Providers: []provider.Provider{home},
//	})
//	err = pool.Apply(ctx, egress.Replicate(5, "crawl-%02d", egress.Proxy{
//		Provider:  "home",
//		Image:     "debian-13",
//		CloudInit: egress.CloudInit{Inline: userData},
//	})...)
//	err = pool.Start(ctx)
//	defer pool.Close(context.Background())
//
//	client := pool.Client(egress.Request{}) // an *http.Client; every request leases a proxy
//	resp, err := client.Get("https://shop.example/")
//
//	lease, err := pool.Acquire(ctx, egress.Request{Key: "session-42", Target: "shop.example"})
//	defer lease.Release()
//	resp, err = lease.Client().Get("https://shop.example/cart")
//	lease.Report(egress.Banned(30 * time.Minute))
//
// # The life of a proxy
//
//	Pending ──► Provisioning ──► Booting ──► Ready ◄──► Unhealthy
//	   ▲            │ create         │ never     │            │ for too long
//	   │            ▼ failed         ▼ fit       ▼            ▼
//	   └─────── back-off ◄─────── Deleting ◄── Draining ◄── replaced by a newer instance
//
//	Failed: the provider says that it will never work; a new spec begins anew.
//
// One loop compares what is wanted with what the providers list, and takes the next step; nothing it relies on is kept
// anywhere else. A process that is killed at any point leaves instances that carry their mark, and the next one adopts or
// removes them. Instances that do not carry the pool's name are never touched.
//
// # Promises
//
//   - At no instant does a proxy have more holders than MaxLeases.
//   - A request is never sent without a proxy.
//   - A replacement is made before the old instance goes, as far as Config.Surge and the provider's room allow, and the
//     last proxies that work are not given up for unproven ones.
//   - When most proxies fail at once the probe site is suspected: nothing unhealthy is replaced, and the last good set
//     goes on serving.
//   - Secrets are in no log, no error, no event and no String.
//   - Every goroutine has ended when Close has returned nil.
//
// # Dependencies
//
// This package needs the standard library only. A backend's dependencies are paid for by importing that backend.
package egress
