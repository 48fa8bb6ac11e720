package stack

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// explainWithin is how long each command of Explain may take.
const explainWithin = 30 * time.Second

// Explain returns the state of the cluster and of Tessera, to find out why a test failed:
// pods, claims, events, logs, journals, and the findings of the doctors.
func (s *Stack) Explain(ctx context.Context) string {
	var b strings.Builder
	kubectl := func(args ...string) string {
		ctx, cancel := context.WithTimeout(ctx, explainWithin)
		defer cancel()
		out, err := s.Kubectl(ctx, args...)
		fmt.Fprintf(&b, "kubectl %s: %v\n%s\n", strings.Join(args, " "), err, out)
		return out
	}
	kubectl("get", "daemonsets,deployments,pods,resourceclaims", "--all-namespaces", "-o", "wide")
	kubectl("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp")
	kubectl("describe", "pods", "--all-namespaces", "--field-selector", "status.phase=Pending")
	kubectl("describe", "pods", "--namespace", Namespace)
	kubectl("logs", "--namespace", Namespace, "--selector", "app.kubernetes.io/name=tessera", "--all-containers", "--prefix", "--tail=80", "--max-log-requests=20")
	for name := range strings.FieldsSeq(kubectl("get", "pods", "--namespace", Namespace, "--selector", "app.kubernetes.io/component=node", "-o", "name")) {
		kubectl("exec", "--namespace", Namespace, name, "--", "kubelet-plugin", "doctor", "--looks=1")
	}
	for _, node := range s.Cluster.Nodes() {
		ctx, cancel := context.WithTimeout(ctx, explainWithin)
		out, err := s.Cluster.Exec(ctx, node, "sh", "-c", `find /var/lib/tessera -name "*.json" -exec cat {} +`)
		cancel()
		fmt.Fprintf(&b, "journal of %s: %v\n%s\n", node, err, out)
	}
	return b.String()
}
