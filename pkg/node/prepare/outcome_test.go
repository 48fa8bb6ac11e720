package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// outcomes returns the outcomes since the last call, each as "DEVICE POD: PROBLEM", with so much
// of the problem as what the GPU can't do.
func (f *fixture) outcomes(t *testing.T) []string {
	t.Helper()
	var all []string
	for {
		select {
		case o := <-f.Outcomes():
			action, reason, _ := strings.Cut(o.Problem, ": ")
			if o.Problem != "" && reason == "" {
				t.Errorf("%q gives no reason", o.Problem)
			}
			if o.At.IsZero() || o.Load.Boot == "" || o.GPU != o.Silicon.Parent() {
				t.Errorf("incomplete: %+v", o)
			}
			text := string(o.Device)
			for _, p := range o.Pods {
				text += " " + o.Namespace + "/" + p.Name
			}
			all = append(all, strings.TrimSuffix(text+": "+action, ": "))
		default:
			return all
		}
	}
}

// refusing has a GPU refuse to create partitions, the first times; negative: always.
func (n *node) refusing(times int, of ...gpu.DeviceName) {
	n.working = func(p gpu.Partition) error {
		for _, name := range of {
			if times != 0 && strings.HasPrefix(string(name), string(gpuName(indexOf(p.GPU)))) && strings.HasSuffix(string(name), fmt.Sprint("-", p.Placement.Start)) {
				times--
				return errors.New("nvmlDeviceCreateGpuInstanceWithPlacement: Unknown Error")
			}
		}
		return nil
	}
}

func indexOf(uuid gpu.UUID) int {
	for i, g := range installed.Machine.GPUs {
		if gpu.UUID(g.UUID) == uuid {
			return i
		}
	}
	panic("no such GPU")
}

// TestRefusals checks which prepares have an outcome after one call, and which don't.
func TestRefusals(t *testing.T) {
	large := partitionName(0, "3g.40gb", 4)
	unknown := func(times int) func(*testing.T, *fixture) {
		return func(_ *testing.T, f *fixture) { f.node.refusing(times, large) }
	}
	daemonFails := func(_ *testing.T, f *fixture) {
		f.node.daemons.SetFault(func(call, daemon string) error {
			if call == "ensure" && daemon == gpu0 {
				return fmt.Errorf("start: %w", mps.ErrDaemonFails)
			}
			return nil
		})
	}
	hide := func(n int) func(*testing.T, *fixture) {
		return func(t *testing.T, _ *fixture) { hideDeviceNode(t, n) }
	}
	for name, tc := range map[string]struct {
		claim  *resourceapi.ResourceClaim
		damage func(*testing.T, *fixture)
		want   []string
		// succeeds: the claim is prepared.
		succeeds bool
	}{
		"a partition": {
			newClaim("c", of("p", string(large))), unknown(-1),
			[]string{string(large) + " default/worker: can't create a 3g.40gb partition"}, false,
		},
		"a partition, the first time": {newClaim("c", of("p", string(large))), unknown(1), nil, true},
		"beside it":                   {newClaim("c", part("p", 0, "1g.10gb", 0)), unknown(-1), nil, true},
		"of another GPU":              {newClaim("c", part("p", 1, "3g.40gb", 4)), unknown(-1), nil, true},
		"a share of a partition": {
			newClaim("c", of("s", string(large)+"-mps2-1")), unknown(-1),
			[]string{string(large) + "-mps2-1 default/worker: can't create a 3g.40gb partition"}, false,
		},
		"of two partitions one": {
			newClaim("c", part("p", 0, "1g.10gb", 0), of("q", string(large))), unknown(-1),
			[]string{string(large) + " default/worker: can't create a 3g.40gb partition"}, false,
		},
		"others' partition": {newClaim("c", result("gpu", 0)), func(t *testing.T, f *fixture) {
			if err := f.node.sim.SetMIGMode(uuidOf(0), true); err != nil {
				t.Fatal(err)
			}
			if _, err := f.node.sim.CreateInstance(oneSlice(0, 0)); err != nil {
				t.Fatal(err)
			}
		}, []string{gpu0 + " default/worker: can't be used whole"}, false},
		"an MPS daemon that doesn't start": {
			newClaim("c", share("s", 0, 4, 1)), daemonFails, []string{gpu0 + "-mps4-1 default/worker: can't serve MPS clients"}, false,
		},
		"that of another GPU": {newClaim("c", share("s", 1, 4, 1)), daemonFails, nil, true},
		"a device node":       {newClaim("c", result("gpu", 0)), hide(0), []string{gpu0 + " default/worker: can't be given to containers"}, false},
		"of two GPUs one": {
			newClaim("c", result("a", 1), result("b", 0)), hide(0), []string{gpu0 + " default/worker: can't be given to containers"}, false,
		},
		"admin access": {newClaim("c", adminResult("look", 0)), hide(0), nil, false},
		"admin access beside a device": {
			newClaim("c", adminResult("look", 0), result("gpu", 1)), hide(0), nil, false,
		},
		"a look at the same": {
			newClaim("c", adminResult("look", 0), result("gpu", 0)), hide(0), []string{gpu0 + " default/worker: can't be given to containers"}, false,
		},
		"lost": {newClaim("c", of("p", string(large))), func(_ *testing.T, f *fixture) {
			f.node.working = func(gpu.Partition) error { return nvml.ErrLost }
		}, nil, false},
		"no supervisor":   {newClaim("c", share("s", 0, 4, 1)), func(_ *testing.T, f *fixture) { f.node.daemons.SetAway(true) }, nil, false},
		"specs that fail": {newClaim("c", result("gpu", 0)), func(t *testing.T, f *fixture) { t.Cleanup(f.node.failSpecs(t)) }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			tc.damage(t, f)
			_, err := f.Prepare(testContext(t), forPod(tc.claim)[0])
			if (err == nil) != tc.succeeds {
				t.Errorf("prepare: %v", err)
			}
			if diff := cmp.Diff(tc.want, f.outcomes(t)); diff != "" {
				t.Errorf("outcomes after %v (-want +got):\n%s", err, diff)
			}
			if !tc.succeeds && len(f.journal.Claims()) > 0 && !strings.Contains(name, "specs") {
				t.Errorf("records are left: %v", f.names())
			}
		})
	}
}

// TestSecondAttempt checks that the hardware is asked twice, and that one refusal in a call that
// ends is none.
func TestSecondAttempt(t *testing.T) {
	for _, ends := range []bool{false, true} {
		f := newFixture(t, 1)
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		attempts := 0
		f.node.working = func(gpu.Partition) error {
			attempts++
			if ends {
				time.AfterFunc(time.Millisecond, cancel)
			}
			return errors.New("Unknown Error")
		}
		_, err := f.Prepare(ctx, newClaim("c", part("p", 0, "3g.40gb", 4)))
		if got := len(f.outcomes(t)); ends && (attempts != 1 || got != 0 || !errors.Is(err, context.Canceled)) || !ends && (attempts != 2 || got != 1) {
			t.Errorf("%d attempts and %d outcomes, %v; the call ends in between: %t", attempts, got, err, ends)
		}
		checkHeld(t, f)
	}
}

// TestRefusalOfClaimInUse checks that what containers may already have is no outcome.
func TestRefusalOfClaimInUse(t *testing.T) {
	second := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: types.UID("5d1f6d1e-8a10-4135-bada-13f71feaef21")}
	for name, tc := range map[string]struct {
		before func(t *testing.T, f *fixture, c *resourceapi.ResourceClaim)
		want   []string
	}{
		"containers run": {func(t *testing.T, f *fixture, c *resourceapi.ResourceClaim) {
			t.Helper()
			mountMark(t, f.node, string(c.UID))
		}, nil},
		"another pod comes": {func(_ *testing.T, _ *fixture, c *resourceapi.ResourceClaim) {
			c.Status.ReservedFor = append(c.Status.ReservedFor, second)
		}, nil},
		"none has started": {func(*testing.T, *fixture, *resourceapi.ResourceClaim) {}, []string{gpu0 + " default/worker: can't be given to containers"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			c := forPod(newClaim("c", result("gpu", 0)))[0]
			mustPrepare(t, f, c)
			tc.before(t, f, c)
			hideDeviceNode(t, 0)
			if _, err := f.Prepare(testContext(t), c); err == nil {
				t.Error("prepared")
			}
			if diff := cmp.Diff(tc.want, f.outcomes(t)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestRefusalAfterAReboot checks that a claim that several pods have had in an earlier boot is
// refused each time as a new one is: none of its containers has survived.
func TestRefusalAfterAReboot(t *testing.T) {
	f := newFixture(t, 1)
	c := forPod(newClaim("c", result("gpu", 0)))[0]
	c.Status.ReservedFor = append(c.Status.ReservedFor,
		resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: types.UID("5d1f6d1e-8a10-4135-bada-13f71feaef21")})
	mustPrepare(t, f, c)
	f.journal.Close()
	f.node.reboot(t)
	f = start(t, f.node, "boot-2", nil)
	if err := f.Recover(testContext(t)); err != nil {
		t.Fatal(err)
	}
	hideDeviceNode(t, 0)
	for range 2 {
		if _, err := f.Prepare(testContext(t), c); err == nil {
			t.Error("prepared")
		}
		if diff := cmp.Diff([]string{gpu0 + " default/worker default/second: can't be given to containers"}, f.outcomes(t)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// mountMark has a process on the host that has the claim's mark mounted.
func mountMark(t *testing.T, n *node, claimUID string) {
	t.Helper()
	process := filepath.Join(n.root, "proc/4711")
	mount := fmt.Sprintf("100 90 0:20 /marks/%s %s/%s ro - tmpfs tmpfs rw\n", claimUID, containers.MountDir, claimUID)
	err := errors.Join(os.MkdirAll(filepath.Join(process, "ns"), 0o755), os.Symlink("mnt:[4711]", filepath.Join(process, "ns/mnt")),
		os.WriteFile(filepath.Join(process, "mountinfo"), []byte(mount), 0o600))
	if err != nil {
		t.Fatal(err)
	}
}

// TestGivenBeforeTheFactsSayRefused checks that a claim that is given a device right after a refusal
// has an outcome, although the facts don't show the condition yet. Otherwise the condition would
// begin after that, and end the pods that use the device.
func TestGivenBeforeTheFactsSayRefused(t *testing.T) {
	f := newFixture(t, 2)
	device := partitionName(0, "3g.40gb", 4)
	f.node.refusing(2, device)
	c := forPod(newClaim("c", of("p", string(device))))[0]
	if _, err := f.Prepare(testContext(t), c); err == nil {
		t.Fatal("prepared")
	}
	mustPrepare(t, f, c)
	want := []string{string(device) + " default/worker: can't create a 3g.40gb partition", string(device) + " default/worker"}
	if diff := cmp.Diff(want, f.outcomes(t)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestGivenAtTheStart checks that a claim whose prepare succeeded just before the plugin ended has an
// outcome at the next start, on a GPU that refuses claims: the condition would last, and end the
// claim's pods after another refusal. Devices that several claims can have at a time have none.
func TestGivenAtTheStart(t *testing.T) {
	f := newFixture(t, 2)
	mustPrepare(t, f, forPod(newClaim("c", result("gpu", 0)))[0])
	mustPrepare(t, f, forPod(newClaim("s", share("s", 1, 4, 1)))[0])
	f.journal.Close()
	f = start(t, f.node, "boot-1", nil)
	health := map[gpu.UUID][]gpu.Condition{}
	for n := range 2 {
		health[uuidOf(n)] = []gpu.Condition{{Type: gpu.PrepareFailed, Refused: []gpu.DeviceName{gpuName(n)}}}
	}
	f.facts.SetHealth(health)
	if err := f.Recover(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{gpu0 + " default/worker"}, f.outcomes(t)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestGivenAgain checks that prepares on a GPU that refuses claims are noted, if they say
// something of it, and on others aren't.
func TestGivenAgain(t *testing.T) {
	f := newFixture(t, 2)
	mustPrepare(t, f, newClaim("before", part("p", 0, "1g.10gb", 0)))
	if got := f.outcomes(t); got != nil {
		t.Errorf("of healthy GPUs: %q", got)
	}
	f.facts.SetHealth(map[gpu.UUID][]gpu.Condition{uuidOf(0): {{Type: gpu.PrepareFailed, Refused: []gpu.DeviceName{partitionName(0, "3g.40gb", 4)}}}})
	mustPrepare(t, f, forPod(newClaim("c", part("p", 0, "3g.40gb", 4), part("q", 0, "1g.10gb", 1), result("gpu", 1), adminPart("look", 0, "1g.10gb", 0)))[0])
	want := []string{string(partitionName(0, "3g.40gb", 4)) + " default/worker", string(partitionName(0, "1g.10gb", 1)) + " default/worker"}
	if diff := cmp.Diff(want, f.outcomes(t)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	mountMark(t, f.node, "before")
	mustPrepare(t, f, newClaim("before", part("p", 0, "1g.10gb", 0)))
	if got := f.outcomes(t); got != nil {
		t.Errorf("of a claim that has been prepared: %q", got)
	}
}
