package cluster

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Labels of Tessera's own pods, as the chart sets them.
const (
	NameLabel      = "app.kubernetes.io/name=tessera"
	ComponentLabel = "app.kubernetes.io/component"
	NodeComponent  = "node"
)

// Plugins are those of the pods that are running plugins.
func Plugins(pods []corev1.Pod) []corev1.Pod {
	return slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool {
		return p.Labels[ComponentLabel] != NodeComponent || p.Status.Phase != corev1.PodRunning
	})
}

// TesseraPods are Tessera's own.
func (r *Reader) TesseraPods(ctx context.Context) ([]corev1.Pod, error) {
	from := r.podResource("")
	out, err := list[corev1.Pod](ctx, from, "", metav1.ListOptions{LabelSelector: NameLabel})
	return out, r.TolerateUnread(err, from.Name)
}

// maxExamined is how many plugins are asked at a time.
const maxExamined = 16

// AtATime calls ask with each number below n, some at a time, and returns the errors by
// number.
func AtATime(n int, ask func(i int) error) []error {
	errs := make([]error, n)
	group := new(errgroup.Group)
	group.SetLimit(maxExamined)
	for i := range n {
		group.Go(func() error {
			errs[i] = ask(i)
			return nil
		})
	}
	_ = group.Wait() // they are in errs
	return errs
}
