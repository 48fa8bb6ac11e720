package nvmlsim

import (
	"context"
	"slices"
	"sync"
	"time"
)

// EventType is a bit of nvmlEventType*.
type EventType uint64

// The commonly used event types; nvml.h has the complete list.
const (
	DoubleBitECCError     EventType = 0x2
	XIDCriticalError      EventType = 0x8
	MIGConfigChange       EventType = 0x100
	DRAMRetirement        EventType = 0x400
	DRAMRetirementFailure EventType = 0x800
	GPUUnavailable        EventType = 0x4000
	GPURecoveryAction     EventType = 0x8000
)

// Event is an event that a GPU reported.
type Event struct {
	// Seq is the event's number, from 1 on, set by the machine.
	Seq uint64 `json:"seq"`
	// GPU is its position in the machine.
	GPU  int       `json:"gpu"`
	Type EventType `json:"type"`
	// Data is the Xid of an XIDCriticalError.
	Data uint64 `json:"data"`
	// GPUInstance and ComputeInstance are NoInstance if the event belongs to none.
	GPUInstance     uint32 `json:"gpuInstance"`
	ComputeInstance uint32 `json:"computeInstance"`
}

func xidEvent(gpu int, xid uint64) Event {
	return Event{GPU: gpu, Type: XIDCriticalError, Data: xid, GPUInstance: NoInstance, ComputeInstance: NoInstance}
}

// addMIGEvent adds an event for a change of a GPU's MIG configuration: its
// mode, or the instance with these ids. That hardware reports changes of
// instances too is an assumption.
func (s *State) addMIGEvent(gpu int, gpuInstance, computeInstance uint32) {
	s.addEvent(Event{GPU: gpu, Type: MIGConfigChange, GPUInstance: gpuInstance, ComputeInstance: computeInstance})
}

// PushEvent makes a GPU report an event.
func (m *Machine) PushEvent(e Event) error {
	return m.updateGPU(e.GPU, func(s *State, _ *GPUState) error {
		s.addEvent(e)
		return nil
	})
}

// EventSet collects the events of the GPUs registered with it, from their
// registration on. Wait returns and removes them one by one, in order.
type EventSet struct {
	m      *Machine
	mu     sync.Mutex
	closed bool
	masks  map[int]EventType
	since  map[int]uint64
	seen   uint64
}

// NewEventSet is nvmlEventSetCreate.
func (m *Machine) NewEventSet() (*EventSet, error) {
	if err := m.call("EventSetCreate", AnyGPU); err != nil {
		return nil, err
	}
	s := &EventSet{m: m, masks: map[int]EventType{}, since: map[int]uint64{}}
	if st := m.state(); st != nil {
		s.seen = st.EventSeq
	}
	return s, nil
}

// Register is nvmlDeviceRegisterEvents: it adds types to those that the set
// collects for a GPU. It returns NotSupported for a type that the GPU doesn't
// have.
func (s *EventSet) Register(g *GPU, types EventType) error {
	if err := g.call("DeviceRegisterEvents"); err != nil {
		return err
	}
	if types&^EventType(g.model.SupportedEventTypes) != 0 {
		return NotSupported
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.since[g.pos]; !ok {
		if st := s.m.state(); st != nil {
			s.since[g.pos] = st.EventSeq
		}
	}
	s.masks[g.pos] |= types
	return nil
}

// Wait is nvmlEventSetWait: the next event of the set, blocking until there is
// one. It returns Timeout after timeout, ctx's error if ctx ends first, and
// Uninitialized if the set is closed during the wait. While a GPU of the set is lost, it
// returns GPUIsLost after that GPU's own events, and so hides those of the others.
func (s *EventSet) Wait(ctx context.Context, timeout time.Duration) (Event, error) {
	if err := s.m.call("EventSetWait", AnyGPU); err != nil {
		return Event{}, err
	}
	deadline := time.Now().Add(timeout)
	for {
		generation := s.m.generation()
		e, ok, err := s.next()
		if ok || err != nil {
			return e, err
		}
		if err := ctx.Err(); err != nil {
			return Event{}, err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return Event{}, Timeout
		}
		s.m.waitChange(ctx, generation, left)
	}
}

func (s *EventSet) next() (Event, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Event{}, false, Uninitialized
	}
	st := s.m.state()
	if st == nil {
		return Event{}, false, nil
	}
	if s.onlyLost(st) {
		return Event{}, false, GPUIsLost
	}
	for _, e := range st.Events {
		if e.Seq <= s.seen {
			continue
		}
		s.seen = e.Seq
		if s.collects(e) {
			return e, true, nil
		}
	}
	return Event{}, false, nil
}

func (s *EventSet) collects(e Event) bool {
	return s.masks[e.GPU]&e.Type != 0 && e.Seq > s.since[e.GPU]
}

// onlyLost reports whether a GPU of the set is lost whose events have all been returned.
func (s *EventSet) onlyLost(st *State) bool {
	for gpu := range s.masks {
		waits := func(e Event) bool { return e.GPU == gpu && e.Seq > s.seen && s.collects(e) }
		if gpu < len(st.GPUs) && st.GPUs[gpu].Lost && !slices.ContainsFunc(st.Events, waits) {
			return true
		}
	}
	return false
}

// Close is nvmlEventSetFree. Waits in progress end within a second.
func (s *EventSet) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}
