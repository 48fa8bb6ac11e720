package allocators

import (
	"context"
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// Release is one of Kubernetes, and how the feature gates of Dynamic Resource
// Allocation are set on it.
type Release struct {
	// Module is the folder of its allocator.
	Module string
	// Version of Kubernetes, as /version says it.
	Version string
	// Gates: "default", or "all": each gate of Dynamic Resource Allocation, alpha ones
	// too, is on, or "none": those that are on by default are off.
	Gates string
	// Server as the controller finds it.
	Server Server
	// PrioritizedList: requests can have alternatives.
	PrioritizedList bool
	// All: claims can ask for all devices of a class. The schedulers of 1.35 and 1.36
	// that don't have the fix of kubernetes/kubernetes#138882 crash if one of these
	// consumes counters, and that of 1.31 fails if there aren't any.
	All bool

	api      api
	features string
}

// String names it.
func (r Release) String() string { return strings.TrimPrefix(r.Version, "v") + " " + r.Gates }

// The allocators' names of features. A release ignores those that it doesn't have.
const (
	noFeatures   = `{}`
	someFeatures = `{"AdminAccess":true,"DeviceStatus":true,"PrioritizedList":true}`
	betaFeatures = `{"AdminAccess":true,"ConsumableCapacity":true,"DeviceBindingAndStatus":true,"DeviceTaints":true,
		"PartitionableDevices":true,"PrioritizedList":true}`
	allFeatures = `{"AdminAccess":true,"CompatibilityGroups":true,"ConsumableCapacity":true,"DerivedAttributes":true,
		"DeviceBinding":true,"DeviceBindingAndStatus":true,"DeviceStatus":true,"DeviceTaints":true,"FractionalCapacityRange":true,
		"ListTypeAttributes":true,"OptionalNodeOperations":true,"PartitionableDevices":true,"PrioritizedList":true}`
)

// Releases are all that are supported, with each set of gates that makes a
// difference. Which gates are on by default, and in which form counters are
// stored, is in the Kubernetes documentation of each release; the stories on real
// clusters check it.
func Releases() []Release {
	out := []Release{
		release("1.31", "v1.31.4", v1alpha3, "default", noFeatures, publish.NoCounters, false),
		release("1.32", "v1.32.13", beta1, "default", noFeatures, publish.NoCounters, false),
		release("1.33", "v1.33.13", beta1, "default", noFeatures, publish.NoCounters, false),
		release("1.33", "v1.33.13", beta1, "all", allFeatures, publish.JointCounters, false),
		release("1.34", "v1.34.4", v1, "default", someFeatures, publish.NoCounters, false),
		release("1.34", "v1.34.4", v1, "all", allFeatures, publish.JointCounters, true),
		release("1.35", "v1.35.4", v1, "default", someFeatures, publish.NoCounters, false),
		release("1.35", "v1.35.4", v1, "all", allFeatures, publish.SplitCounters, true),
	}
	for _, r := range []struct{ module, version string }{{"1.36.1", "v1.36.1"}, {"1.36", "v1.36.3"}, {"1.37", "v1.37.1"}} {
		out = append(out,
			release(r.module, r.version, v1, "none", someFeatures, publish.NoCounters, false),
			release(r.module, r.version, v1, "default", betaFeatures, publish.SplitCounters, true),
			release(r.module, r.version, v1, "all", allFeatures, publish.SplitCounters, true))
	}
	return out
}

func release(module, version string, api api, gates, features string, form publish.Counters, multiple bool) Release {
	return Release{
		Module: module, Version: version, Gates: gates, PrioritizedList: strings.Contains(features, "PrioritizedList"),
		Server: Server{Form: form, Server: offer.Server{
			Counters: form != publish.NoCounters, Multiple: multiple && allocator.CountsCapacity(version), Charged: allocator.ChargesShared(version), Version: version,
		}},
		All: api != v1alpha3 && form != publish.SplitCounters || allocator.ChargesShared(version),
		api: api, features: features,
	}
}

// Others are schedulers of others, with the code of Kubernetes 1.34 that allocates. Nothing is
// published for them.
func Others() []Release {
	return []Release{
		{Module: "others/volcano", Version: "Volcano 1.14.1", Gates: "default", api: v1, features: noFeatures},
		{Module: "others/kai", Version: "KAI 0.12.0", Gates: "default", api: v1, features: noFeatures},
	}
}

// Find returns a release, or a scheduler of others.
func Find(name string) (Release, error) {
	for _, r := range append(Releases(), Others()...) {
		if r.String() == name {
			return r, nil
		}
	}
	return Release{}, fmt.Errorf("no release %q", name)
}

// Start runs the release's allocator, which Build built at the path.
func (r Release) Start(ctx context.Context, path string) (*Program, error) {
	return start(ctx, path, r.api, r.features)
}

// StartBeside runs it beside an API server that may have fields that it doesn't have.
func (r Release) StartBeside(ctx context.Context, path string) (*Program, error) {
	return start(ctx, path, r.api, r.features, "drop")
}

// Skew is a scheduler beside an API server that is newer, or has more gates, or a scheduler of
// others.
type Skew struct {
	Server, Scheduler string // names of releases
}

// Skews are those that Kubernetes permits, at most a minor version apart, and that
// differ in what they allocate; and others' schedulers beside the oldest API server that is as new
// as they, and the newest.
func Skews() []Skew {
	return []Skew{
		{"1.33.13 all", "1.32.13 default"},
		{"1.34.4 all", "1.33.13 all"},
		{"1.35.4 all", "1.34.4 default"},
		{"1.35.4 all", "1.34.4 all"},
		{"1.36.3 default", "1.35.4 default"},
		{"1.36.3 default", "1.35.4 all"},
		{"1.36.3 default", "1.36.1 default"},
		{"1.37.1 default", "1.36.1 default"},
		{"1.37.1 default", "1.36.3 none"},
		{"1.34.4 default", "Volcano 1.14.1 default"},
		{"1.37.1 default", "Volcano 1.14.1 default"},
		{"1.34.4 default", "KAI 0.12.0 default"},
		{"1.37.1 default", "KAI 0.12.0 default"},
	}
}
