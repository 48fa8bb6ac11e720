package holding_test

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const (
	gpu0 = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

// open returns an empty journal.
func open(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
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
	j := open(t)
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
			if diff := cmp.Diff(tc.want, j.Claims().Holders(gpu.Whole{GPU: tc.uuid}, tc.except).Records(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestInUse checks that a shared device is in use until no daemon may run for any of its
// claims.
func TestInUse(t *testing.T) {
	j := open(t)
	whole, part := gpu.Whole{GPU: gpu0}, gpu.Partition{GPU: gpu0, Profile: "3g.71gb", Placement: gpu.Placement{Size: 4}}
	for number, uid := range []string{"a", "b"} {
		put(t, j, holding.Record{ClaimUID: uid, Holdings: []holding.Holding{{
			Device: "d", GPU: gpu0, Partition: holding.PartitionOf(part), Share: &holding.Part{Count: 2, Number: number},
		}}})
	}
	put(t, j, holding.Record{ClaimUID: "admin", Holdings: []holding.Holding{{Device: "d", GPU: gpu0, Partition: holding.PartitionOf(part), Admin: true}}})
	check := func(want bool) {
		t.Helper()
		if j.Claims().InUse(part) != want || j.Claims().InUse(whole) != want {
			t.Errorf("in use: partition %v, GPU %v, want %v", j.Claims().InUse(part), j.Claims().InUse(whole), want)
		}
	}
	check(true)
	j.AdvancePhase("a", holding.Leaving)
	j.AdvancePhase("a", holding.Left)
	check(true)
	j.AdvancePhase("b", holding.Leaving) // its daemon may still run
	check(true)
	j.AdvancePhase("b", holding.Left)
	check(false)
	j.ResetPhase("a")
	check(true)
	if err := j.Delete("a"); err != nil {
		t.Fatal(err)
	}
	check(false)
}

// TestWhatAnUnreadableRecordBlocks: nobody else is given a device that it names. Nothing is
// taken away on the device's GPU, or anywhere if it names none.
func TestWhatAnUnreadableRecordBlocks(t *testing.T) {
	dir := t.TempDir()
	for uid, contents := range map[string]string{
		"named": `"device":"gpu-980fb007-mig-3g71gb-0-mps2-0","gpu":"` + string(gpu0) + `","request":"r"`,
		"admin": `"device":"gpu-980fb007","gpu":"` + string(gpu0) + `","request":"r","admin":true`,
		"torn":  "{",
	} {
		if err := os.WriteFile(filepath.Join(dir, uid+".json"), []byte(contents), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	const shared, ofTheOther = "gpu-980fb007-mig-3g71gb-0", "gpu-11111111"
	type blocks struct{ Holds, MayHave, MayUse, MayNeedSettings, MayNeed, MayNeedOwn bool }
	ask := func(c holding.Claim, uuid gpu.UUID, daemon string) blocks {
		// A partition that the file doesn't name: only names can be made out of it.
		part := gpu.Partition{GPU: uuid, Profile: "1g.18gb", Placement: gpu.Placement{Start: 6, Size: 1}}
		return blocks{c.Holds(part), c.MayHave(part), c.MayUse(uuid), c.MayNeedSettings(uuid), c.MayNeed(daemon), c.MayNeed(c.OwnDaemonName())}
	}
	for uid, want := range map[string]struct{ there, elsewhere blocks }{
		"named": {blocks{true, true, true, true, true, true}, blocks{MayNeedOwn: true}},
		"admin": {blocks{MayUse: true, MayNeedSettings: true, MayNeedOwn: true}, blocks{MayNeedOwn: true}},
		"torn":  {blocks{false, true, true, true, true, true}, blocks{false, true, true, true, true, true}},
	} {
		c, _ := j.Claim(uid)
		if !c.IsUnreadable() || c.Err == nil || c.File != filepath.Join(dir, uid+".corrupt") {
			t.Fatalf("%s: %+v, want it unreadable", uid, c)
		}
		if diff := cmp.Diff(want.there, ask(c, gpu0, shared)); diff != "" {
			t.Errorf("%s, the GPU that it may be about (-want +got):\n%s", uid, diff)
		}
		if diff := cmp.Diff(want.elsewhere, ask(c, gpu1, ofTheOther)); diff != "" {
			t.Errorf("%s, another GPU (-want +got):\n%s", uid, diff)
		}
		if !c.MayBeOf("any boot") || c.IsOf("") {
			t.Errorf("%s: its boot isn't known, so it may be the current one", uid)
		}
	}
}

// TestPhases: an unprepare that is tried again doesn't fall back behind what an earlier
// attempt has reached, and the end of a record or the next prepare ends it.
func TestPhases(t *testing.T) {
	j := open(t)
	check := func(want holding.Phase) {
		t.Helper()
		if c, _ := j.Claim("a"); c.Phase != want {
			t.Errorf("phase %d, want %d", c.Phase, want)
		}
	}
	put(t, j, wholes("a"))
	check(holding.Prepared)
	j.AdvancePhase("a", holding.Leaving)
	j.AdvancePhase("a", holding.Unpreparing)
	check(holding.Leaving)
	put(t, j, wholes("a")) // it is given up, for instance
	check(holding.Leaving)
	j.ResetPhase("a")
	check(holding.Prepared)
	j.AdvancePhase("a", holding.Left)
	if err := j.Delete("a"); err != nil {
		t.Fatal(err)
	}
	put(t, j, wholes("a"))
	check(holding.Prepared)
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
	part := gpu.Partition{GPU: gpu0, Profile: "3g.71gb", Placement: gpu.Placement{Size: 4}}
	if !j.Claims().InUse(part) {
		t.Error("not in use, although a claim may hold it whose record can't be read")
	}
	j.AdvancePhase("a", holding.Leaving)
	j.AdvancePhase("a", holding.Left)
	if j.Claims().InUse(part) {
		t.Error("in use by a claim that has left")
	}
}

// TestLastToAskHearsFalse: claims that leave at the same time.
func TestLastToAskHearsFalse(t *testing.T) {
	j := open(t)
	uids := []string{"a", "b", "c"}
	for range 60 {
		for _, uid := range uids {
			if err := j.Put(holding.Record{ClaimUID: uid, Holdings: []holding.Holding{{Device: "d", GPU: gpu0}}}); err != nil {
				t.Fatal(err)
			}
		}
		if !j.Claims().InUse(gpu.Whole{GPU: gpu0}) {
			t.Fatal("not in use")
		}
		var unused atomic.Bool
		var wg sync.WaitGroup
		for _, uid := range uids {
			wg.Go(func() {
				j.AdvancePhase(uid, holding.Leaving)
				j.AdvancePhase(uid, holding.Left)
				if !j.Claims().InUse(gpu.Whole{GPU: gpu0}) {
					unused.Store(true)
				}
				if err := j.Delete(uid); err != nil {
					t.Error(err)
				}
				j.ResetPhase(uid)
			})
		}
		wg.Wait()
		if !unused.Load() {
			t.Fatal("all have left, and none has heard that it was the last")
		}
	}
}
