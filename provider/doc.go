// Package provider is the contract between the pool and its backends.
//
// A backend implements [Provider] and, when it can tell how its hosts are, [Checker]; [Warner], [Prober] and
// [io.Closer] are optional too. [crawl.example.com/egress/provider/fake] is a backend in memory, and
// [crawl.example.com/egress/provider/providertest] is the conformance suite that every backend runs in its
// own tests.
//
// # The bargain
//
// The pool decides, a backend carries out. The pool names every instance before it asks for it, keeps
// every timeout, and asks again until the answer fits; a backend makes one attempt, tells the truth about
// it, and marks what it makes with a [Mark], so that a pool that starts anew recognises its own.
//
//   - What exists is what [Provider.List] says. An instance that could not be looked at is not gone:
//     see [PartialError].
//   - Every error a backend returns from a method with a context matches exactly one of the sentinels of
//     this package with errors.Is, and the sentinel says what the pool will do next. An error that matches
//     none is treated as [ErrUnavailable] from reads and as [ErrOutcomeUnknown] from Create and Delete.
//   - A backend never touches anything that does not carry the owner it was asked for.
//   - Every method is safe for concurrent use, and returns soon after its context ends.
//
// This package needs the standard library only.
package provider
