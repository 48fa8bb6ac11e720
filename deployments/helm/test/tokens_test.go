//go:build integration

package test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// nodeToken tries each verb of each resource on each object with the token of node-a's
// plugin. The list is all that the server lets it do.
func nodeToken(t *testing.T, s *server) {
	plugin := s.as(t, "node", "node-a")
	denied(t, `the plugin of node "node-a" may not write the GPUInventory of node "node-b"`, func(ctx context.Context) error {
		return plugin.Patch(ctx, inventoryOf("node-b"), annotation(), client.DryRunAll)
	})
	denied(t, `the plugin of node "node-a" may report only devices of its own node`, func(ctx context.Context) error {
		devices := []byte(`{"status": {"devices": [{"driver": "gpu.nvidia.com", "pool": "node-b", "device": "gpu-0"}]}}`)
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-b"}}
		return plugin.Status().Patch(ctx, claim, client.RawPatch(types.MergePatchType, devices), client.DryRunAll)
	})
	denied(t, `the plugin of node "node-a" may write only its own events`, func(ctx context.Context) error {
		return plugin.Create(ctx, pluginEvent("more", "node-b"), client.DryRunAll)
	})
	expectAttacks(t, s, "node", "node-a",
		"create events default/plugin-a-copy",
		"patch events default/plugin-a",
		"patch gpuinventories.gpu.tessera.dev node-a",
		"patch resourceclaims.resource.k8s.io/status default/claim-a",
		"update gpuinventories.gpu.tessera.dev/status node-a",
	)
}

// controllerToken tries the same with the controller's token.
func controllerToken(t *testing.T, s *server) {
	controller := s.as(t, "controller", "")
	denied(t, "the controller may write only its own events", func(ctx context.Context) error {
		return controller.Create(ctx, &eventsv1.Event{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "more"}, EventTime: metav1.NowMicro(),
			Regarding: corev1.ObjectReference{Kind: "Node", Name: "node-b"}, Type: corev1.EventTypeNormal,
			ReportingController: "tessera-controller", ReportingInstance: "tessera-controller", Action: "None", Reason: "None",
		}, client.DryRunAll)
	})
	denied(t, "the controller may write ResourceSlices of the driver gpu.nvidia.com only", func(ctx context.Context) error {
		return controller.Create(ctx, slice("more", "gpu.example.com"), client.DryRunAll)
	})
	denied(t, "the controller may write only DeviceClasses that its ClusterRole owns", func(ctx context.Context) error {
		return controller.Create(ctx, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "more"}}, client.DryRunAll)
	})
	for _, metadata := range []string{
		`{"annotations": {"stolen": "true"}}`,
		`{"labels": {"kubernetes.io/hostname": "node-b"}}`,
		// The garbage collector deletes what has no owner any more.
		`{"ownerReferences": [{"apiVersion": "v1", "kind": "Namespace", "name": "none", "uid": "1"}]}`,
	} {
		denied(t, "the controller may write labels of nodes that begin with nvidia.com/ only", func(ctx context.Context) error {
			patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata": `+metadata+`}`))
			return controller.Patch(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}, patch, client.DryRunAll)
		})
	}
	expectAttacks(t, s, "controller", "",
		"create deviceclasses.resource.k8s.io class-own-copy",
		"create events.events.k8s.io default/controller-copy",
		"create leases.coordination.k8s.io tessera/tessera-controller-copy",
		"create resourceslices.resource.k8s.io slice-own-copy",
		"delete deviceclasses.resource.k8s.io class-own",
		"delete deviceclasses.resource.k8s.io class-own-copy",
		"delete resourceslices.resource.k8s.io slice-own",
		"delete resourceslices.resource.k8s.io slice-own-copy",
		"patch events.events.k8s.io default/controller",
		"patch gpuinventories.gpu.tessera.dev node-a",
		"patch gpuinventories.gpu.tessera.dev node-b",
		"patch gpuinventories.gpu.tessera.dev/status node-a",
		"patch gpuinventories.gpu.tessera.dev/status node-b",
		"update deviceclasses.resource.k8s.io class-own",
		"update leases.coordination.k8s.io tessera/tessera-controller",
		"update resourceslices.resource.k8s.io slice-own",
		"update sharingpolicies.gpu.tessera.dev/status policy",
	)
}

// expectAttacks tries all that a token could do, and fails if the server does anything
// but want, or if an object has changed that want doesn't name.
func expectAttacks(t *testing.T, s *server, account, node string, want ...string) {
	t.Helper()
	a := newAttacker(t, s, account, node)
	before := a.versions(t)
	a.each(t, "create", "patch", "update")
	a.each(t, "delete", "deletecollection")
	slices.Sort(a.done)
	slices.Sort(want)
	if !slices.Equal(a.done, want) {
		t.Errorf("with the token of %s %s the server does\n\t%s\nwant\n\t%s", account, node, strings.Join(a.done, "\n\t"), strings.Join(want, "\n\t"))
	}
	if a.refused < 500 {
		t.Errorf("only %d attempts were refused", a.refused)
	}
	after := a.versions(t)
	for object, version := range before {
		named := slices.ContainsFunc(want, func(one string) bool { return strings.HasSuffix(one, " "+object) })
		if !named && after[object] != version {
			t.Errorf("%s has changed", object)
		}
	}
}

// attacker tries what the rights of one token could allow.
type attacker struct {
	resources     []resource
	admin, stolen dynamic.Interface
	// done lists what the server has done, or would have done with a valid request.
	done    []string
	refused int
}

// resource is one that the server has, or a subresource.
type resource struct {
	metav1.APIResource
	gvr         schema.GroupVersionResource
	subresource string
}

func newAttacker(t *testing.T, s *server, account, node string) *attacker {
	t.Helper()
	a := &attacker{admin: dynamic.NewForConfigOrDie(s.config), stolen: dynamic.NewForConfigOrDie(s.configAs(account, node))}
	groups, lists, err := discovery.NewDiscoveryClientForConfigOrDie(s.config).ServerGroupsAndResources()
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		preferred := slices.ContainsFunc(groups, func(g *metav1.APIGroup) bool { return g.PreferredVersion.GroupVersion == list.GroupVersion })
		for _, r := range list.APIResources {
			name, sub, _ := strings.Cut(r.Name, "/")
			if preferred && !strings.HasPrefix(name, "selfsubject") { // these only answer who asks
				r.Group, r.Version = cmp.Or(r.Group, gv.Group), cmp.Or(r.Version, gv.Version)
				a.resources = append(a.resources, resource{r, gv.WithResource(name), sub})
			}
		}
	}
	return a
}

// versions returns the versions of the objects that populate has made.
func (a *attacker) versions(t *testing.T) map[string]string {
	t.Helper()
	versions := map[string]string{}
	for _, r := range a.resources {
		for _, o := range a.objects(t, r) {
			if o.GetLabels()[populated] != "" {
				versions[path(&o)] = o.GetResourceVersion()
			}
		}
	}
	return versions
}

// objects lists the objects of a resource, without those of the server itself.
func (a *attacker) objects(t *testing.T, r resource) []unstructured.Unstructured {
	t.Helper()
	list, err := a.admin.Resource(r.gvr).List(t.Context(), metav1.ListOptions{})
	if apierrors.IsMethodNotSupported(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatalf("list %s: %v", r.gvr, err)
	}
	return slices.DeleteFunc(list.Items, func(o unstructured.Unstructured) bool { return strings.HasPrefix(o.GetName(), "system:") })
}

// path is an object's name with its namespace.
func path(o *unstructured.Unstructured) string {
	return strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
}

// each tries the verbs on each object.
func (a *attacker) each(t *testing.T, verbs ...string) {
	t.Helper()
	for _, r := range a.resources {
		objects := a.objects(t, r)
		if len(objects) == 0 {
			objects = append(objects, unstructured.Unstructured{})
			objects[0].SetGroupVersionKind(schema.GroupVersionKind{Group: r.Group, Version: r.Version, Kind: r.Kind})
			objects[0].SetName("none")
			if r.Namespaced {
				objects[0].SetNamespace("default")
			}
		}
		for _, o := range objects {
			for _, verb := range verbs {
				if slices.Contains(r.Verbs, verb) {
					a.try(t.Context(), verb, r, &o)
				}
			}
		}
	}
}

// try tries one verb on one object. A server asks for rights first, so that another
// refusal than Forbidden counts as done.
func (a *attacker) try(ctx context.Context, verb string, r resource, o *unstructured.Unstructured) {
	to := a.stolen.Resource(r.gvr).Namespace(o.GetNamespace())
	var sub []string
	if r.subresource != "" {
		sub = append(sub, r.subresource)
	}
	var err error
	about := path(o)
	switch verb {
	case "create":
		made := copyOf(r, o)
		about = path(made)
		_, err = to.Create(ctx, made, metav1.CreateOptions{}, sub...)
	case "patch":
		_, err = to.Patch(ctx, o.GetName(), types.MergePatchType, change(r, o), metav1.PatchOptions{}, sub...)
	case "update":
		fresh, getErr := a.admin.Resource(r.gvr).Namespace(o.GetNamespace()).Get(ctx, o.GetName(), metav1.GetOptions{})
		if getErr != nil {
			fresh = o.DeepCopy()
		}
		fresh.SetAnnotations(map[string]string{"stolen": "true"})
		_, err = to.Update(ctx, fresh, metav1.UpdateOptions{}, sub...)
	case "delete":
		err = to.Delete(ctx, o.GetName(), metav1.DeleteOptions{}, sub...)
	case "deletecollection":
		err = to.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	}
	if apierrors.IsForbidden(err) {
		a.refused++
		return
	}
	line := fmt.Sprintf("%s %s %s", verb, strings.TrimSuffix(r.gvr.GroupResource().String()+"/"+r.subresource, "/"), about)
	if err != nil && !apierrors.IsNotFound(err) {
		line += ": " + string(apierrors.ReasonForError(err))
	}
	a.done = append(a.done, line)
}

// copyOf returns an object like o to create; of a subresource, its empty kind.
func copyOf(r resource, o *unstructured.Unstructured) *unstructured.Unstructured {
	made := &unstructured.Unstructured{Object: map[string]any{}}
	made.SetGroupVersionKind(schema.GroupVersionKind{Group: r.Group, Version: r.Version, Kind: r.Kind})
	made.SetNamespace(o.GetNamespace())
	made.SetName(o.GetName())
	if r.subresource != "" {
		return made
	}
	made = o.DeepCopy()
	unstructured.RemoveNestedField(made.Object, "metadata")
	made.SetNamespace(o.GetNamespace())
	made.SetName(o.GetName() + "-copy")
	made.SetOwnerReferences(o.GetOwnerReferences())
	if r.Kind == "Event" && r.Group != "" { // the newer kind wants more, and nothing of the older one
		maps.Copy(made.Object, map[string]any{"eventTime": "2026-01-01T00:00:00.000000Z", "action": "None", "reportingInstance": "none"})
		maps.DeleteFunc(made.Object, func(field string, _ any) bool { return strings.HasPrefix(field, "deprecated") })
	}
	return made
}

// change returns a merge patch that changes the object, or its status.
func change(r resource, o *unstructured.Unstructured) []byte {
	switch r.Name {
	case "gpuinventories/status":
		return []byte(`{"status": {"driverVersion": "0"}}`)
	case "sharingpolicies/status":
		return []byte(`{"status": {"nodes": 7}}`)
	case "resourceclaims/status":
		results, _, _ := unstructured.NestedSlice(o.Object, "status", "allocation", "devices", "results")
		if len(results) == 1 {
			device := results[0].(map[string]any)
			return fmt.Appendf(nil, `{"status": {"devices": [{"driver": %q, "pool": %q, "device": %q, "data": {"stolen": true}}]}}`,
				device["driver"], device["pool"], device["device"])
		}
	}
	return []byte(`{"metadata": {"annotations": {"stolen": "true"}}}`)
}

func annotation() client.Patch { return client.RawPatch(types.MergePatchType, change(resource{}, nil)) }

// populated labels the objects of populate.
const populated = "populated"

// populate makes objects of two nodes, of other drivers and of tenants.
func populate(t *testing.T, s *server) {
	t.Helper()
	deviceClass := func(name string, owners ...metav1.OwnerReference) *resourceapi.DeviceClass {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners}}
	}
	in := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }
	policy := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"plan": map[string]any{"exclusive": map[string]any{}}}}}
	policy.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "SharingPolicy"})
	policy.SetName("policy")
	pod := &corev1.Pod{ObjectMeta: in("pod")}
	pod.Spec.Containers = []corev1.Container{{Name: "main", Image: "registry.example.com/main"}}
	kubelet := pluginEvent("kubelet-a", "node-a")
	kubelet.Source.Component, kubelet.ReportingController = "kubelet", "kubelet"
	controllerEvent := pluginEvent("controller", "")
	controllerEvent.InvolvedObject = corev1.ObjectReference{APIVersion: "gpu.tessera.dev/v1alpha1", Kind: "SharingPolicy", Name: "policy"}
	controllerEvent.Source.Component, controllerEvent.ReportingController = "tessera-controller", "tessera-controller"
	objects := []client.Object{
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-b"}},
		inventoryOf("node-a"), inventoryOf("node-b"), policy,
		slice("slice-own", driver), slice("slice-theirs", "gpu.example.com"),
		deviceClass("class-theirs"),
		deviceClass("class-own", metav1.OwnerReference{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "tessera-controller", UID: "1"}),
		pluginEvent("plugin-a", "node-a"), pluginEvent("plugin-b", "node-b"), kubelet, controllerEvent,
		pod, &corev1.Secret{ObjectMeta: in("secret")}, &corev1.ConfigMap{ObjectMeta: in("config")}, &corev1.ServiceAccount{ObjectMeta: in("tenant")},
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-node-lease", Name: "node-b"}},
	}
	for _, o := range objects {
		o.SetLabels(map[string]string{populated: "true"})
		// The server serves a new kind a moment after its definition is there.
		err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
			err := s.admin.Create(ctx, o)
			return err == nil, client.IgnoreNotFound(err)
		})
		if err != nil {
			t.Fatalf("create %T %s: %v", o, o.GetName(), err)
		}
	}
	allocated(t, s, "claim-a", "node-a")
	allocated(t, s, "claim-b", "node-b")
}

func inventoryOf(node string) *unstructured.Unstructured {
	inv := &unstructured.Unstructured{}
	inv.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "GPUInventory"})
	inv.SetName(node)
	return inv
}

// pluginEvent is an event as the plugin of a node writes it about the node's GPUs.
func pluginEvent(name, node string) *corev1.Event {
	return &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: "default", Name: name},
		InvolvedObject:      corev1.ObjectReference{APIVersion: "gpu.tessera.dev/v1alpha1", Kind: "GPUInventory", Name: node},
		Source:              corev1.EventSource{Component: "tessera-kubelet-plugin", Host: node},
		ReportingController: "tessera-kubelet-plugin", ReportingInstance: node,
		Reason: "GPUError", Type: corev1.EventTypeWarning,
	}
}
