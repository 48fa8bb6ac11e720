//go:build integration

package test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	rank1   = `{"key": "gpu.tessera.dev/rank-1", "effect": "PreferNoSchedule"}`
	rank6   = `{"key": "gpu.tessera.dev/rank-6", "effect": "PreferNoSchedule"}`
	reserve = `{"key": "gpu.tessera.dev/reserve", "effect": "NoSchedule"}`
)

// controllerTaints tries writes of a Node's taints with the controller's token, with what the
// release allows now: nothing but to remove ranks, ranks, or ranks and the hard reserve.
func controllerTaints(t *testing.T, s *server, ranks, hard bool) {
	ctx, controller := t.Context(), s.as(t, "controller", "")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-taints"}}
	node.Spec.Taints = []corev1.Taint{
		{Key: "example.com/mine", Value: "kept", Effect: corev1.TaintEffectNoSchedule},
		{Key: "gpu.tessera.dev/rank-1", Effect: corev1.TaintEffectPreferNoSchedule},
	}
	if err := s.admin.Create(ctx, node, client.FieldOwner("admin")); err != nil {
		t.Fatal(err)
	}
	var kept []string // the admin's, and those that the server adds
	for _, taint := range node.Spec.Taints {
		if taint.Key != "gpu.tessera.dev/rank-1" {
			data, err := json.Marshal(taint)
			if err != nil {
				t.Fatal(err)
			}
			kept = append(kept, string(data))
		}
	}
	mine := strings.Join(kept, ", ")
	defer func() { _ = s.admin.Delete(context.WithoutCancel(ctx), node) }()
	for what, c := range map[string]struct {
		patch   string
		allowed bool
	}{
		"remove a rank":             {`{"spec": {"taints": [` + mine + `]}}`, true},
		"add a rank":                {`{"spec": {"taints": [` + mine + `, ` + rank1 + `, ` + rank6 + `]}}`, ranks},
		"add the hard reserve":      {`{"spec": {"taints": [` + mine + `, ` + rank1 + `, ` + reserve + `]}}`, hard},
		"remove another's taint":    {`{"spec": {"taints": [` + rank1 + `]}}`, false},
		"remove all":                {`{"spec": {"taints": null}}`, false},
		"change another's taint":    {`{"spec": {"taints": [{"key": "example.com/mine", "effect": "NoSchedule"}, ` + rank1 + `]}}`, false},
		"keep all pods off":         {`{"spec": {"taints": [` + mine + `, {"key": "gpu.tessera.dev/rank-1", "effect": "NoSchedule"}]}}`, false},
		"end all pods":              {`{"spec": {"taints": [` + mine + `, {"key": "gpu.tessera.dev/reserve", "effect": "NoExecute"}]}}`, false},
		"add another key":           {`{"spec": {"taints": [` + mine + `, {"key": "gpu.tessera.dev/rank-10", "effect": "PreferNoSchedule"}]}}`, false},
		"cordon with it":            {`{"spec": {"unschedulable": true, "taints": [` + mine + `]}}`, false},
		"annotate with it":          {`{"metadata": {"annotations": {"a": "b"}}, "spec": {"taints": [` + mine + `]}}`, false},
		"label with it":             {`{"metadata": {"labels": {"zone": "b"}}, "spec": {"taints": [` + mine + `]}}`, false},
		"the provider's ID with it": {`{"spec": {"providerID": "x", "taints": [` + mine + `]}}`, false},
	} {
		t.Run(what, func(t *testing.T) {
			write := func(ctx context.Context) error {
				return controller.Patch(ctx, node.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(c.patch)), client.DryRunAll, client.FieldOwner("tessera-ranks"))
			}
			if !c.allowed {
				denied(t, "the controller may", write)
				return
			}
			var last error
			if err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
				last = write(ctx)
				return last == nil, nil // the policy of before may still be in force
			}); err != nil {
				t.Error(last)
			}
		})
	}
}
