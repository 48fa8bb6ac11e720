//go:build agreement

package agreement

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// shapes judges pods that random claims don't make, on a cluster without other pods.
func (c *check) shapes(t *testing.T) {
	for len(c.running) > 0 {
		c.delete(t, c.running[0])
	}
	rules := c.Kube().ResourceV1().DeviceTaintRules()
	if err := rules.Delete(t.Context(), "agreement", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	t.Run("requests that nothing meets", c.impossible)
	t.Run("the pod's own claims", c.ownClaims)
	t.Run("claim being deleted", c.claimBeingDeleted)
	t.Run("quota", c.quota)
	t.Run("PodGroup", c.podGroup)
	t.Run("device plugin", c.devicePlugin) // last: Tessera leaves a node that another driver serves
}

// explanation is the answer of `kubectl gpu why`.
type explanation struct {
	Waits        bool
	Text, Change string
	Reason       *fit.Reason
}

func (c *check) reason(t *testing.T, p *corev1.Pod) (out explanation) {
	t.Helper()
	c.ask(t, &out, "why", p.Name, "-n", p.Namespace, "-o", "json")
	return out
}

// leftPending creates a pod that the scheduler doesn't place, and checks why's answer.
func (c *check) leftPending(t *testing.T, p *corev1.Pod, cause fit.Cause, says string) {
	t.Helper()
	c.create(t, p)
	t.Cleanup(func() { c.remove(t, p.Name) })
	if placed := c.decision(t, p, false); placed != "" {
		t.Fatalf("the scheduler places it on %s", placed)
	}
	why := c.reason(t, p)
	if why.Reason == nil || why.Reason.Cause != cause || !strings.Contains(why.Text+" "+why.Change, says) {
		t.Errorf("why says %+v: %s %s\nwant the cause %s: %s\nthe scheduler says %s", why.Reason, why.Text, why.Change, cause, says, c.message(t, p))
	}
}

// place creates a pod, and waits until the scheduler has placed it.
func (c *check) place(t *testing.T, p *corev1.Pod) {
	t.Helper()
	c.create(t, p)
	t.Cleanup(func() { c.remove(t, p.Name) })
	if c.decision(t, p, true) == "" {
		t.Fatalf("the scheduler leaves pod %s pending: %s", p.Name, c.message(t, p))
	}
}

// remove deletes a pod at the end of a test.
func (c *check) remove(t *testing.T, name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if _, err := c.Kubectl(ctx, "delete", "pod", name, "--grace-period=0", "--force", "--ignore-not-found"); err != nil {
		t.Error(err)
	}
}

func (c *check) impossible(t *testing.T) {
	exactly := func(class string, edit func(*resourceapi.ExactDeviceRequest)) resourceapi.DeviceRequest {
		e := resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
		edit(&e)
		return resourceapi.DeviceRequest{Name: "r", Exactly: &e}
	}
	of := func(name resourceapi.QualifiedName, q string) func(*resourceapi.ExactDeviceRequest) {
		return func(e *resourceapi.ExactDeviceRequest) {
			amounts := map[resourceapi.QualifiedName]resource.Quantity{name: resource.MustParse(q)}
			e.Capacity = &resourceapi.CapacityRequirements{Requests: amounts}
		}
	}
	for name, tc := range map[string]struct {
		request resourceapi.DeviceRequest
		cause   fit.Cause
		says    string
	}{
		"unknown-capacity":  {exactly("mps.gpu.nvidia.com", of("shares", "1")), fit.NoMatch, "asks for the capacity shares, which none of the "},
		"above-the-maximum": {exactly("mps.gpu.nvidia.com", of("threadPercentage", "150")), fit.NoMatch, "at most 100 for one request"},
		"unknown-attribute": {exactly("mig.nvidia.com", func(e *resourceapi.ExactDeviceRequest) {
			e.Selectors = where(`device.attributes["gpu.nvidia.com"].migProfile == "%s"`, "3g.40gb")
		}), fit.Refused, "none of them has the attribute migProfile"},
		"alternative-of-too-many": {resourceapi.DeviceRequest{Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "nine", DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 9},
		}}, fit.TooMany, "Request r/nine asks for 9 devices of one node"},
	} {
		t.Run(name, func(t *testing.T) {
			c.leftPending(t, c.podOf(name, asking(tc.request)), tc.cause, tc.says)
		})
	}
}

// wholeGPU asks for the GPU with the index 3 of a node.
func wholeGPU() resourceapi.ResourceClaimSpec {
	return asking(resourceapi.DeviceRequest{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Selectors: where(`device.attributes["gpu.nvidia.com"].index == %s`, "3"),
	}})
}

// asking returns a claim with the request.
func asking(r resourceapi.DeviceRequest) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{r}}}
}

// onNode restricts a pod to a node.
func onNode(p *corev1.Pod, node string) *corev1.Pod {
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	return p
}

// sharing adds the first claim of another pod to those of a pod.
func sharing(p, of *corev1.Pod) *corev1.Pod {
	shared := corev1.PodResourceClaim{Name: "shared", ResourceClaimName: of.Spec.ResourceClaims[0].ResourceClaimName}
	p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, shared)
	main := &p.Spec.Containers[0].Resources
	main.Claims = append(main.Claims, corev1.ResourceClaim{Name: shared.Name})
	return p
}

func (c *check) ownClaims(t *testing.T) {
	holder := onNode(c.podOf("holder", wholeGPU()), c.Cluster.Nodes()[0])
	c.place(t, holder)
	c.leftPending(t, sharing(c.podOf("has-and-waits", wholeGPU()), holder), fit.Own, "belongs to claim "+namespace+"/holder."+claimSuffix+"0")
}

func (c *check) claimBeingDeleted(t *testing.T) {
	holder := onNode(c.podOf("keeps-going", wholeGPU()), c.Cluster.Nodes()[0])
	c.place(t, holder)
	claim := *holder.Spec.ResourceClaims[0].ResourceClaimName
	if err := c.Kube().ResourceV1().ResourceClaims(namespace).Delete(t.Context(), claim, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p := sharing(c.podOf("comes-late"), holder)
	c.create(t, p)
	t.Cleanup(func() { c.remove(t, p.Name) })
	c.place(t, onNode(c.podOf("after-it", wholeGPU()), c.Cluster.Nodes()[2])) // the scheduler has passed over p
	if node := c.get(t, p).Spec.NodeName; node != "" {
		t.Fatalf("the scheduler places it on %s", node)
	}
	if why := c.reason(t, p); !why.Waits || !strings.Contains(why.Text, claim+" is being deleted") {
		t.Errorf("why says %q", why.Text)
	}
}

// template makes a ResourceClaimTemplate of wholeGPU.
func (c *check) template(t *testing.T, namespace string) string {
	t.Helper()
	out := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "whole"}}
	out.Spec.Spec = wholeGPU()
	if _, err := c.Kube().ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), out, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return out.Name
}

// fromTemplate returns a pod with a claim of a template.
func (c *check) fromTemplate(name, template string) *corev1.Pod {
	p := c.podOf(name)
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	return p
}

func (c *check) quota(t *testing.T) {
	const poor = "poor"
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: poor}}
	if _, err := c.Kube().CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "no-gpus"}}
	quota.Spec.Hard = corev1.ResourceList{"requests.nvidia.com/gpu": resource.MustParse("0")}
	quotas := c.Kube().CoreV1().ResourceQuotas(poor)
	_, err := quotas.Create(t.Context(), quota, metav1.CreateOptions{})
	for until := time.Now().Add(time.Minute); err == nil && len(quota.Status.Hard) == 0; time.Sleep(20 * time.Millisecond) {
		// Claims are counted once it has a status.
		if quota, err = quotas.Get(t.Context(), quota.Name, metav1.GetOptions{}); time.Now().After(until) {
			t.Fatalf("the quota has no status: %v", err)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	p := c.fromTemplate("refused", c.template(t, poor))
	p.Namespace = poor
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		// The namespace's ServiceAccount comes after it.
		_, err = c.Kube().CoreV1().Pods(poor).Create(t.Context(), p, metav1.CreateOptions{})
		if err == nil {
			break
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		why := c.reason(t, p)
		if strings.Contains(why.Text, "exceeded quota: no-gpus") && strings.Contains(why.Change, "Raise the ResourceQuota no-gpus in namespace poor") {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("why says %q %q", why.Text, why.Change)
		}
	}
}

func (c *check) podGroup(t *testing.T) {
	name, template := "gang", c.template(t, namespace)
	group := &schedulingapi.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: name}}
	group.Spec.SchedulingPolicy.Basic = &schedulingapi.BasicSchedulingPolicy{}
	group.Spec.ResourceClaims = []schedulingapi.PodGroupResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	if _, err := c.Kube().SchedulingV1beta1().PodGroups(namespace).Create(t.Context(), group, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	member := func(pod string) *corev1.Pod {
		p := c.fromTemplate(pod, template)
		p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &name}
		return p
	}
	first, second := member("gang-0"), member("gang-1")
	c.place(t, first)
	c.place(t, second)
	var model view.Cluster
	c.ask(t, &model, "get", "-o", "json")
	var users []string
	for _, n := range model.Nodes {
		for _, g := range n.GPUs {
			for _, u := range g.Uses {
				if len(u.PodGroups) > 0 { // others are of pods that have just gone
					users = append(users, fmt.Sprint(u.PodGroups, u.Users()))
				}
			}
		}
	}
	if got, want := strings.Join(users, " "), "[gang] [gang-0 gang-1]"; got != want {
		t.Errorf("get says that %s use GPUs, want %s", got, want)
	}
	var drain struct {
		Evicted []struct{ Pod, PodGroup string }
	}
	c.ask(t, &drain, "drain", c.get(t, first).Spec.NodeName, "--dry-run", "-o", "json")
	var evicted []string
	for _, e := range drain.Evicted {
		if e.PodGroup != "" {
			evicted = append(evicted, e.Pod+" of "+e.PodGroup)
		}
	}
	if got, want := strings.Join(evicted, ", "), "default/gang-0 of default/gang, default/gang-1 of default/gang"; got != want {
		t.Errorf("drain would evict %s, want %s", got, want)
	}
	third := member("gang-2")
	third.Spec.NodeSelector = map[string]string{"example.com/no": "node"}
	c.create(t, third)
	t.Cleanup(func() { c.remove(t, third.Name) })
	if placed := c.decision(t, third, false); placed != "" {
		t.Fatalf("the scheduler places it on %s", placed)
	}
	if why := c.reason(t, third); !strings.HasPrefix(why.Text, "No node takes it") {
		t.Errorf("why says %q", why.Text)
	}
}

func (c *check) devicePlugin(t *testing.T) {
	const units = "nvidia.com/gpu"
	node := c.Cluster.Nodes()[2]
	patch := fmt.Sprintf(`{"status":{"capacity":{%q:"1"},"allocatable":{%q:"1"}}}`, units, units)
	nodes := c.Kube().CoreV1().Nodes()
	if _, err := nodes.Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	with := func(name string) *corev1.Pod {
		p := onNode(c.podOf(name), node)
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{units: resource.MustParse("1")}
		p.Spec.Containers[0].Resources.Limits = p.Spec.Containers[0].Resources.Requests
		return p
	}
	first := with("by-the-plugin")
	c.place(t, first)
	if now := c.get(t, first); now.Status.ExtendedResourceClaimStatus != nil {
		t.Errorf("the scheduler makes claim %s for it", now.Status.ExtendedResourceClaimStatus.ResourceClaimName)
	}
	second := with("too-many")
	c.create(t, second)
	t.Cleanup(func() { c.remove(t, second.Name) })
	if placed := c.decision(t, second, false); placed != "" {
		t.Fatalf("the scheduler places it on %s", placed)
	}
	if why := c.reason(t, second); !why.Waits || !strings.Contains(why.Text, "1 node: its device plugin has only 0 of 1 nvidia.com/gpu free") {
		t.Errorf("why says %q; the scheduler says %s", why.Text, c.message(t, second))
	}
}
