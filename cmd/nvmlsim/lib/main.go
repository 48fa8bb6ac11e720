// The library libnvidia-ml.so.1 of a simulated machine: NVML's C interface over
// pkg/nvmlsim, without behaviour of its own. Build it with
//
//	go build -buildmode=c-shared -o libnvidia-ml.so.1 ./cmd/nvmlsim/lib
//
// (cgo, any C compiler). It exports every function that nvml.h of the pinned
// go-nvml declares, the old unversioned names too; those without behaviour are
// generated and answer NVML_ERROR_NOT_SUPPORTED. It finds its machine as
// nvmlsim.OpenInstalled says: NVSIM_STATE, the driver root it lies in, or what
// "nvmlsim install" appended to it.
//
// It brings a Go runtime of its own into the process. dlclose does nothing (the
// Go linker marks the file NODELETE), and nvmlInit gives SIGURG back to a host
// that is written in Go too (door.c says why).
package main

/*
#cgo CFLAGS: -std=gnu11 -fvisibility=hidden
#include "door.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//go:generate go run ./gen

// main is never called: buildmode c-shared wants one.
func main() {}

// door is the process's NVML: C's interface has no receiver to hang it on, so
// there is one, in lib.
type door struct {
	mu    sync.Mutex
	inits int
	open  atomic.Pointer[session]
	// objects outlive sessions, so that a handle of an old one is never taken
	// for a new one's.
	objects objects
	texts   sync.Map // return code → C string that is never freed
}

// session is what nvmlInit opened.
type session struct {
	machine *nvmlsim.Machine
	gpus    []*nvmlsim.GPU // by position; nil where not visible
	mu      sync.Mutex
	sets    [256]*nvmlsim.EventSet
}

var lib door //nolint:gochecknoglobals // the C interface has no receiver

func code(err error) C.int { return C.int(nvmlsim.Code(err)) }

const ok = C.int(nvmlsim.Success)

func (d *door) init() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	C.keep_host_signals()
	if d.open.Load() != nil {
		if err := d.open.Load().machine.Init(); err != nil {
			return err
		}
		d.inits++
		return nil
	}
	m, err := nvmlsim.OpenInstalled(C.GoString(C.library_path()))
	if err != nil {
		return err
	}
	if err := m.Init(); err != nil {
		_ = m.Close() // the answer is err
		return err
	}
	s := &session{machine: m, gpus: make([]*nvmlsim.GPU, nvmlsim.MaxGPUs)}
	for _, g := range m.GPUs() {
		s.gpus[g.Position()] = g
	}
	d.open.Store(s)
	d.inits = 1
	return nil
}

func (d *door) shutdown() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inits == 0 {
		return nvmlsim.Uninitialized
	}
	if d.inits--; d.inits > 0 {
		return nil
	}
	s := d.open.Swap(nil)
	d.objects.clear()
	for _, set := range s.sets {
		if set != nil {
			set.Close()
		}
	}
	return s.machine.Close()
}

// machine is the open one; Uninitialized without.
func machine() (*nvmlsim.Machine, error) {
	if s := lib.open.Load(); s != nil {
		return s.machine, nil
	}
	return nil, nvmlsim.Uninitialized
}

// gpu finds what a handle stands for; InvalidArgument for what is no handle.
func gpu(h C.uintptr_t) (*nvmlsim.GPU, error) {
	s := lib.open.Load()
	if s == nil {
		return nil, nvmlsim.Uninitialized
	}
	pos := int(C.gpu_position(h))
	if pos < 0 || s.gpus[pos] == nil {
		return nil, nvmlsim.InvalidArgument
	}
	return s.gpus[pos], nil
}

// migDevice finds a MIG device by its handle; ok is false for other handles.
func migDevice(h C.uintptr_t) (nvmlsim.Compute, bool) {
	d, ok := lib.objects.find(h).(device)
	return d.Compute, ok && lib.open.Load() != nil
}

// number answers a call with one number.
func number[N, T integer](h C.uintptr_t, out *N, get func(*nvmlsim.GPU) (T, error)) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	v, err := get(g)
	if err != nil {
		return code(err)
	}
	*out = N(v)
	return ok
}

type integer interface {
	~int | ~int32 | ~uint32 | ~int64 | ~uint64 | ~uint8
}

// flag answers a call with one enable state.
func flag(h C.uintptr_t, out *C.uint, get func(*nvmlsim.GPU) (bool, error)) C.int {
	return number(h, out, func(g *nvmlsim.GPU) (uint32, error) {
		v, err := get(g)
		return enabled(v), err
	})
}

func enabled(v bool) uint32 {
	if v {
		return 1
	}
	return 0
}

// text answers a call with one string. mig is what a MIG device answers, nil
// where it has no answer.
func text(h C.uintptr_t, buf *C.char, n C.uint, get func(*nvmlsim.GPU) (string, error), mig func(nvmlsim.Compute) (string, error)) C.int {
	if c, ok := migDevice(h); ok && mig != nil {
		v, err := mig(c)
		return fill(buf, n, v, err)
	}
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	v, err := get(g)
	return fill(buf, n, v, err)
}

// fill copies a string and its end into a caller's buffer.
func fill(buf *C.char, n C.uint, v string, err error) C.int {
	if err != nil {
		return code(err)
	}
	if buf == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if len(v)+1 > int(n) {
		return code(nvmlsim.InsufficientSize)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(buf)), n), append([]byte(v), 0))
	return ok
}

// put copies a string into a fixed array of C, cut where it doesn't fit.
func put(dst []C.char, v string) {
	n := min(len(v), len(dst)-1)
	for i := range n {
		dst[i] = C.char(v[i])
	}
	dst[n] = 0
}

// handle gives a GPU's handle to the caller.
func handle(out *unsafe.Pointer, g *nvmlsim.GPU, err error) C.int {
	if err != nil {
		return code(err)
	}
	*out = C.gpu_handle(C.int(g.Position()))
	return ok
}
