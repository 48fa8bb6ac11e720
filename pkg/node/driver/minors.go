package driver

import (
	"sync"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Minors keeps the numbers of the GPUs' device nodes in the CDI edits equal to the
// driver's. A switch of a GPU's MIG mode may change its number.
type Minors struct {
	specs *cdi.Specs

	mu       sync.Mutex    // held while numbers are passed on
	switched int           // how often a MIG mode was switched
	session  *nvml.Session // nil: none
}

// NewMinors returns Minors without a driver.
func NewMinors(specs *cdi.Specs) *Minors { return &Minors{specs: specs} }

// ModeSwitched passes on the number of a GPU's device node. It is called after the
// GPU's MIG mode was switched, before anything else is done with the GPU.
func (m *Minors) ModeSwitched(uuid gpu.UUID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.switched++
	if m.session == nil {
		return cdi.ErrNoDriver
	}
	minor, err := m.session.Minor(uuid)
	if err != nil {
		return err
	}
	return m.specs.SetMinor(uuid, minor)
}

// switches returns how often a MIG mode was switched.
func (m *Minors) switches() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.switched
}

// use sets the session to ask for numbers.
func (m *Minors) use(session *nvml.Session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.session = session
}

// drop ends the use of the session, so that it can be closed.
func (m *Minors) drop() {
	m.use(nil)
	_ = m.specs.SetDriver(nil) // nil never fails
}

// setDriver computes the CDI edits of a driver as it was read. It does nothing and
// returns false if a MIG mode was switched since switches returned since: device
// nodes may have other numbers now. With hostToo, it looks at the host's files again,
// too.
func (m *Minors) setDriver(d *cdi.Driver, since int, hostToo bool) (current bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.switched != since {
		return false, nil
	}
	if hostToo {
		return true, m.specs.SetDriver(d)
	}
	return true, m.specs.UpdateDriver(d)
}
