package healthmonitor_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// resetter resets GPUs of a node that a test controls.
type resetter struct {
	mu       sync.Mutex
	allowed  bool
	users    []string
	reserved error
	resets   int
	do       func() error
}

func (r *resetter) Facts(gpu.UUID) health.ResetFacts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return health.ResetFacts{Allowed: r.allowed, Claims: r.users}
}

func (r *resetter) Reserve(context.Context, gpu.UUID) (func(), error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return func() {}, r.reserved
}

func (r *resetter) Reset(context.Context, gpu.UUID) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resets++
	return false, r.do()
}

func (r *resetter) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *resetter) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.resets
}

// withResets restarts the node's plugin with a resetter.
func (n *node) withResets(r *resetter) *resetter {
	n.resets = r
	n.restart()
	return r
}

// says checks a part of the message of the GPU's first condition.
func (n *node) says(uuid gpu.UUID, want string) {
	n.t.Helper()
	synctest.Wait()
	known, _ := n.facts.State()
	i := slices.IndexFunc(known.Node.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
	if all := known.Node.GPUs[i].Conditions; len(all) == 0 || !strings.Contains(all[0].Message, want) {
		n.t.Errorf("conditions %+v, want %q", all, want)
	}
}

// TestReset: once no claim has any of the GPU, and then it takes claims again.
func TestReset(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		r := n.withResets(&resetter{allowed: true, users: []string{"claim default/train"}})
		r.do = func() error { n.set(gpu0, gpu.RecoveryNone, nil); return nil }
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(2 * time.Minute)
		n.has(gpu0, gpu.ResetRequired)
		n.says(gpu0, "when no claim has any of it; these have: claim default/train")
		r.change(func() { r.users, r.reserved = nil, errors.New("a prepare was faster") })
		time.Sleep(time.Minute)
		if r.count() > 0 {
			t.Fatal("reset while it is used")
		}
		r.change(func() { r.reserved = nil })
		time.Sleep(20 * time.Second)
		n.has(gpu0)
		if r.count() != 1 || n.eventsWith("GPUReset: GPU "+string(gpu0)+": the driver asks") != 1 || n.eventsWith("GPUReset: GPU "+string(gpu0)+" was reset") != 1 {
			t.Errorf("%d resets, events %q", r.count(), n.events)
		}
	})
}

// TestNoReset: without a policy, only an admin resets a GPU.
func TestNoReset(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		r := n.withResets(&resetter{})
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "nvidia-smi --gpu-reset -i "+string(gpu0))
		if r.count() > 0 {
			t.Errorf("%d resets", r.count())
		}
	})
}

// TestFailedResets: three times, and then an admin is told.
func TestFailedResets(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		r := n.withResets(&resetter{allowed: true, do: func() error { return errors.New("In use by another client") }})
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "3 times in a day: the reset failed: In use by another client; reboot the node")
		if r.count() != 3 || n.eventsWith("GPUReset: GPU "+string(gpu0)+": the reset failed: In use by another client; Tessera tries again") != 2 ||
			n.eventsWith("GPUReset: GPU "+string(gpu0)+": Tessera has tried to reset it 3 times") != 1 {
			t.Errorf("%d resets, events %q", r.count(), n.events)
		}
	})
}

// TestCrashDuringReset: the attempt is on disk before the GPU is reset, so a plugin
// that dies again and again in the middle doesn't reset the GPU again and again.
func TestCrashDuringReset(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		atReset := t.TempDir()
		r := n.withResets(&resetter{allowed: true})
		r.do = func() error { return os.CopyFS(atReset, os.DirFS(n.dir)) }
		n.set(gpu0, gpu.RecoveryReset, nil)
		n.monitor.SawEvent(gpu0)
		time.Sleep(10 * time.Second)
		if r.count() != 1 {
			t.Fatalf("%d resets", r.count())
		}
		n.stop()
		n.dir = atReset // as the first reset found it
		r.do = func() error { n.set(gpu0, gpu.RecoveryNone, nil); return nil }
		n.start()
		time.Sleep(20 * time.Second)
		n.says(gpu0, "the plugin ended while it reset the GPU; Tessera tries again")
		if r.count() != 1 {
			t.Errorf("%d resets at once after the crash", r.count()-1)
		}
		time.Sleep(time.Minute)
		n.has(gpu0)
		if r.count() != 2 {
			t.Errorf("%d resets, want one more", r.count())
		}
	})
}

// TestResetNeedsAJournal: an attempt that can't be stored isn't made.
func TestResetNeedsAJournal(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		r := n.withResets(&resetter{allowed: true})
		if err := os.WriteFile(filepath.Join(n.dir, "health"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "journal can't be written")
		if r.count() > 0 {
			t.Errorf("%d resets", r.count())
		}
	})
}
