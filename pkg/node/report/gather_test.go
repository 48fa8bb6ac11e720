package report_test

import (
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestGather checks for how long a change of a GPU's health waits for others before it
// is written.
func TestGather(t *testing.T) {
	const ms = time.Millisecond
	every := func(pause time.Duration, n int) (at []time.Duration) {
		for i := range n {
			at = append(at, time.Duration(i+1)*pause)
		}
		return at
	}
	for name, tc := range map[string]struct {
		further []time.Duration // changes after the first one
		request time.Duration   // the controller's, for an answer
		want    time.Duration
	}{
		"one change":                          {want: 100 * ms},
		"seven more within a moment":          {further: every(ms, 7), want: 107 * ms},
		"another one too late":                {further: []time.Duration{150 * ms}, want: 100 * ms},
		"changes without an end":              {further: every(50*ms, 100), want: 400 * ms},
		"the controller waits for the answer": {further: every(ms, 7), request: 20 * ms, want: 20 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := facts.New("node-0")
				r, err := report.New(report.Config{NodeName: "node-0", REST: &rest.Config{Host: "http://localhost"}, Facts: f})
				if err != nil {
					t.Fatal(err)
				}
				inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{UID: "uid"}}
				r.Reported(inv)
				for _, at := range tc.further {
					time.AfterFunc(at, func() { f.SetHealth(map[gpu.UUID][]gpu.Condition{}) })
				}
				if tc.request > 0 {
					asked := inv.DeepCopy()
					asked.Spec.PublishRequest = 1
					time.AfterFunc(tc.request, func() { r.Saw(asked) })
				}
				begun := time.Now()
				r.Gather(t.Context())
				if took := time.Since(begun); took != tc.want {
					t.Errorf("the first change is written after %v, want %v", took, tc.want)
				}
			})
		})
	}
}
