package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// DRA says how much of Dynamic Resource Allocation a cluster has turned on.
type DRA string

// Values of DRA.
const (
	// DRADefault leaves feature gates and APIs as the Kubernetes version has them: up
	// to 1.33 there is no Dynamic Resource Allocation.
	DRADefault DRA = "default"
	// DRAOn turns on what resource claims need and isn't on by default: up to 1.33
	// the gate DynamicResourceAllocation and the API resource.k8s.io.
	DRAOn DRA = "on"
	// DRAAll also turns on every gate of draGates that the version has, and the alpha
	// and beta APIs.
	DRAAll DRA = "all"
)

// DRAs lists the values of DRA.
func DRAs() []DRA { return []DRA{DRADefault, DRAOn, DRAAll} }

// gate is a feature gate of Kubernetes.
type gate struct {
	// since and on are the minor versions from which the gate exists, and from which
	// it is on by default.
	since, on int
}

// draGates are the feature gates of Dynamic Resource Allocation that this project
// has a use for, as in the versions' pkg/features/kube_features.go.
// TestFeatureGates compares them with the programs.
func draGates() map[string]gate {
	return map[string]gate{
		"DynamicResourceAllocation":    {since: 31, on: 34},
		"ResourceHealthStatus":         {since: 31, on: 36},
		"DRAAdminAccess":               {since: 32, on: 34},
		"DRAResourceClaimDeviceStatus": {since: 32, on: 33},
		"DRADeviceTaints":              {since: 33, on: 36},
		"DRAPartitionableDevices":      {since: 33, on: 36},
		"DRAPrioritizedList":           {since: 33, on: 34},
		"DRAConsumableCapacity":        {since: 34, on: 36},
		"DRADeviceBindingConditions":   {since: 34, on: 36},
		"DRAExtendedResource":          {since: 34, on: 36},
		"DRADeviceTaintRules":          {since: 35, on: 37},
		// Claims of PodGroups, with an API that isn't what it was in 1.36.
		"GenericWorkload":           {since: 37, on: 38},
		"DRAWorkloadResourceClaims": {since: 37, on: 38},
	}
}

// Gates returns the names of the gates that are on in a cluster of that version,
// sorted, by default or because of dra.
func Gates(kubernetes string, dra DRA) []string {
	minor := minorVersion(kubernetes)
	return slices.Sorted(func(yield func(string) bool) {
		for name, g := range draGates() {
			if (minor >= g.on || g.turnedOn(name, minor, dra)) && !yield(name) {
				return
			}
		}
	})
}

// turnedOn reports whether dra turns on a gate which is off by default.
func (g gate) turnedOn(name string, minor int, dra DRA) bool {
	exists, wanted := minor >= g.since && minor < g.on, dra == DRAAll || dra == DRAOn && name == "DynamicResourceAllocation"
	return exists && wanted
}

// featureGates returns the gates to pass to a component of that version: those
// that dra turns on, then those that were asked for by name.
func (o Options) featureGates(kubernetes string) map[string]bool {
	gates := map[string]bool{}
	for name, g := range draGates() {
		if g.turnedOn(name, minorVersion(kubernetes), o.DRA) {
			gates[name] = true
		}
	}
	maps.Copy(gates, o.FeatureGates)
	return gates
}

// runtimeConfig returns the API server's --runtime-config; empty for its default.
func (o Options) runtimeConfig() string {
	switch minor := minorVersion(o.Kubernetes); {
	case o.DRA == DRAAll:
		return "api/all=true"
	case o.DRA == DRADefault:
		return ""
	case minor >= 34 && o.Kubelet != "" && minorVersion(o.Kubelet) < 34:
		return "resource.k8s.io/v1beta1=true" // by which older kubelets read claims
	case minor >= 34:
		return ""
	case minor == 31:
		return "resource.k8s.io/v1alpha3=true"
	case minor == 32:
		return "resource.k8s.io/v1beta1=true"
	default:
		return "resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true"
	}
}

// RuntimeConfig returns the --runtime-config of an API server of that version that
// dra needs; empty for its default.
func RuntimeConfig(kubernetes string, dra DRA) string {
	return Options{Kubernetes: kubernetes, DRA: dra}.runtimeConfig()
}

func (o Options) validateDRA() error {
	if slices.Contains(DRAs(), o.DRA) {
		return nil
	}
	var names []string
	for _, dra := range DRAs() {
		names = append(names, string(dra))
	}
	return fmt.Errorf("--dra=%q: want one of %s", o.DRA, strings.Join(names, ", "))
}
