package nvmlsim_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const mib = 1 << 20

// first is the first device that a CUDA program sees.
func first(t *testing.T, m *nvmlsim.Machine) nvmlsim.CUDADevice {
	t.Helper()
	all := m.CUDADevices(nil)
	if len(all) == 0 {
		t.Fatal("no CUDA device")
	}
	return all[0]
}

// A Holder's uses are visible in every session until it is closed.
func TestHold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, "h200")
	h, err := m.Hold()
	check(t, err)
	on := first(t, m)
	check(t, h.Set([]nvmlsim.Use{{On: on, PID: 7, Name: "a", Memory: 66 * mib}, {On: on, PID: 8, Name: "b", Memory: 10 * mib}}))
	other, err := nvmlsim.Open(path)
	check(t, err)
	defer other.Close()
	g := other.GPUs()[0]
	if info := get(t, g.MemoryInfo); info != (nvmlsim.MemoryInfo{Total: 143771 * mib, Reserved: 616 * mib, Used: 76 * mib, Free: (143771 - 616 - 76) * mib}) {
		t.Errorf("memory %+v", info)
	}
	if !other.Held() || len(get(t, g.Processes)) != 2 {
		t.Errorf("held %v, processes %+v", other.Held(), get(t, g.Processes))
	}
	if err := h.Set([]nvmlsim.Use{{On: on, PID: 7, Memory: 143156 * mib}}); !errors.Is(err, nvmlsim.Memory) {
		t.Errorf("more than there is: %v", err)
	}
	if n := len(get(t, g.Processes)); n != 2 {
		t.Errorf("%d processes after what could not be", n)
	}
	check(t, h.Close())
	if other.Held() || len(get(t, g.Processes)) != 0 {
		t.Errorf("closed, and held %v, processes %+v", other.Held(), get(t, g.Processes))
	}
}

// The Holder of a killed process doesn't count, although it was never closed.
func TestHoldOfAKilledProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, "h100-80gb")
	c, out := start(t, "hold", path)
	if line, err := out.ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	g := m.GPUs()[0]
	if err := g.Reset(); err != nvmlsim.InUse {
		t.Errorf("reset under a process: %v", err)
	}
	if !m.Held() {
		t.Error("not held")
	}
	check(t, c.Process.Kill())
	_ = c.Wait()
	if m.Held() || len(get(t, g.Processes)) != 0 || get(t, g.MemoryInfo).Used != 0 {
		t.Errorf("still held: %+v", get(t, g.Processes))
	}
	check(t, g.Reset())
	if left := m.State().GPUs[0].Processes; len(left) != 0 {
		t.Errorf("left in the state: %+v", left)
	}
}

func TestHoldNeedsAStateThatCanBeWritten(t *testing.T) {
	if _, err := new(nvmlsim.Machine).Hold(); !errors.Is(err, nvmlsim.NoPermission) {
		t.Errorf("%v", err)
	}
}

func TestComputeModeAdmits(t *testing.T) {
	for name, c := range map[string]struct {
		mode        uint32
		other       bool // another process uses the device
		alone, with error
	}{
		"default":    {0, true, nil, nil},
		"prohibited": {2, false, nvmlsim.InUse, nvmlsim.InUse},
		"exclusive":  {3, true, nvmlsim.InUse, nvmlsim.InUse},
		"and alone":  {3, false, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			m := create(t, "h200")
			on := first(t, m)
			if c.other {
				h, err := m.Hold()
				check(t, err)
				defer h.Close()
				check(t, h.Set([]nvmlsim.Use{{On: on, PID: 7}}))
			}
			check(t, m.GPUs()[0].SetComputeMode(c.mode))
			if err := on.Admits(0); err != c.alone {
				t.Errorf("admits: %v, want %v", err, c.alone)
			}
			h, err := m.Hold()
			check(t, err)
			defer h.Close()
			// A Holder's own processes don't exclude it.
			if err := h.Set([]nvmlsim.Use{{On: on, PID: 8}, {On: on, PID: 9}}); err != c.with {
				t.Errorf("set: %v, want %v", err, c.with)
			}
		})
	}
}

func TestModesInMIGMode(t *testing.T) {
	g := mig(t, "h100-80gb")
	for name, err := range map[string]error{
		"exclusive":  g.SetComputeMode(3),
		"prohibited": g.SetComputeMode(2),
		"time slice": g.SetTimeSlice(1),
	} {
		if err != nvmlsim.NotSupported {
			t.Errorf("%s: %v, want Not Supported", name, err)
		}
	}
	check(t, g.SetComputeMode(0))
}

func TestTimeSlice(t *testing.T) {
	m := create(t, "t4")
	g := m.GPUs()[0]
	check(t, g.SetTimeSlice(3))
	if err := g.SetTimeSlice(4); err != nvmlsim.InvalidArgument {
		t.Errorf("4: %v", err)
	}
	check(t, m.Fault(nvmlsim.Fault{Call: "ComputePolicy", GPU: 0, Code: nvmlsim.NotSupported, Count: 1}))
	if _, err := g.TimeSlice(); err != nvmlsim.NotSupported {
		t.Errorf("with a fault: %v", err)
	}
	if n := get(t, g.TimeSlice); n != 3 {
		t.Errorf("time slice %d", n)
	}
	check(t, g.SetComputeMode(3))
	check(t, m.Reboot())
	if slice, mode := get(t, g.TimeSlice), get(t, g.ComputeMode); slice != 0 || mode != 0 {
		t.Errorf("after a reboot: time slice %d, compute mode %d", slice, mode)
	}
}

// CUDA sees GPUs by index, and only the first MIG device of a GPU in MIG mode.
func TestCUDADevices(t *testing.T) {
	m := create(t, "gpus: [{model: h200}, {model: h100-80gb, migEnabled: true}, {model: l4}]")
	cut := m.GPUs()[1]
	for range 2 {
		i, err := cut.CreateInstance(profileID(t, cut, "3g.40gb"), nil)
		check(t, err)
		_, err = i.CreateCompute(2, nil)
		check(t, err)
	}
	devices, err := cut.MIGDevices()
	check(t, err)
	a, b := get(t, devices[0].UUID), get(t, devices[1].UUID)
	h200, l4 := m.GPUs()[0].Identity().UUID, m.GPUs()[2].Identity().UUID
	text := func(s string) *string { return &s }
	for name, c := range map[string]struct {
		visible *string
		want    []string
	}{
		"all":                  {nil, []string{h200, a, l4}},
		"none":                 {text(""), nil},
		"indexes":              {text("2,0"), []string{l4, h200}},
		"UUIDs":                {text(b + ", " + h200), []string{b, h200}},
		"begin of a UUID":      {text(l4[:10]), []string{l4}},
		"up to a wrong one":    {text("0,7,2"), []string{h200}},
		"a GPU in MIG mode":    {text(cut.Identity().UUID), nil},
		"minus one":            {text("-1"), nil},
		"a word":               {text("all"), nil},
		"only what UUIDs have": {text("GPU-"), []string{h200}},
	} {
		var got []string
		for _, d := range m.CUDADevices(c.visible) {
			got = append(got, d.UUID)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, d := range m.CUDADevices(text(b + "," + h200)) {
		sms, memory := uint32(132), uint64(143155*mib)
		if strings.HasPrefix(d.UUID, "MIG-") {
			sms, memory = 60, 40448*mib
		}
		if d.Multiprocessors != sms || d.Memory != memory || d.Free() != memory {
			t.Errorf("%s: %d multiprocessors, %d MiB, %d MiB free", d.UUID, d.Multiprocessors, d.Memory/mib, d.Free()/mib)
		}
	}
}

// 616 MiB were measured on an H200; the others are estimates.
func TestReservedMemory(t *testing.T) {
	for model, want := range map[string]uint64{"h200": 616, "a100-40gb": 175, "t4": 65} {
		m, err := nvmlsim.FindModel(model)
		check(t, err)
		if got := m.ReservedBytes(); got != want*mib {
			t.Errorf("%s: %d MiB, want %d", model, got/mib, want)
		}
	}
}

func TestKillMPS(t *testing.T) {
	m := create(t, "t4")
	check(t, m.KillMPS(true, false))
	check(t, m.KillMPS(true, true))
	if diff := cmp.Diff(nvmlsim.MPSKills{Control: 2, Server: 1}, m.State().MPSKills); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
