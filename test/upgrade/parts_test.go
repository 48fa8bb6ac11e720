package upgrade

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

const manifest = `---
# Source: tessera/templates/crd/crds.yaml
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gpuinventories.gpu.tessera.dev}
---
# Source: tessera/templates/node/daemonset.yaml
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: tessera-node, namespace: tessera}
---
# Source: tessera/templates/node/serviceaccount.yaml
apiVersion: v1
kind: ServiceAccount
metadata: {name: tessera-node, namespace: tessera}
---
# Source: tessera/templates/metrics/services.yaml
# Nothing here.
`

func TestSplit(t *testing.T) {
	all, err := split(manifest)
	if err != nil {
		t.Fatal(err)
	}
	got := map[part][]string{}
	for p, objects := range all {
		for _, o := range objects {
			got[p] = append(got[p], o.id)
		}
	}
	want := map[part][]string{
		crds:   {"customresourcedefinition.v1.apiextensions.k8s.io/gpuinventories.gpu.tessera.dev"},
		plugin: {"daemonset.v1.apps/tessera-node", "serviceaccount/tessera-node"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
}

func TestRemoved(t *testing.T) {
	before, next := []object{{id: "a"}, {id: "b"}}, []object{{id: "b"}, {id: "c"}}
	if diff := cmp.Diff([]string{"a"}, removed(before, next)); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
}

func TestOrders(t *testing.T) {
	first, last := map[part]int{}, map[part]int{}
	for _, order := range orders() {
		first[order[0]]++
		last[order[len(order)-1]]++
	}
	for _, p := range parts() {
		if first[p] != 1 || last[p] != 1 {
			t.Errorf("%s is first %d times and last %d times, want once", p, first[p], last[p])
		}
	}
}
