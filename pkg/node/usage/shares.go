package usage

import (
	"slices"
	"strconv"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// hardwareDescs are the metrics of values that the driver reports.
type hardwareDescs struct {
	gpuTotal, gpuUsed, gpuUtilization, partitionTotal, partitionUsed, partitionUtilization, shareUsed, shareLargest, shareUtilization *family
}

func newHardwareDescs() hardwareDescs {
	partition := []string{"uuid", "parent_uuid", "gpu_instance_id", "profile"}
	share := []string{"parent_uuid", "device", "share_id", "namespace", "claim", "pod", "container"}
	return hardwareDescs{
		gpuTotal:             newFamily("tessera_gpu_memory_total_bytes", "Memory of the GPU.", "uuid"),
		gpuUsed:              newFamily("tessera_gpu_memory_used_bytes", "Memory of the GPU that programs use, without what the driver reserves.", "uuid"),
		gpuUtilization:       newFamily("tessera_gpu_utilization_ratio", "Fraction of the driver's last sample period in which any program ran on the GPU's multiprocessors. The driver doesn't tell it in MIG mode.", "uuid"),
		partitionTotal:       newFamily("tessera_partition_memory_total_bytes", "Memory of the MIG device.", partition...),
		partitionUsed:        newFamily("tessera_partition_memory_used_bytes", "Memory of the MIG device that programs use.", partition...),
		partitionUtilization: newFamily("tessera_partition_utilization_ratio", "Fraction of the time since the reading before, about five seconds, in which any program ran on the MIG device's GPU instance. Drivers tell it from Hopper on.", partition...),
		shareUsed:            newFamily("tessera_share_memory_used_bytes", "GPU memory that the container's processes use on a share, with their CUDA contexts, as the driver tells it of each process.", share...),
		shareLargest:         newFamily("tessera_share_process_memory_max_bytes", "GPU memory of that of the container's processes on an MPS share which uses most. The share's limit is one of each process.", share...),
		shareUtilization:     newFamily("tessera_share_utilization_ratio", "Fraction of the time in which the container's processes ran on the GPU's multiprocessors, as the driver tells it of each process.", share...),
	}
}

func (d hardwareDescs) all() []*family {
	return []*family{d.gpuTotal, d.gpuUsed, d.gpuUtilization, d.partitionTotal, d.partitionUsed, d.partitionUtilization, d.shareUsed, d.shareLargest, d.shareUtilization}
}

// collectUsage has the usage of one GPU and its partitions.
func (c *Collector) collectUsage(s scrape, g gpu.GPU, r Reading, made []holding.MadePartition) {
	uuid := string(g.UUID)
	if r.Memory.Total > 0 {
		s.gauge(c.hardware.gpuTotal, float64(r.Memory.Total), uuid)
		s.gauge(c.hardware.gpuUsed, float64(r.Memory.Used), uuid)
	}
	if r.Utilization != nil {
		s.gauge(c.hardware.gpuUtilization, *r.Utilization, uuid)
	}
	for _, p := range r.Partitions {
		labels := []string{string(p.UUID), uuid, strconv.Itoa(p.GPUInstanceID), profileOf(g, p.UUID, made)}
		s.gauge(c.hardware.partitionTotal, float64(p.Memory.Total), labels...)
		s.gauge(c.hardware.partitionUsed, float64(p.Memory.Used), labels...)
		if p.Utilization != nil {
			s.gauge(c.hardware.partitionUtilization, *p.Utilization, labels...)
		}
	}
}

// profileOf returns the profile of a MIG device; empty if it isn't known yet.
func profileOf(g gpu.GPU, device gpu.UUID, made []holding.MadePartition) string {
	for _, m := range made {
		if m.Made != nil && m.Made.UUID == device {
			return m.Profile
		}
	}
	if g.MIG != nil {
		for _, i := range g.MIG.Instances {
			if i.UUID == device {
				return i.Profile
			}
		}
	}
	return ""
}

// shares attributes processes to the holdings of claims.
type shares struct {
	state

	byUID map[string]int // indexes of claims
	pods  *containers.Containers
	// byContainer has the use of each holding by each container.
	byContainer map[sharer]*use
}

// sharer is a container that has a holding of a claim.
type sharer struct {
	claim, holding int // indexes
	Container
}

// use has the sums over processes, and the memory of the largest one; a value is nil if it
// isn't known of all of them.
type use struct {
	memory, largest, utilization *float64
}

// addMemory adds the memory of one process.
func (u *use) addMemory(memory *float64) {
	if u.memory = plus(u.memory, memory); u.memory == nil {
		u.largest = nil
		return
	}
	u.largest = new(max(*u.largest, *memory))
}

func (c *Collector) collectShares(s scrape, now state) {
	all := shares{state: now, byUID: map[string]int{}, pods: c.cfg.Containers, byContainer: map[sharer]*use{}}
	for i, claim := range now.claims {
		all.byUID[claim.ClaimUID] = i
	}
	for uuid, r := range now.readings {
		for _, p := range r.Processes {
			all.add(uuid, r, p)
		}
	}
	all.addIdle()
	for by, u := range all.byContainer {
		r := now.claims[by.claim]
		h := r.Holdings[by.holding]
		labels := []string{string(h.GPU), string(h.Device), h.ShareID, r.Namespace, r.Name, by.Pod, by.Name}
		if u.memory != nil {
			s.gauge(c.hardware.shareUsed, *u.memory, labels...)
		}
		if u.largest != nil && h.MPS != nil && h.MPS.MemoryMiB > 0 {
			s.gauge(c.hardware.shareLargest, *u.largest, labels...)
		}
		if u.utilization != nil {
			s.gauge(c.hardware.shareUtilization, min(*u.utilization, 1), labels...)
		}
	}
}

// add adds a process to its container's use of a holding. If the container has several
// devices of the GPU or partition, it isn't known which of them the process uses.
func (a *shares) add(uuid gpu.UUID, r Reading, p gpu.Process) {
	user, ok := r.Users[p.PID]
	if !ok {
		return
	}
	var found []sharer
	for _, i := range a.claimsOf(user) {
		for j, h := range a.claims[i].Holdings {
			if h.GPU == uuid && h.IsShared() && a.isOn(p, h) {
				found = append(found, sharer{i, j, Container{Pod: a.nameOf(user, a.claims[i]), Name: user.Container}})
			}
		}
	}
	for _, by := range found {
		u := a.byContainer[by]
		if u == nil {
			u = &use{memory: new(0.0), largest: new(0.0), utilization: new(0.0)}
			a.byContainer[by] = u
		}
		if len(found) > 1 {
			u.memory, u.largest, u.utilization = nil, nil, nil
			continue
		}
		u.addMemory(toFloat(p.MemoryBytes))
		if p.MPSClient && !r.AttributesMPS {
			p.Utilization = nil
		}
		u.utilization = plus(u.utilization, p.Utilization)
	}
}

// claimsOf returns the claims that the container uses. Where they can't be seen, those of
// its pod count.
func (a *shares) claimsOf(u containers.User) (indexes []int) {
	for _, uid := range u.Claims {
		if i, ok := a.byUID[uid]; ok {
			indexes = append(indexes, i)
		}
	}
	if len(u.Claims) > 0 {
		return indexes
	}
	for i, claim := range a.claims {
		if slices.ContainsFunc(claim.Pods, func(p holding.Pod) bool { return p.UID == u.PodUID }) {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// isOn reports whether the process is on the GPU or partition of a holding.
func (a *shares) isOn(p gpu.Process, h holding.Holding) bool {
	if h.Partition == (holding.Partition{}) {
		return p.GPUInstanceID == nil
	}
	m := instanceOf(a.made[h.GPU], h.Partition)
	return m != nil && p.GPUInstanceID != nil && *p.GPUInstanceID == m.GPUInstanceID
}

func (a *shares) nameOf(u containers.User, claim holding.Record) string {
	for _, p := range claim.Pods {
		if p.UID == u.PodUID {
			return p.Name
		}
	}
	_, name := a.pods.NameOf(u.PodUID)
	return name
}

// addIdle adds the containers that have a share and no process on it.
func (a *shares) addIdle() {
	for i, claim := range a.claims {
		for j, h := range claim.Holdings {
			r, ok := a.readings[h.GPU]
			if !ok || r.Processes == nil || !h.IsShared() {
				continue
			}
			for _, container := range containersOf(claim, a.containers) {
				if by := (sharer{i, j, container}); container.Pod != "" && !a.has(by) {
					u := &use{memory: new(0.0), largest: new(0.0)}
					if r.Utilization != nil && (h.MPS == nil || r.AttributesMPS) {
						u.utilization = new(0.0)
					}
					a.byContainer[by] = u
				}
			}
		}
	}
}

// has reports whether a container is there or, without a name, any of the pod.
func (a *shares) has(by sharer) bool {
	if _, ok := a.byContainer[by]; ok || by.Name != "" {
		return ok
	}
	for other := range a.byContainer {
		if other.claim == by.claim && other.holding == by.holding && other.Pod == by.Pod {
			return true
		}
	}
	return false
}

func plus(sum, more *float64) *float64 {
	if sum == nil || more == nil {
		return nil
	}
	return new(*sum + *more)
}

func toFloat(n *int64) *float64 {
	if n == nil {
		return nil
	}
	return new(float64(*n))
}
