package health_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// refusedAt is the refusal of a device at a time since the start.
func refusedAt(s health.State, at time.Duration, device gpu.DeviceName) health.State {
	return s.ObserveRefusal(health.Refusal{Device: device, Message: string(device) + " can't be created", At: start.Add(at), Load: load})
}

// readHealthy is a reading of a GPU that needs nothing, at a time since the start.
func readHealthy(s health.State, at time.Duration, l health.Load) health.State {
	return s.Observe(health.Reading{At: start.Add(at), Load: l, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryNone}})
}

// refusalOf returns the GPU's condition PrepareFailed, which must be its only one.
func refusalOf(t *testing.T, s health.State) gpu.Condition {
	t.Helper()
	all := s.Conditions()
	if len(all) != 1 || all[0].Type != gpu.PrepareFailed {
		t.Fatalf("conditions %+v, want only PrepareFailed", all)
	}
	return all[0]
}

// TestRefusalPauses: each time that the device is tried again in vain, when its pause has ended,
// the next pause is twice as long. A restart, readings and refusals in between change nothing.
func TestRefusalPauses(t *testing.T) {
	var s health.State
	at := time.Duration(0)
	for i, minutes := range []int{1, 2, 4, 8, 16, 30, 30} {
		s = refusedAt(s, at, "a")
		pause := time.Duration(minutes) * time.Minute
		want := gpu.Condition{Type: gpu.PrepareFailed, Message: "a can't be created", Refused: []gpu.DeviceName{"a"}, RetryAt: start.Add(at + pause)}
		if diff := cmp.Diff(want, refusalOf(t, s)); diff != "" {
			t.Errorf("attempt %d (-want +got):\n%s", i, diff)
		}
		before := s
		s = readHealthy(refusedAt(restart(t, s, start), at+pause/2, "a"), at+pause/2, load)
		if s = refusedAt(s, at+pause-time.Second, "a"); !s.Equal(before) {
			t.Errorf("attempt %d: the state changes within the pause, from %+v to %+v", i, before, s)
		}
		at += pause
	}
}

// TestRefusedDevices: a device that is refused within the pause is added. The one that is tried
// in vain is the last to be tried again.
func TestRefusedDevices(t *testing.T) {
	var s health.State
	for i, step := range []struct {
		at      time.Duration
		device  gpu.DeviceName
		want    []gpu.DeviceName
		retryAt time.Duration
	}{
		{0, "a", []gpu.DeviceName{"a"}, time.Minute},
		{10 * time.Second, "b", []gpu.DeviceName{"a", "b"}, time.Minute},
		{20 * time.Second, "a", []gpu.DeviceName{"a", "b"}, time.Minute},
		{60 * time.Second, "a", []gpu.DeviceName{"b", "a"}, 3 * time.Minute},
		{70 * time.Second, "c", []gpu.DeviceName{"b", "a", "c"}, 3 * time.Minute},
		{180 * time.Second, "b", []gpu.DeviceName{"a", "c", "b"}, 7 * time.Minute},
		{500 * time.Second, "d", []gpu.DeviceName{"a", "c", "b", "d"}, 500*time.Second + 8*time.Minute},
	} {
		s = refusedAt(s, step.at, step.device)
		got := refusalOf(t, s)
		if !slices.Equal(step.want, got.Refused) || !got.RetryAt.Equal(start.Add(step.retryAt)) {
			t.Errorf("step %d: %v until %v, want %v until %v", i, got.Refused, got.RetryAt.Sub(start), step.want, step.retryAt)
		}
	}
	if began, _ := health.Changes(health.State{}, s); len(began) != 1 || !began[0].Since.Equal(start) {
		t.Errorf("began %+v, want one cause, since the first refusal", began)
	}
}

// TestRefusedDevicesAreBounded: plans change, and claims are refused devices of each.
func TestRefusedDevicesAreBounded(t *testing.T) {
	var s health.State
	for i := range 1000 {
		s = refusedAt(s, time.Second, gpu.DeviceName(fmt.Sprint(i)))
	}
	if got := refusalOf(t, s).Refused; len(got) != 128 || got[127] != "999" {
		t.Errorf("%d devices are kept: %v", len(got), got)
	}
}

// TestRefusalEndsWithAPrepare: it ends at once. One that comes back within ten minutes begins with
// the next pause, whether the plugin has started again or not.
func TestRefusalEndsWithAPrepare(t *testing.T) {
	for name, tc := range map[string]struct {
		back  time.Duration // after the end
		reads bool          // the GPU is read in between
		want  time.Duration
	}{
		"soon":               {9 * time.Minute, false, 2 * time.Minute},
		"soon, GPU read":     {9 * time.Minute, true, 2 * time.Minute},
		"not soon":           {11 * time.Minute, false, time.Minute},
		"not soon, GPU read": {11 * time.Minute, true, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			const prepared = 90 * time.Second
			s := refusedAt(health.State{}, 0, "a").ObservePrepared(start.Add(prepared))
			if got := s.Conditions(); len(got) > 0 {
				t.Fatalf("conditions %+v after the device was prepared", got)
			}
			if tc.reads {
				s = readHealthy(s, prepared+tc.back-time.Second, load)
			}
			s = refusedAt(restart(t, s, start), prepared+tc.back, "a")
			if got := refusalOf(t, s).RetryAt.Sub(start.Add(prepared + tc.back)); got != tc.want {
				t.Errorf("the pause is %v, want %v", got, tc.want)
			}
		})
	}
	if s := (health.State{}).ObservePrepared(start); !s.Equal(health.State{}) {
		t.Errorf("a prepare on a healthy GPU gives %+v", s)
	}
}

// TestRefusalThatFlaps: claims are refused the device and given it in turns.
func TestRefusalThatFlaps(t *testing.T) {
	var s health.State
	at := time.Duration(0)
	for i, minutes := range []int{1, 2, 4, 8, 16, 30} {
		s = refusedAt(s, at, "a")
		pause := refusalOf(t, s).RetryAt.Sub(start.Add(at))
		if want := time.Duration(minutes) * time.Minute; pause != want {
			t.Errorf("refusal %d: the pause is %v, want %v", i, pause, want)
		}
		at += pause + time.Second
		s = s.ObservePrepared(start.Add(at))
		at += 9 * time.Minute
	}
}

// TestRefusalAndTheDriver: a refusal ends when the driver was loaded again and no claim was
// refused anything since, and with no other reading.
func TestRefusalAndTheDriver(t *testing.T) {
	boot := health.Load{Boot: "boot-2", Driver: "load-1"}
	refusedUnder := func(l health.Load) step {
		return func(_ *testing.T, s health.State, at time.Time) health.State {
			return s.ObserveRefusal(health.Refusal{Device: "a", Message: "a", At: at, Load: l})
		}
	}
	none := gpu.Vitals{Recovery: gpu.RecoveryNone}
	lost := gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"}
	for name, tc := range map[string]struct {
		steps []step
		want  []gpu.ConditionType
	}{
		"the GPU needs nothing":         {[]step{refusedUnder(load), reads(none), reads(none), restart, reads(none), reads(none)}, []gpu.ConditionType{gpu.PrepareFailed}},
		"read once after a reload":      {[]step{refusedUnder(load), readsUnder(reload, none)}, []gpu.ConditionType{gpu.PrepareFailed}},
		"read twice after a reload":     {[]step{refusedUnder(load), readsUnder(reload, none), readsUnder(reload, none)}, nil},
		"after a reboot":                {[]step{refusedUnder(load), restart, readsUnder(boot, none), readsUnder(boot, none)}, nil},
		"refused again after a reboot":  {[]step{refusedUnder(load), restart, readsUnder(boot, none), refusedUnder(boot), readsUnder(boot, none), readsUnder(boot, none)}, []gpu.ConditionType{gpu.PrepareFailed}},
		"before the load was known":     {[]step{refusedUnder(health.Load{}), reads(none), readsUnder(reload, none), readsUnder(reload, none)}, nil},
		"lost and back":                 {[]step{refusedUnder(load), silent(lost), reads(none), reads(none)}, []gpu.ConditionType{gpu.PrepareFailed}},
		"the worst first":               {[]step{refusedUnder(load), reads(gpu.Vitals{Recovery: gpu.RecoveryReset, NVLinksDown: []int{1}})}, []gpu.ConditionType{gpu.ResetRequired, gpu.PrepareFailed, gpu.NVLinkDown}},
		"ended by hand":                 {[]step{refusedUnder(load), byHand(gpu.PrepareFailed), reads(none), restart, reads(none)}, nil},
		"ended by hand, and once again": {[]step{refusedUnder(load), byHand(gpu.PrepareFailed), refusedUnder(load)}, []gpu.ConditionType{gpu.PrepareFailed}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []gpu.ConditionType
			for _, c := range after(t, tc.steps...).Conditions() {
				got = append(got, c.Type)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
		})
	}
}

// TestEndOfRefusalByHand: the pauses begin with the first one again.
func TestEndOfRefusalByHand(t *testing.T) {
	s := refusedAt(refusedAt(health.State{}, 0, "a"), time.Minute, "a").ObservePrepared(start.Add(2 * time.Minute))
	s = refusedAt(s, 3*time.Minute, "a")
	s, err := s.End(health.Ending{Type: gpu.PrepareFailed, By: "ann", Why: "the instance was destroyed", At: start.Add(4 * time.Minute)}, start.Add(4*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	s = refusedAt(s, 5*time.Minute, "a")
	if got := refusalOf(t, s); !got.RetryAt.Equal(start.Add(6 * time.Minute)) {
		t.Errorf("the device is kept for %v, want a minute", got.RetryAt.Sub(start.Add(5*time.Minute)))
	}
}

// TestRefusalWhenTheClockIsSet: a clock that was wrong doesn't keep a device from claims for more
// than half an hour, whether a claim is refused it again or the GPU is read.
func TestRefusalWhenTheClockIsSet(t *testing.T) {
	const wrong = 365 * 24 * time.Hour
	for name, happens := range map[string]func(health.State) health.State{
		"reading": func(s health.State) health.State { return readHealthy(s, 0, load) },
		"refusal": func(s health.State) health.State { return refusedAt(s, 0, "a") },
	} {
		t.Run(name, func(t *testing.T) {
			s := happens(refusedAt(health.State{}, wrong, "a"))
			if got := refusalOf(t, s).RetryAt.Sub(start); got > 30*time.Minute {
				t.Fatalf("the device is kept for %v", got)
			}
			again := happens(s)
			if diff := cmp.Diff(s.Conditions(), again.Conditions()); diff != "" {
				t.Errorf("a second time (-before +after):\n%s", diff)
			}
		})
	}
	s := refusedAt(refusedAt(health.State{}, 0, "a"), wrong, "a")
	if got := refusalOf(t, s).RetryAt; !got.Equal(start.Add(wrong + 2*time.Minute)) {
		t.Errorf("set forwards, the device is kept until %v", got)
	}
}

// TestRetryHasNoFractions: an inventory has whole seconds, and plugin and controller must agree.
func TestRetryHasNoFractions(t *testing.T) {
	s := refusedAt(health.State{}, 987654321*time.Nanosecond, "a")
	if got, want := refusalOf(t, s).RetryAt, start.Add(time.Minute); !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
