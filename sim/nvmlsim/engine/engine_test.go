package engine

import (
	"encoding/binary"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// The tests of sim/cmd/nvmlsim and the contract suite of pkg/nvml make all calls
// through the library; these tests send requests that the library doesn't.

// request encodes a call, as forward.c does.
func request(call string, arguments ...argument) []byte {
	b := append([]byte{byte(len(call))}, call...)
	b = append(b, byte(len(arguments)))
	for _, a := range arguments {
		b = binary.NativeEndian.AppendUint64(b, a.value)
		b = binary.NativeEndian.AppendUint32(b, uint32(len(a.memory)))
		b = append(b, a.memory...)
	}
	return b
}

// open creates an engine for a machine with two GPUs.
func open(t testing.TB) *engine {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte("2xl4"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "engine")
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(t.TempDir(), "state")
	m, err := nvmlsim.Create(state, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	t.Setenv(nvmlsim.StateEnv, state)
	return &engine{}
}

func TestAnswer(t *testing.T) {
	answer := func(code nvmlsim.Return, written ...byte) []byte {
		return append(binary.NativeEndian.AppendUint32(nil, uint32(code)), written...)
	}
	e := open(t)
	if got, err := e.answer(request("deviceGetCountV2", argument{1, make([]byte, 4)})); err != nil || cmp.Diff(answer(nvmlsim.Uninitialized), got) != "" {
		t.Errorf("before Init: %v, %v", got, err)
	}
	for _, c := range []struct {
		name    string
		request []byte
		want    []byte
	}{
		{"init", request("Init"), answer(nvmlsim.Success)},
		{"count", request("deviceGetCountV2", argument{1, make([]byte, 4)}), answer(nvmlsim.Success, 0, 4, 0, 0, 0, 2, 0, 0, 0)},
		{"what stays is not written", request("deviceGetCountV2", argument{1, []byte{2, 0, 0, 0}}), answer(nvmlsim.Success)},
		{"a null pointer", request("deviceGetCountV2", argument{}), answer(nvmlsim.InvalidArgument)},
		{"memory of another size", request("deviceGetCountV2", argument{1, make([]byte, 8)}), answer(nvmlsim.InvalidArgument)},
		{"no arguments", request("deviceGetName"), answer(nvmlsim.InvalidArgument)},
		{"a call of a later library", request("deviceGetSomething"), answer(nvmlsim.NotSupported)},
		{"a handle of another engine", request("eventSetFree", argument{value: uint64(newHandle(kindSet, 1<<numberBits-1, 0))}), answer(nvmlsim.InvalidArgument)},
	} {
		got, err := e.answer(c.request)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(request("deviceGetCountV2", argument{1, make([]byte, 4)}))
	f.Add(request("deviceGetHandleByUUID", argument{1, []byte("GPU-")}, argument{1, make([]byte, 8)}))
	f.Add(request("deviceGetFieldValues", argument{value: uint64(newHandle(kindGPU, 0, 0))}, argument{value: 1}, argument{1, make([]byte, 40)}))
	f.Add(request("deviceGetCPUAffinity", argument{value: uint64(newHandle(kindGPU, 0, 1))}, argument{value: 4000}, argument{value: 1}))
	f.Add([]byte{3, 'a'})
	e := open(f)
	if _, err := e.answer(request("Init")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decode(b)
		if err != nil || r.call == "eventSetWaitV2" { // that one waits as long as it is told
			return
		}
		if got, err := e.answer(b); err == nil && len(got) < 4 {
			t.Errorf("answer %v", got)
		}
	})
}
