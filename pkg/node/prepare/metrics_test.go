package prepare_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
)

// TestFailuresByReason checks the reason by which a failed prepare is counted.
func TestFailuresByReason(t *testing.T) {
	for reason, fail := range map[string]func(t *testing.T, f *fixture) *resourceapi.ResourceClaim{
		"held": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if _, err := f.Prepare(testContext(t), newClaim("first", result("gpu", 0))); err != nil {
				t.Fatal(err)
			}
			return newClaim("next", result("gpu", 0))
		},
		"refused": func(*testing.T, *fixture) *resourceapi.ResourceClaim {
			return newClaim("c", share("s", 0, 4, 1), share("s", 1, 4, 1))
		},
		"stopped": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.node.daemons.SetFault(func(string, string) error { return context.DeadlineExceeded })
			return newClaim("c", share("s", 0, 4, 1))
		},
		"sharing": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.node.daemons.SetFault(func(call, _ string) error {
				if call == "ensure" {
					return errors.New("the daemon doesn't start")
				}
				return nil
			})
			return newClaim("c", share("s", 0, 4, 1))
		},
		"hardware": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if err := f.node.sim.SetMIGMode(uuidOf(0), true); err != nil {
				t.Fatal(err)
			}
			if _, err := f.node.sim.CreateInstance(oneSlice(0, 0)); err != nil {
				t.Fatal(err)
			}
			return newClaim("c", result("gpu", 0)) // whose partition isn't Tessera's
		},
		"state": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if err := os.RemoveAll(f.node.journal); err != nil {
				t.Fatal(err)
			}
			return newClaim("c", result("gpu", 0))
		},
	} {
		t.Run(reason, func(t *testing.T) {
			f := newFixture(t, 2)
			c := fail(t, f)
			_, err := f.Prepare(almostOver(t), c)
			if err == nil {
				t.Fatal("the prepare succeeded")
			}
			want := map[string]float64{reason: 1}
			if diff := cmp.Diff(want, failures(t, f)); diff != "" {
				t.Errorf("failures after %q (-want +got):\n%s", err, diff)
			}
			problems, err := testutil.GatherAndLint(f.metrics)
			if err != nil || len(problems) > 0 {
				t.Errorf("%v, %v", problems, err)
			}
		})
	}
}

// failures returns the failures that were counted, by reason.
func failures(t *testing.T, f *fixture) map[string]float64 {
	t.Helper()
	families, err := f.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counted := map[string]float64{}
	for _, family := range families {
		if family.GetName() != "tessera_prepare_failures_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			if n := m.GetCounter().GetValue(); n > 0 {
				counted[m.GetLabel()[0].GetValue()] = n
			}
		}
	}
	return counted
}
