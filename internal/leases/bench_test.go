package leases_test

import (
	"context"
	"fmt"
	"testing"

	"crawl.example.com/egress/internal/leases"
)

func table(n int) *leases.Table {
	t := leases.NewTable(leases.Hooks{})
	for i := range n {
		labels := map[string]string{"country": []string{"cz", "de"}[i%2]}
		t.Add(leases.Member{Proxy: fmt.Sprintf("p-%d", i), Labels: labels, MaxLeases: 5}).SetFit(true)
	}
	return t
}

func benchmarkRequest(b *testing.B, n int, req func(i int) *leases.Request) {
	t := table(n)
	defer t.Close()
	ctx := context.Background()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l := new(leases.Lease)
		if err := t.Acquire(ctx, req(i), l, 0); err != nil {
			b.Fatal(err)
		}
		l.Release()
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	plain := &leases.Request{}
	labelled := &leases.Request{Labels: map[string]string{"country": "cz"}}
	keyed := make([]*leases.Request, 10_000)
	for i := range keyed {
		keyed[i] = &leases.Request{Key: fmt.Sprintf("session-%d", i)}
	}
	for _, n := range []int{10, 1000, 20_000} {
		b.Run(fmt.Sprintf("plain/proxies=%d", n), func(b *testing.B) {
			benchmarkRequest(b, n, func(int) *leases.Request { return plain })
		})
		b.Run(fmt.Sprintf("selector/proxies=%d", n), func(b *testing.B) {
			benchmarkRequest(b, n, func(int) *leases.Request { return labelled })
		})
		b.Run(fmt.Sprintf("sticky/proxies=%d", n), func(b *testing.B) {
			benchmarkRequest(b, n, func(i int) *leases.Request { return keyed[i%len(keyed)] })
		})
	}
}

func BenchmarkContended(b *testing.B) {
	t := table(10)
	defer t.Close()
	ctx := context.Background()
	req := &leases.Request{}
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l := new(leases.Lease)
			if err := t.Acquire(ctx, req, l, 0); err != nil {
				b.Error(err)
				return
			}
			l.Release()
		}
	})
}
