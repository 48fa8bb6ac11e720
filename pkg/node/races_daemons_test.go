package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// supervisor is an MPS supervisor whose daemons are processes of the simulated machine.
// Its methods are those of *mps.Client. Ends and restarts of daemons take a while, and
// change nothing while the supervisor is away.
type supervisor struct {
	c   *computer
	dir string // of the daemons, a path of the host
	// pace returns how long an operation takes.
	pace func(key string, most time.Duration) time.Duration
	// wrong is called when the plugin breaks a rule.
	wrong func(format string, args ...any)

	mu       sync.Mutex
	away     bool
	revision mps.Revision
	pids     int
	all      map[string]mps.State
	watchers map[chan struct{}]bool
}

// supervisorPatience is how long a client waits for a supervisor that is away, as
// mps.Client does.
const supervisorPatience = 10 * time.Second

func (s *supervisor) setAway(away bool) { s.change(func() { s.away = away }) }

// change notifies the watchers after f.
func (s *supervisor) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	f()
	for w := range s.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// until waits until the condition holds, which is called with the lock held.
func (s *supervisor) until(ctx context.Context, holds func() bool) error {
	for {
		s.mu.Lock()
		ok := holds()
		s.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// answer waits for a supervisor that is away, and then for its answer.
func (s *supervisor) answer(ctx context.Context, call string, patience time.Duration) error {
	soon, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.until(soon, func() bool { return !s.away })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", call, mps.ErrUnavailable)
	}
	return nil
}

// Ensure implements sharing.Daemons.
func (s *supervisor) Ensure(ctx context.Context, d mps.Daemon) (mps.State, error) {
	if err := errors.Join(s.answer(ctx, "ensure", supervisorPatience), d.Validate()); err != nil {
		return mps.State{}, err
	}
	gone := func() bool { return s.all[d.Name].Phase != mps.Ending }
	if err := s.until(ctx, gone); err != nil {
		return mps.State{}, err
	}
	var state mps.State
	var err error
	s.change(func() {
		have, ok := s.all[d.Name]
		switch {
		case ok && slices.Equal(have.Devices, d.Devices):
			have.Daemon, have.Revision = d, s.revision
			s.all[d.Name], state = have, have
			return
		case ok:
			s.wrong("MPS daemon %s has %v, and is to have %v", d.Name, have.Devices, d.Devices)
			s.end(have)
		}
		s.mayStart(d)
		state = mps.State{Daemon: d, PipeDir: filepath.Join(s.dir, d.Name, "pipe"), Phase: mps.Running}
		if state, err = s.start(state); err == nil {
			err = os.MkdirAll(s.c.host.Path(state.PipeDir), 0o755)
		}
	})
	return state, err
}

// mayStart checks the rules for a new daemon. Needs the lock.
func (s *supervisor) mayStart(d mps.Daemon) {
	for _, other := range s.all {
		if slices.ContainsFunc(d.Devices, func(u gpu.UUID) bool { return slices.Contains(other.Devices, u) }) {
			s.wrong("MPS daemons %s and %s are on one device", other.Name, d.Name)
		}
	}
	for i, g := range s.c.machine.State().GPUs {
		if slices.Contains(d.Devices, gpu.UUID(installed.Machine.GPUs[i].UUID)) && g.ComputeMode == 0 {
			s.wrong("MPS daemon %s starts on GPU %d in compute mode %s", d.Name, i, nvml.ComputeDefault)
		}
	}
}

// start starts a daemon on devices that there are; its server follows. Needs the lock.
func (s *supervisor) start(d mps.State) (mps.State, error) {
	for _, uuid := range d.Devices {
		if _, err := s.c.mayServe(uuid); err != nil {
			return d, fmt.Errorf("start MPS daemon %s: %w", d.Name, err)
		}
	}
	s.pids += 2
	d.PID, d.ServerPID, d.Phase, d.Revision = s.pids, 0, mps.Running, s.revision
	s.all[d.Name] = d
	go s.startServer(d)
	return d, nil
}

// startServer starts the server of a daemon, as soon as the compute mode and faults let it.
func (s *supervisor) startServer(d mps.State) {
	for serves := false; !serves; {
		time.Sleep(s.pace("server starts", time.Second))
		s.change(func() {
			now := s.all[d.Name]
			if serves = now.PID != d.PID || now.Phase != mps.Running; serves {
				return // it has ended
			}
			for _, uuid := range d.Devices {
				if open, err := s.c.mayServe(uuid); err != nil || !open {
					return
				}
			}
			now.ServerPID, now.Revision = d.PID+1, s.revision
			for _, uuid := range d.Devices {
				if err := s.c.use(uuid, now.ServerPID); err != nil { // a fault of the hardware meets it, too
					s.unuse(now)
					return
				}
			}
			serves = true
			s.all[d.Name] = now
		})
	}
}

func (s *supervisor) unuse(d mps.State) {
	for i := range installed.Machine.GPUs {
		_ = s.c.machine.RemoveProcess(i, uint32(d.ServerPID)) // it may be on another GPU
	}
}

// end takes a daemon and its directory away. Needs the lock.
func (s *supervisor) end(d mps.State) {
	s.unuse(d)
	delete(s.all, d.Name)
	if err := os.RemoveAll(s.c.host.Path(filepath.Join(s.dir, d.Name))); err != nil {
		s.wrong("%v", err)
	}
}

// BeginStop implements sharing.Daemons.
func (s *supervisor) BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error) {
	if err := s.answer(ctx, "begin to stop", 0); err != nil {
		return false, 0, err
	}
	s.change(func() {
		revision = s.revision
		d, ok := s.all[name]
		if ended = !ok; ended || d.Phase == mps.Ending {
			return
		}
		d.Phase, d.Revision = mps.Ending, s.revision
		s.all[name] = d
		go func() {
			time.Sleep(s.pace("daemon ends", 2*time.Second))
			_ = s.until(context.Background(), func() bool { return !s.away })
			s.change(func() {
				if now := s.all[name]; now.PID == d.PID && now.Phase == mps.Ending {
					s.end(now)
				}
			})
		}()
	})
	return ended, revision, nil
}

// Stop implements sharing.Daemons.
func (s *supervisor) Stop(ctx context.Context, name string) (revision mps.Revision, err error) {
	if _, _, err := s.BeginStop(ctx, name); err != nil {
		return 0, err
	}
	err = s.until(ctx, func() bool {
		_, there := s.all[name]
		revision = s.revision
		return !there || s.away
	})
	if err == nil {
		err = s.answer(ctx, "stop", 0)
	}
	return revision, err
}

// List says which daemons there are.
func (s *supervisor) List(ctx context.Context) (mps.Report, error) {
	if err := s.answer(ctx, "list", 0); err != nil {
		return mps.Report{}, err
	}
	r := s.report()
	time.Sleep(s.pace("report", 50*time.Millisecond)) // others may be quicker
	return r, ctx.Err()
}

func (s *supervisor) report() mps.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := mps.Report{Revision: s.revision}
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		r.Daemons = append(r.Daemons, s.all[name])
	}
	return r
}

// Watch implements sharing.Daemons.
func (s *supervisor) Watch(ctx context.Context, f func(mps.Report)) error {
	changed := make(chan struct{}, 1)
	s.mu.Lock()
	s.watchers[changed] = true
	s.mu.Unlock()
	defer s.change(func() { delete(s.watchers, changed) })
	for {
		r, err := s.List(ctx)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		f(r)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// die kills the daemons of a GPU, which are started again after a while.
func (s *supervisor) die(pos int, after time.Duration) {
	s.change(func() {
		for name, d := range s.all {
			if d.Phase != mps.Running || !slices.ContainsFunc(d.Devices, func(u gpu.UUID) bool { return s.c.position(u) == pos }) {
				continue
			}
			s.unuse(d)
			d.Phase, d.PID, d.ServerPID, d.Message, d.Revision = mps.Failed, 0, 0, "killed", s.revision
			d.Restarts++
			s.all[name] = d
			go s.restart(name, after)
		}
	})
}

// restart starts a daemon that has died, unless somebody has stopped it.
func (s *supervisor) restart(name string, after time.Duration) {
	time.Sleep(after)
	_ = s.until(context.Background(), func() bool { return !s.away })
	s.change(func() {
		d, ok := s.all[name]
		if !ok || d.Phase != mps.Failed {
			return
		}
		d.Message = ""
		if _, err := s.start(d); err != nil {
			go s.restart(name, time.Second)
		}
	})
}

// endAll ends all daemons, and removes the run directory.
func (s *supervisor) endAll() error {
	s.change(func() {
		for _, d := range s.all {
			s.end(d)
		}
	})
	return os.RemoveAll(s.c.host.Path(filepath.Dir(s.dir)))
}

// position returns the number of the GPU that the UUID is of, or that has the MIG device;
// -1 if there is none.
func (c *computer) position(uuid gpu.UUID) int {
	if i := slices.IndexFunc(installed.Machine.GPUs, func(g nvmlsim.Identity) bool { return g.UUID == string(uuid) }); i >= 0 {
		return i
	}
	for i, g := range installed.Machine.GPUs {
		mig, err := c.hw.MIG(gpu.UUID(g.UUID))
		if err == nil && slices.ContainsFunc(mig.Instances, func(in gpu.Instance) bool { return in.UUID == uuid }) {
			return i
		}
	}
	return -1
}

// mayServe returns an error if there is no such GPU, or MIG device, for an MPS server, and
// whether the compute mode lets one use it.
func (c *computer) mayServe(uuid gpu.UUID) (open bool, _ error) {
	pos := c.position(uuid)
	if pos < 0 {
		return false, fmt.Errorf("there is no device %s", uuid)
	}
	const prohibited = 2
	g := c.machine.State().GPUs[pos]
	if uuid.IsWhole() && g.MIGCurrent {
		return false, fmt.Errorf("GPU %s is in MIG mode", uuid)
	}
	return g.ComputeMode != prohibited, nil
}

// use has a process use a GPU or a MIG device.
func (c *computer) use(uuid gpu.UUID, pid int) error {
	p := nvmlsim.Process{PID: uint32(pid), GPUInstance: nvmlsim.NoInstance, ComputeInstance: nvmlsim.NoInstance}
	for i := range installed.Machine.GPUs {
		whole := gpu.UUID(installed.Machine.GPUs[i].UUID)
		if whole == uuid {
			return c.machine.AddProcess(i, p)
		}
		mig, err := c.hw.MIG(whole)
		if err != nil {
			return err
		}
		for _, in := range mig.Instances {
			if in.UUID == uuid {
				p.GPUInstance, p.ComputeInstance = uint32(in.GPUInstanceID), uint32(in.ComputeInstanceID)
				return c.machine.AddProcess(i, p)
			}
		}
	}
	return fmt.Errorf("there is no device %s", uuid)
}
