package driver

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// missing is a GPU that NVML doesn't list.
var missing = gpu.GPU{
	UUID: "GPU-99999999-8a10-0135-bada-13f71feaef21", Index: 7, Minor: 7, Model: gpu.Model{ProductName: "NVIDIA H100 80GB HBM3"}, MemoryBytes: 80 << 30,
}

// TestGPUIsLostWhileNoPluginRuns checks that a GPU which the plugin before has seen since the
// machine was booted is reported with its facts, and one that it has seen earlier isn't.
func TestGPUIsLostWhileNoPluginRuns(t *testing.T) {
	for name, tc := range map[string]struct {
		boot string
		want bool
	}{
		"in this boot":    {boot: "boot", want: true},
		"in another boot": {boot: "another", want: false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.saw(t, tc.boot, missing)
			f.start(t)
			<-f.Looked()
			state, _ := f.Facts.State()
			i := slices.IndexFunc(state.Node.GPUs, func(g gpu.GPU) bool { return g.UUID == missing.UUID })
			if got := i >= 0; got != tc.want {
				t.Fatalf("reported: %t, want %t", got, tc.want)
			}
			if i < 0 {
				return
			}
			got := state.Node.GPUs[i]
			if len(got.Conditions) != 1 || got.Conditions[0].Type != gpu.Lost {
				t.Errorf("conditions %v, want %s", got.Conditions, gpu.Lost)
			}
			if diff := cmp.Diff(missing, lasting(got)); diff != "" {
				t.Errorf("facts (-seen +reported):\n%s", diff)
			}
		})
	}
}

// TestListOfGPUsIsKept checks that the journal has the GPUs of the last reading, and that a
// reading with the same GPUs, also one of the next plugin, writes nothing.
func TestListOfGPUsIsKept(t *testing.T) {
	f := newFixture(t)
	f.saw(t, "another", missing)
	file := filepath.Join(f.dir, "seen", "gpus.json")
	modified := func() string {
		t.Helper()
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime().String()
	}
	before := modified()
	f.start(t)
	<-f.Looked()
	first := modified()
	if first == before {
		t.Fatal("the list of an earlier boot is still there")
	}
	seen, _ := f.Journal.Seen()
	state, _ := f.Facts.State()
	if uuids(seen.GPUs) != uuids(state.Node.GPUs) || seen.BootID != "boot" || len(seen.GPUs) != len(installed.Machine.GPUs) {
		t.Errorf("boot %q has seen %s, want what is reported: %s", seen.BootID, uuids(seen.GPUs), uuids(state.Node.GPUs))
	}
	f.readAgain(t)
	f.stop()
	j := f.reopenJournal(t)
	if now, _ := j.Seen(); cmp.Diff(seen, now) != "" {
		t.Errorf("on disk (-memory +disk):\n%s", cmp.Diff(seen, now))
	}
	f.start(t)
	<-f.Looked()
	f.readAgain(t)
	if modified() != first {
		t.Error("written again though the GPUs are the same")
	}
}

// TestListOfGPUsThatCannotBeKept checks that GPUs are served while the list can't be written,
// that this is logged once, and that it is written later.
func TestListOfGPUsThatCannotBeKept(t *testing.T) {
	dir := t.TempDir()
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	inTheWay := filepath.Join(dir, "seen")
	if err := os.WriteFile(inTheWay, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	logger, lines := pacetest.Logger(t)
	ctx := klog.NewContext(context.Background(), logger)
	s := seen{journal: j, bootID: "boot"}
	for range 5 {
		s.found(ctx, []gpu.GPU{missing})
	}
	if len(s.has) != 1 || lines() != 1 {
		t.Errorf("%d GPUs are known and %d lines logged, want 1 of each", len(s.has), lines())
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	s.found(ctx, []gpu.GPU{missing})
	if now, ok := j.Seen(); !ok || len(now.GPUs) != 1 {
		t.Errorf("when it can be written: %v", now)
	}
}

// TestFactsBeforeTheGPUWasLost checks that a GPU that is lost keeps its last facts, and one
// that has never answered is no GPU that the machine has had in this boot.
func TestFactsBeforeTheGPUWasLost(t *testing.T) {
	j := newFixture(t).Journal
	s := seen{journal: j, bootID: "boot", hadBefore: []gpu.GPU{missing}}
	lost := func(g gpu.GPU) gpu.GPU {
		g.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "lost"}}
		return g
	}
	s.found(t.Context(), []gpu.GPU{lost(missing)})
	if len(s.has) != 0 || len(s.hadBefore) != 1 {
		t.Errorf("it has never answered: has %v, had %v", s.has, s.hadBefore)
	}
	moved := missing
	moved.Index = 3
	s.found(t.Context(), []gpu.GPU{moved})
	s.found(t.Context(), []gpu.GPU{lost(gpu.GPU{UUID: missing.UUID})})
	if diff := cmp.Diff([]gpu.GPU{moved}, s.has); diff != "" || len(s.hadBefore) != 0 || facts.Dead(s.has[0]) != nil {
		t.Errorf("it has answered, and is lost: had %v, has (-want +got):\n%s", s.hadBefore, diff)
	}
}

func uuids(gpus []gpu.GPU) string {
	var all []string
	for _, g := range gpus {
		all = append(all, string(g.UUID))
	}
	return strings.Join(all, " ")
}
