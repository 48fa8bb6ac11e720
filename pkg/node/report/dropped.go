package report

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// dropped is a status of which the server has stored only a part: its
// CustomResourceDefinition is of an older version and lacks fields. Written again, it
// would be stored the same way, and the answer to each write causes the next one. It
// is written again after a change of the facts, and by the next plugin.
type dropped struct {
	sent, stored v1alpha1.GPUInventoryStatus
}

// covers reports whether writing want again would change nothing.
func (d *dropped) covers(have, want v1alpha1.GPUInventoryStatus) bool {
	return d != nil && equality.Semantic.DeepEqual(withoutTimes(have), d.stored) && equality.Semantic.DeepEqual(withoutTimes(want), d.sent)
}

// noteDropped remembers a write of which the server has stored only a part, and logs
// the first one in a row.
func (r *Reporter) noteDropped(ctx context.Context, sent, stored v1alpha1.GPUInventoryStatus) {
	if equality.Semantic.DeepEqual(sent, stored) {
		r.dropped = nil
		return
	}
	if r.dropped == nil {
		klog.FromContext(ctx).Error(nil, "The API server dropped fields of the GPUInventory's status, because its CustomResourceDefinition "+
			"is older than this plugin; upgrade the CRDs (crds.install=true), then restart the plugin", "node", r.cfg.NodeName)
	}
	r.dropped = &dropped{sent: withoutTimes(sent), stored: withoutTimes(stored)}
}

// withoutTimes returns a status without the times of its conditions: a time that the
// server drops is another one in the next status.
func withoutTimes(s v1alpha1.GPUInventoryStatus) v1alpha1.GPUInventoryStatus {
	s = *s.DeepCopy()
	for i := range s.Conditions {
		s.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	for i := range s.GPUs {
		for j := range s.GPUs[i].Conditions {
			s.GPUs[i].Conditions[j].LastTransitionTime = nil
		}
	}
	return s
}
