package offertest

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/offer"
)

// shop gives devices as the scheduler's allocator does: the first, in the order
// of GPUs and their devices, that is free, is what is asked for, and whose
// counters allow it.
type shop struct {
	devices []device
	// left of each counter, by GPU and name.
	left []map[string]int64
	// total memory of the GPUs, and how much one of each kind has.
	total  float64
	memory map[string]float64
}

type device struct {
	gpu   int
	kind  string
	takes map[string]int64
	given bool
}

func newShop(gpus []offer.GPU) *shop {
	s := &shop{memory: make(map[string]float64)}
	for i, g := range gpus {
		left := make(map[string]int64)
		if g.Counters != nil {
			for name, c := range g.Counters.Counters {
				left[name] = c.Value.Value()
			}
		}
		s.left = append(s.left, left)
		for _, d := range g.Devices {
			s.add(i, d)
		}
	}
	return s
}

func (s *shop) add(gpu int, d resourceapi.Device) {
	memory := d.Capacity["memory"].Value
	x := device{gpu: gpu, kind: Whole, takes: make(map[string]int64)}
	if profile := d.Attributes["profile"].StringValue; profile != nil {
		x.kind = *profile
	} else {
		s.total += memory.AsApproximateFloat64()
	}
	s.memory[x.kind] = memory.AsApproximateFloat64()
	for _, consumes := range d.ConsumesCounters {
		for name, c := range consumes.Counters {
			x.takes[name] = c.Value.Value()
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
	d := s.devices[i]
	if d.given {
		return false
	}
	for name, n := range d.takes {
		if n > s.left[d.gpu][name] {
			return false
		}
	}
	return true
}

func (s *shop) move(i int, sign int64) {
	d := s.devices[i]
	for name, n := range d.takes {
		s.left[d.gpu][name] += sign * n
	}
}
