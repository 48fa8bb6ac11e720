package offertest

import (
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// Mixes are what claims ask for on H100s, as packing is judged by.
func Mixes() map[string]Mix {
	return map[string]Mix{
		"1g and 3g":       {"1g.10gb": 4, "3g.40gb": 1},
		"1g and 4g":       {"1g.10gb": 4, "4g.40gb": 1},
		"1g and 2g":       {"1g.10gb": 2, "2g.20gb": 1},
		"mostly 1g":       {"1g.10gb": 8, "2g.20gb": 1, "3g.40gb": 1},
		"1g, 2g, 3g, 4g":  {"1g.10gb": 1, "2g.20gb": 1, "3g.40gb": 1, "4g.40gb": 1},
		"the small ones":  {"1g.10gb": 2, "1g.20gb": 1, "2g.20gb": 1},
		"all sizes":       {"1g.10gb": 4, "1g.20gb": 2, "2g.20gb": 2, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
		"1g to the whole": {"1g.10gb": 8, "2g.20gb": 2, "3g.40gb": 2, "4g.40gb": 1, Whole: 1},
	}
}

// Packing is how many claims of how many found a device at once, in the order
// of the offer and in the order of names.
type Packing struct {
	Claims, Ours, Lexical int
}

// Ratio is our share of claims that found a device over that of the order of
// names: packing_acceptance_ratio.
func (p Packing) Ratio() float64 { return float64(p.Ours) / float64(p.Lexical) }

// Compare plays a mix on a number of H100s whose plan lists the mix's profiles,
// under light, full and too much pressure, with so many seeds each.
func Compare(mix Mix, gpus, claims int, seeds uint64) (Packing, error) {
	var loads []Load
	for _, pressure := range []float64{0.6, 0.9, 1.2} {
		for seed := range seeds {
			loads = append(loads, Load{Claims: claims, Pressure: pressure, Seed: seed})
		}
	}
	return CompareUnder(mix, gpus, loads...)
}

// CompareUnder is Compare with loads of one's own.
func CompareUnder(mix Mix, gpus int, loads ...Load) (Packing, error) {
	n, err := Node("h100-80gb", gpus)
	if err != nil {
		return Packing{}, err
	}
	profiles, _ := mix.kinds()
	plan := v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: slices.DeleteFunc(profiles, func(p string) bool { return p == Whole })}}
	ours := offer.Build(n, OnePlan(n, plan), nil, offer.Server{Counters: true})
	lexical := Lexical(ours)
	var sum Packing
	for _, l := range loads {
		sum = sum.plus(Packing{Claims: l.Claims, Ours: Play(ours, mix, l), Lexical: Play(lexical, mix, l)})
	}
	return sum, nil
}

func (p Packing) plus(q Packing) Packing {
	return Packing{Claims: p.Claims + q.Claims, Ours: p.Ours + q.Ours, Lexical: p.Lexical + q.Lexical}
}

// PackingAcceptanceRatio plays all mixes, on one GPU and on eight. The same code
// gives the same figure on every machine.
func PackingAcceptanceRatio(claims int, seeds uint64) (float64, error) {
	var all Packing
	for name, mix := range Mixes() {
		for _, gpus := range []int{1, 8} {
			p, err := Compare(mix, gpus, claims, seeds)
			if err != nil {
				return 0, fmt.Errorf("mix %q: %w", name, err)
			}
			all = all.plus(p)
		}
	}
	return all.Ratio(), nil
}
