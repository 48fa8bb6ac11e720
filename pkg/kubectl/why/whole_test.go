package why

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/rank"
)

// TestWholeNodes: three nodes of four GPUs, of which a claim has one GPU, and one of two; two are
// in the reserve, one of these hard.
func TestWholeNodes(t *testing.T) {
	var o fit.Objects
	for i, c := range []struct {
		gpus int
		rank rank.Rank
	}{{4, rank.Rank{Taints: 2}}, {4, rank.Rank{Taints: rank.ReserveTaints}}, {4, rank.Rank{Taints: rank.ReserveTaints, Hard: true}}, {2, rank.Rank{}}} {
		name := fmt.Sprintf("n%d", i)
		taints, _ := c.rank.Apply(nil)
		o.Nodes = append(o.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints}})
		s := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}}
		s.Spec = resourceapi.ResourceSliceSpec{Driver: gpu.DriverName, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, ResourceSliceCount: 1}}
		for g := range c.gpus {
			s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: fmt.Sprintf("gpu-%08x", g)})
		}
		o.Slices = append(o.Slices, s)
	}
	used := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "small", Namespace: "team"}}
	used.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
		{Driver: gpu.DriverName, Pool: "n0", Device: "gpu-00000001", Request: "gpu"},
	}}}
	o.Claims = append(o.Claims, used)
	asks := func(e resourceapi.ExactDeviceRequest) []*resourceapi.ResourceClaim {
		e.DeviceClassName = gpu.ClassGPU
		c := &resourceapi.ResourceClaim{}
		c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &e}}
		return []*resourceapi.ResourceClaim{c}
	}
	const counts = "It needs 4 GPUs of one node: of 3 such nodes, 2 are wholly free, 2 of these in the reserve"
	tolerates := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{{Key: rank.ReserveKey, Operator: corev1.TolerationOpExists}}}}
	named := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{{Key: rank.ReserveKey, Effect: corev1.TaintEffectNoSchedule}}}} // operator Equal, value ""
	for _, c := range []struct {
		pod  *corev1.Pod
		asks resourceapi.ExactDeviceRequest
		want []string
	}{
		{&corev1.Pod{}, resourceapi.ExactDeviceRequest{Count: 3}, nil},
		{&corev1.Pod{}, resourceapi.ExactDeviceRequest{Count: 4}, []string{counts + "; 1 take only pods that tolerate gpu.tessera.dev/reserve."}},
		{tolerates, resourceapi.ExactDeviceRequest{Count: 4}, []string{counts + "."}},
		{named, resourceapi.ExactDeviceRequest{Count: 4}, []string{counts + "."}},
		{tolerates, resourceapi.ExactDeviceRequest{AllocationMode: resourceapi.DeviceAllocationModeAll}, []string{counts + "."}},
	} {
		if diff := cmp.Diff(c.want, wholeNodes(c.pod, asks(c.asks), o)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", c.asks, diff)
		}
	}
}
