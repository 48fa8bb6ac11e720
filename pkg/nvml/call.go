package nvml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// onGPU calls f as ask does, with the handle of a GPU and the GPU's name for errors. It
// makes no calls for other GPUs, unless this one has not been identified yet, and doesn't
// call f if the GPU doesn't answer, or the handle is another GPU's now.
func onGPU[T any](s *Session, uuid gpu.UUID, as access, what string, within time.Duration, f func(handle gonvml.Device, object string) (T, error)) (T, error) {
	var none, value T
	handle, err := s.find(uuid)
	if err != nil {
		return none, err
	}
	c, err := s.guard.begin(subject(uuid), as, what)
	if err != nil {
		return none, err
	}
	go func() {
		defer s.guard.end(c)
		object := fmt.Sprintf("of GPU %s", uuid)
		is, ret := handle.GetUUID()
		if err = checkUUID(uuid, is, ret, object); err == nil {
			value, err = f(handle, object)
		}
	}()
	if late := s.guard.await(c, within); late != nil {
		return none, late // value and err are still f's
	}
	return value, err
}

// checkUUID returns an error if a GPU has not told its UUID, or another one.
func checkUUID(want gpu.UUID, is string, ret gonvml.Return, object string) error {
	if err := wrap(ret, "nvmlDeviceGetUUID", object); err != nil {
		return err
	}
	if is != string(want) {
		return fmt.Errorf("find GPU %s: its handle is that of GPU %s now: %w", want, is, ErrLost)
	}
	return nil
}

// change calls f as onGPU does; f changes the GPU.
func (s *Session) change(uuid gpu.UUID, what string, f func(handle gonvml.Device, object string) error) error {
	_, err := onGPU(s, uuid, changes, what, s.limits.change, func(handle gonvml.Device, object string) (struct{}, error) {
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
// for a GPU with a late call, nor for one that is being changed.
func (s *Session) identify() (identified map[int]identification, failed map[int]error, _ error) {
	count, err := ask(s.guard, theDriver, reads, "nvmlDeviceGetCount", s.limits.read, func() (int, error) {
		count, ret := s.lib.DeviceGetCount()
		return count, wrap(ret, "nvmlDeviceGetCount", "")
	})
	if err != nil {
		return nil, nil, err
	}
	answers := make([]identification, count)
	errs := make([]error, count)
	each(count, func(i int) { answers[i], errs[i] = s.identifyOne(i) })
	s.mu.Lock()
	defer s.mu.Unlock()
	identified, failed = map[int]identification{}, map[int]error{}
	for i, a := range answers {
		if errs[i] != nil {
			failed[i] = errs[i]
			continue
		}
		identified[i] = a
		s.handles[a.uuid], s.indexes[i] = a.handle, a.uuid
	}
	return identified, failed, nil
}

type identification struct {
	handle gonvml.Device
	uuid   gpu.UUID
}

func (s *Session) identifyOne(index int) (identification, error) {
	about := theIndex(index)
	s.mu.Lock()
	last, known := s.indexes[index]
	before := identification{s.handles[last], last}
	s.mu.Unlock()
	if known {
		about = subject(last)
	}
	object := fmt.Sprintf("of GPU %d", index)
	now, err := ask(s.guard, about, readsUnlessChanged, identifying, s.limits.identify, func() (identification, error) {
		handle, ret := s.lib.DeviceGetHandleByIndex(index)
		if err := wrap(ret, "nvmlDeviceGetHandleByIndex", object); err != nil {
			return identification{}, err
		}
		uuid, ret := handle.GetUUID()
		if err := wrap(ret, "nvmlDeviceGetUUID", object); err != nil {
			return identification{}, err
		}
		if !isUUID(uuid) {
			return identification{}, fmt.Errorf("nvmlDeviceGetUUID %s: %q is not a UUID", object, uuid)
		}
		return identification{handle, gpu.UUID(uuid)}, nil
	})
	if errors.Is(err, errBeingChanged) {
		return before, nil
	}
	return now, err
}

// isUUID reports whether a GPU can be reported with the UUID: a node's report accepts no
// others.
func isUUID(s string) bool {
	const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-"
	return s != "" && len(s) <= 64 && strings.Trim(s, letters) == ""
}

// Probe makes a call for every GPU for which the driver has to access the
// hardware, except for those that are being changed, and returns the GPUs that
// don't respond: UUIDs and, for GPUs that haven't been identified, "GPU" and the
// index.
func (s *Session) Probe() []string {
	gpus := s.identified()
	each(len(gpus), func(i int) {
		_, _ = onGPU(s, gpus[i], readsUnlessChanged, "probe it", s.limits.read, func(handle gonvml.Device, _ string) (gonvml.Memory, error) {
			memory, _ := handle.GetMemoryInfo() // any answer will do
			return memory, nil
		})
	})
	return s.guard.allLate()
}

// each calls f for all numbers below n, concurrently, and returns when all calls have
// returned.
func each(n int, f func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { f(i) })
	}
	all.Wait()
}

// Silent returns the GPUs, by UUID or index, and "the driver", for which a call has not
// returned in its time. It makes no call. Close fails while there are any.
func (s *Session) Silent() []string { return s.guard.allLate() }

// Minor reads the number of a GPU's device node, which may change when its MIG
// mode does (nvml.h, nvmlDeviceSetMigMode). It is the one that GPUs returns from then
// on, if the GPU doesn't answer.
func (s *Session) Minor(uuid gpu.UUID) (int, error) {
	minor, err := onGPU(s, uuid, reads, "read its minor number", s.limits.read, func(handle gonvml.Device, object string) (int, error) {
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

// limits say how long a call may take before its GPU counts as one that does
// not respond. Together with the pause between two Probes, each leaves room
// within the 30 seconds in which a node reports such a GPU.
type limits struct {
	// initialize bounds nvmlInit, which may initialize all GPUs.
	initialize time.Duration
	// identify bounds the first call for a GPU: without the persistence daemon, the
	// driver initializes the GPU then, which takes seconds. It may do so for one GPU
	// after the other, so the time begins again with each GPU that answers.
	identify time.Duration
	// read bounds calls that only read.
	read time.Duration
	// change bounds calls that change the GPU: MIG mode and instances take seconds.
	change time.Duration
}

func defaultLimits() limits {
	return limits{initialize: 30 * time.Second, identify: 15 * time.Second, read: 10 * time.Second, change: 30 * time.Second}
}

// subject names the object of a call: a GPU by UUID or, until it is identified, by
// index; or the driver.
type subject string

const theDriver subject = "the driver"

func theIndex(i int) subject { return subject(fmt.Sprintf("GPU %d", i)) }

// wrap returns nil for SUCCESS, and otherwise an error that names the call and
// the object.
func wrap(ret gonvml.Return, call, object string) error {
	if ret == gonvml.SUCCESS {
		return nil
	}
	if object != "" {
		call += " " + object
	}
	if kind := kindOf(ret); kind != nil {
		return fmt.Errorf("%s: %w (%w)", call, kind, ret)
	}
	return fmt.Errorf("%s: %w", call, ret)
}

func kindOf(ret gonvml.Return) error {
	switch ret {
	case gonvml.ERROR_LIBRARY_NOT_FOUND:
		return ErrLibraryNotFound
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		return ErrDriverNotLoaded
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return ErrVersionMismatch
	case gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_RESET_REQUIRED:
		return ErrLost
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
		return ErrNotSupported
	case gonvml.ERROR_IN_USE:
		return ErrInUse
	case gonvml.ERROR_NO_PERMISSION:
		return ErrNoPermission
	case gonvml.ERROR_INSUFFICIENT_RESOURCES:
		return ErrInsufficientResources
	case gonvml.ERROR_NOT_FOUND:
		return ErrNotFound
	default:
		return nil
	}
}
