package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// frame is one request, and the data that its call wrote to the caller's
// memory. A request is the function's name and its arguments: one byte for the
// length of the name, the name, one byte for the number of arguments, and for
// each argument its value in eight bytes, the length of its memory in four, and
// a copy of the memory. An answer is the return code in four bytes, and for
// each piece of memory to be changed the number of the argument in one byte,
// the length in four, and the bytes. Numbers are in the machine's byte order.
type frame struct {
	call      string
	arguments []argument
	outputs   []output
}

type argument struct {
	value  uint64 // of a pointer: 0 for null
	memory []byte
}

// output has a function that returns the bytes to write to an argument's memory;
// none if the memory stays unchanged.
type output struct {
	argument int
	bytes    func() []byte
}

var errRequest = errors.New("not a request")

func decode(request []byte) (*frame, error) {
	r := reader{rest: request}
	f := &frame{call: string(r.take(int(r.byte())))}
	for range r.byte() {
		value := r.take(8)
		size := r.take(4)
		if r.failed {
			break
		}
		f.arguments = append(f.arguments, argument{
			value:  binary.NativeEndian.Uint64(value),
			memory: r.take(int(binary.NativeEndian.Uint32(size))),
		})
	}
	if r.failed || len(r.rest) > 0 {
		return nil, errRequest
	}
	return f, nil
}

// reader reads fields one after the other. It sets failed if a field is
// incomplete.
type reader struct {
	rest   []byte
	failed bool
}

func (r *reader) take(n int) []byte {
	if r.failed || n > len(r.rest) {
		r.failed = true
		return nil
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

// answer encodes the result of the call.
func (f *frame) answer(code nvmlsim.Return) ([]byte, error) {
	b := binary.NativeEndian.AppendUint32(nil, uint32(code))
	for _, o := range f.outputs {
		content := o.bytes()
		if len(content) == 0 {
			continue
		}
		b = append(b, byte(o.argument))
		b = binary.NativeEndian.AppendUint32(b, uint32(len(content)))
		b = append(b, content...)
	}
	if len(b) > maxMessage {
		return nil, fmt.Errorf("the answer of %s has %d bytes", f.call, len(b))
	}
	return b, nil
}

// at returns the argument with index i, a zero one if it wasn't sent.
func (f *frame) at(i int) argument {
	if i >= len(f.arguments) {
		return argument{}
	}
	return f.arguments[i]
}

func value[T ~int32 | ~uint32 | ~uint64](f *frame, i int) T { return T(f.at(i).value) }

// text returns a string argument, nil for a null pointer.
func (f *frame) text(i int) *string {
	a := f.at(i)
	if a.value == 0 {
		return nil
	}
	s := string(a.memory)
	return &s
}

// input returns a copy of the constant memory of a pointer, nil for a null
// pointer.
func input[T any](f *frame, i int) *T {
	a := f.at(i)
	v := new(T)
	if a.value == 0 || len(a.memory) != int(unsafe.Sizeof(*v)) {
		return nil
	}
	copy(bytesOf(v), a.memory)
	return v
}

// memory returns a copy of the memory of a pointer, nil for a null pointer.
// Changes to the copy are written to the caller's memory.
func memory[T any](f *frame, i int) *T {
	v := input[T](f, i)
	if v == nil {
		return nil
	}
	before := f.at(i).memory
	f.outputs = append(f.outputs, output{i, func() []byte {
		if after := bytesOf(v); string(after) != string(before) {
			return after
		}
		return nil
	}})
	return v
}

// room is an array in the caller's memory; other arguments give the number of
// values that fit.
type room[T any] struct {
	// in is the copy of its content, if any.
	in []byte
	// out is written to the beginning of the array.
	out []T
}

// array returns the array of a pointer, nil for a null pointer.
func array[T any](f *frame, i int) *room[T] {
	a := f.at(i)
	if a.value == 0 {
		return nil
	}
	r := &room[T]{in: a.memory}
	f.outputs = append(f.outputs, output{i, func() []byte { return bytesOfAll(r.out) }})
	return r
}

// version returns the first member of a versioned struct.
func (r *room[T]) version() uint32 {
	if len(r.in) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(r.in)
}

func bytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

func bytesOfAll[T any](all []T) []byte {
	if len(all) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&all[0])), len(all)*int(unsafe.Sizeof(all[0])))
}
