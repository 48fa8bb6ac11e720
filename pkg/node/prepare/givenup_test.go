package prepare_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// runningPod adds a process to the pod of the claim that runs until end is called, also while
// the plugin is restarted.
func runningPod(t *testing.T, node *node, c *resourceapi.ResourceClaim) (end func()) {
	t.Helper()
	pids := filepath.Join(node.root, "sys/fs/cgroup/pids/kubepods/besteffort/pod"+podUID, "pids.current")
	writeNew(t, pids, "1\n")
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "worker", UID: podUID}}
	return func() { writeNew(t, pids, "0\n") }
}

// loseAndUnprepare unprepares the claim while its GPU is lost.
func loseAndUnprepare(t *testing.T, f *fixture, c *resourceapi.ResourceClaim) {
	t.Helper()
	f.lose(0)
	mustUnprepare(t, f, c)
	f.findBack()
	if r, ok := f.journal.Claim(string(c.UID)); !ok || r.GivenUp == nil {
		t.Fatalf("the record after the unprepare: %t, %+v, want one that says that the claim is given up", ok, r)
	}
	if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 {
		t.Errorf("CDI specs %v, %v, want none of the claim that was given up", specs, err)
	}
}

func noneGone(gpu.Partition) bool { return false }

// TestGPULostForAMoment: a force-deleted pod's container still runs when its GPU, which was
// lost, is back.
func TestGPULostForAMoment(t *testing.T) {
	for name, results := range map[string][2]resourceapi.DeviceRequestAllocationResult{
		"whole":     {result("gpu", 0), result("gpu", 0)},
		"partition": {part("part", 0, "1g.10gb", 0), result("gpu", 0)},
		"share":     {shareOf("s", 0, "3g.40gb", 0, 2, 1), part("part", 0, "3g.40gb", 0)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			a, b := newClaim("a", results[0]), newClaim("b", results[1])
			mustPrepare(t, f, a)
			end := startContainer(t, f.node, "a")
			loseAndUnprepare(t, f, a)
			if got := f.told(t, corev1.EventTypeWarning); len(got) != 1 || !strings.HasPrefix(got[0], "default/a DevicesStillInUse: ") {
				t.Errorf("warned %q", got)
			}
			checkHealthy(t, f.node, "claim-given-up") // what claim a has stays
			if err := prepareUntil(t, f, b, time.Second); !errors.Is(err, prepare.ErrHeld) || !strings.Contains(err.Error(), "default/a") {
				t.Errorf("prepare beside a container that has the device: %v, want an error that names its claim", err)
			}
			mustUnprepare(t, f, a) // the kubelet may repeat it
			end()
			mustPrepare(t, f, b)
			checkHeld(t, f, "b")
		})
	}
}

// prepareUntil calls Prepare with a deadline that leaves d before its margin.
func prepareUntil(t *testing.T, f *fixture, c *resourceapi.ResourceClaim, d time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second+d)
	defer cancel()
	_, err := f.Prepare(ctx, c)
	return err
}

// TestGivenUpUntil checks what ends a claim that was given up, and that a restart of the
// plugin doesn't.
func TestGivenUpUntil(t *testing.T) {
	first, second := health.Load{Boot: "boot-1", Driver: "1"}, health.Load{Boot: "boot-1", Driver: "2"}
	for name, tc := range map[string]struct {
		boot string
		load health.Load
		ends bool // its container
		want bool
	}{
		"restart of the plugin": {boot: "boot-1", load: first},
		"no driver is found":    {boot: "boot-1"},
		"end of the container":  {boot: "boot-1", load: first, ends: true, want: true},
		"reload of the driver":  {boot: "boot-1", load: second, want: true},
		"reboot":                {boot: "boot-2", load: health.Load{Boot: "boot-2", Driver: "1"}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			f.SetDriverLoad(first)
			a := newClaim("a", result("gpu", 0))
			end := runningPod(t, f.node, a)
			mustPrepare(t, f, a)
			loseAndUnprepare(t, f, a)
			if err := f.journal.Close(); err != nil {
				t.Fatal(err)
			}

			f = start(t, f.node, tc.boot, nil)
			if tc.load != (health.Load{}) {
				f.SetDriverLoad(tc.load)
			}
			if tc.ends {
				end()
			}
			for _, look := range []func() error{
				func() error { return f.Recover(testContext(t)) },
				func() error { return f.Mend(testContext(t), noneGone) },
			} {
				if err := look(); err != nil {
					t.Error(err)
				}
				if _, stays := f.journal.Claim("a"); stays == tc.want {
					t.Errorf("the record stays: %t", stays)
				}
				if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 {
					t.Errorf("CDI specs %v, %v, want none", specs, err)
				}
			}
			if err := prepareUntil(t, f, newClaim("b", result("gpu", 0)), time.Second); (err == nil) != tc.want {
				t.Errorf("prepare of another claim: %v", err)
			}
		})
	}
}

// TestMendReclaims checks that the devices are released while the plugin runs.
func TestMendReclaims(t *testing.T) {
	f := newFixture(t, 1)
	a := newClaim("a", part("part", 0, "1g.10gb", 0))
	mustPrepare(t, f, a)
	end := startContainer(t, f.node, "a")
	loseAndUnprepare(t, f, a)
	for _, want := range [][]string{{"a"}, nil} {
		if err := f.Mend(testContext(t), noneGone); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, f.names()); diff != "" {
			t.Errorf("claims with a record (-want +got):\n%s", diff)
		}
		checkHealthy(t, f.node, "claim-given-up")
		end()
	}
	checkHealthy(t, f.node)
}

// TestGivenUpClaimIsPreparedAgain: another pod uses the claim. It gets the claim's device
// back; and when that is over, the first pod's processes count, too.
func TestGivenUpClaimIsPreparedAgain(t *testing.T) {
	f := newFixture(t, 2)
	a := newClaim("a", result("gpu", 0))
	end := runningPod(t, f.node, a)
	mustPrepare(t, f, a)
	loseAndUnprepare(t, f, a)
	if _, err := f.Prepare(testContext(t), newClaim("a", result("gpu", 1))); err == nil {
		t.Error("given another device while its containers have the one before")
	}
	a.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "next", UID: "next"}}
	mustPrepare(t, f, a)
	if r, _ := f.journal.Claim("a"); r.GivenUp != nil || len(r.Pods) != 2 {
		t.Errorf("record %+v, want one of two pods that isn't given up", r)
	}
	checkHeld(t, f, "a")
	if err := unprepareUntil(t, f, a, 50*time.Millisecond); err == nil {
		t.Error("unprepared while a container of the first pod has the device")
	}
	end()
	mustUnprepare(t, f, a)
	checkHeld(t, f)
}

// TestUnreadableRecordIsGivenUp checks that the devices in such a record are kept from
// others, too.
func TestUnreadableRecordIsGivenUp(t *testing.T) {
	f := newFixture(t, 1)
	a := newClaim("a", part("part", 0, "1g.10gb", 0))
	mustPrepare(t, f, a)
	f = f.damaged(t, "a")
	end := startContainer(t, f.node, "a")
	loseAndUnprepare(t, f, a)
	if reread := f.facts.BeginReading(); len(f.journal.Claims().Unreadable()) > 0 || !reread {
		t.Errorf("unreadable %v, the GPUs are read again: %t, want none, and that they are", f.journal.Claims().Unreadable(), reread)
	}
	b := newClaim("b", result("gpu", 0))
	if err := prepareUntil(t, f, b, time.Second); !errors.Is(err, prepare.ErrHeld) {
		t.Errorf("prepare beside a container that has the device: %v", err)
	}
	end()
	mustPrepare(t, f, b)
	checkHeld(t, f, "b")
}

// TestGivenUpOnDisk: an unprepare that gives a claim up doesn't succeed before the record
// says so, also where its first write failed and the record before can't be read.
func TestGivenUpOnDisk(t *testing.T) {
	node := newNode(t, 1)
	disk := filestest.New(t, t.TempDir(), filestest.Tree{})
	node.journal = disk.Dir
	f, a := start(t, node, "boot-1", nil), newClaim("a", result("gpu", 0))
	mustPrepare(t, f, a)
	f = f.damaged(t, "a")
	startContainer(t, f.node, "a")
	f.lose(0)
	disk.Fail(func(op filestest.Op) syscall.Errno {
		if op.Call == "rename" {
			return syscall.EIO
		}
		return 0
	})
	if err := f.Unprepare(testContext(t), named(a)); !errors.Is(err, syscall.EIO) {
		t.Errorf("unprepare while the disk fails: %v, want EIO", err)
	}
	disk.Fail(nil)
	mustUnprepare(t, f, a)
	if on, err := journal.Read(disk.Dir); err != nil || len(on.Claims) != 1 || on.Claims[0].GivenUp == nil {
		t.Errorf("on disk: %+v, %v, want a record that says that the claim is given up", on, err)
	}
}
