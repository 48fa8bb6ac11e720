package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	resourcev1alpha3 "k8s.io/api/resource/v1alpha3"
	resourcev1beta2 "k8s.io/api/resource/v1beta2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	resourcev1client "k8s.io/client-go/kubernetes/typed/resource/v1"
)

// ruleClient reads and writes DeviceTaintRules in the version that the server has. Up
// to Kubernetes 1.35 that is v1alpha3, with the same fields and, in 1.33 and 1.34, two
// more selectors (see ignore). The first call has to be List.
type ruleClient struct {
	current resourcev1client.DeviceTaintRuleInterface
	// alpha is dynamic because the types have lost the two selectors.
	alpha dynamic.ResourceInterface
	// old: the server has only v1alpha3.
	old atomic.Bool
}

// APIVersion is the one for manifests.
func (c *ruleClient) APIVersion(server discovery.DiscoveryInterface) string {
	if c.old.Load() {
		return resourcev1alpha3.SchemeGroupVersion.String()
	}
	beta := resourcev1beta2.SchemeGroupVersion.String() // of Kubernetes 1.36
	if served, err := server.ServerResourcesForGroupVersion(resourceapi.SchemeGroupVersion.String()); err == nil && !has(served) {
		return beta
	}
	return resourceapi.SchemeGroupVersion.String()
}

// has reports whether the resources include DeviceTaintRules.
func has(served *metav1.APIResourceList) bool {
	return slices.ContainsFunc(served.APIResources, func(r metav1.APIResource) bool { return r.Kind == RuleKind })
}

// RuleKind is the kind of DeviceTaintRules.
const RuleKind = "DeviceTaintRule"

// List finds out which version the server has.
func (c *ruleClient) List(ctx context.Context, o metav1.ListOptions) (*resourceapi.DeviceTaintRuleList, error) {
	out, err := c.current.List(ctx, o)
	if !apierrors.IsNotFound(err) {
		return out, err
	}
	older, err := c.alpha.List(ctx, o)
	if err != nil {
		return nil, err
	}
	c.old.Store(true)
	for i := range older.Items {
		ignore(&older.Items[i])
	}
	return convert[resourceapi.DeviceTaintRuleList](older)
}

// Watch watches the rules that were listed.
func (c *ruleClient) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if !c.old.Load() {
		return c.current.Watch(ctx, o)
	}
	w, err := c.alpha.Watch(ctx, o)
	if err != nil {
		return nil, err
	}
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		if r, ok := e.Object.(*unstructured.Unstructured); ok && e.Type != watch.Error {
			ignore(r)
			converted, err := convert[resourceapi.DeviceTaintRule](r)
			if err != nil {
				return e, false
			}
			e.Object = converted
		}
		return e, true
	}), nil
}

// ignoredSelector marks, in this program only, rules that ignore has changed.
const ignoredSelector = "gpu.tessera.dev/ignored-selector"

// ignore has a rule select nothing if it selects devices by class or expressions, which
// only Kubernetes 1.33 and 1.34 know. Without these selectors it would select too many.
func ignore(rule *unstructured.Unstructured) {
	for _, name := range []string{"deviceClassName", "selectors"} {
		if _, found, _ := unstructured.NestedFieldNoCopy(rule.Object, "spec", "deviceSelector", name); found {
			unstructured.RemoveNestedField(rule.Object, "spec", "deviceSelector")
			rule.SetAnnotations(map[string]string{ignoredSelector: ""})
		}
	}
}

// whyIgnored returns a note on a rule that ignore has changed; empty: it hasn't.
func whyIgnored(obj any) string {
	r, ok := obj.(*resourceapi.DeviceTaintRule)
	if !ok {
		return ""
	}
	if _, ok := r.Annotations[ignoredSelector]; !ok {
		return ""
	}
	return fmt.Sprintf("DeviceTaintRule %s isn't evaluated by kubectl gpu, because it selects devices by class or CEL expression (Kubernetes 1.33 and 1.34 only). The cluster applies it: more devices may be tainted than are shown.", r.Name)
}

// Create creates a rule.
func (c *ruleClient) Create(ctx context.Context, r *resourceapi.DeviceTaintRule, o metav1.CreateOptions) error {
	if !c.old.Load() {
		_, err := c.current.Create(ctx, r, o)
		return err
	}
	older, err := toAlpha(r)
	if err == nil {
		_, err = c.alpha.Create(ctx, older, o)
	}
	return err
}

// Update replaces a rule.
func (c *ruleClient) Update(ctx context.Context, r *resourceapi.DeviceTaintRule, o metav1.UpdateOptions) error {
	if !c.old.Load() {
		_, err := c.current.Update(ctx, r, o)
		return err
	}
	older, err := toAlpha(r)
	if err == nil {
		_, err = c.alpha.Update(ctx, older, o)
	}
	return err
}

// Delete deletes a rule.
func (c *ruleClient) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	if !c.old.Load() {
		return c.current.Delete(ctx, name, o)
	}
	return c.alpha.Delete(ctx, name, o)
}

func toAlpha(r *resourceapi.DeviceTaintRule) (*unstructured.Unstructured, error) {
	r = r.DeepCopy()
	r.TypeMeta = metav1.TypeMeta{APIVersion: resourcev1alpha3.SchemeGroupVersion.String(), Kind: RuleKind}
	out, err := convert[unstructured.Unstructured](r)
	if err == nil {
		delete(out.Object, "status") // which these versions don't know
	}
	return out, err
}

// convert copies the fields that have the same names in JSON.
func convert[T any](from any) (*T, error) {
	raw, err := json.Marshal(from)
	if err != nil {
		return nil, fmt.Errorf("convert %T: %w", from, err)
	}
	out := new(T)
	if err := json.Unmarshal(raw, out); err != nil {
		return nil, fmt.Errorf("convert %T: %w", from, err)
	}
	return out, nil
}
