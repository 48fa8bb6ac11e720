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
