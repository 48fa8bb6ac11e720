package nvmlsim

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// AnyGPU in a Fault or Call means no particular one.
const AnyGPU = -1

// Fault is a failure, a delay or both that calls meet until it is used up or
// cleared.
type Fault struct {
	// Call is the name of an NVML function, with or without "nvml" and version
	// suffix ("DeviceGetUUID"), or "*".
	Call string `json:"call"`
	// GPU is its position in the machine (= minor), or AnyGPU.
	GPU int `json:"gpu"`
	// Code answered; Success lets the call go on after the delay.
	Code Return `json:"code,omitempty"`
	// DelayMS before the call does anything.
	DelayMS int `json:"delayMS,omitempty"`
	// Count of calls still to meet it; 0 means all, until cleared. Where the
	// state file is read-only, meeting it doesn't count.
	Count int `json:"count,omitempty"`
}

// callName strips what versions and prefixes add to a function's name.
func callName(s string) string {
	s = strings.TrimPrefix(s, "nvml")
	if i := strings.LastIndex(s, "_v"); i > 0 {
		s = s[:i]
	}
	return s
}

func (f Fault) meets(call string, gpu int) bool {
	return (f.Call == "*" || callName(f.Call) == call) && (f.GPU == AnyGPU || f.GPU == gpu)
}

// Fault adds a fault to the machine.
func (m *Machine) Fault(f Fault) error {
	if f.Call == "" || f.DelayMS < 0 || f.Count < 0 {
		return fmt.Errorf("fault %+v: call, delay or count: %w", f, InvalidArgument)
	}
	return m.update(func(s *State) error {
		if f.GPU != AnyGPU && (f.GPU < 0 || f.GPU >= len(s.GPUs)) {
			return fmt.Errorf("fault: the machine has no GPU %d: %w", f.GPU, NotFound)
		}
		s.Faults = append(s.Faults, f)
		return nil
	})
}

// RealisticLatency are delays as MIG's creation and destruction are thought to
// have on hardware. An assumption: no distribution is published; a driver's
// comments tell of about 1 s for destroying, and logs of 10 ms for nvmlInit.
func RealisticLatency() []Fault {
	delay := func(call string, ms int) Fault { return Fault{Call: call, GPU: AnyGPU, DelayMS: ms} }
	return []Fault{
		delay("Init", 10),
		delay("DeviceCreateGpuInstance", 150),
		delay("DeviceCreateGpuInstanceWithPlacement", 150),
		delay("GpuInstanceCreateComputeInstance", 50),
		delay("GpuInstanceCreateComputeInstanceWithPlacement", 50),
		delay("ComputeInstanceDestroy", 50),
		delay("GpuInstanceDestroy", 950),
	}
}

// ClearFaults takes all faults away, also an unloaded driver. Lost GPUs stay lost.
func (m *Machine) ClearFaults() error {
	return m.update(func(s *State) error {
		s.Faults, s.DriverUnloaded = nil, false
		return nil
	})
}

// LoadDriver loads or unloads the driver: Init answers DriverNotLoaded without it.
func (m *Machine) LoadDriver(loaded bool) error {
	return m.update(func(s *State) error {
		s.DriverUnloaded = !loaded
		return nil
	})
}

// Lose makes a GPU (by position) fall off the bus, with Xid 79 as the event
// that hardware sends then. Only Reboot brings it back.
func (m *Machine) Lose(gpu int) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		if !g.Lost {
			g.Lost = true
			s.addEvent(xidEvent(gpu, 79))
		}
		return nil
	})
}

// Reboot restarts the machine: everything that hardware forgets is gone, lost
// GPUs are back, a pending MIG mode is taken, and the boot id is a new one.
// Faults stay.
func (m *Machine) Reboot() error {
	return m.update(func(s *State) error {
		fresh, err := NewState(s.Description)
		if err != nil {
			return err
		}
		for i := range fresh.GPUs {
			fresh.GPUs[i].MIGCurrent, fresh.GPUs[i].MIGPending = s.GPUs[i].MIGPending, s.GPUs[i].MIGPending
			fresh.GPUs[i].RemappedRows = s.GPUs[i].RemappedRows
		}
		s.GPUs, s.BootID, s.DriverUnloaded = fresh.GPUs, fresh.BootID, false
		return nil
	})
}

// ChangeGPU changes anything about a GPU, by position: what hardware, or
// somebody outside, might do.
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

// call is what every NVML function goes through first: it meets the faults
// set for it, and a lost GPU.
func (m *Machine) call(name string, gpu int) error {
	st := m.state()
	if st == nil {
		return nil
	}
	for _, f := range st.Faults {
		if !f.meets(name, gpu) {
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
	if gpu == AnyGPU {
		return nil
	}
	if gpu >= len(st.GPUs) || st.GPUs[gpu].Lost {
		return GPUIsLost
	}
	return nil
}

// useUp counts a fault down; false if others had used it up meanwhile.
func (m *Machine) useUp(f Fault) bool {
	used := false
	err := m.update(func(s *State) error {
		for i, g := range s.Faults {
			if g.Call != f.Call || g.GPU != f.GPU || g.Code != f.Code || g.DelayMS != f.DelayMS || g.Count == 0 {
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
