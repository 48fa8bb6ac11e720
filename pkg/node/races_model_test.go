package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// shape is an allocation.
type shape struct {
	name string
	// results of the allocation; those that begin with "admin " have admin access.
	devices []gpu.DeviceName
	// memory is how much each takes of an MPS share without a number.
	memory string
	// sharing is the claim's configuration of GPUs.
	sharing string
}

// shapes are the allocations that are drawn. Shorter histories have earlier ones.
func shapes() []shape {
	a, b := installed.Names()[0], installed.Names()[1]
	of := func(name string, devices ...gpu.DeviceName) shape { return shape{name: name, devices: devices} }
	return []shape{
		of("GPU 0", a), of("GPU 1", b), of("both GPUs", a, b),
		of("1g at 0 of GPU 0", a+"-mig-1g10gb-0"), of("1g at 3 of GPU 0", a+"-mig-1g10gb-3"), of("3g at 4 of GPU 0", a+"-mig-3g40gb-4"),
		of("3g at 0 of GPU 1", b+"-mig-3g40gb-0"), of("7g of GPU 1", b+"-mig-7g80gb-0"),
		of("1g at 1 of GPU 0, 3g at 4 of GPU 1", a+"-mig-1g10gb-1", b+"-mig-3g40gb-4"),
		of("share 0 of 2 of GPU 0", a+"-mps2-0"), of("share 1 of 2 of GPU 0", a+"-mps2-1"), of("share 0 of 3 of GPU 1", b+"-mps3-0"), of("share 2 of 3 of GPU 1", b+"-mps3-2"),
		of("share 0 of 2 of 3g at 0 of GPU 0", a+"-mig-3g40gb-0-mps2-0"), of("share 1 of 2 of 3g at 0 of GPU 0", a+"-mig-3g40gb-0-mps2-1"),
		of("share 0 of 2 of 3g at 0 of GPU 1, and 1 of 2 of GPU 0", b+"-mig-3g40gb-0-mps2-0", a+"-mps2-1"),
		of("time slice 0 of 2 of GPU 1", b+"-ts2-0"), of("time slice 1 of 2 of GPU 1", b+"-ts2-1"), of("time slice 0 of 2 of GPU 0", a+"-ts2-0"),
		{name: "10Gi of GPU 0", devices: []gpu.DeviceName{a + "-mps"}, memory: "10Gi"}, {name: "40Gi of GPU 0", devices: []gpu.DeviceName{a + "-mps"}, memory: "40Gi"},
		{name: "50Gi of GPU 0", devices: []gpu.DeviceName{a + "-mps"}, memory: "50Gi"},
		{name: "GPU 1 with MPS of its own", devices: []gpu.DeviceName{b}, sharing: `{"strategy":"MPS"}`},
		{name: "both GPUs with MPS of their own", devices: []gpu.DeviceName{a, b}, sharing: `{"strategy":"MPS"}`},
		{name: "GPU 0 with short time slices", devices: []gpu.DeviceName{a}, sharing: `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Short"}}`},
		of("admin access to GPU 0", "admin "+a), of("3g at 4 of GPU 0, admin access to GPU 1", a+"-mig-3g40gb-4", "admin "+b),
	}
}

// claimOf returns a claim with the allocation.
func (s shape) claimOf(name string) *resourceapi.ResourceClaim {
	c := claimOf(name)
	for i, d := range s.devices {
		r := resourceapi.DeviceRequestAllocationResult{Request: fmt.Sprintf("r%d", i), Driver: gpu.DriverName, Pool: "node-0", Device: string(d)}
		if of, admin := cutAdmin(d); admin {
			r.Device, r.AdminAccess = string(of), new(true)
		}
		if s.memory != "" {
			r.ShareID = new(types.UID(fmt.Sprintf("%s-%d", name, i)))
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
				"memory": resource.MustParse(s.memory), "threadPercentage": resource.MustParse("20"), "clients": resource.MustParse("1"),
			}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	if s.sharing != "" {
		c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     gpu.DriverName,
				Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":` + s.sharing + `}`)},
			}},
		}}
	}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)}}
	return c
}

const adminPrefix = "admin "

func cutAdmin(d gpu.DeviceName) (of gpu.DeviceName, admin bool) {
	if len(d) > len(adminPrefix) && d[:len(adminPrefix)] == adminPrefix {
		return d[len(adminPrefix):], true
	}
	return d, false
}

// claimState is the state of a claim that the kubelet may rely on.
type claimState string

const (
	gone     claimState = "unprepared"
	prepared claimState = "prepared"
	// uncertain: the last call had no answer, or an error.
	uncertain claimState = "uncertain"
)

// modelClaim is a claim as the model knows it.
type modelClaim struct {
	number int
	// name is the claim's name and UID.
	name  string
	claim *resourceapi.ResourceClaim // nil: never allocated
	shape shape
	// held are the devices that it keeps from others.
	held  []gpu.Device
	state claimState
	// unused: no pod uses it, says the API server.
	unused bool
	// has: the last prepare was answered, and nothing has begun to take it back.
	has bool
	// unprepares counts the unprepares that have begun.
	unprepares int
	calls      []kubeletCall // of this batch
}

// kubeletCall is a call of a batch for one claim, or a restart of the node or its sandbox.
type kubeletCall struct {
	op    op
	start time.Time
	err   error
}

func (c kubeletCall) is(k kindOfOp, ok bool) bool { return c.op.Kind == k && (c.err == nil) == ok }

// conflicts reports whether two claims can't be prepared at the same time, except for lack
// of memory.
func (s *modelClaim) conflicts(with *modelClaim) bool {
	return slices.ContainsFunc(s.held, func(d gpu.Device) bool {
		return slices.ContainsFunc(with.held, func(e gpu.Device) bool { return gpu.Conflict(d, e) })
	})
}

// takesMemory is how many MiB it takes of GPU 0.
func (s *modelClaim) takesMemory() int64 {
	if s.claim == nil || s.shape.memory == "" {
		return 0
	}
	q := resource.MustParse(s.shape.memory)
	return q.Value() >> 20
}

// after returns the state after the calls of a batch, which are in the
// order of their starts. An unprepare prevails over prepares that began before it, and a
// prepare that begins later comes after it.
func (s *modelClaim) after() claimState {
	state := s.state
	for _, c := range s.calls {
		switch {
		case c.is(opPrepare, true):
			state = prepared
		case c.is(opUnprepare, true):
			state = gone
		case c.op.Kind == opPrepare && state == prepared, c.op.endsContainers() && state == gone: // it stays so
		default:
			state = uncertain
		}
	}
	return state
}

// pods are the containers of the node, whose processes the plugin sees in the host's /proc, and
// on GPUs.
type pods struct {
	dir string // of the claims' marks
	c   *computer

	mu sync.Mutex
	// pid has the process of each claim with a container.
	pid  map[string]int
	pids int
}

func (p *pods) path(uid string) string { return filepath.Join(p.dir, uid) }

// start starts a container with the claim's devices, as a runtime does by the CDI spec.
func (p *pods) start(s *modelClaim, spec string) error {
	uid := string(s.claim.UID)
	for _, file := range []string{spec, p.path(uid)} {
		if _, err := os.Stat(file); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pid[uid] != 0 {
		return nil
	}
	p.pids++
	for _, d := range s.held {
		if err := p.use(d, p.pids); err != nil {
			p.release(p.pids)
			return err
		}
	}
	p.pid[uid] = p.pids
	proc, mount := p.proc(p.pids), fmt.Sprintf("1 1 0:1 %s /dev/tessera/%s ro - tmpfs tmpfs rw\n", p.path(uid), uid)
	return errors.Join(
		os.MkdirAll(filepath.Join(proc, "ns"), 0o755),
		os.Symlink(fmt.Sprintf("mnt:[%d]", p.pids), filepath.Join(proc, "ns/mnt")),
		os.WriteFile(filepath.Join(proc, "mountinfo"), []byte(mount), 0o600),
	)
}

func (p *pods) proc(pid int) string { return p.c.host.Path(fmt.Sprintf("/proc/%d", pid)) }

// use has a process use a device's silicon.
func (p *pods) use(d gpu.Device, pid int) error {
	pos := p.c.position(d.Parent())
	one := nvmlsim.Process{PID: uint32(pid), GPUInstance: nvmlsim.NoInstance, ComputeInstance: nvmlsim.NoInstance}
	state := p.c.machine.State().GPUs[pos]
	part, ok := gpu.Base(d).(gpu.Partition)
	if ok == state.MIGCurrent && !ok {
		return p.c.machine.AddProcess(pos, one)
	}
	for _, i := range state.Instances {
		if ok && int(i.Start) == part.Placement.Start && int(i.Size) == part.Placement.Size && len(i.Compute) == 1 {
			one.GPUInstance, one.ComputeInstance = i.ID, i.Compute[0].ID
			return p.c.machine.AddProcess(pos, one)
		}
	}
	return fmt.Errorf("there is no %v", d)
}

// release ends a process on all GPUs.
func (p *pods) release(pid int) {
	for i := range installed.Machine.GPUs {
		_ = p.c.machine.RemoveProcess(i, uint32(pid)) // it may be on another
	}
}

func (p *pods) isRunning(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pid[uid] != 0
}

// stop ends the claim's container.
func (p *pods) stop(uid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pid := p.pid[uid]; pid != 0 {
		p.release(pid)
		_ = os.RemoveAll(p.proc(pid)) // of the test's own
		delete(p.pid, uid)
	}
}
