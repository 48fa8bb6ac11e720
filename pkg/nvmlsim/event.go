package nvmlsim

import (
	"context"
	"sync"
	"time"
)

// EventType is a bit of nvmlEventType*.
type EventType uint64

// The event types people ask for; nvml.h has them all.
const (
	XIDCriticalError EventType = 0x8
	MIGConfigChange  EventType = 0x100
	GPUUnavailable   EventType = 0x4000
)

// Event is something a GPU reported.
type Event struct {
	// Seq is the event's number, from 1 on, set by the machine.
	Seq uint64 `json:"seq"`
	// GPU is its position in the machine.
	GPU  int       `json:"gpu"`
	Type EventType `json:"type"`
	// Data is the Xid of an XIDCriticalError.
	Data uint64 `json:"data"`
	// GPUInstance and ComputeInstance are NoInstance where not attributable.
	GPUInstance     uint32 `json:"gpuInstance"`
	ComputeInstance uint32 `json:"computeInstance"`
}

func xidEvent(gpu int, xid uint64) Event {
	return Event{GPU: gpu, Type: XIDCriticalError, Data: xid, GPUInstance: NoInstance, ComputeInstance: NoInstance}
}

// addMIGEvent tells that a GPU's MIG configuration has changed: its mode, or
// the instance of these ids. That hardware tells of instances too is assumed.
func (s *State) addMIGEvent(gpu int, gpuInstance, computeInstance uint32) {
	s.addEvent(Event{GPU: gpu, Type: MIGConfigChange, GPUInstance: gpuInstance, ComputeInstance: computeInstance})
}

// PushEvent makes a GPU report something.
func (m *Machine) PushEvent(e Event) error {
	return m.updateGPU(e.GPU, func(s *State, _ *GPUState) error {
		s.addEvent(e)
		return nil
	})
}

// PushXID makes a GPU (by position) report an Xid that belongs to no instance.
func (m *Machine) PushXID(gpu int, xid uint64) error { return m.PushEvent(xidEvent(gpu, xid)) }

// EventSet collects the events of the GPUs registered with it, from their
// registration on. Wait takes them out one by one, in order.
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

// Register is nvmlDeviceRegisterEvents: it adds types to what the set collects
// of a GPU. NotSupported for a type the GPU hasn't.
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
// one. Timeout after timeout, ctx's error when that ends first, Uninitialized
// when the set is closed meanwhile.
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
	for _, e := range st.Events {
		if e.Seq <= s.seen {
			continue
		}
		s.seen = e.Seq
		if s.masks[e.GPU]&e.Type != 0 && e.Seq > s.since[e.GPU] {
			return e, true, nil
		}
	}
	return Event{}, false, nil
}

// Close is nvmlEventSetFree. Waits that are under way end within a second.
func (s *EventSet) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}
