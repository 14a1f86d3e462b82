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
// [Pool.Apply] declares the whole set each time and may be called again while the pool runs. The backends are in the
// packages kvm, kvm2, proxmox and gcp; provider/fake is one in memory, for tests. A proxy that somebody else runs is
// declared with Mode [External] and its Endpoint, and needs no provider.
//
// # The life of a proxy
//
//	Pending ---> Provisioning ---> Booting ---> Ready <----> Unhealthy
//	   ^              |               |           |              |
//	   |       create |           not |    drift, |              |
//	   |      failed: |        fit in |      age, |          for |
//	   |     back-off |   BootTimeout |   Refresh | UnhealthyGrace
//	   +<-------------+               |           v              |
//	   |                              |        Draining <--------+
//	   |                              v           | no lease is left,
//	   +<--------- gone <--------- Deleting <-----+ or DrainDeadline
//
//	Failed: the provider says that it can never work. A new spec, or Refresh, begins anew.
//
// Probe.Rise good probes in a row make a proxy Ready; Probe.Fall bad ones, or one report of [Broken], make it Unhealthy. A
// replacement is made before the old instance goes where there is room, and the proxy stays Ready all along then. One that
// Apply removed is drained and deleted for good. An external proxy is Pending until its first probe, then Ready or Unhealthy.
//
// One loop compares what is wanted with what the providers list, and takes the next step; nothing it relies on is kept
// anywhere else. A process that is killed at any point leaves instances that carry their mark, and the next one adopts or
// removes them. Instances that do not carry the pool's name are never touched.
//
// # Leases
//
//   - A lease is on a proxy that is fit, has the request's Labels, is not in Exclude, is not cooling down for its
//     Target, and has fewer than MaxLeases holders. Of several the least loaded is taken, and ties rotate.
//   - [Pool.Acquire] waits, first come first served; a place that becomes free goes straight to the first waiter that it
//     suits. [Pool.TryAcquire] does not wait. What no declared proxy could ever satisfy fails at once.
//   - A Key is sticky: it gets the instance it had, and waits for that while it is full. It moves only when that instance
//     is unfit, gone, or not allowed by the request, and [Lease.Moved] says so.
//   - A lease ends with [Lease.Release], which may be called twice, or when the pool revokes it: when its TTL is over, when
//     its instance is gone or has to go and DrainDeadline is over, when the proxy's address or credentials change, and
//     when the pool is closed. [Lease.Context] ends then, and its cause is a *[RevokedError]. Requests under way are cut off.
//   - A lease that is dropped without Release is taken back, counted and logged with the line that acquired it.
//   - [Lease.Report] says what the holder learned. [Banned] keeps the proxy from that Target for a while, [Broken] takes it out
//     of service until a probe succeeds, [Failed] has it probed soon. The pool's own transports report failures at the
//     proxy; they can't know a ban.
//   - A request through [Pool.Client] or [Pool.Transport] holds a lease until its response's body was read to the end or
//     closed: always close it.
//
// # Errors
//
// Sentinels are for errors.Is, and types carry the facts:
//
//   - [ErrExhausted], *[ExhaustedError]: no proxy was free in time. The counts say why: full, cooling down, excluded, unfit.
//   - [ErrNoMatch], *[NoMatchError]: no declared proxy can ever suit the request. Waiting would not help.
//   - *[ProxyError]: the request failed at the proxy, not at its target. Try another; [Request].Retries does.
//   - *[RevokedError]: the pool took the lease back. Acquire a new one.
//   - [ErrReleased]: the lease was used after its Release.
//   - [ErrNotStarted], [ErrStarted], [ErrClosed]: the call came too early, twice or too late.
//   - [ErrUnknownProxy], [ErrSecretNotFound]: a name or a reference leads nowhere.
//
// Faulty input to [New] and [Pool.Apply] is answered with all its faults at once, each of which names field and value. What
// a backend says is a *[provider.Error] with a kind that decides what the pool does next; it is in [ProxyStatus].Message,
// in events and in the log, and no call of the crawler's fails for it.
//
// # What to alert on
//
//   - [Stats].Ready well below Proxies, or no proxy ready: healthz of [Pool.Handler] answers 503 to the latter.
//   - Stats.Suspect: most proxies fail at once, so the probe's site or the crawler's own network is in trouble.
//   - A proxy in [PhaseFailed]: it waits for a new spec. A proxy whose Reason is "denied": the backend refuses the
//     pool's credentials.
//   - Stats.Exhausted or WaitTotal rising: too few proxies for the work, or most of them banned.
//   - Stats.Leaked above 0: a bug in the crawler; the log has the line.
//   - Stats.CreateErrors rising, or a target of [Pool.ProviderHealth] that is not Ready: a host is ill or full.
//   - [EventSameEgress]: two proxies have one address, so a ban of one is a ban of both. It takes [Probe].EchoURL.
//
// # Promises
//
//   - At no instant does an instance get a lease beyond its proxy's MaxLeases.
//   - A request is never sent without a proxy.
//   - A replacement is made before the old instance goes, as far as Config.Surge and the provider's room allow, and the
//     last proxies that work are not given up for unproven ones.
//   - When most proxies fail at once the probe site is suspected: nothing unhealthy is replaced for Config.SuspectDelay and
//     one at a time after it, and the last good set goes on serving.
//   - Secrets are in no log, no error, no event and no String.
//   - Every goroutine has ended when Close has returned nil.
//
// # Dependencies
//
// This package needs the standard library only. A backend's dependencies are paid for by importing that backend.
package egress
