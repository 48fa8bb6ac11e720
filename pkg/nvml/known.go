package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// known has the GPUs that have been identified, with their last facts, and those that
// Remember has named. The key isn't the index, because indexes change when a
// GPU disappears.
type known map[gpu.UUID]identity

type identity struct {
	gpu.GPU
	// maybe means that the GPU may have been removed from the machine. It is
	// listed only while NVML lists a GPU that can't be identified.
	maybe bool
	// minorReads counts the readings of the minor number alone.
	minorReads int
	// conditions are those of the last reading.
	conditions []gpu.Condition
}

// Remember adds GPUs that the machine had before the session began, so that
// GPUs lists them even if they don't answer. With mayBeGone, such a GPU is
// listed only while NVML lists one that can't be identified: it may have been
// removed. GPUs that the session has read itself are not changed.
func (s *Session) Remember(gpus []gpu.GPU, mayBeGone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range gpus {
		if _, ok := s.known[g.UUID]; !ok {
			g.Conditions = nil
			s.known[g.UUID] = identity{GPU: g, maybe: mayBeGone}
		}
	}
}

// Forget removes a GPU that NVML doesn't list, so that GPUs doesn't list it either, until NVML
// does again. It returns an error if NVML lists the GPU, or one that can't be identified.
func (s *Session) Forget(uuid gpu.UUID) error {
	identified, failed, err := s.identify()
	if err != nil {
		return err
	}
	for i, there := range identified {
		if there.uuid == uuid {
			return fmt.Errorf("NVML lists GPU %s, as GPU %d", uuid, i)
		}
	}
	if err := errors.Join(slices.Collect(maps.Values(failed))...); err != nil {
		return fmt.Errorf("NVML lists a GPU that may be %s: %w", uuid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, uuid)
	delete(s.handles, uuid)
	maps.DeleteFunc(s.indexes, func(_ int, u gpu.UUID) bool { return u == uuid })
	return nil
}

// setMinor sets the minor number of a known GPU.
func (k known) setMinor(uuid gpu.UUID, minor int) {
	if g, ok := k[uuid]; ok {
		g.Minor = minor
		g.minorReads++
		k[uuid] = g
	}
}

// list stores the facts of the GPUs that were identified, and returns these together with
// the known ones that weren't. failed has the errors, by index, of those that NVML lists and
// that can't be identified; unidentified has those of them that no known GPU stands for.
// before has the GPUs known before the reading: a minor number that was read since then is
// newer.
func (k known) list(before known, read []gpu.GPU, failed map[int]error) (gpus []gpu.GPU, unidentified map[int]error) {
	silent := maps.Clone(k)
	for i, g := range read {
		last := k[g.UUID]
		if last.minorReads != before[g.UUID].minorReads {
			g.Minor = last.Minor
			read[i] = g
		}
		conditions := g.Conditions
		g.Conditions = nil
		k[g.UUID] = identity{GPU: g, minorReads: last.minorReads, conditions: conditions}
		delete(silent, g.UUID)
	}
	gpus = slices.Clone(read)
	listed, unidentified := attribute(silent, failed)
	for uuid, err := range listed {
		g := silent[uuid].GPU
		g.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "NVML no longer lists the GPU"}}
		if err != nil {
			g.Conditions = []gpu.Condition{ConditionOf(err)}
		}
		gpus = append(gpus, g)
	}
	slices.SortFunc(gpus, byIndex)
	return gpus, unidentified
}

func byIndex(a, b gpu.GPU) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
}

// attribute returns the silent GPUs to list and their errors: the error at the
// GPU's last index, otherwise one of the remaining errors, or nil if there is
// none. left has the errors that remain.
func attribute(silent known, failed map[int]error) (listed map[gpu.UUID]error, left map[int]error) {
	listed, left = map[gpu.UUID]error{}, maps.Clone(failed)
	var moved, maybe []gpu.GPU
	for uuid, g := range silent {
		switch err, ok := failed[g.Index]; {
		case g.maybe:
			maybe = append(maybe, g.GPU)
		case ok:
			delete(left, g.Index)
			listed[uuid] = err
		default:
			moved = append(moved, g.GPU)
			listed[uuid] = nil
		}
	}
	slices.SortFunc(moved, byIndex)
	slices.SortFunc(maybe, byIndex)
	indexes := slices.Sorted(maps.Keys(left))
	for i, g := range slices.Concat(moved, maybe) {
		if i < len(indexes) {
			listed[g.UUID] = failed[indexes[i]]
			delete(left, indexes[i])
		}
	}
	return listed, left
}
