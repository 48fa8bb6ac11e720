package control

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

func told(c <-chan event.GenericEvent) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestServerIsAskedOnce(t *testing.T) {
	fake := &fakeServer{form: publish.JointCounters}
	s := newAPIServer(fake)
	changes := s.changes()
	for range 3 {
		if form, err := s.abilities(t.Context()); form.Counters != publish.JointCounters || err != nil {
			t.Fatalf("got %v, %v", form, err)
		}
	}
	if fake.asked != 1 || told(changes) {
		t.Errorf("asked %d times, told of a change: %v", fake.asked, told(changes))
	}
}

// A server that doesn't answer is asked again; one that answers with a refusal
// is taken for one without counters, so that at least whole GPUs are offered.
func TestServerThatDoesNotSay(t *testing.T) {
	fake := &fakeServer{err: errors.New("connection refused")}
	s := newAPIServer(fake)
	if _, err := s.abilities(t.Context()); !errors.Is(err, fake.err) {
		t.Errorf("got %v, want %v", err, fake.err)
	}
	fake.err = apierrors.NewBadRequest("admission webhook x does not support dry run")
	if form, err := s.abilities(t.Context()); form.Counters != publish.NoCounters || err != nil {
		t.Errorf("got %v, %v, want that there are none", form, err)
	}
	if !refused(fmt.Errorf("x: %w", publish.ErrProbeRefused)) {
		t.Error("a policy's refusal is none")
	}
	for _, again := range []error{apierrors.NewTooManyRequestsError("later"), apierrors.NewInternalError(errors.New("x")), errors.New("x")} {
		if refused(again) {
			t.Errorf("%v is no refusal", again)
		}
	}
}

// A webhook that refuses dry runs, or rights that are missing for a moment, say
// nothing about what a server stores that has told it before: partitions must
// not go from all nodes for that.
func TestRefusalIsNoChangeOfMind(t *testing.T) {
	fake := &fakeServer{form: publish.SplitCounters}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes := s.changes()
	if _, err := s.abilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	fake.form, fake.err = publish.NoCounters, apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("x"))
	clock.Step(probeEvery)
	if err := s.probeAgain(t.Context()); !errors.Is(err, fake.err) {
		t.Errorf("got %v, want the refusal", err)
	}
	if form, err := s.abilities(t.Context()); form.Counters != publish.SplitCounters || err != nil || told(changes) {
		t.Errorf("got %v, %v, told: %v; want what was known", form, err, told(changes))
	}
}

func TestDoubtIsSettledByAsking(t *testing.T) {
	fake := &fakeServer{form: publish.JointCounters}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes, more := s.changes(), s.changes()
	if _, err := s.abilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	fake.form = publish.SplitCounters // it was upgraded
	for range 20 {                    // as many nodes can't be written
		clock.Step(time.Second)
		if err := s.probeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if fake.asked != 3 {
		t.Errorf("asked %d times in 20 s, want 3", fake.asked)
	}
	if form, _ := s.abilities(t.Context()); form.Counters != publish.SplitCounters || !told(changes) || !told(more) || told(more) {
		t.Errorf("the form is %v; both listeners must have been told once", form)
	}
}

// The controller isn't notified when a feature gate is switched. A server whose
// gate is off still stores counters in slices that had some, but its scheduler
// doesn't understand them.
func TestServerMayChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeServer{}
		s := newAPIServer(fake)
		changes := s.changes()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Start(ctx) }()
		if _, err := s.abilities(ctx); err != nil {
			t.Fatal(err)
		}
		for _, now := range []publish.Counters{publish.SplitCounters, publish.NoCounters} {
			s.mu.Lock() // it asks with the lock held
			fake.form = now
			s.mu.Unlock()
			time.Sleep(probeEvery + time.Second)
			if form, _ := s.abilities(ctx); form.Counters != now || !told(changes) {
				t.Errorf("the form is %v, want %v", form, now)
			}
		}
		time.Sleep(10 * probeEvery)
		if told(changes) {
			t.Error("told of a change that wasn't")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The server was upgraded under a controller that lays pools out as the old one
// wanted them: the new one refuses that.
func TestARefusedPoolIsLaidOutAnew(t *testing.T) {
	s := newFixture(t)
	s.server.form = publish.JointCounters
	s.cuttable()
	s.mustReconcile()
	s.publishAfterAnswer()

	s.server.form = publish.SplitCounters
	s.clock.Step(probePause)
	s.store.broken = apierrors.NewInvalid(kind(), "n-000", nil)
	changes := s.nodes.planner.server.changes()
	s.sharing("only", partitioned("1g.10gb")) // something has to be written
	if err := s.reconcile(); !apierrors.IsInvalid(err) {
		t.Fatalf("got %v, want the server's refusal", err)
	}
	if !told(changes) {
		t.Error("the nodes were not told")
	}
	s.store.broken = nil
	s.clock.Step(maxRetryDelay)
	s.mustReconcile()
	s.pluginAnswers()
	s.mustReconcile()
	s.mustHave(3)
}
