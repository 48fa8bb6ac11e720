package main

import (
	"slices"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// TestMissingParts: each entry is for purposes that there are, and each purpose has one
// sentence about a resource at most.
func TestMissingParts(t *testing.T) {
	known := []purpose{forModel}
	for _, c := range command(genericclioptions.IOStreams{}, screen{}).Commands() {
		known = append(known, purpose(c.Name()))
	}
	type entry struct {
		resource string
		purpose  purpose
	}
	seen := make(map[entry]bool)
	for _, m := range missingParts() {
		for _, p := range m.purposes {
			e := entry{m.resource, p}
			if !slices.Contains(known, p) {
				t.Errorf("%v: there is no such command", e)
			}
			if seen[e] {
				t.Errorf("%v: a second entry", e)
			}
			seen[e] = true
		}
	}
}
