package nvmlsim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/notify"
)

const (
	// StateEnv names the environment variable with the path of the state file,
	// which is tried before all other places.
	StateEnv = "NVSIM_STATE"
	// StateFile is the path of the state file under a driver root.
	StateFile = "var/lib/nvmlsim/state"
	// KernelLink is the path under a driver root of a link to the directory with the
	// kernel's files, if that isn't the driver root itself.
	KernelLink = "var/lib/nvmlsim/kernel"
)

// KernelDir returns the directory that has the device nodes and the kernel's files of
// a driver root, in dev, proc and sys.
func KernelDir(root string) string {
	link := filepath.Join(root, KernelLink)
	if _, err := os.Lstat(link); err == nil {
		return link
	}
	return root
}

// FirmwareFile returns a second name of the state file under a driver root. It
// looks like the driver's firmware, which container runtimes mount read-only
// into every container with a GPU, so the simulated hardware is accessible
// there.
func FirmwareFile(driverVersion string) string {
	return "lib/firmware/nvidia/" + driverVersion + "/gsp_nvmlsim.bin"
}

// Machine is a session with a simulated machine, as opened by nvmlInit. Open
// decides which GPUs the session sees; their answers follow the current state.
// It may be used by any number of goroutines.
type Machine struct {
	description Description
	store       *Store     // nil if the state file can't be opened
	gpus        []*GPU     // those that are visible here, by index
	unsupported [][]string // calls that answer NotSupported, by the GPU's position
	container   string     // the container's root directory, "" on the node
	closed      atomic.Bool

	initMu sync.Mutex
	inits  int // calls of Init minus calls of Shutdown

	gpm gpmSamples

	// changing says for each GPU, by position, whether a call is changing it, which may be
	// delayed or hang. The time of a synctest bubble goes on while others wait for that: it
	// would stop if they waited for a lock. changes guards it.
	changes  notify.Mutex
	changing [MaxGPUs]bool
}

// Open opens the machine with this state file and sees all its GPUs.
func Open(statePath string) (*Machine, error) {
	store, err := OpenStore(statePath)
	if err != nil {
		return nil, err
	}
	st, err := store.Read()
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	m := &Machine{description: st.Description, store: store}
	if err := m.see(func(int) bool { return true }); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return m, nil
}

// Create creates the state file of a freshly booted machine and opens it.
// Replacing an existing file is a reboot with other hardware.
func Create(statePath string, d Description) (*Machine, error) {
	st, err := NewState(d)
	if err != nil {
		return nil, err
	}
	store, err := CreateStore(statePath, st)
	if err != nil {
		return nil, err
	}
	if err := store.Close(); err != nil {
		return nil, err
	}
	return Open(statePath)
}

// OpenInContainer opens a machine in a container with this root directory: it
// sees the GPUs whose device node is under dev and accessible. If the firmware
// was not mounted they all count as healthy and idle. As with a real driver, it
// returns DriverNotLoaded without nvidiactl, and Unknown if nvidiactl isn't
// accessible.
func OpenInContainer(d Description, root string) (*Machine, error) {
	switch err := usable(filepath.Join(root, "dev/nvidiactl"), unix.R_OK|unix.W_OK); {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%w: %w", err, DriverNotLoaded)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, Unknown)
	}
	m := &Machine{description: d, container: root}
	store, err := OpenStore(filepath.Join(root, FirmwareFile(d.DriverVersion)))
	switch {
	case err == nil:
		m.store = store
	case !errors.Is(err, ErrNoState):
		return nil, err
	}
	if st := m.state(); st != nil {
		m.description = st.Description
	}
	return m, m.see(func(pos int) bool {
		return usable(filepath.Join(root, "dev/nvidia"+strconv.Itoa(m.minor(pos))), unix.R_OK|unix.W_OK) == nil
	})
}

// minor returns the minor number that a GPU (by position) has now.
func (m *Machine) minor(gpu int) int {
	if st := m.state(); st != nil && gpu < len(st.GPUs) {
		return st.GPUs[gpu].Minor
	}
	return m.description.GPUs[gpu].Minor
}

// mayUse reports whether a MIG device may be used here: on the node always, in
// a container if it can read the capabilities' device nodes, which nobody but root
// may write to.
func (m *Machine) mayUse(gpuMinor int, gpuInstance, computeInstance uint32) bool {
	if m.container == "" {
		return true
	}
	gi, ci := CapabilityMinors(gpuMinor, gpuInstance, computeInstance)
	for _, minor := range []int{gi, ci} {
		if usable(filepath.Join(m.container, "dev/nvidia-caps/nvidia-cap"+strconv.Itoa(minor)), unix.R_OK) != nil {
			return false
		}
	}
	return true
}

// usable asks the kernel whether the device may be opened for this access, including
// the device cgroup, without opening it: that would wake a real GPU.
func usable(path string, access uint32) error {
	fi, err := os.Stat(path)
	if err != nil {
		return err
	}
	if fi.Mode()&os.ModeCharDevice == 0 {
		return fmt.Errorf("%s is not a character device", path)
	}
	if err := unix.Faccessat(unix.AT_FDCWD, path, access, 0); err != nil {
		return fmt.Errorf("access %s: %w", path, err)
	}
	return nil
}

// OpenInstalled opens the machine of the file at imagePath (the installed
// nvidia-smi): with the state file that NVSIM_STATE names; otherwise with that
// of the driver root that the file belongs to; otherwise as in a container, with
// the files mounted there and the description in the file.
func OpenInstalled(imagePath string) (*Machine, error) {
	if p := os.Getenv(StateEnv); p != "" {
		return Open(p)
	}
	root, d, embedErr := Embedded(imagePath)
	if embedErr != nil {
		return nil, fmt.Errorf("%w: %w", embedErr, DriverNotLoaded)
	}
	m, err := Open(filepath.Join(root, StateFile))
	if !errors.Is(err, ErrNoState) {
		return m, err
	}
	// Where a container has the file says nothing about the other files.
	return OpenInContainer(d, "/")
}

// see creates the visible GPUs.
func (m *Machine) see(visible func(position int) bool) error {
	models := map[string]*Model{}
	for pos, id := range m.description.GPUs {
		if models[id.Model] == nil {
			model, err := FindModel(id.Model)
			if err != nil {
				return err
			}
			models[id.Model] = model
		}
		m.unsupported = append(m.unsupported, m.description.unsupported(models[id.Model]))
		if visible(pos) {
			m.gpus = append(m.gpus, &GPU{m: m, pos: pos, index: len(m.gpus), id: id, model: models[id.Model]})
		}
	}
	return nil
}

// Init is nvmlInit: DriverNotLoaded while the driver is unloaded. Until Shutdown
// or Close the session counts as a client of its GPUs, which can't be reset.
func (m *Machine) Init() error {
	if err := m.call("Init", AnyGPU); err != nil {
		return err
	}
	if st := m.state(); st != nil && st.DriverUnloaded {
		return DriverNotLoaded
	}
	return m.attach()
}

// Close ends the session and its hanging calls. The machine is not affected.
func (m *Machine) Close() error {
	m.closed.Store(true)
	if m.store == nil {
		return nil
	}
	return errors.Join(m.detach(), m.store.Close())
}

// Description returns the description of the machine, including GPUs that
// aren't visible here.
func (m *Machine) Description() Description { return m.description }

// State returns the current state of the machine, nil if the state file can't
// be opened. It must not be changed.
func (m *Machine) State() *State { return m.state() }

// StatePath returns the path of the state file, "" if it can't be opened.
func (m *Machine) StatePath() string {
	if m.store == nil {
		return ""
	}
	return m.store.Path()
}

// GPUs returns the GPUs that are visible here, by index.
func (m *Machine) GPUs() []*GPU { return m.gpus }

// state returns the current state, nil without one. If the file can't be read
// any more, there is no state: the GPUs then answer from the description.
func (m *Machine) state() *State {
	if m.store == nil {
		return nil
	}
	st, err := m.store.Read()
	if err != nil {
		return nil
	}
	return st
}

func (m *Machine) update(change func(*State) error) error {
	if m.store == nil {
		return fmt.Errorf("the machine's state is not in reach here: %w", NoPermission)
	}
	return m.store.Update(func(s *State) error {
		for i := range s.GPUs {
			s.GPUs[i].Processes = m.living(s.GPUs[i].Processes)
		}
		return change(s)
	})
}

func (m *Machine) generation() uint64 {
	if m.store == nil {
		return 0
	}
	return m.store.Generation()
}

// waitChange sleeps until the state changes, at most a second at a time, so
// that it notices the end of a context and a closed set.
func (m *Machine) waitChange(ctx context.Context, generation uint64, timeout time.Duration) {
	timeout = min(timeout, time.Second)
	if ctx.Done() != nil {
		timeout = min(timeout, 100*time.Millisecond)
	}
	if m.store != nil {
		m.store.WaitChange(generation, timeout)
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(timeout):
	}
}

// DriverVersion is nvmlSystemGetDriverVersion.
func (m *Machine) DriverVersion() (string, error) {
	return m.description.DriverVersion, m.call("SystemGetDriverVersion", AnyGPU)
}

// NVMLVersion is nvmlSystemGetNVMLVersion: CUDA's major version and the driver's.
func (m *Machine) NVMLVersion() (string, error) {
	return strconv.Itoa(m.description.CUDADriverVersion()/1000) + "." + m.description.DriverVersion,
		m.call("SystemGetNVMLVersion", AnyGPU)
}

// CUDADriverVersion is nvmlSystemGetCudaDriverVersion: 13000 for 13.0.
func (m *Machine) CUDADriverVersion() (int, error) {
	return m.description.CUDADriverVersion(), m.call("SystemGetCudaDriverVersion", AnyGPU)
}

// Count is nvmlDeviceGetCount.
func (m *Machine) Count() (int, error) { return len(m.gpus), m.call("DeviceGetCount", AnyGPU) }

// ByIndex is nvmlDeviceGetHandleByIndex.
func (m *Machine) ByIndex(index int) (*GPU, error) {
	if index < 0 || index >= len(m.gpus) {
		return nil, InvalidArgument
	}
	g := m.gpus[index]
	return g, g.call("DeviceGetHandleByIndex")
}

// ByUUID is nvmlDeviceGetHandleByUUID for whole GPUs.
func (m *Machine) ByUUID(uuid string) (*GPU, error) {
	return m.find("DeviceGetHandleByUUID", func(id Identity) bool { return id.UUID == uuid })
}

// BySerial is nvmlDeviceGetHandleBySerial.
func (m *Machine) BySerial(serial string) (*GPU, error) {
	return m.find("DeviceGetHandleBySerial", func(id Identity) bool { return id.Serial == serial })
}

// ByPCIBusID is nvmlDeviceGetHandleByPciBusId: four or eight digits of domain,
// any case, the function may be left out.
func (m *Machine) ByPCIBusID(busID string) (*GPU, error) {
	want, ok := parseBusID(busID)
	if !ok {
		return nil, InvalidArgument
	}
	return m.find("DeviceGetHandleByPciBusId", func(id Identity) bool {
		have, ok := parseBusID(id.BusID)
		return ok && have == want
	})
}

func (m *Machine) find(call string, want func(Identity) bool) (*GPU, error) {
	for _, g := range m.gpus {
		if want(g.id) {
			return g, g.call(call)
		}
	}
	if err := m.call(call, AnyGPU); err != nil {
		return nil, err
	}
	return nil, NotFound
}
