package nvmlsim_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func mig(t *testing.T, model string) *nvmlsim.GPU {
	t.Helper()
	return create(t, fmt.Sprintf("gpus: [{model: %s, migEnabled: true}]", model)).GPUs()[0]
}

// profileID by name.
func profileID(t *testing.T, g *nvmlsim.GPU, name string) uint32 {
	t.Helper()
	for _, p := range g.Model().MIG.Profiles {
		if p.Name == name {
			return p.ID
		}
	}
	t.Fatalf("%s has no profile %s", g.Model().ID, name)
	return 0
}

func TestMIGMode(t *testing.T) {
	for name, c := range map[string]struct {
		machine    string
		activation nvmlsim.Return
		current    bool // at once
	}{
		"Hopper":            {"h100-80gb", nvmlsim.Success, true},
		"Ampere":            {"a100-40gb", nvmlsim.ResetRequired, false},
		"Hopper in a guest": {"virtualization: passthrough\ngpus: [{model: h200}]", nvmlsim.NotSupported, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := create(t, c.machine).GPUs()[0]
			activation, err := g.SetMIGMode(true)
			check(t, err)
			current, pending, err := g.MIGMode()
			check(t, err)
			if activation != c.activation || current != c.current || !pending {
				t.Errorf("activation %v, current %v, pending %v", activation, current, pending)
			}
			check(t, g.Reset())
			if current, _, err = g.MIGMode(); err != nil || !current {
				t.Errorf("after reset: %v, %v", current, err)
			}
		})
	}
	m := create(t, "h100-80gb")
	check(t, m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.MIGModePends = true; return nil }))
	broken := m.GPUs()[0]
	activation, err := broken.SetMIGMode(true)
	if current, pending, _ := broken.MIGMode(); err != nil || activation != nvmlsim.ResetRequired || current || !pending {
		t.Errorf("a mode that pends: %v, activation %v, current %v, pending %v", err, activation, current, pending)
	}
	check(t, m.Heal(0))
	if current, pending, _ := broken.MIGMode(); current || !pending {
		t.Errorf("healed, not reset: current %v, pending %v", current, pending)
	}
	activation, err = broken.SetMIGMode(true)
	if current, _, _ := broken.MIGMode(); err != nil || activation != nvmlsim.Success || !current {
		t.Errorf("again after healing: %v, activation %v, current %v", err, activation, current)
	}
	g := mig(t, "h100-80gb")
	if _, err := g.CreateInstance(19, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := g.SetMIGMode(false); err != nvmlsim.InUse {
		t.Errorf("off with an instance there: %v", err)
	}
	if _, err := create(t, "l4").GPUs()[0].SetMIGMode(true); err != nvmlsim.NotSupported {
		t.Errorf("an L4: %v", err)
	}
}

// Two instances fit together exactly if their slices don't overlap, the profile
// allows two, and there are enough engines. Checked for all pairs of placements
// of all products.
func TestAllPairsOfPlacements(t *testing.T) {
	for _, m := range models(t) {
		if m.MIG == nil {
			continue
		}
		g := mig(t, m.ID)
		for _, p := range m.MIG.Profiles {
			for _, ps := range p.Starts {
				first, err := g.CreateInstance(p.ID, new(ps))
				check(t, err)
				for _, q := range m.MIG.Profiles {
					for _, qs := range q.Starts {
						want := qs >= ps+p.Size || ps >= qs+q.Size
						want = want && (p.ID != q.ID || p.InstanceCount != 1) && p.OFACount+q.OFACount <= m.Engines.OFA &&
							p.DecoderCount+q.DecoderCount <= m.Engines.Decoders && p.EncoderCount+q.EncoderCount <= m.Engines.Encoders && p.JPEGCount+q.JPEGCount <= m.Engines.JPEG
						second, err := g.CreateInstance(q.ID, new(qs))
						if want != (err == nil) || (err != nil && err != nvmlsim.InsufficientResources) {
							t.Errorf("%s: %s at %d with %s at %d: %v", m.ID, q.Name, qs, p.Name, ps, err)
						}
						if err == nil {
							check(t, second.Destroy())
						}
					}
				}
				check(t, first.Destroy())
			}
		}
	}
}

func TestInstanceIDsAndDefaultPlacement(t *testing.T) {
	for name, c := range map[string]struct {
		model, profile string
		ids, starts    []uint32
	}{
		"H100 1g":     {"h100-80gb", "1g.10gb", []uint32{13, 11, 12, 7, 8, 9, 10}, []uint32{6, 4, 5, 0, 1, 2, 3}},
		"H100 2g":     {"h100-80gb", "2g.20gb", []uint32{5, 3, 4}, []uint32{4, 0, 2}},
		"H100 3g":     {"h100-80gb", "3g.40gb", []uint32{2, 1}, []uint32{4, 0}},
		"H100 7g":     {"h100-80gb", "7g.80gb", []uint32{0}, []uint32{0}},
		"A30 1g":      {"a30", "1g.6gb", []uint32{5, 6, 3, 4}, []uint32{2, 3, 0, 1}},
		"RTX PRO 1g":  {"rtx-pro-6000", "1g.24gb", []uint32{5, 6, 3, 4}, []uint32{6, 9, 0, 3}},
		"RTX PRO -me": {"rtx-pro-6000", "2g.48gb-me", []uint32{2, 1}, []uint32{6, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			g := mig(t, c.model)
			var ids, starts []uint32
			id := profileID(t, g, c.profile)
			for {
				n, err := g.RemainingCapacity(id)
				check(t, err)
				if n != len(c.ids)-len(ids) {
					t.Errorf("capacity %d with %d there", n, len(ids))
				}
				i, err := g.CreateInstance(id, nil)
				if err != nil {
					break
				}
				info := get(t, i.Info)
				ids, starts = append(ids, info.ID), append(starts, info.Start)
			}
			if diff := cmp.Diff(c.ids, ids) + cmp.Diff(c.starts, starts); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func change(m *nvmlsim.Machine, f func(*nvmlsim.GPUState)) error {
	return m.ChangeGPU(0, func(s *nvmlsim.GPUState) error { f(s); return nil })
}

func TestMIGDeviceLife(t *testing.T) {
	m := create(t, "gpus: [{model: h100-80gb, migEnabled: true}]")
	g := m.GPUs()[0]
	gi, err := g.CreateInstance(profileID(t, g, "1g.10gb"), new(uint32(4)))
	check(t, err)
	if all := get(t, g.MIGDevices); len(all) != 0 {
		t.Errorf("a GPU instance alone is a MIG device: %v", all)
	}
	ci, err := gi.CreateCompute(0, nil)
	check(t, err)
	if _, err := gi.CreateCompute(0, nil); err != nvmlsim.InsufficientResources {
		t.Errorf("a second compute instance: %v", err)
	}
	uuid := get(t, ci.UUID)
	if name := get(t, ci.Name); name != "NVIDIA H100 80GB HBM3 MIG 1g.10gb" {
		t.Errorf("name %q", name)
	}
	if memory := get(t, ci.MemoryInfo); memory.Total != 9984<<20 {
		t.Errorf("memory %d", memory.Total)
	}
	if err := gi.Destroy(); err != nvmlsim.InUse {
		t.Errorf("destroy with a compute instance: %v", err)
	}
	check(t, change(m, func(s *nvmlsim.GPUState) {
		s.Processes = []nvmlsim.Process{{PID: 42, GPUInstance: 11, ComputeInstance: 0, UsedMemory: 1 << 20}}
	}))
	if err := ci.Destroy(); err != nvmlsim.InUse {
		t.Errorf("destroy with a process: %v", err)
	}
	if memory := get(t, ci.MemoryInfo); memory.Used != 1<<20 || memory.Free != 9983<<20 {
		t.Errorf("memory %+v", memory)
	}
	check(t, change(m, func(s *nvmlsim.GPUState) { s.Processes = nil }))
	check(t, ci.Destroy())
	check(t, gi.Destroy())
	for name, err := range map[string]error{
		"info": second(gi.Info()), "uuid": second(ci.UUID()), "destroy": gi.Destroy(), "compute": ci.Destroy(), "create": second(gi.CreateCompute(0, nil)),
	} {
		if err != nvmlsim.NotFound {
			t.Errorf("%s of what is gone: %v", name, err)
		}
	}

	again, err := g.CreateInstance(profileID(t, g, "1g.10gb"), new(uint32(4)))
	check(t, err)
	if _, err := gi.Info(); err != nvmlsim.NotFound {
		t.Errorf("the old handle stands for the new instance: %v", err)
	}
	ci, err = again.CreateCompute(0, nil)
	check(t, err)
	if u := get(t, ci.UUID); u != uuid {
		t.Errorf("UUID %s, was %s: must repeat", u, uuid)
	}
	check(t, g.Reset())
	if all := get(t, g.MIGDevices); len(all) != 0 {
		t.Errorf("after reset: %v", all)
	}
}

func TestComputeInstances(t *testing.T) {
	for name, c := range map[string]struct {
		model, profile string
		want           map[uint32][2]uint32 // id → count, multiprocessors
	}{
		"1g":                                 {"h100-80gb", "1g.10gb", map[uint32][2]uint32{0: {1, 16}}},
		"1g double":                          {"h100-80gb", "1g.20gb", map[uint32][2]uint32{0: {1, 16}, 7: {1, 26}}},
		"1g double, no more multiprocessors": {"a100-80gb", "1g.20gb", map[uint32][2]uint32{0: {1, 14}}},
		"3g":                                 {"h100-80gb", "3g.40gb", map[uint32][2]uint32{0: {3, 16}, 1: {1, 32}, 2: {1, 60}}},
		"4g":                                 {"h100-80gb", "4g.40gb", map[uint32][2]uint32{0: {4, 16}, 1: {2, 32}, 3: {1, 64}}},
		"7g":                                 {"h100-80gb", "7g.80gb", map[uint32][2]uint32{0: {7, 16}, 1: {3, 32}, 2: {2, 48}, 3: {1, 64}, 4: {1, 132}}},
		"A30 2g":                             {"a30", "2g.12gb", map[uint32][2]uint32{0: {2, 14}, 1: {1, 28}}},
	} {
		t.Run(name, func(t *testing.T) {
			g := mig(t, c.model)
			gi, err := g.CreateInstance(profileID(t, g, c.profile), nil)
			check(t, err)
			got := map[uint32][2]uint32{}
			for enum := range uint32(9) {
				p, err := gi.ComputeProfile(enum)
				if err == nvmlsim.NotSupported {
					continue
				}
				check(t, err)
				n, err := gi.ComputeCapacity(p.ID)
				check(t, err)
				got[p.ID] = [2]uint32{uint32(n), p.MultiprocessorCount}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	g := mig(t, "h100-80gb")
	gi, err := g.CreateInstance(profileID(t, g, "3g.40gb"), nil)
	check(t, err)
	for want := range uint32(3) {
		ci, err := gi.CreateCompute(0, nil)
		check(t, err)
		if info := get(t, ci.Info); info.ID != want || info.Start != want {
			t.Errorf("compute instance %+v, want %d", info, want)
		}
	}
	all := get(t, g.MIGDevices)
	check(t, all[1].Destroy())
	ci, err := gi.CreateCompute(0, nil)
	check(t, err)
	if info := get(t, ci.Info); info.ID != 1 {
		t.Errorf("the free id is 1, not %d", info.ID)
	}
	if name := get(t, ci.ProfileName); name != "1c.3g.40gb" {
		t.Errorf("name %s", name)
	}
}

// Processes, and sessions in each, race for one GPU's slices: no instances
// overlap, none is lost.
func TestProcessesRaceForSlices(t *testing.T) {
	if path := os.Getenv(nvmlsim.StateEnv); path != "" {
		race(t, path)
		return
	}
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, "gpus: [{model: h100-80gb, migEnabled: true}]")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestProcessesRaceForSlices$")
			c.Env = append(os.Environ(), nvmlsim.StateEnv+"="+path)
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	wg.Wait()
	if left := m.State().GPUs[0].Instances; len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
}

func race(t *testing.T, path string) {
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			m, err := nvmlsim.Open(path)
			if err != nil {
				t.Error(err)
				return
			}
			defer m.Close()
			for range 5 {
				if err := makeAndDestroy(m.GPUs()[0]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// makeAndDestroy does nothing if there is no room.
func makeAndDestroy(g *nvmlsim.GPU) error {
	i, err := g.CreateInstance(19, nil)
	if errors.Is(err, nvmlsim.InsufficientResources) {
		return nil
	}
	if err != nil {
		return err
	}
	c, err := i.CreateCompute(0, nil)
	return errors.Join(err, c.Destroy(), i.Destroy())
}
