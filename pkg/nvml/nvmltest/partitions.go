package nvmltest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// everyPlacement checks that instances have the ids of real hardware, are
// visible to all sessions at once, and have the same UUID when created again.
func (l *life) everyPlacement(t *testing.T) {
	memorySlices := 0
	for _, p := range l.partitions() {
		memorySlices = max(memorySlices, p.Placement.Start+p.Placement.Size)
	}
	uuids := map[gpu.UUID]gpu.Instance{}
	for _, p := range l.partitions() {
		got := l.create(t, p)
		want := gpu.Instance{
			UUID: got.UUID, Profile: p.Profile, Placement: p.Placement,
			GPUInstanceID: memorySlices/p.Placement.Size - 1 + p.Placement.Start/p.Placement.Size,
		}
		if diff := cmp.Diff(want, got); diff != "" || !migUUIDForm.MatchString(string(got.UUID)) {
			t.Errorf("%v: UUID %q, and (-want +got):\n%s", p, got.UUID, diff)
		}
		if diff := cmp.Diff([]gpu.Instance{got}, l.there(t)); diff != "" {
			t.Errorf("%v: created and read (-created +read):\n%s", p, diff)
		}
		l.seenByOthers(t, got)
		gpus, err := l.port.GPUs()
		must(t, err)
		if m := l.read(t); !cmp.Equal(*gpus[l.position].MIG, m) {
			t.Errorf("%v: GPUs and MIG disagree:\n%s", p, cmp.Diff(*gpus[l.position].MIG, m))
		}
		if other, taken := uuids[got.UUID]; taken && (other.GPUInstanceID != got.GPUInstanceID) {
			t.Errorf("%v has the UUID of %v", got, other)
		}
		uuids[got.UUID] = got
		l.destroy(t, got)
		if again := l.create(t, p); again != got {
			t.Errorf("made again: %+v, was %+v", again, got)
		}
		l.destroy(t, got)
		gone(t, l.mig.DestroyInstance(l.gpu.UUID, got))
	}
}

// seenByOthers checks that another session with the machine has the MIG device.
func (l *life) seenByOthers(t *testing.T, i gpu.Instance) {
	t.Helper()
	all, err := l.machine.GPUs()[l.position].MIGDevices()
	must(t, err)
	if len(all) != 1 {
		t.Fatalf("another session sees %d MIG devices", len(all))
	}
	uuid, err := all[0].UUID()
	must(t, err)
	if gpu.UUID(uuid) != i.UUID {
		t.Errorf("another session sees %s, created was %s", uuid, i.UUID)
	}
}

// allPairs checks that a second instance can be created exactly if the first
// leaves enough slices and engines, and the profile's maximum allows it.
func (l *life) allPairs(t *testing.T) {
	for _, p := range l.partitions() {
		first := l.create(t, p)
		for _, q := range l.partitions() {
			second, err := l.mig.CreateInstance(q)
			if l.fit(p, q) {
				must(t, err)
				l.destroy(t, second)
				continue
			}
			want(t, fmt.Sprintf("%v beside %v", q, p), err, nvml.ErrInsufficientResources)
		}
		l.destroy(t, first)
	}
}

func (l *life) fit(p, q gpu.Partition) bool {
	if gpu.Conflict(p, q) || (p.Profile == q.Profile && l.profile(p.Profile).MaxInstances == 1) {
		return false
	}
	// No profile has more of an engine than the GPU.
	var all gpu.Engines
	for _, r := range l.gpu.MIG.Profiles {
		all.Decoders, all.Encoders = max(all.Decoders, r.Engines.Decoders), max(all.Encoders, r.Engines.Encoders)
		all.JPEGEngines, all.OFAEngines = max(all.JPEGEngines, r.Engines.JPEGEngines), max(all.OFAEngines, r.Engines.OFAEngines)
	}
	a, b := l.profile(p.Profile).Engines, l.profile(q.Profile).Engines
	return a.Decoders+b.Decoders <= all.Decoders && a.Encoders+b.Encoders <= all.Encoders &&
		a.JPEGEngines+b.JPEGEngines <= all.JPEGEngines && a.OFAEngines+b.OFAEngines <= all.OFAEngines
}

// bare creates a GPU instance without compute instance, as a crash leaves it.
func (l *life) bare(t *testing.T, p gpu.Partition) (nvmlsim.Instance, gpu.Instance) {
	t.Helper()
	start := uint32(p.Placement.Start)
	i, err := l.machine.GPUs()[l.position].CreateInstance(uint32(l.profile(p.Profile).ID), &start)
	must(t, err)
	info, err := i.Info()
	must(t, err)
	return i, gpu.Instance{Profile: p.Profile, Placement: p.Placement, GPUInstanceID: int(info.ID), ComputeInstanceID: gpu.NoComputeInstance}
}

func (l *life) withoutCompute(t *testing.T) {
	for _, p := range l.partitions() {
		_, bare := l.bare(t, p)
		if diff := cmp.Diff([]gpu.Instance{bare}, l.there(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		whole := bare
		whole.ComputeInstanceID, whole.UUID = 0, "MIG-00000000-0000-0000-0000-000000000000"
		want(t, "destroy the MIG device it might be", l.mig.DestroyInstance(l.gpu.UUID, whole), nvml.ErrMismatch)
		l.destroy(t, bare)
	}
}

// divided checks that a GPU instance with several compute instances, or with
// one that takes a part of it, is not listed as a MIG device and not destroyed.
func (l *life) divided(t *testing.T) {
	for _, p := range l.partitions() {
		i, bare := l.bare(t, p)
		ci, err := i.CreateCompute(0, nil)
		if err != nil { // a profile that can't be divided
			must(t, i.Destroy())
			continue
		}
		if info, err := i.ComputeProfile(0); err == nil && info.SliceCount == info.Parent.SliceCount {
			must(t, errors.Join(ci.Destroy(), i.Destroy()))
			continue
		}
		if diff := cmp.Diff([]gpu.Instance{bare}, l.there(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		want(t, "destroy", l.mig.DestroyInstance(l.gpu.UUID, bare), nvml.ErrMismatch)
		must(t, errors.Join(ci.Destroy(), i.Destroy()))
	}
}

// identity checks that an instance is destroyed only if all its properties
// agree.
func (l *life) identity(t *testing.T) {
	there := l.create(t, l.partitions()[0])
	for name, c := range map[string]struct {
		change func(*gpu.Instance)
		want   error
	}{
		"UUID":               {func(i *gpu.Instance) { i.UUID = "MIG-00000000-0000-0000-0000-000000000000" }, nvml.ErrMismatch},
		"profile":            {func(i *gpu.Instance) { i.Profile = "7g.7gb" }, nvml.ErrMismatch},
		"start":              {func(i *gpu.Instance) { i.Placement.Start++ }, nvml.ErrMismatch},
		"size":               {func(i *gpu.Instance) { i.Placement.Size++ }, nvml.ErrMismatch},
		"compute instance":   {func(i *gpu.Instance) { i.ComputeInstanceID++ }, nvml.ErrMismatch},
		"no compute":         {func(i *gpu.Instance) { i.ComputeInstanceID = gpu.NoComputeInstance }, nvml.ErrMismatch},
		"none, and no UUID":  {func(i *gpu.Instance) { i.ComputeInstanceID, i.UUID = gpu.NoComputeInstance, "" }, nvml.ErrMismatch},
		"GPU instance":       {func(i *gpu.Instance) { i.GPUInstanceID++ }, nvml.ErrNotFound},
		"nothing but the id": {func(i *gpu.Instance) { *i = gpu.Instance{GPUInstanceID: i.GPUInstanceID} }, nvml.ErrMismatch},
	} {
		other := there
		c.change(&other)
		want(t, name, l.mig.DestroyInstance(l.gpu.UUID, other), c.want)
		if diff := cmp.Diff([]gpu.Instance{there}, l.there(t)); diff != "" {
			t.Fatalf("%s: (-before +after):\n%s", name, diff)
		}
	}
	l.destroy(t, there)
}

// parallel fills every GPU with instances of its first profile, sequentially on
// a GPU and in parallel on several, while other goroutines read, and destroys
// them.
func parallel(t *testing.T, port Port, mig MIGPort, machine *nvmlsim.Machine) {
	gpus, err := port.GPUs()
	must(t, err)
	var work, reading sync.WaitGroup
	done := make(chan struct{})
	for range 2 {
		reading.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				read, err := port.GPUs()
				if err != nil {
					t.Error(err)
				}
				for _, g := range read {
					if len(g.Conditions) > 0 {
						t.Errorf("%s: conditions %+v", g.UUID, g.Conditions)
					}
				}
			}
		})
	}
	for _, g := range gpus {
		if g.MIG != nil {
			work.Go(func() { fillAndEmpty(t, port, mig, g) })
		}
	}
	work.Wait()
	close(done)
	reading.Wait()
	for i, s := range machine.State().GPUs {
		if len(s.Instances) > 0 {
			t.Errorf("GPU %d: left %+v", i, s.Instances)
		}
	}
}

func fillAndEmpty(t *testing.T, port Port, mig MIGPort, g gpu.GPU) {
	p := g.MIG.Profiles[0]
	var made []gpu.Instance
	uuids := map[gpu.UUID]bool{}
	for _, at := range p.Placements {
		i, err := mig.CreateInstance(gpu.Partition{GPU: g.UUID, Profile: p.Name, Placement: at})
		if err != nil {
			t.Error(err)
			return
		}
		if uuids[i.UUID] {
			t.Errorf("%s: UUID %s twice", g.UUID, i.UUID)
		}
		made, uuids[i.UUID] = append(made, i), true
	}
	m, err := port.MIG(g.UUID)
	if err != nil || len(m.Instances) != len(made) {
		t.Errorf("%s: %d instances, created were %d (%v)", g.UUID, len(m.Instances), len(made), err)
	}
	for _, i := range made {
		if err := mig.DestroyInstance(g.UUID, i); err != nil {
			t.Error(err)
		}
	}
}
