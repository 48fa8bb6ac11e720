package cluster

import (
	"context"
	"errors"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// Judge reads the objects that a scheduler uses for a pod, or for claims alone. It
// fails if the user may not read the slices, classes or claims, because the answer would be
// wrong without them.
func (r *Reader) Judge(ctx context.Context, namespace string, pod *corev1.Pod) (*fit.Judge, fit.Objects, error) {
	var o fit.Objects
	var err error
	if o.Slices, err = r.Slices(ctx, ""); err != nil {
		return nil, o, err
	}
	if o.Classes, err = r.classes(ctx); err != nil {
		return nil, o, err
	}
	if o.Claims, _, err = r.Claims(ctx, namespace); err != nil {
		return nil, o, err
	}
	if err := r.RequireRead("what fits", SlicesName, classesName, ClaimsName); err != nil {
		return nil, o, err
	}
	if len(o.Slices) == 0 {
		return nil, o, errors.New("no driver publishes ResourceSlices in this cluster: is Tessera installed, and does kubectl gpu map show GPUs?")
	}
	if o.TaintRules, err = r.taintRules(ctx); err != nil {
		return nil, o, err
	}
	if o.Nodes, err = r.Nodes(ctx); err != nil {
		return nil, o, err
	}
	if pod != nil && o.ServedByPlugins(pod) {
		if o.Pods, err = r.pods(ctx); err != nil {
			return nil, o, err
		}
	}
	return fit.NewJudge(o), o, nil
}

// allocatorVersion is the Kubernetes whose allocator judges: that of go.mod.
const allocatorVersion = "1.37"

// NoteVersion notes that the cluster's scheduler is of another version.
func (r *Reader) NoteVersion() {
	v, err := r.Kube.Discovery().ServerVersion()
	if err != nil {
		return // it is for a note only
	}
	minor := strings.Join(strings.SplitN(strings.TrimPrefix(v.GitVersion, "v"), ".", 3)[:2], ".")
	if minor != allocatorVersion {
		r.Note("This is the judgement of the allocator of Kubernetes %s; the cluster's is %s, and older schedulers may find less (%scompatibility.md).", allocatorVersion, minor, Documents)
	}
}
