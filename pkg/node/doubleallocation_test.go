package node

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// TestDescribeDoubleAllocation checks that the message names both claims, and the version
// for which it counts.
func TestDescribeDoubleAllocation(t *testing.T) {
	got := describeDoubleAllocation(prepare.DoubleAllocation{
		Holder:  prepare.AllocatedDevice{Claim: holding.Record{Namespace: "ns", Name: "a", Pods: []holding.Pod{{Name: "runs"}}}, Device: "gpu-1-mig-1g10gb-0"},
		Refused: prepare.AllocatedDevice{Claim: holding.Record{Namespace: "ns", Name: "b"}, Device: "gpu-1"},
	}, "v1.36.3")
	for _, want := range []string{"gpu-1-mig-1g10gb-0 to claim ns/a of pod runs, and gpu-1 to claim ns/b, which the node refuses", "While the API server is Kubernetes v1.36.3,"} {
		if !strings.Contains(got, want) {
			t.Errorf("got %q, want in it %q", got, want)
		}
	}
}
