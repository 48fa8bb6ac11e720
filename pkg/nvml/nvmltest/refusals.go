package nvmltest

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// process replaces the processes that use the GPU.
func (l *life) process(t *testing.T, all ...nvmlsim.Process) {
	t.Helper()
	must(t, l.machine.ChangeGPU(l.position, func(s *nvmlsim.GPUState) error {
		s.Processes = all
		return nil
	}))
}

func (l *life) inUse(t *testing.T) {
	there := l.create(t, l.partitions()[0])
	l.process(t, nvmlsim.Process{PID: 4711, GPUInstance: uint32(there.GPUInstanceID)}, nvmlsim.Process{PID: 42, GPUInstance: 99})
	err := l.mig.DestroyInstance(l.gpu.UUID, there)
	want(t, "destroy in use", err, nvml.ErrInUse)
	names(t, err, "4711")
	if diff := cmp.Diff([]gpu.Instance{there}, l.there(t)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	l.process(t)
	l.destroy(t, there)
}

func (l *life) noSuchPlace(t *testing.T) {
	p := l.partitions()[0]
	for name, change := range map[string]func(*gpu.Partition){
		"profile": func(p *gpu.Partition) { p.Profile = "9g.9gb" },
		"start":   func(p *gpu.Partition) { p.Placement.Start = 99 },
		"size":    func(p *gpu.Partition) { p.Placement.Size = 99 },
	} {
		q := p
		change(&q)
		_, err := l.mig.CreateInstance(q)
		want(t, name, err, nvml.ErrNotSupported)
	}
}

// fault makes a call on the GPU fail, once.
func (l *life) fault(t *testing.T, call string, code nvmlsim.Return) {
	t.Helper()
	must(t, l.machine.Fault(nvmlsim.Fault{Call: call, GPU: l.position, Code: code, Count: 1}))
}

func (l *life) noPermission(t *testing.T) {
	p := l.partitions()[0]
	l.fault(t, "DeviceCreateGpuInstanceWithPlacement", nvmlsim.NoPermission)
	_, err := l.mig.CreateInstance(p)
	want(t, "create", err, nvml.ErrNoPermission)
	there := l.create(t, p)
	l.fault(t, "ComputeInstanceDestroy", nvmlsim.NoPermission)
	want(t, "destroy", l.mig.DestroyInstance(l.gpu.UUID, there), nvml.ErrNoPermission)
	l.destroy(t, there)
	if l.gpu.MIG.Switchable {
		l.fault(t, "DeviceSetMigMode", nvmlsim.NoPermission)
		want(t, "mode", l.mig.SetMIGMode(l.gpu.UUID, false), nvml.ErrNoPermission)
	}
}

// failures checks that a failed creation is undone, and that the rest is listed
// if undoing fails.
func (l *life) failures(t *testing.T) {
	p := l.partitions()[0]
	for _, call := range []string{
		"GpuInstanceGetInfo", "GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceCreateComputeInstance",
		"DeviceGetMigDeviceHandleByIndex", "DeviceGetGpuInstanceId", "DeviceGetAttributes",
	} {
		l.fault(t, call, nvmlsim.InsufficientResources)
		_, err := l.mig.CreateInstance(p)
		want(t, call, err, nvml.ErrInsufficientResources)
		if there := l.there(t); len(there) > 0 {
			t.Fatalf("%s: left %+v", call, there)
		}
	}
	l.fault(t, "GpuInstanceCreateComputeInstance", nvmlsim.InsufficientResources)
	l.fault(t, "GpuInstanceDestroy", nvmlsim.InUse)
	_, err := l.mig.CreateInstance(p)
	want(t, "undo failed", err, nvml.ErrInUse)
	if errors.Is(err, nvml.ErrInsufficientResources) {
		t.Errorf("undo failed: %v, which says that nothing is left", err)
	}
	there := l.there(t)
	if len(there) != 1 || there[0].ComputeInstanceID != gpu.NoComputeInstance {
		t.Fatalf("where the undo failed: %+v", there)
	}
	l.destroy(t, there[0])

	whole := l.create(t, p)
	l.fault(t, "GpuInstanceDestroy", nvmlsim.Unknown)
	if err := l.mig.DestroyInstance(l.gpu.UUID, whole); err == nil {
		t.Error("half destroyed: no error")
	}
	want(t, "half destroyed", l.mig.DestroyInstance(l.gpu.UUID, whole), nvml.ErrMismatch)
	l.destroy(t, l.there(t)[0])
}

func (l *life) destroyedFromOutside(t *testing.T) {
	there := l.create(t, l.partitions()[0])
	must(t, l.machine.ChangeGPU(l.position, func(s *nvmlsim.GPUState) error {
		s.Instances = nil
		return nil
	}))
	want(t, "destroy", l.mig.DestroyInstance(l.gpu.UUID, there), nvml.ErrNotFound)
}

func (l *life) modeKept(t *testing.T) {
	if !l.gpu.MIG.Switchable {
		return // the mode can't be switched
	}
	there := l.create(t, l.partitions()[0])
	want(t, "switch off", l.mig.SetMIGMode(l.gpu.UUID, false), nvml.ErrInUse)
	if m := l.read(t); !m.Enabled || !m.Pending {
		t.Errorf("after a refused switch: %+v", m)
	}
	l.destroy(t, there)
}
