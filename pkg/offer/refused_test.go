package offer_test

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// sick is the name of the GPU that refuses.
const sick = "gpu-00000001"

// refusing returns the condition of a GPU that refused these devices to claims, named without
// the GPU's name.
func refusing(devices ...string) gpu.Condition {
	c := gpu.Condition{Type: gpu.PrepareFailed, Message: "it can't be created"}
	for _, d := range devices {
		c.Refused = append(c.Refused, gpu.DeviceName(sick+d))
	}
	return c
}

// due returns the condition when the pause has ended.
func due(c gpu.Condition) gpu.Condition { return turn(1, c) }

// turn returns the condition in a later turn.
func turn(n int, c gpu.Condition) gpu.Condition {
	c.Turn = n
	return c
}

// evicting returns the condition with the effect that a policy gives it.
func evicting(c gpu.Condition) gpu.Condition {
	c.ByPolicy = gpu.NoExecute
	return c
}

var (
	inPartitions = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb", "1g.10gb"}}}
	inShares     = v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(2))}}
	sharesBySize = v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
	inReplicas   = v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}}
	sharedHalves = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb", "3g.40gb"}, MPS: &v1alpha1.PartitionMPS{Shares: 2}}}
)

// refusedCases say which devices of a GPU that refuses are kept from new claims: their names
// without the GPU's. On those with an exclamation mark pods are ended.
var refusedCases = map[string]struct {
	plan      v1alpha1.Plan
	condition gpu.Condition
	claims    []gpu.DeviceName
	want      string
}{
	"nothing":                      {inPartitions, refusing(), nil, ""},
	"a half":                       {inPartitions, refusing("-mig-3g40gb-0"), nil, "whole -mig-3g40gb-0 -mig-1g10gb-0 -mig-1g10gb-1 -mig-1g10gb-2 -mig-1g10gb-3"},
	"a slice":                      {inPartitions, refusing("-mig-1g10gb-5"), nil, "whole -mig-3g40gb-4 -mig-1g10gb-5"},
	"two slices":                   {inPartitions, refusing("-mig-1g10gb-5", "-mig-1g10gb-0"), nil, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0 -mig-1g10gb-5"},
	"one that isn't offered":       {inPartitions, refusing("-mig-2g20gb-4"), nil, "whole -mig-3g40gb-4 -mig-1g10gb-4 -mig-1g10gb-5"},
	"the whole GPU":                {inShares, refusing(""), nil, "whole -mps2-0 -mps2-1"},
	"one that the tables lack":     {inShares, refusing("-mig-9g99gb-0"), nil, "whole -mps2-0 -mps2-1"},
	"a share":                      {inShares, refusing("-mps2-0"), nil, "-mps2-0 -mps2-1"},
	"a share of another plan":      {inShares, refusing("-mps4-3"), nil, "-mps2-0 -mps2-1"},
	"a share of a partition":       {sharedHalves, refusing("-mig-3g40gb-0-mps"), nil, "-mig-3g40gb-0-mps"},
	"the partition of shares":      {sharedHalves, refusing("-mig-3g40gb-4"), nil, "-mig-3g40gb-4-mps"},
	"the whole GPU of partitions":  {sharedHalves, refusing(""), nil, "-mig-3g40gb-0-mps -mig-3g40gb-4-mps"},
	"a replica":                    {inReplicas, refusing("-ts2-0"), nil, "whole -ts2-0 -ts2-1"},
	"a share, and there are none":  {inPartitions, refusing("-mps2-0"), nil, ""},
	"a replica, now of partitions": {sharedHalves, refusing("-ts2-0"), nil, "-mig-3g40gb-0-mps -mig-3g40gb-4-mps"},

	"a half is due":                  {inPartitions, due(refusing("-mig-3g40gb-0")), nil, "whole -mig-1g10gb-0 -mig-1g10gb-1 -mig-1g10gb-2 -mig-1g10gb-3"},
	"the first of two is due":        {inPartitions, due(refusing("-mig-1g10gb-5", "-mig-1g10gb-0")), nil, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0"},
	"the first isn't offered":        {inPartitions, due(refusing("-mig-2g20gb-4", "-mig-1g10gb-0")), nil, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-4 -mig-1g10gb-5"},
	"none is offered":                {inPartitions, due(refusing("-mig-2g20gb-4")), nil, "-mig-3g40gb-4 -mig-1g10gb-4 -mig-1g10gb-5"},
	"none is offered, nor the whole": {sharedHalves, due(refusing("-mig-7g80gb-0")), nil, "-mig-3g40gb-4-mps"},
	"the tables lack it, and is due": {inShares, due(refusing("-mig-9g99gb-0")), nil, "-mps2-0 -mps2-1"},
	"the second turn":                {inPartitions, turn(2, refusing("-mig-1g10gb-5", "-mig-1g10gb-0")), nil, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-5"},
	"then what wasn't refused":       {inPartitions, turn(3, refusing("-mig-1g10gb-5", "-mig-1g10gb-0")), nil, "-mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0 -mig-1g10gb-5"},
	"after the last turn":            {inPartitions, turn(6, refusing("-mig-1g10gb-5", "-mig-1g10gb-0")), nil, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0"},
	"many turns of one":              {v1alpha1.Plan{}, turn(1000, refusing("")), nil, ""},
	"nothing is due":                 {inPartitions, due(refusing()), nil, ""},

	"pods are ended":                          {inPartitions, evicting(refusing("-mig-3g40gb-0")), nil, "whole -mig-3g40gb-0! -mig-1g10gb-0 -mig-1g10gb-1 -mig-1g10gb-2 -mig-1g10gb-3"},
	"the pod of one claim is ended":           {inPartitions, evicting(refusing("-mig-1g10gb-5")), []gpu.DeviceName{sick + "-mig-1g10gb-5"}, "whole -mig-3g40gb-4 -mig-1g10gb-5!"},
	"those of several claims aren't":          {inPartitions, evicting(refusing("-mig-1g10gb-5")), []gpu.DeviceName{sick + "-mig-1g10gb-5", sick + "-mig-1g10gb-4", sick + "-mig-1g10gb-5"}, "whole -mig-3g40gb-4 -mig-1g10gb-5"},
	"nor are those of a share by size":        {sharesBySize, evicting(refusing("-mps")), []gpu.DeviceName{sick + "-mps"}, "-mps"},
	"nor are those of a partition's share":    {sharedHalves, evicting(refusing("-mig-3g40gb-0-mps")), []gpu.DeviceName{sick + "-mig-3g40gb-0-mps"}, "-mig-3g40gb-0-mps"},
	"that of an equal share is":               {inShares, evicting(refusing("-mps2-1")), []gpu.DeviceName{sick + "-mps2-0", sick + "-mps2-1"}, "-mps2-0 -mps2-1!"},
	"nor is one ended that is due":            {inPartitions, evicting(due(refusing("-mig-1g10gb-5", "-mig-1g10gb-0"))), []gpu.DeviceName{sick + "-mig-1g10gb-5"}, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0"},
	"nor one whose turn is over":              {inPartitions, evicting(turn(2, refusing("-mig-1g10gb-5", "-mig-1g10gb-0"))), []gpu.DeviceName{sick + "-mig-1g10gb-5"}, "whole -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-5"},
	"that of a claim with a leftover is":      {inShares, evicting(refusing("-mig-1g10gb-5")), []gpu.DeviceName{sick + "-mig-1g10gb-5"}, "-mig-1g10gb-5!"},
	"those of claims with other devices stay": {inPartitions, evicting(refusing("")), []gpu.DeviceName{sick + "-mig-3g40gb-4"}, "whole! -mig-3g40gb-0 -mig-3g40gb-4 -mig-1g10gb-0 -mig-1g10gb-1 -mig-1g10gb-2 -mig-1g10gb-3 -mig-1g10gb-4 -mig-1g10gb-5 -mig-1g10gb-6"},
}

// TestRefusedDevices checks what new claims don't get of a GPU that refused devices to claims,
// where devices have taints and where they are withdrawn, and that nothing of another GPU is
// kept from them.
func TestRefusedDevices(t *testing.T) {
	for name, tc := range refusedCases {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 2)
			o := options{Server: offer.Server{Counters: true, Multiple: true, Charged: true, MaxTainted: 64, InformationalTaints: true}, Plan: tc.plan, Allocated: tc.claims}
			healthy := build(n, o)
			n.GPUs[0].Conditions = []gpu.Condition{{Type: gpu.NVLinkDown}, tc.condition}
			got := build(n, o)
			if diff := gocmp.Diff(healthy[1], got[1]); diff != "" {
				t.Errorf("the other GPU changes (-healthy +got):\n%s", diff)
			}
			var tainted []string
			for _, d := range got[0].Devices {
				if mark, blocked := effectOf(t, d); blocked {
					tainted = append(tainted, short(d)+mark)
				}
			}
			if diff := gocmp.Diff(slices.Sorted(strings.FieldsSeq(tc.want)), slices.Sorted(slices.Values(tainted))); diff != "" {
				t.Errorf("tainted (-want +got):\n%s", diff)
			}
			o.MaxTainted = 0
			var offered, want []string
			for _, d := range build(n, o)[0].Devices {
				offered = append(offered, short(d)+typeOf(d))
			}
			for _, d := range healthy[0].Devices {
				switch blocked := slices.Contains(strings.Fields(strings.ReplaceAll(tc.want, "!", "")), short(d)); {
				case !blocked:
					want = append(want, short(d)+typeOf(d))
				case slices.Contains(tc.claims, gpu.DeviceName(d.Name)):
					want = append(want, short(d)+" leftover")
				}
			}
			if diff := gocmp.Diff(want, offered); diff != "" {
				t.Errorf("offered without taints (-want +got):\n%s", diff)
			}
		})
	}
}

// short returns a device's name without that of its GPU.
func short(d resourceapi.Device) string {
	return cmp.Or(strings.TrimPrefix(d.Name, sick), "whole")
}

func typeOf(d resourceapi.Device) string { return " " + *d.Attributes["type"].StringValue }

// effectOf returns a mark for the effect that the refusals have on a device; empty for none.
func effectOf(t *testing.T, d resourceapi.Device) (mark string, blocked bool) {
	t.Helper()
	for _, x := range d.Taints {
		switch {
		case x.Value != string(gpu.PrepareFailed):
		case x.Effect == resourceapi.DeviceTaintEffectNoSchedule:
			return "", true
		case x.Effect == resourceapi.DeviceTaintEffectNoExecute:
			return "!", true
		default:
			t.Errorf("%s: taint %+v", d.Name, x)
		}
	}
	return "", false
}

// TestWithheldWhileTried checks that a GPU of which one device is tried again counts as one that
// new claims don't get as planned, so that what depends on that changes once, and not with each
// attempt.
func TestWithheldWhileTried(t *testing.T) {
	for name, c := range map[string]gpu.Condition{"within the pause": refusing(""), "due": due(refusing(""))} {
		n := node(t, "l4", 2)
		n.GPUs[0].Conditions = []gpu.Condition{c}
		want := []offer.WithheldGPU{{UUID: n.GPUs[0].UUID, Name: sick, Reason: "PrepareFailed: it can't be created"}}
		for _, server := range []offer.Server{{}, {MaxTainted: 64}} {
			got := build(n, options{Server: server})
			if diff := gocmp.Diff(want, offer.Withheld(n, got)); diff != "" {
				t.Errorf("%s, %+v (-want +got):\n%s", name, server, diff)
			}
		}
	}
}
