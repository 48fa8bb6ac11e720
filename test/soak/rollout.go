package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/stack"
)

// The objects that are rolled out.
const (
	plugins    = "daemonset/tessera-node"
	controller = "deployment/tessera-controller"
)

// rollOut begins a rollout, and doesn't wait for it: other faults come in the middle, and
// perhaps the next rollout.
func (r *soak) rollOut(ctx context.Context, object string) error {
	_, err := r.stack.Kubectl(ctx, "rollout", "restart", "--namespace", stack.Namespace, object)
	return err
}

// killInRollout begins a rollout of the plugins, and kills one of two on a node as soon as
// both run: "head" the old one, "tail" the new one.
func (r *soak) killInRollout(ctx context.Context, which string) error {
	if err := r.rollOut(ctx, plugins); err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		for _, node := range r.stack.Cluster.Nodes() {
			if r.killOfTwo(ctx, node, which) == nil {
				return true, nil
			}
		}
		return false, nil
	})
}

// killOfTwo kills one of the plugins of a node, and fails unless there are two.
func (r *soak) killOfTwo(ctx context.Context, node, which string) error {
	const script = `all=$(for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = kubelet-plugin ] && echo "${p#/proc/}"
done | sort -n)
[ "$(echo "$all" | wc -l)" -eq 2 ] && kill -9 "$(echo "$all" | "$1" -n 1)"`
	_, err := r.stack.Cluster.Exec(ctx, node, "sh", "-c", script, "sh", which)
	return err
}

// checkRolledOut checks that the last rollouts have ended, and that each node has one plugin.
func (r *soak) checkRolledOut(ctx context.Context) error {
	for _, object := range []string{plugins, controller} {
		if _, err := r.stack.Kubectl(ctx, "rollout", "status", "--namespace", stack.Namespace, object, "--timeout=1s"); err != nil {
			return err
		}
	}
	pods, err := r.stack.Kube().CoreV1().Pods(stack.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=node"})
	if err != nil {
		return err
	}
	nodes := map[string]int{}
	for _, p := range pods.Items {
		nodes[p.Spec.NodeName]++
	}
	var all []error
	for _, node := range r.stack.Cluster.Nodes() {
		if nodes[node] != 1 {
			all = append(all, fmt.Errorf("%s: %d pods of the plugin", node, nodes[node]))
		}
	}
	return errors.Join(all...)
}

// tally lists how often each fault was made.
func tally(faults []event) string {
	counts := map[string]int{}
	var names []string
	for _, f := range faults {
		if counts[f.name] == 0 {
			names = append(names, f.name)
		}
		counts[f.name]++
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, counts[name])
	}
	return strings.Join(names, ", ")
}
