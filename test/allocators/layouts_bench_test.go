package allocators

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// layoutNodes is how many nodes BenchmarkLayouts has.
const layoutNodes = 20

// A layout distributes a node's devices over slices, pools and counter sets. The limits of
// API servers don't matter to it.
type layout struct {
	name    string
	arrange func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice
}

// published is the layout that the controller publishes.
var published = layout{"published", func(c *Cluster, _ []offer.GPU) []*resourceapi.ResourceSlice { return c.Slices() }}

// partitionedLayouts are layouts of GPUs that are offered whole and in partitions.
func partitionedLayouts() []layout {
	return []layout{
		published,
		{"one slice", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus), slices.Concat(devicesOf(gpus)...))
		}},
		{"a slice a GPU", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus), devicesOf(gpus)...)
		}},
		{"whole GPUs in the first slice", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			var whole, parts []resourceapi.Device
			for _, g := range gpus {
				whole, parts = append(whole, g.Devices[0]), append(parts, g.Devices[1:]...)
			}
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus), whole, parts)
		}},
		{"a pool a GPU", poolPerGPU},
		{"one counter set", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			gpus = oneSet(gpus)
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus[:1]), slices.Concat(devicesOf(gpus)...))
		}},
	}
}

// wholeLayouts are layouts of GPUs that are only offered whole, which don't need counters.
func wholeLayouts() []layout {
	return []layout{
		published,
		{"a counter set a GPU", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			gpus = withCounters(gpus)
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus), slices.Concat(devicesOf(gpus)...))
		}},
		{"one counter set", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			gpus = oneSet(withCounters(gpus))
			return poolOf(c.Node.Name, c.Node.Name, setsOf(gpus[:1]), slices.Concat(devicesOf(gpus)...))
		}},
		{"a slice a GPU", func(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
			return poolOf(c.Node.Name, c.Node.Name, nil, devicesOf(gpus)...)
		}},
		{"a pool a GPU", poolPerGPU},
	}
}

// BenchmarkLayouts is BenchmarkNodes with each layout, on nodes of whose eight
// GPUs four are in use, and on nodes of which all are, where the claim doesn't fit.
// docs/measurements/2026-11-28-scheduler.md has the result.
func BenchmarkLayouts(b *testing.B) {
	partitions := []Request{{Kind: "gpu"}, {Kind: "mig", Profile: "1g.10gb"}, {Kind: "mig", Profile: "3g.40gb"}}
	for _, n := range []struct {
		name     string
		host     func(b *testing.B, name string) *Cluster
		layouts  []layout
		requests []Request
	}{
		{"partitioned", host, partitionedLayouts(), partitions},
		{"whole", wholeHost, wholeLayouts(), partitions[:1]},
	} {
		for _, r := range n.requests {
			for _, inUse := range []int{4, 8} {
				for _, l := range n.layouts {
					b.Run(fmt.Sprintf("%s/%s/in use=%d/%s", n.name, r, inUse, l.name), func(b *testing.B) {
						pools, used := l.nodes(b, n.host, inUse)
						tryNodes(b, layoutNodes, pools, used, r, inUse < 8)
					})
				}
			}
		}
	}
}

// nodes returns the slices of all nodes in the layout, and the devices of them that are
// allocated: so many GPUs of each, as a whole.
func (l layout) nodes(b *testing.B, host func(*testing.B, string) *Cluster, inUse int) ([]*resourceapi.ResourceSlice, []resourceapi.DeviceRequestAllocationResult) {
	var pools []*resourceapi.ResourceSlice
	var used []resourceapi.DeviceRequestAllocationResult
	for i := range layoutNodes {
		c := host(b, fmt.Sprintf("node-%02d", i))
		c.Publish()
		all := l.arrange(c, c.Offer())
		pools = append(pools, all...)
		for n := range inUse {
			got, err := c.Ask(b.Context(), fmt.Sprint(n), Request{Kind: "gpu"})
			if err != nil || len(got) != 1 {
				b.Fatal(got, err)
			}
			result := got[0] // a copy: the claim keeps the pool that it was allocated from
			result.Pool = poolWith(all, result.Device)
			used = append(used, result)
		}
	}
	return pools, used
}

// wholeHost is host without partitions.
func wholeHost(b *testing.B, name string) *Cluster {
	c := host(b, name)
	c.Plans = nil
	return c
}

// poolOf returns a node's pool with so many slices, and one more for counter sets if there are any.
func poolOf(node, name string, sets []resourceapi.CounterSet, devices ...[]resourceapi.Device) []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	add := func(spec resourceapi.ResourceSliceSpec) {
		spec.Driver, spec.NodeName = gpu.DriverName, &node
		out = append(out, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%03d", name, len(out))}, Spec: spec})
	}
	if sets != nil {
		add(resourceapi.ResourceSliceSpec{SharedCounters: sets})
	}
	for _, d := range devices {
		add(resourceapi.ResourceSliceSpec{Devices: d})
	}
	for _, s := range out {
		s.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(out))}
	}
	return out
}

func poolPerGPU(c *Cluster, gpus []offer.GPU) []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	for i, g := range gpus {
		out = append(out, poolOf(c.Node.Name, fmt.Sprintf("%s-%d", c.Node.Name, i), setsOf(gpus[i:i+1]), g.Devices)...)
	}
	return out
}

func devicesOf(gpus []offer.GPU) [][]resourceapi.Device {
	var out [][]resourceapi.Device
	for _, g := range gpus {
		out = append(out, g.Devices)
	}
	return out
}

func setsOf(gpus []offer.GPU) []resourceapi.CounterSet {
	var out []resourceapi.CounterSet
	for _, g := range gpus {
		if g.Counters != nil {
			out = append(out, *g.Counters)
		}
	}
	return out
}

// withCounters returns GPUs that consume a counter of their own each.
func withCounters(gpus []offer.GPU) []offer.GPU {
	one := map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}}
	for i := range gpus {
		name := fmt.Sprint(i)
		gpus[i].Counters = &resourceapi.CounterSet{Name: name, Counters: one}
		gpus[i].Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: name, Counters: one}}
	}
	return gpus
}

// oneSet merges the counter sets of all GPUs into that of the first.
func oneSet(gpus []offer.GPU) []offer.GPU {
	all := resourceapi.CounterSet{Name: "all", Counters: make(map[string]resourceapi.Counter)}
	for i := range gpus {
		renamed := func(counters map[string]resourceapi.Counter) map[string]resourceapi.Counter {
			out := make(map[string]resourceapi.Counter)
			for name, c := range counters {
				out[fmt.Sprintf("%d-%s", i, name)] = c
			}
			return out
		}
		maps.Copy(all.Counters, renamed(gpus[i].Counters.Counters))
		for _, d := range gpus[i].Devices {
			for k := range d.ConsumesCounters {
				use := &d.ConsumesCounters[k]
				use.CounterSet, use.Counters = all.Name, renamed(use.Counters)
			}
		}
	}
	gpus[0].Counters = &all
	return gpus
}

// poolWith returns the pool that has a device.
func poolWith(all []*resourceapi.ResourceSlice, device string) string {
	for _, s := range all {
		if slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == device }) {
			return s.Spec.Pool.Name
		}
	}
	return ""
}
