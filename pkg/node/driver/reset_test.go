package driver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// awaitsClosed returns a channel that has something once for each reset for which NVML was
// closed.
func (f *fixture) awaitsClosed() <-chan struct{} {
	closed := make(chan struct{}, 10)
	f.Steps = failpoint.Call(func(step string) {
		if step == "reset.closed" {
			closed <- struct{}{}
		}
	})
	return closed
}

// TestReset checks that a GPU is reset although the plugin has NVML open, and that
// meanwhile the facts stay and users of other GPUs wait.
func TestReset(t *testing.T) {
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Cleanup(func() { _, _ = m.ClearFaults(), m.Heal(1) })
	f := newFixture(t)
	closed := f.awaitsClosed()
	f.start(t)
	f.awaitHardware(t)
	uuid := gpu.UUID(installed.Machine.GPUs[1].UUID)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.SetRecoveryAction(1, 1))
	must(m.AddProcess(1, nvmlsim.Process{PID: 7, GPUInstance: nvmlsim.NoInstance, ComputeInstance: nvmlsim.NoInstance}))
	if err := f.Health.Reset(t.Context(), uuid); err == nil || !strings.Contains(err.Error(), "In use by another client") || errors.Is(err, healthmonitor.ErrResetImpossible) {
		t.Errorf("reset of a GPU that is used: %v", err)
	}
	<-closed
	must(m.RemoveProcess(1, 7))

	must(m.Fault(nvmlsim.Fault{Call: "DeviceReset", GPU: 1, Hang: true}))
	reset, found := make(chan error), make(chan error)
	go func() { reset <- f.Health.Reset(t.Context(), uuid) }()
	<-closed
	go func() { found <- f.find(t) }()
	if err := f.Facts.Trouble(); err != nil {
		t.Errorf("during the reset there is no driver: %v", err)
	}
	must(m.ClearFaults())
	if err := <-reset; err != nil {
		t.Errorf("reset: %v", err)
	}
	if err := <-found; err == nil || errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("a look at another GPU during the reset: %v, want that there is no such partition", err)
	}
	if h := m.State().GPUs[1].Health; h.RecoveryAction != 0 {
		t.Errorf("after the reset: %+v", h)
	}
}

// TestResetOutlivesTheFollowersContext checks that a reset which has begun goes on when the
// plugin is told to end, and that AwaitReset waits for it.
func TestResetOutlivesTheFollowersContext(t *testing.T) {
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Cleanup(func() { _, _ = m.ClearFaults(), m.Heal(1) })
	f := newFixture(t)
	begun := f.awaitsClosed()
	f.start(t)
	f.awaitHardware(t)
	if err := errors.Join(m.SetRecoveryAction(1, 1), m.Fault(nvmlsim.Fault{Call: "DeviceReset", GPU: 1, Hang: true})); err != nil {
		t.Fatal(err)
	}
	reset, awaited, ended := make(chan error, 1), make(chan error, 1), make(chan struct{})
	go func() { reset <- f.Health.Reset(t.Context(), gpu.UUID(installed.Machine.GPUs[1].UUID)) }()
	<-begun
	if !f.IsResetting() {
		t.Error("the reset doesn't count as under way")
	}
	go func() {
		defer close(ended)
		f.stop()
	}()
	go func() {
		f.AwaitReset()
		if m.State().GPUs[1].RecoveryAction != 0 {
			awaited <- errors.New("AwaitReset has returned before the reset has ended")
		}
		close(awaited)
	}()
	if err := m.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if err := <-reset; err != nil {
		t.Errorf("reset: %v", err)
	}
	if err := <-awaited; err != nil {
		t.Error(err)
	}
	<-ended
	if f.IsResetting() {
		t.Error("the reset counts as under way after its end")
	}
}

// TestNoResetBesideAWedgedGPU checks that NVML isn't closed while a call doesn't
// return: it couldn't be.
func TestNoResetBesideAWedgedGPU(t *testing.T) {
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Cleanup(func() { _ = m.Heal(0) })
	f := newFixture(t)
	closed := f.awaitsClosed()
	f.start(t)
	f.awaitHardware(t)
	if err := m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Wedged = true; return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, f, "that the GPU doesn't respond", func() bool {
		s, _ := f.Facts.State()
		return len(s.Node.GPUs) == 2 && len(s.Node.GPUs[0].Conditions) > 0
	})
	if err := f.Health.Reset(t.Context(), gpu.UUID(installed.Machine.GPUs[1].UUID)); !errors.Is(err, nvml.ErrNotResponding) {
		t.Errorf("reset beside a wedged GPU: %v", err)
	}
	if len(closed) > 0 {
		t.Error("the hardware was taken from its users")
	}
	f.stop()
	if !f.StaysOpen() {
		t.Error("the session counts as closed while a call may still change the hardware")
	}
	if err := m.Heal(0); err != nil {
		t.Fatal(err)
	}
	for f.Opener.closeRest() != nil { // while the call hasn't returned
		<-time.After(20 * time.Millisecond)
	}
}

// TestResetAfterASessionStayedOpen checks that a session which could not be closed, because
// a call didn't return, is closed when the call has: NVML keeps GPUs open for it, and a reset
// would find them in use.
func TestResetAfterASessionStayedOpen(t *testing.T) {
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Cleanup(func() { _ = m.Heal(0) })
	f := startFixture(t)
	f.awaitHardware(t)
	answers := func() bool {
		s, _ := f.Facts.State()
		return len(s.Node.GPUs) == 2 && len(s.Node.GPUs[0].Conditions) == 0
	}
	if err := m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Wedged = true; return nil }); err != nil {
		t.Fatal(err)
	}
	eventually(t, f, "that the GPU doesn't respond", func() bool { return !answers() })
	back := moveAside(t, installed.Root)
	eventually(t, f, "the driver's loss", func() bool { return f.Facts.Trouble() != nil })
	if !f.StaysOpen() {
		t.Error("the session was closed while a call didn't return")
	}
	back()
	f.awaitHardware(t)
	if err := m.Heal(0); err != nil {
		t.Fatal(err)
	}
	eventually(t, f, "that the GPU responds", answers)
	if err := f.Health.Reset(t.Context(), gpu.UUID(installed.Machine.GPUs[1].UUID)); err != nil {
		t.Errorf("reset: %v", err)
	}
	if f.StaysOpen() {
		t.Error("the first session is still open")
	}
}

// TestResetIsExplained checks the error of a failed reset, and whether it is tried again.
func TestResetIsExplained(t *testing.T) {
	failed := errors.New("exit status 255")
	hangs := func(ctx context.Context, _ ...string) (string, error) { <-ctx.Done(); return "", failed }
	says := func(out string, err error) SMIFunc {
		return func(context.Context, ...string) (string, error) { return out, err }
	}
	for name, c := range map[string]struct {
		smi        SMIFunc
		within     time.Duration
		want       string
		impossible bool
	}{
		"hangs":  {hangs, time.Millisecond, "nvidia-smi hangs", true},
		"guest":  {says("GPU 00000000:00:04.0: Not Supported\n", failed), time.Minute, "says: Not Supported", true},
		"in use": {says("The following GPUs could not be reset:\n  GPU X: In use by another client\n", failed), time.Minute, "says: In use by another client; a program", false},
		"other":  {says("Unknown  Error\n", failed), time.Minute, "says: Unknown Error", false},
		"silent": {says(" \n", failed), time.Minute, "exit status 255", false},
	} {
		err := reset(t.Context(), c.smi, "GPU-1", c.within)
		if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, healthmonitor.ErrResetImpossible) != c.impossible {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzReset reads any text as nvidia-smi's about a reset. It is never taken for a reset
// that was done, and its report is one line, as a condition's message has it.
func FuzzReset(f *testing.F) {
	f.Add("The following GPUs could not be reset:\n  GPU 00000000:C1:00.0: In use by another client\n\n1 device is currently being used.\n")
	f.Add("GPU 00000000:C1:00.0: Not Supported\n")
	f.Add("\xff\n")
	f.Fuzz(func(t *testing.T, out string) {
		refused := errors.New("exit status 1")
		err := reset(t.Context(), func(context.Context, ...string) (string, error) { return out, refused }, "GPU-1", time.Minute)
		if err == nil || strings.ContainsAny(err.Error(), "\n\r") || !utf8.ValidString(err.Error()) {
			t.Errorf("%q", err)
		}
	})
}
