package prepare_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

func TestPrepare(t *testing.T) {
	for name, results := range map[string][]resourceapi.DeviceRequestAllocationResult{
		"one GPU":                  {result("gpu", 0)},
		"allocationMode All":       {result("all", 0), result("all", 1), result("all", 2), result("all", 3)},
		"several requests":         {result("big", 3), result("small", 1)},
		"firstAvailable":           {result("gpu/cheap", 2)},
		"admin access":             {adminResult("look", 0), adminResult("look", 1)},
		"admin access to its own":  {result("gpu", 0), adminResult("look", 0)},
		"with another driver's":    {result("gpu", 0), {Request: "nic", Driver: "nic.example.com", Pool: pool, Device: "eth0"}},
		"with another node's pool": {result("gpu", 0), {Request: "far", Driver: driver, Pool: "node-b", Device: "gpu-00000000"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 4)
			c := newClaim("training", results...)
			var want []kubeletplugin.Device
			for _, r := range results {
				for n := range 4 {
					if r.Pool == pool && r.Device == string(gpuName(n)) {
						want = append(want, device(c, r.Request, n))
					}
				}
			}
			for range 2 { // twice: pods share claims, kubelets restart
				if diff := cmp.Diff(want, mustPrepare(t, f, c)); diff != "" {
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

func TestPrepareRefuses(t *testing.T) {
	withConfig := newClaim("c", result("gpu", 0))
	withConfig.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver},
		},
	}}
	withConfig.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw = []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"NoSuchConfig"}`)
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		is    error
		says  string
	}{
		"a GPU that isn't there":  {newClaim("c", result("gpu", 0), result("gpu", 7)), nil, `request "gpu" was given device "` + string(gpuName(7)) + `"`},
		"a lost GPU":              {newClaim("c", result("gpu", 1)), nil, "is Lost"},
		"a missing device node":   {newClaim("c", result("gpu", 0), result("gpu", 2)), nil, "/dev/nvidia2"},
		"a config it can't read":  {withConfig, claim.ErrPermanent, `request "gpu"`},
		"a claim that isn't ours": {newClaim("c"), nil, "no device of driver"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 3)
			f.lose(1)
			defer hideDeviceNode(t, 2)()
			_, err := f.Prepare(testContext(t), tc.claim)
			if err == nil || !strings.Contains(err.Error(), tc.says) || (tc.is != nil && !errors.Is(err, tc.is)) {
				t.Errorf("got %v, want an error that is %v and says %q", err, tc.is, tc.says)
			}
			checkHeld(t, f)
		})
	}
}

func TestPrepareSucceedsByItselfOnceTheDeviceNodeIsThere(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("training", result("gpu", 0))
	show := hideDeviceNode(t, 0)
	if _, err := f.Prepare(testContext(t), c); err == nil {
		t.Fatal("prepared without a device node")
	}
	show()
	mustPrepare(t, f, c)
	checkHeld(t, f, "training")
}

func TestAdminAccessNeitherHoldsNorWaits(t *testing.T) {
	f := newFixture(t, 1)
	user, admin, other := newClaim("user", result("gpu", 0)), newClaim("admin", adminResult("look", 0)), newClaim("other", result("gpu", 0))
	mustPrepare(t, f, user)
	mustPrepare(t, f, admin)
	checkHeld(t, f, "admin", "user")
	mustUnprepare(t, f, user)
	mustPrepare(t, f, other)
	checkHeld(t, f, "admin", "other")
}

func TestPreparedAnewWithOtherDevices(t *testing.T) {
	old, anew := newClaim("c", result("gpu", 0)), newClaim("c", result("gpu", 1))
	t.Run("in the same boot a container may still use the old ones", func(t *testing.T) {
		f := newFixture(t, 2)
		mustPrepare(t, f, old)
		if _, err := f.Prepare(testContext(t), anew); err == nil || !strings.Contains(err.Error(), "allocated again") {
			t.Errorf("got %v, want a refusal", err)
		}
		mustUnprepare(t, f, old)
		mustPrepare(t, f, anew)
		checkHeld(t, f, "c")
	})
	t.Run("after a reboot nothing does", func(t *testing.T) {
		f := newFixture(t, 2)
		mustPrepare(t, f, old)
		f.journal.Close()
		f = start(t, f.node, "boot-2", nil)
		mustPrepare(t, f, anew)
		checkHeld(t, f, "c")
	})
}

func TestFullDisk(t *testing.T) {
	node := newNode(t, 2)
	if err := unix.Mount("tmpfs", node.journal, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small tmpfs (run the tests as root): %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(node.journal, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f := start(t, node, "boot-1", nil)
	before, c := newClaim("before", result("gpu", 0)), newClaim("training", result("gpu", 1))
	mustPrepare(t, f, before)
	fill := filepath.Join(node.journal, "fill")
	if err := os.WriteFile(fill, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: got %v, want ENOSPC", err)
	}
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), node.journal) {
		t.Errorf("got %v, want ENOSPC naming the directory", err)
	}
	mustPrepare(t, f, before)
	checkHeld(t, f, "before")
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, f, c)
	checkHeld(t, f, "before", "training")
}

// BenchmarkPrepare prepares a claim beside others, seven of which share a GPU.
func BenchmarkPrepare(b *testing.B) {
	for _, before := range []int{0, 112, 1000} {
		b.Run(fmt.Sprintf("prepared=%d", before), func(b *testing.B) {
			f := newFixture(b, 1)
			for n := range before {
				d := gpu.Partition{GPU: gpu.UUID(fmt.Sprintf("GPU-%08d", n/7)), Profile: "1g.18gb", Placement: gpu.Placement{Start: n % 7, Size: 1}}
				uid := fmt.Sprintf("claim-%d", n)
				err := f.journal.Put(holding.Record{ClaimUID: uid, Namespace: "default", Name: uid, BootID: "boot-1", Holdings: []holding.Holding{holding.New("other", d)}})
				if err != nil {
					b.Fatal(err)
				}
			}
			c := newClaim("training", result("gpu", 0))
			for b.Loop() {
				mustPrepare(b, f, c)
				b.StopTimer()
				mustUnprepare(b, f, c)
				b.StartTimer()
			}
		})
	}
}

func BenchmarkPrepareEightAtOnce(b *testing.B) {
	f, ctx := newFixture(b, 8), testContext(b)
	for b.Loop() {
		var wg sync.WaitGroup
		for n := range 8 {
			c := newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n))
			wg.Go(func() {
				if _, err := f.Prepare(ctx, c); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		b.StopTimer()
		for n := range 8 {
			mustUnprepare(b, f, newClaim(fmt.Sprintf("claim-%d", n)))
		}
		b.StartTimer()
	}
}

func BenchmarkUnprepare(b *testing.B) {
	f := newFixture(b, 1)
	c := newClaim("training", result("gpu", 0))
	for b.Loop() {
		b.StopTimer()
		mustPrepare(b, f, c)
		b.StartTimer()
		mustUnprepare(b, f, c)
	}
}
