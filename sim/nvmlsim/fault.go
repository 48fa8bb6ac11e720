package nvmlsim

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// AnyGPU in a Fault or Call means no particular GPU.
const AnyGPU = -1

// Fault makes calls fail, makes them slow, or both, until it is used up or
// cleared; or it keeps them from returning.
type Fault struct {
	// Call is the name of an NVML function, with or without "nvml" and version
	// suffix ("DeviceGetUUID"), or "*".
	Call string `json:"call"`
	// GPU is its position in the machine (= minor at boot), or AnyGPU.
	GPU int `json:"gpu"`
	// Code is the answer; with Success the call continues after the delay.
	Code Return `json:"code,omitempty"`
	// DelayMS is the delay before the call does anything.
	DelayMS int `json:"delayMS,omitempty"`
	// Count is the number of calls that the fault still applies to; 0 means all
	// calls until it is cleared. A read-only state file can't count calls.
	Count int `json:"count,omitempty"`
	// Hang keeps the call from returning until the fault is cleared or the session
	// is closed. It can't be combined with a code, a delay or a count.
	Hang bool `json:"hang,omitempty"`
	// Profile and Start restrict a fault of DeviceCreateGpuInstance to instances of
	// the profile with this name, to those that begin at this memory slice, or to
	// both. The fault then applies with and without "WithPlacement" in the call's
	// name: the caller or the driver chooses the placement, the GPU refuses it.
	Profile string  `json:"profile,omitempty"`
	Start   *uint32 `json:"start,omitempty"`
	// Latency marks a fault of SetLatency, which the next call of SetLatency
	// replaces.
	Latency bool `json:"latency,omitempty"`
}

// callName removes the prefix and the version from a function's name.
func callName(s string) string {
	s = strings.TrimPrefix(s, "nvml")
	if i := strings.LastIndex(s, "_v"); i > 0 {
		s = s[:i]
	}
	return s
}

// Meet applies faults to a call that isn't one of NVML: those of no particular
// GPU, and those of the GPUs that the call uses. The simulated CUDA MPS has
// MPSControl and MPSServer (the start of each) and MPSCommand; only MPSServer has
// GPUs, those of the server.
func (m *Machine) Meet(call string, gpus ...*GPU) error {
	return m.meet(func(f Fault) bool {
		return f.meets(call, AnyGPU) || slices.ContainsFunc(gpus, func(g *GPU) bool { return f.meets(call, g.pos) })
	})
}

// MPSKills counts the calls of KillMPS, by the kind of process.
type MPSKills struct {
	Control uint64 `json:"control,omitempty"`
	Server  uint64 `json:"server,omitempty"`
}

// KillMPS kills all MPS control daemons, MPS servers or both of the machine, as
// SIGKILL does, wherever they run. Processes that start later are not affected.
func (m *Machine) KillMPS(control, server bool) error {
	return m.update(func(s *State) error {
		if control {
			s.MPSKills.Control++
		}
		if server {
			s.MPSKills.Server++
		}
		return nil
	})
}

// Await returns when wanted accepts the state, or soon after ctx has ended. If
// the state file can't be read, wanted is never called.
func (m *Machine) Await(ctx context.Context, wanted func(*State) bool) {
	for ctx.Err() == nil {
		generation := m.generation()
		if st := m.state(); st != nil && wanted(st) {
			return
		}
		m.waitChange(ctx, generation, time.Second)
	}
}

func (f Fault) meets(call string, gpu int) bool {
	return !f.ofInstance() && (f.Call == "*" || callName(f.Call) == call) && f.on(gpu)
}

func (f Fault) on(gpu int) bool { return f.GPU == AnyGPU || f.GPU == gpu }

// ofInstance reports whether the fault is restricted to some GPU instances.
func (f Fault) ofInstance() bool { return f.Profile != "" || f.Start != nil }

func (f Fault) meetsInstance(gpu int, profile string, start uint32) bool {
	return f.ofInstance() && f.on(gpu) && f.isOf(profile) && (f.Start == nil || *f.Start == start)
}

func (f Fault) isOf(profile string) bool { return f.Profile == "" || f.Profile == profile }

// check returns an error that names the first invalid field.
func (f Fault) check(d Description) error {
	switch {
	case f.Call == "" || f.DelayMS < 0 || f.Count < 0:
		return fmt.Errorf("fault %+v: call, delay or count: %w", f, InvalidArgument)
	case f.Hang && (f.Code != Success || f.DelayMS != 0 || f.Count != 0):
		return fmt.Errorf("fault %+v: a call that never returns can't have a code, a delay or a count: %w", f, InvalidArgument)
	case f.GPU != AnyGPU && (f.GPU < 0 || f.GPU >= len(d.GPUs)):
		return fmt.Errorf("fault: the machine has no GPU %d: %w", f.GPU, NotFound)
	case f.ofInstance():
		return f.checkInstance(d)
	}
	return nil
}

// checkInstance checks that one of the fault's GPUs can have such an instance.
func (f Fault) checkInstance(d Description) error {
	if strings.TrimSuffix(callName(f.Call), "WithPlacement") != "DeviceCreateGpuInstance" {
		return fmt.Errorf("fault: only DeviceCreateGpuInstance has a profile and a start, %s has none: %w", f.Call, InvalidArgument)
	}
	var names []string
	var starts []uint32
	for pos, id := range d.GPUs {
		m, err := FindModel(id.Model)
		if err != nil || m.MIG == nil || !f.on(pos) {
			continue
		}
		for _, p := range m.MIG.Profiles {
			names = append(names, p.Name)
			if f.isOf(p.Name) {
				starts = append(starts, p.Starts...)
			}
		}
	}
	slices.Sort(starts)
	switch {
	case len(names) == 0:
		return fmt.Errorf("fault: a profile or a start needs a GPU with MIG: %w", NotSupported)
	case len(starts) == 0:
		return fmt.Errorf("fault: profile %q: want one of %s: %w", f.Profile, strings.Join(names, ", "), InvalidArgument)
	case f.Start != nil && !slices.Contains(starts, *f.Start):
		return fmt.Errorf("fault: start %d: want one of %v: %w", *f.Start, slices.Compact(starts), InvalidArgument)
	}
	return nil
}

// Fault adds a fault to the machine.
func (m *Machine) Fault(f Fault) error {
	if err := f.check(m.description); err != nil {
		return err
	}
	return m.update(func(s *State) error {
		s.Faults = append(s.Faults, f)
		return nil
	})
}

// ClearFaults removes all faults, also latencies and an unloaded driver. GPUs
// stay as broken as they are.
func (m *Machine) ClearFaults() error {
	return m.update(func(s *State) error {
		s.Faults, s.DriverUnloaded = nil, false
		return nil
	})
}

// ClearFaultsOf removes the faults of one GPU, by position, and no others.
func (m *Machine) ClearFaultsOf(gpu int) error {
	return m.update(func(s *State) error {
		s.Faults = slices.DeleteFunc(s.Faults, func(f Fault) bool { return f.GPU == gpu })
		return nil
	})
}

// LoadDriver loads or unloads the driver: without it Init answers
// DriverNotLoaded, and there is no /sys/module/nvidia. Unloading destroys the
// GPUs' MIG instances, and switches off the MIG mode of GPUs that keep it only
// while the driver is loaded (MIG user guide: Hopper and later). Loading resets
// the GPUs.
func (m *Machine) LoadDriver(loaded bool) error {
	return m.update(func(s *State) error {
		if loaded != s.DriverUnloaded {
			return nil
		}
		s.DriverUnloaded = !loaded
		if loaded {
			for i := range s.GPUs {
				s.GPUs[i].Health = s.GPUs[i].afterReload()
			}
			return m.addModule(s.Description)
		}
		if err := s.forgetMIG(); err != nil {
			return err
		}
		return m.removeModule()
	})
}

// Reboot restarts the machine: volatile state of the hardware is gone, lost and
// wedged GPUs are back, and the boot id is new. On Ampere a pending MIG mode takes
// effect; later GPUs boot with the mode of their description. Faults stay.
func (m *Machine) Reboot() error {
	return m.update(func(s *State) error {
		if err := s.forgetMIG(); err != nil {
			return err
		}
		fresh, err := NewState(s.Description)
		if err != nil {
			return err
		}
		for i := range fresh.GPUs {
			fresh.GPUs[i].MIGCurrent, fresh.GPUs[i].MIGPending = s.GPUs[i].MIGCurrent, s.GPUs[i].MIGPending
			fresh.GPUs[i].Health = s.GPUs[i].afterReboot()
		}
		s.GPUs, s.BootID, s.DriverUnloaded = fresh.GPUs, fresh.BootID, false
		return errors.Join(m.removeModule(), m.addModule(s.Description))
	})
}

// forgetMIG changes the MIG state as unloading the driver does.
func (s *State) forgetMIG() error {
	for i, id := range s.Description.GPUs {
		model, err := FindModel(id.Model)
		if err != nil {
			return err
		}
		g := &s.GPUs[i]
		mode := id.MIGEnabled
		if model.MIG != nil && model.MIG.ModeNeedsReset {
			mode = g.MIGPending // the mode is stored in the GPU (MIG user guide)
		}
		g.MIGCurrent, g.MIGPending, g.Instances, g.Minor = mode, mode, nil, id.Minor
	}
	return nil
}

// ChangeGPU changes the state of a GPU, by position, as hardware or another
// program might.
func (m *Machine) ChangeGPU(gpu int, change func(*GPUState) error) error {
	return m.updateGPU(gpu, func(_ *State, g *GPUState) error { return change(g) })
}

func (m *Machine) updateGPU(gpu int, change func(*State, *GPUState) error) error {
	return m.update(func(s *State) error {
		if gpu < 0 || gpu >= len(s.GPUs) {
			return fmt.Errorf("the machine has no GPU %d: %w", gpu, NotFound)
		}
		return change(s, &s.GPUs[gpu])
	})
}

// call runs at the start of every NVML function: it applies faults, and fails
// for a lost GPU, and for one that doesn't have the function.
func (m *Machine) call(name string, gpu int) error {
	defer m.awaitChange(name, gpu)()
	if err := m.hang(func(s *State) bool { return gpu >= 0 && gpu < len(s.GPUs) && s.GPUs[gpu].Wedged }); err != nil {
		return err
	}
	if err := m.meet(func(f Fault) bool { return f.meets(name, gpu) }); err != nil {
		return err
	}
	if st := m.state(); st != nil {
		if err := st.refuses(name, gpu); err != nil {
			return err
		}
	}
	return m.lacks(name, gpu)
}

// meet applies the faults that meet a call.
func (m *Machine) meet(meets func(Fault) bool) error {
	err := m.hang(func(s *State) bool {
		return slices.ContainsFunc(s.Faults, func(f Fault) bool { return f.Hang && meets(f) })
	})
	st := m.state()
	if err != nil || st == nil {
		return err
	}
	for _, f := range st.Faults {
		if f.Hang || !meets(f) {
			continue
		}
		if f.Count > 0 && !m.useUp(f) {
			continue
		}
		time.Sleep(time.Duration(f.DelayMS) * time.Millisecond)
		if f.Code != Success {
			return f.Code
		}
	}
	return nil
}

// lacks returns NotSupported for a call that the GPU doesn't have on this machine.
func (m *Machine) lacks(call string, gpu int) error {
	if gpu >= 0 && gpu < len(m.unsupported) && slices.Contains(m.unsupported[gpu], call) {
		return NotSupported
	}
	return nil
}

// awaitChange waits while another call of this process changes the GPU, as the driver's lock
// makes callers wait (assumed). The returned function ends the wait of others.
func (m *Machine) awaitChange(call string, gpu int) (done func()) {
	if gpu < 0 || gpu >= len(m.changing) {
		return func() {}
	}
	changes := changesGPU(call)
	m.changes.Await(func() bool {
		if m.changing[gpu] {
			return false
		}
		m.changing[gpu] = changes // reads don't exclude each other
		return true
	})
	if !changes {
		return func() {}
	}
	return func() { m.changes.Change(func() { m.changing[gpu] = false }) }
}

// changesGPU reports whether a function changes MIG mode or instances.
func changesGPU(call string) bool {
	switch call {
	case "DeviceSetMigMode", "DeviceCreateGpuInstance", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
		"GpuInstanceCreateComputeInstance", "GpuInstanceCreateComputeInstanceWithPlacement", "ComputeInstanceDestroy":
		return true
	}
	return false
}

// refuses returns the answer to calls of a GPU that doesn't work.
func (s *State) refuses(call string, gpu int) error {
	switch {
	case gpu == AnyGPU:
		return nil
	case gpu >= len(s.GPUs) || s.GPUs[gpu].Lost:
		return GPUIsLost
	case s.GPUs[gpu].ResetRequired && call != callReset:
		return ResetRequired
	}
	return nil
}

// hang blocks while a fault or a wedged GPU keeps the call from returning. Uninitialized once
// the session is closed, which is noticed within a second.
func (m *Machine) hang(hangs func(*State) bool) error {
	for !m.closed.Load() {
		generation := m.generation()
		st := m.state()
		if st == nil || !hangs(st) {
			return nil
		}
		m.store.WaitChange(generation, time.Second)
	}
	return Uninitialized
}

// useUp decrements the count of a fault; it returns false if other calls have
// used it up.
func (m *Machine) useUp(f Fault) bool {
	used := false
	err := m.update(func(s *State) error {
		for i, g := range s.Faults {
			counted := g.Count > 0
			g.Count = f.Count
			if !counted || !reflect.DeepEqual(f, g) {
				continue
			}
			used = true
			if s.Faults[i].Count--; s.Faults[i].Count == 0 {
				s.Faults = append(s.Faults[:i], s.Faults[i+1:]...)
			}
			return nil
		}
		return nil
	})
	return used || errors.Is(err, NoPermission)
}
