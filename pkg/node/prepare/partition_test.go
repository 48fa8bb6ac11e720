package prepare_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// part is one result of an allocation: a partition of the n-th GPU.
func part(request string, n int, profile string, start int) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{
		Request: request, Driver: driver, Pool: pool, Device: string(partitionName(n, profile, start)),
	}
}

func adminPart(request string, n int, profile string, start int) resourceapi.DeviceRequestAllocationResult {
	r := part(request, n, profile, start)
	r.AdminAccess = new(true)
	return r
}

func oneSlice(n, start int) gpu.Partition {
	return gpu.Partition{GPU: uuidOf(n), Profile: "1g.10gb", Placement: gpu.Placement{Start: start, Size: 1}}
}

func TestPartitions(t *testing.T) {
	for name, results := range map[string][]resourceapi.DeviceRequestAllocationResult{
		"one":                      {part("part", 0, "1g.10gb", 6)},
		"several of one GPU":       {part("parts", 0, "1g.10gb", 0), part("parts", 0, "1g.10gb", 1), part("big", 0, "3g.40gb", 4)},
		"across GPUs":              {part("parts", 0, "3g.40gb", 0), part("parts", 1, "3g.40gb", 0)},
		"beside a whole GPU":       {part("part", 0, "7g.80gb", 0), result("gpu", 1)},
		"with a look at its own":   {adminPart("look", 0, "1g.10gb", 2), part("part", 0, "1g.10gb", 2)},
		"with a look at the whole": {adminResult("look", 0), part("part", 0, "1g.10gb", 2)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			c := newClaim("training", results...)
			var want []string
			for _, r := range results {
				want = append(want, r.Request+" "+r.Device)
			}
			for range 2 {
				var got []string
				for _, d := range mustPrepare(t, f, c) {
					got = append(got, d.Requests[0]+" "+d.DeviceName)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				checkHeld(t, f, "training")
			}
			for range 2 {
				mustUnprepare(t, f, c)
				checkHeld(t, f)
			}
		})
	}
}

// TestGivenIsTold checks that a claim's status has the MIG device that the claim was given.
func TestGivenIsTold(t *testing.T) {
	f := newFixture(t, 1)
	runUntilEnd(t, f.statuses.Run)
	mustPrepare(t, f, newClaim("c", part("part", 0, "1g.10gb", 3)))
	mig, err := f.node.sim.MIG(uuidOf(0))
	if err != nil || len(mig.Instances) != 1 {
		t.Fatalf("instances %v, %v", mig.Instances, err)
	}
	want := fmt.Sprintf(`"device":"%s","data":{"uuid":"%s","parentUUID":"%s","profile":"1g.10gb","placement":{"start":3,"size":1}`,
		partitionName(0, "1g.10gb", 3), mig.Instances[0].UUID, uuidOf(0))
	if got := <-f.server.statuses; !strings.Contains(got, want) {
		t.Errorf("status %s, want in it %s", got, want)
	}
	mustUnprepare(t, f, newClaim("c"))
	mustPrepare(t, f, newClaim("whole", result("gpu", 0)))
	mustUnprepare(t, f, newClaim("whole"))
	mustPrepare(t, f, newClaim("last", part("part", 0, "1g.10gb", 4)))
	if got := <-f.server.statuses; !strings.Contains(got, `"name":"last"`) {
		t.Errorf("status %s, want none of a whole GPU", got)
	}
}

// TestDestroyedFromOutside: a partition that another program destroyed is
// created again by the next prepare, the next start, or the next mend.
func TestDestroyedFromOutside(t *testing.T) {
	c := newClaim("c", part("parts", 0, "1g.10gb", 3), part("parts", 0, "1g.10gb", 4))
	for name, mend := range map[string]func(*testing.T, *fixture){
		"prepared again": func(t *testing.T, f *fixture) { mustPrepare(t, f, c) },
		"recovered": func(t *testing.T, f *fixture) {
			if err := f.Recover(testContext(t)); err != nil {
				t.Error(err)
			}
		},
		"mended": func(t *testing.T, f *fixture) { mustMend(t, f) },
		"unprepared and prepared": func(t *testing.T, f *fixture) {
			mustUnprepare(t, f, c)
			mustPrepare(t, f, c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, c)
			f.node.destroy(t, oneSlice(0, 4))
			mend(t, f)
			checkHeld(t, f, "c")
		})
	}
}

// mustMend mends what the hardware lacks.
func mustMend(t *testing.T, f *fixture) {
	t.Helper()
	there := f.node.instances(t)
	if err := f.Mend(testContext(t), func(p gpu.Partition) bool { return !slices.Contains(there, p) }); err != nil {
		t.Error(err)
	}
}

// TestMendLeavesAlone checks that Mend skips complete claims, and those with a
// prepare or an unprepare in progress.
func TestMendLeavesAlone(t *testing.T) {
	f := newFixture(t, 1)
	mustPrepare(t, f, newClaim("whole", result("gpu", 0)))
	mustUnprepare(t, f, newClaim("whole"))
	c := newClaim("c", part("p", 0, "1g.10gb", 0))
	begun, goOn := make(chan struct{}), make(chan struct{})
	f.node.working = func(gpu.Partition) error {
		close(begun)
		<-goOn
		return nil
	}
	prepared := inBackground(testContext(t), f, c)
	<-begun
	mustMend(t, f)
	close(goOn)
	if a := <-prepared; a.err != nil {
		t.Fatal(a.err)
	}
	mustMend(t, f)
	f.node.working = func(gpu.Partition) error { return errors.New("in use by process 4711") }
	if err := f.Unprepare(testContext(t), named(c)); err == nil {
		t.Error("unprepared")
	}
	mustMend(t, f)
	if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 {
		t.Errorf("specs %v, %v: a claim on its way out has one again", specs, err)
	}
	f.node.working = nil
	mustPrepare(t, f, c) // the claim is wanted again after all
	f.node.destroy(t, oneSlice(0, 0))
	mustMend(t, f)
	checkHeld(t, f, "c")
}

func TestNeighboursDoNotWait(t *testing.T) {
	f := newFixture(t, 1)
	big := newClaim("big", part("part", 0, "3g.40gb", 4))
	mustPrepare(t, f, big)
	f.server.set("big", deleted)
	mustPrepare(t, f, newClaim("beside", part("part", 0, "1g.10gb", 3)))
	if n := len(f.server.asked); n != 0 {
		t.Errorf("%d questions about claims whose slices nobody wanted", n)
	}
	onTop := inBackground(testContext(t), f, newClaim("on-top", part("part", 0, "1g.10gb", 4)))
	if uid := <-f.server.asked; uid != "big" {
		t.Errorf("asked about %s", uid)
	}
	mustUnprepare(t, f, big)
	if a := <-onTop; a.err != nil {
		t.Error(a.err)
	}
	checkHeld(t, f, "beside", "on-top")
}

func TestWholeGPUWaitsForAllItsPartitions(t *testing.T) {
	f := newFixture(t, 2)
	var parts []*resourceapi.ResourceClaim
	for n := range 3 {
		c := newClaim(fmt.Sprintf("part-%d", n), part("part", 0, "1g.10gb", n))
		mustPrepare(t, f, c)
		f.server.set(c.Name, deleted)
		parts = append(parts, c)
	}
	mustPrepare(t, f, newClaim("elsewhere", part("part", 1, "1g.10gb", 0)))
	whole := inBackground(testContext(t), f, newClaim("whole", result("gpu", 0)))
	<-f.server.asked
	for _, c := range parts {
		select {
		case a := <-whole:
			t.Fatalf("the whole GPU didn't wait for %s: %v", c.Name, a.err)
		default:
		}
		mustUnprepare(t, f, c)
	}
	if a := <-whole; a.err != nil {
		t.Error(a.err)
	}
	checkHeld(t, f, "elsewhere", "whole")
}

// TestClaimsOfOneGPUWorkAtOnce: while the hardware works for one claim, another
// may be given its part of the same GPU, or of others, as far as prepare goes.
func TestClaimsOfOneGPUWorkAtOnce(t *testing.T) {
	recorded := make(chan string, 10)
	f := start(t, newNode(t, 2), "boot-1", func(step string) {
		if step == "prepare.recorded" {
			recorded <- step
		}
	})
	working, goOn := make(chan gpu.Partition, 10), make(chan struct{})
	f.node.working = func(p gpu.Partition) error {
		working <- p
		<-goOn
		return nil
	}
	first := inBackground(testContext(t), f, newClaim("first", part("part", 0, "1g.10gb", 0), part("part", 1, "1g.10gb", 0)))
	begun := []gpu.Partition{<-working, <-working}
	sortPartitions(begun)
	<-recorded
	second := inBackground(testContext(t), f, newClaim("second", part("part", 0, "1g.10gb", 1)))
	<-recorded
	if diff := cmp.Diff([]gpu.Partition{oneSlice(0, 0), oneSlice(1, 0)}, begun); diff != "" {
		t.Errorf("-want +begun:\n%s", diff)
	}
	close(goOn)
	for _, a := range []answer{<-first, <-second} {
		if a.err != nil {
			t.Error(a.err)
		}
	}
	checkHeld(t, f, "first", "second")
}

func TestOneGPUInOrder(t *testing.T) {
	f := newFixture(t, 1)
	var mu sync.Mutex
	var order []int
	f.node.working = func(p gpu.Partition) error {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, p.Placement.Start)
		return nil
	}
	mustPrepare(t, f, newClaim("c", part("p", 0, "1g.10gb", 6), part("p", 0, "1g.10gb", 4), part("p", 0, "1g.10gb", 5)))
	if want := []int{6, 4, 5}; !slices.Equal(order, want) {
		t.Errorf("made in order %v, want %v", order, want)
	}
}

// TestUndoFails: the record stays for the kubelet's next call, and only that one
// goes on with it.
func TestUndoFails(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", part("p", 0, "1g.10gb", 0), part("p", 0, "1g.10gb", 1))
	calls := 0
	f.node.working = func(gpu.Partition) error {
		if calls++; calls > 1 {
			return errors.New("the hardware is stuck")
		}
		return nil
	}
	if _, err := f.Prepare(testContext(t), c); err == nil {
		t.Error("prepared")
	}
	f.node.working = nil
	mustMend(t, f)
	if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 || len(f.journal.Claims()) != 1 {
		t.Errorf("specs %v, %v, and %d records", specs, err, len(f.journal.Claims()))
	}
	mustPrepare(t, f, c)
	checkHeld(t, f, "c")
}

// TestFailedFirstPrepareIsUndone, wherever it fails.
func TestFailedFirstPrepareIsUndone(t *testing.T) {
	c := newClaim("c", part("p", 0, "1g.10gb", 0), part("p", 0, "1g.10gb", 1), part("p", 1, "1g.10gb", 0))
	for name, fail := range map[string]func(*testing.T, *fixture){
		"in the hardware": func(_ *testing.T, f *fixture) {
			f.node.working = func(p gpu.Partition) error {
				if p == oneSlice(0, 1) {
					return errors.New("INSUFFICIENT_RESOURCES")
				}
				return nil
			}
		},
		"in the spec": func(t *testing.T, f *fixture) {
			hideDeviceNode(t, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			fail(t, f)
			if _, err := f.Prepare(testContext(t), c); err == nil {
				t.Error("prepared")
			}
			checkHeld(t, f)
		})
	}
	t.Run("but not what was there before", func(t *testing.T) {
		f := newFixture(t, 2)
		mustPrepare(t, f, c)
		f.node.destroy(t, oneSlice(0, 1))
		f.node.working = func(gpu.Partition) error { return errors.New("GPU is lost") }
		if _, err := f.Prepare(testContext(t), c); err == nil || !strings.Contains(err.Error(), `"`+string(partitionName(0, "1g.10gb", 1))+`" for request "p"`) {
			t.Errorf("got %v, want an error that names the device and the request", err)
		}
		f.node.working = nil
		if got := len(f.journal.Claims()); got != 1 || len(f.node.instances(t)) != 2 {
			t.Errorf("%d records, partitions %v", got, f.node.instances(t))
		}
		mustPrepare(t, f, c)
		checkHeld(t, f, "c")
	})
}

// TestDestroyRefused: a partition that can't be destroyed stays held until it
// can.
func TestDestroyRefused(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", part("p", 0, "1g.10gb", 0), part("p", 0, "1g.10gb", 1))
	mustPrepare(t, f, c)
	f.node.working = func(p gpu.Partition) error {
		if p == oneSlice(0, 0) {
			return errors.New("in use by process 4711 (python)")
		}
		return nil
	}
	if err := f.Unprepare(testContext(t), named(c)); err == nil || !strings.Contains(err.Error(), "4711") || !strings.Contains(err.Error(), "1g.10gb at memory slice 0") {
		t.Errorf("got %v, want an error that names the partition and its holder", err)
	}
	if diff := cmp.Diff([]gpu.Partition{oneSlice(0, 0)}, f.node.instances(t)); diff != "" {
		t.Errorf("partitions (-want +there):\n%s", diff)
	}
	f.server.set("c", deleted)
	if _, err := f.Prepare(almostOver(t), newClaim("next", part("p", 0, "1g.10gb", 0))); !errors.Is(err, prepare.ErrHeld) {
		t.Errorf("the next claim: got %v, want ErrHeld", err)
	}
	f.node.working = nil
	mustUnprepare(t, f, c)
	checkHeld(t, f)
}

// TestUnprepareOvertakesTheMakingOfAPartition lets an unprepare arrive while the
// hardware works.
func TestUnprepareOvertakesTheMakingOfAPartition(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", part("p", 0, "1g.10gb", 0), part("p", 0, "1g.10gb", 1))
	begun, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	f.node.working = func(p gpu.Partition) error {
		if p == oneSlice(0, 1) {
			once.Do(func() {
				close(begun)
				<-goOn
			})
		}
		return nil
	}
	got := inBackground(testContext(t), f, c)
	<-begun
	unprepared := make(chan error, 1)
	go func() { unprepared <- f.Unprepare(testContext(t), named(c)) }()
	close(goOn)
	if a := <-got; a.err == nil || !strings.Contains(a.err.Error(), "unprepared") {
		t.Logf("prepare: %v", a.err) // it may have been faster
	}
	if err := <-unprepared; err != nil {
		t.Errorf("unprepare: %v", err)
	}
	checkHeld(t, f)
}

func TestAdminAccessNeitherMakesNorDestroys(t *testing.T) {
	f := newFixture(t, 1)
	admin, user := newClaim("admin", adminPart("look", 0, "1g.10gb", 0)), newClaim("user", part("p", 0, "1g.10gb", 0))
	if _, err := f.Prepare(testContext(t), admin); err == nil {
		t.Error("an administrator looks at a partition that isn't there")
	}
	checkHeld(t, f)
	mustPrepare(t, f, user)
	mustPrepare(t, f, admin)
	checkHeld(t, f, "admin", "user")
	mustUnprepare(t, f, admin)
	checkHeld(t, f, "user")
}
