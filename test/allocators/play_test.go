package allocators_test

import (
	"testing"

	"github.com/tessera-dra/tessera/test/allocators"
)

// TestPlay plays a little with the allocator of the newest release; make
// allocators plays a lot with those of all releases.
func TestPlay(t *testing.T) {
	stage := allocators.Stage{Allocator: allocators.NewLibrary(), Server: newest(t).Server, Downgrades: true, PrioritizedList: true}
	var all allocators.Tally
	for seed := range uint64(40) {
		tally, err := allocators.Play(t.Context(), stage, seed, 40)
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

func newest(t *testing.T) allocators.Release {
	t.Helper()
	r, err := allocators.Find("1.37.1 default")
	if err != nil {
		t.Fatal(err)
	}
	return r
}
