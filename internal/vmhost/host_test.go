package vmhost

import (
	"errors"
	"strings"
	"testing"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/provider"
)

func TestAnInstanceIsMadeFoundAndDeletedWithAllThatBelongsToIt(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, r *rig) {
		x := r.create(t, "a", spec())
		if x.State != provider.StateRunning || x.Host != "attic" || x.Name != "own--a--1" || x.Message != "because" {
			t.Errorf("made %+v", x)
		}
		all, err := r.List(t.Context(), "own")
		if err != nil || len(all) != 1 || all[0].ID != x.ID || all[0].Mark != x.Mark || all[0].State != provider.StateRunning {
			t.Errorf("listed %+v, %v", all, err)
		}
		if others, err := r.List(t.Context(), "other"); err != nil || len(others) != 0 {
			t.Errorf("another owner sees %+v, %v", others, err)
		}
		d := r.peer.Domains()[0]
		if d.State != golibvirt.DomainRunning || d.Autostart {
			t.Errorf("the domain is in state %v, autostart %t", d.State, d.Autostart)
		}
		if err := r.Delete(t.Context(), x.ID); err != nil {
			t.Fatal(err)
		}
		if left := r.left(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		_, err = r.Get(t.Context(), x.ID)
		wantKind(t, err, provider.ErrNotFound, provider.ReasonUnknown, "there is no domain")
	})
}

func wantKind(t *testing.T, err, kind error, reason provider.Reason, text string) {
	t.Helper()
	if !errors.Is(err, kind) || provider.ReasonOf(err) != reason || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v (%v, %s), want %v, %s and %q", err, provider.Kind(err), provider.ReasonOf(err), kind, reason, text)
	}
}
