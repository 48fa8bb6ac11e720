package facts_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

var h100 = gpu.GPU{UUID: "GPU-980fb007-8a10-0135-bada-13f71feaef21"}

func node(gpus ...gpu.GPU) gpu.Node { return gpu.Node{Name: "node-0", GPUs: gpus} }

func TestDevice(t *testing.T) {
	r := facts.New("node-0")
	if _, _, err := r.Device("gpu-980fb007"); err == nil {
		t.Error("handed out a GPU before the GPUs were read")
	}
	lost := h100
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	for name, tc := range map[string]struct {
		tell   func()
		device gpu.DeviceName
		want   string // in the error; empty: none
	}{
		"there":   {tell: func() { r.Found(node(h100)) }, device: "gpu-980fb007"},
		"another": {tell: func() { r.Found(node(h100)) }, device: "gpu-11111111", want: "no such GPU"},
		"lost":    {tell: func() { r.Found(node(lost)) }, device: "gpu-980fb007", want: "fell off the bus"},
		"answers again": {tell: func() {
			r.SetHealth(map[gpu.UUID][]gpu.Condition{h100.UUID: lost.Conditions}) // until two readings agree
			r.Found(node(h100))
		}, device: "gpu-980fb007"},
		"no driver": {
			tell:   func() { r.Missing(facts.ReasonDriverNotFound, "no driver under /") },
			device: "gpu-980fb007", want: "no driver under /",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tc.tell()
			_, _, err := r.Device(tc.device)
			if got := errorText(err); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestGPUsWithoutNames checks that a GPU whose UUID gives no name costs no other its devices.
func TestGPUsWithoutNames(t *testing.T) {
	const other gpu.UUID = "GPU-11111111-8a10-0135-bada-13f71feaef21"
	for name, strange := range map[string][]gpu.GPU{
		"another form": {{UUID: "1833c8b5-9aa0-5382-b784-68b7e77eb185"}},
		"twice":        {{UUID: other}, {UUID: other, Index: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts.New("node-0")
			f.Found(node(append(strange, h100)...))
			if _, g, err := f.Device("gpu-980fb007"); err != nil || g.UUID != h100.UUID {
				t.Errorf("the other GPU's device: %v, %v", g.UUID, err)
			}
			if _, _, err := f.Device("gpu-11111111"); err == nil {
				t.Error("one of two GPUs with the same UUID has a device")
			}
			if state, _ := f.State(); len(state.Node.GPUs) != len(strange)+1 {
				t.Errorf("%d GPUs are known, want all %d", len(state.Node.GPUs), len(strange)+1)
			}
		})
	}
}

// TestMayPrepare checks that claims get devices only where no other driver can serve the
// GPUs, and that those they have can be looked up beside one.
func TestMayPrepare(t *testing.T) {
	r := facts.New("node-0")
	r.Found(node(h100))
	const plugin, driver = "a device plugin offers 8 nvidia.com/gpu", "another DRA driver is alive"
	for _, tc := range []struct {
		what string
		tell func()
		want string // in the error; empty: none
	}{
		{"at first", func() {}, "before the API server has shown Node node-0"},
		{"alone", func() { r.SawNode(true, "") }, ""},
		{"beside a device plugin", func() { r.SawNode(true, plugin) }, plugin},
		{"beside both", func() { r.SetOtherDriver(driver) }, plugin},
		{"beside a DRA driver", func() { r.SawNode(true, "") }, driver},
		{"alone again", func() { r.SetOtherDriver("") }, ""},
		{"when the Node was deleted", func() { r.SawNode(false, "") }, "before the API server has shown"},
	} {
		tc.tell()
		if got := errorText(r.MayPrepare()); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s: got %q, want %q", tc.what, got, tc.want)
		}
		if _, _, err := r.Device("gpu-980fb007"); err != nil {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// TestForget checks that a GPU which was forgotten is back when it is read again.
func TestForget(t *testing.T) {
	r := facts.New("node-0")
	other, gone := h100, h100
	other.UUID, gone.UUID = "GPU-11111111-8a10-0135-bada-13f71feaef21", "GPU-22222222-8a10-0135-bada-13f71feaef21"
	expect := func(what string, want ...gpu.UUID) {
		t.Helper()
		state, _ := r.State()
		read, _, _ := r.GPUs()
		var reported []gpu.UUID
		for _, g := range state.Node.GPUs {
			reported = append(reported, g.UUID)
		}
		for _, got := range [][]gpu.UUID{reported, read} {
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: reported %v, read %v; want %v of each", what, reported, read, want)
				return
			}
		}
	}
	for range 2 {
		r.Found(node(h100, other, gone))
		expect("all", other.UUID, gone.UUID, h100.UUID)
		r.Forget(gone.UUID)
		expect("one forgotten", other.UUID, h100.UUID)
	}
	if _, _, err := r.Device("gpu-22222222"); err == nil {
		t.Error("handed out a GPU that was forgotten")
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
