package policies

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// scrapeTimeout bounds how long a scrape waits for the cache to be filled.
const scrapeTimeout = time.Second

// collector reads policies from the cache at each scrape. It implements prometheus.Collector.
type collector struct {
	cache   client.Reader
	applied *prometheus.Desc
}

// NewCollector returns the metrics of policies.
func NewCollector(cache client.Reader) prometheus.Collector {
	return &collector{cache: cache, applied: prometheus.NewDesc("tessera_policy_applied",
		"Whether the SharingPolicy's condition Applied is true, with its reason.", []string{"policy", "reason"}, nil)}
}

// Describe implements prometheus.Collector.
func (m *collector) Describe(to chan<- *prometheus.Desc) { to <- m.applied }

// Collect implements prometheus.Collector.
func (m *collector) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	var policies v1alpha1.SharingPolicyList
	if err := m.cache.List(ctx, &policies, client.UnsafeDisableDeepCopy); err != nil {
		klog.FromContext(ctx).Error(err, "Can't serve metrics of SharingPolicies")
	}
	for i := range policies.Items {
		p := &policies.Items[i]
		c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionApplied)
		if c == nil {
			continue
		}
		value := 0.0
		if c.Status == metav1.ConditionTrue {
			value = 1
		}
		to <- prometheus.MustNewConstMetric(m.applied, prometheus.GaugeValue, value, p.Name, c.Reason)
	}
}
