package nvml_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// linksOf returns the NVLinks of a machine's GPUs. A domain that is named after
// a GPU is written as "with" and the index of that GPU.
func linksOf(t *testing.T, s *nvmltest.Simulated) []gpu.NVLink {
	t.Helper()
	gpus, err := s.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	var all []gpu.NVLink
	for _, g := range gpus {
		var l gpu.NVLink
		if g.NVLink != nil {
			l = *g.NVLink
		}
		if i := slices.IndexFunc(gpus, func(h gpu.GPU) bool { return string(h.UUID) == l.Domain }); i >= 0 {
			members := slices.DeleteFunc(slices.Clone(gpus), func(h gpu.GPU) bool { return h.NVLink == nil || h.NVLink.Domain != l.Domain })
			for _, h := range members {
				if h.UUID < gpus[i].UUID {
					t.Errorf("domain %s of GPU %d: want the UUID that sorts first, %s", l.Domain, g.Index, h.UUID)
				}
			}
			l.Domain = "with " + string(rune('0'+members[0].Index))
		}
		all = append(all, l)
	}
	return all
}

func TestNVLinkDomains(t *testing.T) {
	switched, alone := gpu.NVLink{Links: 18, Domain: gpu.SwitchDomain}, gpu.NVLink{}
	for name, tc := range map[string]struct {
		machine string
		want    []gpu.NVLink
	}{
		"no NVLink":                     {"2xt4", []gpu.NVLink{alone, alone}},
		"two behind NVSwitches":         {"2xh100-80gb", []gpu.NVLink{switched, switched}},
		"one that has no other":         {"1xh200", []gpu.NVLink{alone}},
		"a bridge that isn't there":     {"2xa30", []gpu.NVLink{alone, alone}},
		"bridges by the machine's file": {"{gpus: [{model: a30, count: 3, nvlink: pairs}]}", []gpu.NVLink{{Links: 4, Domain: "with 0"}, {Links: 4, Domain: "with 0"}, alone}},
		"bridges by the model": {"4xh100-nvl", []gpu.NVLink{
			{Links: 12, Domain: "with 0"}, {Links: 12, Domain: "with 0"}, {Links: 12, Domain: "with 2"}, {Links: 12, Domain: "with 2"},
		}},
		"each linked to each other": {"4xv100-sxm2-16gb", []gpu.NVLink{
			{Links: 6, Domain: "with 0"}, {Links: 6, Domain: "with 0"}, {Links: 6, Domain: "with 0"}, {Links: 6, Domain: "with 0"},
		}},
		"linked through others only": {"8xv100-sxm2-32gb", slices.Repeat([]gpu.NVLink{{Links: 6, Domain: "with 0"}}, 8)},
		"some of a machine's GPUs":   {"2xl4,2xh200", []gpu.NVLink{alone, alone, switched, switched}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, linksOf(t, nvmltest.NewSimulated(t, tc.machine))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestNVLinkStaysWhileLinksAreDown checks that the report includes links that
// come up, and doesn't change when they go down, fail to answer, or a GPU is
// lost.
func TestNVLinkStaysWhileLinksAreDown(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-nvl")
	down := func(on bool) {
		t.Helper()
		var links []int
		for link := 0; on && link < 12; link++ {
			links = append(links, link)
		}
		for i := range 2 {
			if err := s.Machine.ChangeGPU(i, func(g *nvmlsim.GPUState) error { g.NVLinksDown = links; return nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	expect := func(what string, want ...gpu.NVLink) {
		t.Helper()
		if diff := cmp.Diff(want, linksOf(t, s)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	down(true)
	expect("links down since boot", gpu.NVLink{}, gpu.NVLink{})
	down(false)
	linked := gpu.NVLink{Links: 12, Domain: "with 0"}
	expect("links up", linked, linked)
	down(true)
	expect("links down again", linked, linked)
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "DeviceGetNvLinkState", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown}); err != nil {
		t.Fatal(err)
	}
	expect("links that don't answer", linked, linked)
	if err := s.Machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	expect("a GPU lost", linked, linked)
}

func TestAddressingMode(t *testing.T) {
	s := nvmltest.NewSimulated(t, "1xgb200,1xh200")
	mode := func(i int) string {
		t.Helper()
		gpus, err := s.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		if len(gpus[i].Conditions) > 0 {
			t.Errorf("GPU %d: conditions %v", i, gpus[i].Conditions)
		}
		return gpus[i].AddressingMode
	}
	if got := mode(0); got != "ATS" {
		t.Errorf("GB200: %q, want ATS", got)
	}
	if got := mode(1); got != "None" {
		t.Errorf("H200: %q, want None", got)
	}
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "DeviceGetAddressingMode", GPU: 0, Code: nvmlsim.NotSupported}); err != nil {
		t.Fatal(err)
	}
	if got := mode(0); got != "" {
		t.Errorf("a GPU that can't tell: %q, want nothing", got)
	}
}

// TestFabric checks that a GPU behind NVSwitches which Fabric Manager hasn't registered has a
// condition, except in MIG mode, in which it is used without its NVLinks.
func TestFabric(t *testing.T) {
	for name, tc := range map[string]struct {
		machine string
		state   nvmlsim.FabricState
		want    []gpu.ConditionType
	}{
		"ready":                {"2xh100-80gb", nvmlsim.FabricReady, nil},
		"not started":          {"2xh100-80gb", nvmlsim.FabricNotStarted, []gpu.ConditionType{gpu.FabricNotReady}},
		"in progress":          {"2xh100-80gb", nvmlsim.FabricInProgress, []gpu.ConditionType{gpu.FabricNotReady}},
		"failed":               {"2xh100-80gb", nvmlsim.FabricFailed, []gpu.ConditionType{gpu.FabricNotReady}},
		"in MIG mode":          {"gpus: [{model: h100-80gb, count: 2, migEnabled: true}]", nvmlsim.FabricNotStarted, nil},
		"without NVSwitches":   {"2xh100-nvl", nvmlsim.FabricNotStarted, nil},
		"a driver can't tell":  {"2xa100-80gb", nvmlsim.FabricNotStarted, nil},
		"the only of its kind": {"1xh200", nvmlsim.FabricNotStarted, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := nvmltest.NewSimulated(t, tc.machine)
			if err := s.Machine.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Fabric = tc.state; return nil }); err != nil {
				t.Fatal(err)
			}
			gpus, err := s.GPUs()
			if err != nil {
				t.Fatal(err)
			}
			var got []gpu.ConditionType
			for _, c := range gpus[0].Conditions {
				got = append(got, c.Type)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			for _, g := range gpus[1:] {
				if len(g.Conditions) > 0 {
					t.Errorf("GPU %d has conditions %v", g.Index, g.Conditions)
				}
			}
		})
	}
}
