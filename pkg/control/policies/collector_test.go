package policies

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
)

// TestMetricsOfPolicies has a policy of each kind.
func TestMetricsOfPolicies(t *testing.T) {
	applied, waits, fresh := controltest.Policy("applied", v1alpha1.SharingPolicySpec{}), controltest.Policy("waits", v1alpha1.SharingPolicySpec{}), controltest.Policy("new", v1alpha1.SharingPolicySpec{})
	applied.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonApplied}}
	waits.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonWaiting}}
	r := prometheus.NewRegistry()
	r.MustRegister(NewCollector(controltest.NewAPI(t, applied, waits, fresh)))
	const want = `
# HELP tessera_policy_applied Whether the SharingPolicy's condition Applied is true, with its reason.
# TYPE tessera_policy_applied gauge
tessera_policy_applied{policy="applied",reason="Applied"} 1
tessera_policy_applied{policy="waits",reason="Waiting"} 0
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}
