package mps_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/mps/mpspb"
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

// FuzzDaemonFromWire reads messages that a program that can reach the supervisor's socket
// could send. In a valid daemon the name is that of a single directory, and each device is
// one element of a list.
func FuzzDaemonFromWire(f *testing.F) {
	for _, d := range []mps.Daemon{
		{},
		{Name: "gpu-980fb007", Devices: []gpu.UUID{"GPU-1", "GPU-2"}, ThreadPercentage: 25, MemoryMiB: []int64{3072, 0}},
		{Name: "../../etc", Devices: []gpu.UUID{"GPU-1,GPU-2"}, MemoryMiB: []int64{-1}},
	} {
		data, err := proto.Marshal(mps.ToWire(d))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var message mpspb.Daemon
		if proto.Unmarshal(data, &message) != nil {
			return
		}
		d := mps.FromWire(&message)
		if d.Validate() != nil {
			return
		}
		if filepath.Base(d.Name) != d.Name || !filepath.IsLocal(d.Name) {
			t.Errorf("daemon %q", d.Name)
		}
		for _, uuid := range d.Devices {
			if strings.ContainsAny(string(uuid), ", \n=") {
				t.Errorf("device %q", uuid)
			}
		}
		if diff := cmp.Diff(d, mps.FromWire(mps.ToWire(d)), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("(-sent +received):\n%s", diff)
		}
	})
}

// FuzzReportFromWire reads answers that another version of the supervisor could send.
func FuzzReportFromWire(f *testing.F) {
	data, err := proto.Marshal(mps.ReportToWire(mps.Report{Revision: 7, Daemons: []mps.State{{Daemon: mps.Daemon{Name: "a"}, Phase: mps.Running, PID: 7}}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		var message mpspb.States
		if proto.Unmarshal(data, &message) != nil {
			return
		}
		if report := mps.ReportFromWire(&message); len(report.Daemons) != len(message.GetStates()) {
			t.Errorf("%d daemons of %d", len(report.Daemons), len(message.GetStates()))
		}
	})
}
