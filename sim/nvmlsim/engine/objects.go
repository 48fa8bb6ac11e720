package engine

import (
	"sync"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// maxObjects is the number of MIG instances and devices that can have handles
// at a time.
const maxObjects = 1 << 20

// objects maps MIG handles to objects: nvmlsim.Instance, nvmlsim.Compute and
// device, all of them comparable. An object has the same handle for as long as
// it is in the map.
type objects struct {
	number uint64
	mu     sync.Mutex
	next   int
	slots  map[any]int
	at     map[int]any
}

// device is a MIG device. It has another type than its compute instance, and so
// another handle.
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
		delete(o.slots, o.at[slot]) // the oldest handle of a full ring
		o.slots[x], o.at[slot] = slot, x
	}
	return newHandle(kindObject, o.number, slot)
}

// find returns nil for an unknown or expired handle.
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

// object returns the object of type T that a handle refers to.
func object[T any](s *session, h handle) (T, error) {
	x, is := s.objects.find(h).(T)
	if !is {
		return x, nvmlsim.InvalidArgument
	}
	return x, nil
}
