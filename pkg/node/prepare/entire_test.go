package prepare_test

import (
	"fmt"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/prepare/preparetest"
)

// TestAShareOfAllIsTheWhole checks that a claim with all memory and all
// multiprocessors of a GPU gets it without MPS, and a claim with less doesn't.
func TestAShareOfAllIsTheWhole(t *testing.T) {
	f := newFixture(t, 1)
	_, facts, err := f.node.Device(preparetest.Device(0))
	if err != nil {
		t.Fatal(err)
	}
	all, err := gpu.ShareableMiB(facts, gpu.Whole{GPU: facts.UUID})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		memory  int64
		threads string
		whole   bool
	}{
		"all":                     {all, "100", true},
		"a little less memory":    {all - 1, "100", false},
		"not all multiprocessors": {all, "99", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClaim("c", asked("s", gpu0, "1", fmt.Sprintf("%dMi", tc.memory), tc.threads))
			devices := mustPrepare(t, f, c)
			if len(devices) != 1 || devices[0].DeviceName != gpu0+"-mps" || devices[0].ShareID == nil {
				t.Errorf("the kubelet is told of %+v", devices)
			}
			grant := f.journal.All()[0].Holdings[0]
			if _, whole := grant.Of().(gpu.Whole); whole != tc.whole || (grant.MPS == nil) != tc.whole {
				t.Errorf("got %+v", grant)
			}
			mustPrepare(t, f, c) // the kubelet's next try
			checkHeld(t, f, "c")
			mustUnprepare(t, f, c)
			checkHeld(t, f)
		})
	}
}
