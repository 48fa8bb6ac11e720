package nvml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// onGPU calls f with the handle of a GPU and the GPU's name for errors. It
// makes no calls for other GPUs, unless this one has not been identified yet.
func onGPU[T any](s *Session, uuid gpu.UUID, what string, within time.Duration, f func(handle gonvml.Device, object string) (T, error)) (T, error) {
	handle, err := s.find(uuid)
	if err != nil {
		var none T
		return none, err
	}
	return ask(s.guard, subject(uuid), what, within, func() (T, error) {
		object := fmt.Sprintf("of GPU %s", uuid)
		if err := check(handle, uuid, object); err != nil {
			var none T
			return none, err
		}
		return f(handle, object)
	})
}

// check checks that a handle still belongs to the GPU, and that the GPU
// answers.
func check(handle gonvml.Device, uuid gpu.UUID, object string) error {
	is, ret := handle.GetUUID()
	if err := wrap(ret, "nvmlDeviceGetUUID", object); err != nil {
		return err
	}
	if is != string(uuid) {
		return fmt.Errorf("find GPU %s: its handle is that of GPU %s now: %w", uuid, is, ErrLost)
	}
	return nil
}

// change is like onGPU, for a call that changes the GPU and has no result.
func change(s *Session, uuid gpu.UUID, what string, f func(handle gonvml.Device, object string) error) error {
	_, err := onGPU(s, uuid, what, s.limits.change, func(handle gonvml.Device, object string) (struct{}, error) {
		return struct{}{}, f(handle, object)
	})
	return err
}

// find returns the handle of a GPU. If the handle isn't known, it identifies
// the GPUs by index: nvmlDeviceGetHandleByUUID takes up to seconds while other
// programs change MIG.
func (s *Session) find(uuid gpu.UUID) (gonvml.Device, error) {
	if handle := s.handle(uuid); handle != nil {
		return handle, nil
	}
	identified, failed, err := s.identify()
	if err != nil {
		return nil, err
	}
	if handle := s.handle(uuid); handle != nil {
		return handle, nil
	}
	if err := errors.Join(slices.Collect(maps.Values(failed))...); err != nil {
		return nil, fmt.Errorf("find GPU %s: %w", uuid, err)
	}
	return nil, fmt.Errorf("find GPU %s among the %d that NVML lists: %w", uuid, len(identified), ErrLost)
}

func (s *Session) handle(uuid gpu.UUID) gonvml.Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handles[uuid]
}

// identified returns the GPUs whose handles are known, in order.
func (s *Session) identified() []gpu.UUID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.handles))
}

// identify reads the UUIDs of all GPUs in parallel, and stores their handles.
// failed has the errors of GPUs that don't answer, by index. It makes no call
// for a GPU with a late call.
func (s *Session) identify() (_ map[int]gpu.UUID, failed map[int]error, _ error) {
	count, err := ask(s.guard, theDriver, "nvmlDeviceGetCount", s.limits.read, func() (int, error) {
		count, ret := s.lib.DeviceGetCount()
		return count, wrap(ret, "nvmlDeviceGetCount", "")
	})
	if err != nil {
		return nil, nil, err
	}
	answers := make([]identification, count)
	errs := make([]error, count)
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() { answers[i], errs[i] = s.identifyOne(i) })
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	identified, failed := map[int]gpu.UUID{}, map[int]error{}
	for i, a := range answers {
		if errs[i] != nil {
			failed[i] = errs[i]
			continue
		}
		identified[i] = a.uuid
		s.handles[a.uuid], s.indexes[i] = a.handle, a.uuid
	}
	return identified, failed, nil
}

type identification struct {
	handle gonvml.Device
	uuid   gpu.UUID
}

func (s *Session) identifyOne(index int) (identification, error) {
	s.mu.Lock()
	last, known := s.indexes[index]
	s.mu.Unlock()
	if known {
		if err := s.guard.late(subject(last)); err != nil {
			return identification{}, err
		}
	}
	object := fmt.Sprintf("of GPU %d", index)
	return ask(s.guard, theIndex(index), "identify it", s.limits.identify, func() (identification, error) {
		handle, ret := s.lib.DeviceGetHandleByIndex(index)
		if err := wrap(ret, "nvmlDeviceGetHandleByIndex", object); err != nil {
			return identification{}, err
		}
		uuid, ret := handle.GetUUID()
		return identification{handle, gpu.UUID(uuid)}, wrap(ret, "nvmlDeviceGetUUID", object)
	})
}

// Probe makes a call for every GPU for which the driver has to access the
// hardware, and returns the GPUs that don't respond: UUIDs and, for GPUs that
// haven't been identified, "GPU" and the index.
func (s *Session) Probe() []string {
	var wg sync.WaitGroup
	for _, uuid := range s.identified() {
		wg.Go(func() {
			_, _ = onGPU(s, uuid, "probe it", s.limits.read, func(handle gonvml.Device, _ string) (gonvml.Memory, error) {
				memory, _ := handle.GetMemoryInfo() // any answer will do
				return memory, nil
			})
		})
	}
	wg.Wait()
	return s.guard.allLate()
}

// Minor reads the number of a GPU's device node, which may change when its MIG
// mode does (nvml.h, nvmlDeviceSetMigMode). It is the one that GPUs returns from then
// on, if the GPU doesn't answer.
func (s *Session) Minor(uuid gpu.UUID) (int, error) {
	minor, err := onGPU(s, uuid, "read its minor number", s.limits.read, func(handle gonvml.Device, object string) (int, error) {
		minor, ret := handle.GetMinorNumber()
		return minor, wrap(ret, "nvmlDeviceGetMinorNumber", object)
	})
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.known.setMinor(uuid, minor)
	}
	return minor, err
}
