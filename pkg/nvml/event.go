package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Event is an event of a GPU.
type Event struct {
	// GPU is empty if NVML doesn't name it.
	GPU  gpu.UUID
	Kind EventKind
	// XID is set if the kind is EventXID.
	XID *gpu.XID
}

// EventKind is the subject of an event. Apart from EventXID, an event says only
// that it is time to read the GPU again.
type EventKind string

const (
	// EventXID: the GPU reported an error (XidCriticalError).
	EventXID EventKind = "XID"
	// EventMIG: the GPU's MIG configuration changed.
	EventMIG EventKind = "MIG"
	// EventMemory: an uncorrectable error of memory, or rows were remapped.
	EventMemory EventKind = "Memory"
	// EventUnavailable: the GPU can't be used any more (GpuUnavailableError).
	EventUnavailable EventKind = "Unavailable"
	// EventRecovery: the recovery action changed (GpuRecoveryAction).
	EventRecovery EventKind = "Recovery"
)

// interesting is the set of events that can change a node's report.
const interesting = gonvml.EventTypeXidCriticalError | gonvml.EventMigConfigChange | memoryEvents |
	gonvml.EventTypeGpuUnavailableError | gonvml.EventTypeGpuRecoveryAction

const memoryEvents = gonvml.EventTypeDoubleBitEccError | gonvml.EventTypeDramRetirementEvent |
	gonvml.EventTypeDramRetirementFailure | gonvml.EventTypeFatalPoisonError

func eventKind(eventType uint64) EventKind {
	switch {
	case eventType&gonvml.EventTypeXidCriticalError != 0:
		return EventXID
	case eventType&gonvml.EventTypeGpuUnavailableError != 0:
		return EventUnavailable
	case eventType&gonvml.EventTypeGpuRecoveryAction != 0:
		return EventRecovery
	case eventType&memoryEvents != 0:
		return EventMemory
	default:
		return EventMIG
	}
}

// waitMillis is how long one nvmlEventSetWait may block: a cancelled context is
// noticed at most this much later.
const waitMillis = 1000

// WaitEvent blocks until a GPU reports an event or ctx ends, when it returns
// ctx's error. It returns ErrNotSupported if no GPU has events. Only one
// goroutine may wait at a time.
//
// NVML refuses to wait for a set with a lost GPU, also for the others' events. WaitEvent
// then goes on without the lost GPUs until they answer again. Events may have been missed,
// so it returns one without a GPU, of the kind EventUnavailable.
func (s *Session) WaitEvent(ctx context.Context) (Event, error) {
	s.watching.Lock()
	defer s.watching.Unlock()
	for ctx.Err() == nil {
		if err := s.watch(); err != nil {
			return Event{}, err
		}
		data, ret := s.events.Wait(waitMillis)
		if ret == gonvml.ERROR_TIMEOUT {
			s.noteUnheard(allGPUs, nil)
			continue
		}
		err := wrap(ret, "nvmlEventSetWait", "")
		s.noteUnheard(allGPUs, err)
		if errors.Is(err, ErrLost) && s.dropLost() {
			return Event{Kind: EventUnavailable}, nil
		}
		if err != nil {
			return Event{}, err
		}
		return s.newEvent(data, time.Now()), nil
	}
	return Event{}, ctx.Err()
}

// Listen registers the GPUs for events, so that WaitEvent returns those that come from now
// on. Without it, the first call of WaitEvent registers them. It returns the same errors.
func (s *Session) Listen() error {
	s.watching.Lock()
	defer s.watching.Unlock()
	return s.watch()
}

func (s *Session) newEvent(data gonvml.EventData, at time.Time) Event {
	e := Event{GPU: s.eventGPU(data.Device), Kind: eventKind(data.EventType)}
	if e.Kind == EventXID {
		e.XID = &gpu.XID{
			GPU: e.GPU, Code: data.EventData, At: at,
			GPUInstance: instanceID(data.GpuInstanceId), ComputeInstance: instanceID(data.ComputeInstanceId),
		}
	}
	return e
}

// eventGPU returns the GPU of an event. It makes no call if the handle is known:
// a GPU that reports an error may not answer any more.
func (s *Session) eventGPU(handle gonvml.Device) gpu.UUID {
	if handle == nil {
		return ""
	}
	s.mu.Lock()
	for uuid, known := range s.handles {
		if known == handle {
			s.mu.Unlock()
			return uuid
		}
	}
	s.mu.Unlock()
	uuid, err := ask(s.guard, "the GPU of an event", reads, "nvmlDeviceGetUUID", s.limits.read, func() (string, error) {
		uuid, ret := handle.GetUUID()
		return uuid, wrap(ret, "nvmlDeviceGetUUID", "of an event")
	})
	if err != nil {
		return ""
	}
	return gpu.UUID(uuid)
}

// instanceID returns nil for NVML's "no instance".
func instanceID(id uint32) *int {
	if id == 0xFFFFFFFF {
		return nil
	}
	n := int(id)
	return &n
}

// watch registers the GPUs that aren't in the event set yet for the events they
// support. A GPU that doesn't respond, or is being changed, is registered later.
func (s *Session) watch() error {
	if s.events == nil {
		set, ret := s.lib.EventSetCreate()
		err := wrap(ret, "nvmlEventSetCreate", "")
		s.noteUnheard(allGPUs, err)
		if err != nil {
			return err
		}
		s.events, s.watched = set, map[gpu.UUID]bool{}
		if _, _, err := s.identify(); err != nil {
			return err
		}
	}
	gpus := s.identified()
	var failed error
	for _, uuid := range gpus {
		if _, ok := s.watched[uuid]; ok {
			continue
		}
		err := s.register(uuid, s.events)
		s.noteUnheard(uuid, err)
		if err == nil || errors.Is(err, ErrNotSupported) {
			s.watched[uuid] = err == nil
			delete(s.dropped, uuid)
		} else {
			failed = err
		}
	}
	if !slices.Contains(slices.Collect(maps.Values(s.watched)), true) {
		s.events.Free()
		s.events = nil
		return fmt.Errorf("watch GPUs for events: none of %d GPUs has any: %w", len(gpus), cmp.Or(failed, ErrNotSupported))
	}
	return nil
}

// allGPUs stands for all GPUs in noteUnheard: an error of the whole event set.
const allGPUs gpu.UUID = ""

// noteUnheard stores why events of a GPU don't arrive; with nil, and if something else than
// NVML's answer keeps them away, that they do. A GPU that is lost has a condition for that.
func (s *Session) noteUnheard(uuid gpu.UUID, err error) {
	_, answered := errors.AsType[gonvml.Return](err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if answered && failure(err) != nil && !errors.Is(err, ErrLost) {
		s.unheard[uuid] = err
	} else {
		delete(s.unheard, uuid)
	}
}

// addUnheard adds a condition to the GPUs whose events don't arrive. It needs the lock.
func (s *Session) addUnheard(gpus []gpu.GPU) {
	for i, g := range gpus {
		if err := cmp.Or(s.unheard[g.UUID], s.unheard[allGPUs]); err != nil {
			gpus[i].Conditions = append(gpus[i].Conditions, gpu.Condition{Type: gpu.VitalsUnreadable, Message: "the GPU's errors are not reported: " + err.Error()})
		}
	}
}

// dropLost frees the set, from which NVML removes no single GPU, so that the next one is
// made without the GPUs that are lost. It reports whether any of the set is.
func (s *Session) dropLost() bool {
	dropped := false
	for uuid, registered := range s.watched {
		if !registered {
			continue
		}
		err := s.onGPUToWatch(uuid, "look whether it is lost", checkHardware)
		if errors.Is(err, ErrLost) {
			s.dropped[uuid], dropped = true, true
		}
	}
	if dropped {
		s.events.Free()
		s.events = nil
	}
	return dropped
}

// onGPUToWatch calls f with the handle of a GPU, unless the GPU is being changed. The call may
// take as long as a change: the driver may have to initialize the GPU.
func (s *Session) onGPUToWatch(uuid gpu.UUID, what string, f func(handle gonvml.Device, object string) error) error {
	_, err := onGPU(s, uuid, readsUnlessChanged, what, s.limits.change, func(handle gonvml.Device, object string) (struct{}, error) {
		return struct{}{}, f(handle, object)
	})
	return err
}

// checkHardware makes a call for which the driver has to access the GPU.
func checkHardware(handle gonvml.Device, object string) error {
	_, ret := handle.GetMemoryInfo()
	return wrap(ret, "nvmlDeviceGetMemoryInfo", object)
}

func (s *Session) register(uuid gpu.UUID, set gonvml.EventSet) error {
	return s.onGPUToWatch(uuid, "register for its events", func(handle gonvml.Device, object string) error {
		if s.dropped[uuid] {
			if err := checkHardware(handle, object); err != nil {
				return err
			}
		}
		supported, ret := handle.GetSupportedEventTypes()
		if err := wrap(ret, "nvmlDeviceGetSupportedEventTypes", object); err != nil {
			return err
		}
		if supported&interesting == 0 {
			return ErrNotSupported
		}
		return wrap(handle.RegisterEvents(supported&interesting, set), "nvmlDeviceRegisterEvents", object)
	})
}
