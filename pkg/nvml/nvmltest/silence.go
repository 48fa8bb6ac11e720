package nvmltest

import (
	"sync/atomic"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Silence makes GPUs stop answering probes. Unlike a hang of the simulated machine, a
// probe waits for a channel, so that a bubble's clock goes on.
type Silence struct {
	begun  atomic.Bool
	probes atomic.Int32
	end    chan struct{}
}

// NewSilence returns a Silence that hasn't begun.
func NewSilence() *Silence { return &Silence{end: make(chan struct{})} }

// Begin makes probes wait until End.
func (s *Silence) Begin() { s.begun.Store(true) }

// End ends the waits of all probes.
func (s *Silence) End() { close(s.end) }

// Probes returns how many probes there were since Begin.
func (s *Silence) Probes() int { return int(s.probes.Load()) }

// Library returns the library of a machine whose GPUs are silent.
func (s *Silence) Library(m *nvmlsim.Machine) gonvml.Interface { return silentLibrary{Library(m), s} }

type silentLibrary struct {
	gonvml.Interface

	silence *Silence
}

func (l silentLibrary) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(i)
	return silentDevice{d, l.silence}, ret
}

type silentDevice struct {
	gonvml.Device

	silence *Silence
}

func (d silentDevice) GetMemoryInfo() (gonvml.Memory, gonvml.Return) {
	if d.silence.begun.Load() {
		d.silence.probes.Add(1)
		<-d.silence.end
	}
	return d.Device.GetMemoryInfo()
}
