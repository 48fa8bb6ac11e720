package main

import (
	"context"
	"fmt"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// viewNodes of eight GPUs are 5000 GPUs.
const viewNodes = 625

// view measures how long the model of 5000 H100s takes to build, each with five
// partitions that claims have: the median of five times.
func (b *bench) view(context.Context) error {
	o, err := manyGPUs()
	if err != nil {
		return err
	}
	took, err := measure(5, func() error {
		if n := len(view.Build(o).Nodes); n != viewNodes {
			return fmt.Errorf("the model has %d nodes, not %d", n, viewNodes)
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.figure("view_map_5000_gpus_ms", took.percentile(50))
	return nil
}

// manyGPUs are the objects of viewNodes nodes.
func manyGPUs() (view.Objects, error) {
	var o view.Objects
	n, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		return o, fmt.Errorf("simulate a node: %w", err)
	}
	for i := range viewNodes {
		n.Name = fmt.Sprintf("node-%03d", i)
		s, err := published(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: types.UID(n.Name)})
		if err != nil {
			return o, err
		}
		o.Slices = append(o.Slices, s...)
		inv := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
		inventory.SetFacts(&inv.Status, n)
		o.Inventories = append(o.Inventories, inv)
		for _, d := range ofType(s, "mig") {
			// Places are compared as text: "0:1" to "3:1".
			profile, place := *d.Attributes["profile"].StringValue, *d.Attributes["placement"].StringValue
			if (profile != "1g.10gb" || place > "3:1") && (profile != "3g.40gb" || place != "4:4") {
				continue
			}
			claim := resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: d.Name, UID: types.UID(n.Name + d.Name)}}
			claim.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
				Results: []resourcev1.DeviceRequestAllocationResult{{Driver: driver, Pool: n.Name, Device: d.Name}},
			}}
			claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: d.Name, UID: "pod"}}
			o.Claims = append(o.Claims, claim)
		}
	}
	return o, nil
}
