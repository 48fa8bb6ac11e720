package nvml_test

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// onFirst is the library of a simulated machine, in which a test decides about the calls for
// the first GPU and its parts.
type onFirst struct {
	gonvml.Interface

	mu     sync.Mutex
	called map[string]bool // the calls since the last reset
	answer func(call string) gonvml.Return
}

// meet returns SUCCESS if the call is to be passed on.
func (l *onFirst) meet(call string) gonvml.Return {
	l.mu.Lock()
	l.called[call] = true
	answer := l.answer
	l.mu.Unlock()
	if answer == nil {
		return gonvml.SUCCESS
	}
	return answer(call)
}

// reset forgets the calls, and sets the answers to those that follow; nil: the machine's.
func (l *onFirst) reset(answer func(call string) gonvml.Return) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.called, l.answer = map[string]bool{}, answer
}

// calls returns the calls since the last reset, in order of their names.
func (l *onFirst) calls() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.called))
}

func (l *onFirst) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	if i != 0 {
		return l.Interface.DeviceGetHandleByIndex(i)
	}
	if ret := l.meet("HandleByIndex"); ret != gonvml.SUCCESS {
		return nil, ret
	}
	d, ret := l.Interface.DeviceGetHandleByIndex(i)
	m := &mock.Device{}
	l.intercept("Device.", m, d)
	return m, ret
}

// intercept makes a mock of go-nvml pass the calls that the test doesn't answer on to
// another implementation.
func (l *onFirst) intercept(prefix string, of, to any) {
	fields := reflect.ValueOf(of).Elem()
	for i := range fields.NumField() {
		field := fields.Type().Field(i)
		name, ok := strings.CutSuffix(field.Name, "Func")
		if !ok || !field.IsExported() {
			continue
		}
		method := reflect.ValueOf(to).MethodByName(name)
		fields.Field(i).Set(reflect.MakeFunc(field.Type, func(args []reflect.Value) []reflect.Value {
			last := field.Type.NumOut() - 1
			if last < 0 || field.Type.Out(last) != reflect.TypeFor[gonvml.Return]() {
				return method.Call(args)
			}
			if ret := l.meet(prefix + name); ret != gonvml.SUCCESS {
				out := make([]reflect.Value, last+1)
				for i := range last {
					out[i] = reflect.Zero(field.Type.Out(i))
				}
				out[last] = reflect.ValueOf(ret)
				return out
			}
			out := method.Call(args)
			for i := range out {
				out[i] = l.interceptHandles(out[i])
			}
			return out
		}))
	}
}

// interceptHandles returns a call's answer with the handles in it intercepted.
func (l *onFirst) interceptHandles(v reflect.Value) reflect.Value {
	switch x := v.Interface().(type) {
	case gonvml.Device:
		if v.Type() == reflect.TypeFor[gonvml.Device]() {
			m := &mock.Device{}
			l.intercept("MIGDevice.", m, x)
			return reflect.ValueOf(gonvml.Device(m))
		}
	case []gonvml.GpuInstance:
		all := make([]gonvml.GpuInstance, len(x))
		for i := range x {
			m := &mock.GpuInstance{}
			l.intercept("GpuInstance.", m, x[i])
			all[i] = m
		}
		return reflect.ValueOf(all)
	}
	return v
}

// twoGPUs opens a session on a machine with two GPUs in MIG mode behind NVSwitches, of which
// the first has a MIG device.
func twoGPUs(t *testing.T) (*nvml.Session, *onFirst) {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte("gpus: [{model: h100-80gb, count: 2, migEnabled: true}]"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "unread")
	if err != nil {
		t.Fatal(err)
	}
	m, err := nvmlsim.Create(filepath.Join(t.TempDir(), "state"), d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if _, err := nvmltest.OpenSimulated(m).CreateInstance(first(t, nvmltest.OpenSimulated(m))); err != nil {
		t.Fatal(err)
	}
	l := &onFirst{Interface: nvmltest.Library(m)}
	l.reset(nil)
	s, err := nvml.NewOpener().Init(l, "simulated")
	if err != nil {
		t.Fatal(err)
	}
	return s, l
}

func listing(t *testing.T, s *nvml.Session) nvml.Listing {
	t.Helper()
	l, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	if len(l.GPUs)+len(l.Unidentified) != l.Count {
		t.Errorf("NVML lists %d GPUs: %d are reported, not identified: %v", l.Count, len(l.GPUs), l.Unidentified)
	}
	return l
}

// TestEachCallFails checks that, however and whenever a call fails that a reading makes for
// one of two GPUs, the other GPU is reported as it is, and the first one is never silently
// absent or wrong.
func TestEachCallFails(t *testing.T) {
	s, l := twoGPUs(t)
	healthy := listing(t, s).GPUs
	all := l.calls()
	for _, call := range []string{"HandleByIndex", "Device.GetMinorNumber", "Device.GetNvLinkState", "MIGDevice.GetUUID", "GpuInstance.GetInfo"} {
		if !slices.Contains(all, call) {
			t.Errorf("a reading makes the calls %v, want %s among them", all, call)
		}
	}
	for _, call := range all {
		for _, way := range []struct {
			name string
			ret  gonvml.Return // SUCCESS: the call doesn't return
		}{
			{"NotSupported", gonvml.ERROR_NOT_SUPPORTED},
			{"Unknown", gonvml.ERROR_UNKNOWN},
			{"Lost", gonvml.ERROR_GPU_IS_LOST},
			{"Timeout", gonvml.ERROR_TIMEOUT},
			{"Hangs", gonvml.SUCCESS},
		} {
			for _, when := range []string{"FirstReading", "Later"} {
				t.Run(fmt.Sprintf("%s/%s/%s", call, way.name, when), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { failCall(t, healthy, call, way.ret, when == "Later") })
				})
			}
		}
	}
}

// failCall makes a call for the first GPU fail, and checks the listings then and afterwards.
func failCall(t *testing.T, healthy []gpu.GPU, call string, ret gonvml.Return, later bool) {
	s, l := twoGPUs(t)
	if later {
		listing(t, s)
	}
	ended := make(chan struct{})
	l.reset(func(c string) gonvml.Return {
		if c == call && ret == gonvml.SUCCESS {
			<-ended
		} else if c == call {
			return ret
		}
		return gonvml.SUCCESS
	})
	got := listing(t, s)
	met := slices.Contains(l.calls(), call)
	other := slices.IndexFunc(got.GPUs, func(g gpu.GPU) bool { return g.UUID == healthy[1].UUID })
	if other < 0 {
		t.Fatalf("the other GPU isn't listed: %+v", got)
	}
	if diff := cmp.Diff(healthy[1], got.GPUs[other]); diff != "" {
		t.Errorf("the other GPU (-want +got):\n%s", diff)
	}
	if met {
		checkFirst(t, healthy[0], got, ret == gonvml.ERROR_NOT_SUPPORTED, later)
	}
	close(ended)
	synctest.Wait()
	l.reset(nil)
	if ret == gonvml.ERROR_NOT_SUPPORTED && !later {
		return // a session takes a feature that it didn't find for one that isn't there
	}
	if diff := cmp.Diff(healthy, listing(t, s).GPUs); diff != "" {
		t.Errorf("when the call works again (-want +got):\n%s", diff)
	}
}

// checkFirst checks what is listed of the GPU for which a call fails.
func checkFirst(t *testing.T, healthy gpu.GPU, got nvml.Listing, unsupported, later bool) {
	t.Helper()
	i := slices.IndexFunc(got.GPUs, func(g gpu.GPU) bool { return g.UUID == healthy.UUID })
	if i < 0 {
		if later || got.Unidentified[0] == nil {
			t.Errorf("the GPU is not listed; unidentified are %v", got.Unidentified)
		}
		return
	}
	g := got.GPUs[i]
	if len(g.Conditions) == 0 && !unsupported {
		t.Error("nothing says that a call has failed")
	}
	for _, c := range g.Conditions {
		if !strings.Contains(c.Message, "nvml") && !strings.Contains(c.Message, "read MIG device") && c.Type != gpu.NotResponding {
			t.Errorf("condition %s doesn't name the call: %s", c.Type, c.Message)
		}
	}
	if !unsupported && later {
		g.Conditions = nil
		if diff := cmp.Diff(healthy, g); diff != "" {
			t.Errorf("facts of the GPU, apart from conditions (-last known +got):\n%s", diff)
		}
	}
}

// TestUnsupportedFacts checks what a GPU is without each fact that some products lack.
func TestUnsupportedFacts(t *testing.T) {
	for call, unknown := range map[string]func(*gpu.GPU){
		"Device.GetMinorNumber":           func(g *gpu.GPU) { g.Minor = gpu.NoMinor },
		"Device.GetPciInfo":               func(g *gpu.GPU) { g.PCI = "" },
		"Device.GetMemoryInfo":            func(g *gpu.GPU) { g.MemoryBytes, g.MIG.Profiles, g.MIG.Instances = 0, nil, nil },
		"Device.GetMemoryInfo_v2":         func(g *gpu.GPU) { g.MemoryReservedBytes = 0 },
		"Device.GetCudaComputeCapability": func(g *gpu.GPU) { g.Model.CUDAComputeCapability = "" },
		"Device.GetMigMode":               func(g *gpu.GPU) { g.MIG = nil },
		"Device.GetEccMode":               func(g *gpu.GPU) { g.ECCEnabled = nil },
		"Device.GetArchitecture":          func(g *gpu.GPU) { g.Model.Architecture, g.MIG.Switchable = "", false },
	} {
		t.Run(call, func(t *testing.T) {
			s, l := twoGPUs(t)
			want := listing(t, s).GPUs[0]
			s, l = reopened(t, l)
			l.reset(func(c string) gonvml.Return {
				if c == call {
					return gonvml.ERROR_NOT_SUPPORTED
				}
				return gonvml.SUCCESS
			})
			unknown(&want)
			got := listing(t, s).GPUs[0]
			if call == "Device.GetPciInfo" {
				got.NVLink = want.NVLink
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// reopened opens another session on the same machine.
func reopened(t *testing.T, l *onFirst) (*nvml.Session, *onFirst) {
	t.Helper()
	l = &onFirst{Interface: l.Interface}
	l.reset(nil)
	s, err := nvml.NewOpener().Init(l, "simulated")
	if err != nil {
		t.Fatal(err)
	}
	return s, l
}

// uuids is a library that answers with other UUIDs, by index.
type uuids struct {
	gonvml.Interface
	answers map[int]string
}

func (l uuids) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(i)
	if uuid, ok := l.answers[i]; ok {
		d = renamed{d, uuid}
	}
	return d, ret
}

type renamed struct {
	gonvml.Device
	uuid string
}

func (d renamed) GetUUID() (string, gonvml.Return) { return d.uuid, gonvml.SUCCESS }

// TestUUIDs checks that a GPU with a strange UUID costs no other.
func TestUUIDs(t *testing.T) {
	m := nvmltest.NewSimulated(t, "2xl4").Machine
	ids := m.Description().GPUs
	for name, tc := range map[string]struct {
		first        string
		want         []string // "UUID@index at address"
		unidentified int
	}{
		"without a prefix": {first: "1833c8b5-9aa0-5382-b784-68b7e77eb185", want: []string{
			"1833c8b5-9aa0-5382-b784-68b7e77eb185@0 at " + ids[0].BusID, ids[1].UUID + "@1 at " + ids[1].BusID,
		}},
		"that of another GPU": {first: ids[1].UUID, want: []string{ids[1].UUID + "@0 at " + ids[0].BusID, ids[1].UUID + "@1 at " + ids[1].BusID}},
		"none":                {want: []string{ids[1].UUID + "@1 at " + ids[1].BusID}, unidentified: 1},
		"garbage":             {first: "\x00\xff", want: []string{ids[1].UUID + "@1 at " + ids[1].BusID}, unidentified: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := nvml.NewOpener().Init(uuids{nvmltest.Library(m), map[int]string{0: tc.first}}, "simulated")
			if err != nil {
				t.Fatal(err)
			}
			l := listing(t, s)
			var got []string
			for _, g := range l.GPUs {
				got = append(got, fmt.Sprintf("%s@%d at %s", g.UUID, g.Index, g.PCI))
				if len(g.Conditions) > 0 {
					t.Errorf("GPU %d has conditions %v", g.Index, g.Conditions)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || len(l.Unidentified) != tc.unidentified {
				t.Errorf("unidentified are %v, want %d; listed (-want +got):\n%s", l.Unidentified, tc.unidentified, diff)
			}
		})
	}
}

// TestEventsThatDoNotArrive checks that a GPU whose errors aren't reported says so, and that
// all do if nothing can be waited for.
func TestEventsThatDoNotArrive(t *testing.T) {
	for name, tc := range map[string]struct {
		fault nvmlsim.Fault
		want  []string // a part of each GPU's condition; empty: none
	}{
		"of one GPU":            {nvmlsim.Fault{Call: "DeviceRegisterEvents", GPU: 0, Code: nvmlsim.Unknown}, []string{"nvmlDeviceRegisterEvents", ""}},
		"of one without types":  {nvmlsim.Fault{Call: "DeviceGetSupportedEventTypes", GPU: 1, Code: nvmlsim.Timeout}, []string{"", "nvmlDeviceGetSupportedEventTypes"}},
		"of one that has none":  {nvmlsim.Fault{Call: "DeviceGetSupportedEventTypes", GPU: 1, Code: nvmlsim.NotSupported}, []string{"", ""}},
		"of a driver without":   {nvmlsim.Fault{Call: "EventSetCreate", GPU: nvmlsim.AnyGPU, Code: nvmlsim.NotSupported}, []string{"", ""}},
		"no set":                {nvmlsim.Fault{Call: "EventSetCreate", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown}, []string{"nvmlEventSetCreate", "nvmlEventSetCreate"}},
		"a set that can't wait": {nvmlsim.Fault{Call: "EventSetWait", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown}, []string{"nvmlEventSetWait", "nvmlEventSetWait"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := nvmltest.NewSimulated(t, "2xl4")
			check := func(when string, want []string) {
				t.Helper()
				for i, g := range listing(t, s.Session).GPUs {
					var got string
					if len(g.Conditions) > 0 {
						got = string(g.Conditions[0].Type) + ": " + g.Conditions[0].Message
					}
					if (want[i] == "") != (got == "") || want[i] != "" && (!strings.HasPrefix(got, "VitalsUnreadable: ") || !strings.Contains(got, want[i])) {
						t.Errorf("%s: GPU %d has condition %q, want %q", when, i, got, want[i])
					}
				}
			}
			if err := s.Machine.Fault(tc.fault); err != nil {
				t.Fatal(err)
			}
			wait := func() {
				ctx, cancel := context.WithCancel(t.Context())
				if tc.fault.Call != "EventSetWait" {
					cancel() // it only registers
				}
				_ = s.Listen()
				_, _ = s.WaitEvent(ctx)
				cancel()
			}
			check("before", []string{"", ""})
			wait()
			check("when it fails", tc.want)
			if err := s.Machine.ClearFaults(); err != nil {
				t.Fatal(err)
			}
			if err := s.Listen(); err != nil {
				t.Fatal(err)
			}
			if err := s.Machine.RaiseXID(0, nvmlsim.XID{Code: 13}); err != nil {
				t.Fatal(err)
			}
			if _, err := s.WaitEvent(t.Context()); err != nil {
				t.Fatal(err)
			}
			check("when it works", []string{"", ""})
		})
	}
}
