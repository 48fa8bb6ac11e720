package nvmlsim

import (
	"sync"
	"time"
)

const (
	// gpmInterval is the least time between two samples (nvml.h).
	gpmInterval = 100 * time.Millisecond
	// maxGPMSamples is how many samples a session can allocate (assumed): a caller that
	// doesn't free them meets it.
	maxGPMSamples = 1 << 12
)

// GPMSample is a buffer for the performance counters of a GPU or GPU instance at one
// time (GPU performance monitoring). It is allocated until Free.
type GPMSample struct {
	m *Machine

	mu sync.Mutex
	at time.Time // zero for an empty buffer
	of *GPU
	// instance is zero for a whole GPU.
	instance Instance
	busy     uint32
}

// gpmSamples are those that a session has allocated.
type gpmSamples struct {
	mu  sync.Mutex
	all map[*GPMSample]bool
}

// NewGPMSample is nvmlGpmSampleAlloc.
func (m *Machine) NewGPMSample() (*GPMSample, error) {
	if err := m.call("GpmSampleAlloc", AnyGPU); err != nil {
		return nil, err
	}
	m.gpm.mu.Lock()
	defer m.gpm.mu.Unlock()
	if len(m.gpm.all) >= maxGPMSamples {
		return nil, Memory
	}
	if m.gpm.all == nil {
		m.gpm.all = map[*GPMSample]bool{}
	}
	s := &GPMSample{m: m}
	m.gpm.all[s] = true
	return s, nil
}

// GPMSamples is how many samples the session has allocated and not freed.
func (m *Machine) GPMSamples() int {
	m.gpm.mu.Lock()
	defer m.gpm.mu.Unlock()
	return len(m.gpm.all)
}

// Free is nvmlGpmSampleFree. It returns InvalidArgument for a sample that was freed.
func (s *GPMSample) Free() error {
	s.m.gpm.mu.Lock()
	defer s.m.gpm.mu.Unlock()
	if !s.m.gpm.all[s] {
		return InvalidArgument
	}
	delete(s.m.gpm.all, s)
	return nil
}

func (s *GPMSample) allocated() bool {
	s.m.gpm.mu.Lock()
	defer s.m.gpm.mu.Unlock()
	return s.m.gpm.all[s]
}

// GPMSupported reports whether the GPU has performance monitoring: from Hopper on
// (nvml.h). That others answer so, rather than with NotSupported, is assumed.
func (g *GPU) GPMSupported() (bool, error) {
	return value(g, "GpmQueryDeviceSupport", g.hasGPM())
}

func (g *GPU) hasGPM() bool { return g.model.ArchitectureType() >= architectureHopper }

// Get is nvmlGpmSampleGet: it reads the counters of a whole GPU.
func (s *GPMSample) Get(g *GPU) error {
	if err := s.check(g, "GpmSampleGet"); err != nil {
		return err
	}
	s.fill(g, Instance{}, g.m.living(g.state().Processes))
	return nil
}

// GetInstance is nvmlGpmMigSampleGet: it reads the counters of a GPU instance. It returns
// InvalidArgument with MIG mode off, as seen on an H200 with driver 580, and for an instance
// that doesn't exist (assumed).
func (s *GPMSample) GetInstance(g *GPU, id uint32) error {
	if err := s.check(g, "GpmMigSampleGet"); err != nil {
		return err
	}
	for _, i := range g.state().Instances {
		if i.ID != id {
			continue
		}
		var in []Process
		for _, p := range g.m.living(g.state().Processes) {
			if p.GPUInstance == id {
				in = append(in, p)
			}
		}
		s.fill(g, Instance{g: g, id: i.ID, born: i.Born}, in)
		return nil
	}
	return InvalidArgument
}

func (s *GPMSample) check(g *GPU, call string) error {
	if err := g.call(call); err != nil {
		return err
	}
	switch {
	case !s.allocated():
		return InvalidArgument
	case !g.hasGPM():
		return NotSupported
	}
	return nil
}

func (s *GPMSample) fill(g *GPU, i Instance, running []Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.of, s.instance, s.busy = time.Now(), g, i, 0
	for _, p := range running {
		s.busy = min(s.busy+p.Utilization, 100)
	}
}

// gpmReading is the content of a sample.
type gpmReading struct {
	at       time.Time
	of       *GPU
	instance Instance
	busy     uint32
}

func (s *GPMSample) reading() gpmReading {
	s.mu.Lock()
	defer s.mu.Unlock()
	return gpmReading{s.at, s.of, s.instance, s.busy}
}

// GPMUtilization computes the percentage of the time between two samples, in either order,
// in which the GPU or instance computed; it assumes that the load was constant, as at the
// other sample. If they are too close to each other, it returns 0 without an error, as an
// H200 with driver 580 does under full load. It returns InvalidArgument unless both samples
// have been read, of the same GPU or instance (assumed).
func (s *GPMSample) GPMUtilization(other *GPMSample) (float64, error) {
	if !s.allocated() || !other.allocated() {
		return 0, InvalidArgument
	}
	a, b := s.reading(), other.reading()
	if a.of == nil || a.of != b.of || a.instance != b.instance {
		return 0, InvalidArgument
	}
	if b.at.Sub(a.at).Abs() < gpmInterval {
		b.busy = 0
	}
	return float64(b.busy), a.of.call("GpmMetricsGet")
}

// sampled reports whether a sample of the instance is allocated.
func (s *gpmSamples) sampled(i Instance) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for sample := range s.all {
		if sample.reading().instance == i {
			return true
		}
	}
	return false
}
