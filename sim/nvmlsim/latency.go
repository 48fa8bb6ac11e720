package nvmlsim

import (
	"fmt"
	"slices"
	"time"
)

// Latency holds the durations of MIG's calls, in whole milliseconds: each call
// waits before it does anything.
type Latency struct {
	// Init is nvmlInit.
	Init time.Duration
	// Create is the time to create a GPU instance and its compute instance, a
	// quarter of it for the latter.
	Create time.Duration
	// Destroy is the time to destroy both, a twentieth of it for the compute
	// instance.
	Destroy time.Duration
	// Mode is a switch of the MIG mode.
	Mode time.Duration
}

// RealisticLatency returns the assumed delays of MIG on hardware; no
// distribution is published. Comments in a driver mention about 1 s for
// destroying, and logs show 10 ms for nvmlInit; creation and mode switch are
// guesses.
func RealisticLatency() Latency {
	return Latency{Init: 10 * time.Millisecond, Create: 200 * time.Millisecond, Destroy: time.Second, Mode: 2 * time.Second}
}

// faults returns the delays of the calls, except zero ones.
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

// SetLatency replaces the previous latency; the zero Latency removes it. Faults
// stay.
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
