package healthmonitor_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// resetting restarts the plugin with a way to reset GPUs, and returns how often one was. If a
// policy allows it, gpu0 may be reset.
func (n *node) resetting(allowed bool, do func() error) (resets func() int) {
	var count atomic.Int32
	n.reset = func() error {
		count.Add(1)
		return do()
	}
	n.restart()
	if allowed {
		n.allow()
	}
	return func() int { return int(count.Load()) }
}

// allow lets gpu0 be reset, as a policy does.
func (n *node) allow() {
	inv := &v1alpha1.GPUInventory{}
	inv.Spec.GPUs = []v1alpha1.GPUSpec{{UUID: string(gpu0), Reset: v1alpha1.ResetWhenIdle}}
	n.monitor.SawInventory(inv)
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
		n.use(pod)
		resets := n.resetting(true, func() error { n.set(gpu0, gpu.RecoveryNone, nil); return nil })
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(2 * time.Minute)
		n.has(gpu0, gpu.ResetRequired)
		n.says(gpu0, "when no claim has any of it; these have: claim default/training")
		done, err := n.preparer.Exclude(t.Context(), gpu0, "a prepare was faster")
		if err != nil {
			t.Fatal(err)
		}
		n.use()
		time.Sleep(time.Minute)
		if resets() > 0 {
			t.Fatal("reset while it is used")
		}
		done()
		time.Sleep(20 * time.Second)
		n.has(gpu0)
		if resets() != 1 || n.eventsWith("GPUReset: GPU "+string(gpu0)+": the driver asks") != 1 || n.eventsWith("GPUReset: GPU "+string(gpu0)+" was reset") != 1 {
			t.Errorf("%d resets, events %q", resets(), n.events)
		}
	})
}

// TestNoReset: without a policy, only an admin resets a GPU.
func TestNoReset(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.use()
		resets := n.resetting(false, nil)
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "nvidia-smi --gpu-reset -i "+string(gpu0))
		if resets() > 0 {
			t.Errorf("%d resets", resets())
		}
	})
}

// TestFailedResets: three times, and then an admin is told.
func TestFailedResets(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.use()
		resets := n.resetting(true, func() error { return errors.New("In use by another client") })
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "3 times in a day: the reset failed: In use by another client; reboot the node")
		if resets() != 3 || n.eventsWith("GPUReset: GPU "+string(gpu0)+": the reset failed: In use by another client; Tessera tries again") != 2 ||
			n.eventsWith("GPUReset: GPU "+string(gpu0)+": Tessera has tried to reset it 3 times") != 1 {
			t.Errorf("%d resets, events %q", resets(), n.events)
		}
	})
}

// TestCrashDuringReset: the attempt is on disk before the GPU is reset, so a plugin
// that dies again and again in the middle doesn't reset the GPU again and again.
func TestCrashDuringReset(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		atReset := t.TempDir()
		n.use()
		first := n.resetting(true, func() error { return os.CopyFS(atReset, os.DirFS(n.dir)) })
		n.set(gpu0, gpu.RecoveryReset, nil)
		n.monitor.SawEvent(gpu0)
		time.Sleep(10 * time.Second)
		if first() != 1 {
			t.Fatalf("%d resets", first())
		}
		n.stop()
		n.dir = atReset // as the first reset found it
		resets := n.resetting(true, func() error { n.set(gpu0, gpu.RecoveryNone, nil); return nil })
		time.Sleep(20 * time.Second)
		n.says(gpu0, "the plugin ended while it reset the GPU; Tessera tries again")
		if resets() != 0 {
			t.Errorf("%d resets at once after the crash", resets())
		}
		time.Sleep(time.Minute)
		n.has(gpu0)
		if resets() != 1 {
			t.Errorf("%d resets, want one more", resets())
		}
	})
}

// TestResetNeedsAJournal: an attempt that can't be stored isn't made.
func TestResetNeedsAJournal(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.use()
		resets := n.resetting(true, nil)
		if err := os.WriteFile(filepath.Join(n.dir, "health"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(time.Hour)
		n.says(gpu0, "journal can't be written")
		if resets() > 0 {
			t.Errorf("%d resets", resets())
		}
	})
}
