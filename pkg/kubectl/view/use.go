package view

import (
	"fmt"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// readGPUs adds the GPUs that the node's plugin reports.
func (n *node) readGPUs(inv *v1alpha1.GPUInventory) {
	facts := inventory.Node(inv)
	n.names = gpu.NameAll(facts.GPUs)
	for i, g := range facts.GPUs {
		c := n.gpuOf(g)
		c.reported = true
		c.UUID, c.Index, c.Model, c.MemoryBytes = string(g.UUID), g.Index, g.Model.ProductName, g.MemoryBytes
		for _, cond := range inv.Status.GPUs[i].Conditions {
			if cond.Status != "False" {
				c.Conditions = append(c.Conditions, Condition{Type: cond.Type, Since: cond.LastTransitionTime, Message: cond.Message})
			}
		}
		if g.MIG == nil {
			continue
		}
		for _, p := range g.MIG.Profiles {
			for _, at := range p.Placements {
				c.MemorySlices = max(c.MemorySlices, at.Start+at.Size)
			}
		}
		for _, x := range g.MIG.Instances {
			c.Instances = append(c.Instances, Instance{UUID: string(x.UUID), Profile: x.Profile, Placement: Placement(x.Placement)})
		}
	}
}

// gpuOf returns the builder of a GPU. One whose UUID gives no name has no device.
func (n *node) gpuOf(g gpu.GPU) *gpuBuilder {
	if name, ok := n.names.Name(gpu.Whole{GPU: g.UUID}); ok {
		return n.gpuBuilder(name)
	}
	c := n.gpuBuilder(gpu.DeviceName(fmt.Sprintf("%s at index %d", g.UUID, g.Index)))
	c.Device = ""
	return c
}

// use describes the device of a result.
func (b *builder) use(n *node, c *gpuBuilder, r *resourceapi.DeviceRequestAllocationResult) Use {
	name := gpu.DeviceName(r.Device)
	u := Use{Device: r.Device, Type: name.Type(), AdminAccess: r.AdminAccess != nil && *r.AdminAccess}
	if r.ShareID != nil {
		u.ShareID = string(*r.ShareID)
	}
	d := n.devices[r.Device]
	if d != nil {
		u.Profile, u.Leftover = text(d, "profile"), text(d, "type") == leftover
		u.MemoryBytes, u.ThreadPercentage = capacity(d, gpu.MemoryCapacity), int(capacity(d, gpu.ThreadCapacity))
		u.Placement = placeOf(d)
	}
	if r.ShareID != nil {
		memory, threads := r.ConsumedCapacity[gpu.MemoryCapacity], r.ConsumedCapacity[gpu.ThreadCapacity]
		u.MemoryBytes, u.ThreadPercentage = memory.Value(), int(threads.Value())
	}
	if u.Type == gpu.TypeMPS || u.Type == gpu.TypeTimeSlice {
		u.Count, u.Number = name.Part()
	}
	if name.IsPartition() && u.Placement == nil {
		u.Placement = b.place(n, c, name)
	}
	return u
}

// place finds a partition in the GPU's tables; nil if they aren't known.
func (b *builder) place(n *node, c *gpuBuilder, name gpu.DeviceName) *Placement {
	if of := name.SharedDevice(); of != "" {
		name = of
	}
	key := placeKey{model: c.Model, part: strings.TrimPrefix(string(name), c.Device)}
	if at, ok := b.places[key]; ok {
		return at
	}
	if n.names == nil {
		return nil
	}
	d, err := n.names.Device(name)
	p, ok := d.(gpu.Partition)
	if err != nil || !ok {
		return nil
	}
	at := Placement(p.Placement)
	b.places[key] = &at
	return &at
}

// placeOf is where a partition's device is; nil for others.
func placeOf(d *resourceapi.Device) *Placement {
	start, size, ok := strings.Cut(text(d, "placement"), ":")
	if !ok {
		return nil
	}
	var at Placement
	var err, sizeErr error
	at.Start, err = strconv.Atoi(start)
	at.Size, sizeErr = strconv.Atoi(size)
	if err != nil || sizeErr != nil {
		return nil
	}
	return &at
}

func text(d *resourceapi.Device, name resourceapi.QualifiedName) string {
	if s := d.Attributes[name].StringValue; s != nil {
		return *s
	}
	return ""
}

func number(d *resourceapi.Device, name resourceapi.QualifiedName) int64 {
	if n := d.Attributes[name].IntValue; n != nil {
		return *n
	}
	return 0
}

func capacity(d *resourceapi.Device, name resourceapi.QualifiedName) int64 {
	c, ok := d.Capacity[name]
	if !ok {
		return 0
	}
	return c.Value.Value()
}
