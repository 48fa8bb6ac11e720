package usage

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// BenchmarkScrape measures a scrape of a node with 8 GPUs that have 48 MPS shares each,
// without the kubelet's part.
func BenchmarkScrape(b *testing.B) {
	var gpus []gpu.GPU
	var claims []holding.Record
	known := Containers{}
	readings := map[gpu.UUID]Reading{}
	for i := range 8 {
		uuid := gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i))
		gpus = append(gpus, h100(uuid))
		reading := Reading{AttributesMPS: true, Users: map[int]containers.User{}}
		for n := range 48 {
			h := holding.New(gpu.DeviceName(fmt.Sprintf("gpu-%08d-mps48-%d", i, n)), gpu.Share{Of: gpu.Whole{GPU: uuid}, Count: 48, Number: n})
			h.MPS = &holding.MPS{ThreadPercentage: 2, MemoryMiB: 1600}
			uid := fmt.Sprintf("%d-%d", i, n)
			claim := Claim{Namespace: "team", Name: fmt.Sprintf("claim-%d-%d", i, n)}
			claims = append(claims, holding.Record{ClaimUID: uid, Namespace: claim.Namespace, Name: claim.Name, Holdings: []holding.Holding{h}})
			known[claim] = []Container{{Pod: claim.Name, Name: "main"}}
			pid := 1000*(i+1) + n
			reading.Processes = append(reading.Processes, gpu.Process{PID: pid, MemoryBytes: new(int64(1 << 30)), Utilization: new(0.01), MPSClient: true})
			reading.Users[pid] = containers.User{PodUID: uid, Container: "main", Claims: []string{uid}}
		}
		readings[uuid] = reading
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&fixed{Collector: New(Config{NodeName: "node-0"}), at: state{claims: claims, gpus: gpus, containers: known, readings: readings}})
	for b.Loop() {
		families, err := registry.Gather()
		if err != nil {
			b.Fatal(err)
		}
		var text bytes.Buffer
		for _, f := range families {
			if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
				b.Fatal(err)
			}
		}
	}
}
