package undone

import (
	"errors"
	"fmt"
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"
)

// TestPausesGrow checks the pauses of a writer that writes the same again as soon as it may.
func TestPausesGrow(t *testing.T) {
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	w := New(clock)
	var pauses []time.Duration
	for i := range 9 {
		if got := w.Record("key", "content"); got != i {
			t.Errorf("undone %d times, want %d", got, i)
		}
		left := w.Left("key", "content")
		pauses = append(pauses, left)
		clock.Step(left)
	}
	for i, want := range []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 30} {
		if pauses[i] != want*time.Second {
			t.Errorf("pause %d is %s, want %d s", i, pauses[i], want)
		}
	}
	if got := w.UntilQuiet("another", "key"); got != Quiet-30*time.Second {
		t.Errorf("quiet in %s", got)
	}
	if w.Left("another", "content") != 0 || w.Left("key", "other content") != 0 || w.UntilQuiet("another") != 0 {
		t.Error("what was never undone has to wait")
	}
}

// TestQuiet checks that a write is the first again after a minute, with another content, and
// after Forget.
func TestQuiet(t *testing.T) {
	for name, happens := range map[string]func(*Writes, *testingclock.FakeClock){
		"a minute":        func(_ *Writes, c *testingclock.FakeClock) { c.Step(Quiet) },
		"another content": func(w *Writes, _ *testingclock.FakeClock) { w.Record("key", "other") },
		"forgotten":       func(w *Writes, _ *testingclock.FakeClock) { w.Forget("key") },
	} {
		t.Run(name, func(t *testing.T) {
			clock := testingclock.NewFakeClock(time.Unix(1000, 0))
			w := New(clock)
			for range 4 {
				w.Record("key", "content")
			}
			if w.Undone("key") != 3 || w.Undone("another") != 0 {
				t.Errorf("undone %d times, and %d", w.Undone("key"), w.Undone("another"))
			}
			happens(w, clock)
			if n := w.Undone("key"); n != 0 {
				t.Errorf("still undone %d times", n)
			}
			if n := w.Record("key", "content"); n != 0 || w.Left("key", "content") != 0 {
				t.Errorf("undone %d times, %s to wait", n, w.Left("key", "content"))
			}
		})
	}
}

// TestQuietWritesAreDropped: keys of objects that are gone don't add up.
func TestQuietWritesAreDropped(t *testing.T) {
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	w := New(clock)
	for i := range 100 {
		for range 2 {
			w.Record(fmt.Sprint("key ", i), "content")
		}
		if n := w.Undone(fmt.Sprint("key ", i)); n != 1 {
			t.Errorf("key %d was undone %d times", i, n)
		}
		clock.Step(Quiet / 10)
	}
	if n := len(w.last); n > 20 {
		t.Errorf("%d writes are remembered", n)
	}
}

// TestWaitOfSeveral checks that errors beside waits stay, and that the shortest wait counts.
func TestWaitOfSeveral(t *testing.T) {
	failure := errors.New("x")
	long, short := waitError{2 * time.Second}, fmt.Errorf("write: %w", waitError{time.Second})
	for _, tc := range []struct {
		err  error
		left time.Duration
		rest error
	}{
		{nil, 0, nil},
		{short, time.Second, nil},
		{errors.Join(long, short), time.Second, nil},
		{errors.Join(short, nil, long), time.Second, nil},
		{errors.Join(long, failure), 2 * time.Second, failure},
		{fmt.Errorf("both: %w", errors.Join(failure, short)), time.Second, failure},
	} {
		if left, rest := Wait(tc.err); left != tc.left || !errors.Is(rest, tc.rest) || (rest == nil) != (tc.rest == nil) {
			t.Errorf("%v: wait %s, error %v", tc.err, left, rest)
		}
	}
}

func TestDo(t *testing.T) {
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	w, failure, calls := New(clock), errors.New("x"), 0
	do := func(err error) (int, error) {
		return w.Do("key", "content", func() error { calls++; return err })
	}
	for i, err := range []error{failure, nil, failure, nil} {
		n, got := do(err)
		if left, rest := Wait(got); left != 0 || !errors.Is(rest, err) || n != i/3 {
			t.Errorf("call %d: undone %d times, wait %s, error %v", i, n, left, rest)
		}
	}
	_, err := do(nil)
	if left, rest := Wait(err); left != time.Second || rest != nil || calls != 4 {
		t.Errorf("wait %s, error %v, %d calls", left, rest, calls)
	}
	clock.Step(time.Second)
	if n, err := do(nil); n != 2 || err != nil {
		t.Errorf("undone %d times, error %v", n, err)
	}
}
