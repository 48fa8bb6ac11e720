package nvmlsim

import (
	"crypto/rand"
	"encoding/hex"
)

// State is the changeable state of a machine, with its description: the content
// of the state file. A State read from a Store is shared and must not be
// changed; Store.Update passes a copy to change.
type State struct {
	// Version of this layout.
	Version int `json:"version"`
	// BootID changes with every Reboot, which resets the volatile state of the
	// hardware.
	BootID      string      `json:"bootID"`
	Description Description `json:"description"`
	// DriverUnloaded makes Init answer DriverNotLoaded.
	DriverUnloaded bool `json:"driverUnloaded,omitempty"`
	// GPUs are in the order of Description.GPUs.
	GPUs   []GPUState `json:"gpus"`
	Faults []Fault    `json:"faults,omitempty"`
	// Births counts all instances ever created, so that a handle can distinguish
	// its instance from a later one with the same ids.
	Births uint64 `json:"births"`
	// Holders counts all Holders ever created.
	Holders uint64 `json:"holders,omitempty"`
	// MPSKills counts how often MPS was killed.
	MPSKills MPSKills `json:"mpsKills,omitzero"`
	// KernelLogSeq is the number of the next record of the kernel log.
	KernelLogSeq uint64 `json:"kernelLogSeq,omitempty"`
	// EventSeq is the Seq of the newest event, 0 before the first.
	EventSeq uint64 `json:"eventSeq"`
	// Events are the newest maxEvents, oldest first.
	Events []Event `json:"events,omitempty"`
}

const (
	stateVersion = 3
	maxEvents    = 64
)

// GPUState is the changeable state of one GPU.
type GPUState struct {
	Health
	// Minor is N of /dev/nvidiaN now.
	Minor           int  `json:"minor"`
	MIGCurrent      bool `json:"migCurrent,omitempty"`
	MIGPending      bool `json:"migPending,omitempty"`
	PersistenceMode bool `json:"persistenceMode,omitempty"`
	// ComputeMode is nvmlComputeMode_t.
	ComputeMode uint32 `json:"computeMode,omitempty"`
	// TimeSlice is how long a process computes before another one's turn: 0
	// default, 1 short, 2 medium, 3 long.
	TimeSlice uint32 `json:"timeSlice,omitempty"`
	// Temperature in °C.
	Temperature uint32 `json:"temperature"`
	// PowerMilliwatts drawn now.
	PowerMilliwatts uint32        `json:"powerMilliwatts"`
	Instances       []GPUInstance `json:"instances,omitempty"`
	Processes       []Process     `json:"processes,omitempty"`
}

// GPUInstance is one MIG GPU instance.
type GPUInstance struct {
	ID   uint32 `json:"id"`
	Born uint64 `json:"born"`
	// Profile is the profile's id (not its enum).
	Profile uint32            `json:"profile"`
	Start   uint32            `json:"start"`
	Size    uint32            `json:"size"`
	Compute []ComputeInstance `json:"compute,omitempty"`
}

// ComputeInstance is one compute instance within a GPU instance.
type ComputeInstance struct {
	ID   uint32 `json:"id"`
	Born uint64 `json:"born"`
	// Profile is the compute instance profile's id.
	Profile uint32 `json:"profile"`
	Start   uint32 `json:"start"`
	Size    uint32 `json:"size"`
}

// NoInstance is the instance id for events and processes that belong to no MIG
// instance.
const NoInstance = 0xFFFFFFFF

// Process is a client of a GPU.
type Process struct {
	PID        uint32 `json:"pid"`
	Name       string `json:"name,omitempty"`
	UsedMemory uint64 `json:"usedMemory,omitempty"`
	// Utilization is the percentage of the time in which it computes.
	Utilization uint32 `json:"utilization,omitempty"`
	// MPSClient: it uses the GPU through an MPS server.
	MPSClient bool `json:"mpsClient,omitempty"`
	// GPUInstance and ComputeInstance are NoInstance without MIG.
	GPUInstance     uint32 `json:"gpuInstance"`
	ComputeInstance uint32 `json:"computeInstance"`
	// Holder is the number of the process's Holder; 0 for a process that stays
	// until it is removed.
	Holder uint64 `json:"holder,omitempty"`
}

// NewState returns the state of a machine that has just booted.
func NewState(d Description) (State, error) {
	s := State{Version: stateVersion, BootID: newBootID(), Description: d}
	for _, id := range d.GPUs {
		m, err := FindModel(id.Model)
		if err != nil {
			return State{}, err
		}
		s.GPUs = append(s.GPUs, bootGPU(id, m))
	}
	return s, nil
}

// bootGPU returns the state of a GPU after a reboot or reset: idle.
func bootGPU(id Identity, m *Model) GPUState {
	return GPUState{
		Minor:      id.Minor,
		MIGCurrent: id.MIGEnabled, MIGPending: id.MIGEnabled,
		PersistenceMode: true,
		Temperature:     30,
		PowerMilliwatts: m.PowerLimitWatts * 100,
	}
}

func newBootID() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// addEvent adds an event, and removes the oldest if there are too many.
func (s *State) addEvent(e Event) {
	s.EventSeq++
	e.Seq = s.EventSeq
	s.Events = append(s.Events, e)
	if n := len(s.Events) - maxEvents; n > 0 {
		s.Events = append([]Event(nil), s.Events[n:]...)
	}
}
