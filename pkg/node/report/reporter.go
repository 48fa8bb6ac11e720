package report

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Reasons of the condition Ready.
const (
	// ReasonRegistered: all is well.
	ReasonRegistered = "Registered"
	// ReasonNotRegistered: the kubelet hasn't registered the plugin yet.
	ReasonNotRegistered = "NotRegistered"
	// ReasonDriverNotFound: the host has no NVIDIA driver (yet).
	ReasonDriverNotFound = "DriverNotFound"
	// ReasonNVMLError: the driver is there and doesn't work.
	ReasonNVMLError = "NVMLError"
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
	// KeepWarm, which may be nil, is called with how long SharingPolicies want
	// idle partitions of single GPUs to stay, whenever the inventory is seen. It
	// must not block.
	KeepWarm func(map[gpu.UUID]time.Duration)
	// TimeSlices, which may be nil, is called likewise with the interval of turns
	// that SharingPolicies want for replicas of single GPUs.
	TimeSlices func(map[gpu.UUID]string)
	// Recalled, which may be nil, is called when Remembered returns more GPUs than
	// before, because the previous plugin's report has been read. It must not block.
	Recalled func()
}

// Reporter holds what is known of the node and keeps its GPUInventory so. Its
// methods may be called concurrently; none but Run and the Wait ones block.
type Reporter struct {
	cfg         Config
	inventories rest.Interface
	nodes       rest.Interface

	mu           sync.Mutex
	changed      chan struct{} // closed, and replaced, at each change below
	known        bool          // node, or why there is none, has been told
	node         gpu.Node
	names        *gpu.Names
	trouble      trouble // empty: the driver works
	memory       memory
	challenger   string // which other DRA driver has taken the plugin's name; empty: none
	registeredAt *metav1.MicroTime
	self         *corev1.Node           // nil: not seen
	inventory    *v1alpha1.GPUInventory // nil: none there; the newest seen
	deleted      types.UID              // of the inventory last seen deleted
	synced       bool                   // inventory and self have been looked for
	reported     bool                   // the object has been equal to the facts
}

// trouble is why the node has no GPUs to offer.
type trouble struct{ reason, message string }

// New returns a Reporter that knows nothing yet.
func New(cfg Config) (*Reporter, error) {
	inventories, err := inventoryClient(cfg.REST)
	if err != nil {
		return nil, err
	}
	nodes, err := nodeClient(cfg.REST)
	if err != nil {
		return nil, err
	}
	if cfg.KeepWarm == nil {
		cfg.KeepWarm = func(map[gpu.UUID]time.Duration) {}
	}
	if cfg.TimeSlices == nil {
		cfg.TimeSlices = func(map[gpu.UUID]string) {}
	}
	if cfg.Recalled == nil {
		cfg.Recalled = func() {}
	}
	return &Reporter{cfg: cfg, inventories: inventories, nodes: nodes, changed: make(chan struct{})}, nil
}

// Found tells the facts. Two GPUs that can't be told apart by name are an
// error, and then nothing changes.
func (r *Reporter) Found(node gpu.Node) error {
	names, err := gpu.NewNames(node.GPUs)
	if err != nil {
		return fmt.Errorf("name the GPUs of node %s: %w", node.Name, err)
	}
	r.change(func() {
		r.known, r.node, r.names, r.trouble = true, node, names, trouble{}
		r.memory.found(node.GPUs)
	})
	return nil
}

// Missing tells that there are no GPUs to offer, and why.
func (r *Reporter) Missing(reason, message string) {
	r.change(func() {
		r.known, r.node, r.names = true, gpu.Node{Name: r.cfg.NodeName}, nil
		r.trouble = trouble{reason: reason, message: message}
	})
}

// Registered tells that the kubelet has registered the plugin just now. It may
// do so again and again.
func (r *Reporter) Registered() {
	// As precise as the API is, or what is read back would never be equal.
	now := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	r.change(func() { r.registeredAt = &now })
}

// Device returns what a device's name stands for and the GPU it is or is part
// of, as last read. It fails while there is no driver, while another driver
// serves the GPUs, when the node has no such device, and when the GPU doesn't
// answer.
func (r *Reporter) Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names == nil {
		return nil, gpu.GPU{}, errors.New(r.absence())
	}
	if c := r.conflict(); c != "" {
		return nil, gpu.GPU{}, errors.New(c)
	}
	device, err := r.names.Device(name)
	if err != nil {
		return nil, gpu.GPU{}, err
	}
	for _, g := range r.node.GPUs {
		if g.UUID == device.Parent() {
			return device, g, dead(g)
		}
	}
	return nil, gpu.GPU{}, fmt.Errorf("this node has no GPU %s now", device.Parent())
}

// dead says that the GPU doesn't answer. What else may be wrong with a GPU is
// judged by those who know more of it.
func dead(g gpu.GPU) error {
	for _, c := range g.Conditions {
		if c.Type == gpu.Lost || c.Type == gpu.Unreadable || c.Type == gpu.NotResponding {
			return fmt.Errorf("GPU %s is %s: %s", g.UUID, c.Type, c.Message)
		}
	}
	return nil
}

// Trouble returns nil while there are GPUs to serve, or could be.
func (r *Reporter) Trouble() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names == nil {
		return errors.New(r.absence())
	}
	return nil
}

// NoDriver says whether the host has no driver, as far as is known.
func (r *Reporter) NoDriver() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.trouble.reason == ReasonDriverNotFound
}

// absence says why there are no devices.
func (r *Reporter) absence() string {
	if r.trouble.message != "" {
		return r.trouble.message
	}
	return "the GPUs of this node have not been read yet"
}

// WaitReported returns nil once the object in the cluster has told the facts
// at least once.
func (r *Reporter) WaitReported(ctx context.Context) error {
	return r.wait(ctx, func() bool { return r.reported })
}

// WaitUnchallenged returns nil once the node has been seen to be served by no
// other driver.
func (r *Reporter) WaitUnchallenged(ctx context.Context) error {
	return r.wait(ctx, func() bool { return r.self != nil && r.conflict() == "" })
}

// Conflict says which other driver serves the GPUs, and what to do; empty when
// none is known to.
func (r *Reporter) Conflict() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.conflict()
}

// Challenged says which other DRA driver has taken the plugin's name at the
// kubelet, and what to do; empty when none has.
func (r *Reporter) Challenged(by string) {
	r.mu.Lock()
	same := r.challenger == by
	r.mu.Unlock()
	if !same {
		r.change(func() { r.challenger = by })
	}
}

// conflict needs the lock.
func (r *Reporter) conflict() string { return cmp.Or(conflict(r.self), r.challenger) }

func (r *Reporter) wait(ctx context.Context, holds func() bool) error {
	for {
		r.mu.Lock()
		ok, changed := holds(), r.changed
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// change applies f and wakes everybody who waits.
func (r *Reporter) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

// saw remembers an inventory unless a newer one is known.
func (r *Reporter) saw(inv *v1alpha1.GPUInventory) {
	r.change(func() {
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
		if r.memory.recall(inv, r.cfg.BootID) {
			r.cfg.Recalled()
		}
		r.cfg.KeepWarm(keepWarm(inv))
		r.cfg.TimeSlices(timeSlices(inv))
	})
}

// sawDeleted remembers that an inventory is gone for good.
func (r *Reporter) sawDeleted(uid types.UID) {
	r.change(func() {
		r.deleted = uid
		if r.inventory != nil && r.inventory.UID == uid {
			r.inventory = nil
		}
	})
}

func keepWarm(inv *v1alpha1.GPUInventory) map[gpu.UUID]time.Duration {
	keep := map[gpu.UUID]time.Duration{}
	for _, g := range inv.Spec.GPUs {
		if g.KeepWarm != nil && g.KeepWarm.Duration > 0 {
			keep[gpu.UUID(g.UUID)] = g.KeepWarm.Duration
		}
	}
	return keep
}

func timeSlices(inv *v1alpha1.GPUInventory) map[gpu.UUID]string {
	intervals := map[gpu.UUID]string{}
	for _, g := range inv.Spec.GPUs {
		if g.TimeSlice != "" {
			intervals[gpu.UUID(g.UUID)] = string(g.TimeSlice)
		}
	}
	return intervals
}

// resourceNVIDIA is what NVIDIA's device plugin offers GPUs as.
const resourceNVIDIA = corev1.ResourceName("nvidia.com/gpu")

// conflict says that a device plugin serves the node's GPUs. Extended
// resources that DRA drivers stand behind are not in a node's allocatable.
func conflict(node *corev1.Node) string {
	if node == nil {
		return ""
	}
	n := node.Status.Allocatable[resourceNVIDIA]
	if n.Sign() <= 0 {
		return ""
	}
	return fmt.Sprintf("a device plugin offers %s %s on node %s: two drivers would give the same GPU to two pods; "+
		"remove the NVIDIA device plugin from this node (GPU Operator: devicePlugin.enabled=false), or keep Tessera's plugin off it",
		n.String(), resourceNVIDIA, node.Name)
}

// How long the Reporter waits after a failure, first and at most.
const (
	retryFirst = 500 * time.Millisecond
	retryLast  = 30 * time.Second
)
