package machines

import (
	"bytes"
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

var update = flag.Bool("update", false, "write the files again")

// TestSameMachine: GPUs are linked in a machine with several of their model, however it
// is written.
func TestSameMachine(t *testing.T) {
	for name, tc := range map[string]struct {
		writings []string
		linked   int
	}{
		"two":          {[]string{"2xh100-80gb", "1xh100-80gb,h100-80gb"}, 2},
		"two models":   {[]string{"2xh100-80gb,h200,l4", "h100-80gb,1xh100-80gb,h200,l4"}, 2},
		"alone":        {[]string{"h100-80gb", "1xh100-80gb"}, 0},
		"not adjacent": {[]string{"h100-80gb,l4,h100-80gb"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			for _, machine := range tc.writings {
				inv, err := Inventory(machine)
				if err != nil {
					t.Fatal(err)
				}
				linked := 0
				for _, g := range inv.Status.GPUs {
					if g.NVLink != nil {
						linked++
					}
				}
				if linked != tc.linked {
					t.Errorf("%s: %d GPUs are linked, want %d", machine, linked, tc.linked)
				}
				first, err := Inventory(tc.writings[0])
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(first, inv); diff != "" {
					t.Errorf("(-%s +%s):\n%s", tc.writings[0], machine, diff)
				}
			}
		})
	}
}

// TestCatalogue: the files have all models of the simulator, as they are read from it.
func TestCatalogue(t *testing.T) {
	all, err := nvmlsim.Models()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(Models()) {
		t.Errorf("%d models have files, the simulator has %d", len(Models()), len(all))
	}
	for _, m := range all {
		t.Run(m.ID, func(t *testing.T) {
			gpus, err := nvmltest.NewSimulated(t, "2x"+m.ID).GPUs()
			if err != nil {
				t.Fatal(err)
			}
			var s v1alpha1.GPUInventoryStatus
			inventory.SetFacts(&s, gpu.Node{GPUs: gpus})
			want, err := sigsyaml.Marshal(common(s.GPUs[0]))
			if err != nil {
				t.Fatal(err)
			}
			file := m.ID + ".yaml"
			if *update {
				if err := os.WriteFile(file, want, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, got) {
				t.Errorf("(-simulator +file; -update writes it):\n%s", cmp.Diff(string(want), string(got)))
			}
		})
	}
}
