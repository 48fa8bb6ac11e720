package publish

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/offer"
)

// ManagedByLabel and ManagedBy mark the slices that are ours to change and to
// delete. Another driver of the same name, on a node by mistake, keeps its own.
const (
	ManagedByLabel = "app.kubernetes.io/managed-by"
	ManagedBy      = "tessera"
)

// maxName is how long an object's name may be.
const maxName = 253

// Pool returns the slices that one node's offer makes, one a GPU, in the order
// of the GPUs' indexes, which is also the order of their names: the allocator
// takes the first device that fits, by slice name. The pool's generation is
// left 0; Write sets it. An empty offer makes no slices.
func Pool(node metav1.OwnerReference, gpus []offer.GPU) []resourceapi.ResourceSlice {
	out := make([]resourceapi.ResourceSlice, 0, len(gpus))
	for _, g := range gpus {
		out = append(out, resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:            sliceName(node.Name, g),
				Labels:          map[string]string{ManagedByLabel: ManagedBy},
				OwnerReferences: []metav1.OwnerReference{node},
			},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: offer.Driver,
				Pool: resourceapi.ResourcePool{
					Name:               node.Name,
					ResourceSliceCount: int64(len(gpus)),
				},
				NodeName: &node.Name,
				Devices:  g.Devices,
			},
		})
	}
	return out
}

// sliceName is "<node>-<index>-<device>": readable, the same after every
// restart, and in the order of the indexes. A node name that leaves no room is
// cut and told apart by a hash of the whole.
func sliceName(node string, g offer.GPU) string {
	tail := fmt.Sprintf("-%03d-%s", g.Index, g.Name)
	if len(node)+len(tail) > maxName {
		hash := fmt.Sprintf("%x", sha256.Sum256([]byte(node)))[:16]
		node = strings.TrimRight(node[:maxName-len(tail)-len(hash)-1], "-.") + "-" + hash
	}
	return node + tail
}

// Complete says whether a node's slices are a whole pool: as many of the
// newest generation as they say there are. A pool from which somebody deleted
// a slice isn't complete, nor is one that isn't there.
func Complete(current []*resourceapi.ResourceSlice) bool {
	newest := generation(current)
	var have, want int64
	for _, s := range current {
		if s.Spec.Pool.Generation == newest {
			have++
			want = s.Spec.Pool.ResourceSliceCount
		}
	}
	return have > 0 && have == want
}

// Equal says whether the current slices are what is wanted, generation apart.
func Equal(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) bool {
	if len(current) != len(want) {
		return false
	}
	have := byName(current)
	newest := generation(current)
	for i := range want {
		s, ok := have[want[i].Name]
		if !ok || s.Spec.Pool.Generation != newest || !same(s, &want[i]) {
			return false
		}
	}
	return true
}

// same compares what Pool decides. A server's own additions to the object's
// metadata don't count.
func same(have, want *resourceapi.ResourceSlice) bool {
	spec := have.Spec
	spec.Pool.Generation = want.Spec.Pool.Generation
	return equality.Semantic.DeepEqual(spec, want.Spec) &&
		equality.Semantic.DeepEqual(have.OwnerReferences, want.OwnerReferences) &&
		have.Labels[ManagedByLabel] == want.Labels[ManagedByLabel]
}

func generation(current []*resourceapi.ResourceSlice) int64 {
	var newest int64
	for _, s := range current {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	return newest
}

func byName(current []*resourceapi.ResourceSlice) map[string]*resourceapi.ResourceSlice {
	return maps.Collect(func(yield func(string, *resourceapi.ResourceSlice) bool) {
		for _, s := range current {
			if !yield(s.Name, s) {
				return
			}
		}
	})
}

// leftOver lists the slices that no slice of want replaces.
func leftOver(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	return slices.DeleteFunc(slices.Clone(current), func(s *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(want, func(w resourceapi.ResourceSlice) bool { return w.Name == s.Name })
	})
}
