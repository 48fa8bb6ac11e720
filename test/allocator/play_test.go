package allocator_test

import (
	"testing"

	"github.com/tessera-dra/tessera/test/allocator"
)

// TestPlay plays a little with the allocator of the newest release; make
// allocators plays a lot with those of all releases.
func TestPlay(t *testing.T) {
	stage := allocator.Stage{Allocator: allocator.NewLibrary(), Server: newest(t).Server, Downgrades: true, PrioritizedList: true}
	var all allocator.Tally
	for seed := range uint64(40) {
		tally, err := allocator.Play(t.Context(), stage, seed, 40)
		if err != nil {
			t.Fatal(err)
		}
		all.Add(tally)
	}
	for kind, n := range all.Asked {
		if all.Allocated[kind] == 0 {
			t.Errorf("none of %d claims for %s was allocated", n, kind)
		}
	}
}

func newest(t *testing.T) allocator.Release {
	t.Helper()
	r, err := allocator.Find("1.37.1 default")
	if err != nil {
		t.Fatal(err)
	}
	return r
}
