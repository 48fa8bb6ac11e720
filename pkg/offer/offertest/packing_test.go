package offertest_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// TestPacking: the order of an offer must never lose to the order of names, and
// must win over all. Chance has fixed seeds.
func TestPacking(t *testing.T) {
	var all offertest.Packing
	for name, mix := range offertest.Mixes() {
		var sum offertest.Packing
		for _, gpus := range []int{1, 2, 8} {
			p, err := offertest.Compare(mix, gpus, 1500, 8)
			if err != nil {
				t.Fatal(err)
			}
			sum.Claims += p.Claims
			sum.Ours += p.Ours
			sum.Lexical += p.Lexical
		}
		t.Logf("%s: %.4f of the claims found a device, %.4f in the order of names: ratio %.4f",
			name, share(sum.Ours, sum), share(sum.Lexical, sum), sum.Ratio())
		if sum.Ratio() < 1 {
			t.Errorf("%s: ratio %.4f, want at least 1", name, sum.Ratio())
		}
		all.Claims += sum.Claims
		all.Ours += sum.Ours
		all.Lexical += sum.Lexical
	}
	if all.Ratio() <= 1.003 {
		t.Errorf("all: ratio %.4f, want more than 1.003", all.Ratio())
	}
}

func share(n int, of offertest.Packing) float64 { return float64(n) / float64(of.Claims) }

func TestPackingAcceptanceRatioRepeats(t *testing.T) {
	a, err := offertest.PackingAcceptanceRatio(500, 1)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := offertest.PackingAcceptanceRatio(500, 1); err != nil || a != b {
		t.Errorf("%v, then %v, %v", a, b, err)
	}
}

// A device is given once, and counters are taken and given back.
func TestPlayFillsAndEmpties(t *testing.T) {
	for name, tc := range map[string]struct {
		load offertest.Load
		want int
	}{
		"nobody leaves":      {offertest.Load{Claims: 100, Pressure: 1e9, Seed: 1}, 14},
		"nobody meets other": {offertest.Load{Claims: 100, Pressure: 1e-9, Seed: 1}, 100},
	} {
		p, err := offertest.CompareUnder(offertest.Mix{"1g.10gb": 1}, 2, tc.load)
		if err != nil {
			t.Fatal(err)
		}
		if p.Ours != tc.want || p.Lexical != tc.want {
			t.Errorf("%s: %+v, want %d", name, p, tc.want)
		}
	}
}
