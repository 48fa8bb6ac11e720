//go:build integration

package crash_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestReset kills the plugin in a reset of a GPU. The next one knows of the attempt, resets
// the GPU unless it was reset, and the GPU takes claims again.
func TestReset(t *testing.T) {
	t.Parallel()
	n := newSickNode(t)
	p := n.serve(t)
	n.mustReset(t, p)
	// The journal's file is there before its directory is durable.
	wanted := sets.New("journal.health.put.durable", "journal.health.put.durable#2", "reset.closed", "reset.done", "journal.health.put.durable#3", "journal.health.put.durable#4")
	var steps []string
	err := p.poll(t, func() bool {
		steps = p.ran(t)
		return sets.New(steps...).IsSuperset(wanted)
	})
	if err != nil {
		t.Errorf("the reset doesn't come to all of %v; its steps are %v", sets.List(wanted), steps)
	}
	// Between those, the journal is the same store as in other operations.
	matters := func(step string) bool {
		return strings.HasPrefix(step, "reset.") || strings.HasPrefix(step, "journal.health.put.created") || strings.HasPrefix(step, "journal.health.put.durable")
	}
	for _, step := range steps {
		if matters(step) {
			t.Run(step, func(t *testing.T) {
				t.Parallel()
				n := newSickNode(t)
				n.start(t, step).waitDead(t)
				n.recovers(t)
			})
		}
	}
	t.Run("while nvidia-smi runs", func(t *testing.T) {
		t.Parallel()
		n := newSickNode(t)
		n.fault(t, nvmlsim.Fault{Call: "DeviceReset", GPU: 1, Hang: true})
		p := n.serve(t)
		if err := p.poll(t, func() bool { return slices.Contains(p.ran(t), "reset.closed") }); err != nil {
			t.Fatal(err)
		}
		p.kill()
		if err := n.hardware.ClearFaults(); err != nil {
			t.Fatal(err)
		}
		n.recovers(t)
	})
}

// newSickNode makes a node whose second GPU needs a reset, which a policy allows, and whose
// first one has a claim.
func newSickNode(t *testing.T) *node {
	n := newNode(t)
	p := n.serve(t)
	n.ask(t, &v1alpha1.GPUSpec{Reset: v1alpha1.ResetWhenIdle})
	n.runs = n.newClaim(t, n.whole(0))
	p.mustPrepare(t, n.runs)
	p.kill()
	if err := n.hardware.SetRecoveryAction(1, 1); err != nil {
		t.Fatal(err)
	}
	return n
}

// recovers starts the next plugin, more than the pause between two attempts later.
func (n *node) recovers(t *testing.T) {
	t.Helper()
	tried := n.ageResets(t, 2*time.Minute)
	n.check(t, "after the crash")
	p := n.serve(t)
	n.mustReset(t, p)
	if slices.Contains(p.ran(t), "reset.closed") {
		tried++
	}
	p.mustPrepare(t, n.runs)
	c := n.newClaim(t, n.whole(1))
	p.mustPrepare(t, c)
	n.check(t, "after the reset")
	p.kill()
	if got := n.ageResets(t, 0); got != tried {
		t.Errorf("%d attempts are recorded, want %d", got, tried)
	}
	p = n.serve(t)
	p.mustUnprepare(t, c)
	p.mustUnprepare(t, n.runs)
	n.checkEmpty(t)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if left, _ := filepath.Glob(filepath.Join(n.journal(), "health", "*")); len(left) > 0 {
		t.Errorf("left over after an orderly end: %v", left)
	}
}

// mustReset waits until the second GPU needs no reset and the journal has no open cause.
func (n *node) mustReset(t *testing.T, p *plugin) {
	t.Helper()
	err := p.poll(t, func() bool {
		files, _ := filepath.Glob(filepath.Join(n.journal(), "health", "*.json"))
		for _, file := range files {
			if data, err := os.ReadFile(file); err != nil || strings.Contains(string(data), "causes") {
				return false
			}
		}
		return n.hardware.State().GPUs[1].RecoveryAction == 0
	})
	if err != nil {
		t.Fatalf("the GPU isn't reset: %v", err)
	}
}

// ageResets makes the attempts in the journal older, and returns how many there are. No
// plugin runs.
func (n *node) ageResets(t *testing.T, by time.Duration) (attempts int) {
	t.Helper()
	var j *journal.Journal
	var err error
	// A child of a plugin that was killed has the plugin's files, and so their locks, until it
	// executes its own program.
	_ = wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		j, err = journal.Open(n.journal(), nil)
		return err == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for _, h := range j.AllHealth() {
		h.State.Resets = slices.Clone(h.State.Resets)
		for i := range h.State.Resets {
			r := &h.State.Resets[i]
			r.Began = r.Began.Add(-by)
			attempts++
		}
		if err := j.PutHealth(holding.Health{GPU: h.GPU, State: h.State}); err != nil {
			t.Fatal(err)
		}
	}
	return attempts
}
