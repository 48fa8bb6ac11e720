package engine

import (
	"math/rand/v2"
	"sync"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// session is the state that the calls of one process share.
type session struct {
	machine *nvmlsim.Machine
	gpus    []*nvmlsim.GPU // by position; nil if not visible
	objects objects
	mu      sync.Mutex
	sets    [256]*nvmlsim.EventSet
	// samples are the allocated ones, by slot; nextSample is the slot of the next one.
	samples    map[int]*nvmlsim.GPMSample
	nextSample int
	// number makes the handles of objects and event sets differ between engines.
	number uint64
}

func newSession(m *nvmlsim.Machine) *session {
	s := &session{machine: m, gpus: make([]*nvmlsim.GPU, nvmlsim.MaxGPUs), number: rand.Uint64N(1 << numberBits), samples: map[int]*nvmlsim.GPMSample{}} //nolint:gosec // not a secret
	for _, g := range m.GPUs() {
		s.gpus[g.Position()] = g
	}
	s.objects.number = s.number
	return s
}

// handle refers to a GPU, an event set, a sample of GPM, or a MIG instance or device. Its value
// is never a valid address, so it can't be confused with a foreign handle or a
// pointer. From the highest bit it has 16 bits of tag, 4 of kind, 20 of the
// engine's number, and 24 of slot. GPUs have the same handles in all engines.
type handle uint64

const (
	handleTag  = 0x4e56
	slotBits   = 24
	numberBits = 20

	kindGPU    = 1
	kindSet    = 2
	kindObject = 3
	kindSample = 4
)

func newHandle(kind, number uint64, slot int) handle {
	return handle(uint64(handleTag)<<48 | kind<<(numberBits+slotBits) | number<<slotBits | uint64(slot))
}

// slot returns the slot of a handle; -1 for a handle of another kind or engine,
// and for an invalid one.
func (h handle) slot(kind, number uint64) int {
	slot := int(uint64(h) & (1<<slotBits - 1))
	if newHandle(kind, number, slot) != h {
		return -1
	}
	return slot
}

func gpuHandle(g *nvmlsim.GPU) handle { return newHandle(kindGPU, 0, g.Position()) }

func code(err error) nvmlsim.Return { return nvmlsim.Code(err) }

const ok = nvmlsim.Success

// gpu returns the GPU of a handle; InvalidArgument for an invalid handle.
func (s *session) gpu(h handle) (*nvmlsim.GPU, error) {
	pos := h.slot(kindGPU, 0)
	if pos < 0 || pos >= len(s.gpus) || s.gpus[pos] == nil {
		return nil, nvmlsim.InvalidArgument
	}
	return s.gpus[pos], nil
}

// migDevice finds a MIG device by its handle; ok is false for other handles.
func (s *session) migDevice(h handle) (_ nvmlsim.Compute, ok bool) {
	d, ok := s.objects.find(h).(device)
	return d.Compute, ok
}

// number answers a call with one number.
func number[N, T integer](s *session, h handle, out *N, get func(*nvmlsim.GPU) (T, error)) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	return put1(out, func() (T, error) { return get(g) })
}

type integer interface {
	~int | ~int32 | ~uint32 | ~int64 | ~uint64 | ~uint8
}

// flag answers a call with one enable state.
func (s *session) flag(h handle, out *uint32, get func(*nvmlsim.GPU) (bool, error)) nvmlsim.Return {
	return number(s, h, out, func(g *nvmlsim.GPU) (uint32, error) {
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

// text answers a call with one string. mig returns the answer of a MIG device;
// nil if it has none.
func (s *session) text(h handle, buf *room[byte], n uint32, get func(*nvmlsim.GPU) (string, error), mig func(nvmlsim.Compute) (string, error)) nvmlsim.Return {
	if c, ok := s.migDevice(h); ok && mig != nil {
		v, err := mig(c)
		return fill(buf, n, v, err)
	}
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	v, err := get(g)
	return fill(buf, n, v, err)
}

// fill copies a string and its end into a caller's buffer.
func fill(buf *room[byte], n uint32, v string, err error) nvmlsim.Return {
	if err != nil {
		return code(err)
	}
	if buf == nil {
		return nvmlsim.InvalidArgument
	}
	if len(v)+1 > int(n) {
		return nvmlsim.InsufficientSize
	}
	buf.out = append([]byte(v), 0)
	return ok
}

// put copies a string into a fixed array of C, and truncates it if necessary.
func put(dst []int8, v string) {
	n := min(len(v), len(dst)-1)
	for i := range n {
		dst[i] = int8(v[i])
	}
	dst[n] = 0
}

// put1 writes one number to the caller's memory.
func put1[N, T integer](out *N, get func() (T, error)) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	v, err := get()
	if err != nil {
		return code(err)
	}
	*out = N(v)
	return ok
}

// giveGPU writes a GPU's handle to the caller's memory.
func giveGPU(out *handle, g *nvmlsim.GPU, err error) nvmlsim.Return {
	if err != nil {
		return code(err)
	}
	*out = gpuHandle(g)
	return ok
}

// give writes an object's handle to the caller's memory.
func (s *session) give(out *handle, x any, err error) nvmlsim.Return {
	if err != nil {
		return code(err)
	}
	*out = s.objects.handle(x)
	return ok
}

// giveAll fills an array of handles. By NVML's contract it has room for the
// profile's maximum; count is output only.
func giveAll[T any](s *session, out *room[handle], count *uint32, all []T, err error) nvmlsim.Return {
	if err != nil {
		return code(err)
	}
	if count == nil || (out == nil && len(all) > 0) {
		return nvmlsim.InvalidArgument
	}
	for _, x := range all {
		out.out = append(out.out, s.objects.handle(x))
	}
	*count = uint32(len(all))
	return ok
}
