package partition_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// port is a plugin's partitions over the port of production and a simulated
// machine.
type port struct {
	*node
	sim  *nvmltest.Simulated
	uuid gpu.UUID
}

func newPort(t *testing.T, machine string) port {
	t.Helper()
	sim := nvmltest.NewSimulated(t, machine)
	gpus, err := sim.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	n := &node{journal: j, Manager: partition.New(partition.Config{Journal: j, Specs: cdi.New(cdi.Config{}), Facts: facts.New("node-0"), BootID: "boot-1"})}
	n.SetHardware(sim)
	return port{node: n, sim: sim, uuid: gpus[0].UUID}
}

func (p port) mig(t *testing.T) gpu.MIG {
	t.Helper()
	mig, err := p.sim.MIG(p.uuid)
	if err != nil {
		t.Fatal(err)
	}
	return mig
}

// TestEveryPlacement makes each partition that each product has, alone.
func TestEveryPlacement(t *testing.T) {
	for _, machine := range []string{
		"1xh100-80gb", "1xh200", "1xb200", "1xrtx-pro-6000",
		"gpus: [{model: a100-40gb, migEnabled: true}]", "gpus: [{model: a30, migEnabled: true}]",
	} {
		t.Run(machine, func(t *testing.T) {
			p := newPort(t, machine)
			before := p.mig(t)
			for _, profile := range before.Profiles {
				for _, at := range profile.Placements {
					d := gpu.Partition{GPU: p.uuid, Profile: profile.Name, Placement: at}
					p.prepare(t, d)
					p.unprepare(t, d)
				}
			}
			if err := p.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(before, p.mig(t)); diff != "" {
				t.Errorf("afterwards (-before +after):\n%s", diff)
			}
		})
	}
}

// TestFillAndWhole fills a GPU with seven, uses it whole, and fills it again.
func TestFillAndWhole(t *testing.T) {
	p := newPort(t, "1xh100-80gb")
	for range 2 {
		uuids := map[gpu.UUID]bool{}
		for s := range 7 {
			d := gpu.Partition{GPU: p.uuid, Profile: "1g.10gb", Placement: gpu.Placement{Start: s, Size: 1}}
			uuids[p.prepare(t, d).UUID] = true
		}
		if len(uuids) != 7 {
			t.Errorf("MIG devices: %v, want 7", uuids)
		}
		wantError(t, p.ClearMIG(t.Context(), p.uuid), "is divided for another claim")
		for s := range 7 {
			p.unprepare(t, gpu.Partition{GPU: p.uuid, Profile: "1g.10gb", Placement: gpu.Placement{Start: s, Size: 1}})
		}
		if err := p.ClearMIG(t.Context(), p.uuid); err != nil {
			t.Error(err)
		}
		if p.mig(t).Enabled {
			t.Error("MIG mode is on")
		}
	}
}

func TestFaultsOfTheHardware(t *testing.T) {
	computeInstance := nvmlsim.Fault{Call: "GpuInstanceCreateComputeInstance", Code: nvmlsim.InsufficientResources}
	for name, faults := range map[string][]nvmlsim.Fault{
		"compute instance":          {computeInstance},
		"compute instance and undo": {computeInstance, {Call: "GpuInstanceDestroy", Code: nvmlsim.InUse}},
		"GPU instance":              {{Call: "DeviceCreateGpuInstanceWithPlacement", Code: nvmlsim.Unknown}},
		"mode":                      {{Call: "DeviceSetMigMode", Code: nvmlsim.NoPermission}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPort(t, "1xh200")
			d := gpu.Partition{GPU: p.uuid, Profile: "1g.18gb", Placement: gpu.Placement{Start: 4, Size: 1}}
			for _, f := range faults {
				f.GPU, f.Count = nvmlsim.AnyGPU, 1
				if err := p.sim.Machine.Fault(f); err != nil {
					t.Fatal(err)
				}
			}
			p.hold(t, d)
			if i, err := p.Ensure(t.Context(), d); err == nil {
				t.Errorf("made %v", i)
			}
			p.prepare(t, d)
			p.unprepare(t, d)
			if err := p.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			if mig := p.mig(t); mig.Enabled || len(mig.Instances) > 0 {
				t.Errorf("left: %v", mig)
			}
		})
	}
}

func TestProcessHoldsTheInstance(t *testing.T) {
	p := newPort(t, "1xh200")
	d := gpu.Partition{GPU: p.uuid, Profile: "1g.18gb", Placement: gpu.Placement{Start: 4, Size: 1}}
	i := p.prepare(t, d)
	users := []nvmlsim.Process{{PID: 4711, GPUInstance: uint32(i.GPUInstanceID), ComputeInstance: uint32(i.ComputeInstanceID)}}
	for _, processes := range [][]nvmlsim.Process{users, nil} {
		if err := p.sim.Machine.ChangeGPU(0, func(s *nvmlsim.GPUState) error { s.Processes = processes; return nil }); err != nil {
			t.Fatal(err)
		}
		err := p.Release(t.Context(), d)
		if processes == nil && err == nil {
			continue
		}
		wantError(t, err, "4711")
		if !errors.Is(err, nvml.ErrInUse) {
			t.Errorf("got %v, want ErrInUse", err)
		}
	}
}

// TestWithoutMIG: a GPU that has no MIG is whole, and has no partitions.
func TestWithoutMIG(t *testing.T) {
	p := newPort(t, "1xt4")
	if err := p.ClearMIG(t.Context(), p.uuid); err != nil {
		t.Error(err)
	}
	_, err := p.Ensure(t.Context(), gpu.Partition{GPU: p.uuid, Profile: "1g.18gb", Placement: gpu.Placement{Size: 1}})
	wantError(t, err, "not supported", fmt.Sprintf("1g.18gb at memory slice 0 of GPU %s", p.uuid))
}
