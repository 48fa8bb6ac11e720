package nvml_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// BenchmarkInstance measures the cost of the port itself, through the library,
// on hardware without latency: create and destroy one instance, and read all
// GPUs, on a machine that is otherwise full.
func BenchmarkInstance(b *testing.B) {
	built := b.TempDir()
	build(b, built)
	s, err := nvml.Open(install(b, built, "gpus: [{model: h100-80gb, count: 8, migEnabled: true}]"))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	gpus, err := s.GPUs()
	if err != nil {
		b.Fatal(err)
	}
	var last gpu.Partition
	for _, g := range gpus {
		for _, at := range g.MIG.Profiles[0].Placements {
			last = gpu.Partition{GPU: g.UUID, Profile: g.MIG.Profiles[0].Name, Placement: at}
			if _, err := s.CreateInstance(last); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("destroy and create", func(b *testing.B) {
		for b.Loop() {
			m, err := s.MIG(last.GPU)
			if err != nil {
				b.Fatal(err)
			}
			if err := s.DestroyInstance(last.GPU, m.Instances[len(m.Instances)-1]); err != nil {
				b.Fatal(err)
			}
			if _, err := s.CreateInstance(last); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.GPUs(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
