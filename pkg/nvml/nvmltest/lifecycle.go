package nvmltest

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
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

// MIGPairs tests on a simulated machine which two partitions its first GPU can have at
// the same time. A model has up to a thousand pairs, so that this takes seconds.
func MIGPairs(t *testing.T, port interface {
	Port
	MIGPort
}, machine *nvmlsim.Machine,
) {
	gpus, err := port.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	if gpus[0].MIG == nil {
		return
	}
	l := &life{port: port, mig: port, machine: machine, gpu: gpus[0]}
	l.switchMode(t, true)
	t.Run("all pairs", l.allPairs)
	l.switchMode(t, false)
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
		l.fault(t, call, nvmlsim.NotSupported)
		if m := l.read(t); m.Switchable {
			t.Errorf("switchable, though the driver doesn't have %s", call)
		}
		l.fault(t, call, nvmlsim.NotSupported)
		want(t, "switch on without "+call, l.mig.SetMIGMode(l.gpu.UUID, true), nvml.ErrNotSwitchable)
		l.fault(t, call, nvmlsim.Unknown)
		_, err = l.port.MIG(l.gpu.UUID)
		names(t, err, "nvml"+call)
		l.fault(t, call, nvmlsim.Unknown)
		names(t, l.mig.SetMIGMode(l.gpu.UUID, true), "nvml"+call)
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
