package node

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
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// forgetWithin bounds the time to find out whether NVML lists a GPU.
const forgetWithin = 30 * time.Second

const (
	// removeFirst is the first pause after the annotation could not be removed.
	removeFirst = 5 * time.Second
	// removeLast is the longest one.
	removeLast = time.Minute
)

// reasonNotEnded: a condition that was to be ended by hand stays.
const reasonNotEnded = "GPUConditionNotEnded"

// endings ends conditions of GPUs by hand, as the GPUInventory's annotation
// v1alpha1.AnnotationEndCondition requests. The annotation is removed before the condition
// is ended, so that it is handled once; and it has a time, so that one that could not be
// removed ends no later condition.
type endings struct {
	p        *plugin
	requests chan *v1alpha1.GPUInventory // the last one with the annotation
}

func newEndings(p *plugin) *endings {
	return &endings{p: p, requests: make(chan *v1alpha1.GPUInventory, 1)}
}

// enqueue takes in an inventory. It doesn't block.
func (e *endings) enqueue(inv *v1alpha1.GPUInventory) {
	if inv.Annotations[v1alpha1.AnnotationEndCondition] == "" {
		return
	}
	for {
		select {
		case e.requests <- inv:
			return
		default:
		}
		select {
		case <-e.requests: // an older one
		default:
		}
	}
}

func (e *endings) run(ctx context.Context) {
	e.awaitGPUs(ctx)
	failures := flowcontrol.NewBackOff(removeFirst, removeLast) // each change of the inventory would be another attempt
	for {
		select {
		case inv := <-e.requests:
			if stays := e.handle(ctx, inv.Annotations[v1alpha1.AnnotationEndCondition]); !stays {
				failures.Reset(e.p.cfg.NodeName)
				continue
			}
			failures.Next(e.p.cfg.NodeName, time.Now())
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(failures.Get(e.p.cfg.NodeName)):
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

// handle removes the annotation, and ends the condition. It reports whether the annotation
// stays, because it could not be removed.
func (e *endings) handle(ctx context.Context, text string) (stays bool) {
	err := e.remove(ctx, text)
	if apierrors.IsInvalid(err) || apierrors.IsNotFound(err) {
		return false // it has another value by now, or none
	}
	stays = err != nil
	if err == nil {
		err = e.end(ctx, text)
	}
	if err != nil {
		klog.FromContext(ctx).Info("A condition isn't ended by hand", "node", e.p.cfg.NodeName, "annotation", text, "err", err)
		e.p.warnings.OnNode(corev1.EventTypeWarning, reasonNotEnded, fmt.Sprintf("%q: %v", text, err))
	}
	return stays
}

// end ends the condition that the annotation names.
func (e *endings) end(ctx context.Context, text string) error {
	words := strings.SplitN(text, " ", 5)
	if len(words) < 5 || strings.TrimSpace(words[4]) == "" {
		return errors.New("want the GPU's index or UUID, the condition, the time, your user name and the reason, with a space between each")
	}
	begunBy, err := time.Parse(time.RFC3339, words[2])
	if err != nil {
		return fmt.Errorf("want the time as 2006-01-02T15:04:05Z: %w", err)
	}
	known, _ := e.p.facts.State()
	for _, g := range known.Node.GPUs {
		if words[0] == string(g.UUID) || words[0] == strconv.Itoa(g.Index) {
			ending := health.Ending{Type: gpu.ConditionType(words[1]), At: time.Now(), By: words[3], Why: words[4]}
			if _, silent, _ := e.p.facts.GPUs(); ending.Type == gpu.Lost && slices.Contains(silent, g.UUID) {
				forget := func(ctx context.Context) error { return e.forget(ctx, g.UUID) }
				return e.p.health.EndUnlisted(ctx, g.UUID, ending, begunBy, forget)
			}
			return e.p.health.End(ctx, g.UUID, ending, begunBy)
		}
	}
	return fmt.Errorf("the node has no GPU %s", words[0])
}

// forget removes a lost GPU from the facts, if NVML doesn't list it and no claim has it.
func (e *endings) forget(ctx context.Context, uuid gpu.UUID) error {
	if users := e.p.resets.users(uuid); len(users) > 0 {
		return fmt.Errorf("%s has the GPU", users[0])
	}
	ctx, cancel := context.WithTimeout(ctx, forgetWithin)
	defer cancel()
	return e.p.driver.Forget(ctx, uuid)
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
		return fmt.Errorf("remove the annotation from GPUInventory %s, so that it isn't handled twice: %w", e.p.cfg.NodeName, err)
	}
	return nil
}
