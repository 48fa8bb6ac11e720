package partition_test

import (
	"fmt"
	"slices"
	"sync"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	gpu0 = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

// profiles are some of an H200's: eight memory slices, one media engine of the
// kind that "+me" takes.
func profiles() []gpu.Profile {
	at := func(size int, starts ...int) (list []gpu.Placement) {
		for _, s := range starts {
			list = append(list, gpu.Placement{Start: s, Size: size})
		}
		return list
	}
	return []gpu.Profile{
		{Name: "1g.18gb", ID: 19, MaxInstances: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "1g.18gb+me", ID: 20, MaxInstances: 1, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "3g.71gb", ID: 9, MaxInstances: 2, Placements: at(4, 0, 4)},
		{Name: "7g.141gb", ID: 0, MaxInstances: 1, Placements: at(8, 0)},
	}
}

func part(uuid gpu.UUID, profile string, start int) gpu.Partition {
	for _, p := range profiles() {
		for _, at := range p.Placements {
			if p.Name == profile && at.Start == start {
				return gpu.Partition{GPU: uuid, Profile: profile, Placement: at}
			}
		}
	}
	panic(fmt.Sprintf("no %s at %d", profile, start))
}

// hardware is GPUs with MIG as the port shows them. It outlives every Manager.
type hardware struct {
	mu   sync.Mutex
	gpus map[gpu.UUID]*simulated
	// step is called after each change, as deep inside a call as it happens.
	step func(string)
	// fault, which may be nil, is asked before each call of the port.
	fault func(call string, uuid gpu.UUID) error
	calls []string
}

type simulated struct {
	mig gpu.MIG
	// users are processes by MIG device, or by "" for the GPU.
	users map[gpu.UUID]int
	lost  bool
}

func newHardware() *hardware {
	h := &hardware{gpus: map[gpu.UUID]*simulated{}, step: func(string) {}}
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		h.gpus[uuid] = &simulated{mig: gpu.MIG{Switchable: true, Profiles: profiles()}, users: map[gpu.UUID]int{}}
	}
	return h
}

func (h *hardware) enter(call string, uuid gpu.UUID) (*simulated, error) {
	h.mu.Lock()
	h.calls = append(h.calls, call)
	g, fault := h.gpus[uuid], h.fault
	h.mu.Unlock()
	if fault != nil {
		if err := fault(call, uuid); err != nil {
			return nil, err
		}
	}
	if g == nil || g.lost {
		return nil, fmt.Errorf("%s: %w", call, nvml.ErrLost)
	}
	return g, nil
}

func (h *hardware) MIG(uuid gpu.UUID) (gpu.MIG, error) {
	g, err := h.enter("look", uuid)
	if err != nil {
		return gpu.MIG{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	mig := g.mig
	mig.Instances = slices.Clone(mig.Instances)
	return mig, nil
}

func (h *hardware) CreateInstance(p gpu.Partition) (gpu.Instance, error) {
	g, err := h.enter("create", p.GPU)
	if err != nil {
		return gpu.Instance{}, err
	}
	id, err := h.createGPUInstance(g, p)
	if err != nil {
		return gpu.Instance{}, err
	}
	h.step("hardware.GPUInstance")
	if _, err := h.enter("createCompute", p.GPU); err != nil {
		if _, undo := h.enter("undo", p.GPU); undo != nil {
			return gpu.Instance{}, fmt.Errorf("%w; undo: %w", err, undo)
		}
		h.remove(g, id)
		return gpu.Instance{}, err
	}
	made := h.createCompute(g, p.GPU, id)
	h.step("hardware.ComputeInstance")
	return made, nil
}

func (h *hardware) createGPUInstance(g *simulated, p gpu.Partition) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !g.mig.Enabled {
		return 0, fmt.Errorf("mode is off: %w", nvml.ErrNotSupported)
	}
	for _, i := range g.mig.Instances {
		if i.Placement.Overlaps(p.Placement) || i.Profile == p.Profile && p.Profile == "1g.18gb+me" {
			return 0, nvml.ErrInsufficientResources
		}
	}
	id := 8/p.Placement.Size - 1 + p.Placement.Start/p.Placement.Size
	g.mig.Instances = append(g.mig.Instances, gpu.Instance{Profile: p.Profile, Placement: p.Placement, GPUInstanceID: id, ComputeInstanceID: gpu.NoComputeInstance})
	return id, nil
}

func (h *hardware) createCompute(g *simulated, uuid gpu.UUID, id int) gpu.Instance {
	h.mu.Lock()
	defer h.mu.Unlock()
	for n := range g.mig.Instances {
		if i := &g.mig.Instances[n]; i.GPUInstanceID == id {
			i.ComputeInstanceID, i.UUID = 0, gpu.UUID(fmt.Sprintf("MIG-%s-%d-0", uuid[4:12], id))
			return *i
		}
	}
	panic("GPU instance gone")
}

func (h *hardware) remove(g *simulated, id int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g.mig.Instances = slices.DeleteFunc(g.mig.Instances, func(i gpu.Instance) bool { return i.GPUInstanceID == id })
}

func (h *hardware) DestroyInstance(uuid gpu.UUID, want gpu.Instance) error {
	g, err := h.enter("destroy", uuid)
	if err != nil {
		return err
	}
	if err := h.mayDestroy(g, want); err != nil {
		return err
	}
	h.step("hardware.ComputeInstanceGone")
	h.remove(g, want.GPUInstanceID)
	h.step("hardware.GPUInstanceGone")
	return nil
}

// mayDestroy destroys the compute instance.
func (h *hardware) mayDestroy(g *simulated, want gpu.Instance) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := slices.IndexFunc(g.mig.Instances, func(i gpu.Instance) bool { return i.GPUInstanceID == want.GPUInstanceID })
	switch {
	case n < 0:
		return nvml.ErrNotFound
	case g.mig.Instances[n] != want:
		return nvml.ErrMismatch
	case g.users[want.UUID] > 0:
		return fmt.Errorf("%w by process 4242", nvml.ErrInUse)
	}
	g.mig.Instances[n].ComputeInstanceID, g.mig.Instances[n].UUID = gpu.NoComputeInstance, ""
	return nil
}

func (h *hardware) SetMIGMode(uuid gpu.UUID, on bool) error {
	g, err := h.enter("mode", uuid)
	if err != nil {
		return err
	}
	if err := h.setMode(g, on); err != nil {
		return err
	}
	h.step("hardware.Mode")
	return nil
}

func (h *hardware) Minor(uuid gpu.UUID) (int, error) {
	_, err := h.enter("minor", uuid)
	return 0, err
}

func (h *hardware) setMode(g *simulated, on bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !g.mig.Switchable:
		return nvml.ErrNotSwitchable
	case len(g.mig.Instances) > 0 || g.users[""] > 0:
		return fmt.Errorf("%w by process 4243", nvml.ErrInUse)
	}
	g.mig.Enabled, g.mig.Pending = on, on
	return nil
}

// outside changes the GPU as another program does.
func (h *hardware) outside(uuid gpu.UUID, change func(*simulated)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h.gpus[uuid])
}

// foreign makes an instance as another program does; without compute instance
// where it isn't whole.
func (h *hardware) foreign(p gpu.Partition, whole bool) gpu.Instance {
	h.outside(p.GPU, func(g *simulated) { g.mig.Enabled, g.mig.Pending = true, true })
	g := h.gpus[p.GPU]
	id, err := h.createGPUInstance(g, p)
	if err != nil {
		panic(err)
	}
	if whole {
		return h.createCompute(g, p.GPU, id)
	}
	return h.now(p.GPU).Instances[len(h.now(p.GPU).Instances)-1]
}

func (h *hardware) now(uuid gpu.UUID) gpu.MIG {
	h.mu.Lock()
	defer h.mu.Unlock()
	mig := h.gpus[uuid].mig
	mig.Instances = slices.Clone(mig.Instances)
	return mig
}

// reboot forgets all that a reboot makes a GPU forget.
func (h *hardware) reboot() {
	for uuid := range h.gpus {
		h.outside(uuid, func(g *simulated) {
			g.mig.Instances, g.mig.Enabled, g.mig.Pending, g.lost, g.users = nil, false, false, false, map[gpu.UUID]int{}
		})
	}
}

// count returns how often a call was made.
func (h *hardware) count(call string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, c := range h.calls {
		if c == call {
			n++
		}
	}
	return n
}
