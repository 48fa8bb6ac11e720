package nvml

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/dl"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Session is one initialized NVML. Its methods may be called concurrently, and
// none waits without a limit: if a call for a GPU never returns, calls for
// that GPU fail with ErrNotResponding, and calls for other GPUs are not
// affected. While a call changes a GPU (its MIG mode, instances, compute mode),
// other calls for that GPU wait outside the driver, and those for all GPUs skip
// it. It stores the handles and identities of the GPUs it has seen, so
// that a call for one GPU needs no other and a lost GPU can still be named;
// their MIG profiles, which don't change while the driver is loaded; and their
// NVLinks; and a sample of the performance counters of each GPU instance, for
// Usage. It stores no other state of the hardware.
type Session struct {
	lib     gonvml.Interface
	has     map[string]bool  // which of the calls that older drivers don't have
	devices device.Interface // for the names of models and profiles as in go-nvlib
	cuda    string           // path of the driver's libcuda; "" if NVML finds it in the loader's search path
	guard   *guard
	limits  limits

	profiles sync.Map // gpu.UUID → []gpu.Profile

	mu      sync.Mutex
	known   known
	nvlinks nvlinks
	// handles has the handles of the identified GPUs, and indexes their indexes.
	handles map[gpu.UUID]gonvml.Device
	indexes map[int]gpu.UUID
	gpm     map[gpu.UUID]gpmSamples
	// unheard has why events of GPUs don't arrive; see noteUnheard.
	unheard map[gpu.UUID]error
	// migOn has the GPUs whose MIG mode was on, or about to be, when it was last read or set.
	migOn map[gpu.UUID]bool

	watching sync.Mutex // held by WaitEvent
	events   gonvml.EventSet
	// watched has the GPUs that were registered for events: true if their events are
	// in the set, false if they have none.
	watched map[gpu.UUID]bool
	// dropped has the GPUs that were lost while they were in the set, and aren't back.
	dropped map[gpu.UUID]bool

	// closed: nvmlShutdown was called. It isn't called again: NVML counts the calls of all
	// sessions together.
	closed atomic.Bool
}

// Driver identifies the driver.
type Driver struct {
	// Version, e.g. "580.159.04".
	Version string
	// CUDAVersion is the newest CUDA that the driver supports, "major.minor";
	// empty for a driver that was installed without CUDA, or doesn't report it.
	CUDAVersion string
}

// Opener opens sessions, one after the other. They share the list of calls into
// the driver that have not returned: while a call for the whole driver, such as
// nvmlInit, hangs, no other session starts one.
type Opener struct {
	guard  *guard
	limits limits
}

// NewOpener returns an Opener without calls in progress.
func NewOpener() *Opener { return &Opener{guard: newGuard(), limits: defaultLimits()} }

// libraries has each library by its path, for all sessions: loading one that is
// loaded would write variables of go-nvml that calls of other sessions read.
var libraries sync.Map //nolint:gochecknoglobals // as those variables are

// Calls that older drivers don't have.
const (
	callMemoryInfo     = "nvmlDeviceGetMemoryInfo_v2"
	callAddressingMode = "nvmlDeviceGetAddressingMode"
	callLinkEnd        = "nvmlDeviceGetNvLinkRemoteDeviceType"
	callSRAMErrors     = "nvmlDeviceGetSramEccErrorStatus"
	callGPM            = "nvmlGpmMigSampleGet"
	callFabric         = "nvmlDeviceGetGpuFabricInfo"
)

// Open loads the library at path, which is one of a driver's directory of
// libraries, and initializes NVML. It fails with ErrLibraryNotFound or
// ErrDriverNotLoaded if the driver isn't installed or loaded yet, and with
// ErrNotResponding if it hangs; the caller should retry later.
func (o *Opener) Open(path string) (*Session, error) {
	lib, _ := libraries.LoadOrStore(path, gonvml.New(gonvml.WithLibraryPath(path)))
	s, err := o.init(lib.(gonvml.Interface), path, func(call string) bool { return exports(path, call) })
	if err != nil {
		return nil, err
	}
	s.cuda = filepath.Join(filepath.Dir(path), "libcuda.so.1")
	return s, nil
}

// exports reports whether a library that is loaded has a call. go-nvml's own way to look for one
// can't be used while another session is opened or closed.
func exports(path, call string) bool {
	lib := dl.New(path, dl.RTLD_LAZY)
	if lib.Open() != nil {
		return false
	}
	defer lib.Close()
	return lib.Lookup(call) == nil
}

// Init initializes lib, which has all calls; name is used in errors. If initialization is
// late, NVML stays initialized.
func (o *Opener) Init(lib gonvml.Interface, name string) (*Session, error) {
	return o.init(lib, name, func(string) bool { return true })
}

func (o *Opener) init(lib gonvml.Interface, name string, exports func(call string) bool) (*Session, error) {
	has := map[string]bool{}
	_, err := ask(o.guard, theDriver, reads, "nvmlInit", o.limits.initialize, func() (struct{}, error) {
		if err := wrap(lib.Init(), "nvmlInit", name); err != nil {
			return struct{}{}, err
		}
		for _, call := range []string{callMemoryInfo, callAddressingMode, callLinkEnd, callSRAMErrors, callGPM, callFabric} {
			has[call] = exports(call)
		}
		return struct{}{}, nil
	})
	if err != nil {
		return nil, err
	}
	return &Session{
		lib: lib, has: has, devices: device.New(lib), guard: o.guard, limits: o.limits, known: known{},
		nvlinks: nvlinks{ends: map[gpu.UUID]map[int]linkEnd{}, none: map[gpu.UUID]bool{}},
		handles: map[gpu.UUID]gonvml.Device{}, indexes: map[int]gpu.UUID{}, gpm: map[gpu.UUID]gpmSamples{}, unheard: map[gpu.UUID]error{},
		migOn: map[gpu.UUID]bool{}, dropped: map[gpu.UUID]bool{},
	}, nil
}

// Open opens the only session of a process; see Opener.Open.
func Open(path string) (*Session, error) { return NewOpener().Open(path) }

// Close ends the session. The library may stay loaded. While a call into the
// driver doesn't return, NVML stays initialized, and the error is
// ErrNotResponding: shutting it down would wait for the call. Close may be called again
// then.
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
	if s.closed.Swap(true) {
		return nil
	}
	_, err := ask(s.guard, theDriver, reads, "nvmlShutdown", s.limits.read, func() (struct{}, error) {
		for _, uuid := range s.identified() {
			s.takeSamples(uuid).freeAll()
		}
		return struct{}{}, wrap(s.lib.Shutdown(), "nvmlShutdown", "")
	})
	return err
}

// Driver reads the driver's versions.
func (s *Session) Driver() (Driver, error) {
	return ask(s.guard, theDriver, reads, "read its versions", s.limits.read, s.readDriver)
}

func (s *Session) readDriver() (Driver, error) {
	version, ret := s.lib.SystemGetDriverVersion()
	if err := wrap(ret, "nvmlSystemGetDriverVersion", ""); err != nil {
		return Driver{}, err
	}
	cuda, err := s.cudaVersion()
	return Driver{Version: version, CUDAVersion: cuda}, err
}

// cudaVersion loads libcuda before it asks NVML, which opens libcuda by name
// alone: if the driver is not in the loader's search path, as in the plugin's
// container, NVML finds libcuda only if it is loaded already.
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
		return "", failure(err)
	}
	// nvml.h: NVML_CUDA_DRIVER_VERSION_MAJOR(v) is v/1000, _MINOR(v) is (v%1000)/10.
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10), nil
}

// Listing has the GPUs that NVML lists.
type Listing struct {
	// GPUs in the order of their indexes. One that doesn't answer, or whose facts can't all
	// be read, has a condition that explains the failure.
	GPUs []gpu.GPU
	// Count is how many GPUs NVML lists.
	Count int
	// Unidentified has the errors of those of them, by index, that can't be identified
	// and that can't be the last known GPU there: they are not in GPUs.
	Unidentified map[int]error
	// Unread are the GPUs that are being changed. GPUs has them as they were last read.
	Unread []gpu.UUID
}

// GPUs returns the GPUs of List, after having waited for those that are being changed.
func (s *Session) GPUs() ([]gpu.GPU, error) {
	l, err := s.list(reads)
	return l.GPUs, err
}

// List reads every GPU. A GPU that can't be identified is listed with its last known
// facts, or those from Remember, and counted if it has none. It doesn't wait for GPUs that are
// being changed. The error is about the listing itself.
func (s *Session) List() (Listing, error) { return s.list(readsUnlessChanged) }

func (s *Session) list(as access) (Listing, error) {
	s.mu.Lock()
	before := maps.Clone(s.known)
	s.mu.Unlock()
	identified, failed, err := s.identify()
	if err != nil {
		return Listing{}, err
	}
	indexes := slices.Sorted(maps.Keys(identified))
	read, errs := make([]gpu.GPU, len(indexes)), make([]error, len(indexes))
	each(len(indexes), func(n int) {
		found, as := identified[indexes[n]], as
		last := before[found.uuid]
		if last.UUID == "" {
			last.Minor, as = gpu.NoMinor, reads
		}
		last.UUID, last.Index = found.uuid, indexes[n]
		read[n], errs[n] = s.readKnown(found.handle, last, as)
	})
	var unread []gpu.UUID
	for n, err := range errs {
		if errors.Is(err, errBeingChanged) {
			unread = append(unread, read[n].UUID)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	gpus, unidentified := s.known.list(before, read, failed)
	s.nvlinks.join(gpus)
	s.addUnheard(gpus)
	return Listing{GPUs: gpus, Count: len(identified) + len(failed), Unidentified: unidentified, Unread: unread}, nil
}

// readKnown reads a GPU. One that can't be read is returned with a condition, and with
// those of its last known facts that weren't read; and one that is being changed as it was last
// read.
func (s *Session) readKnown(handle gonvml.Device, last identity, as access) (gpu.GPU, error) {
	g, err := ask(s.guard, subject(last.UUID), as, "read its facts", s.limits.read, func() (gpu.GPU, error) {
		object := fmt.Sprintf("of GPU %s", last.UUID)
		is, ret := handle.GetUUID()
		if err := checkUUID(last.UUID, is, ret, object); err != nil {
			return gpu.GPU{}, err
		}
		return s.readGPU(handle, last.GPU, object)
	})
	if g.UUID == "" {
		g = last.GPU // the reading didn't begin, or hasn't ended
	}
	switch {
	case errors.Is(err, errBeingChanged):
		g.Conditions = last.conditions
	case err != nil:
		g.Conditions = []gpu.Condition{ConditionOf(err)}
	}
	return g, err
}
