package mps_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

func TestStateSurvivesTheWire(t *testing.T) {
	for _, phase := range []mps.Phase{mps.Running, mps.Starting, mps.Failed} {
		want := mps.State{
			Daemon: mps.Daemon{Name: "gpu-980fb007", Devices: []gpu.UUID{"GPU-1", "GPU-2"}, ThreadPercentage: 25, MemoryMiB: []int64{3072, 0}},
			PID:    7, PipeDir: "/p", ShmDir: "/s", Phase: phase, Message: "m", Restarts: 3, Revision: 1 << 60,
		}
		if diff := cmp.Diff(want, mps.StateFromWire(mps.StateToWire(want))); diff != "" {
			t.Errorf("(-sent +received):\n%s", diff)
		}
		report := mps.Report{Revision: 1 << 61, Daemons: []mps.State{want}}
		if diff := cmp.Diff(report, mps.ReportFromWire(mps.ReportToWire(report))); diff != "" {
			t.Errorf("(-sent +received):\n%s", diff)
		}
	}
}

func TestValidate(t *testing.T) {
	good := mps.Daemon{Name: "gpu-980fb007-mig-3g71gb-0", Devices: []gpu.UUID{"MIG-1a"}, ThreadPercentage: 100, MemoryMiB: []int64{1}}
	if err := good.Validate(); err != nil {
		t.Errorf("%+v: %v", good, err)
	}
	for name, change := range map[string]func(*mps.Daemon){
		"no name":              func(d *mps.Daemon) { d.Name = "" },
		"a path":               func(d *mps.Daemon) { d.Name = "../d" },
		"hidden":               func(d *mps.Daemon) { d.Name = ".d" },
		"no devices":           func(d *mps.Daemon) { d.Devices = nil },
		"an index":             func(d *mps.Daemon) { d.Devices = []gpu.UUID{"0"} },
		"a device twice":       func(d *mps.Daemon) { d.Devices = []gpu.UUID{"GPU-1", "GPU-1"} },
		"several in one":       func(d *mps.Daemon) { d.Devices = []gpu.UUID{"GPU-1,GPU-2"} },
		"more than everything": func(d *mps.Daemon) { d.ThreadPercentage = 101 },
		"less than nothing":    func(d *mps.Daemon) { d.MemoryMiB = []int64{-1} },
		"limits of no device":  func(d *mps.Daemon) { d.MemoryMiB = []int64{1, 1} },
	} {
		t.Run(name, func(t *testing.T) {
			d := good
			change(&d)
			if d.Validate() == nil {
				t.Errorf("%+v is taken", d)
			}
		})
	}
}
