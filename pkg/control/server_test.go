package control

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
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
	fake := &controltest.Server{Form: publish.JointCounters}
	s := newAPIServer(fake)
	changes := s.changes()
	for range 3 {
		if form, err := s.abilities(t.Context()); form.Counters != publish.JointCounters || err != nil {
			t.Fatalf("got %v, %v", form, err)
		}
	}
	if fake.Asked != 1 || told(changes) {
		t.Errorf("asked %d times, told of a change: %v", fake.Asked, told(changes))
	}
}

func TestServerThatDoesNotAnswer(t *testing.T) {
	fake := &controltest.Server{Err: errors.New("connection refused")}
	s := newAPIServer(fake)
	if _, err := s.abilities(t.Context()); !errors.Is(err, fake.Err) {
		t.Errorf("got %v, want %v", err, fake.Err)
	}
	if got := s.interval(); got != probePause {
		t.Errorf("it is asked again in %s, want %s", got, probePause)
	}
}

// A refusal is no answer: nothing that is unknown is used, and the server is
// asked again soon.
func TestServerThatRefusesToSay(t *testing.T) {
	fake := &controltest.Server{Form: publish.SplitCounters, Doubt: "It refuses."}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes := s.changes()
	if able, err := s.abilities(t.Context()); able.HasCounters() || able.Doubt != fake.Doubt || err != nil {
		t.Errorf("got %+v, %v, want that nothing is known", able, err)
	}
	if got := s.interval(); got != doubtEvery {
		t.Errorf("it is asked again in %s, want %s", got, doubtEvery)
	}
	fake.Doubt = ""
	clock.Step(doubtEvery)
	if err := s.probeAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if able, err := s.abilities(t.Context()); able.Counters != publish.SplitCounters || able.Doubt != "" || err != nil || !told(changes) {
		t.Errorf("got %+v, %v, want counters, and that it is told", able, err)
	}
	if got := s.interval(); got != probeEvery {
		t.Errorf("it is asked again in %s, want %s", got, probeEvery)
	}
}

// A webhook that refuses dry runs, or rights that are missing for a moment, say
// nothing about a server that has answered before: partitions must not go from
// all nodes for that. They do if the server is another version since.
func TestRefusalIsNoChangeOfMind(t *testing.T) {
	fake := &controltest.Server{Form: publish.SplitCounters, Version: "v1.36.3"}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes := s.changes()
	ask := func() publish.Abilities {
		clock.Step(probeEvery)
		if err := s.probeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
		able, err := s.abilities(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return able
	}
	ask()
	fake.Doubt = "It refuses."
	for range 3 {
		if able := ask(); able.Counters != publish.SplitCounters || able.Doubt != "" || told(changes) {
			t.Errorf("got %+v, told: %v; want what was known", able, told(changes))
		}
	}
	fake.Version = "v1.37.1"
	if able := ask(); able.HasCounters() || able.Doubt == "" || !told(changes) {
		t.Errorf("got %+v of another version, told: %v; want that nothing is known", able, told(changes))
	}
}

// While a control plane is upgraded, requests may reach an old server and a new
// one in turns. Pools must not change with each answer.
func TestServersThatDiffer(t *testing.T) {
	old := func(f *controltest.Server) { f.Form, f.Version, f.Charged = publish.JointCounters, "v1.34.4", false }
	upgraded := func(f *controltest.Server) { f.Form, f.Version, f.Charged = publish.SplitCounters, "v1.36.3", true }
	fake := &controltest.Server{Multiple: true}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes := s.changes()
	ask := func(as func(*controltest.Server)) publish.Abilities {
		as(fake)
		clock.Step(doubtEvery)
		if err := s.probeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
		able, _ := s.abilities(t.Context())
		return able
	}
	if able := ask(old); able.Counters != publish.JointCounters {
		t.Fatalf("got %+v of the old one", able)
	}
	if able := ask(upgraded); able.Counters != publish.SplitCounters || !able.Charged || !told(changes) {
		t.Fatalf("got %+v after an upgrade", able)
	}
	// The first answer comes back: only what both have counts, and nothing changes
	// any more, whichever answers.
	if able := ask(old); able.Counters != publish.UnknownCounters || able.Multiple != publish.Yes || able.Charged || able.Version != "v1.34.4" ||
		!strings.Contains(able.Doubt, "v1.34.4") || !strings.Contains(able.Doubt, "v1.36.3") || !told(changes) {
		t.Fatalf("got %+v, want what both have", able)
	}
	told(changes)
	for range 10 {
		for _, as := range []func(*controltest.Server){upgraded, old, old} {
			if able := ask(as); able.HasCounters() || able.Charged {
				t.Fatalf("got %+v, want what both have", able)
			}
		}
	}
	if told(changes) {
		t.Error("told of a change while nothing changed")
	}
	if s.interval() != doubtEvery {
		t.Error("it isn't asked again soon")
	}
	// The old one is gone.
	var able publish.Abilities
	for range int(steady / doubtEvery) {
		able = ask(upgraded)
	}
	if able.Counters != publish.SplitCounters || !able.Charged || able.Doubt != "" || !told(changes) {
		t.Errorf("got %+v, want what the new one has", able)
	}
	// The next upgrade is one again.
	if able := ask(func(f *controltest.Server) { f.Form = publish.NoCounters }); able.Counters != publish.NoCounters || able.Doubt != "" {
		t.Errorf("got %+v, want the answer", able)
	}
}

func TestDoubtIsSettledByAsking(t *testing.T) {
	fake := &controltest.Server{Form: publish.JointCounters}
	s := newAPIServer(fake)
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s.clock = clock
	changes, more := s.changes(), s.changes()
	if _, err := s.abilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	fake.Form = publish.SplitCounters // it was upgraded
	for range 20 {                    // as many nodes can't be written
		clock.Step(time.Second)
		if err := s.probeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if fake.Asked != 3 {
		t.Errorf("asked %d times in 20 s, want 3", fake.Asked)
	}
	if form, _ := s.abilities(t.Context()); form.Counters != publish.SplitCounters || !told(changes) || !told(more) || told(more) {
		t.Errorf("the form is %v; both listeners must have been told once", form)
	}
}

// The server is asked again when a watch has started, since it may have been
// replaced, and from time to time, since it may stand behind a load balancer.
func TestServerMayChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &controltest.Server{WatchStarts: make(chan struct{}, 1)}
		s := newAPIServer(fake)
		changes := s.changes()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Start(ctx) }()
		if _, err := s.abilities(ctx); err != nil {
			t.Fatal(err)
		}
		becomes := func(now publish.Counters) {
			s.mu.Lock() // it asks with the lock held
			defer s.mu.Unlock()
			fake.Form = now
		}
		mustBe := func(now publish.Counters) {
			t.Helper()
			if able, _ := s.abilities(ctx); able.Counters != now || !told(changes) {
				t.Errorf("the form is %v, want %v", able.Counters, now)
			}
		}
		becomes(publish.JointCounters)
		time.Sleep(probeEvery + time.Second)
		mustBe(publish.JointCounters)

		time.Sleep(steady + time.Minute) // no probe is less than probePause ago
		becomes(publish.SplitCounters)
		fake.WatchStarts <- struct{}{}
		time.Sleep(time.Millisecond)
		mustBe(publish.SplitCounters)
		// Another one soon after isn't lost.
		becomes(publish.NoCounters)
		fake.WatchStarts <- struct{}{}
		time.Sleep(probePause + time.Millisecond)
		mustBe(publish.NoCounters)

		time.Sleep(10 * probeEvery)
		if told(changes) {
			t.Error("told of a change that wasn't")
		}
		// A server that doesn't answer is asked again soon.
		s.mu.Lock()
		fake.Err = errors.New("connection refused")
		s.mu.Unlock()
		fake.WatchStarts <- struct{}{}
		time.Sleep(time.Millisecond)
		s.mu.Lock()
		fake.Err, fake.Form = nil, publish.SplitCounters
		s.mu.Unlock()
		time.Sleep(probePause + time.Millisecond)
		mustBe(publish.SplitCounters)
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
	s.server.Form = publish.JointCounters
	s.cuttable()
	s.mustReconcile()
	s.publishAfterAnswer()

	s.server.Form = publish.SplitCounters
	s.clock.Step(probePause)
	s.store.broken = apierrors.NewInvalid(kind(), "n-000", nil)
	changes := s.nodes.planner.server.changes()
	s.sharing("only", controltest.Partitioned("1g.10gb")) // something has to be written
	if err := s.reconcile(); !apierrors.IsInvalid(err) {
		t.Fatalf("got %v, want the server's refusal", err)
	}
	if !told(changes) {
		t.Error("the nodes were not told")
	}
	s.store.broken = nil
	s.clock.Step(maxRetryDelay)
	s.publish()
	s.mustHave(2)
}

// TestServerForItsScheduler checks that devices which can be allocated several times aren't
// offered if the scheduler can't count them, although the server stores them.
func TestServerForItsScheduler(t *testing.T) {
	for version, want := range map[string]bool{"v1.34.13": false, "v1.35.0": false, "v1.36.0": true, "": false} {
		if got := (publish.Abilities{Multiple: publish.Yes, Version: version}).ForOffers(); got.Multiple != want {
			t.Errorf("%q: got %v, want %v", version, got.Multiple, want)
		}
	}
}

// TestRefusedProbesKeepWhatIsPublished: an admission policy refuses the dry runs by which the
// controller finds out what the server stores. The published slices, with counters and shares,
// show it: neither a restart of the controller nor a patch release of the server withdraws them.
func TestRefusedProbesKeepWhatIsPublished(t *testing.T) {
	for name, tc := range map[string]struct {
		plan    v1alpha1.Plan
		offered []string
	}{
		"partitions":     {controltest.Partitioned("3g.40gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4"}},
		"shares by size": {controltest.BySize(), []string{"", "-mps"}},
	} {
		for event, happens := range map[string]func(*fixture){
			"restart":       func(s *fixture) { s.restart(); s.mustReconcile() },
			"patch release": func(s *fixture) { s.becomes(s.server.Form, "v1.36.4") },
			"both":          func(s *fixture) { s.becomes(s.server.Form, "v1.36.4"); s.restart(); s.mustReconcile() },
			"upgrade":       func(s *fixture) { s.becomes(s.server.Form, "v1.37.1") },
			// The version, too, may not be read any more.
			"unknown version": func(s *fixture) { s.becomes(s.server.Form, controltest.NoVersion) },
		} {
			t.Run(name+", "+event, func(t *testing.T) {
				s := counting(t, tc.plan, tc.offered...)
				writes := s.store.writes
				s.server.Doubt = "A policy refuses the question."
				happens(s)
				s.mustReconcile()
				s.mustOffer(tc.offered...)
				if n := s.store.writes - writes; n > 0 {
					t.Errorf("%d writes, want none", n)
				}
			})
		}
	}
}

// TestRefusedProbesBeforeTheCacheIsFilled: as long as it isn't known what is published, nothing
// is decided.
func TestRefusedProbesBeforeTheCacheIsFilled(t *testing.T) {
	s := counting(t, controltest.Partitioned("3g.40gb"), "", "-mig-3g40gb-0", "-mig-3g40gb-4")
	s.server.Doubt = "A policy refuses the question."
	s.unfilled = errors.New("not filled")
	s.restart()
	if err := s.reconcile(); !errors.Is(err, s.unfilled) {
		t.Errorf("got %v, want %v", err, s.unfilled)
	}
	s.unfilled = nil
	s.clock.Step(2 * probePause)
	s.mustReconcile()
	s.mustOffer("", "-mig-3g40gb-0", "-mig-3g40gb-4")
}
