//go:build integration

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestGPUHangs has calls for one of eight GPUs never return: the other seven are
// prepared, unprepared and reported as healthy, also by plugins that start
// meanwhile, and the one when its calls return.
func TestGPUHangs(t *testing.T) {
	t.Parallel()
	n := newNode(t, "8xh100-80gb")
	p := n.serve(t)
	stuck, stays := n.newClaim(t, n.part(0, "2g20gb-2")), n.newClaim(t, n.part(1, "2g20gb-2"))
	p.mustPrepare(t, stuck)
	p.mustPrepare(t, stays)
	if err := n.hardware.Fault(nvmlsim.Fault{Call: "*", GPU: 0, Hang: true}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	n.awaitConditions(t, gpu.NotResponding)
	t.Logf("reported %s after the hang began", time.Since(began).Round(100*time.Millisecond))
	n.sevenWork(t, p)
	n.cannotUnprepare(t, p, stuck)

	p.kill()
	p = n.serve(t)
	n.sevenWork(t, p)
	n.cannotUnprepare(t, p, stuck)
	n.awaitConditions(t, gpu.NotResponding)

	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil { // an upgrade
		t.Fatal(err)
	}
	next := n.start(t, "") // waits for the other's lock
	<-p.done
	n.register(t, next)
	n.sevenWork(t, next)

	if err := n.hardware.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	n.awaitConditions(t)
	late := n.newClaim(t, n.part(0, "1g10gb-0"))
	next.mustPrepare(t, late)
	for _, c := range []*resourceapi.ResourceClaim{stuck, stays, late} {
		next.mustUnprepare(t, c)
	}
	n.checkEmpty(t)
}

// sevenWork prepares and unprepares something on all GPUs but the first.
func (n *node) sevenWork(t *testing.T, p *plugin) {
	t.Helper()
	claims := make([]*resourceapi.ResourceClaim, 7)
	for i := range claims {
		device := n.part(i+1, "1g10gb-0")
		if i%2 == 1 {
			device = n.whole(i + 1)
		}
		claims[i] = n.newClaim(t, device)
	}
	var wg sync.WaitGroup
	for i, c := range claims {
		wg.Go(func() {
			if _, err := p.prepare(t, c); err != nil {
				t.Errorf("prepare on GPU %d: %v", i+1, err)
			}
			if err := p.unprepare(t, c); err != nil {
				t.Errorf("unprepare on GPU %d: %v", i+1, err)
			}
		})
	}
	wg.Wait()
}

// cannotUnprepare wants an unprepare to fail because its GPU doesn't respond.
func (n *node) cannotUnprepare(t *testing.T, p *plugin, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := p.unprepare(t, c); err == nil || !strings.Contains(err.Error(), "does not respond") || !strings.Contains(err.Error(), n.host.Machine.GPUs[0].UUID) {
		t.Errorf("unprepare on the GPU that hangs: %v, want an error that names it", err)
	}
}

// awaitConditions waits until the node reports its eight GPUs, the first with these
// conditions and the others with none.
func (n *node) awaitConditions(t *testing.T, want ...gpu.ConditionType) {
	t.Helper()
	var last string
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, 2*patience, true, func(ctx context.Context) (bool, error) {
		inv := &v1alpha1.GPUInventory{}
		if err := shared.objects.Get(ctx, types.NamespacedName{Name: n.name}, inv); err != nil {
			return false, err
		}
		all := make([][]gpu.ConditionType, len(inv.Status.GPUs))
		for i, g := range inv.Status.GPUs {
			for _, c := range g.Conditions {
				all[i] = append(all[i], gpu.ConditionType(c.Type))
			}
		}
		last = fmt.Sprint(all)
		others := func(some []gpu.ConditionType) bool { return len(some) > 0 }
		return len(all) == 8 && slices.Equal(all[0], want) && !slices.ContainsFunc(all[1:], others), nil
	})
	if err != nil {
		t.Fatalf("conditions of the GPUs are %s, want %v on the first: %v", last, want, err)
	}
}
