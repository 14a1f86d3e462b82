package leases

import (
	"runtime"
	"testing"
	"time"
)

func TestManyReportsOfOneBanTakeTheMemoryOfOne(t *testing.T) {
	table := NewTable(Hooks{})
	defer table.Close()
	e := table.Add(Member{Proxy: "a", MaxLeases: 1})
	e.SetFit(true)
	l := new(Lease)
	if err := table.TryAcquire(&Request{Target: "shop"}, l, 0); err != nil {
		t.Fatal(err)
	}
	for range 10000 {
		l.Report(Report{Kind: Banned, Cool: 24 * time.Hour})
	}
	l.Release()
	if n := len(table.cooling.ends); n > 1 {
		t.Errorf("one proxy and one target have %d ends", n)
	}
	e.Remove(nil)
	if n := len(table.cooling.ends); n > 0 {
		t.Errorf("a removed proxy has %d ends", n)
	}
}

func TestAStickyKeyDoesNotKeepARemovedProxyInMemory(t *testing.T) {
	table := NewTable(Hooks{})
	defer table.Close()
	gone := make(chan struct{})
	func() {
		e := table.Add(Member{Proxy: "a", MaxLeases: 1, Data: new([1 << 20]byte)})
		runtime.AddCleanup(e.member.Data.(*[1 << 20]byte), func(int) { close(gone) }, 0)
		e.SetFit(true)
		l := new(Lease)
		table.TryAcquire(&Request{Key: "k"}, l, 0)
		l.Release()
		e.Remove(nil)
	}()
	for range 20 {
		runtime.GC()
		select {
		case <-gone:
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Errorf("a removed entry and its Data live on")
	runtime.KeepAlive(table)
}
