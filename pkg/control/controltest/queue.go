package controltest

import (
	"testing"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// Queue runs a reconciler as controller-runtime's queue does, with an event after each attempt
// that has written something: each write wakes the controller.
type Queue struct {
	Reconciler reconcile.Reconciler
	Clock      *testingclock.FakeClock
	// State differs after a write; nil: nothing is written.
	State func() string
}

// MustBeSlow checks that a request for an object that fails each time is tried, and logged, a few
// times a minute.
func (q Queue) MustBeSlow(t *testing.T, name string) {
	t.Helper()
	if q.State == nil {
		q.State = func() string { return "" }
	}
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](undone.FirstRetryDelay, undone.MaxRetryDelay)
	for _, most := range []int{25, 10, 10} {
		attempts, lines := q.minute(t, limiter, name)
		if attempts == 0 || attempts > most || lines > most {
			t.Errorf("%d attempts and %d log lines in a minute, want at most %d", attempts, lines, most)
		}
	}
}

// minute runs it for a minute, and returns how often it was called, and how many lines were
// logged, of which the queue logs one for each error.
func (q Queue) minute(t *testing.T, limiter workqueue.TypedRateLimiter[reconcile.Request], name string) (attempts, lines int) {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	ctx := klog.NewContext(t.Context(), logger)
	r := reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}
	for end := q.Clock.Now().Add(time.Minute); q.Clock.Now().Before(end) && attempts < 1000; {
		before := q.State()
		result, err := q.Reconciler.Reconcile(ctx, r)
		attempts++
		next := time.Minute
		switch {
		case err != nil:
			lines++
			next = limiter.When(r)
		case result.RequeueAfter > 0:
			limiter.Forget(r)
			next = result.RequeueAfter
		default:
			limiter.Forget(r)
		}
		if q.State() != before {
			next = min(next, time.Millisecond)
		}
		q.Clock.Step(next)
	}
	return attempts, lines + len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data())
}
