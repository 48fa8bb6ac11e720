package cluster

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
)

// Field selectors.
const (
	ofDriver = resourceapi.ResourceSliceSelectorDriver + "=" + gpu.DriverName
	pending  = "status.phase=" + string(corev1.PodPending)
)

// noDRA completes "The".
const noDRA = "API server doesn't serve resource.k8s.io: Dynamic Resource Allocation is off, or Kubernetes is older than 1.31"

// Resources are those that a page of the cluster is made of, as the user may read them.
func (r *Reader) Resources() feed.Resources {
	return feed.Resources{
		Slices: r.sliceResource(ofDriver), Claims: r.claimResource(), TaintRules: r.ruleResource(), Inventories: r.inventoryResource(),
		Policies: r.policyResource(), Nodes: r.nodeResource(), PendingPods: r.podResource(pending),
	}
}

func (r *Reader) sliceResource(selector string) feed.Resource {
	return served(r, selector, func(string) lister[*resourceapi.ResourceSliceList] { return r.DRA.ResourceSlices() }, feed.Resource{
		Name: SlicesName, Example: &resourceapi.ResourceSlice{},
		Absent: "The " + noDRA + ".",
	})
}

func (r *Reader) claimResource() feed.Resource {
	return served(r, "", func(ns string) lister[*resourceapi.ResourceClaimList] { return r.DRA.ResourceClaims(ns) },
		feed.Resource{Name: ClaimsName, Example: &resourceapi.ResourceClaim{}, Namespaced: true})
}

func (r *Reader) classResource() feed.Resource {
	return served(r, "", func(string) lister[*resourceapi.DeviceClassList] { return r.DRA.DeviceClasses() },
		feed.Resource{Name: classesName, Example: &resourceapi.DeviceClass{}})
}

func (r *Reader) ruleResource() feed.Resource {
	return served(r, "", func(string) lister[*resourceapi.DeviceTaintRuleList] { return r.Rules },
		feed.Resource{Name: RulesName, Example: &resourceapi.DeviceTaintRule{}, WhyIgnored: whyIgnored})
}

func (r *Reader) nodeResource() feed.Resource {
	return served(r, "", func(string) lister[*corev1.NodeList] { return r.Kube.CoreV1().Nodes() }, feed.Resource{Name: NodesName, Example: &corev1.Node{}})
}

func (r *Reader) podResource(selector string) feed.Resource {
	return served(r, selector, func(ns string) lister[*corev1.PodList] { return r.Kube.CoreV1().Pods(ns) },
		feed.Resource{Name: PodsName, Example: &corev1.Pod{}, Namespaced: true})
}

func (r *Reader) inventoryResource() feed.Resource {
	return ownResource(r, InventoriesName, r.inventories(), &v1alpha1.GPUInventory{})
}

func (r *Reader) inventories() *gentype.ClientWithList[*v1alpha1.GPUInventory, *v1alpha1.GPUInventoryList] {
	return gentype.NewClientWithList[*v1alpha1.GPUInventory, *v1alpha1.GPUInventoryList]("gpuinventories", r.Own, metav1.ParameterCodec, "",
		func() *v1alpha1.GPUInventory { return new(v1alpha1.GPUInventory) }, func() *v1alpha1.GPUInventoryList { return new(v1alpha1.GPUInventoryList) })
}

func (r *Reader) policyResource() feed.Resource {
	client := gentype.NewClientWithList[*v1alpha1.SharingPolicy, *v1alpha1.SharingPolicyList]("sharingpolicies", r.Own, metav1.ParameterCodec, "",
		func() *v1alpha1.SharingPolicy { return new(v1alpha1.SharingPolicy) }, func() *v1alpha1.SharingPolicyList { return new(v1alpha1.SharingPolicyList) })
	return ownResource(r, PoliciesName, client, &v1alpha1.SharingPolicy{})
}

func ownResource[L runtime.Object](r *Reader, name string, client lister[L], example runtime.Object) feed.Resource {
	absent := fmt.Sprintf("The cluster has no %s: %s. Is Tessera installed there?", name, r.missing[name])
	return served(r, "", func(string) lister[L] { return client }, feed.Resource{Name: name, Example: example, Absent: absent})
}

// lister is a client of one kind of objects.
type lister[L runtime.Object] interface {
	List(ctx context.Context, o metav1.ListOptions) (L, error)
	Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
}

// served has a client list and watch the objects that the field selector means.
func served[L runtime.Object](r *Reader, selector string, client func(namespace string) lister[L], out feed.Resource) feed.Resource {
	out.Missing = r.missing[out.Name]
	out.List = func(ctx context.Context, namespace string, o metav1.ListOptions) (runtime.Object, error) {
		o.FieldSelector = selector
		return client(namespace).List(ctx, o)
	}
	out.Watch = func(ctx context.Context, namespace string, o metav1.ListOptions) (watch.Interface, error) {
		o.FieldSelector = selector
		return client(namespace).Watch(ctx, o)
	}
	return out
}

// ownClient is a client of Tessera's own kinds.
func ownClient(cfg *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register %s: %w", v1alpha1.GroupVersion, err)
	}
	cfg = rest.CopyConfig(cfg)
	cfg.GroupVersion, cfg.APIPath = &v1alpha1.GroupVersion, "/apis"
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(cfg)
}
