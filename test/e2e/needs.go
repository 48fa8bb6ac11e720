//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/test/cluster"
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
	data, err := os.ReadFile(filepath.Join("testdata", story+".txtar"))
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
	on := cluster.Gates(*version, cluster.DRA(*dra))
	off := slices.DeleteFunc(append(needs(t, story), dynamicResourceAllocation), func(need string) bool {
		if oldest, found := strings.CutPrefix(need, "Kubernetes "); found {
			return *version >= oldest // two digits each
		}
		return slices.Contains(on, need)
	})
	if len(off) == 0 {
		return ""
	}
	return "needs " + strings.Join(off, ", ")
}
