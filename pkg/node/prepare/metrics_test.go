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

// TestFailuresByReason checks the reason and the class by which a failed prepare is counted.
func TestFailuresByReason(t *testing.T) {
	for want, fail := range map[string]func(t *testing.T, f *fixture) *resourceapi.ResourceClaim{
		"held moment": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if _, err := f.Prepare(testContext(t), newClaim("first", result("gpu", 0))); err != nil {
				t.Fatal(err)
			}
			return newClaim("next", result("gpu", 0))
		},
		"refused claim": func(*testing.T, *fixture) *resourceapi.ResourceClaim {
			return newClaim("c", share("s", 0, 4, 1), share("s", 1, 4, 1))
		},
		"stopped moment": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.node.daemons.SetFault(func(string, string) error { return context.DeadlineExceeded })
			return newClaim("c", share("s", 0, 4, 1))
		},
		"sharing node": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.node.daemons.SetFault(func(call, _ string) error {
				if call == "ensure" {
					return errors.New("the daemon doesn't start")
				}
				return nil
			})
			return newClaim("c", share("s", 0, 4, 1))
		},
		"hardware device": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if err := f.node.sim.SetMIGMode(uuidOf(0), true); err != nil {
				t.Fatal(err)
			}
			if _, err := f.node.sim.CreateInstance(oneSlice(0, 0)); err != nil {
				t.Fatal(err)
			}
			return newClaim("c", result("gpu", 0)) // whose partition isn't Tessera's
		},
		"state node": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			if err := os.RemoveAll(f.node.journal); err != nil {
				t.Fatal(err)
			}
			return newClaim("c", result("gpu", 0))
		},
		"cdi device": func(t *testing.T, _ *fixture) *resourceapi.ResourceClaim {
			hideDeviceNode(t, 0)
			return newClaim("c", result("gpu", 0))
		},
		"cdi node": func(t *testing.T, f *fixture) *resourceapi.ResourceClaim {
			t.Cleanup(f.node.failSpecs(t))
			return newClaim("c", result("gpu", 0))
		},
		"other device": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.lose(0)
			return newClaim("c", result("gpu", 0))
		},
		"other node": func(*testing.T, *fixture) *resourceapi.ResourceClaim {
			return newClaim("c", result("gpu", 7))
		},
		"other claim": func(*testing.T, *fixture) *resourceapi.ResourceClaim { return newClaim("c") },
		"other moment": func(_ *testing.T, f *fixture) *resourceapi.ResourceClaim {
			f.facts.SawNode(false, "")
			return newClaim("c", result("gpu", 0))
		},
	} {
		t.Run(want, func(t *testing.T) {
			f := newFixture(t, 2)
			c := fail(t, f)
			_, err := f.Prepare(almostOver(t), c)
			if err == nil {
				t.Fatal("the prepare succeeded")
			}
			if diff := cmp.Diff(map[string]float64{want: 1}, failures(t, f)); diff != "" {
				t.Errorf("failures after %q (-want +got):\n%s", err, diff)
			}
			problems, err := testutil.GatherAndLint(f.metrics)
			if err != nil || len(problems) > 0 {
				t.Errorf("%v, %v", problems, err)
			}
		})
	}
}

// failures returns the failures that were counted, by reason and class.
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
				labels := map[string]string{}
				for _, l := range m.GetLabel() {
					labels[l.GetName()] = l.GetValue()
				}
				counted[labels["reason"]+" "+labels["class"]] = n
			}
		}
	}
	return counted
}
