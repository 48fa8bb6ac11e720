package nvmlsim_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const eight = "8xh100-80gb"

func TestLostGPU(t *testing.T) {
	m := create(t, eight)
	check(t, m.Lose(3))
	for i, g := range m.GPUs() {
		_, nameErr := g.Name()
		_, handleErr := m.ByIndex(i)
		want := nvmlsim.Success
		if i == 3 {
			want = nvmlsim.GPUIsLost
		}
		if nvmlsim.Code(nameErr) != want || nvmlsim.Code(handleErr) != want {
			t.Errorf("GPU %d: name %v, handle %v, want %v", i, nameErr, handleErr, want)
		}
	}
	if n := get(t, m.Count); n != 8 {
		t.Errorf("count %d, want 8: a lost GPU still counts", n)
	}
	boot := m.State().BootID
	check(t, m.Reboot())
	if _, err := m.GPUs()[3].Name(); err != nil {
		t.Errorf("after reboot: %v", err)
	}
	if m.State().BootID == boot {
		t.Error("boot id is the same after reboot")
	}
	if err := m.Lose(8); nvmlsim.Code(err) != nvmlsim.NotFound {
		t.Errorf("GPU 8: %v", err)
	}
}

func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fault nvmlsim.Fault
		// want has the codes of three calls of UUID on GPU 0, and one on GPU 1.
		want [4]nvmlsim.Return
	}{
		"all GPUs":      {nvmlsim.Fault{Call: "DeviceGetUUID", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown}, [4]nvmlsim.Return{999, 999, 999, 999}},
		"one GPU":       {nvmlsim.Fault{Call: "nvmlDeviceGetUUID", GPU: 1, Code: nvmlsim.NoPermission}, [4]nvmlsim.Return{0, 0, 0, 4}},
		"twice":         {nvmlsim.Fault{Call: "DeviceGetUUID_v2", GPU: 0, Code: nvmlsim.Timeout, Count: 2}, [4]nvmlsim.Return{10, 10, 0, 0}},
		"every call":    {nvmlsim.Fault{Call: "*", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown, Count: 1}, [4]nvmlsim.Return{999, 0, 0, 0}},
		"other call":    {nvmlsim.Fault{Call: "DeviceGetName", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown}, [4]nvmlsim.Return{}},
		"delay, no err": {nvmlsim.Fault{Call: "DeviceGetUUID", GPU: nvmlsim.AnyGPU, DelayMS: 1}, [4]nvmlsim.Return{}},
	} {
		t.Run(name, func(t *testing.T) {
			m := create(t, "2xl4")
			check(t, m.Fault(c.fault))
			var got [4]nvmlsim.Return
			for i := range got {
				_, err := m.GPUs()[i/3].UUID()
				got[i] = nvmlsim.Code(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			check(t, m.ClearFaults())
			if _, err := m.GPUs()[1].UUID(); err != nil {
				t.Errorf("after clearing: %v", err)
			}
		})
	}
	if err := create(t, "l4").Fault(nvmlsim.Fault{Call: "DeviceGetUUID", GPU: 7}); nvmlsim.Code(err) != nvmlsim.NotFound {
		t.Errorf("fault on a GPU that isn't there: %v", err)
	}
}

// A GPU refuses instances by their profile and placement, whether the caller or
// the driver has chosen the placement. An H100's driver chooses 6 first for 1g, 4 for 3g.
func TestFaultsOfInstances(t *testing.T) {
	fault := func(profile string, start *uint32, count int) nvmlsim.Fault {
		return nvmlsim.Fault{Call: "DeviceCreateGpuInstance", GPU: 0, Code: nvmlsim.Unknown, Profile: profile, Start: start, Count: count}
	}
	for name, c := range map[string]struct {
		fault nvmlsim.Fault
		// want has the codes of: 1g at 0, 1g at 4, 3g at 4, 1g, 3g, 3g at 4 again, and
		// 3g at 4 on another GPU. What is made is destroyed at once.
		want [7]nvmlsim.Return
	}{
		"profile":           {fault("3g.40gb", nil, 0), [7]nvmlsim.Return{0, 0, 999, 0, 999, 999, 0}},
		"start":             {fault("", new(uint32(4)), 0), [7]nvmlsim.Return{0, 999, 999, 0, 999, 999, 0}},
		"placement":         {fault("3g.40gb", new(uint32(4)), 0), [7]nvmlsim.Return{0, 0, 999, 0, 999, 999, 0}},
		"chosen by nobody":  {fault("3g.40gb", new(uint32(0)), 0), [7]nvmlsim.Return{}},
		"once":              {fault("1g.10gb", nil, 1), [7]nvmlsim.Return{999}},
		"twice, with start": {fault("", new(uint32(4)), 2), [7]nvmlsim.Return{0, 999, 999}},
	} {
		t.Run(name, func(t *testing.T) {
			m := create(t, "gpus: [{model: h100-80gb, count: 2, migEnabled: true}]")
			check(t, m.Fault(c.fault))
			at := func(start uint32) *uint32 { return &start }
			var got [7]nvmlsim.Return
			for i, try := range []struct {
				gpu     int
				profile string
				start   *uint32
			}{{0, "1g.10gb", at(0)}, {0, "1g.10gb", at(4)}, {0, "3g.40gb", at(4)}, {0, "1g.10gb", nil}, {0, "3g.40gb", nil}, {0, "3g.40gb", at(4)}, {1, "3g.40gb", at(4)}} {
				g := m.GPUs()[try.gpu]
				made, err := g.CreateInstance(profileID(t, g, try.profile), try.start)
				if got[i] = nvmlsim.Code(err); err == nil {
					check(t, made.Destroy())
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	m := create(t, "h100-80gb,l4")
	for name, f := range map[string]nvmlsim.Fault{
		`"9g.90gb": want one of 1g.10gb, 2g.20gb`: fault("9g.90gb", nil, 0),
		"start 3: want one of [0 4]":              fault("3g.40gb", new(uint32(3)), 0),
		"needs a GPU with MIG":                    {Call: "DeviceCreateGpuInstance", GPU: 1, Profile: "1g.10gb"},
		"GpuInstanceDestroy has none":             {Call: "GpuInstanceDestroy", GPU: 0, Profile: "1g.10gb"},
	} {
		if err := m.Fault(f); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want %q", err, name)
		}
	}
}

// Clearing the faults of a GPU leaves those of others, and of all.
func TestClearFaultsOf(t *testing.T) {
	m := create(t, "2xl4")
	for _, gpu := range []int{0, 1, nvmlsim.AnyGPU} {
		check(t, m.Fault(nvmlsim.Fault{Call: "DeviceGetUUID", GPU: gpu, Code: nvmlsim.Unknown}))
	}
	check(t, m.ClearFaultsOf(1))
	var left []int
	for _, f := range m.State().Faults {
		left = append(left, f.GPU)
	}
	if diff := cmp.Diff([]int{0, nvmlsim.AnyGPU}, left); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A call that hangs doesn't block others, and ends when the fault is cleared or
// its session is closed.
func TestHang(t *testing.T) {
	m := create(t, "2xl4")
	other, err := nvmlsim.Open(m.StatePath())
	check(t, err)
	check(t, m.Fault(nvmlsim.Fault{Call: "*", GPU: 0, Hang: true}))
	hung, closed := make(chan error, 1), make(chan error, 1)
	go func() { hung <- second(m.GPUs()[0].UUID()) }()
	go func() { closed <- second(other.GPUs()[0].Name()) }()
	for range 100 {
		get(t, m.GPUs()[1].UUID)
		get(t, m.Count)
	}
	check(t, other.Close())
	if err := <-closed; err != nvmlsim.Uninitialized {
		t.Errorf("a call that hung when its session was closed: %v", err)
	}
	select {
	case err := <-hung:
		t.Fatalf("the call has returned: %v", err)
	default:
	}
	check(t, m.ClearFaults())
	check(t, <-hung)
	if err := m.Fault(nvmlsim.Fault{Call: "*", GPU: 0, Hang: true, Count: 1}); nvmlsim.Code(err) != nvmlsim.InvalidArgument {
		t.Errorf("a hang that is counted: %v", err)
	}
}

// TestChangeBlocksTheGPU checks that calls for a GPU wait while another call changes it.
func TestChangeBlocksTheGPU(t *testing.T) {
	m := create(t, "h100-80gb")
	check(t, m.Fault(nvmlsim.Fault{Call: "DeviceSetMigMode", GPU: 0, DelayMS: 100, Count: 1}))
	changed := make(chan error)
	start := time.Now()
	go func() { changed <- second(m.GPUs()[0].SetMIGMode(true)) }()
	m.Await(t.Context(), func(s *nvmlsim.State) bool { return len(s.Faults) == 0 }) // it is being delayed
	get(t, m.GPUs()[0].UUID)
	if d := time.Since(start); d < 100*time.Millisecond {
		t.Errorf("a call during the change was answered after %s", d)
	}
	check(t, <-changed)
}

func TestDelayIsWaited(t *testing.T) {
	m := create(t, "l4")
	check(t, m.Fault(nvmlsim.Fault{Call: "DeviceGetUUID", GPU: 0, DelayMS: 30, Count: 1}))
	start := time.Now()
	get(t, m.GPUs()[0].UUID)
	if d := time.Since(start); d < 30*time.Millisecond {
		t.Errorf("answered after %s", d)
	}
}

func TestUnloadedDriver(t *testing.T) {
	m := create(t, "l4")
	check(t, m.LoadDriver(false))
	if err := m.Init(); nvmlsim.Code(err) != nvmlsim.DriverNotLoaded {
		t.Errorf("init: %v", err)
	}
	check(t, m.LoadDriver(true))
	check(t, m.Init())
}

func TestEvents(t *testing.T) {
	ctx := context.Background()
	m := create(t, eight)
	set, err := m.NewEventSet()
	check(t, err)
	check(t, m.RaiseXID(1, nvmlsim.XID{Code: 31})) // before registration: not seen
	check(t, set.Register(m.GPUs()[1], nvmlsim.XIDCriticalError))
	check(t, set.Register(m.GPUs()[2], nvmlsim.MIGConfigChange))
	if _, err := set.Wait(ctx, 0); err != nvmlsim.Timeout {
		t.Errorf("nothing yet: %v, want Timeout", err)
	}
	check(t, m.RaiseXID(0, nvmlsim.XID{Code: 1})) // not registered
	check(t, m.RaiseXID(2, nvmlsim.XID{Code: 2})) // not this type
	check(t, m.RaiseXID(1, nvmlsim.XID{Code: 3}))
	check(t, m.Lose(1))
	for _, want := range []uint64{3, 79} {
		e, err := set.Wait(ctx, time.Minute)
		check(t, err)
		if e.GPU != 1 || e.Data != want || e.Type != nvmlsim.XIDCriticalError || e.GPUInstance != nvmlsim.NoInstance {
			t.Errorf("event %+v, want Xid %d of GPU 1", e, want)
		}
	}
	if err := set.Register(m.GPUs()[0], 1<<40); err != nvmlsim.NotSupported {
		t.Errorf("unknown type: %v", err)
	}
	check(t, m.RaiseXID(2, nvmlsim.XID{Code: 31}))
	if _, err := set.Wait(ctx, time.Minute); err != nvmlsim.GPUIsLost {
		t.Errorf("a set with a lost GPU: %v", err)
	}
	check(t, m.Heal(1))
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := set.Wait(ended, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("context ended: %v", err)
	}
	set.Close()
	if _, err := set.Wait(ctx, time.Minute); err != nvmlsim.Uninitialized {
		t.Errorf("closed: %v", err)
	}
}

func TestEventsOverflow(t *testing.T) {
	m := create(t, "l4")
	set, err := m.NewEventSet()
	check(t, err)
	check(t, set.Register(m.GPUs()[0], nvmlsim.XIDCriticalError))
	for i := range 300 {
		check(t, m.RaiseXID(0, nvmlsim.XID{Code: uint64(i)}))
	}
	e, err := set.Wait(context.Background(), time.Minute)
	check(t, err)
	if e.Data != 300-64 {
		t.Errorf("first kept event is %d", e.Data)
	}
}

func TestFind(t *testing.T) {
	m := create(t, eight)
	id := m.Description().GPUs[5]
	long := get(t, m.GPUs()[5].PCIInfo).BusID()
	for name, find := range map[string]func() (*nvmlsim.GPU, error){
		"uuid":     func() (*nvmlsim.GPU, error) { return m.ByUUID(id.UUID) },
		"serial":   func() (*nvmlsim.GPU, error) { return m.BySerial(id.Serial) },
		"bus id":   func() (*nvmlsim.GPU, error) { return m.ByPCIBusID(id.BusID) },
		"long":     func() (*nvmlsim.GPU, error) { return m.ByPCIBusID(long) },
		"short":    func() (*nvmlsim.GPU, error) { return m.ByPCIBusID(id.BusID[5:]) },
		"by index": func() (*nvmlsim.GPU, error) { return m.ByIndex(5) },
	} {
		if g := get(t, find); g.Identity() != id {
			t.Errorf("%s: found %+v", name, g.Identity())
		}
	}
	for name, err := range map[string]error{
		"uuid":   second(m.ByUUID("GPU-none")),
		"bus id": second(m.ByPCIBusID("0000:ff:00.0")),
	} {
		if err != nvmlsim.NotFound {
			t.Errorf("%s that isn't there: %v", name, err)
		}
	}
	for name, err := range map[string]error{
		"index":  second(m.ByIndex(8)),
		"bus id": second(m.ByPCIBusID("nonsense")),
	} {
		if err != nvmlsim.InvalidArgument {
			t.Errorf("bad %s: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestMIGReadOnly(t *testing.T) {
	m := create(t, "gpus: [{model: a100-40gb, migEnabled: true}, {model: a100-40gb}, {model: l4}]")
	on, off, none := m.GPUs()[0], m.GPUs()[1], m.GPUs()[2]
	if got := []int{get(t, on.MaxMIGDeviceCount), get(t, off.MaxMIGDeviceCount), get(t, none.MaxMIGDeviceCount)}; !cmp.Equal(got, []int{7, 0, 0}) {
		t.Errorf("max devices %v", got)
	}
	for id, want := range map[uint32]int{19: 7, 20: 1, 15: 4, 14: 3, 9: 2, 5: 1, 0: 1} {
		n, err := on.RemainingCapacity(id)
		if err != nil || n != want {
			t.Errorf("profile %d: capacity %d, %v, want %d", id, n, err, want)
		}
	}
	if all, err := on.Instances(19); err != nil || len(all) != 0 {
		t.Errorf("instances %v, %v", all, err)
	}
	for name, err := range map[string]error{
		"capacity with the mode off":  second(off.RemainingCapacity(19)),
		"instances with the mode off": second(off.Instances(19)),
		"profile without MIG":         second(none.ProfileByEnum(0)),
	} {
		if err != nvmlsim.NotSupported {
			t.Errorf("%s: %v, want Not Supported", name, err)
		}
	}
	if _, _, err := none.MIGMode(); err != nvmlsim.NotSupported {
		t.Errorf("mode without MIG: %v", err)
	}
	if _, err := on.RemainingCapacity(99); err != nvmlsim.InvalidArgument {
		t.Errorf("unknown profile: %v", err)
	}
}

func TestComputeAndPersistenceModes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	g := createAt(t, path, "l4").GPUs()[0]
	check(t, g.SetComputeMode(3))
	check(t, g.SetPersistenceMode(false))
	if err := g.SetComputeMode(1); err != nvmlsim.InvalidArgument {
		t.Errorf("compute mode 1: %v", err)
	}
	other, err := nvmlsim.Open(path)
	check(t, err)
	defer other.Close()
	if mode := get(t, other.GPUs()[0].ComputeMode); mode != 3 {
		t.Errorf("another session sees compute mode %d", mode)
	}
	if get(t, other.GPUs()[0].PersistenceMode) {
		t.Error("another session sees persistence mode on")
	}
}

func TestEmbeddedMachine(t *testing.T) {
	d := create(t, eight).Description()
	dir := filepath.Join(t.TempDir(), "usr/bin")
	check(t, os.MkdirAll(dir, 0o755))
	path := filepath.Join(dir, "nvidia-smi")
	tail, err := nvmlsim.Embed("../..", d)
	check(t, err)
	check(t, os.WriteFile(path, append([]byte("program"), tail...), 0o755))
	root, got, err := nvmlsim.Embedded(path)
	check(t, err)
	if root != filepath.Dir(filepath.Dir(dir)) {
		t.Errorf("root %s", root)
	}
	if diff := cmp.Diff(d, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if b, err := nvmlsim.WithoutEmbedded(path); err != nil || string(b) != "program" {
		t.Errorf("without: %q, %v", b, err)
	}
	check(t, os.WriteFile(path, []byte("program"), 0o755))
	if _, err := nvmlsim.OpenInstalled(path); nvmlsim.Code(err) != nvmlsim.DriverNotLoaded {
		t.Errorf("a file without machine: %v", err)
	}
}

func FuzzEmbedded(f *testing.F) {
	spec, err := nvmlsim.ParseSpec([]byte("2xl4"))
	if err != nil {
		f.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "n")
	if err != nil {
		f.Fatal(err)
	}
	tail, err := nvmlsim.Embed("../..", d)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append([]byte("program"), tail...))
	f.Add(tail[:len(tail)-1])
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xffNVMLSIM-MACHINE\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "f")
		check(t, os.WriteFile(path, content, 0o644))
		_, _, _ = nvmlsim.Embedded(path) // must not crash
		if b, err := nvmlsim.WithoutEmbedded(path); err == nil && len(b) > len(content) {
			t.Errorf("%d of %d bytes", len(b), len(content))
		}
	})
}
