package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// admissionFile is the API server's configuration of admission.
const admissionFile = "admission.yaml"

// criticalQuota lets critical pods into kube-system.
const criticalQuota = "critical-pods"

// admissionConfig renders what a platform's API server admits; nil if it is what every one does.
func admissionConfig(p platform.Cluster) []byte {
	var plugins []any
	if s := p.PodSecurity; s != nil {
		plugins = append(plugins, map[string]any{"name": "PodSecurity", "configuration": podSecurity(s)})
	}
	if p.LimitCriticalPods {
		plugins = append(plugins, map[string]any{"name": "ResourceQuota", "configuration": map[string]any{
			"apiVersion": "apiserver.config.k8s.io/v1", "kind": "ResourceQuotaConfiguration",
			"limitedResources": []any{map[string]any{"resource": "pods", "matchScopes": []any{criticalScope()}}},
		}})
	}
	if plugins == nil {
		return nil
	}
	return mustYAML(map[string]any{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration", "plugins": plugins})
}

func podSecurity(s *platform.PodSecurity) map[string]any {
	defaults := map[string]string{}
	for mode, level := range map[string]string{"enforce": s.Enforce, "warn": s.Warn} {
		if level != "" {
			defaults[mode], defaults[mode+"-version"] = level, "latest"
		}
	}
	return map[string]any{
		"apiVersion": "pod-security.admission.config.k8s.io/v1", "kind": "PodSecurityConfiguration",
		"defaults": defaults, "exemptions": map[string]any{"namespaces": s.ExemptNamespaces},
	}
}

// criticalScope selects pods of the priority classes that Kubernetes has for its own.
func criticalScope() map[string]any {
	return map[string]any{
		"scopeName": "PriorityClass", "operator": "In", "values": []string{"system-node-critical", "system-cluster-critical"},
	}
}

// objects are the manifests that a platform's cluster has from the beginning.
func objects(p platform.Cluster) string {
	all := p.Objects
	if p.LimitCriticalPods {
		all = string(mustYAML(map[string]any{
			"apiVersion": "v1", "kind": "ResourceQuota",
			"metadata": map[string]any{"name": criticalQuota, "namespace": metav1.NamespaceSystem},
			"spec": map[string]any{
				"hard": map[string]any{"pods": "1G"}, "scopeSelector": map[string]any{"matchExpressions": []any{criticalScope()}},
			},
		})) + "---\n" + all
	}
	return all
}

func mustYAML(value any) []byte {
	text, err := yaml.Marshal(value)
	if err != nil {
		panic(err) // maps of strings
	}
	return text
}

// applyPlatform gives the API server the objects and the nodes' labels that a platform has
// there. It may be called again.
func (c *Cluster) applyPlatform(ctx context.Context, client kubernetes.Interface) error {
	if err := c.applyObjects(ctx, client); err != nil {
		return err
	}
	labels := c.cloudLabels()
	if len(labels) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		return fmt.Errorf("encode the labels of platform %s: %w", c.Platform(), err)
	}
	for _, node := range c.GPUNodes() {
		if _, err := client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return fmt.Errorf("give the labels of platform %s to %s: %w", c.Platform(), node, err)
		}
	}
	return nil
}

func (c *Cluster) applyObjects(ctx context.Context, client kubernetes.Interface) error {
	manifests := objects(c.platform.Cluster)
	if manifests == "" {
		return nil
	}
	// The API server makes its own namespaces a moment after it is ready.
	err := poll(ctx, readyPoll, func() (bool, error) {
		_, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the namespace %s: %w", metav1.NamespaceSystem, err)
	}
	cmd := c.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifests)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply the objects of platform %s (cluster.objects): %w: %s", c.Platform(), err, out)
	}
	if !c.platform.Cluster.LimitCriticalPods {
		return nil
	}
	// Until its use is counted, a quota admits nothing.
	err = poll(ctx, readyPoll, func() (bool, error) {
		quota, err := client.CoreV1().ResourceQuotas(metav1.NamespaceSystem).Get(ctx, criticalQuota, metav1.GetOptions{})
		return err == nil && len(quota.Status.Used) > 0, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the quota %s: %w", criticalQuota, err)
	}
	return nil
}
