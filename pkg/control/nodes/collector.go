package nodes

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// scrapeTimeout bounds how long a scrape waits for the caches to be filled.
const scrapeTimeout = time.Second

// collector reads pools from the caches at each scrape. It implements prometheus.Collector.
type collector struct {
	cache            client.Reader
	slices           *publish.Publisher
	planner          *plan.Planner
	known, published *prometheus.Desc
}

// NewCollector returns the metrics of nodes and their pools.
func NewCollector(cache client.Reader, s *publish.Publisher, p *plan.Planner) prometheus.Collector {
	return &collector{
		cache: cache, slices: s, planner: p,
		known: prometheus.NewDesc("tessera_node_known",
			"1 for each node with a GPUInventory.", []string{"node"}, nil),
		published: prometheus.NewDesc("tessera_pool_published",
			"Whether a node that should have a pool of ResourceSlices has a complete one.", []string{"node"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (m *collector) Describe(to chan<- *prometheus.Desc) {
	to <- m.known
	to <- m.published
}

// Collect implements prometheus.Collector.
func (m *collector) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
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
func (m *collector) wantsPool(inv *v1alpha1.GPUInventory) bool {
	if kinds.DriverFails(inv) {
		return plan.Publishable(inv)
	}
	if last, decided := m.planner.Last(inv.Name); decided && last.Pool == "" {
		return false
	}
	return plan.Publishable(inv) && len(inv.Status.GPUs) > 0
}

// gauge is 1 for true and 0 for false.
func gauge(d *prometheus.Desc, is bool, labels ...string) prometheus.Metric {
	value := 0.0
	if is {
		value = 1
	}
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}
