package offer

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// counter is one shared counter: how much there is, and how much of it each
// device takes.
type counter struct {
	name  string
	limit int
	takes []int
}

// counters are those of one GPU. Devices go by their position: the partitions
// in the order given to count, then the whole GPU.
type counters []counter

// count makes the counters that let exactly those sets of devices be allocated
// that can exist together.
func count(r room, parts []part, whole bool) counters {
	spans := make([]gpu.Placement, 0, len(parts)+1)
	for _, p := range parts {
		spans = append(spans, p.Placement)
	}
	if whole {
		spans = append(spans, gpu.Placement{Size: max(1, r.slices)})
	}
	var out counters
	for at := range r.slices {
		c := counter{name: fmt.Sprintf("memory-slice-%d", at), limit: 1, takes: make([]int, len(spans))}
		n := 0
		for i, span := range spans {
			if span.Overlaps(gpu.Placement{Start: at, Size: 1}) {
				c.takes[i] = 1
				n++
			}
		}
		if n > 1 {
			out = append(out, c)
		}
	}
	return out
}

// set is what the counters start with; nil if there are none.
func (c counters) set(name gpu.DeviceName) *resourceapi.CounterSet {
	if len(c) == 0 {
		return nil
	}
	out := &resourceapi.CounterSet{Name: string(name), Counters: make(map[string]resourceapi.Counter, len(c))}
	for _, k := range c {
		out.Counters[k.name] = amount(k.limit)
	}
	return out
}

// use is what the device at a position takes of them.
func (c counters) use(name gpu.DeviceName, device int) []resourceapi.DeviceCounterConsumption {
	takes := make(map[string]resourceapi.Counter)
	for _, k := range c {
		if k.takes[device] > 0 {
			takes[k.name] = amount(k.takes[device])
		}
	}
	if len(takes) == 0 {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: string(name), Counters: takes}}
}

func amount(n int) resourceapi.Counter {
	return resourceapi.Counter{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
}
