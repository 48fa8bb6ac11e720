package healthmonitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

const (
	// removeFirst is the first pause after the annotation could not be removed.
	removeFirst = 5 * time.Second
	// removeLast is the longest one.
	removeLast = time.Minute
	// removeWithin is how long the API server has to answer.
	removeWithin = 5 * time.Second
)

// reasonNotEnded: a condition that was to be ended by hand stays.
const reasonNotEnded = "GPUConditionNotEnded"

// enqueue takes in an inventory's annotation v1alpha1.AnnotationEndCondition, which requests
// that a condition is ended by hand. It doesn't block. The annotation is removed before the
// condition is ended, so that it is handled once; and it has a time, so that one that could not
// be removed ends no later condition.
func (m *Monitor) enqueue(inv *v1alpha1.GPUInventory) {
	text := inv.Annotations[v1alpha1.AnnotationEndCondition]
	if text == "" {
		return
	}
	m.mu.Lock()
	m.ending = text
	m.mu.Unlock()
	m.tasks.At(task{kind: endByHand}, time.Now())
}

// handleEnding ends the condition that was requested last. While the annotation can't be removed,
// requests wait: each change of the inventory would be another attempt.
func (m *Monitor) handleEnding(ctx context.Context) {
	m.awaitGPUs(ctx)
	m.mu.Lock()
	text := m.ending
	m.mu.Unlock()
	switch {
	case text == "" || ctx.Err() != nil:
	case m.handle(ctx, text):
		m.tasks.Failed(task{kind: endByHand})
	default:
		m.mu.Lock()
		if m.ending == text { // and no other one came meanwhile, which has its own task
			m.ending = ""
		}
		m.mu.Unlock()
		m.tasks.Succeeded(task{kind: endByHand})
	}
}

// awaitGPUs waits until the GPUs have been looked for: an annotation that was there
// before the plugin started can name any of them.
func (m *Monitor) awaitGPUs(ctx context.Context) {
	for {
		known, changed := m.cfg.Facts.State()
		if known.Known {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// handle removes the annotation, and ends the condition. It reports whether the annotation
// stays, because it could not be removed.
func (m *Monitor) handle(ctx context.Context, text string) (stays bool) {
	err := m.remove(ctx, text)
	if apierrors.IsInvalid(err) || apierrors.IsNotFound(err) {
		return false // it has another value by now, or none
	}
	stays = err != nil
	if err == nil {
		err = m.endAsRequested(ctx, text)
	}
	if err != nil {
		klog.FromContext(ctx).Info("A condition isn't ended by hand", "node", m.cfg.NodeName, "annotation", text, "err", err)
		m.cfg.Events.OnNode(corev1.EventTypeWarning, reasonNotEnded, fmt.Sprintf("%q: %v", text, err))
	}
	return stays
}

// endAsRequested ends the condition that the annotation names.
func (m *Monitor) endAsRequested(ctx context.Context, text string) error {
	words := strings.SplitN(text, " ", 5)
	if len(words) < 5 || strings.TrimSpace(words[4]) == "" {
		return errors.New("want the GPU's index or UUID, the condition, the time, your user name and the reason, with a space between each")
	}
	begunBy, err := time.Parse(time.RFC3339, words[2])
	if err != nil {
		return fmt.Errorf("want the time as 2006-01-02T15:04:05Z: %w", err)
	}
	known, _ := m.cfg.Facts.State()
	for _, g := range known.Node.GPUs {
		if words[0] == string(g.UUID) || words[0] == strconv.Itoa(g.Index) {
			ending := health.Ending{Type: gpu.ConditionType(words[1]), At: time.Now(), By: words[3], Why: words[4]}
			if _, silent, _ := m.cfg.Facts.GPUs(); ending.Type == gpu.Lost && slices.Contains(silent, g.UUID) {
				return m.EndUnlisted(ctx, g.UUID, ending, begunBy)
			}
			return m.End(ctx, g.UUID, ending, begunBy)
		}
	}
	return fmt.Errorf("the node has no GPU %s", words[0])
}

// forgetUnlisted removes a lost GPU from the facts, if NVML doesn't list it and no claim has it.
func (m *Monitor) forgetUnlisted(ctx context.Context, uuid gpu.UUID) error {
	if users := m.users(uuid); len(users) > 0 {
		return fmt.Errorf("%s has the GPU", users[0])
	}
	ctx, cancel := context.WithTimeout(ctx, forgetWithin)
	defer cancel()
	return m.OrderForget(ctx, uuid)
}

// remove removes the annotation if it still has that value.
func (m *Monitor) remove(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, removeWithin)
	defer cancel()
	path := "/metadata/annotations/" + strings.ReplaceAll(v1alpha1.AnnotationEndCondition, "/", "~1")
	patch, err := json.Marshal([]map[string]string{{"op": "test", "path": path, "value": text}, {"op": "remove", "path": path}})
	if err != nil {
		return err
	}
	url := fmt.Sprintf("/apis/%s/gpuinventories/%s", v1alpha1.GroupVersion, m.cfg.NodeName)
	err = m.cfg.Client.CoreV1().RESTClient().Patch(types.JSONPatchType).AbsPath(url).SetHeader("Accept", "application/json").Body(patch).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("remove the annotation from GPUInventory %s, so that it isn't handled twice: %w", m.cfg.NodeName, err)
	}
	return nil
}
