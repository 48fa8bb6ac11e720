package journal_test

import (
	"fmt"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// claimsPerGPU is how many claims a GPU can have in MIG partitions.
const claimsPerGPU = 7

// BenchmarkHolders looks, as each prepare does, for the claims that hold a GPU which is free,
// beside claims on other GPUs.
func BenchmarkHolders(b *testing.B) {
	beside(b, func(b *testing.B, j *journal.Journal, claims int) {
		for b.Loop() {
			if all := j.ClaimsOn(gpu0).Holders(gpu.Whole{GPU: gpu0}, "new"); len(all) > 0 {
				b.Fatal(all)
			}
		}
	})
}

// BenchmarkClaims asks for all claims, some of which have changed.
func BenchmarkClaims(b *testing.B) {
	beside(b, func(b *testing.B, j *journal.Journal, claims int) {
		for b.Loop() {
			j.AdvancePhase("claim-0", holding.Left)
			j.ResetPhase("claim-0")
			if len(j.Claims()) != claims {
				b.Fatal(j.Claims())
			}
		}
	})
}

// BenchmarkPut writes a record and removes it, beside claims on other GPUs.
func BenchmarkPut(b *testing.B) {
	beside(b, func(b *testing.B, j *journal.Journal, claims int) {
		for b.Loop() {
			put(b, j, everything("new"))
			if err := j.Delete("new"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// beside runs a benchmark with a journal that has no claims, those of a full node of 16 GPUs, and
// more than any node has.
func beside(b *testing.B, run func(b *testing.B, j *journal.Journal, claims int)) {
	for _, claims := range []int{0, 112, 1000} {
		b.Run(fmt.Sprint(claims), func(b *testing.B) {
			j := open(b, b.TempDir())
			for n := range claims {
				put(b, j, recordOn(n))
			}
			run(b, j, claims)
		})
	}
}

// recordOn returns the record of the n-th of the claims that fill GPUs.
func recordOn(n int) holding.Record {
	uuid := gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", n/claimsPerGPU))
	g := holding.New(gpu.DeviceName(fmt.Sprintf("gpu-%08x-mig-1g-%d", n/claimsPerGPU, n%claimsPerGPU)),
		gpu.Partition{GPU: uuid, Profile: "1g.18gb", Placement: gpu.Placement{Start: n % claimsPerGPU, Size: 1}})
	return holding.Record{
		ClaimUID: fmt.Sprintf("claim-%d", n), Namespace: "default", Name: fmt.Sprint(n), BootID: "boot", Holdings: []holding.Holding{g},
		Pods: []holding.Pod{{UID: fmt.Sprintf("pod-%d", n), Name: fmt.Sprint(n)}},
	}
}
