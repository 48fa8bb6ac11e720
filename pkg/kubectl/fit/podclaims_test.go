package fit_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

func node(name string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}}
}

// slice returns the slice of a node with the devices.
func slice(node string, devices ...string) resourceapi.ResourceSlice {
	out := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}}
	out.Spec = resourceapi.ResourceSliceSpec{
		Driver: gpu.DriverName, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
	}
	for _, d := range devices {
		out.Spec.Devices = append(out.Spec.Devices, resourceapi.Device{Name: d})
	}
	return out
}

// extendedResource is the extended resource of anyDevice.
const extendedResource = "nvidia.com/gpu"

// anyDevice returns a DeviceClass of all devices.
func anyDevice() resourceapi.DeviceClass {
	out := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}
	out.Spec.ExtendedResourceName = new(extendedResource)
	return out
}

// claim returns a claim for a device that was allocated the named devices of node-0.
func claim(name string, has ...string) resourceapi.ResourceClaim {
	c := *exactly("gpu")
	c.Name, c.UID = name, types.UID(name)
	for _, d := range has {
		if c.Status.Allocation == nil {
			c.Status.Allocation = &resourceapi.AllocationResult{}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: gpu.DriverName, Pool: "node-0", Device: d})
	}
	return c
}

// podWith returns a pod with the claims.
func podWith(claims ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p"}}
	for _, c := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: c, ResourceClaimName: new(c)})
	}
	return p
}

// requesting returns a pod that requests units of the extended resource.
func requesting(n string) *corev1.Pod {
	p := podWith()
	p.Spec.Containers = make([]corev1.Container, 1)
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{extendedResource: resource.MustParse(n)}
	return p
}

// answerTo returns the judge's answer for the pod, and why nodes were not candidates.
func answerTo(t *testing.T, o fit.Objects, p *corev1.Pod) (fit.Answer, []string) {
	t.Helper()
	j := fit.NewJudge(o)
	claims := j.ClaimsOf(p, o.Claims)
	if len(claims.Missing) > 0 {
		t.Fatalf("%v", claims.Missing)
	}
	nodes, refused := j.Candidates(p, claims.Allocated)
	answer, err := j.Fits(t.Context(), nodes, claims, 1)
	if err != nil {
		t.Fatal(err)
	}
	return answer, refused
}

// TestOwnClaims: claims that a pod has already keep their devices: their end is no way to
// get the pod running, and where they are the obstacle, the reason says so.
func TestOwnClaims(t *testing.T) {
	for name, tc := range map[string]struct {
		claims []resourceapi.ResourceClaim
		cause  fit.Cause
		says   string
	}{
		"another claim": {
			[]resourceapi.ResourceClaim{claim("a-shared", "gpu-0"), claim("other", "gpu-1"), claim("waits")},
			fit.InUse, "It fits on node-0 after the end of claim ns/other (no pod uses it).",
		},
		"only its own": {
			[]resourceapi.ResourceClaim{claim("a-shared", "gpu-0", "gpu-1"), claim("waits")},
			fit.Own, "gpu-0 on node-0 belongs to claim ns/a-shared (no pod uses it)",
		},
	} {
		o := fit.Objects{
			Nodes: []corev1.Node{node("node-0")}, Slices: []resourceapi.ResourceSlice{slice("node-0", "gpu-0", "gpu-1")},
			Classes: []resourceapi.DeviceClass{anyDevice()}, Claims: tc.claims,
		}
		answer, _ := answerTo(t, o, podWith("a-shared", "waits"))
		r := answer.Reason
		if r == nil || r.Cause != tc.cause || !strings.Contains(r.Text+r.Change, tc.says) {
			t.Errorf("%s: %+v, want %s: %s", name, r, tc.cause, tc.says)
		}
	}
}

// TestClaimBeingDeleted: no pod gets a claim that is being deleted, whether it has devices
// or not.
func TestClaimBeingDeleted(t *testing.T) {
	for name, c := range map[string]resourceapi.ResourceClaim{"waiting": claim("going"), "allocated": claim("going", "gpu-0")} {
		c.DeletionTimestamp = new(metav1.Now())
		j := fit.NewJudge(fit.Objects{Claims: []resourceapi.ResourceClaim{c}})
		got := j.ClaimsOf(podWith("going"), []resourceapi.ResourceClaim{c})
		if len(got.Missing) != 1 || !strings.Contains(got.Missing[0], "ns/going is being deleted") || len(got.Waiting)+len(got.Allocated) > 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestDevicePlugins: where a device plugin has a resource, its free units count, and
// devices of drivers don't.
func TestDevicePlugins(t *testing.T) {
	user := func(node string, phase corev1.PodPhase) corev1.Pod {
		p := requesting("8")
		p.Spec.NodeName, p.Status.Phase = node, phase
		return *p
	}
	const full = "1 node: its device plugin has only 0 of 8 nvidia.com/gpu free"
	const unknown = "1 node: its device plugin has 8 nvidia.com/gpu, and how many of them are free isn't known"
	running := func(node string) []corev1.Pod { return []corev1.Pod{user(node, corev1.PodRunning)} }
	for name, tc := range map[string]struct {
		// plugins is the node with the device plugin, which has 8 units.
		plugins string
		devices []string
		pods    []corev1.Pod
		fits    []string
		refused string
	}{
		"full, and no device elsewhere":   {"node-1", nil, running("node-1"), nil, full},
		"full, and a device elsewhere":    {"node-1", []string{"gpu-0"}, running("node-1"), []string{"node-0"}, full},
		"full, and a device beside it":    {"node-0", []string{"gpu-0"}, running("node-0"), nil, full},
		"free":                            {"node-1", nil, append(running("node-0"), user("node-1", corev1.PodSucceeded)), []string{"node-1"}, ""},
		"free, and a device beside it":    {"node-0", []string{"gpu-0"}, []corev1.Pod{}, []string{"node-0"}, ""},
		"unknown":                         {"node-1", []string{"gpu-0"}, nil, []string{"node-0"}, unknown},
		"pods that wait for other things": {"node-1", nil, []corev1.Pod{user("", corev1.PodPending)}, []string{"node-1"}, ""},
	} {
		o := fit.Objects{
			Nodes: []corev1.Node{node("node-0"), node("node-1")}, Slices: []resourceapi.ResourceSlice{slice("node-0", tc.devices...)},
			Classes: []resourceapi.DeviceClass{anyDevice()}, Pods: tc.pods,
		}
		for i := range o.Nodes {
			if o.Nodes[i].Name == tc.plugins {
				o.Nodes[i].Status.Allocatable = corev1.ResourceList{extendedResource: resource.MustParse("8")}
			}
		}
		p := requesting("1")
		if !o.ServedByPlugins(p) || o.ServedByPlugins(podWith()) {
			t.Errorf("%s: pods are needed: %v, of a pod without extended resources: %v",
				name, o.ServedByPlugins(p), o.ServedByPlugins(podWith()))
		}
		answer, refused := answerTo(t, o, p)
		var fits []string
		for _, r := range answer.Nodes {
			fits = append(fits, r.Node)
			if r.Node == tc.plugins && len(r.Devices) > 0 {
				t.Errorf("%s: it would get %v of the driver, beside the device plugin", name, r.Devices)
			}
		}
		if strings.Join(fits, " ") != strings.Join(tc.fits, " ") || strings.Join(refused, "; ") != tc.refused {
			t.Errorf("%s: fits on %v, not on: %v; want %v, %s", name, fits, refused, tc.fits, tc.refused)
		}
	}
}

// TestTwoExtendedResources: of two resources, a node's device plugin may have one, and the
// driver the other.
func TestTwoExtendedResources(t *testing.T) {
	other := anyDevice()
	other.Name, other.Spec.ExtendedResourceName = "other", new("example.com/other")
	n := node("node-0")
	n.Status.Allocatable = corev1.ResourceList{extendedResource: resource.MustParse("1")}
	p := requesting("1")
	p.Spec.Containers[0].Resources.Requests["example.com/other"] = resource.MustParse("1")
	o := fit.Objects{
		Nodes: []corev1.Node{n}, Slices: []resourceapi.ResourceSlice{slice("node-0", "gpu-0")},
		Classes: []resourceapi.DeviceClass{anyDevice(), other}, Pods: []corev1.Pod{*p},
	}
	answer, refused := answerTo(t, o, p)
	if len(answer.Nodes) != 1 || len(answer.Nodes[0].Devices) != 1 || len(refused) > 0 {
		t.Errorf("%+v, %v; want one device for the resource that the plugin hasn't", answer, refused)
	}
}
