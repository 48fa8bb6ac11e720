package prepare_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const podUID = "3c0f6d1e-8a10-4135-bada-13f71feaef21"

// startContainer starts something that holds the claim's mark as a container's
// mount of it does; end lets go of it.
func startContainer(t *testing.T, node *node, claimUID string) (end func()) {
	t.Helper()
	mark, err := os.Open(filepath.Join(node.marks, claimUID))
	if err != nil {
		t.Fatal(err)
	}
	return func() { mark.Close() }
}

// unprepareUntil calls Unprepare with so much time before its margin.
func unprepareUntil(t *testing.T, f *fixture, c *resourceapi.ResourceClaim, d time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second+d)
	defer cancel()
	return f.Unprepare(ctx, named(c))
}

func TestUnprepareWaitsForContainers(t *testing.T) {
	f := newFixture(t, 1)
	old, next := newClaim("old", result("gpu", 0)), newClaim("next", result("gpu", 0))
	mustPrepare(t, f, old)
	f.server.set("old", deleted)
	end := startContainer(t, f.node, "old")

	if err := unprepareUntil(t, f, old, 50*time.Millisecond); err == nil {
		t.Fatal("unprepared while a container has the device")
	}
	c, ok := f.journal.Claim("old")
	if !ok {
		t.Fatal("the record has gone while a container has the device")
	}
	if c.Phase >= holding.Leaving {
		t.Error("what the claim shares doesn't count as used while a container has it")
	}
	if got := f.told(t, corev1.EventTypeWarning); len(got) != 1 || !strings.HasPrefix(got[0], "default/old DevicesStillInUse: ") {
		t.Errorf("warned %q", got)
	}

	var running atomic.Bool
	running.Store(true)
	results := make(chan error, 2)
	for _, call := range []func() error{
		func() error { _, err := f.Prepare(testContext(t), next); return err },
		func() error { return f.Unprepare(testContext(t), named(old)) },
	} {
		go func() {
			err := call()
			if running.Load() {
				err = errors.Join(err, errors.New("returned while a container has the device"))
			}
			results <- err
		}()
	}
	<-f.server.asked
	running.Store(false)
	end()
	for range 2 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

func TestUnprepareWaitsForPods(t *testing.T) {
	f := newFixture(t, 1)
	pids := filepath.Join(f.node.root, "sys/fs/cgroup/pids/kubepods/besteffort/pod"+podUID, "pids.current")
	writeNew(t, pids, "1\n")
	c := newClaim("a", result("gpu", 0))
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: "worker", UID: podUID}, {APIGroup: "batch", Resource: "jobs", Name: "other", UID: "x"},
	}
	mustPrepare(t, f, c)
	r, _ := f.journal.Claim("a")
	if diff := cmp.Diff([]holding.Pod{{UID: podUID, Name: "worker"}}, r.Pods); diff != "" {
		t.Errorf("recorded pods (-want +got):\n%s", diff)
	}
	err := unprepareUntil(t, f, c, 50*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "default/worker") {
		t.Fatalf("got %v, want an error that names the pod", err)
	}
	writeNew(t, pids, "0\n")
	if err := f.Unprepare(testContext(t), named(c)); err != nil {
		t.Error(err)
	}
}

func TestPreparedAgainRecordsPodsThatJoined(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("a", result("gpu", 0))
	for _, uid := range []types.UID{"1", "2"} {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p" + string(uid), UID: uid})
		mustPrepare(t, f, c)
	}
	r, _ := f.journal.Claim("a")
	if diff := cmp.Diff([]holding.Pod{{UID: "1", Name: "p1"}, {UID: "2", Name: "p2"}}, r.Pods); diff != "" {
		t.Errorf("recorded pods (-want +got):\n%s", diff)
	}
}

func TestUnprepareDoesNotWaitFor(t *testing.T) {
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		lost  bool
	}{
		"lost GPU":     {newClaim("a", result("gpu", 0)), true},
		"admin access": {newClaim("a", adminResult("gpu", 0)), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, tc.claim)
			defer startContainer(t, f.node, "a")()
			if tc.lost {
				f.lose(0)
			}
			if err := f.Unprepare(testContext(t), named(tc.claim)); err != nil {
				t.Fatal(err)
			}
			if _, err := f.Prepare(testContext(t), newClaim("b", result("gpu", 0))); tc.lost && err == nil {
				t.Error("a lost GPU was prepared")
			}
		})
	}
}

// TestBesideAnotherDriver checks that a claim that was prepared before another driver came
// is restored and unprepared beside it, and that no claim is prepared.
func TestBesideAnotherDriver(t *testing.T) {
	f := newFixture(t, 2)
	a := newClaim("a", result("gpu", 0))
	mustPrepare(t, f, a)
	const other = "a device plugin offers 2 nvidia.com/gpu"
	f.facts.SawNode(true, other)
	for _, c := range []*resourceapi.ResourceClaim{a, newClaim("b", result("gpu", 1))} {
		if _, err := f.Prepare(testContext(t), c); err == nil || !strings.Contains(err.Error(), other) {
			t.Errorf("prepare %s: %v, want %v", c.Name, err, other)
		}
	}
	checkHeld(t, f, "a")
	if err := f.Recover(testContext(t)); err != nil {
		t.Error(err)
	}
	mustUnprepare(t, f, a)
	checkHeld(t, f)
}

func TestUnprepareWaitsForHealthyGPUsBesideLostOnes(t *testing.T) {
	f := newFixture(t, 2)
	c := newClaim("a", result("gpu", 0), result("gpu", 1))
	mustPrepare(t, f, c)
	end := startContainer(t, f.node, "a")
	f.lose(0)
	if err := unprepareUntil(t, f, c, 50*time.Millisecond); err == nil {
		t.Error("unprepared while a container has a GPU that isn't lost")
	}
	end()
	if err := f.Unprepare(testContext(t), named(c)); err != nil {
		t.Error(err)
	}
}

func TestMarksWithoutClaimAreRemoved(t *testing.T) {
	f := newFixture(t, 1)
	mustPrepare(t, f, newClaim("a", result("gpu", 0)))
	writeNew(t, filepath.Join(f.node.marks, "gone"), "")
	if err := f.Recover(testContext(t)); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(f.node.marks)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].Name() != "a" {
		t.Errorf("marks %v, want a", entries)
	}
}

func writeNew(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
