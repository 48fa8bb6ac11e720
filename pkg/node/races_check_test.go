package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// checkHas checks that no other claim has the claim's devices.
func (w *world) checkHas(s *modelClaim) {
	w.mu.Lock()
	others := slices.DeleteFunc(slices.Clone(w.claims), func(o *modelClaim) bool {
		return o == s || o.claim == nil || !o.has && !w.pods.isRunning(o.name)
	})
	has, memory := s.has, s.takesMemory()
	w.mu.Unlock()
	if !has {
		return
	}
	for _, o := range others {
		memory += o.takesMemory()
		if s.conflicts(o) {
			w.broken("two claims have the same", "%s (%s) and %s (%s)", s.name, s.shape.name, o.name, o.shape.name)
		}
	}
	there, err := gpu.ShareableMiB(w.gpus[0], gpu.Whole{GPU: w.gpus[0].UUID})
	if err != nil || s.takesMemory() > 0 && memory > there {
		w.broken("shares have more memory than there is", "%d of %d MiB, %v", memory, there, err)
	}
}

func (w *world) spec(uid string) string {
	return filepath.Join(w.c.cdi(), "k8s.gpu.nvidia.com-claim_"+uid+".json")
}

// watch checks all the time that prepared claims are complete.
func (w *world) watch() {
	for {
		select {
		case <-time.After(250 * time.Millisecond):
		case <-w.over:
			return
		}
		for _, s := range w.claims {
			w.mu.Lock()
			has, before := s.has, s.unprepares
			w.mu.Unlock()
			if !has {
				continue
			}
			err := w.missingPart(s)
			w.mu.Lock()
			still := s.has && s.unprepares == before
			w.mu.Unlock()
			if err != nil && still {
				w.broken("a prepared claim lacks something", "%s (%s): %v", s.name, s.shape.name, err)
			}
		}
	}
}

// missingPart returns an error that names a missing part of a prepared claim.
func (w *world) missingPart(s *modelClaim) error {
	for _, path := range []string{w.spec(s.name), w.pods.path(s.name), filepath.Join(datadir.JournalOf(w.c.data()), s.name+".json")} {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	for _, d := range s.held {
		g := w.c.machine.State().GPUs[w.c.position(d.Parent())]
		part, ok := gpu.Base(d).(gpu.Partition)
		there := slices.ContainsFunc(g.Instances, func(i nvmlsim.GPUInstance) bool {
			return int(i.Start) == part.Placement.Start && int(i.Size) == part.Placement.Size && len(i.Compute) == 1
		})
		if g.MIGCurrent != ok || ok && !there {
			return fmt.Errorf("%v: MIG mode is %t, and the instances are %+v", d, g.MIGCurrent, g.Instances)
		}
	}
	return nil
}

// checkClaims compares the prepared claims with the journal.
func (w *world) checkClaims() {
	is, err := journal.Read(datadir.JournalOf(w.c.data()))
	if err != nil {
		w.broken("the journal can't be read", "%v", err)
		return
	}
	recorded := map[string]bool{}
	for _, r := range is.Claims {
		recorded[r.ClaimUID] = true
	}
	for _, s := range w.claims {
		_, specErr := os.Stat(w.spec(s.name))
		switch want := s.state == prepared; {
		case recorded[s.name] != want && want:
			w.broken("a prepared claim has no record", "%s (%s)", s.name, s.shape.name)
		case recorded[s.name] != want:
			w.broken("an unprepared claim has a record", "%s (%s)", s.name, s.shape.name)
		case (specErr == nil) != want:
			w.broken("a CDI spec is there, or isn't", "%s (%s) is %s: %v", s.name, s.shape.name, s.state, specErr)
		}
	}
}

// examine asks the doctor.
func (w *world) examine(strict bool) {
	ctx := context.Background()
	n := w.c.toExamine()
	r, err := doctor.Examine(ctx, doctor.Options{Strict: strict, Looks: 4, Pause: 7 * time.Second}, n, func(n *doctor.Node) (err error) {
		n.Hardware, err = doctor.ReadHardware(ctx, w.c.hw.Session, w.c.smi)
		listed, away := w.sup.List(ctx)
		n.Sharing = sharingIn(w.c.host, w.sup.dir, listed, away)
		return err
	})
	if err != nil {
		w.broken("the node can't be examined", "%v", err)
		return
	}
	for _, f := range r.Findings {
		if f.Level == doctor.Trouble || strict {
			w.broken("the doctor finds "+f.Check, "%+v", f)
		}
	}
}

// tearDown unprepares all claims and checks that nothing is left.
func (w *world) tearDown() {
	w.note("the end")
	w.update(func() { w.to = policyOf(0) })
	w.process().setPolicy(w.policyNow())
	var wg sync.WaitGroup
	for i := range w.claims {
		wg.Go(func() {
			if err := w.unprepare(op{Kind: opUnprepare, Claim: i, With: i}); err != nil {
				w.broken("a retried call fails without a reason", "unprepare %s: %v", w.claims[i].name, err)
			}
			w.claims[i].state = gone
		})
	}
	if !w.await("the last unprepare", wg.Wait) {
		return
	}
	time.Sleep(3 * time.Minute)
	w.checkClaims()
	w.examine(true)
	w.checkLeft()
}

// checkLeft looks for leftovers that the doctor doesn't look for.
func (w *world) checkLeft() {
	var left []string
	for _, dir := range []string{w.c.cdi(), w.pods.dir, datadir.JournalOf(w.c.data()), filepath.Join(datadir.JournalOf(w.c.data()), "gpus"), filepath.Join(datadir.JournalOf(w.c.data()), "settings")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			w.broken("a directory can't be read", "%v", err)
		}
		for _, e := range entries {
			if !e.IsDir() && !strings.HasSuffix(e.Name(), "-driver.json") {
				left = append(left, filepath.Join(dir, e.Name()))
			}
		}
	}
	for i, g := range w.c.machine.State().GPUs {
		if g.MIGCurrent || len(g.Instances)+len(g.Processes) > 0 || g.ComputeMode+g.TimeSlice != 0 {
			left = append(left, fmt.Sprintf("GPU %d: %+v", i, g))
		}
	}
	if r := w.sup.report(); len(r.Daemons) > 0 {
		left = append(left, fmt.Sprintf("MPS daemons %+v", r.Daemons))
	}
	if left != nil {
		w.broken("something is left", "%s", strings.Join(left, "; "))
	}
}
