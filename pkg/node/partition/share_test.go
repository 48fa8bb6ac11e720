package partition_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// holdShare is hold for the n-th share of a partition; release is for it.
func (n *node) holdShare(t testing.TB, p gpu.Partition, number int) {
	t.Helper()
	g := holding.New("d", gpu.Share{Of: p, Count: 4, Number: number})
	if err := n.journal.Put(holding.Record{ClaimUID: shareUID(number), Namespace: "default", Name: shareUID(number), BootID: "boot-1", Holdings: []holding.Holding{g}}); err != nil {
		t.Fatal(err)
	}
	n.journal.ResetPhase(shareUID(number))
}

func shareUID(number int) string { return fmt.Sprintf("share-%d", number) }

func (n *node) releaseShare(t testing.TB, p gpu.Partition, number int) {
	t.Helper()
	n.journal.AdvancePhase(shareUID(number), holding.Leaving)
	n.journal.AdvancePhase(shareUID(number), holding.Left)
	if err := n.Manager.Release(t.Context(), p); err != nil {
		t.Error(err)
	}
	if err := n.journal.Delete(shareUID(number)); err != nil {
		t.Error(err)
	}
}

// TestSharersOfAPartition: it stays, and isn't idle, until the last has gone;
// then it is kept warm, or isn't.
func TestSharersOfAPartition(t *testing.T) {
	for name, keep := range map[string]time.Duration{"cold": 0, "warm": time.Hour} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: keep})
			p, large := part(gpu0, "1g.18gb", 0), part(gpu0, "3g.71gb", 0)
			for number := range 3 {
				n.holdShare(t, p, number)
				if _, err := n.Ensure(t.Context(), p); err != nil {
					t.Fatal(err)
				}
			}
			n.releaseShare(t, p, 1)
			n.releaseShare(t, p, 0)
			n.checkThere(t, gpu0, true, p)
			if _, err := n.Ensure(t.Context(), large); err == nil {
				t.Error("made room where a claim has a share")
			}
			wantError(t, n.ClearMIG(t.Context(), gpu0), "share-2 (UID share-2) holds")
			if err := n.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			n = n.restart(t, "boot-1")
			n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: keep})
			n.checkThere(t, gpu0, true, p)
			n.releaseShare(t, p, 2)
			if keep > 0 {
				n.checkThere(t, gpu0, true, p)
			}
			if err := n.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, false)
		})
	}
}

// TestReleaseOfWhatStaysInUse: a claim that comes while another gives the same
// partition up keeps it, or has it made again.
func TestReleaseOfWhatStaysInUse(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	for round := range 50 {
		n.holdShare(t, p, 0)
		if _, err := n.Ensure(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { n.releaseShare(t, p, 0) })
		wg.Go(func() {
			n.holdShare(t, p, 1)
			if _, err := n.Ensure(t.Context(), p); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		})
		wg.Wait()
		n.checkThere(t, gpu0, true, p)
		n.releaseShare(t, p, 1)
	}
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, false)
}
