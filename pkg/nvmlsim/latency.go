package nvmlsim

import (
	"fmt"
	"slices"
	"time"
)

// Latency is how long MIG's calls take: each call waits before it does
// anything. Whole milliseconds.
type Latency struct {
	// Init is nvmlInit.
	Init time.Duration
	// Create of a GPU instance and its compute instance together, a quarter of
	// it for the latter.
	Create time.Duration
	// Destroy of both, a twentieth of it for the compute instance.
	Destroy time.Duration
	// Mode is a switch of the MIG mode.
	Mode time.Duration
}

// RealisticLatency are delays as MIG is thought to have on hardware. An
// assumption: no distribution is published. A driver's comments tell of about
// 1 s for destroying, and logs of 10 ms for nvmlInit; creation and mode switch
// are guesses.
func RealisticLatency() Latency {
	return Latency{Init: 10 * time.Millisecond, Create: 200 * time.Millisecond, Destroy: time.Second, Mode: 2 * time.Second}
}

// faults are the delays of the calls, none where there is none.
func (l Latency) faults() []Fault {
	computeCreate, computeDestroy := l.Create/4, l.Destroy/20
	var all []Fault
	for _, c := range []struct {
		call string
		wait time.Duration
	}{
		{"Init", l.Init},
		{"DeviceCreateGpuInstance", l.Create - computeCreate},
		{"DeviceCreateGpuInstanceWithPlacement", l.Create - computeCreate},
		{"GpuInstanceCreateComputeInstance", computeCreate},
		{"GpuInstanceCreateComputeInstanceWithPlacement", computeCreate},
		{"ComputeInstanceDestroy", computeDestroy},
		{"GpuInstanceDestroy", l.Destroy - computeDestroy},
		{"DeviceSetMigMode", l.Mode},
	} {
		if ms := int(c.wait.Milliseconds()); ms > 0 {
			all = append(all, Fault{Call: c.call, GPU: AnyGPU, DelayMS: ms, Latency: true})
		}
	}
	return all
}

// SetLatency replaces the latency that was set before; the zero Latency takes
// it away. Faults stay.
func (m *Machine) SetLatency(l Latency) error {
	for _, d := range []time.Duration{l.Init, l.Create, l.Destroy, l.Mode} {
		if d < 0 {
			return fmt.Errorf("latency %s is negative: %w", d, InvalidArgument)
		}
	}
	return m.update(func(s *State) error {
		s.Faults = append(slices.DeleteFunc(s.Faults, func(f Fault) bool { return f.Latency }), l.faults()...)
		return nil
	})
}
