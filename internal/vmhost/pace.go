package vmhost

import (
	"sync"
	"time"
)

const (
	// maxFlying is how many packets may be on their way to libvirtd. Measured, 3 of 256 KiB keep a host nearby busy.
	maxFlying = 3
	// paceSpan is after how many packets a pace judges itself.
	paceSpan = 16
	// paceLimit is how long a packet may have to wait on average. One every 5 ms is 50 MiB/s, which sshd manages whatever it
	// has to copy: the host is far away, its answers are held back or never come, or it is slower than that anyway.
	paceLimit = 5 * time.Millisecond
	// paceTries is how many spans in a row must be like that. The first takes 40 to 80 ms on a host nearby too, and now and then
	// one does on a host that is busy.
	paceTries = 5
)

// pace bounds what is on its way to libvirtd. sshd takes up to 2 MiB more than libvirtd does, into a buffer that it copies
// anew for each 32 KiB by which it grows, and that takes it longer than all the rest. So behind each packet goes a question,
// which libvirtd answers once it has read what came before. Where that does not pay it stops.
//
// Nothing is asked behind a packet that is known to be the last, as a seed's is: without TCP_NODELAY the host's word that it has everything would wait until the answer
// was acknowledged, which makes 10 ms for the seed of an instance 50.
type pace struct {
	packets *packets
	ask     func() // asks and returns when there is an answer, or none will come
	flying  chan struct{}
	held    bool          // the packet before has a place in flying
	n       int           // of the packets of this span
	waited  time.Duration // in this span
	late    int           // spans in a row that were too long

	questions sync.WaitGroup
}

func newPace(packets *packets, ask func()) *pace {
	return &pace{packets: packets, ask: ask, flying: make(chan struct{}, maxFlying)}
}

// Read is called when the packet before has been sent.
func (p *pace) Read(b []byte) (int, error) {
	if p.late < paceTries && !p.packets.last {
		if p.held {
			p.question()
		}
		p.held = p.wait()
	}
	return p.packets.Read(b)
}

// question asks whether the packet before has arrived.
func (p *pace) question() {
	p.questions.Go(func() {
		p.ask()
		<-p.flying
	})
}

// wait returns when another packet may be sent, and whether it has a place: none when this span has waited too long.
func (p *pace) wait() bool {
	begin := time.Now()
	timer := time.NewTimer(paceSpan*paceLimit - p.waited)
	defer timer.Stop()
	select {
	case p.flying <- struct{}{}:
	case <-timer.C:
		p.n, p.waited, p.late = 0, 0, p.late+1
		return false
	}
	p.waited += time.Since(begin)
	if p.n++; p.n == paceSpan {
		p.n, p.waited, p.late = 0, 0, 0
	}
	return true
}

// answered returns when each question has its answer or has ended with the session. Nothing may be read any more.
func (p *pace) answered() { p.questions.Wait() }
