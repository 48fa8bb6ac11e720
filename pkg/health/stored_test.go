package health_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// stored has one of everything, and things that this version doesn't know.
const stored = `{
	"causes": [
		{"type": "ResetRequired", "source": "XID", "message": "m", "xid": 95, "since": "2026-11-22T12:00:00Z", "load": {"boot": "b", "driver": "d"}, "severity": 7},
		{"type": "NVLinkDown", "source": "NVLink", "message": "m", "links": [1, 2], "since": "2026-11-22T12:00:00Z", "load": {}},
		{"type": "RowRemapFailed", "source": "RowRemap", "message": "m", "since": "2026-11-22T12:00:00Z", "load": {}, "accepted": {"type": "RowRemapFailed", "since": "2026-11-22T12:00:00Z", "at": "2026-11-22T13:00:00Z", "by": "ann", "why": "spare", "ticket": "T-1"}},
		{"type": "PrepareFailed", "source": "Prepare", "message": "m", "refused": ["gpu-ad0d4a08"], "tries": 2, "retryAt": "2026-11-22T12:04:00Z", "since": "2026-11-22T12:00:00Z", "load": {"boot": "boot-1", "driver": "load-1"}, "ticket": "T-5"},
		{"type": "TooHot", "source": "Thermometer", "message": "m", "since": "2026-11-22T12:00:00Z", "load": {"boot": "boot-1", "driver": "load-1"}}
	],
	"ended": [{"type": "ResetRequired", "since": "2026-11-22T12:00:00Z", "at": "2026-11-22T13:00:00Z", "by": "ann", "why": "reseated", "ticket": "T-2"}],
	"resets": [{"began": "2026-11-22T11:00:00Z", "ended": "2026-11-22T11:00:09Z", "error": "m", "ticket": "T-3"}],
	"flaps": [{"type": "NVLinkDown", "source": "NVLink", "ended": "2026-11-22T11:59:00Z", "times": 2, "ticket": "T-4"}],
	"score": {"a": [1]}
}`

// A version that doesn't know a field, a source or a type must not lose it.
func TestStateOfNewerVersion(t *testing.T) {
	var s health.State
	if err := json.Unmarshal([]byte(stored), &s); err != nil {
		t.Fatal(err)
	}
	up := reads(gpu.Vitals{Recovery: gpu.RecoveryNone, NVLinksUp: []int{1, 2}})
	s = after(t, is(s), reads(gpu.Vitals{Recovery: gpu.RecoveryNone, NVLinksDown: []int{1}, RowRemap: &gpu.RowRemap{Failed: true}}), up, up)
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, kept := range []string{`"score":{"a":[1]}`, `"ticket":"T-1"`, `"ticket":"T-2"`, `"ticket":"T-3"`, `"ticket":"T-4"`, `"ticket":"T-5"`, `"source":"Thermometer"`} {
		if !strings.Contains(string(data), kept) {
			t.Errorf("%s is lost: %s", kept, data)
		}
	}
	refused := gpu.Condition{Type: gpu.PrepareFailed, Message: "m", Refused: []gpu.DeviceName{"gpu-ad0d4a08"}, RetryAt: start.Add(4 * time.Minute)}
	if got, want := s.Conditions(), []gpu.Condition{refused, {Type: "TooHot", Message: "m"}}; !cmp.Equal(want, got) {
		t.Errorf("conditions %v, want %v", got, want)
	}
	s = after(t, is(s), readsUnder(reload, gpu.Vitals{}), readsUnder(reload, gpu.Vitals{}))
	if got := s.Conditions(); len(got) > 1 || len(got) == 1 && got[0].Type == "TooHot" {
		t.Errorf("after the driver was loaded again: conditions %v", got)
	}
}

func FuzzState(f *testing.F) {
	f.Add([]byte(stored))
	f.Add([]byte(stored[:len(stored)/2]))
	f.Add([]byte(`{"causes":null,"Causes":[{"Type":"Lost","type":"x"}],"ended":[{}]}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var s health.State
		if json.Unmarshal(data, &s) != nil {
			return
		}
		first, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var again health.State
		if err := json.Unmarshal(first, &again); err != nil {
			t.Fatalf("%s is written as %s: %v", data, first, err)
		}
		if second, err := json.Marshal(again); err != nil || string(first) != string(second) {
			t.Errorf("%s is written as %s, then as %s, %v", data, first, second, err)
		}
		play(t, again)
	})
}

// play lets everything happen to a GPU. Nothing of it may fail, or change the state
// that it begins with.
func play(t *testing.T, s health.State) {
	before, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	lost := gpu.Condition{Type: gpu.Lost, Message: "lost"}
	vitals := gpu.Vitals{Recovery: gpu.RecoveryReset, RowRemap: &gpu.RowRemap{Pending: true, Failed: true}, NVLinksDown: []int{0, 5}, SRAMThresholdExceeded: new(true)}
	end := after(t, is(s), reads(vitals), xid(95, gpu.RecoveryUnsupported), xid(79, gpu.RecoveryBusReset), restart, silent(lost), action(gpu.RecoveryOther), action(gpu.RecoveryNone))
	refused := s.ObserveRefusal(health.Refusal{Device: "a", Message: "m", At: start, Load: load})
	refused.ObserveRefusal(health.Refusal{Device: "b", Message: "m", At: start.Add(time.Hour), Load: reload}).ObservePrepared(start.Add(2 * time.Hour))
	for _, c := range end.Conditions() {
		ended, _ := end.End(health.Ending{Type: c.Type, By: "ann", Why: "tested it", At: start.Add(time.Hour)}, c.Since)
		ended.Observe(health.Reading{At: start.Add(time.Hour), Load: reload, Vitals: &gpu.Vitals{}})
	}
	if now, err := json.Marshal(s); err != nil || string(now) != string(before) {
		t.Errorf("the state was %s, and is %s, %v", before, now, err)
	}
}
