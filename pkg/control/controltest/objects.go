package controltest

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// NodeWith is a node and its inventory.
func NodeWith(name, pool string, gpus ...v1alpha1.GPU) []client.Object {
	return []client.Object{
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": pool}}},
		&v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUInventoryStatus{GPUs: gpus, RegisteredAt: new(metav1.NowMicro())}},
	}
}

// H100 is a GPU that can be cut in three ways; the n-th of its node.
func H100(n int) v1alpha1.GPU {
	g := PlainGPU(n, "NVIDIA H100")
	gib := func(n int64) resource.Quantity { return *resource.NewQuantity(n<<30, resource.BinarySI) }
	at := func(size int32, starts ...int32) []v1alpha1.MIGPlacement {
		var out []v1alpha1.MIGPlacement
		for _, s := range starts {
			out = append(out, v1alpha1.MIGPlacement{Start: s, Size: size})
		}
		return out
	}
	g.MIG = &v1alpha1.MIG{Switchable: true, Profiles: []v1alpha1.MIGProfile{
		{Name: "1g.10gb", ID: 19, MaxInstances: 7, Memory: gib(10), Multiprocessors: 16, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "3g.40gb", ID: 9, MaxInstances: 2, Memory: gib(40), Multiprocessors: 60, Placements: at(4, 0, 4)},
		{Name: "7g.80gb", ID: 0, MaxInstances: 1, Memory: gib(80), Multiprocessors: 132, Placements: at(8, 0)},
	}}
	return g
}

// L4 is a GPU that can't be cut; the n-th of its node.
func L4(n int) v1alpha1.GPU { return PlainGPU(n, "NVIDIA L4") }

// PlainGPU is a GPU of any product that can't be cut; the n-th of its node.
func PlainGPU(n int, productName string) v1alpha1.GPU {
	return v1alpha1.GPU{
		UUID: fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", n), Index: int32(n), ProductName: productName,
		Memory: resource.MustParse("80Gi"),
	}
}

// Policy is a SharingPolicy.
func Policy(name string, spec v1alpha1.SharingPolicySpec) *v1alpha1.SharingPolicy {
	s := &v1alpha1.SharingPolicy{Spec: spec}
	s.Name, s.UID, s.CreationTimestamp, s.Generation = name, types.UID(name), metav1.NewTime(time.Unix(1000, 0)), 1
	return s
}

// Exclusive is the plan of whole GPUs.
func Exclusive() v1alpha1.Plan { return v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}} }

// Partitioned is the plan of partitions of these profiles, or of all.
func Partitioned(profiles ...string) v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: profiles}}
}

// MPS is the plan of so many equal shares.
func MPS(shares int32) v1alpha1.Plan { return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &shares}} }

// BySize is the plan of shares whose size claims say.
func BySize() v1alpha1.Plan {
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
}
