package main

import (
	"context"
	"encoding/json"
	"fmt"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// published are the slices that the controller writes for a node of eight
// H100s that no policy is about, where the server stores counters in slices of
// their own.
func published(node metav1.OwnerReference) ([]resourcev1.ResourceSlice, error) {
	n, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		return nil, fmt.Errorf("simulate a node: %w", err)
	}
	gpus := offer.Build(n, offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), nil, offer.Server{Counters: true})
	return publish.Pool(node, gpus, publish.SplitCounters), nil
}

// shelf measures what is published: how much it is, and how well the order of
// the devices packs. It needs no cluster.
func (b *bench) shelf(context.Context) error {
	slices, err := published(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: "node", UID: "node"})
	if err != nil {
		return err
	}
	size, devices := 0, 0
	for _, s := range slices {
		raw, err := json.Marshal(s)
		if err != nil {
			return fmt.Errorf("measure slice %s: %w", s.Name, err)
		}
		size += len(raw)
		devices += len(s.Spec.Devices)
	}
	b.figure("slice_kib_per_8xh100", float64(size)/1024)
	b.figure("devices_per_8xh100", float64(devices))
	ratio, err := offertest.PackingAcceptanceRatio(2000, 10)
	if err != nil {
		return fmt.Errorf("play arrivals and departures: %w", err)
	}
	b.figure("packing_acceptance_ratio", ratio)
	return nil
}
