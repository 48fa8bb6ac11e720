package driver

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// broken is hardware on which no partition can be made.
type broken struct {
	partition.Hardware
	tries int
}

func (b *broken) MIG(gpu.UUID) (gpu.MIG, error) {
	b.tries++
	return gpu.MIG{}, errors.New("broken")
}

// TestLacks checks that a GPU of which only an attribute can't be read is mended, and none
// whose MIG instances aren't known.
func TestLacks(t *testing.T) {
	p := gpu.Partition{GPU: "GPU-a", Profile: "1g.10gb"}
	for condition, want := range map[gpu.ConditionType]bool{
		"": true, gpu.AttributesUnreadable: true, gpu.VitalsUnreadable: true, gpu.FabricNotReady: true,
		gpu.Lost: false, gpu.Unreadable: false, gpu.NotResponding: false, gpu.ResetRequired: false,
	} {
		g := gpu.GPU{UUID: p.GPU, MIG: &gpu.MIG{}}
		if condition != "" {
			g.Conditions = []gpu.Condition{{Type: condition}}
		}
		if got := lacks(gpu.Node{GPUs: []gpu.GPU{g}}, p); got != want {
			t.Errorf("condition %q: %t, want %t", condition, got, want)
		}
	}
}

// TestMendPaces removes a partition, which comes back or stays away. It counts as missing
// once two looks in a row don't find it; then its creation is tried once a minute, however
// often the follower looks.
func TestMendPaces(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		j, err := journal.Open(t.TempDir(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		part := holding.Partition{Profile: "1g.10gb", Start: 4, Size: 1}
		if err := j.Put(holding.Record{ClaimUID: "c", BootID: "boot", Holdings: []holding.Holding{{Device: "gpu-980fb007-mig-1g10gb-4", GPU: uuid, Partition: part}}}); err != nil {
			t.Fatal(err)
		}
		dir, hw := t.TempDir(), &broken{}
		if err := os.WriteFile(filepath.Join(dir, "k8s.gpu.nvidia.com-claim_c.json"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f := newFixture(t)
		partitions := partition.New(partition.Config{Journal: j, Specs: f.Specs, Facts: f.Facts, BootID: "boot"})
		partitions.SetHardware(hw)
		known := facts.New("node-0")
		known.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: uuid, MIG: &gpu.MIG{Profiles: []gpu.Profile{
			{Name: part.Profile, Placements: []gpu.Placement{{Start: part.Start, Size: part.Size}}},
		}}}}})
		f.Preparer = prepare.New(prepare.Config{
			Journal: j, Facts: known, Specs: cdi.New(cdi.Config{Dir: dir}), Partitions: partitions, BootID: "boot",
			Sharing: sharing.New(sharing.Config{Journal: j, BootID: "boot", Daemons: nodetest.NewDaemons(dir, "/run/mps/d")}),
		})
		f.build()
		there := gpu.Instance{UUID: "MIG-1", Profile: "1g.10gb", Placement: gpu.Placement{Start: 4, Size: 1}}
		look := func(instances ...gpu.Instance) {
			f.mend(ctx, gpu.Node{GPUs: []gpu.GPU{{UUID: uuid, MIG: &gpu.MIG{Instances: instances}}}})
		}
		look(there)
		look()
		look(there)
		look()
		if hw.tries != 0 {
			t.Errorf("%d tries before it was missed twice in a row", hw.tries)
		}
		if !f.Facts.AwaitRequest(ctx, time.Minute) {
			t.Error("no second look was requested")
		}
		for range 300 {
			look()
			time.Sleep(time.Second)
		}
		if hw.tries != 5 {
			t.Errorf("%d tries in five minutes, want 5", hw.tries)
		}
	})
}
