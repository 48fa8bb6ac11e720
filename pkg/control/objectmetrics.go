package control

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// scrapeTimeout bounds how long a scrape waits for the caches to be filled.
const scrapeTimeout = time.Second

// objectMetrics reads policies and pools from the caches at each scrape. It implements
// prometheus.Collector.
type objectMetrics struct {
	cache                     client.Reader
	slices                    cachedSlices
	planner                   *plan.Planner
	applied, known, published *prometheus.Desc
}

type cachedSlices interface {
	Cached(node string) (publish.Found, error)
}

func newObjectMetrics(cache client.Reader, slices cachedSlices, p *plan.Planner) *objectMetrics {
	return &objectMetrics{
		cache: cache, slices: slices, planner: p,
		applied: prometheus.NewDesc("tessera_policy_applied",
			"Whether the SharingPolicy's condition Applied is true, with its reason.", []string{"policy", "reason"}, nil),
		known: prometheus.NewDesc("tessera_node_known",
			"1 for each node with a GPUInventory.", []string{"node"}, nil),
		published: prometheus.NewDesc("tessera_pool_published",
			"Whether a node that should have a pool of ResourceSlices has a complete one.", []string{"node"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (m *objectMetrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.applied
	to <- m.known
	to <- m.published
}

// Collect implements prometheus.Collector.
func (m *objectMetrics) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	var policies v1alpha1.SharingPolicyList
	if err := m.cache.List(ctx, &policies, client.UnsafeDisableDeepCopy); err != nil {
		klog.FromContext(ctx).Error(err, "Can't serve metrics of SharingPolicies")
	}
	for i := range policies.Items {
		p := &policies.Items[i]
		if c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionApplied); c != nil {
			to <- gauge(m.applied, c.Status == metav1.ConditionTrue, p.Name, c.Reason)
		}
	}
	var inventories v1alpha1.GPUInventoryList
	if err := m.cache.List(ctx, &inventories, client.UnsafeDisableDeepCopy); err != nil {
		klog.FromContext(ctx).Error(err, "Can't serve metrics of pools")
	}
	for i := range inventories.Items {
		inv := &inventories.Items[i]
		to <- gauge(m.known, true, inv.Name)
		found, err := m.slices.Cached(inv.Name)
		if err == nil && m.wantsPool(inv) {
			to <- gauge(m.published, publish.Complete(found.Ours), inv.Name)
		}
	}
}

// wantsPool reports whether a node should have a pool. As long as nothing could be decided
// about a node with GPUs, it should, and while the node's driver fails, which hides its GPUs.
func (m *objectMetrics) wantsPool(inv *v1alpha1.GPUInventory) bool {
	if kinds.DriverFails(inv) {
		return publishable(inv)
	}
	if last, decided := m.planner.Last(inv.Name); decided && last.Pool == "" {
		return false
	}
	return publishable(inv) && len(inv.Status.GPUs) > 0
}

// gauge is 1 for true and 0 for false.
func gauge(d *prometheus.Desc, is bool, labels ...string) prometheus.Metric {
	value := 0.0
	if is {
		value = 1
	}
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}
