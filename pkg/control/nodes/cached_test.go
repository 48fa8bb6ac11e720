package nodes

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// TestNoListWithoutSlices checks that a node without slices in the cache is asked and
// published without a list, which takes the server long while others write.
func TestNoListWithoutSlices(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.mustReconcile()
	s.store.slices = nil // by the kubelet
	s.publish()
	s.mustHave(1)
	if s.store.lists != 0 {
		t.Errorf("the slices were listed %d times", s.store.lists)
	}
}

// TestCacheWithoutOwnWrite checks that slices that were just written aren't taken for
// deleted ones.
func TestCacheWithoutOwnWrite(t *testing.T) {
	s := newFixture(t)
	s.store.stale = &publish.Found{}
	s.published()
	before := s.store.writes
	s.mustReconcile()
	s.mustHaveAsked(1)
	if s.store.writes != before || s.store.lists != 1 {
		t.Errorf("%d more writes of slices and %d lists, want one list", s.store.writes-before, s.store.lists)
	}
	s.store.stale = nil
	s.mustReconcile()
	s.store.slices = nil
	s.mustReconcile()
	s.mustHaveAsked(2)
}

// answeredAfterTakeover starts a controller whose cache shows none of the slices that its
// predecessor published. It asks the plugin, which answers.
func answeredAfterTakeover(t *testing.T) *fixture {
	t.Helper()
	s := newFixture(t)
	s.published()
	s.restart()
	s.store.stale = &publish.Found{}
	s.mustReconcile()
	s.pluginAnswers()
	return s
}

// TestNeedlessAnswerIsNotUsedLater starts a controller whose cache lacks the slices that its
// predecessor published last. It asks the plugin, but a later deletion needs a new answer.
func TestNeedlessAnswerIsNotUsedLater(t *testing.T) {
	s := answeredAfterTakeover(t)
	s.store.stale = nil
	s.mustReconcile()
	s.mustHaveAsked(2)

	s.store.slices = nil // by the kubelet; the plugin may be gone
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(3)
	s.publishAfterAnswer()
}

// TestSlicesThatTheCacheLacked checks that slices which the server has and the cache lacked
// at the first attempt are replaced at the next, once the plugin has answered again.
func TestSlicesThatTheCacheLacked(t *testing.T) {
	s := newFixture(t)
	s.mustReconcile()
	s.pluginAnswers()
	s.store.stale = &publish.Found{}
	s.mustBeFull() // the server: it is there already
	s.clock.Step(undone.MaxRetryDelay)
	s.mustReconcile()
	if s.store.lists != 1 {
		t.Errorf("the slices were listed %d times, want once", s.store.lists)
	}
	s.publishAfterAnswer()
}

// TestAnswerIsUsedUpByRightSlices starts a controller whose cache shows first none, then
// some of the devices that its predecessor published. A deletion that follows before the
// cache shows all of them needs a new answer of the plugin.
func TestAnswerIsUsedUpByRightSlices(t *testing.T) {
	s := answeredAfterTakeover(t)
	older := s.store.slices[0].DeepCopy()
	older.Spec.Devices = older.Spec.Devices[:1]
	s.store.stale = &publish.Found{Ours: []*resourceapi.ResourceSlice{older}}
	s.mustReconcile() // lists them: they are right

	s.store.slices, s.store.stale = nil, nil // by the kubelet; the plugin may be gone
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(3)
	s.publishAfterAnswer()
}
