package nvmltest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Simulated is the hardware port over a simulated machine in this process: the
// production Session on the engine instead of a library. Tests change the
// hardware through Machine: faults, processes, instances of others, lost GPUs.
type Simulated struct {
	*nvml.Session
	Machine *nvmlsim.Machine
}

// NewSimulated boots a machine, declared as nvmlsim.ParseSpec reads it
// ("8xh100-80gb", or YAML), and shuts it down at the end of the test. Creating
// instances needs root, as on hardware.
func NewSimulated(t testing.TB, machine string) *Simulated {
	t.Helper()
	s, err := simulate(filepath.Join(t.TempDir(), "state"), machine, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), s.Machine.Close()); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

func simulate(path, machine, name string) (*Simulated, error) {
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	if err != nil {
		return nil, err
	}
	d, err := nvmlsim.Describe(spec, name)
	if err != nil {
		return nil, err
	}
	m, err := nvmlsim.Create(path, d)
	if err != nil {
		return nil, err
	}
	return OpenSimulated(m), nil
}

// OpenSimulated opens another session with a machine, as another process would.
// It panics if that fails, which only a fault of the machine can cause.
func OpenSimulated(m *nvmlsim.Machine) *Simulated {
	s, err := OpenSimulatedBy(nvml.NewOpener(), m)
	if err != nil {
		panic(err)
	}
	return s
}

// Library returns the library of a machine, for tests that change its answers.
func Library(m *nvmlsim.Machine) gonvml.Interface { return library{m: m} }

// OpenSimulatedBy opens another session with a machine, as the process with the
// opener would.
func OpenSimulatedBy(o *nvml.Opener, m *nvmlsim.Machine) (*Simulated, error) {
	s, err := o.Init(Library(m), "simulated")
	if err != nil {
		return nil, err
	}
	return &Simulated{Session: s, Machine: m}, nil
}
