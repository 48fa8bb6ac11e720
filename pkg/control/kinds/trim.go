package kinds

import (
	"encoding/json"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// The caches hold every node of the cluster. They keep only the parts that the controller
// reads, and a single copy of those that are equal on many nodes.

// maxShared bounds each table of a Trimmer. Labels whose value differs on every node,
// such as its name, fill the table.
const maxShared = 1 << 14

// Trimmer removes the parts of objects that the controller doesn't read. It has one copy of each
// string in Nodes' labels, and of each list of MIG profiles, which are the larger part of an
// inventory. The zero value is ready.
type Trimmer struct {
	mu       sync.Mutex
	strings  map[string]string
	profiles map[string][]v1alpha1.MIGProfile // by their JSON
}

// Trim removes the parts of an object that the controller doesn't read.
func (p *Trimmer) Trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *metav1.PartialObjectMetadata:
		if o.GroupVersionKind() == Node() {
			return p.trimNode(o), nil
		}
	case *v1alpha1.GPUInventory:
		return p.trimInventory(o)
	}
	return cache.TransformStripManagedFields()(obj)
}

// trimNode removes the parts of a Node's metadata that the controller doesn't read: most nodes
// of a cluster may have no GPUs, and all have about the same labels.
func (p *Trimmer) trimNode(node *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
	p.mu.Lock()
	defer p.mu.Unlock()
	labels := make(map[string]string, len(node.Labels))
	for key, value := range node.Labels {
		labels[oneCopy(&p.strings, key, key)] = oneCopy(&p.strings, value, value)
	}
	trimmed := &metav1.PartialObjectMetadata{TypeMeta: node.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: labels,
	}}
	if HasOurLabels(node) {
		trimmed.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: LabelManager}}
	}
	return trimmed
}

// trimInventory makes the GPUs of an inventory share their lists of MIG profiles with
// others of their model. Readers of the cache get a copy, or change nothing.
func (p *Trimmer) trimInventory(inv *v1alpha1.GPUInventory) (*v1alpha1.GPUInventory, error) {
	inv.ManagedFields = nil
	for i := range inv.Status.GPUs {
		mig := inv.Status.GPUs[i].MIG
		if mig == nil || len(mig.Profiles) == 0 {
			continue
		}
		key, err := json.Marshal(mig.Profiles)
		if err != nil {
			return nil, fmt.Errorf("read the MIG profiles of GPUInventory %s: %w", inv.Name, err)
		}
		p.mu.Lock()
		mig.Profiles = oneCopy(&p.profiles, string(key), mig.Profiles)
		p.mu.Unlock()
	}
	return inv, nil
}

// oneCopy returns the first value that was stored with this key. A full table is emptied,
// so that later values share less.
func oneCopy[V any](table *map[string]V, key string, value V) V {
	if known, ok := (*table)[key]; ok {
		return known
	}
	if *table == nil || len(*table) >= maxShared {
		*table = make(map[string]V)
	}
	(*table)[key] = value
	return value
}
