package healthmonitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// reasonReset: the plugin resets a GPU, has reset it, or has failed to.
const reasonReset = "GPUReset"

// heal resets the GPU if it needs that and may be reset, and explains the next step, or
// the one of an admin, in its condition. recovery is the driver's recovery
// action, read just now.
func (m *Monitor) heal(ctx context.Context, w *watchedGPU, recovery gpu.RecoveryAction) {
	if m.cfg.Preparer == nil {
		return
	}
	plan := m.planReset(w, recovery)
	if !plan.Now {
		m.explain(w, plan.Message)
		return
	}
	release, err := m.reserve(ctx, w.uuid)
	if err != nil { // the next reading tries again
		klog.FromContext(ctx).V(2).Info("A GPU that needs a reset isn't idle yet", "node", m.cfg.NodeName, "gpu", w.uuid, "err", err)
		return
	}
	defer release()
	m.explain(w, plan.Message)
	m.reset(ctx, w, recovery)
}

func (m *Monitor) planReset(w *watchedGPU, recovery gpu.RecoveryAction) health.ResetPlan {
	x := m.resetFacts(w.uuid)
	x.At, x.Recovery = time.Now(), recovery
	return m.stateOf(w).PlanReset(x)
}

// reset resets the GPU, which nothing of ours uses: intent, effect, result.
func (m *Monitor) reset(ctx context.Context, w *watchedGPU, recovery gpu.RecoveryAction) {
	logger := klog.FromContext(ctx)
	m.change(ctx, w, func(s health.State) health.State { return s.BeginReset(time.Now()) })
	var err error
	if m.isSaved(w) {
		logger.Info("Resetting a GPU", "node", m.cfg.NodeName, "gpu", w.uuid)
		m.cfg.Events.OnNode(corev1.EventTypeNormal, reasonReset, fmt.Sprintf("GPU %s: the driver asks for a reset, and no claim has any of the GPU: resetting it", w.uuid))
		err = m.Reset(ctx, w.uuid)
	} else {
		err = errors.New("the node's journal can't be written")
	}
	m.change(ctx, w, func(s health.State) health.State {
		return s.EndReset(time.Now(), err, errors.Is(err, ErrResetImpossible))
	})
	if err == nil {
		logger.Info("A GPU was reset", "node", m.cfg.NodeName, "gpu", w.uuid)
		m.cfg.Events.OnNode(corev1.EventTypeNormal, reasonReset, fmt.Sprintf("GPU %s was reset", w.uuid))
		return
	}
	logger.Error(err, "A GPU can't be reset", "node", m.cfg.NodeName, "gpu", w.uuid)
	m.cfg.Events.OnNode(corev1.EventTypeWarning, reasonReset, fmt.Sprintf("GPU %s: %s", w.uuid, m.planReset(w, recovery).Message))
}

// explain sets the text that follows the message of the condition ResetRequired.
func (m *Monitor) explain(w *watchedGPU, text string) {
	m.mu.Lock()
	changed := w.healing != text
	w.healing = text
	m.mu.Unlock()
	if changed {
		m.publish()
	}
}

// conditions returns the GPU's conditions, with the explanation. The one about readings isn't
// part of the state: the next reading says whether it is still so. Needs the lock.
func (w *watchedGPU) conditions() []gpu.Condition {
	all := w.current.Conditions()
	for i := range all {
		if all[i].Type == gpu.ResetRequired && w.healing != "" {
			all[i].Message += "; " + w.healing
		}
	}
	if w.unread != "" {
		all = append(all, gpu.Condition{Type: gpu.VitalsUnreadable, Message: w.unread})
	}
	return all
}
