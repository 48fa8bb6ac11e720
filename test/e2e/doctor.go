//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/stack"
)

// recovery is how long a node may take to be as it must be after a story.
const recovery = time.Minute

// mend takes a story's policies and the faults of its hardware away. The plugin's
// conditions of the hardware must have ended by the story itself, unless the story failed.
func mend(ctx context.Context, t inLane, s *stack.Stack) {
	if _, err := s.Kubectl(ctx, "delete", "sharingpolicies", "--all"); err != nil {
		t.Log("the story leaves its policies behind:", err)
	}
	mends := [][]string{{"fault", "--clear"}, {"heal"}}
	if t.Failed() {
		mends = append(mends, []string{"driver", "unload"}, []string{"driver", "load"})
	}
	for _, node := range s.Cluster.Nodes() {
		for _, args := range mends {
			if _, err := s.Cluster.Exec(ctx, node, s.SimulatorCommand(args...)...); err != nil {
				t.Log("the story leaves the faults of its hardware behind:", err)
			}
		}
	}
	if t.Failed() {
		if err := conditionsEnded(ctx, s); err != nil {
			t.Log("the story leaves conditions of GPUs behind:", err)
		}
	}
	if err := healthy(ctx, s); err != nil {
		t.Errorf("the story leaves something behind: %v", err)
	}
}

// conditionsEnded waits until no GPU has a condition. The plugin looks twice, half a minute
// apart, before a load of the driver ends one.
func conditionsEnded(ctx context.Context, s *stack.Stack) error {
	var conditions string
	err := wait.PollUntilContextTimeout(ctx, time.Second, 2*recovery, true, func(ctx context.Context) (bool, error) {
		var err error
		conditions, err = s.Kubectl(ctx, "get", "gpuinventories", "-o", "jsonpath={.items[*].status.gpus[*].conditions[*].type}")
		return err == nil && conditions == "", nil
	})
	if err != nil {
		return fmt.Errorf("still %s: %w", conditions, err)
	}
	return nil
}

// healthy waits until the plugin's doctor finds nothing wrong on any node, and
// nothing left over.
func healthy(ctx context.Context, s *stack.Stack) error {
	for _, node := range s.Cluster.Nodes() {
		if err := healthyNode(ctx, s, node); err != nil {
			return err
		}
	}
	return nil
}

func healthyNode(ctx context.Context, s *stack.Stack, node string) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, time.Second, recovery, true, func(ctx context.Context) (bool, error) {
		last = doctor(ctx, s, node)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%s after %v: %w", node, recovery, last)
	}
	return nil
}

// examine waits until the doctor finds nothing wrong on a node.
//
//	doctor NODE
func examine(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: doctor NODE")
	}
	ts.Check(healthyNode(context.Background(), s, args[0]))
}

func doctor(ctx context.Context, s *stack.Stack, node string) error {
	pod, err := pluginPod(ctx, s, node)
	if err != nil {
		return err
	}
	_, err = s.Kubectl(ctx, "exec", "-n", stack.Namespace, pod, "--", "kubelet-plugin", "doctor", "--strict", "--looks=1")
	return err
}

// pluginPod is the name of the node's plugin.
func pluginPod(ctx context.Context, s *stack.Stack, node string) (string, error) {
	list, err := s.Kube().CoreV1().Pods(stack.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=node", FieldSelector: "spec.nodeName=" + node,
	})
	if err != nil {
		return "", err
	}
	var names []string
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			names = append(names, p.Name)
		}
	}
	if len(names) != 1 {
		return "", fmt.Errorf("plugins on %s: %q, want one", node, strings.Join(names, " "))
	}
	return names[0], nil
}

// pluginMetrics reads the metrics of the node's plugin.
func pluginMetrics(ctx context.Context, s *stack.Stack, node string) (string, error) {
	pod, err := pluginPod(ctx, s, node)
	if err != nil {
		return "", err
	}
	return s.Kubectl(ctx, "get", "--raw", fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:8081/proxy/metrics", stack.Namespace, pod))
}
