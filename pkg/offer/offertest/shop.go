package offertest

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/offer"
)

// shop allocates as the scheduler does: the first device, in the order of GPUs
// and their devices, that is free, matches the request, and whose counters
// allow it.
type shop struct {
	devices []device
	// left of each counter, of all GPUs.
	left []int64
	// total memory of the GPUs, and how much one of each kind has.
	total  float64
	memory map[string]float64
}

type device struct {
	kind  string
	takes []taking
	given bool
}

// taking is how much of a counter a device takes.
type taking struct {
	counter int
	n       int64
}

func newShop(gpus []offer.GPU) *shop {
	s := &shop{memory: make(map[string]float64)}
	for _, g := range gpus {
		counters := make(map[string]int)
		if g.Counters != nil {
			for name, c := range g.Counters.Counters {
				counters[name] = len(s.left)
				s.left = append(s.left, c.Value.Value())
			}
		}
		for _, d := range g.Devices {
			s.add(counters, d)
		}
	}
	return s
}

func (s *shop) add(counters map[string]int, d resourceapi.Device) {
	memory := d.Capacity["memory"].Value
	x := device{kind: Whole}
	if profile := d.Attributes["profile"].StringValue; profile != nil {
		x.kind = *profile
	} else {
		s.total += memory.AsApproximateFloat64()
	}
	s.memory[x.kind] = memory.AsApproximateFloat64()
	for _, consumes := range d.ConsumesCounters {
		for name, c := range consumes.Counters {
			x.takes = append(x.takes, taking{counters[name], c.Value.Value()})
		}
	}
	s.devices = append(s.devices, x)
}

// mean is how much memory a claim asks for on the average.
func (s *shop) mean(kinds []string, weights []int) float64 {
	sum, n := 0.0, 0
	for i, kind := range kinds {
		sum += float64(weights[i]) * s.memory[kind]
		n += weights[i]
	}
	return sum / float64(n)
}

func (s *shop) take(kind string) (int, bool) {
	for i := range s.devices {
		if s.devices[i].kind == kind && s.fits(i) {
			s.move(i, -1)
			s.devices[i].given = true
			return i, true
		}
	}
	return 0, false
}

func (s *shop) giveBack(i int) {
	s.move(i, 1)
	s.devices[i].given = false
}

func (s *shop) fits(i int) bool {
	if s.devices[i].given {
		return false
	}
	for _, t := range s.devices[i].takes {
		if t.n > s.left[t.counter] {
			return false
		}
	}
	return true
}

func (s *shop) move(i int, sign int64) {
	for _, t := range s.devices[i].takes {
		s.left[t.counter] += sign * t.n
	}
}
