package offer

import (
	"fmt"
	"math"
	"slices"
	"strings"

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

// memoryCounter is the counter that says how much memory a claim for a device gets, in
// bytes. Quota systems charge it (docs/user/works-with.md), so where there are counters, all devices
// consume it. The whole GPU consumes all of it, so no other counter has to keep it apart from
// its parts. A GPU none of whose devices exclude each other has no counters: they would
// keep admin access off devices in use.
const memoryCounter = "memory"

// count makes the counters that let exactly those sets of devices be allocated
// that can exist together, as few as it can: the scheduler looks at each of
// them for each device it tries.
//
// Two partitions that share a memory slice are kept apart by counters of slices,
// and nothing else needs to say so. Counters of engines, and of a profile's
// instances, are there only where devices that lie side by side could together
// want more than there is: media engines, above all, which "+me" profiles take.
func (o *draft) count(parts []part) counters {
	memory := counter{name: memoryCounter}
	spans := make([]gpu.Placement, 0, len(parts)+1)
	for _, p := range parts {
		spans, memory.takes = append(spans, p.Placement), append(memory.takes, o.memoryOf(p))
	}
	spans = append(spans, gpu.Placement{}) // the whole GPU takes no slices, but all memory
	memory.takes = append(memory.takes, 0)
	memory.limit = max(bytes(o.g.MemoryBytes), most(o.room.slices, spans, memory, nil))
	memory.takes[len(parts)] = memory.limit
	bySlice, rest := sliceCounters(o.room.slices, spans), scarce(o.room.slices, spans, possible(o.room, parts, len(spans)))
	if len(parts) == 0 || !o.entire() && len(bySlice)+len(rest) == 0 {
		return nil
	}
	rest = append(rest, memory)
	return append(bySlice.beside(rest), rest...)
}

// beside returns the counters of slices that are needed beside others.
func (c counters) beside(others counters) counters {
	for i, one := range slices.Backward(c) {
		if rest := slices.Delete(slices.Clone(c), i, i+1); slices.Concat(rest, others).keepApart(one) {
			c = rest
		}
	}
	return c
}

// keepApart reports whether all pairs of devices that one counter keeps apart are kept apart.
func (c counters) keepApart(one counter) bool {
	for a := range one.takes {
		for b := range a {
			excludes := func(k counter) bool { return k.takes[a]+k.takes[b] > k.limit }
			if excludes(one) && !slices.ContainsFunc(c, excludes) {
				return false
			}
		}
	}
	return true
}

// memoryOf is how much memory a claim gets that is allocated the part.
func (o *draft) memoryOf(p part) int {
	if p.shares > 0 {
		return o.memoryOfSlot(gpu.Share{Of: p.Partition, Count: p.shares})
	}
	return bytes(p.profile.MemoryBytes)
}

// bytes is an amount of memory as a counter has it: more than nothing, and no more than a
// petabyte, whatever a node's plugin has reported.
func bytes(n int64) int { return int(min(max(n, 1), 1<<50)) }

// sliceCounters prevent that two devices overlap. It skips a memory slice whose
// counter is redundant, because another slice already excludes the same
// placements, and merges neighbours if one counter of their sum is equivalent.
func sliceCounters(memorySlices int, spans []gpu.Placement) counters {
	at := distinguishing(memorySlices, spans)
	// best[n] is how at[:n] is divided into the fewest groups: groups, and where
	// the last one starts.
	type division struct{ groups, last int }
	best := make([]division, len(at)+1)
	for n := 1; n <= len(at); n++ {
		best[n] = division{best[n-1].groups + 1, n - 1}
		for first := n - 2; first >= 0; first-- {
			if best[first].groups+1 <= best[n].groups && separates(spans, at[first:n]) {
				best[n] = division{best[first].groups + 1, first}
			}
		}
	}
	var out counters
	for n := len(at); n > 0; n = best[n].last {
		out = append(out, sliceCounter(spans, at[best[n].last:n]))
	}
	slices.Reverse(out)
	return out
}

// distinguishing returns the memory slices whose counters are not redundant: no
// other memory slice excludes the same placements.
func distinguishing(memorySlices int, spans []gpu.Placement) []int {
	within := func(a, b int) bool {
		return !slices.ContainsFunc(spans, func(s gpu.Placement) bool { return covers(s, a) && !covers(s, b) })
	}
	var out []int
	for at := range memorySlices {
		n := 0
		for _, s := range spans {
			if covers(s, at) {
				n++
			}
		}
		said := n < 2 || slices.ContainsFunc(out, func(o int) bool { return within(at, o) })
		if said {
			continue
		}
		out = append(slices.DeleteFunc(out, func(o int) bool { return within(o, at) }), at)
	}
	return out
}

func covers(s gpu.Placement, at int) bool { return s.Start <= at && at < s.Start+s.Size }

// separates reports whether one counter for all these slices keeps apart all devices
// that share one of them. (It never keeps others apart: devices that don't
// overlap take no more slices than there are.)
func separates(spans []gpu.Placement, at []int) bool {
	c := sliceCounter(spans, at)
	for i, a := range spans {
		for j, b := range spans[:i] {
			share := slices.ContainsFunc(at, func(s int) bool { return covers(a, s) && covers(b, s) })
			if share && c.takes[i]+c.takes[j] <= c.limit {
				return false
			}
		}
	}
	return true
}

// sliceCounter returns the counter of some memory slices. Its name is short: every
// partition's device has it.
func sliceCounter(spans []gpu.Placement, at []int) counter {
	c := counter{name: fmt.Sprintf("s%d", at[0]), limit: len(at), takes: make([]int, len(spans))}
	if len(at) > 1 {
		c.name = fmt.Sprintf("s%d-%d", at[0], at[len(at)-1])
	}
	for i, s := range spans {
		for _, a := range at {
			if covers(s, a) {
				c.takes[i]++
			}
		}
	}
	return c
}

// possible returns the candidates for counters besides those of slices.
// Existing instances consume none of them: room has subtracted them already.
func possible(r room, parts []part, devices int) counters {
	var out counters
	for k, u := range units(gpu.Engines{}) {
		c := counter{name: u.counter, limit: max(0, r.engines[k]), takes: make([]int, devices)}
		for i, p := range parts {
			if !p.exists {
				c.takes[i] = units(p.profile.Engines)[k].count
			}
		}
		out = append(out, c)
	}
	for profile, like := range byProfile(parts) {
		c := counter{name: "instances-" + gpu.ProfileLabel(like[0].Profile), limit: max(0, r.instances[profile]), takes: make([]int, devices)}
		for i, p := range parts {
			if !p.exists && p.Profile == profile {
				c.takes[i] = 1
			}
		}
		out = append(out, c)
	}
	slices.SortStableFunc(out[len(units(gpu.Engines{})):], func(a, b counter) int { return strings.Compare(a.name, b.name) })
	return out
}

// scarce are those of the counters that are needed: devices that don't overlap,
// and keep to the other counters, could together take more than there is.
func scarce(memorySlices int, spans []gpu.Placement, all counters) counters {
	var out counters
	for _, c := range all {
		if most(memorySlices, spans, c, out) > c.limit {
			out = append(out, c)
		}
	}
	// A later counter may make an earlier one redundant.
	for i, c := range slices.Backward(out) {
		others := slices.Delete(slices.Clone(out), i, i+1)
		if most(memorySlices, spans, c, others) <= c.limit {
			out = others
		}
	}
	return out
}

// maxWays limits the different sums of the other counters that most keeps per
// memory slice. Products have some tens; without a limit, a table that a node
// makes up could take all memory.
const maxWays = 1000

// most returns the maximum that non-overlapping devices can consume of c within
// the other counters; more than any limit if there are too many combinations to
// try.
func most(memorySlices int, spans []gpu.Placement, c counter, others counters) int {
	// best[at] has the maximum for devices in [0, at), by their consumption of the
	// other counters.
	best := make([]map[string]int, memorySlices+1)
	for i := range best {
		best[i] = make(map[string]int)
	}
	reach := func(at int, key string, n int) { best[at][key] = max(best[at][key], n) }
	reach(0, string(make([]rune, len(others))), 0)
	for at := range memorySlices {
		if len(best[at]) > maxWays {
			return math.MaxInt
		}
		for key, n := range best[at] {
			reach(at+1, key, n)
			for i, s := range spans {
				if s.Start != at || s.Size < 1 {
					continue
				}
				if next, ok := others.add(key, i); ok {
					reach(at+s.Size, next, n+c.takes[i])
				}
			}
		}
	}
	n := 0
	for _, m := range best[memorySlices] {
		n = max(n, m)
	}
	return n
}

// add adds the consumption of a device to taken, which has one rune for each
// counter, and reports whether the counters allow it.
func (c counters) add(taken string, device int) (string, bool) {
	sum := []rune(taken)
	for i, k := range c {
		sum[i] += rune(k.takes[device])
		if int(sum[i]) > k.limit {
			return "", false
		}
	}
	return string(sum), true
}

// set returns the initial values of the counters; nil if there are none.
func (c counters) set(name string) *resourceapi.CounterSet {
	if len(c) == 0 {
		return nil
	}
	out := &resourceapi.CounterSet{Name: name, Counters: make(map[string]resourceapi.Counter, len(c))}
	for _, k := range c {
		out.Counters[k.name] = k.amount(k.limit)
	}
	return out
}

// use returns the consumption of the device at a position.
func (c counters) use(set string, device int) []resourceapi.DeviceCounterConsumption {
	takes := make(map[string]resourceapi.Counter)
	for _, k := range c {
		if k.takes[device] > 0 {
			takes[k.name] = k.amount(k.takes[device])
		}
	}
	if len(takes) == 0 {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: takes}}
}

// amount is so much of the counter.
func (k counter) amount(n int) resourceapi.Counter {
	format := resource.DecimalSI
	if k.name == memoryCounter {
		format = resource.BinarySI
	}
	return resourceapi.Counter{Value: *resource.NewQuantity(int64(n), format)}
}
