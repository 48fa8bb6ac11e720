package nvmltest

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// MIGPort has the methods that the driver uses to change MIG.
type MIGPort interface {
	CreateInstance(p gpu.Partition) (gpu.Instance, error)
	DestroyInstance(uuid gpu.UUID, want gpu.Instance) error
	SetMIGMode(uuid gpu.UUID, on bool) error
}

var migUUIDForm = regexp.MustCompile(`^MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// life is the GPU under test, and its machine, through which tests change the
// hardware as other programs or failures would.
type life struct {
	port     Port
	mig      MIGPort
	machine  *nvmlsim.Machine
	gpu      gpu.GPU
	position int
}

// MIGLifecycle tests MIG modes and instances on a simulated machine whose GPUs
// are idle and have MIG off. port and machine must be of the same machine. It
// changes the machine, and restores it at the end. For GPUs without MIG it
// checks that they say so.
func MIGLifecycle(t *testing.T, port interface {
	Port
	MIGPort
}, machine *nvmlsim.Machine,
) {
	gpus, err := port.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range gpus {
		l := &life{port: port, mig: port, machine: machine, gpu: g, position: i}
		if g.MIG == nil {
			l.without(t)
			continue
		}
		l.modeOff(t)
		if i == 0 { // the others are of the same model
			t.Run("mode", l.mode)
			t.Run("read while the mode is switched", l.readWhileSwitched)
		}
		l.switchMode(t, true)
		if i == 0 {
			l.instances(t)
		}
	}
	t.Run("GPUs in parallel", func(t *testing.T) { parallel(t, port, port, machine) })
	for i, g := range gpus {
		if g.MIG != nil {
			(&life{port: port, mig: port, machine: machine, gpu: g, position: i}).switchMode(t, false)
		}
	}
	t.Run("lost", func(t *testing.T) {
		(&life{port: port, mig: port, machine: machine, gpu: gpus[0]}).lost(t)
	})
}

// lost checks that calls for a GPU that fell off the bus change nothing and
// return ErrLost.
func (l *life) lost(t *testing.T) {
	must(t, l.machine.Lose(l.position))
	_, migErr := l.port.MIG(l.gpu.UUID)
	_, createErr := l.mig.CreateInstance(gpu.Partition{GPU: l.gpu.UUID, Profile: "1g.10gb", Placement: gpu.Placement{Size: 1}})
	for what, err := range map[string]error{
		"MIG": migErr, "create": createErr, "destroy": l.mig.DestroyInstance(l.gpu.UUID, gpu.Instance{}), "mode": l.mig.SetMIGMode(l.gpu.UUID, true),
	} {
		want(t, what+" when lost", err, nvml.ErrLost)
	}
	must(t, l.machine.Reboot())
}

func (l *life) instances(t *testing.T) {
	for name, check := range map[string]func(*testing.T){
		"every placement":                l.everyPlacement,
		"all pairs":                      l.allPairs,
		"without compute instance":       l.withoutCompute,
		"divided":                        l.divided,
		"identity":                       l.identity,
		"in use":                         l.inUse,
		"no such place":                  l.noSuchPlace,
		"no permission":                  l.noPermission,
		"failures":                       l.failures,
		"destroyed from outside":         l.destroyedFromOutside,
		"mode is kept while it has some": l.modeKept,
	} {
		t.Run(name, func(t *testing.T) {
			check(t)
			if there := l.there(t); len(there) > 0 {
				t.Fatalf("left: %+v", there)
			}
		})
	}
}

// without checks that all MIG calls for a GPU without MIG return
// ErrNotSupported.
func (l *life) without(t *testing.T) {
	_, migErr := l.port.MIG(l.gpu.UUID)
	_, createErr := l.mig.CreateInstance(gpu.Partition{GPU: l.gpu.UUID, Profile: "1g.10gb", Placement: gpu.Placement{Size: 1}})
	for what, err := range map[string]error{"MIG": migErr, "create": createErr, "mode": l.mig.SetMIGMode(l.gpu.UUID, true)} {
		want(t, what+" without MIG", err, nvml.ErrNotSupported)
	}
}

func (l *life) modeOff(t *testing.T) {
	_, err := l.mig.CreateInstance(l.partitions()[0])
	want(t, "create with the mode off", err, nvml.ErrNotSupported)
	want(t, "destroy with the mode off", l.mig.DestroyInstance(l.gpu.UUID, gpu.Instance{}), nvml.ErrNotFound)
	_, err = l.mig.CreateInstance(gpu.Partition{GPU: "GPU-00000000-0000-0000-0000-000000000000", Profile: "1g.10gb"})
	want(t, "create on a GPU that isn't there", err, nvml.ErrLost)
}

// mode checks that a switchable mode is switched at once, but not while
// processes use the GPU; and that others aren't switched, in particular while a
// change is pending.
func (l *life) mode(t *testing.T) {
	if !l.gpu.MIG.Switchable {
		want(t, "switch on", l.mig.SetMIGMode(l.gpu.UUID, true), nvml.ErrNotSwitchable)
		_, err := l.machine.GPUs()[l.position].SetMIGMode(true)
		must(t, err)
		if m := l.read(t); m.Enabled || !m.Pending || m.Switchable {
			t.Errorf("with a mode that pends: %+v", m)
		}
		want(t, "switch off what pends", l.mig.SetMIGMode(l.gpu.UUID, false), nvml.ErrNotSwitchable)
		_, err = l.machine.GPUs()[l.position].SetMIGMode(false)
		must(t, err)
		return
	}
	l.process(t, nvmlsim.Process{PID: 4711, GPUInstance: nvmlsim.NoInstance, ComputeInstance: nvmlsim.NoInstance})
	err := l.mig.SetMIGMode(l.gpu.UUID, true)
	want(t, "switch on in use", err, nvml.ErrInUse)
	names(t, err, "4711")
	l.process(t)
	if m := l.read(t); m.Enabled || m.Pending || !m.Switchable {
		t.Errorf("after a refused switch: %+v", m)
	}
	for _, call := range []string{"DeviceGetVirtualizationMode", "DeviceGetArchitecture"} {
		l.fault(t, call, nvmlsim.Unknown)
		if m := l.read(t); m.Switchable {
			t.Errorf("switchable, though %s doesn't answer", call)
		}
		l.fault(t, call, nvmlsim.Unknown)
		want(t, "switch on without "+call, l.mig.SetMIGMode(l.gpu.UUID, true), nvml.ErrNotSwitchable)
	}
	must(t, l.mig.SetMIGMode(l.gpu.UUID, false)) // no change
}

// readWhileSwitched checks that a GPU is readable and consistent if its mode
// changes while it is read.
func (l *life) readWhileSwitched(t *testing.T) {
	if !l.gpu.MIG.Switchable {
		return
	}
	switched := make(chan error)
	go func() {
		var err error
		for range 50 {
			err = errors.Join(err, l.mig.SetMIGMode(l.gpu.UUID, true), l.mig.SetMIGMode(l.gpu.UUID, false))
		}
		switched <- err
	}()
	for {
		select {
		case err := <-switched:
			must(t, err)
			return
		default:
		}
		gpus, err := l.port.GPUs()
		must(t, err)
		if c := gpus[l.position].Conditions; len(c) > 0 {
			t.Errorf("conditions %+v", c)
		}
	}
}

// switchMode switches the mode through the port if that is allowed, otherwise
// as an administrator does.
func (l *life) switchMode(t *testing.T, on bool) {
	t.Helper()
	if l.gpu.MIG.Switchable {
		must(t, l.mig.SetMIGMode(l.gpu.UUID, on))
		must(t, l.mig.SetMIGMode(l.gpu.UUID, on))
	} else {
		_, err := l.machine.GPUs()[l.position].SetMIGMode(on)
		must(t, err)
		must(t, l.machine.GPUs()[l.position].Reset())
	}
	if m := l.read(t); m.Enabled != on || m.Pending != on || m.Switchable != l.gpu.MIG.Switchable {
		t.Fatalf("mode %v, pending %v, switchable %v after switching to %v", m.Enabled, m.Pending, m.Switchable, on)
	}
}

// partitions returns all possible partitions of the GPU.
func (l *life) partitions() []gpu.Partition {
	var all []gpu.Partition
	for _, p := range l.gpu.MIG.Profiles {
		for _, at := range p.Placements {
			all = append(all, gpu.Partition{GPU: l.gpu.UUID, Profile: p.Name, Placement: at})
		}
	}
	return all
}

func (l *life) profile(name string) gpu.Profile {
	i := slices.IndexFunc(l.gpu.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == name })
	return l.gpu.MIG.Profiles[i]
}

func (l *life) read(t *testing.T) gpu.MIG {
	t.Helper()
	m, err := l.port.MIG(l.gpu.UUID)
	must(t, err)
	return m
}

func (l *life) there(t *testing.T) []gpu.Instance {
	t.Helper()
	return l.read(t).Instances
}

func (l *life) create(t *testing.T, p gpu.Partition) gpu.Instance {
	t.Helper()
	i, err := l.mig.CreateInstance(p)
	must(t, err)
	return i
}

func (l *life) destroy(t *testing.T, i gpu.Instance) {
	t.Helper()
	must(t, l.mig.DestroyInstance(l.gpu.UUID, i))
}

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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func gone(t *testing.T, err error) {
	t.Helper()
	want(t, "destroyed twice", err, nvml.ErrNotFound)
}

func names(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v: does not name %s", err, text)
	}
}
