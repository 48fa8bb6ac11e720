package health_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

var (
	start  = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	load   = health.Load{Boot: "boot-1", Driver: "load-1"}
	reload = health.Load{Boot: "boot-1", Driver: "load-2"}
)

// step is one thing that happens to a GPU. Steps are five seconds apart.
type step func(t *testing.T, s health.State, at time.Time) health.State

func reads(v gpu.Vitals, conditions ...gpu.Condition) step { return readsUnder(load, v, conditions...) }

func readsUnder(l health.Load, v gpu.Vitals, conditions ...gpu.Condition) step {
	return func(_ *testing.T, s health.State, at time.Time) health.State {
		return s.Observe(health.Reading{At: at, Load: l, Vitals: &v, Conditions: conditions})
	}
}

// silent is a reading of a GPU that doesn't answer.
func silent(conditions ...gpu.Condition) step {
	return func(_ *testing.T, s health.State, at time.Time) health.State {
		return s.Observe(health.Reading{At: at, Load: load, Conditions: conditions})
	}
}

// daemons is a reading while the supervisor reports these faults of MPS daemons.
func daemons(faults ...health.DaemonFault) step {
	return func(_ *testing.T, s health.State, at time.Time) health.State {
		return s.Observe(health.Reading{At: at, Load: load, Vitals: &gpu.Vitals{}, DaemonFaults: faults, DaemonsKnown: true})
	}
}

func action(a gpu.RecoveryAction) step { return reads(gpu.Vitals{Recovery: a}) }

func xid(code uint64, a gpu.RecoveryAction) step { return xidUnder(load, code, a) }

func xidUnder(l health.Load, code uint64, a gpu.RecoveryAction) step {
	return func(_ *testing.T, s health.State, at time.Time) health.State {
		s, _ = s.ObserveXID(gpu.XID{Code: code, At: at}, a, l)
		return s
	}
}

func byHand(c gpu.ConditionType) step {
	return func(t *testing.T, s health.State, at time.Time) health.State {
		s, err := s.End(health.Ending{Type: c, By: "ann", Why: "tested it", At: at}, at)
		if err != nil {
			t.Error(err)
		}
		return s
	}
}

// restart stores the state and reads it again.
func restart(t *testing.T, s health.State, _ time.Time) health.State {
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var read health.State
	if err := json.Unmarshal(data, &read); err != nil {
		t.Fatal(err)
	}
	if !read.Equal(s) {
		t.Errorf("%s is read differently", data)
	}
	return read
}

func after(t *testing.T, steps ...step) health.State {
	t.Helper()
	var s health.State
	for i, do := range steps {
		s = do(t, s, start.Add(time.Duration(i)*5*time.Second))
	}
	return s
}

func TestConditions(t *testing.T) {
	const (
		none    = gpu.RecoveryNone
		unknown = gpu.RecoveryUnsupported
		reset   = gpu.RecoveryReset
	)
	lost := gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"}
	fault := health.DaemonFault{Since: start, Message: "MPS daemon a has ended"}
	pending, failed := &gpu.RowRemap{Pending: true}, &gpu.RowRemap{Failed: true}
	is := func(types ...gpu.ConditionType) []gpu.ConditionType { return types }
	for name, tc := range map[string]struct {
		steps []step
		want  []gpu.ConditionType
	}{
		"healthy": {[]step{action(none)}, nil},

		"an XID, and the driver asks for nothing":      {[]step{xid(95, none)}, nil},
		"an XID, and the driver asks for a reset":      {[]step{xid(95, reset)}, is(gpu.ResetRequired)},
		"a program's XID, and the driver asks for one": {[]step{xid(31, reset)}, is(gpu.ResetRequired)},
		"an XID on an old driver":                      {[]step{xid(95, unknown), action(unknown)}, is(gpu.ResetRequired)},
		"a program's XID on an old driver":             {[]step{xid(31, unknown), action(unknown)}, nil},
		"an XID that nobody knows, on an old driver":   {[]step{xid(9999, unknown)}, is(gpu.NeedsInspection)},
		"a harmless XID after a bad one":               {[]step{xid(95, unknown), xid(43, unknown), xid(31, unknown)}, is(gpu.ResetRequired)},
		"the worst first":                              {[]step{xid(56, unknown), xid(79, unknown), xid(95, unknown)}, is(gpu.RebootRequired, gpu.ResetRequired, gpu.NeedsInspection)},
		"an action that this version doesn't know":     {[]step{action(gpu.RecoveryOther), xid(95, gpu.RecoveryOther)}, is(gpu.ResetRequired, gpu.NeedsInspection)},

		"one good reading":                       {[]step{action(reset), action(none)}, is(gpu.ResetRequired)},
		"two good readings":                      {[]step{action(reset), action(none), action(none)}, nil},
		"two good readings with a bad between":   {[]step{action(reset), action(none), action(reset), action(none)}, is(gpu.ResetRequired)},
		"two readings, one before a restart":     {[]step{action(reset), action(none), restart, action(none)}, is(gpu.ResetRequired)},
		"a field that can't be read any more":    {[]step{action(reset), action(unknown), action(unknown)}, is(gpu.ResetRequired)},
		"a worse action replaces another":        {[]step{action(reset), action(gpu.RecoveryReboot), action(gpu.RecoveryReboot), action(gpu.RecoveryReboot)}, is(gpu.RebootRequired)},
		"a GPU that is silent isn't healthy":     {[]step{action(reset), silent(), silent(), silent()}, is(gpu.ResetRequired)},
		"a lost GPU that answers once":           {[]step{silent(lost), action(none)}, is(gpu.Lost)},
		"a lost GPU that answers twice":          {[]step{silent(lost), action(none), action(none)}, nil},
		"an old driver that is not loaded again": {[]step{xid(95, unknown), action(unknown), action(unknown), action(unknown)}, is(gpu.ResetRequired)},
		"an old driver that was loaded again": {
			[]step{xid(95, unknown), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, nil,
		},
		"an old driver, and the machine has booted": {
			[]step{xid(79, unknown), restart, readsUnder(health.Load{Boot: "boot-2"}, gpu.Vitals{}), readsUnder(health.Load{Boot: "boot-2"}, gpu.Vitals{})}, nil,
		},
		"the driver was loaded again, and still asks": {
			[]step{action(reset), restart, readsUnder(reload, gpu.Vitals{Recovery: reset}), readsUnder(reload, gpu.Vitals{Recovery: reset})}, is(gpu.ResetRequired),
		},

		"the driver was loaded again, and has no field": {
			[]step{action(reset), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, nil,
		},
		"the driver asked after it was loaded, and has no field now": {
			[]step{action(reset), readsUnder(reload, gpu.Vitals{Recovery: reset}), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, is(gpu.ResetRequired),
		},
		"an XID before the load of the driver was known": {
			[]step{xidUnder(health.Load{}, 95, unknown), action(unknown), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, nil,
		},
		"a GPU that is lost again and again": {[]step{action(reset), reads(gpu.Vitals{Recovery: none}, lost), reads(gpu.Vitals{Recovery: none}, lost)}, is(gpu.Lost, gpu.ResetRequired)},

		"an MPS daemon that has failed for 5 s":  {[]step{daemons(fault), daemons(fault)}, nil},
		"an MPS daemon that has failed for 10 s": {[]step{daemons(fault), daemons(fault), daemons(fault)}, is(gpu.MPSDaemonFailed)},
		"one that serves again":                  {[]step{action(none), action(none), daemons(fault), daemons(), daemons()}, nil},
		"one that has just served again":         {[]step{action(none), action(none), daemons(fault), daemons()}, is(gpu.MPSDaemonFailed)},
		"one of which nothing is known any more": {[]step{action(none), action(none), daemons(fault), action(none), action(none)}, is(gpu.MPSDaemonFailed)},

		"rows to remap":             {[]step{reads(gpu.Vitals{RowRemap: pending})}, is(gpu.RowRemapPending)},
		"rows that are remapped":    {[]step{reads(gpu.Vitals{RowRemap: pending}), reads(gpu.Vitals{RowRemap: &gpu.RowRemap{}}), reads(gpu.Vitals{RowRemap: &gpu.RowRemap{}})}, nil},
		"a remapper that is silent": {[]step{reads(gpu.Vitals{RowRemap: failed}), action(none), action(none)}, is(gpu.RowRemapFailed)},
		"rows that can't be remapped, and a reboot": {
			[]step{reads(gpu.Vitals{RowRemap: failed}), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, is(gpu.RowRemapFailed),
		},
		"errors of SRAM, and a driver that says nothing else": {
			[]step{reads(gpu.Vitals{SRAMThresholdExceeded: new(true)}), action(reset), action(reset)}, is(gpu.ResetRequired, gpu.NeedsInspection),
		},
		"errors of SRAM, which can't be read then": {
			[]step{reads(gpu.Vitals{SRAMThresholdExceeded: new(true)}), action(none), action(none)}, is(gpu.NeedsInspection),
		},
		"errors of SRAM, and then fewer": {
			[]step{reads(gpu.Vitals{SRAMThresholdExceeded: new(true)}), reads(gpu.Vitals{SRAMThresholdExceeded: new(false)}), reads(gpu.Vitals{SRAMThresholdExceeded: new(false)})}, nil,
		},
		"too many errors of SRAM":                    {[]step{reads(gpu.Vitals{SRAMThresholdExceeded: new(true)})}, is(gpu.NeedsInspection)},
		"links that are down":                        {[]step{reads(gpu.Vitals{NVLinksDown: []int{3}})}, is(gpu.NVLinkDown)},
		"links that are back":                        {[]step{reads(gpu.Vitals{NVLinksDown: []int{3}}), reads(gpu.Vitals{NVLinksUp: []int{3}}), reads(gpu.Vitals{NVLinksUp: []int{3}})}, nil},
		"links that are down when the plugin starts": {[]step{reads(gpu.Vitals{NVLinksDown: []int{3}}), restart, reads(gpu.Vitals{NVLinksUp: []int{2}}), reads(gpu.Vitals{NVLinksUp: []int{2}})}, is(gpu.NVLinkDown)},
		"links that are gone after a reboot":         {[]step{reads(gpu.Vitals{NVLinksDown: []int{3}}), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{})}, nil},

		"ended by hand": {[]step{xid(95, unknown), byHand(gpu.ResetRequired), action(unknown)}, nil},
		"ended by hand, and the driver still asks": {[]step{action(reset), byHand(gpu.ResetRequired), restart, action(reset), xid(31, reset)}, nil},
		"ended by hand, and another XID":           {[]step{action(reset), byHand(gpu.ResetRequired), xid(95, reset)}, is(gpu.ResetRequired)},
		"ended by hand, gone, and there again":     {[]step{action(reset), byHand(gpu.ResetRequired), action(none), action(none), action(reset)}, is(gpu.ResetRequired)},
		"ended by hand, and there after a reload":  {[]step{action(reset), byHand(gpu.ResetRequired), readsUnder(reload, gpu.Vitals{Recovery: reset})}, is(gpu.ResetRequired)},
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

func TestEnd(t *testing.T) {
	s := after(t, xid(95, gpu.RecoveryUnsupported), byHand(gpu.ResetRequired))
	want := []health.Ending{{Type: gpu.ResetRequired, XID: 95, Since: start, At: start.Add(5 * time.Second), By: "ann", Why: "tested it"}}
	if diff := cmp.Diff(want, s.Ended, cmpopts.IgnoreUnexported(health.Ending{})); diff != "" {
		t.Errorf("endings (-want +got):\n%s", diff)
	}
	if _, err := s.End(health.Ending{Type: gpu.ResetRequired, By: "ann", Why: "again", At: start}, start.Add(time.Hour)); err == nil {
		t.Error("a condition that isn't there was ended")
	}
	lost := after(t, silent(gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"}))
	if _, err := lost.End(health.Ending{Type: gpu.Lost, By: "ann", Why: "looks fine", At: start}, start.Add(time.Hour)); err == nil {
		t.Error("a lost GPU was declared found")
	}
	for range 100 {
		s = after(t, is(s), xid(95, gpu.RecoveryUnsupported), byHand(gpu.ResetRequired))
	}
	if n := len(s.Ended); n < 2 || n > 20 {
		t.Errorf("%d endings are kept, want the last few", n)
	}
}

// TestEndUnlisted checks that Lost of a GPU that NVML doesn't list can be ended, and nothing
// else that the driver could still report.
func TestEndUnlisted(t *testing.T) {
	lost := after(t, silent(gpu.Condition{Type: gpu.Lost, Message: "NVML no longer lists the GPU"}))
	ending := health.Ending{Type: gpu.Lost, By: "ann", Why: "bound to vfio", At: start.Add(time.Minute)}
	if _, err := lost.EndUnlisted(ending, start.Add(-time.Second)); err == nil {
		t.Error("ended before it began")
	}
	ended, err := lost.EndUnlisted(ending, start.Add(time.Minute))
	if err != nil || len(ended.Causes) > 0 || len(ended.Ended) != 1 || ended.Ended[0].Why != ending.Why {
		t.Errorf("%v; causes %v, ended %v", err, ended.Causes, ended.Ended)
	}
	again := after(t, is(ended), silent(gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"}))
	if len(again.Conditions()) != 1 {
		t.Errorf("a GPU that is lost again has %v", again.Conditions())
	}
	silent := after(t, silent(gpu.Condition{Type: gpu.NotResponding, Message: "hangs"}))
	ending.Type = gpu.NotResponding
	if _, err := silent.EndUnlisted(ending, start.Add(time.Minute)); err == nil {
		t.Error("a GPU that hangs was declared gone")
	}
}

// TestEndOfEarlierCauses: who ends a condition doesn't mean causes that begin later, such
// as one after a reset.
func TestEndOfEarlierCauses(t *testing.T) {
	s := after(t, xid(95, gpu.RecoveryUnsupported), action(gpu.RecoveryReset)) // at start, and 5 s later
	const second = time.Second
	if _, err := s.End(health.Ending{Type: gpu.ResetRequired, By: "ann", Why: "tested it", At: start.Add(time.Minute)}, start.Add(-second)); err == nil {
		t.Error("ended before it began")
	}
	first, err := s.End(health.Ending{Type: gpu.ResetRequired, By: "ann", Why: "tested it", At: start.Add(time.Minute)}, start)
	if err != nil || len(first.Ended) != 1 || first.Ended[0].XID != 95 || len(first.Conditions()) != 1 {
		t.Errorf("%v; ended %v, conditions %v; want that one cause is left", err, first.Ended, first.Conditions())
	}
	both, err := s.End(health.Ending{Type: gpu.ResetRequired, By: "ann", Why: "tested it", At: start.Add(time.Minute)}, start.Add(5*second))
	if err != nil || len(both.Conditions()) > 0 {
		t.Errorf("%v; conditions %v, want none", err, both.Conditions())
	}
	parts := after(t, func(_ *testing.T, s health.State, at time.Time) health.State {
		return s.Observe(health.Reading{At: at.Add(900 * time.Millisecond), Load: load, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryIMEX}})
	})
	if _, err := parts.End(health.Ending{Type: gpu.IMEXRecoveryRequired, By: "ann", Why: "tested it", At: start.Add(time.Minute)}, start); err != nil {
		t.Errorf("a time without fractions of its second doesn't count: %v", err)
	}
}

// A message describes the error and the remedy, and doesn't change while the GPU's state
// doesn't.
func TestMessages(t *testing.T) {
	const unknown, none, reset = gpu.RecoveryUnsupported, gpu.RecoveryNone, gpu.RecoveryReset
	for _, tc := range []struct {
		code   uint64
		action gpu.RecoveryAction
		want   string
	}{
		{31, none, "XID 31: GPU memory page fault, the program must restart"},
		{31, unknown, "XID 31: GPU memory page fault, the program must restart"},
		{68, none, "XID 68: ROBUST_CHANNEL_NVDEC0_ERROR, the program must restart"},
		{95, none, "XID 95: uncontained memory error, the driver asks for no recovery of the GPU"},
		{95, unknown, "XID 95: uncontained memory error, the GPU must be reset"},
		{95, reset, "XID 95: uncontained memory error, the driver asks for a reset of the GPU"},
		{9999, unknown, "XID 9999: unknown error, NVIDIA's catalog has no advice: look into the kernel log"},
	} {
		if _, n := (health.State{}).ObserveXID(gpu.XID{Code: tc.code}, tc.action, load); n == nil || n.Message != tc.want {
			t.Errorf("XID %d with recovery action %q: notice %v, want %q", tc.code, tc.action, n, tc.want)
		}
	}
	links := func(down ...int) step { return reads(gpu.Vitals{NVLinksDown: down}) }
	for name, tc := range map[string]struct {
		steps []step
		want  string
	}{
		"an XID on an old driver":         {[]step{xid(95, unknown), xid(119, unknown)}, "XID 95: uncontained memory error, the GPU must be reset"},
		"an XID, then the action":         {[]step{xid(95, reset), action(reset), xid(31, reset), xid(119, reset)}, "the driver asks for a reset of the GPU after XID 95: uncontained memory error"},
		"the action, then an XID":         {[]step{action(reset), xid(95, reset)}, "the driver asks for a reset of the GPU after XID 95: uncontained memory error"},
		"an action without an XID":        {[]step{action(reset)}, "the driver asks for a reset of the GPU"},
		"links that come and go":          {[]step{links(7), links(3), links(7)}, "these NVLinks, which were active, are down: 3 7"},
		"a GPU that is lost in many ways": {[]step{silent(gpu.Condition{Type: gpu.Lost, Message: "a"}), silent(gpu.Condition{Type: gpu.Lost, Message: "b"})}, "a"},
	} {
		if got := after(t, tc.steps...).Conditions(); len(got) != 1 || got[0].Message != tc.want {
			t.Errorf("%s: conditions %v, want the message %q", name, got, tc.want)
		}
	}
}

func TestChanges(t *testing.T) {
	before := after(t, xid(95, gpu.RecoveryUnsupported))
	now := after(t, is(before), action(gpu.RecoveryNone), reads(gpu.Vitals{Recovery: gpu.RecoveryNone, SRAMThresholdExceeded: new(true)}))
	began, ended := health.Changes(before, now)
	if len(began) != 1 || began[0].Source != health.FromSRAM || len(ended) != 1 || ended[0].XID != 95 {
		t.Errorf("began %v, ended %v: want too many errors of SRAM, and XID 95", began, ended)
	}
}

// Readings at a burst of events are no two that agree.
func TestReadingsInABurst(t *testing.T) {
	s := after(t, action(gpu.RecoveryReset))
	for i := range 10 {
		s = s.Observe(health.Reading{At: start.Add(time.Minute + time.Duration(i)*time.Millisecond), Load: load, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryNone}})
	}
	if len(s.Conditions()) != 1 {
		t.Error("the cause ended after ten milliseconds")
	}
	if s = s.Observe(health.Reading{At: start.Add(62 * time.Second), Load: load, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryNone}}); len(s.Conditions()) > 0 {
		t.Errorf("the cause didn't end: %v", s.Causes)
	}
}
