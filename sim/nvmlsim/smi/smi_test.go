package smi_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
)

// For any arguments nvidia-smi prints an answer and returns one of its exit
// codes, and the machine's state stays valid.
func FuzzRun(f *testing.F) {
	for _, line := range []string{
		"", "-L", "-q -x", "--query-gpu=uuid,mig.mode.current --format=csv,noheader", "-mig 1 -i 0", "-mig 2", "--gpu-reset -i 1", "-r",
		"mig", "mig -lgip", "mig -lgipp -i 0", "mig -lgi", "mig -lci", "mig -cgi 1g.10gb:4,19 -C", "mig -cgi 3g.40gb:4294967296", "mig -cgi ,", "mig -cgi :",
		"mig -cci 0,1c.3g.40gb -gi 2", "mig -cci", "mig -dci -ci 0 -gi 2,7", "mig -dgi -gi", "mig -i 9 -lgi", "mig -cgi 20 -i GPU-0", "mig -C",
		"compute-policy", "compute-policy -h", "compute-policy -l -i 0", "compute-policy -i 1 --set-timeslice=3", "compute-policy --set-timeslice 4294967297", "compute-policy -i",
		"-c 3 -i 1", "-c EXCLUSIVE_PROCESS", "-c 9", "-c", "--query-compute-apps=pid,process_name,used_gpu_memory --format=csv", "--query-compute-apps= --format=csv",
	} {
		f.Add(line)
	}
	spec, err := nvmlsim.ParseSpec([]byte("gpus: [{model: h100-80gb, migEnabled: true}, {model: a30}]"))
	if err != nil {
		f.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "fuzz")
	if err != nil {
		f.Fatal(err)
	}
	path := filepath.Join(f.TempDir(), "state")
	m, err := nvmlsim.Create(path, d)
	if err != nil {
		f.Fatal(err)
	}
	defer m.Close()
	f.Fuzz(func(t *testing.T, line string) {
		var out strings.Builder
		code := smi.Run(strings.Fields(line), &out, func() (*nvmlsim.Machine, error) { return nvmlsim.Open(path) })
		if code < 0 || code > 255 || out.Len() == 0 {
			t.Errorf("nvidia-smi %s: exit code %d, said %q", line, code, out.String())
		}
		for _, g := range m.State().GPUs {
			for i, a := range g.Instances {
				for _, b := range g.Instances[:i] {
					if a.ID == b.ID || (a.Start < b.Start+b.Size && b.Start < a.Start+a.Size) {
						t.Errorf("nvidia-smi %s: instances %+v and %+v overlap", line, a, b)
					}
				}
			}
		}
	})
}
