package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Session is one initialized NVML. Its methods may be called concurrently, and
// none waits longer than a minute: a GPU for which a call never returns fails
// its own calls with ErrNotResponding, and those of no other GPU.
// It keeps no state of the hardware but the handles and identities of the GPUs
// it has seen, so that a call for one GPU asks no other and one that is lost can
// still be named, the profiles they can be cut into, which stay the same as long
// as their driver is loaded, and their NVLinks.
type Session struct {
	lib     gonvml.Interface
	devices device.Interface // go-nvlib's spelling of models and profiles
	cuda    string           // path of the driver's libcuda; "" where NVML needs no help to find it
	guard   *guard
	limits  limits

	profiles sync.Map // gpu.UUID → []gpu.Profile
	nvlinks  nvlinks

	mu    sync.Mutex
	known known
	// handles of the GPUs that were identified, and their indexes.
	handles map[gpu.UUID]gonvml.Device
	indexes map[int]gpu.UUID

	watching sync.Mutex // held by WaitEvent
	events   gonvml.EventSet
	// watched are the GPUs whose events are in the set.
	watched map[gpu.UUID]bool
}

// Driver says which driver answers.
type Driver struct {
	// Version, e.g. "580.159.04".
	Version string
	// CUDAVersion is the newest CUDA the driver serves, "major.minor"; empty
	// for a driver that was installed without CUDA.
	CUDAVersion string
}

// Open loads the library at path, which is one of a driver's directory of
// libraries, and initializes NVML. It fails with
// ErrLibraryNotFound or ErrDriverNotLoaded where the driver isn't (yet) there;
// trying again later is right then.
func Open(path string) (*Session, error) {
	lib := gonvml.New(gonvml.WithLibraryPath(path))
	if err := wrap(lib.Init(), "nvmlInit", path); err != nil {
		return nil, err
	}
	s := New(lib)
	s.cuda = filepath.Join(filepath.Dir(path), "libcuda.so.1")
	return s, nil
}

// New makes a session of an NVML that is initialized already.
func New(lib gonvml.Interface) *Session {
	return &Session{
		lib: lib, devices: device.New(lib), guard: newGuard(), limits: defaultLimits(), known: known{},
		handles: map[gpu.UUID]gonvml.Device{}, indexes: map[int]gpu.UUID{},
	}
}

// Close ends the session. The library may stay loaded. While a call into the
// driver doesn't return, NVML stays initialized, and the error is
// ErrNotResponding: shutting it down would wait for the call.
func (s *Session) Close() error {
	if late := s.guard.allLate(); len(late) > 0 {
		return fmt.Errorf("NVML stays initialized: %s: %w", strings.Join(late, ", "), ErrNotResponding)
	}
	s.watching.Lock()
	defer s.watching.Unlock()
	if s.events != nil {
		s.events.Free()
		s.events = nil
	}
	return do(s.guard, theDriver, "nvmlShutdown", s.limits.read, func() error {
		return wrap(s.lib.Shutdown(), "nvmlShutdown", "")
	})
}

// Driver reads the driver's versions.
func (s *Session) Driver() (Driver, error) {
	return ask(s.guard, theDriver, "read its versions", s.limits.read, s.readDriver)
}

func (s *Session) readDriver() (Driver, error) {
	version, ret := s.lib.SystemGetDriverVersion()
	if err := wrap(ret, "nvmlSystemGetDriverVersion", ""); err != nil {
		return Driver{}, err
	}
	cuda, err := s.cudaVersion()
	return Driver{Version: version, CUDAVersion: cuda}, err
}

// cudaVersion has libcuda loaded while it asks: NVML opens it by name alone,
// and where the driver is not in the loader's search path, as in the plugin's
// container, that finds it only if it is loaded already.
func (s *Session) cudaVersion() (string, error) {
	if s.cuda == "" {
		return s.askCUDAVersion()
	}
	cuda := dl.New(s.cuda, dl.RTLD_LAZY)
	if err := cuda.Open(); err != nil {
		return "", nil //nolint:nilerr // a driver without CUDA; see Driver
	}
	v, err := s.askCUDAVersion()
	return v, errors.Join(err, cuda.Close())
}

func (s *Session) askCUDAVersion() (string, error) {
	v, ret := s.lib.SystemGetCudaDriverVersion_v2()
	if err := wrap(ret, "nvmlSystemGetCudaDriverVersion", ""); err != nil {
		return "", err
	}
	// nvml.h: NVML_CUDA_DRIVER_VERSION_MAJOR(v) is v/1000, _MINOR(v) is (v%1000)/10.
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10), nil
}

// GPUs reads every GPU, in the order of indexes. A GPU that doesn't answer is
// in the list all the same, with the identity it had when it last did, or that
// Remember has named, and a condition that says what is wrong; only one of which
// neither is known is left out. The error is about the listing itself.
func (s *Session) GPUs() ([]gpu.GPU, error) {
	identified, failed, err := s.identify()
	if err != nil {
		return nil, err
	}
	read := make([]gpu.GPU, 0, len(identified))
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, uuid := range identified {
		wg.Go(func() {
			g, err := onGPU(s, uuid, "read its facts", s.limits.read, func(handle gonvml.Device, object string) (gpu.GPU, error) {
				return s.readGPU(handle, i, object)
			})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed[i] = err
				return
			}
			read = append(read, g)
		})
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	gpus := s.known.list(read, failed)
	s.nvlinks.join(gpus)
	return gpus, nil
}

func conditionOf(err error) gpu.Condition {
	c := gpu.Condition{Type: gpu.Unreadable, Message: err.Error()}
	switch {
	case errors.Is(err, ErrLost):
		c.Type = gpu.Lost
	case errors.Is(err, ErrNotResponding):
		c.Type = gpu.NotResponding
	}
	return c
}

// Event is something that happened to a GPU.
type Event struct {
	// GPU is empty where NVML doesn't say which.
	GPU gpu.UUID
	// Xid is the error number of a critical Xid, else 0.
	Xid uint64
}

// waitMillis is how long one nvmlEventSetWait may block: it bounds how late a
// cancelled context is noticed.
const waitMillis = 1000

// WaitEvent blocks until a GPU reports something or ctx ends; the error is
// then ctx's. ErrNotSupported where no GPU has events. Only one goroutine may
// wait at a time.
func (s *Session) WaitEvent(ctx context.Context) (Event, error) {
	s.watching.Lock()
	defer s.watching.Unlock()
	for ctx.Err() == nil {
		if err := s.watch(); err != nil {
			return Event{}, err
		}
		data, ret := s.events.Wait(waitMillis)
		if ret == gonvml.ERROR_TIMEOUT {
			continue
		}
		if err := wrap(ret, "nvmlEventSetWait", ""); err != nil {
			return Event{}, err
		}
		return s.newEvent(data), nil
	}
	return Event{}, ctx.Err()
}

func (s *Session) newEvent(data gonvml.EventData) Event {
	var e Event
	if data.Device != nil {
		uuid, err := ask(s.guard, "the GPU of an event", "nvmlDeviceGetUUID", s.limits.read, func() (string, error) {
			uuid, ret := data.Device.GetUUID()
			return uuid, wrap(ret, "nvmlDeviceGetUUID", "of an event")
		})
		if err == nil {
			e.GPU = gpu.UUID(uuid)
		}
	}
	if data.EventType == gonvml.EventTypeXidCriticalError {
		e.Xid = data.EventData
	}
	return e
}

// interesting are the events that can change what a node reports.
const interesting = gonvml.EventTypeXidCriticalError | gonvml.EventMigConfigChange |
	gonvml.EventTypeDoubleBitEccError | gonvml.EventTypeGpuUnavailableError

// watch registers the GPUs that aren't in the event set yet for the events they
// support. One that doesn't respond comes later.
func (s *Session) watch() error {
	if s.events == nil {
		set, ret := s.lib.EventSetCreate()
		if err := wrap(ret, "nvmlEventSetCreate", ""); err != nil {
			return err
		}
		s.events, s.watched = set, map[gpu.UUID]bool{}
		if _, _, err := s.identify(); err != nil {
			return err
		}
	}
	gpus := s.identified()
	for _, uuid := range gpus {
		if !s.watched[uuid] && s.guard.late(subject(uuid)) == nil {
			s.watched[uuid] = s.register(uuid, s.events)
		}
	}
	if !slices.Contains(slices.Collect(maps.Values(s.watched)), true) {
		s.events.Free()
		s.events = nil
		return fmt.Errorf("watch GPUs for events: none of %d GPUs has any: %w", len(gpus), ErrNotSupported)
	}
	return nil
}

func (s *Session) register(uuid gpu.UUID, set gonvml.EventSet) bool {
	err := change(s, uuid, "register for its events", func(handle gonvml.Device, object string) error {
		supported, ret := handle.GetSupportedEventTypes()
		if err := wrap(ret, "nvmlDeviceGetSupportedEventTypes", object); err != nil {
			return err
		}
		if supported&interesting == 0 {
			return ErrNotSupported
		}
		return wrap(handle.RegisterEvents(supported&interesting, set), "nvmlDeviceRegisterEvents", object)
	})
	return err == nil
}
