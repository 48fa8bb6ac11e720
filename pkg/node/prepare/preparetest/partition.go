package preparetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// profiles are three of an H100's.
func profiles() []gpu.Profile {
	one := gpu.Profile{Name: "1g.10gb", ID: 19, MaxInstances: 7, MemoryBytes: (ShareableMiB/8 + serverMiB) << 20}
	for start := range one.MaxInstances {
		one.Placements = append(one.Placements, gpu.Placement{Start: start, Size: 1})
	}
	return []gpu.Profile{
		one,
		{Name: "3g.40gb", ID: 9, MaxInstances: 2, MemoryBytes: (ShareableMiB/2 + serverMiB) << 20, Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}},
		{Name: "7g.80gb", ID: 0, MaxInstances: 1, MemoryBytes: (ShareableMiB + serverMiB) << 20, Placements: []gpu.Placement{{Start: 0, Size: 8}}},
	}
}

// Partition is the name of a partition of the node's n-th GPU: profile 1g.10gb
// at 0 to 6, 3g.40gb at 0 or 4, 7g.80gb at 0.
func Partition(n int, profile string, start int) gpu.DeviceName {
	names, err := gpu.NewNames([]gpu.GPU{{UUID: UUID(n), MIG: &gpu.MIG{Profiles: profiles()}}})
	if err != nil {
		return ""
	}
	name, _ := names.Name(gpu.Partition{GPU: UUID(n), Profile: profile, Placement: gpu.Placement{Start: start}})
	return name
}

// Ensure implements prepare.Partitions. A partition that needs the space of
// another is an error.
func (n *Node) Ensure(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	if i, ok := n.instance(p); ok {
		return i, nil
	}
	if err := n.working(ctx, p); err != nil {
		return gpu.Instance{}, err
	}
	i, err := n.create(p)
	if err == nil {
		n.step("partition.made")
	}
	return i, err
}

func (n *Node) create(p gpu.Partition) (gpu.Instance, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i, ok := n.instances[p]; ok { // a claim with another share of it was quicker
		return i, nil
	}
	for other := range n.instances {
		if gpu.Conflict(p, other) {
			return gpu.Instance{}, fmt.Errorf("%v is in the way of %v", other, p)
		}
	}
	n.made++
	i := gpu.Instance{
		UUID:    gpu.UUID(fmt.Sprintf("MIG-%08x-8a10-0135-bada-13f71feaef21", n.made)),
		Profile: p.Profile, Placement: p.Placement, GPUInstanceID: n.made,
	}
	n.instances[p] = i
	return i, nil
}

// Find implements prepare.Partitions.
func (n *Node) Find(_ context.Context, p gpu.Partition) (gpu.Instance, error) {
	i, ok := n.instance(p)
	if !ok {
		return i, errors.New("there is no such instance")
	}
	return i, nil
}

// Release implements prepare.Partitions.
func (n *Node) Release(ctx context.Context, p gpu.Partition) error {
	if _, ok := n.instance(p); !ok {
		return nil
	}
	if err := n.working(ctx, p); err != nil {
		return fmt.Errorf("release %v: %w", p, err)
	}
	gone, err := n.destroyUnused(p)
	if err != nil {
		return fmt.Errorf("release %v: %w", p, err)
	}
	if gone {
		n.step("partition.destroyed")
	}
	return nil
}

// destroyUnused reports whether the partition was destroyed. MPS daemons keep it from
// that, as processes do.
func (n *Node) destroyUnused(p gpu.Partition) (gone bool, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.InUse != nil && n.InUse(p) {
		return false, nil
	}
	for name, d := range n.daemons {
		if slices.Contains(d.On, gpu.Device(p)) {
			return false, fmt.Errorf("in use by the server of MPS daemon %s", name)
		}
	}
	delete(n.instances, p)
	return true, nil
}

// ClearMIG implements prepare.Partitions.
func (n *Node) ClearMIG(_ context.Context, uuid gpu.UUID) error {
	for _, p := range n.Instances() {
		if p.GPU == uuid {
			return fmt.Errorf("%v is on the GPU", p)
		}
	}
	return nil
}

// Destroy takes a partition away, as somebody else might.
func (n *Node) Destroy(p gpu.Partition) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.instances, p)
}

// Reboot takes all partitions, MPS daemons and settings away.
func (n *Node) Reboot() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.instances)
	clear(n.daemons)
	clear(n.intervals)
}

// Instances are the partitions that exist, by GPU and place.
func (n *Node) Instances() []gpu.Partition {
	n.mu.Lock()
	defer n.mu.Unlock()
	partitions := make([]gpu.Partition, 0, len(n.instances))
	for p := range n.instances {
		partitions = append(partitions, p)
	}
	SortPartitions(partitions)
	return partitions
}

// SortPartitions sorts by GPU and place.
func SortPartitions(partitions []gpu.Partition) {
	slices.SortFunc(partitions, func(a, b gpu.Partition) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Placement.Start, b.Placement.Start))
	})
}

func (n *Node) instance(p gpu.Partition) (gpu.Instance, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	i, ok := n.instances[p]
	return i, ok
}

func (n *Node) working(ctx context.Context, p gpu.Partition) error {
	if n.Working == nil {
		return ctx.Err()
	}
	return n.Working(ctx, p)
}
