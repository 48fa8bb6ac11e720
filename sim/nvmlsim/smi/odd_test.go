package smi_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
)

// TestCapturedRows compares the table's rows of GPUs for which NVML doesn't support
// everything with those that people have published (sources: the models' files).
func TestCapturedRows(t *testing.T) {
	for name, c := range map[string]struct {
		machine              string
		celsius, milliwatts  uint32
		first, second, query string
	}{
		"GB10, driver 580.95.05": {
			machine: "gb10", celsius: 41, milliwatts: 11000,
			first:  "|   0  NVIDIA GB10                    Off |   0000000F:01:00.0 Off |                  N/A |",
			second: "| N/A   41C    P0             11W /  N/A  | Not Supported          |      0%      Default |",
			query:  "NVIDIA GB10, 12.1, 0000000F:01:00.0, [N/A], [N/A], [N/A], 0 %, 11.00 W, [N/A], 41",
		},
		"Thor, driver 595.78": {
			machine: "thor", celsius: 35, milliwatts: 1000,
			first:  "|   0  NVIDIA Thor                    Off |   00000000:01:00.0 Off |                  N/A |",
			second: "| N/A   35C  N/A               1W /  N/A  | Not Supported          |      0%      Default |",
			query:  "NVIDIA Thor, 11.0, 00000000:01:00.0, [N/A], [N/A], [N/A], 0 %, 1.00 W, [N/A], 35",
		},
		"Orin, driver 595.78": {
			machine: "orin",
			first:   "|   0  Orin (nvgpu)                  N/A  |   N/A              N/A |                  N/A |",
			second:  "| N/A   N/A  N/A             N/A  /  N/A  | Not Supported          |     N/A          N/A |",
			query:   "Orin (nvgpu), 8.7, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]",
		},
	} {
		t.Run(name, func(t *testing.T) {
			run := runOn(t, c.machine, func(g *nvmlsim.GPUState) {
				g.PersistenceMode, g.Temperature, g.PowerMilliwatts = false, c.celsius, c.milliwatts
			})
			lines := strings.Split(run(""), "\n")
			if diff := cmp.Diff([]string{c.first, c.second}, lines[8:10]); diff != "" {
				t.Errorf("rows (-published +simulated):\n%s", diff)
			}
			const fields = "name,compute_cap,pci.bus_id,memory.total,memory.used,memory.free,utilization.gpu,power.draw,power.limit,temperature.gpu"
			if diff := cmp.Diff(c.query+"\n", run("--query-gpu="+fields+" --format=csv,noheader")); diff != "" {
				t.Errorf("fields (-want +simulated):\n%s", diff)
			}
		})
	}
}

// TestAllOfOneGPU checks what -q says of a GPU that isn't on a PCI bus, and in WSL.
func TestAllOfOneGPU(t *testing.T) {
	said := func(machine string) map[string]string {
		all := map[string]string{}
		for line := range strings.Lines(runOn(t, machine, nil)("-q")) {
			if key, value, ok := strings.Cut(line, " : "); ok || strings.Contains(line, ": ") {
				if !ok {
					key, value, _ = strings.Cut(line, ": ")
				}
				all[strings.TrimSpace(key)] = strings.TrimSpace(value)
			}
		}
		return all
	}
	orin := said("orin")
	for key, want := range map[string]string{
		"Bus Id": "N/A", "Domain": "N/A", "Minor Number": "N/A", "Total": "N/A", "GPU Current Temp": "N/A", "Average Power Draw": "N/A", "Current Power Limit": "N/A",
		"Product Architecture": "Orin", "Persistence Mode": "N/A", "Compute Mode": "N/A",
	} {
		if orin[key] != want {
			t.Errorf("Orin: %s is %q, want %q", key, orin[key], want)
		}
	}
	if uuid := orin["GPU UUID"]; strings.HasPrefix(uuid, "GPU-") || len(uuid) != 36 {
		t.Errorf("Orin: UUID %q, want one without a prefix", uuid)
	}
	windows := said("{wsl: true, gpus: [{model: rtx-2080-ti}]}")
	for key, want := range map[string]string{"Minor Number": "N/A", "Total": "11264 MiB", "Compute Mode": "Default"} {
		if windows[key] != want {
			t.Errorf("WSL: %s is %q, want %q", key, windows[key], want)
		}
	}
}

// runOn returns a function that runs nvidia-smi on a machine whose first GPU was changed.
func runOn(t *testing.T, machine string, change func(*nvmlsim.GPUState)) func(line string) string {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	if err != nil {
		t.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "node")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state")
	m, err := nvmlsim.Create(path, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if change != nil {
		if err := m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { change(g); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	return func(line string) string {
		t.Helper()
		var out strings.Builder
		if code := smi.Run(strings.Fields(line), &out, func() (*nvmlsim.Machine, error) { return nvmlsim.Open(path) }); code != 0 {
			t.Fatalf("nvidia-smi %s: exit code %d: %s", line, code, out.String())
		}
		return out.String()
	}
}
