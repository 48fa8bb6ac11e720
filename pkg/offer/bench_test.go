package offer_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

func BenchmarkBuild(b *testing.B) {
	n, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		b.Fatal(err)
	}
	o := partitioned(nil)
	b.ReportAllocs()
	for b.Loop() {
		build(n, o)
	}
}
