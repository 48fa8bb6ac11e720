//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// needsLine begins the line of a story that names the feature gates it needs.
const needsLine = "# Needs "

// dynamicResourceAllocation is the gate that every story needs.
const dynamicResourceAllocation = "DynamicResourceAllocation"

// needs returns the feature gates that a story can't do without, and perhaps
// "Kubernetes 1.36", the oldest version that does what it needs.
func needs(t *testing.T, story string) []string {
	t.Helper()
	if story == churnStory {
		return []string{"DRAPartitionableDevices"}
	}
	data, err := os.ReadFile(storyFile(story))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if text, found := strings.CutPrefix(line, needsLine); found {
			return strings.Split(strings.TrimSuffix(strings.TrimSpace(text), "."), ", ")
		}
	}
	return nil
}

// lacks returns what a story needs and these clusters don't have; empty if nothing.
func lacks(t *testing.T, story string) string {
	t.Helper()
	var off []string
	for _, need := range append(needs(t, story), dynamicResourceAllocation) {
		has, err := have(strings.Replace(need, "Kubernetes ", fromVersion, 1))
		if err != nil {
			t.Fatal(err)
		}
		if !has {
			off = append(off, need)
		}
	}
	if len(off) == 0 {
		return ""
	}
	return "needs " + strings.Join(off, ", ")
}

const (
	// fromVersion begins a condition that is met from a Kubernetes version on.
	fromVersion = "kubernetes:"
	// fromKubelet begins one that is met from a version of the nodes' kubelets on.
	fromKubelet = "kubelet:"
)

// have reports whether these clusters meet a condition: a feature gate,
// "kubernetes:1.36" or "kubelet:1.36". A gate that no version has is an error, because what it guards
// would never run.
func have(condition string) (bool, error) {
	if oldest, found := strings.CutPrefix(condition, fromVersion); found {
		return *version >= oldest, nil // two digits each
	}
	if oldest, found := strings.CutPrefix(condition, fromKubelet); found {
		return cmp.Or(*kubelet, *version) >= oldest, nil
	}
	if !slices.Contains(cluster.Gates(cluster.DefaultKubernetes, cluster.DRAAll), condition) {
		return false, fmt.Errorf("no Kubernetes version has a feature gate %q", condition)
	}
	return slices.Contains(cluster.Gates(*version, cluster.DRA(*dra)), condition), nil
}
