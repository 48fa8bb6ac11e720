package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// reasonNotEnded: a condition that was to be ended by hand stays.
const reasonNotEnded = "GPUConditionNotEnded"

// endings ends conditions of GPUs by hand, as the GPUInventory's annotation
// v1alpha1.AnnotationEndCondition asks. The annotation is removed before the condition
// is ended, so that it is obeyed once; and it has a time, so that one that could not be
// removed ends no later condition.
type endings struct {
	p     *plugin
	asked chan *v1alpha1.GPUInventory // the last one with the annotation
}

func newEndings(p *plugin) *endings {
	return &endings{p: p, asked: make(chan *v1alpha1.GPUInventory, 1)}
}

// ask takes in an inventory. It doesn't block.
func (e *endings) ask(inv *v1alpha1.GPUInventory) {
	if inv.Annotations[v1alpha1.AnnotationEndCondition] == "" {
		return
	}
	for {
		select {
		case e.asked <- inv:
			return
		default:
		}
		select {
		case <-e.asked: // an older one
		default:
		}
	}
}

func (e *endings) run(ctx context.Context) {
	e.awaitGPUs(ctx)
	for {
		select {
		case inv := <-e.asked:
			e.answer(ctx, inv.Annotations[v1alpha1.AnnotationEndCondition])
		case <-ctx.Done():
			return
		}
	}
}

// awaitGPUs waits until the GPUs have been looked for: an annotation that was there
// before the plugin started can name any of them.
func (e *endings) awaitGPUs(ctx context.Context) {
	for {
		known, changed := e.p.facts.State()
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

// answer removes the annotation, and obeys it.
func (e *endings) answer(ctx context.Context, text string) {
	err := e.remove(ctx, text)
	if apierrors.IsInvalid(err) || apierrors.IsNotFound(err) {
		return // it has another value by now, or none
	}
	if err == nil {
		err = e.end(ctx, text)
	}
	if err != nil {
		klog.FromContext(ctx).Info("A condition isn't ended by hand", "node", e.p.cfg.NodeName, "annotation", text, "err", err)
		e.p.warnings.OnNode(corev1.EventTypeWarning, reasonNotEnded, fmt.Sprintf("%q: %v", text, err))
	}
}

// end obeys the annotation.
func (e *endings) end(ctx context.Context, text string) error {
	words := strings.SplitN(text, " ", 5)
	if len(words) < 5 || strings.TrimSpace(words[4]) == "" {
		return errors.New("want the GPU's index or UUID, the condition, the time, your user name and the reason, with a space between each")
	}
	at, err := time.Parse(time.RFC3339, words[2])
	if err != nil {
		return fmt.Errorf("want the time as 2006-01-02T15:04:05Z: %w", err)
	}
	known, _ := e.p.facts.State()
	for _, g := range known.Node.GPUs {
		if words[0] == string(g.UUID) || words[0] == strconv.Itoa(g.Index) {
			return e.p.health.End(ctx, g.UUID, gpu.ConditionType(words[1]), at, words[3], words[4])
		}
	}
	return fmt.Errorf("the node has no GPU %s", words[0])
}

// remove removes the annotation if it still has that value.
func (e *endings) remove(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	path := "/metadata/annotations/" + strings.ReplaceAll(v1alpha1.AnnotationEndCondition, "/", "~1")
	patch, err := json.Marshal([]map[string]string{{"op": "test", "path": path, "value": text}, {"op": "remove", "path": path}})
	if err != nil {
		return err
	}
	url := fmt.Sprintf("/apis/%s/gpuinventories/%s", v1alpha1.GroupVersion, e.p.cfg.NodeName)
	err = e.p.client.CoreV1().RESTClient().Patch(types.JSONPatchType).AbsPath(url).SetHeader("Accept", "application/json").Body(patch).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("remove the annotation from GPUInventory %s, so that it isn't obeyed twice: %w", e.p.cfg.NodeName, err)
	}
	return nil
}
