package main

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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	resourcev1client "k8s.io/client-go/kubernetes/typed/resource/v1"
	resourcev1alpha3client "k8s.io/client-go/kubernetes/typed/resource/v1alpha3"
)

// ruleClient reads and writes DeviceTaintRules in the version that the server has. Up
// to Kubernetes 1.35 that is v1alpha3, with the same fields; Kubernetes 1.33 and 1.34
// also select devices by class and by expressions, which are ignored here. The first
// call has to be List.
type ruleClient struct {
	current resourcev1client.DeviceTaintRuleInterface
	alpha   resourcev1alpha3client.DeviceTaintRuleInterface
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
	return slices.ContainsFunc(served.APIResources, func(r metav1.APIResource) bool { return r.Kind == ruleKind })
}

const ruleKind = "DeviceTaintRule"

// List finds out which version the server has.
func (c *ruleClient) List(ctx context.Context, o metav1.ListOptions) (*resourceapi.DeviceTaintRuleList, error) {
	out, err := c.current.List(ctx, o)
	if !apierrors.IsNotFound(err) {
		return out, err
	}
	older, failed := c.alpha.List(ctx, o)
	if failed != nil {
		return nil, failed
	}
	c.old.Store(true)
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
		if r, ok := e.Object.(*resourcev1alpha3.DeviceTaintRule); ok {
			converted, err := convert[resourceapi.DeviceTaintRule](r)
			if err != nil {
				return e, false
			}
			e.Object = converted
		}
		return e, true
	}), nil
}

// Create creates a rule.
func (c *ruleClient) Create(ctx context.Context, r *resourceapi.DeviceTaintRule, o metav1.CreateOptions) (*resourceapi.DeviceTaintRule, error) {
	if !c.old.Load() {
		return c.current.Create(ctx, r, o)
	}
	return viaAlpha(r, func(r *resourcev1alpha3.DeviceTaintRule) (*resourcev1alpha3.DeviceTaintRule, error) {
		return c.alpha.Create(ctx, r, o)
	})
}

// Update replaces a rule.
func (c *ruleClient) Update(ctx context.Context, r *resourceapi.DeviceTaintRule, o metav1.UpdateOptions) (*resourceapi.DeviceTaintRule, error) {
	if !c.old.Load() {
		return c.current.Update(ctx, r, o)
	}
	return viaAlpha(r, func(r *resourcev1alpha3.DeviceTaintRule) (*resourcev1alpha3.DeviceTaintRule, error) {
		return c.alpha.Update(ctx, r, o)
	})
}

// Delete deletes a rule.
func (c *ruleClient) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	if !c.old.Load() {
		return c.current.Delete(ctx, name, o)
	}
	return c.alpha.Delete(ctx, name, o)
}

func viaAlpha(r *resourceapi.DeviceTaintRule, call func(*resourcev1alpha3.DeviceTaintRule) (*resourcev1alpha3.DeviceTaintRule, error)) (*resourceapi.DeviceTaintRule, error) {
	older, err := convert[resourcev1alpha3.DeviceTaintRule](r)
	if err != nil {
		return nil, err
	}
	older.TypeMeta = metav1.TypeMeta{}
	if older, err = call(older); err != nil {
		return nil, err
	}
	return convert[resourceapi.DeviceTaintRule](older)
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
