package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Session is one initialized NVML. Its methods may be called concurrently.
// It holds no state of the hardware but the identities of the GPUs it has
// seen, so that one that is lost can still be named, the profiles they can be cut
// into, which stay the same as long as their driver is loaded, and their NVLinks.
type Session struct {
	lib     gonvml.Interface
	devices device.Interface // go-nvlib's spelling of models and profiles
	cuda    string           // path of the driver's libcuda; "" where NVML needs no help to find it

	profiles sync.Map // gpu.UUID → []gpu.Profile
	nvlinks  nvlinks

	mu     sync.Mutex
	known  known
	events gonvml.EventSet
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
	return &Session{lib: lib, devices: device.New(lib), known: known{}}
}

// Close ends the session. The library may stay loaded.
func (s *Session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.events != nil {
		s.events.Free()
		s.events = nil
	}
	return wrap(s.lib.Shutdown(), "nvmlShutdown", "")
}

// Library is the session's go-nvml, for libraries that want one
// (nvcdi.WithNvmlLib). NVML counts initializations, so theirs don't end ours.
func (s *Session) Library() gonvml.Interface { return s.lib }

// Driver reads the driver's versions.
func (s *Session) Driver() (Driver, error) {
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
// in the list all the same, with the identity it had when it last did and a
// condition that says what is wrong; only one that never answered in this
// session is left out, since nothing is known of it. The error is about the
// listing itself.
func (s *Session) GPUs() ([]gpu.GPU, error) {
	count, ret := s.lib.DeviceGetCount()
	if err := wrap(ret, "nvmlDeviceGetCount", ""); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var read []gpu.GPU
	failed := map[int]error{}
	for i := range count {
		g, err := s.readGPU(i)
		if err != nil {
			failed[i] = err
			continue
		}
		read = append(read, g)
	}
	gpus := s.known.list(read, failed)
	s.nvlinks.join(gpus)
	return gpus, nil
}

// known are the GPUs that have answered, each as it last did. Not by index:
// when a GPU vanishes, those behind it move up.
type known map[gpu.UUID]gpu.GPU

// list remembers what was read and returns it together with the GPUs that were
// known and didn't answer; failed has the errors by index.
func (k known) list(read []gpu.GPU, failed map[int]error) []gpu.GPU {
	silent := maps.Clone(k)
	for _, g := range read {
		k[g.UUID] = g
		delete(silent, g.UUID)
	}
	gpus := slices.Clone(read)
	for _, g := range silent {
		c := gpu.Condition{Type: gpu.Lost, Message: "NVML no longer lists the GPU"}
		if err := failed[g.Index]; err != nil {
			c = conditionOf(err)
		}
		g.Conditions = []gpu.Condition{c}
		gpus = append(gpus, g)
	}
	slices.SortFunc(gpus, func(a, b gpu.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	return gpus
}

func conditionOf(err error) gpu.Condition {
	if errors.Is(err, ErrLost) {
		return gpu.Condition{Type: gpu.Lost, Message: err.Error()}
	}
	return gpu.Condition{Type: gpu.Unreadable, Message: err.Error()}
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
	set, err := s.eventSet()
	if err != nil {
		return Event{}, err
	}
	for ctx.Err() == nil {
		data, ret := set.Wait(waitMillis)
		if ret == gonvml.ERROR_TIMEOUT {
			continue
		}
		if err := wrap(ret, "nvmlEventSetWait", ""); err != nil {
			return Event{}, err
		}
		return newEvent(data), nil
	}
	return Event{}, ctx.Err()
}

func newEvent(data gonvml.EventData) Event {
	var e Event
	if data.Device != nil {
		if uuid, ret := data.Device.GetUUID(); ret == gonvml.SUCCESS {
			e.GPU = gpu.UUID(uuid)
		}
	}
	if data.EventType == gonvml.EventTypeXidCriticalError {
		e.Xid = data.EventData
	}
	return e
}

// watched are the events that can change what a node reports.
const watched = gonvml.EventTypeXidCriticalError | gonvml.EventMigConfigChange |
	gonvml.EventTypeDoubleBitEccError | gonvml.EventTypeGpuUnavailableError

// eventSet registers every GPU for the events it supports, once.
func (s *Session) eventSet() (gonvml.EventSet, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.events != nil {
		return s.events, nil
	}
	set, ret := s.lib.EventSetCreate()
	if err := wrap(ret, "nvmlEventSetCreate", ""); err != nil {
		return nil, err
	}
	if err := s.register(set); err != nil {
		set.Free()
		return nil, err
	}
	s.events = set
	return set, nil
}

func (s *Session) register(set gonvml.EventSet) error {
	count, ret := s.lib.DeviceGetCount()
	if err := wrap(ret, "nvmlDeviceGetCount", ""); err != nil {
		return err
	}
	registered := 0
	for i := range count {
		device, ret := s.lib.DeviceGetHandleByIndex(i)
		if ret != gonvml.SUCCESS {
			continue
		}
		supported, ret := device.GetSupportedEventTypes()
		if ret != gonvml.SUCCESS || supported&watched == 0 {
			continue
		}
		if device.RegisterEvents(supported&watched, set) == gonvml.SUCCESS {
			registered++
		}
	}
	if registered == 0 {
		return fmt.Errorf("watch GPUs for events: none of %d GPUs has any: %w", count, ErrNotSupported)
	}
	return nil
}
