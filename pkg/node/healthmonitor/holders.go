package healthmonitor

import (
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Pod that may use a GPU.
type Pod struct {
	Namespace, Name, UID string
	// MPS: its programs are clients of an MPS daemon.
	MPS bool
}

// podsOn returns the pods that use an XID's GPU or instance.
func (m *Monitor) podsOn(x gpu.XID) []Pod {
	var instances []gpu.Instance
	if g, ok := m.gpu(x.GPU); ok && g.MIG != nil {
		instances = append(instances, g.MIG.Instances...) // made by others
	}
	for _, made := range m.made(x.GPU) {
		if made.Made == nil {
			continue
		}
		instances = append(instances, gpu.Instance{
			Profile: made.Profile, Placement: gpu.Placement{Start: made.Start, Size: made.Size},
			GPUInstanceID: made.Made.GPUInstanceID, ComputeInstanceID: made.Made.ComputeInstanceID,
		})
	}
	return Holders(x, m.cfg.Journal.ClaimsOn(x.GPU).Records(), instances)
}

// made returns the partitions that Tessera has made on the GPU.
func (m *Monitor) made(uuid gpu.UUID) []holding.MadePartition {
	r, ok := m.cfg.Journal.GPU(uuid)
	if !ok || r.BootID != m.cfg.BootID {
		return nil
	}
	return r.Partitions
}

// addressOf returns the GPU's PCI address; empty: not known.
func (m *Monitor) addressOf(uuid gpu.UUID) gpu.PCIAddress {
	g, _ := m.gpu(uuid)
	return g.PCI
}

// gpu returns the facts of a GPU, and false if the node doesn't have it.
func (m *Monitor) gpu(uuid gpu.UUID) (gpu.GPU, bool) {
	known, _ := m.cfg.Facts.State()
	for _, g := range known.Node.GPUs {
		if g.UUID == uuid {
			return g, true
		}
	}
	return gpu.GPU{}, false
}

// Holders returns the pods whose claims hold the GPU of the XID or, if the XID belongs
// to one of the instances, that partition.
func Holders(x gpu.XID, claims []holding.Record, instances []gpu.Instance) []Pod {
	on, partial := partitionOf(x, instances)
	var pods []Pod
	for _, r := range claims {
		i := slices.IndexFunc(r.Holdings, func(h holding.Holding) bool {
			return h.GPU == x.GPU && !h.Admin && (!partial || h.Partition == on)
		})
		if i < 0 {
			continue
		}
		for _, p := range r.Pods {
			pod := Pod{Namespace: r.Namespace, Name: p.Name, UID: p.UID, MPS: r.Holdings[i].MPS != nil}
			if !slices.Contains(pods, pod) {
				pods = append(pods, pod)
			}
		}
	}
	return pods
}

// partitionOf returns the partition that the XID belongs to, and false if that isn't
// known.
func partitionOf(x gpu.XID, instances []gpu.Instance) (holding.Partition, bool) {
	for _, i := range instances {
		if x.GPUInstance != nil && *x.GPUInstance == i.GPUInstanceID && (x.ComputeInstance == nil || *x.ComputeInstance == i.ComputeInstanceID) {
			return holding.Partition{Profile: i.Profile, Start: i.Placement.Start, Size: i.Placement.Size}, true
		}
	}
	return holding.Partition{}, false
}
