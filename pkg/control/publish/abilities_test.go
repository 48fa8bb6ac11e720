package publish

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestOr checks that earlier answers count where there are none, as long as the server is of
// the same minor version.
func TestOr(t *testing.T) {
	before := Abilities{Counters: SplitCounters, Multiple: Yes, Taints: No, InformationalTaints: No, Charged: true, Version: "v1.36.3"}
	for version, kept := range map[string]bool{
		"v1.36.3": true, "v1.36.4": true, "v1.36.4-gke.100": true, "v1.37.0": false, "v1.35.9": false, "v2.36.3": false, "unknown": false, "": true,
	} {
		got := Abilities{Version: version, Taints: Yes, Doubt: "It refuses."}.Or(before)
		want := Abilities{Version: version, Taints: Yes, Doubt: "It refuses."}
		if kept {
			want = Abilities{Counters: SplitCounters, Multiple: Yes, Taints: Yes, InformationalTaints: No, Version: version}
		}
		if version == "" {
			want.Version, want.Charged = before.Version, before.Charged
		}
		if got != want {
			t.Errorf("%q: got %+v, want %+v", version, got, want)
		}
	}
}

// TestOrShown checks which abilities slices show, trimmed ones too.
func TestOrShown(t *testing.T) {
	several := gpus(1)
	several[0].Devices[0].AllowMultipleAllocations = new(true)
	informed := gpus(1)
	informed[0].Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNone}}
	foreign := Pool(owner("n"), cuttable(1), SplitCounters)
	for i := range foreign {
		foreign[i].Labels = map[string]string{}
	}
	for name, tc := range map[string]struct {
		pool    []resourceapi.ResourceSlice
		version string
		want    Abilities
	}{
		"plain devices":                 {Pool(owner("n"), gpus(1), NoCounters), "v1.36.3", Abilities{}},
		"split counters":                {Pool(owner("n"), cuttable(1), SplitCounters), "v1.36.3", Abilities{Counters: SplitCounters}},
		"split counters, on another":    {Pool(owner("n"), cuttable(1), SplitCounters), "v1.34.3", Abilities{}},
		"joint counters":                {Pool(owner("n"), cuttable(1), JointCounters), "v1.34.3", Abilities{Counters: JointCounters}},
		"joint counters, on another":    {Pool(owner("n"), cuttable(1), JointCounters), "v1.35.0", Abilities{}},
		"counters, on an unknown one":   {Pool(owner("n"), cuttable(1), JointCounters), "", Abilities{Counters: JointCounters}},
		"both forms, on an unknown one": {slices.Concat(Pool(owner("m"), cuttable(1), SplitCounters), Pool(owner("n"), cuttable(1), JointCounters)), "", Abilities{Counters: SplitCounters}},
		"several allocations":           {Pool(owner("n"), several, NoCounters), "v1.36.3", Abilities{Multiple: Yes}},
		"taints":                        {Pool(owner("n"), tainted(gpus(1)), NoCounters), "v1.36.3", Abilities{Taints: Yes}},
		"informational taints":          {Pool(owner("n"), informed, NoCounters), "v1.36.3", Abilities{Taints: Yes, InformationalTaints: Yes}},
		"another driver's":              {foreign, "v1.36.3", Abilities{}},
	} {
		t.Run(name, func(t *testing.T) {
			whole, trimmed := stored(tc.pool, 1), stored(tc.pool, 1)
			for _, s := range trimmed {
				trim(s)
			}
			tc.want.Version = tc.version
			for form, all := range map[string][]*resourceapi.ResourceSlice{"whole": whole, "trimmed": trimmed} {
				if got := (Abilities{Version: tc.version}).OrShown(slices.Values(all)); got != tc.want {
					t.Errorf("%s: got %+v, want %+v", form, got, tc.want)
				}
			}
			known := Abilities{Counters: NoCounters, Multiple: No, Taints: No, InformationalTaints: No, Version: tc.version}
			if got := known.OrShown(slices.Values(whole)); got != known {
				t.Errorf("got %+v instead of %+v, which was known", got, known)
			}
		})
	}
}

// TestServerForItsScheduler checks that devices which can be allocated several times aren't
// offered if the scheduler can't count them, although the server stores them.
func TestServerForItsScheduler(t *testing.T) {
	for version, want := range map[string]bool{"v1.34.13": false, "v1.35.0": false, "v1.36.0": true, "": false} {
		if got := (Abilities{Multiple: Yes, Version: version}).ForOffers(); got.Multiple != want {
			t.Errorf("%q: got %v, want %v", version, got.Multiple, want)
		}
	}
}

// TestEffectNone checks that no taint has the effect None beside a scheduler that may take
// it for a blocking one.
func TestEffectNone(t *testing.T) {
	for v, want := range map[string]bool{"v1.35.4": false, "v1.36.0": true} {
		able := Abilities{Taints: Yes, InformationalTaints: Yes, Version: v}
		if got := able.ForOffers(); got.InformationalTaints != want || got.MaxTainted == 0 {
			t.Errorf("%s: %+v", v, got)
		}
	}
}
