package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// TestWhoUsesAGPU checks who keeps a GPU from being reset: also who only looks at it,
// and who may have it.
func TestWhoUsesAGPU(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "torn.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for name, h := range map[string]holding.Holding{
		"whole": {GPU: "GPU-0"}, "part": {GPU: "GPU-0", Partition: holding.Partition{Profile: "1g.10gb", Size: 1}},
		"share": {GPU: "GPU-0", Share: &holding.Part{Count: 2}}, "admin": {GPU: "GPU-0", Admin: true}, "other": {GPU: "GPU-1"},
	} {
		if err := j.Put(holding.Record{ClaimUID: name, Namespace: "default", Name: name, Holdings: []holding.Holding{h}}); err != nil {
			t.Fatal(err)
		}
	}
	r := &resets{journal: j}
	got := r.users("GPU-0")
	slices.Sort(got)
	want := []string{"claim default/admin", "claim default/part", "claim default/share", "claim default/whole", "perhaps claim torn, whose journal record can't be read"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("users (-want +got):\n%s", diff)
	}
}

func TestDividedByOthers(t *testing.T) {
	for name, c := range map[string]struct {
		mig  *gpu.MIG
		want bool
	}{
		"no MIG":              {nil, false},
		"mode off":            {&gpu.MIG{Switchable: true}, false},
		"mode on, lasting":    {&gpu.MIG{Enabled: true}, false},
		"mode on, until then": {&gpu.MIG{Enabled: true, Switchable: true}, true},
		"instances":           {&gpu.MIG{Enabled: true, Instances: []gpu.Instance{{}}}, true},
	} {
		if got := dividedByOthers(c.mig); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestPrepareWaitsForReset checks that a GPU is neither reset while a claim has any of
// it nor given to a claim while it is reset, and that partitions are made again
// after the reset, which ends those that are kept warm.
func TestPrepareWaitsForReset(t *testing.T) {
	d, _ := startDivided(t)
	r := &resets{journal: d.journal, facts: d.facts, preparer: d.preparer, sharing: d.sharing, driver: d.follower}
	name, uuid := installed.Names()[0], gpu.UUID(installed.Machine.GPUs[0].UUID)
	d.partitions.SetKeepWarm(map[gpu.UUID]time.Duration{uuid: time.Hour})
	before := claimOf("before", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, before); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Reserve(d.ctx, uuid); err == nil || !strings.Contains(err.Error(), "default/before") {
		t.Errorf("reserved while a claim has it: %v", err)
	}
	if err := d.unprepare(before); err != nil {
		t.Fatal(err)
	}
	if x := r.Facts(uuid); x.MIGOfOthers || len(x.Claims) > 0 || x.Allowed {
		t.Errorf("with a partition that is kept warm: %+v", x)
	}
	release, err := r.Reserve(d.ctx, uuid)
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(d.ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := d.preparer.Prepare(soon, claimOf("during", name+"-mig-3g40gb-4")); err == nil || !strings.Contains(err.Error(), "it is being reset") {
		t.Errorf("prepared during the reset: %v", err)
	}
	if _, err := r.Reset(d.ctx, uuid); err != nil {
		t.Errorf("reset: %v", err)
	}
	release()
	after := claimOf("after", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, after); err != nil {
		t.Errorf("after the reset: %v", err)
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(after); err != nil {
		t.Error(err)
	}
}
