package allocators

import (
	"context"
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// feature is a column of the table: a plan, and the request of the claims for it.
type feature struct {
	name    string
	plan    v1alpha1.Plan
	request Request
	// instead, if not nil, is the request of claims on a server that doesn't store devices
	// that can be allocated several times, insteadText the cell's text for it.
	instead     *Request
	insteadText string
}

func features() []feature {
	four := int32(4)
	mps := &v1alpha1.PartitionMPS{Shares: 2}
	layout := []string{"3g.40gb", "1g.10gb"}
	return []feature{
		{name: "MIG on demand", plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}, request: Request{Kind: "mig"}},
		{name: "MIG by layout", plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: layout}}, request: Request{Kind: "mig"}},
		{name: "equal MPS shares", plan: v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &four}}, request: Request{Kind: "mps"}},
		{
			name: "MPS by size", plan: bySize("1Gi", 4), request: Request{Kind: "mps", Capacity: capacity("20Gi")},
			instead: &Request{Kind: "mps"}, insteadText: "four equal",
		},
		{name: "shares in MIG on demand", plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{MPS: mps}}, request: Request{Kind: "mps"}},
		{name: "shares in a layout", plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: layout, MPS: mps}}, request: Request{Kind: "mps"}},
		{name: "time-slicing", plan: v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}}, request: Request{Kind: "timeslice"}},
	}
}

// Row returns a release's row of the table: how its allocator allocates the claims
// of each feature on an H100, and on how many of 8 GPUs seven partitions spread.
func Row(ctx context.Context, r Release, a Allocator) (string, error) {
	version := strings.TrimPrefix(r.Version, "v")
	cells := []string{version, r.Gates}
	for _, f := range features() {
		cell, err := f.cell(ctx, r.Server, a)
		if err != nil {
			return "", err
		}
		cells = append(cells, cell)
	}
	spread, err := spreads(ctx, r.Server, a)
	if err != nil {
		return "", err
	}
	return "| " + strings.Join(append(cells, spread), " | ") + " |", nil
}

// Header returns the first two lines of the table.
func Header() string {
	names := []string{"Kubernetes", "gates"}
	for _, f := range features() {
		names = append(names, f.name)
	}
	names = append(names, "spread")
	return "| " + strings.Join(names, " | ") + " |\n" + strings.Repeat("| --- ", len(names)) + "|"
}

// SkewHeader returns the first two lines of the table of skews.
func SkewHeader() string {
	names := []string{"API server", "gates", "scheduler", "gates", "whole GPU", "MIG on demand", "MPS share", "allocated twice"}
	return "| " + strings.Join(names, " | ") + " |\n" + strings.Repeat("| --- ", len(names)) + "|"
}

// SkewRow returns a skew's row: which devices the scheduler allocates from the pools that
// are published for the server, and which ones a play found to be allocated twice.
func SkewRow(ctx context.Context, server, scheduler Release, a Allocator, overlaps []*OverlapError) (string, error) {
	cells := []string{strings.TrimPrefix(server.Version, "v"), server.Gates, strings.TrimPrefix(scheduler.Version, "v"), scheduler.Gates}
	onDemand, sizes := features()[0], features()[3]
	for _, asked := range []struct {
		feature
		request Request
	}{{onDemand, Request{Kind: "gpu"}}, {onDemand, onDemand.request}, {sizes, sizes.request}} {
		has, err := asked.gets(ctx, server.Server, a, asked.request)
		if err != nil {
			return "", err
		}
		cells = append(cells, map[bool]string{true: "yes", false: "no"}[has])
	}
	twice := "nothing"
	for _, o := range overlaps {
		twice = "all that overlaps"
		if o.OfShares() {
			twice = "shares, and what overlaps them"
		}
	}
	return "| " + strings.Join(append(cells, twice), " | ") + " |", nil
}

// cell says whether a claim gets the feature, and whether the GPU is offered
// whole beside it.
func (f feature) cell(ctx context.Context, server Server, a Allocator) (string, error) {
	has, err := f.gets(ctx, server, a, f.request)
	if err != nil {
		return "", err
	}
	whole, err := f.gets(ctx, server, a, Request{Kind: "gpu"})
	if err != nil {
		return "", err
	}
	text := "yes"
	if f.instead != nil && !server.Multiple {
		text = f.insteadText
	}
	switch {
	case !has:
		return "no", nil
	case !whole:
		return text + ", no whole GPU", nil
	}
	return text, nil
}

// gets reports whether a claim is allocated what it asks for, on an H100 with the
// feature's plan.
func (f feature) gets(ctx context.Context, server Server, a Allocator, r Request) (bool, error) {
	if !server.Multiple {
		r.Capacity = nil // the API server drops it
	}
	node, err := offertest.Node("h100-80gb", 1)
	if err != nil {
		return false, err
	}
	c := &Cluster{Node: node, Plans: offertest.OnePlan(node, f.plan), Server: server, Allocator: a}
	c.Publish()
	results, err := c.Ask(ctx, "claim", r)
	return len(results) > 0, err
}

// spreads returns on how many GPUs seven partitions spread, at least and at most,
// under the default plan, or by layout without counters.
func spreads(ctx context.Context, server Server, a Allocator) (string, error) {
	plan := v1alpha1.PartitionedPlan{}
	if !server.Counters {
		plan.Layout = []string{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}
	}
	least, most := 9, 0
	for seed := range uint64(20) {
		n, err := Spread(ctx, a, server, plan, seed)
		if err != nil {
			return "", err
		}
		least, most = min(least, n), max(most, n)
	}
	if least == most {
		return fmt.Sprint(most), nil
	}
	return fmt.Sprintf("%d to %d", least, most), nil
}
