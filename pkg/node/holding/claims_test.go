package holding_test

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const (
	gpu0 = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

// open returns the claims of an empty journal.
func open(t *testing.T) (*journal.Journal, *holding.Claims) {
	t.Helper()
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j, holding.NewClaims(j)
}

func put(t *testing.T, j *journal.Journal, r holding.Record) {
	t.Helper()
	if err := j.Put(r); err != nil {
		t.Fatal(err)
	}
}

// wholes has a GPU, and looks at another.
func wholes(uid string) holding.Record {
	return holding.Record{
		ClaimUID: uid, Namespace: "default", Name: "training", BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e",
		Holdings: []holding.Holding{
			{Device: "gpu-980fb007", GPU: gpu0, Request: "main/big"},
			{Device: "gpu-11111111", GPU: gpu1, Request: "look", Admin: true, ShareID: "share"},
		},
	}
}

func TestHolders(t *testing.T) {
	j, claims := open(t)
	put(t, j, wholes("a"))
	for name, tc := range map[string]struct {
		uuid   gpu.UUID
		except string
		want   []holding.Record
	}{
		"held":                   {gpu0, "b", []holding.Record{wholes("a")}},
		"held by the asking one": {gpu0, "a", nil},
		"admin holds nothing":    {gpu1, "b", nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, claims.Holders(gpu.Whole{GPU: tc.uuid}, tc.except)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestInUse checks that a shared device is in use until no daemon may run for any of its
// claims.
func TestInUse(t *testing.T) {
	j, claims := open(t)
	whole, part := gpu.Whole{GPU: gpu0}, gpu.Partition{GPU: gpu0, Profile: "3g.71gb", Placement: gpu.Placement{Size: 4}}
	for number, uid := range []string{"a", "b"} {
		put(t, j, holding.Record{ClaimUID: uid, Holdings: []holding.Holding{{
			Device: "d", GPU: gpu0, Partition: holding.PartitionOf(part), Share: &holding.Part{Count: 2, Number: number},
		}}})
	}
	put(t, j, holding.Record{ClaimUID: "admin", Holdings: []holding.Holding{{Device: "d", GPU: gpu0, Partition: holding.PartitionOf(part), Admin: true}}})
	check := func(want bool) {
		t.Helper()
		if claims.InUse(part) != want || claims.InUse(whole) != want {
			t.Errorf("in use: partition %v, GPU %v, want %v", claims.InUse(part), claims.InUse(whole), want)
		}
	}
	check(true)
	claims.SetLeaving("a")
	claims.SetLeft("a")
	check(true)
	claims.SetLeaving("b") // its daemon may still run
	check(true)
	claims.SetLeft("b")
	check(false)
	claims.Reset("a")
	check(true)
	if err := j.Delete("a"); err != nil {
		t.Fatal(err)
	}
	check(false)
}

// TestInUseByAnUnreadableRecord checks that a claim counts for every device if its file
// names none, until its devices are released.
func TestInUseByAnUnreadableRecord(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	claims, part := holding.NewClaims(j), gpu.Partition{GPU: gpu0, Profile: "3g.71gb", Placement: gpu.Placement{Size: 4}}
	if !claims.InUse(part) {
		t.Error("not in use, although a claim may hold it whose record can't be read")
	}
	claims.SetLeaving("a")
	claims.SetLeft("a")
	if claims.InUse(part) {
		t.Error("in use by a claim that has left")
	}
}

// TestLastToAskHearsFalse: claims that leave at the same time.
func TestLastToAskHearsFalse(t *testing.T) {
	j, claims := open(t)
	uids := []string{"a", "b", "c"}
	for range 60 {
		for _, uid := range uids {
			if err := j.Put(holding.Record{ClaimUID: uid, Holdings: []holding.Holding{{Device: "d", GPU: gpu0}}}); err != nil {
				t.Fatal(err)
			}
		}
		if !claims.InUse(gpu.Whole{GPU: gpu0}) {
			t.Fatal("not in use")
		}
		var unused atomic.Bool
		var wg sync.WaitGroup
		for _, uid := range uids {
			wg.Go(func() {
				claims.SetLeaving(uid)
				claims.SetLeft(uid)
				if !claims.InUse(gpu.Whole{GPU: gpu0}) {
					unused.Store(true)
				}
				if err := j.Delete(uid); err != nil {
					t.Error(err)
				}
				claims.Reset(uid)
			})
		}
		wg.Wait()
		if !unused.Load() {
			t.Fatal("all have left, and none has heard that it was the last")
		}
	}
}
