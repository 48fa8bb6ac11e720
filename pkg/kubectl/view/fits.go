package view

import (
	"cmp"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// counters are what is left of the GPU's shared counters.
type counters struct {
	names []string
	left  []int64
}

// leftover is the attribute type of devices that only a claim keeps on offer.
const leftover = "leftover"

// kind is a Fit while it is counted.
type kind struct {
	Fit
	devices []*resourceapi.Device
}

// count finds out what else of the GPU can be allocated: for each kind of device, the
// devices are tried in the order in which the scheduler takes them.
func (c *gpuBuilder) count() {
	free := c.counters()
	var kinds []kind
	for _, d := range c.devices {
		if text(d, "type") != leftover {
			kinds = addTo(kinds, d)
		}
	}
	for i := range kinds {
		left := counters{names: free.names, left: slices.Clone(free.left)}
		for _, d := range kinds[i].devices {
			c.try(&kinds[i].Fit, d, left)
		}
		c.Fits = append(c.Fits, kinds[i].Fit)
	}
	slices.SortStableFunc(c.Fits, compareFits)
}

func compareFits(a, b Fit) int {
	order := func(f Fit) int {
		return slices.Index([]string{gpu.TypeGPU, gpu.TypeMIG, gpu.TypeMPS, gpu.TypeTimeSlice}, f.Type)
	}
	return cmp.Or(cmp.Compare(order(a), order(b)), cmp.Compare(b.MemoryBytes, a.MemoryBytes), cmp.Compare(a.Profile, b.Profile))
}

func addTo(kinds []kind, d *resourceapi.Device) []kind {
	name := gpu.DeviceName(d.Name)
	f := Fit{Type: name.Type(), MemoryBytes: capacity(d, gpu.MemoryCapacity)}
	if name.IsPartition() {
		f.Profile = text(d, "profile")
	}
	if isShared(d) {
		if p := d.Capacity[gpu.MemoryCapacity].RequestPolicy; p != nil && p.Default != nil {
			f.MemoryBytes = p.Default.Value()
		}
	}
	for i := range kinds {
		if kinds[i].Type == f.Type && kinds[i].Profile == f.Profile && kinds[i].MemoryBytes == f.MemoryBytes {
			kinds[i].devices = append(kinds[i].devices, d)
			return kinds
		}
	}
	return append(kinds, kind{Fit: f, devices: []*resourceapi.Device{d}})
}

// isShared reports whether the device can be allocated several times.
func isShared(d *resourceapi.Device) bool {
	return d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
}

// counters returns what claims leave of the counters. A device that is allocated
// several times consumes them once.
func (c *gpuBuilder) counters() counters {
	if c.set == nil {
		return counters{}
	}
	out := counters{names: make([]string, 0, len(c.set.Counters)), left: make([]int64, 0, len(c.set.Counters))}
	for name, n := range c.set.Counters {
		out.names, out.left = append(out.names, name), append(out.left, n.Value.Value())
	}
	for _, d := range c.devices {
		if c.held[d.Name] {
			out.take(d)
		}
	}
	return out
}

// take subtracts what the device consumes.
func (c counters) take(d *resourceapi.Device) {
	for _, from := range d.ConsumesCounters {
		for name, n := range from.Counters {
			if i := slices.Index(c.names, name); i >= 0 {
				c.left[i] -= n.Value.Value()
			}
		}
	}
}

// suffice reports whether the device can consume its counters.
func (c counters) suffice(d *resourceapi.Device) bool {
	for _, from := range d.ConsumesCounters {
		for name, n := range from.Counters {
			if i := slices.Index(c.names, name); i < 0 || c.left[i] < n.Value.Value() {
				return false
			}
		}
	}
	return true
}

// try adds to f how often the device can be allocated, and takes its counters.
func (c *gpuBuilder) try(f *Fit, d *resourceapi.Device, left counters) {
	held := c.held[d.Name]
	if keepsOff(d) || held && !isShared(d) || !held && !left.suffice(d) {
		return
	}
	n := 1
	if isShared(d) {
		used := c.consumed[d.Name]
		n = times(d, used)
		if p := d.Capacity[gpu.MemoryCapacity].RequestPolicy; p != nil && p.ValidRange != nil && room(d, used, gpu.MemoryCapacity) {
			f.MaxMemoryBytes = max(f.MaxMemoryBytes, largest(d.Capacity[gpu.MemoryCapacity], used[gpu.MemoryCapacity]))
		}
	}
	if f.Count += n; n > 0 && !held {
		left.take(d)
	}
}

// keepsOff reports whether a taint keeps new claims off the device.
func keepsOff(d *resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
}

// times is how many more claims without a request for capacity a device has room for.
func times(d *resourceapi.Device, used map[resourceapi.QualifiedName]int64) int {
	n := int64(math.MaxInt32)
	for name, c := range d.Capacity {
		if each := usual(c); each > 0 {
			n = min(n, (c.Value.Value()-used[name])/each)
		}
	}
	return int(max(0, n))
}

// usual is how much of the capacity a claim gets that doesn't ask for it.
func usual(c resourceapi.DeviceCapacity) int64 {
	if c.RequestPolicy == nil || c.RequestPolicy.Default == nil {
		return c.Value.Value()
	}
	return c.RequestPolicy.Default.Value()
}

// room reports whether a claim gets what it doesn't ask for of all capacities but one.
func room(d *resourceapi.Device, used map[resourceapi.QualifiedName]int64, but resourceapi.QualifiedName) bool {
	for name, c := range d.Capacity {
		if name != but && c.Value.Value()-used[name] < usual(c) {
			return false
		}
	}
	return true
}

// largest is the most that a claim can ask for of a capacity of which others have used
// some.
func largest(c resourceapi.DeviceCapacity, used int64) int64 {
	left, valid := c.Value.Value()-used, c.RequestPolicy.ValidRange
	if valid.Max != nil {
		left = min(left, valid.Max.Value())
	}
	least := int64(0)
	if valid.Min != nil {
		least = valid.Min.Value()
	}
	if left < least {
		return 0
	}
	if valid.Step != nil && valid.Step.Value() > 0 {
		left -= (left - least) % valid.Step.Value()
	}
	return left
}
