package claims

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// metrics count claims. Events update them: a scrape reads no claims.
type metrics struct {
	allocated, waiting *prometheus.GaugeVec
}

// Counter returns a handler that counts the claims of an index's informer.
func Counter(registerer prometheus.Registerer) cache.ResourceEventHandler {
	m := newMetrics(registerer)
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(now any) { m.countClaim(now, 1) },
		UpdateFunc: func(before, now any) { m.countClaim(before, -1); m.countClaim(now, 1) },
		DeleteFunc: func(before any) {
			if gone, ok := before.(cache.DeletedFinalStateUnknown); ok {
				before = gone.Obj
			}
			m.countClaim(before, -1)
		},
	}
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	f := promauto.With(registerer)
	m := &metrics{
		allocated: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tessera_devices_allocated",
			Help: "Devices that claims have, by type; one that several claims have counts once for each. Devices with admin access don't count.",
		}, []string{"type"}),
		waiting: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tessera_claims_waiting",
			Help: "ResourceClaims without an allocation, by the type of the first of Tessera's DeviceClasses that they name.",
		}, []string{"type"}),
	}
	for _, t := range []string{gpu.TypeGPU, gpu.TypeMIG, gpu.TypeMPS, gpu.TypeTimeSlice} {
		m.allocated.WithLabelValues(t)
		m.waiting.WithLabelValues(t)
	}
	return m
}

func (m *metrics) countClaim(obj any, n float64) {
	for _, r := range Results(obj) {
		m.allocated.WithLabelValues(gpu.DeviceName(r.Device).Type()).Add(n)
	}
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok {
		return
	}
	if _, kind := waitsFor(claim); kind != "" {
		m.waiting.WithLabelValues(kind).Add(n)
	}
}

// waitsFor returns the first of the chart's DeviceClasses that a claim names, and the type of
// its devices; empty if it names none, or has an allocation.
func waitsFor(claim *resourceapi.ResourceClaim) (class, kind string) {
	if claim.Status.Allocation != nil {
		return "", ""
	}
	for _, r := range claim.Spec.Devices.Requests {
		var names []string
		if r.Exactly != nil {
			names = append(names, r.Exactly.DeviceClassName)
		}
		for _, sub := range r.FirstAvailable {
			names = append(names, sub.DeviceClassName)
		}
		for _, name := range names {
			if kind := typeOfClass(name); kind != "" {
				return name, kind
			}
		}
	}
	return "", ""
}

// typeOfClass returns the type of the devices of one of the chart's DeviceClasses; empty for
// another class.
func typeOfClass(name string) string {
	return map[string]string{
		gpu.ClassGPU: gpu.TypeGPU, gpu.ClassMIG: gpu.TypeMIG, gpu.ClassMPS: gpu.TypeMPS, gpu.ClassTimeSlice: gpu.TypeTimeSlice,
	}[name]
}
