package nvmlsim_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func TestParseSpec(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want nvmlsim.Spec
		err  string
	}{
		"short":          {text: "8xh100-80gb", want: nvmlsim.Spec{GPUs: []nvmlsim.GPUSpec{{Model: "h100-80gb", Count: 8}}}},
		"times sign":     {text: "8×h100-80gb\n", want: nvmlsim.Spec{GPUs: []nvmlsim.GPUSpec{{Model: "h100-80gb", Count: 8}}}},
		"one":            {text: "t4", want: nvmlsim.Spec{GPUs: []nvmlsim.GPUSpec{{Model: "t4", Count: 1}}}},
		"mixed":          {text: "2xa30, 1xl4", want: nvmlsim.Spec{GPUs: []nvmlsim.GPUSpec{{Model: "a30", Count: 2}, {Model: "l4", Count: 1}}}},
		"file":           {text: "driverVersion: 570.1.2\ngpus:\n- model: l4\n", want: nvmlsim.Spec{DriverVersion: "570.1.2", GPUs: []nvmlsim.GPUSpec{{Model: "l4"}}}},
		"no GPUs":        {text: "gpus: []", want: nvmlsim.Spec{GPUs: []nvmlsim.GPUSpec{}}},
		"unknown field":  {text: "gpus: [{model: l4, cuont: 2}]", err: `unknown field "gpus[0].cuont"`},
		"unknown model":  {text: "gpus:\n- model: l4\n- model: h10", err: `gpus[1].model: "h10" is not a GPU model; the models are a10, a100-40gb, `},
		"short unknown":  {text: "3xh10", err: `gpus[0].model: "h10" is not a GPU model`},
		"nonsense":       {text: "eight h100", err: "want COUNTxMODEL such as 8xh100-80gb"},
		"zero":           {text: "0xl4", err: "count 0"},
		"too many":       {text: "129xl4", err: "129 GPUs; a machine has at most 128"},
		"driver":         {text: "driverVersion: new\ngpus: []", err: `driverVersion: "new" is not of the form`},
		"no MIG":         {text: "gpus: [{model: l4, migEnabled: true}]", err: "gpus[0].migEnabled: l4 has no MIG"},
		"bus ids":        {text: "gpus: [{model: l4, count: 2, pciBusIDs: ['0000:07:00.0']}]", err: "gpus[0].pciBusIDs: 1 addresses for 2 GPUs"},
		"bus id's parts": {text: "gpus: [{model: l4, pciBusIDs: ['000000000:07:00.0']}]", err: "gpus[0].pciBusIDs[0]"},
		"bus id":         {text: "gpus: [{model: l4, pciBusIDs: ['07:00.0']}]", err: "gpus[0].pciBusIDs[0]"},
		"not on a bus":   {text: "gpus: [{model: orin, pciBusIDs: ['0000:07:00.0']}]", err: "gpus[0].pciBusIDs: orin isn't on a PCI bus"},
		"WSL":            {text: "{wsl: true, gpus: [{model: l4}]}", want: nvmlsim.Spec{WSL: true, GPUs: []nvmlsim.GPUSpec{{Model: "l4"}}}},
		"empty":          {text: "", err: "want COUNTxMODEL"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := nvmlsim.ParseSpec([]byte(c.text))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %v, want an error with %q", err, c.err)
				}
				return
			}
			check(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestIdentitiesFollowFromTheName(t *testing.T) {
	spec, err := nvmlsim.ParseSpec([]byte("8xh100-80gb,8xa100-40gb"))
	check(t, err)
	describe := func(name string) nvmlsim.Description {
		d, err := nvmlsim.Describe(spec, name)
		check(t, err)
		return d
	}
	a, again, b := describe("a"), describe("a"), describe("b")
	if diff := cmp.Diff(a, again); diff != "" {
		t.Errorf("the same name twice:\n%s", diff)
	}
	seen, addresses := map[string]bool{}, map[string]bool{}
	for _, d := range []nvmlsim.Description{a, b} {
		for i, g := range d.GPUs {
			if seen[g.UUID] || seen[g.Serial] || addresses[d.Name+g.BusID] {
				t.Errorf("%s: GPU %d shares an identity", d.Name, i)
			}
			seen[g.UUID], seen[g.Serial], addresses[d.Name+g.BusID] = true, true, true
			if g.Minor != i || g.Model != spec.GPUs[i/8].Model {
				t.Errorf("%s: GPU %d: minor %d, model %s", d.Name, i, g.Minor, g.Model)
			}
		}
	}
	if a.GPUs[0].NUMANode != 0 || a.GPUs[15].NUMANode != 1 || a.GPUs[0].PCIeRoot != a.GPUs[1].PCIeRoot || a.GPUs[1].PCIeRoot == a.GPUs[2].PCIeRoot {
		t.Errorf("topology: %+v", a.GPUs)
	}
}

func TestFullMachineHasDistinctAddresses(t *testing.T) {
	for _, name := range []string{"a", "b", "node-17"} {
		spec, err := nvmlsim.ParseSpec([]byte("64xt4"))
		check(t, err)
		if _, err := nvmlsim.Describe(spec, name); err != nil {
			t.Error(err)
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	for _, seed := range []string{"8xh100-80gb", h200, "gpus: []", "gpus: [{model: l4, cuont: 2}]", "{", "x"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		spec, err := nvmlsim.ParseSpec(text)
		if err != nil {
			return
		}
		if err := spec.Validate(); err != nil {
			t.Errorf("parsed, but %v", err)
		}
	})
}

// TestPCIDomains checks the addresses of GPUs whose domains have more than four digits.
func TestPCIDomains(t *testing.T) {
	m := create(t, "gpus: [{model: l4, count: 3, pciBusIDs: ['00010001:8A:00.0', '0000:07:00.0', 'fffff:01:00.0']}]")
	var got [][]string
	for _, g := range m.GPUs() {
		id, p := g.Identity(), get(t, g.PCIInfo)
		got = append(got, []string{id.BusID, id.PCIeRoot, p.BusID()})
	}
	want := [][]string{
		{"0000:07:00.0", "pci0000:06", "00000000:07:00.0"},
		{"10001:8a:00.0", "pci10001:06", "00010001:8A:00.0"},
		{"fffff:01:00.0", "pcifffff:00", "000FFFFF:01:00.0"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sysfs' address, root, NVML's address (-want +got):\n%s", diff)
	}
}

// TestPartsOfComputers checks order, addresses and UUIDs of GPUs that are part of a computer,
// beside a card.
func TestPartsOfComputers(t *testing.T) {
	for machine, want := range map[string][]string{ // "model at address, root, bare UUID or not"
		"gb10":    {"gb10 at 000f:01:00.0, pci000f:00, false"},
		"l4,thor": {"thor at 0000:01:00.0, pci0000:00, true", "l4"},
		"l4,orin": {"orin at , , true", "l4"},
	} {
		m := create(t, machine)
		var got []string
		for i, g := range m.GPUs() {
			id := g.Identity()
			if id.Minor != i {
				t.Errorf("%s: GPU %d has minor number %d", machine, i, id.Minor)
			}
			if id.Model == "l4" {
				got = append(got, "l4")
				continue
			}
			got = append(got, fmt.Sprintf("%s at %s, %s, %t", id.Model, id.BusID, id.PCIeRoot, !strings.HasPrefix(id.UUID, "GPU-")))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", machine, diff)
		}
	}
}
