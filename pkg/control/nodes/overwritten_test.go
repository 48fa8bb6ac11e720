package nodes

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/labels"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// fight reconciles after each of many changes by somebody else, who comes every second, and
// returns how often the controller wrote in reply.
func (s *fixture) fight(change func(), writes func() int) int {
	s.t.Helper()
	before := writes()
	for range 300 {
		change()
		s.mustReconcile()
		s.clock.Step(time.Second)
	}
	return writes() - before
}

// mostWrites is how often the controller writes in the five minutes of a fight: with pauses
// of 1, 2, 4, 8, 16 and then 30 seconds.
const mostWrites = 16

func (s *fixture) mustBeOverwritten(reason string, texts ...string) {
	s.t.Helper()
	c := meta.FindStatusCondition(s.inventory().Status.Conditions, v1alpha1.ConditionOverwritten)
	if c == nil || c.Reason != reason || (c.Status == metav1.ConditionTrue) != (reason != v1alpha1.ReasonUndisturbed) {
		s.t.Fatalf("condition %+v, want the reason %s", c, reason)
	}
	for _, text := range texts {
		if !strings.Contains(c.Message, text) {
			s.t.Errorf("message %q, want %q in it", c.Message, text)
		}
	}
}

// mustCalmDown reconciles when the controller asks for it, or after a second as an event of
// its own write would, and expects the condition to end after a quiet minute.
func (s *fixture) mustCalmDown() {
	s.t.Helper()
	begun := s.clock.Now()
	for s.clock.Since(begun) < 2*undone.Quiet {
		s.pluginAnswers()
		result, err := s.nodes.Reconcile(s.t.Context(), kinds.Request("n"))
		if err != nil {
			s.t.Fatal(err)
		}
		s.clock.Step(max(result.RequeueAfter, time.Second))
	}
	s.mustBeOverwritten(v1alpha1.ReasonUndisturbed)
	s.mustHave(1)
	s.mustBeQuiet()
}

// mustBeQuiet expects that another reconciliation writes nothing.
func (s *fixture) mustBeQuiet() {
	s.t.Helper()
	writes, version := s.store.writes, s.inventory().ResourceVersion
	s.mustReconcile()
	if s.store.writes != writes || s.inventory().ResourceVersion != version {
		s.t.Errorf("%d writes of slices, inventory of version %s instead of %s", s.store.writes-writes, s.inventory().ResourceVersion, version)
	}
}

// TestFightOverSlices: somebody changes or deletes the slices each time, or restores those
// that the controller deletes.
func TestFightOverSlices(t *testing.T) {
	for name, tc := range map[string]struct {
		conflicting bool
		change      func(*fixture)
		text        string
	}{
		"changed": {change: func(s *fixture) {
			other := s.store.slices[0].DeepCopy()
			other.Spec.Devices = other.Spec.Devices[:1]
			other.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: publish.FieldManager}, {Manager: "restore-tool"}}
			s.store.slices[0] = other
		}, text: "by somebody else (restore-tool)"},
		"deleted": {change: func(s *fixture) { s.store.slices = nil; s.pluginAnswers() }, text: "it isn't known by whom"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.published()
			if n := s.fight(func() { tc.change(s) }, func() int { return s.store.writes }); n > 2*mostWrites || n < mostWrites/2 {
				t.Errorf("%d writes", n)
			}
			s.mustBeOverwritten(v1alpha1.ReasonOtherWriter, tc.text)
			s.mustCalmDown()
		})
	}
}

// TestFightOverWithdrawnSlices: somebody restores the slices of a node that must have none.
func TestFightOverWithdrawnSlices(t *testing.T) {
	for name, gone := range map[string]bool{"another driver": false, "no inventory": true} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.published()
			backup := slices.Clone(s.store.slices)
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.Conditions = conflict() })
			if gone {
				if err := s.api.Delete(t.Context(), s.inventory()); err != nil {
					t.Fatal(err)
				}
			}
			s.mustReconcile()
			s.mustHave(0)
			restore := func() { s.store.slices = slices.Clone(backup) }
			if n := s.fight(restore, func() int { return s.store.writes }); n > mostWrites {
				t.Errorf("%d writes", n)
			}
			if !gone {
				s.mustBeOverwritten(v1alpha1.ReasonOtherWriter, "ResourceSlices that the controller deletes are created")
			}
		})
	}
}

// TestAWithdrawalIsNoFight: the controller itself deletes what it has written, and writes it again.
func TestAWithdrawalIsNoFight(t *testing.T) {
	s := newFixture(t)
	s.published()
	for range 2 * undone.Fight {
		s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.Conditions = conflict() })
		s.mustReconcile()
		s.mustHave(0)
		s.report(func(*v1alpha1.GPUInventory) {})
		s.publish()
		s.mustHave(1)
	}
	if c := meta.FindStatusCondition(s.inventory().Status.Conditions, v1alpha1.ConditionOverwritten); c != nil {
		t.Errorf("condition %+v", c)
	}
}

// TestAPartialWriteIsNoFight: the server refuses a part of the pool again and again. The
// controller itself has written what it deletes then.
func TestAPartialWriteIsNoFight(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.store.broken = errors.New("the server refuses the second slice")
	for range 4 * undone.Fight {
		for range 2 { // the plugin is asked, and answers
			if err := s.reconcile(); err != nil && !errors.Is(err, s.store.broken) {
				t.Fatal(err)
			}
			s.pluginAnswers()
		}
		s.clock.Step(s.nodes.failures.left("n"))
	}
	if c := meta.FindStatusCondition(s.inventory().Status.Conditions, v1alpha1.ConditionOverwritten); c != nil {
		t.Errorf("condition %+v", c)
	}
	if s.store.writes < 2*undone.Fight {
		t.Fatalf("only %d writes", s.store.writes)
	}
	s.store.broken = nil
	s.publish()
	s.mustHave(2)
}

// releaseStore is the store as one release sees it.
type releaseStore struct {
	*sliceStore
	release string
}

func (r releaseStore) Write(ctx context.Context, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	err := r.sliceStore.Write(ctx, current, want)
	for _, s := range r.slices {
		s.Annotations = map[string]string{publish.ReleaseAnnotation: r.release}
	}
	return err
}

// ofRelease makes the controller one of a release.
func (s *fixture) ofRelease(release string) {
	s.nodes.Release, s.nodes.Slices = release, releaseStore{s.store, release}
}

// TestTwoReleases installs a second release, of the same version or of another one, and
// uninstalls the first.
func TestTwoReleases(t *testing.T) {
	for name, newer := range map[string]bool{"same version": false, "another version": true} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.ofRelease("first")
			s.published()
			s.mustBeQuiet()
			first := s.nodes
			if newer { // it offers something else
				s.server = &controltest.Server{Taints: true}
			}
			s.restart()
			s.ofRelease("second")
			second := s.nodes
			if newer {
				inv := s.inventory()
				inv.Status.GPUs[0].Conditions = []v1alpha1.GPUCondition{{Type: "ResetRequired", Status: metav1.ConditionTrue}}
				if err := s.api.Status().Update(t.Context(), inv); err != nil {
					t.Fatal(err)
				}
			}
			before := s.store.writes
			for range 300 {
				for _, s.nodes = range []*Reconciler{first, second} {
					s.mustReconcile()
				}
				s.clock.Step(time.Second)
			}
			if n := s.store.writes - before; n > 2*mostWrites || n < mostWrites/2 {
				t.Errorf("%d writes", n)
			}
			s.mustBeOverwritten(v1alpha1.ReasonOtherRelease, "in the namespaces first and second")
			s.nodes = second
			s.mustCalmDown()
			if !publish.OfRelease(s.store.slices, "second") {
				t.Errorf("the slices are of %v", s.store.slices[0].Annotations)
			}
		})
	}
}

// TestFightOverSettings: somebody restores the inventory's spec.
func TestFightOverSettings(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.sharing("p", v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb"}, KeepWarm: &metav1.Duration{Duration: time.Hour}}})
	s.publish()
	writes := 0
	restore := func() {
		inv := s.inventory()
		if len(inv.Spec.GPUs) == 0 {
			return
		}
		writes++
		inv.Spec.GPUs = nil
		if err := s.api.Update(t.Context(), inv); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.fight(restore, func() int { return writes }); n > mostWrites || n < mostWrites/2 {
		t.Errorf("%d writes", n)
	}
	s.mustBeOverwritten(v1alpha1.ReasonOtherWriter, "Spec.gpus of this GPUInventory is changed again and again")

	for range 10 { // the condition stays, and its end isn't waited for
		restore()
		result, err := s.nodes.Reconcile(t.Context(), kinds.Request("n"))
		if err != nil {
			t.Fatal(err)
		}
		s.clock.Step(result.RequeueAfter)
		s.mustReconcile()
		if got := s.inventory().Spec.GPUs; len(got) == 0 {
			t.Fatalf("the settings aren't written %s later", result.RequeueAfter)
		}
		s.mustBeOverwritten(v1alpha1.ReasonOtherWriter)
	}
}

// TestFightOverConditions: somebody removes a condition that the controller sets.
func TestFightOverConditions(t *testing.T) {
	s := newFixture(t)
	recorded := events.NewFakeRecorder(100)
	s.nodes.Events = recorded
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Registered", LastTransitionTime: metav1.Now()}
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.Conditions = []metav1.Condition{ready} })
	s.mustReconcile() // asks a plugin that doesn't answer
	writes := 0
	s.clock.Step(answerWithin)
	s.fight(func() {
		inv := s.inventory()
		if meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionReady) {
			return
		}
		writes++
		inv.Status.Conditions = []metav1.Condition{ready}
		if err := s.api.Status().Update(t.Context(), inv); err != nil {
			t.Fatal(err)
		}
	}, func() int { return writes })
	if writes > mostWrites || writes < mostWrites/2 {
		t.Errorf("%d writes", writes)
	}
	if len(recorded.Events) != 1 {
		t.Fatalf("%d events, want one", len(recorded.Events))
	}
	if e := <-recorded.Events; !strings.Contains(e, "Warning Overwritten The condition Ready of this GPUInventory is changed again and again") {
		t.Errorf("event %q", e)
	}
}

// TestFightOverLabels: somebody removes a label of the Node each time. The node's controller,
// which labels wake as well, says so.
func TestFightOverLabels(t *testing.T) {
	s := newFixture(t)
	l := labels.NewLabeler(s.api, s.api, s.clock, s.nodes.Writes)
	s.published()
	writes := 0
	s.fight(func() {
		result, err := l.Reconcile(t.Context(), kinds.Request("n"))
		node := &corev1.Node{}
		if err := s.api.Get(t.Context(), client.ObjectKey{Name: "n"}, node); err != nil {
			t.Fatal(err)
		}
		_, has := node.Labels["nvidia.com/gpu.present"]
		if err != nil || !has && result.RequeueAfter == 0 {
			t.Fatalf("not labelled, again in %s, error %v", result.RequeueAfter, err)
		}
		if !has {
			return
		}
		writes++
		delete(node.Labels, "nvidia.com/gpu.present")
		if err := s.api.Update(t.Context(), node); err != nil {
			t.Fatal(err)
		}
	}, func() int { return writes })
	if writes > mostWrites || writes < mostWrites/2 {
		t.Errorf("%d writes", writes)
	}
	s.mustBeOverwritten(v1alpha1.ReasonOtherWriter, "Labels of this Node")
	s.mustCalmDown()
}
