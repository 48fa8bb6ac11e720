package main

/*
#include "door.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// objects are what MIG handles stand for: nvmlsim.Instance, nvmlsim.Compute and
// device, all of them comparable. One object has one handle for as long as it is
// known here.
type objects struct {
	mu    sync.Mutex
	next  int
	slots map[any]int
	at    map[int]any
}

// device is a MIG device, as different from its compute instance.
type device struct{ nvmlsim.Compute }

func (o *objects) handle(x any) unsafe.Pointer {
	o.mu.Lock()
	defer o.mu.Unlock()
	slot, known := o.slots[x]
	if !known {
		if o.slots == nil {
			o.slots, o.at = map[any]int{}, map[int]any{}
		}
		slot = o.next % C.max_objects
		o.next++
		delete(o.slots, o.at[slot]) // of a million handles ago
		o.slots[x], o.at[slot] = slot, x
	}
	return C.object_handle(C.int(slot))
}

// find returns nil for what is no handle, or no longer.
func (o *objects) find(h C.uintptr_t) any {
	slot := int(C.object_slot(h))
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

func (o *objects) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.slots, o.at = nil, nil
}

// object finds what a handle of one kind stands for.
func object[T any](h C.uintptr_t) (T, error) {
	x, is := lib.objects.find(h).(T)
	switch {
	case lib.open.Load() == nil:
		return x, nvmlsim.Uninitialized
	case !is:
		return x, nvmlsim.InvalidArgument
	}
	return x, nil
}

// give hands an object's handle to the caller.
func give(out *unsafe.Pointer, x any, err error) C.int {
	if err != nil {
		return code(err)
	}
	*out = lib.objects.handle(x)
	return ok
}

// put1 hands one number to the caller.
func put1[N, T integer](out *N, get func() (T, error)) C.int {
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	v, err := get()
	if err != nil {
		return code(err)
	}
	*out = N(v)
	return ok
}

// giveAll fills an array of handles. By NVML's contract it has room for the
// profile's maximum; count is output only.
func giveAll[T any](out *unsafe.Pointer, count *C.uint, all []T, err error) C.int {
	if err != nil {
		return code(err)
	}
	if count == nil || (out == nil && len(all) > 0) {
		return code(nvmlsim.InvalidArgument)
	}
	for i, x := range all {
		unsafe.Slice(out, len(all))[i] = lib.objects.handle(x)
	}
	*count = C.uint(len(all))
	return ok
}
