package engine

import (
	"sync"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// maxObjects is how many MIG instances and devices have handles at a time.
const maxObjects = 1 << 20

// objects are what MIG handles stand for: nvmlsim.Instance, nvmlsim.Compute and
// device, all of them comparable. One object has one handle for as long as it is
// known here.
type objects struct {
	number uint64
	mu     sync.Mutex
	next   int
	slots  map[any]int
	at     map[int]any
}

// device is a MIG device, as different from its compute instance.
type device struct{ nvmlsim.Compute }

func (o *objects) handle(x any) handle {
	o.mu.Lock()
	defer o.mu.Unlock()
	slot, known := o.slots[x]
	if !known {
		if o.slots == nil {
			o.slots, o.at = map[any]int{}, map[int]any{}
		}
		slot = o.next % maxObjects
		o.next++
		delete(o.slots, o.at[slot]) // of a million handles ago
		o.slots[x], o.at[slot] = slot, x
	}
	return newHandle(kindObject, o.number, slot)
}

// find returns nil for what is no handle, or no longer.
func (o *objects) find(h handle) any {
	slot := h.slot(kindObject, o.number)
	if slot < 0 {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[slot]
}

func (o *objects) forget(x any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if slot, known := o.slots[x]; known {
		delete(o.slots, x)
		delete(o.at, slot)
	}
}

// object finds what a handle of one kind stands for.
func object[T any](s *session, h handle) (T, error) {
	x, is := s.objects.find(h).(T)
	if !is {
		return x, nvmlsim.InvalidArgument
	}
	return x, nil
}
