package partition_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var _ partition.Hardware = (*nvml.Session)(nil)

// node is a plugin's partitions with the journal and the hardware below.
type node struct {
	*partition.Manager
	hw      *hardware
	journal *journal.Journal
	dir     string
}

func newNode(t testing.TB, hw *hardware) *node {
	return start(t, hw, t.TempDir(), "boot-1", nil)
}

func start(t testing.TB, hw *hardware, dir, boot string, step func(string)) *node {
	t.Helper()
	j, err := journal.Open(dir, failpoint.Call(step))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	n := &node{hw: hw, journal: j, dir: dir}
	n.Manager = partition.New(partition.Config{
		Journal: j, Specs: cdi.New(cdi.Config{}), Facts: facts.New("node-0"), BootID: boot, Steps: failpoint.Call(step), Registerer: prometheus.NewRegistry(),
	})
	n.SetHardware(hw)
	return n
}

// restart does the steps of a new start of the plugin.
func (n *node) restart(t testing.TB, boot string) *node {
	t.Helper()
	n.journal.Close()
	again := start(t, n.hw, n.dir, boot, nil)
	if err := again.Recover(t.Context()); err != nil {
		t.Errorf("recover: %v", err)
	}
	return again
}

// hold is the first half of a prepare: the claim's record.
func (n *node) hold(t testing.TB, d gpu.Device) {
	t.Helper()
	r := holding.Record{ClaimUID: uid(d), Namespace: "default", Name: uid(d), BootID: "boot-1", Holdings: []holding.Holding{{Device: "d", GPU: d.Parent(), Partition: holding.PartitionOf(d)}}}
	if err := n.journal.Put(r); err != nil {
		t.Fatal(err)
	}
	n.journal.ResetPhase(r.ClaimUID)
}

// Release releases a partition as an unprepare does, once no daemon runs for the claim.
func (n *node) Release(ctx context.Context, p gpu.Partition) error {
	n.journal.AdvancePhase(uid(p), holding.Leaving)
	n.journal.AdvancePhase(uid(p), holding.Left)
	return n.Manager.Release(ctx, p)
}

func uid(d gpu.Device) string {
	p, _ := d.(gpu.Partition)
	return fmt.Sprintf("claim-%s-%s-%d", d.Parent()[4:12], strings.ReplaceAll(p.Profile, "+", ""), p.Placement.Start)
}

func (n *node) prepare(t testing.TB, p gpu.Partition) gpu.Instance {
	t.Helper()
	n.hold(t, p)
	i, err := n.Ensure(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if i.UUID == "" || i.Profile != p.Profile || i.Placement != p.Placement {
		t.Fatalf("made %v, want %v", i, p)
	}
	return i
}

func (n *node) unprepare(t testing.TB, p gpu.Partition) {
	t.Helper()
	if err := errors.Join(n.Release(t.Context(), p), n.journal.Delete(uid(p))); err != nil {
		t.Fatal(err)
	}
}

// checkThere checks what is on a GPU.
func (n *node) checkThere(t testing.TB, uuid gpu.UUID, on bool, want ...gpu.Partition) {
	t.Helper()
	mig := n.hw.now(uuid)
	got := map[gpu.Partition]bool{}
	for _, i := range mig.Instances {
		got[gpu.Partition{GPU: uuid, Profile: i.Profile, Placement: i.Placement}] = true
	}
	wanted := map[gpu.Partition]bool{}
	for _, p := range want {
		wanted[p] = true
	}
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("instances on %s (-want +got):\n%s", uuid, diff)
	}
	if mig.Enabled != on || mig.Pending != on {
		t.Errorf("MIG mode of %s: got %v (pending %v), want %v", uuid, mig.Enabled, mig.Pending, on)
	}
}

func wantError(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one that says %q", words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q doesn't say %q", err, w)
		}
	}
}

// modified is when the GPU's record was last written.
func modified(t testing.TB, n *node) time.Time {
	t.Helper()
	info, err := os.Stat(filepath.Join(n.dir, "gpus", string(gpu0)+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
}
