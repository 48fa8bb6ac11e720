package sharing_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	gpu0 = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

// machine has the parts under a Manager that outlive it: the supervisor, the
// GPUs' settings, nvidia-smi and the claims' CDI specs. It notes what must never be.
type machine struct {
	mu       sync.Mutex
	prepared map[string]bool // the UIDs of the claims with a CDI spec
	away     bool            // the supervisor
	daemons  map[string]mps.State
	revision mps.Revision // of the daemons
	// old is a supervisor of a release without revisions.
	old bool
	// lag is the time that reports of all daemons take to arrive, as on a busy machine.
	lag       time.Duration
	pids      int
	modes     map[gpu.UUID]nvml.ComputeMode
	intervals map[gpu.UUID]string
	watchers  map[chan struct{}]bool
	calls     []string
	faults    []string
	// ends: the supervisor ends after each report.
	ends bool
	// lingers has daemons whose end has begun be there until end is called.
	lingers bool
	// exclusive says that no daemon may have a whole GPU in another mode.
	exclusive bool
	// step is called after each change, as deep inside a call as it happens.
	step func(string)
	// fault, which may be nil, is asked before each call.
	fault func(call string) error
}

func newMachine() *machine {
	return &machine{
		revision: 1, prepared: map[string]bool{}, daemons: map[string]mps.State{}, watchers: map[chan struct{}]bool{}, step: func(string) {}, exclusive: true,
		modes:     map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeDefault, gpu1: nvml.ComputeDefault},
		intervals: map[gpu.UUID]string{gpu0: "Default", gpu1: "Default"},
	}
}

func (m *machine) setSpec(claimUID string, there bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.prepared, claimUID)
	if there {
		m.prepared[claimUID] = true
	}
}

// specs returns the UIDs of the claims with a CDI spec.
func (m *machine) specs() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.prepared))
}

func (m *machine) enter(call string) error {
	m.mu.Lock()
	m.calls = append(m.calls, call)
	fault := m.fault
	m.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(call)
}

// set changes how the machine behaves, which nobody is told of.
func (m *machine) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

// stepped calls step.
func (m *machine) stepped(name string) {
	m.mu.Lock()
	step := m.step
	m.mu.Unlock()
	step(name)
}

// do changes the machine and wakes the watchers.
func (m *machine) do(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.revision++
	change()
	for w := range m.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

func (m *machine) wrong(format string, args ...any) {
	m.faults = append(m.faults, fmt.Sprintf(format, args...))
}

func (m *machine) asked(ctx context.Context, call string) error {
	if err := m.enter(call); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away {
		return fmt.Errorf("%s: %w", call, mps.ErrUnavailable)
	}
	return ctx.Err()
}

func (m *machine) Ensure(ctx context.Context, d mps.Daemon) (mps.State, error) {
	if err := errors.Join(m.asked(ctx, "ensure "+d.Name), d.Validate()); err != nil {
		return mps.State{}, err
	}
	m.mu.Lock()
	for m.daemons[d.Name].Phase == mps.Ending {
		m.mu.Unlock()
		time.Sleep(time.Millisecond)
		m.mu.Lock()
	}
	m.mu.Unlock()
	s := mps.State{Daemon: d, PID: m.nextPID(d.Name), PipeDir: "/run/d/" + d.Name + "/pipe", Phase: mps.Running}
	m.do(func() {
		for _, uuid := range d.Devices {
			if mode, whole := m.modes[uuid]; whole && m.exclusive && mode == nvml.ComputeDefault {
				m.wrong("daemon %s is started with GPU %s in mode %s", d.Name, uuid, mode)
			}
			for _, other := range m.daemons {
				if other.Name != d.Name && slices.Contains(other.Devices, uuid) {
					m.wrong("daemons %s and %s are both on %s", d.Name, other.Name, uuid)
				}
			}
		}
		if have, ok := m.daemons[d.Name]; ok && !slices.Equal(have.Devices, d.Devices) {
			m.wrong("daemon %s is restarted with other devices: %v, it has %v", d.Name, d.Devices, have.Devices)
		}
		s.Revision = m.now()
		m.daemons[d.Name] = s
	})
	m.stepped("machine.ensured")
	return s, nil
}

// now is the revision to say. Needs the lock.
func (m *machine) now() mps.Revision {
	if m.old {
		return 0
	}
	return m.revision
}

// nextPID is the process id of the daemon, or of the one that is to be started.
func (m *machine) nextPID(name string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.daemons[name]; s.Phase == mps.Running {
		return s.PID
	}
	m.pids++
	return m.pids
}

func (m *machine) Stop(ctx context.Context, name string) (revision mps.Revision, err error) {
	if err := m.asked(ctx, "stop "+name); err != nil {
		return 0, err
	}
	for {
		m.mu.Lock()
		ending := m.lingers && m.daemons[name].Phase == mps.Ending
		m.mu.Unlock()
		if !ending {
			break
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	m.do(func() {
		delete(m.daemons, name)
		revision = m.now()
	})
	m.stepped("machine.stopped")
	return revision, nil
}

func (m *machine) BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error) {
	m.mu.Lock()
	s, ok := m.daemons[name]
	lingers := m.lingers && ok
	m.mu.Unlock()
	if !lingers {
		revision, err = m.Stop(ctx, name)
		return err == nil, revision, err
	}
	if err := m.asked(ctx, "begin stop "+name); err != nil {
		return false, 0, err
	}
	s.Phase = mps.Ending
	m.do(func() {
		m.daemons[name] = s
		revision = m.now()
	})
	m.stepped("machine.stopBegun")
	return false, revision, nil
}

// end ends the daemons whose end has begun.
func (m *machine) end() {
	m.do(func() {
		maps.DeleteFunc(m.daemons, func(_ string, s mps.State) bool { return s.Phase == mps.Ending })
	})
}

// travel takes the time until a report has arrived.
func (m *machine) travel() {
	m.mu.Lock()
	lag := m.lag
	m.mu.Unlock()
	if lag > 0 {
		time.Sleep(lag)
	}
}

func (m *machine) report() mps.Report {
	m.mu.Lock()
	defer m.mu.Unlock()
	return mps.Report{Revision: m.now(), Daemons: slices.Collect(maps.Values(m.daemons))}
}

func (m *machine) Watch(ctx context.Context, f func(mps.Report)) error {
	if err := m.asked(ctx, "watch"); err != nil {
		return err
	}
	changed := make(chan struct{}, 1)
	m.mu.Lock()
	m.watchers[changed] = true
	m.mu.Unlock()
	defer m.do(func() { delete(m.watchers, changed) })
	for {
		report := m.report()
		m.travel()
		f(report)
		if m.endsNow() {
			time.Sleep(time.Second)
			return mps.ErrUnavailable
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		m.mu.Lock()
		away := m.away
		m.mu.Unlock()
		if away {
			return mps.ErrUnavailable
		}
	}
}

func (m *machine) endsNow() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ends
}

func (m *machine) Left() ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.daemons)), nil
}

func (m *machine) ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error) {
	if err := m.enter("mode " + string(uuid)); err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.modes[uuid], nil
}

func (m *machine) SetComputeMode(uuid gpu.UUID, mode nvml.ComputeMode) error {
	if err := m.enter("set mode " + string(uuid)); err != nil {
		return err
	}
	m.do(func() {
		for _, d := range m.daemons {
			if mode == nvml.ComputeDefault && slices.Contains(d.Devices, uuid) {
				m.wrong("GPU %s is set to %s while it has daemon %s", uuid, mode, d.Name)
			}
		}
		m.modes[uuid] = mode
	})
	m.stepped("machine.mode")
	return nil
}

// smi is nvidia-smi, as far as it is for compute policies.
func (m *machine) smi(_ context.Context, args ...string) (string, error) {
	call := strings.Join(args[3:], " ")
	uuid := gpu.UUID(args[2])
	if err := m.enter(call); err != nil {
		return "Failed to set timeslice policy for GPU 0 : Not Supported", err
	}
	names := []string{"Default", "Short", "Medium", "Long"}
	if args[3] == "--set-timeslice" {
		m.do(func() { m.intervals[uuid] = names[args[4][0]-'0'] })
		m.stepped("machine.interval")
		return "Successfully set timeslice policy with value " + args[4] + " for GPU 0\n", nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return list(m.intervals[uuid]), nil
}

// list is how nvidia-smi prints the policies of one GPU (driver 580).
func list(interval string) string {
	return "+-------------------------------------+\n" +
		"| GPU compute policies:               |\n" +
		"| GPU     Name           Value        |\n" +
		"|=====================================|\n" +
		fmt.Sprintf("|   0   Timeslice       %-14s|\n", interval) +
		"+-------------------------------------+\n"
}

// reboot forgets all that a reboot makes the machine forget.
func (m *machine) reboot() {
	m.do(func() {
		clear(m.daemons)
		for uuid := range m.modes {
			m.modes[uuid], m.intervals[uuid] = nvml.ComputeDefault, "Default"
		}
	})
}

// count returns how often calls with that beginning were made.
func (m *machine) count(call string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, c := range m.calls {
		if strings.HasPrefix(c, call) {
			n++
		}
	}
	return n
}

// die makes a daemon end, which the supervisor starts again. Needs the lock.
func (m *machine) die(name string) {
	s := m.daemons[name]
	s.Phase, s.PID, s.Restarts, s.Revision = mps.Starting, 0, 1, m.now()
	m.daemons[name] = s
}

// watchModes records the compute modes that are set from now on. The result returns them.
func (m *machine) watchModes() func() []nvml.ComputeMode {
	var modes []nvml.ComputeMode
	m.set(func() {
		step := m.step
		m.step = func(name string) {
			step(name)
			m.set(func() { modes = append(modes, m.modes[gpu0]) })
		}
	})
	return func() (all []nvml.ComputeMode) {
		m.set(func() { all = slices.Clone(modes) })
		return all
	}
}
