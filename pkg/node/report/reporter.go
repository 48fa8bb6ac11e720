package report

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/notify"
)

// Reasons of conditions, beside those of pkg/node/facts: of Ready, except where another is named.
const (
	// ReasonRegistered: all is well.
	ReasonRegistered = "Registered"
	// ReasonNotRegistered: the kubelet hasn't registered the plugin yet.
	ReasonNotRegistered = "NotRegistered"
	// ReasonNotIdentified of UnidentifiedGPUs: NVML doesn't say which GPUs they are.
	ReasonNotIdentified = "NotIdentified"
	// ReasonConflicting: another driver serves the GPUs.
	ReasonConflicting = "Conflicting"
)

// Config of a Reporter.
type Config struct {
	// NodeName of the node that is reported.
	NodeName string
	// PluginVersion and BootID go into the report as they are.
	PluginVersion, BootID string
	// REST reaches the API server.
	REST *rest.Config
	// Facts are what is reported. The reporter adds what the Node object says.
	Facts *facts.Facts
}

// Reporter keeps the node's GPUInventory equal to the facts. Its methods may be
// called concurrently; none but Run, WaitReported and ReportDoubleAllocation block.
type Reporter struct {
	cfg         Config
	facts       *facts.Facts
	inventories rest.Interface
	nodes       rest.Interface
	dropped     *dropped // of the last write; used by Run alone

	mu        notify.Mutex           // of all below
	self      *corev1.Node           // nil: not seen
	inventory *v1alpha1.GPUInventory // nil: none there; the newest seen
	deleted   types.UID              // of the inventory last seen deleted
	synced    bool                   // inventory and self have been looked for
	reported  bool                   // the object has been equal to the facts
	// doubleAllocation is a condition that is to be written once; nil: none is.
	doubleAllocation *metav1.Condition
}

// New returns a Reporter that has seen nothing yet.
func New(cfg Config) (*Reporter, error) {
	inventories, err := inventoryClient(cfg.REST)
	if err != nil {
		return nil, err
	}
	core, err := corev1client.NewForConfig(cfg.REST)
	if err != nil {
		return nil, fmt.Errorf("client for the Node: %w", err)
	}
	return &Reporter{cfg: cfg, facts: cfg.Facts, inventories: inventories, nodes: core.RESTClient()}, nil
}

// WaitReported returns nil once the object in the cluster has been equal to the
// facts.
func (r *Reporter) WaitReported(ctx context.Context) error {
	return r.mu.Wait(ctx, func() bool { return r.reported })
}

// Inventory returns the inventory as it was last seen, nil if there is none, and a channel that
// is closed when that may have changed. Nobody may change the inventory.
func (r *Reporter) Inventory() (_ *v1alpha1.GPUInventory, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.inventory, r.mu.Changed()
}

// saw stores an inventory, unless a newer one is known, or this one's deletion.
func (r *Reporter) saw(inv *v1alpha1.GPUInventory) {
	r.mu.Change(func() {
		if inv.UID == r.deleted {
			return // the answer to a write, overtaken by the word of a deletion
		}
		if r.inventory != nil && r.inventory.UID == inv.UID {
			order, err := resourceversion.CompareResourceVersion(inv.ResourceVersion, r.inventory.ResourceVersion)
			if err == nil && order < 0 {
				return
			}
		}
		r.inventory = inv
	})
}

// sawDeleted remembers that an inventory is gone for good.
func (r *Reporter) sawDeleted(inv *v1alpha1.GPUInventory) {
	r.mu.Change(func() {
		r.deleted = inv.UID
		if r.inventory != nil && r.inventory.UID == inv.UID {
			r.inventory = nil
		}
	})
}

// isGPU reports whether NVIDIA's device plugin offers GPUs, or parts of them, under
// this name.
func isGPU(resource corev1.ResourceName) bool {
	name, nvidia := strings.CutPrefix(string(resource), "nvidia.com/")
	name = strings.TrimSuffix(name, ".shared")
	return nvidia && (name == "gpu" || strings.HasPrefix(name, "mig-"))
}

// conflict says that a device plugin serves the node's GPUs. Extended
// resources that DRA drivers stand behind are not in a node's allocatable.
func conflict(node *corev1.Node) string {
	if node == nil {
		return ""
	}
	var offered []string
	for resource, n := range node.Status.Allocatable {
		if n.Sign() > 0 && isGPU(resource) {
			offered = append(offered, fmt.Sprintf("%s %s", n.String(), resource))
		}
	}
	if len(offered) == 0 {
		return ""
	}
	slices.Sort(offered)
	return fmt.Sprintf("a device plugin offers %s on node %s: two drivers would give the same GPU to two pods; "+
		"remove the NVIDIA device plugin from this node (GPU Operator: devicePlugin.enabled=false), or keep Tessera's plugin off it",
		strings.Join(offered, ", "), node.Name)
}

// How long the Reporter waits after a failure, first and at most.
const (
	retryFirst = 500 * time.Millisecond
	retryLast  = 30 * time.Second
)
