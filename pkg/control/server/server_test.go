package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/event"

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
	s := New(fake, clock.RealClock{})
	changes := s.Changes()
	for range 3 {
		if form, err := s.Abilities(t.Context()); form.Counters != publish.JointCounters || err != nil {
			t.Fatalf("got %v, %v", form, err)
		}
	}
	if fake.Asked != 1 || told(changes) {
		t.Errorf("asked %d times, told of a change: %v", fake.Asked, told(changes))
	}
}

func TestServerThatDoesNotAnswer(t *testing.T) {
	fake := &controltest.Server{Err: errors.New("connection refused")}
	s := New(fake, clock.RealClock{})
	if _, err := s.Abilities(t.Context()); !errors.Is(err, fake.Err) {
		t.Errorf("got %v, want %v", err, fake.Err)
	}
	if got := s.interval(); got != ProbePause {
		t.Errorf("it is asked again in %s, want %s", got, ProbePause)
	}
}

// A refusal is no answer: nothing that is unknown is used, and the server is
// asked again soon.
func TestServerThatRefusesToSay(t *testing.T) {
	fake := &controltest.Server{Form: publish.SplitCounters, Doubt: "It refuses."}
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s := New(fake, clock)
	changes := s.Changes()
	if able, err := s.Abilities(t.Context()); able.HasCounters() || able.Doubt != fake.Doubt || err != nil {
		t.Errorf("got %+v, %v, want that nothing is known", able, err)
	}
	if got := s.interval(); got != doubtEvery {
		t.Errorf("it is asked again in %s, want %s", got, doubtEvery)
	}
	fake.Doubt = ""
	clock.Step(doubtEvery)
	if err := s.ProbeAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if able, err := s.Abilities(t.Context()); able.Counters != publish.SplitCounters || able.Doubt != "" || err != nil || !told(changes) {
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
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s := New(fake, clock)
	changes := s.Changes()
	ask := func() publish.Abilities {
		clock.Step(probeEvery)
		if err := s.ProbeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
		able, err := s.Abilities(t.Context())
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
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s := New(fake, clock)
	changes := s.Changes()
	ask := func(as func(*controltest.Server)) publish.Abilities {
		as(fake)
		clock.Step(doubtEvery)
		if err := s.ProbeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
		able, _ := s.Abilities(t.Context())
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
	for range int(Steady / doubtEvery) {
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
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s := New(fake, clock)
	changes, more := s.Changes(), s.Changes()
	if _, err := s.Abilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	fake.Form = publish.SplitCounters // it was upgraded
	for range 20 {                    // as many nodes can't be written
		clock.Step(time.Second)
		if err := s.ProbeAgain(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if fake.Asked != 3 {
		t.Errorf("asked %d times in 20 s, want 3", fake.Asked)
	}
	if form, _ := s.Abilities(t.Context()); form.Counters != publish.SplitCounters || !told(changes) || !told(more) || told(more) {
		t.Errorf("the form is %v; both listeners must have been told once", form)
	}
}

// The server is asked again when a watch has started, since it may have been
// replaced, and from time to time, since it may stand behind a load balancer.
func TestServerMayChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &controltest.Server{WatchStarts: make(chan struct{}, 1)}
		s := New(fake, clock.RealClock{})
		changes := s.Changes()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Start(ctx) }()
		if _, err := s.Abilities(ctx); err != nil {
			t.Fatal(err)
		}
		becomes := func(now publish.Counters) {
			s.mu.Lock() // it asks with the lock held
			defer s.mu.Unlock()
			fake.Form = now
		}
		mustBe := func(now publish.Counters) {
			t.Helper()
			if able, _ := s.Abilities(ctx); able.Counters != now || !told(changes) {
				t.Errorf("the form is %v, want %v", able.Counters, now)
			}
		}
		becomes(publish.JointCounters)
		time.Sleep(probeEvery + time.Second)
		mustBe(publish.JointCounters)

		time.Sleep(Steady + time.Minute) // no probe is less than ProbePause ago
		becomes(publish.SplitCounters)
		fake.WatchStarts <- struct{}{}
		time.Sleep(time.Millisecond)
		mustBe(publish.SplitCounters)
		// Another one soon after isn't lost.
		becomes(publish.NoCounters)
		fake.WatchStarts <- struct{}{}
		time.Sleep(ProbePause + time.Millisecond)
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
		time.Sleep(ProbePause + time.Millisecond)
		mustBe(publish.SplitCounters)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestTaintsAfterAnUpgrade checks that the distrust ends with another version of the
// server.
func TestTaintsAfterAnUpgrade(t *testing.T) {
	s := New(&controltest.Server{Taints: true, Version: "v1.36.3", Form: publish.SplitCounters}, clock.RealClock{})
	if _, err := s.Abilities(t.Context()); err != nil || !s.DistrustTaints() || s.DistrustTaints() {
		t.Fatal("want that taints were used once", err)
	}
	s.prober = &controltest.Server{Taints: true, Version: "v1.37.1", Form: publish.SplitCounters}
	if err := s.probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if able, _ := s.Abilities(t.Context()); able.Taints != publish.Yes {
		t.Errorf("taints are %s after the upgrade", able.Taints)
	}
}

// TestServerThatFailsIsAskedSeldom: probes that fail, and watches of slices that start again
// and again, aren't more than a few a minute.
func TestServerThatFailsIsAskedSeldom(t *testing.T) {
	for name, watches := range map[string]bool{"probes fail": false, "watches start again and again": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake := &controltest.Server{Err: controltest.ErrFull}
				if watches {
					c := make(chan struct{})
					close(c) // each receive is the start of a watch
					fake.WatchStarts = c
				}
				s := New(fake, clock.RealClock{})
				if _, err := s.Abilities(t.Context()); !errors.Is(err, controltest.ErrFull) {
					t.Errorf("got %v, want %v", err, controltest.ErrFull)
				}
				logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
				ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logger), time.Minute)
				defer cancel()
				if err := s.Start(ctx); err != nil {
					t.Error(err)
				}
				lines := len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data())
				if most := int(time.Minute/ProbePause) + 2; fake.Asked == 0 || fake.Asked > most || lines > most {
					t.Errorf("%d probes and %d log lines in a minute, want at most %d", fake.Asked, lines, most)
				}
			})
		})
	}
}

// TestFirstProbeIsShared: while the server has never answered, all nodes together ask it
// once a second.
func TestFirstProbeIsShared(t *testing.T) {
	fake := &controltest.Server{Err: controltest.ErrFull}
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	s := New(fake, clock)
	for range 3 {
		for range 100 {
			if _, err := s.Abilities(t.Context()); !errors.Is(err, controltest.ErrFull) {
				t.Errorf("got %v, want %v", err, controltest.ErrFull)
			}
		}
		clock.Step(firstProbePause)
	}
	if fake.Asked != 3 {
		t.Errorf("%d probes in 3 seconds, want 3", fake.Asked)
	}
	fake.Err = nil
	if _, err := s.Abilities(t.Context()); err != nil {
		t.Errorf("a server that answers: %v", err)
	}
}
