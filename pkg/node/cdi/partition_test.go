package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// partition creates a partition with the GPU's first profile at its n-th
// placement, and destroys it after the test.
func partition(t *testing.T, d *cdi.Driver, index, n int) prepared {
	t.Helper()
	g := d.GPUs[index]
	if now, err := d.Session.MIG(g.UUID); err != nil {
		t.Fatal(err)
	} else if !now.Enabled {
		if err := d.Session.SetMIGMode(g.UUID, true); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Session.SetMIGMode(g.UUID, false); err != nil {
				t.Error(err)
			}
		})
	}
	p := gpu.Partition{GPU: g.UUID, Profile: g.MIG.Profiles[0].Name, Placement: g.MIG.Profiles[0].Placements[n]}
	instance, err := d.Session.CreateInstance(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Session.DestroyInstance(g.UUID, instance); err != nil {
			t.Error(err)
		}
	})
	return prepared{Device: p, Instance: instance}
}

func TestPartitionSpecification(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	checkGolden(t, s, dir, given(t, driver, goldenClaim, partition(t, driver, 1, 0), partition(t, driver, 1, 2)), "testdata/partition.json")
}

// The container gets the GPU's node and the two capabilities, by number: it
// can't open another instance of the GPU.
func TestContainerGetsItsPartitionOnly(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	partition(t, driver, 2, 0) // another claim's
	mine := partition(t, driver, 2, 1)
	ids, err := s.Write(given(t, driver, "claim-1", mine))
	if err != nil {
		t.Fatal(err)
	}
	spec := inject(t, dir, ids[nameOf(t, driver, mine.Device)])
	minors := map[string]int64{}
	for _, n := range spec.Linux.Devices {
		if strings.HasPrefix(n.Path, "/dev/nvidia-caps/") {
			minors[n.Path] = n.Minor
			if n.Major != 509 || n.Type != "c" {
				t.Errorf("%s is %s %d:%d", n.Path, n.Type, n.Major, n.Minor)
			}
		}
	}
	want := map[string]int64{}
	for _, access := range []string{"access", "ci0/access"} {
		path := filepath.Join(installed.Host, installed.Root, "proc/driver/nvidia/capabilities/gpu2/mig/gi"+strconv.Itoa(mine.Instance.GPUInstanceID), access)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		minor := strings.Fields(string(data))[1]
		if want["/dev/nvidia-caps/nvidia-cap"+minor], err = strconv.ParseInt(minor, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(want, minors); diff != "" || len(minors) != 2 {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
	rest := []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia2", "/dev/nvidiactl"}
	nodes := slices.DeleteFunc(paths(spec), func(path string) bool { return strings.HasPrefix(path, "/dev/nvidia-caps/") })
	if diff := cmp.Diff(rest, nodes); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	for _, c := range spec.Linux.Resources.Devices {
		if !c.Allow || c.Major == nil || c.Minor == nil {
			t.Errorf("device cgroup: %+v is no rule for one device", c)
		}
	}
}

// The edits of a whole GPU don't depend on its MIG mode.
func TestWholeGPUInMIGMode(t *testing.T) {
	s, driver, dir := setUp(t)
	partition(t, driver, 0, 0)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	checkGolden(t, s, dir, devices(t, driver, goldenClaim, 0), "testdata/claim.json")
}

func TestPartitionErrors(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	one := partition(t, driver, 3, 0)
	incomplete := one
	incomplete.Instance.UUID, incomplete.Instance.ComputeInstanceID = "", gpu.NoComputeInstance
	unknown := one
	unknown.Instance.GPUInstanceID = 99
	whole := prepared{Device: gpu.Whole{GPU: driver.GPUs[3].UUID}}
	ofPartition := "give its " + one.Instance.Profile + " partition to containers"
	proc := filepath.Join(installed.Root, "proc")
	for name, tc := range map[string]struct {
		given prepared
		aside string
		says  string
		// action is what the GPU can't do; empty: it isn't the GPU's fault.
		action string
	}{
		"no compute instance":    {incomplete, "", "not a MIG device", ofPartition},
		"no such instance":       {unknown, "", filepath.Join(proc, "driver/nvidia/capabilities/gpu3/mig/gi99/access"), ofPartition},
		"no capability":          {one, "driver/nvidia/capabilities/gpu3/mig/gi" + strconv.Itoa(one.Instance.GPUInstanceID) + "/ci0/access", "ci0/access", ofPartition},
		"no device numbers":      {one, "devices", filepath.Join(proc, "devices"), ""},
		"the GPU's node is gone": {one, "../dev/nvidia3", filepath.Join(installed.Root, "dev/nvidia3"), ofPartition},
		"that of a whole GPU":    {whole, "../dev/nvidia3", filepath.Join(installed.Root, "dev/nvidia3"), "be given to containers"},
		"a node of all GPUs":     {whole, "../dev/nvidiactl", filepath.Join(installed.Root, "dev/nvidiactl"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.aside != "" {
				path := filepath.Join(installed.Host, proc, tc.aside)
				if err := os.Rename(path, path+".aside"); err != nil {
					t.Fatal(err)
				}
				defer os.Rename(path+".aside", path)
			}
			_, err := s.Write(given(t, driver, "claim-1", tc.given))
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want an error that says %q", err, tc.says)
			}
			refused, ok := errors.AsType[*gpu.RefusedError](err)
			if ok != (tc.action != "") || ok && (refused.Action != tc.action || !slices.Equal(refused.Silicon, []gpu.Device{tc.given.Device})) {
				t.Errorf("the GPU refuses: %+v, want that it can't %q", refused, tc.action)
			}
			if claims, _ := s.Claims(); len(claims) != 0 {
				t.Errorf("a failed write left specifications of %v", claims)
			}
		})
	}
}

func TestUpdateDriverComputesOnlyWhatChanged(t *testing.T) {
	s, driver, dir := setUp(t)
	if _, err := s.UpdateDriver(driver, 0, false); err != nil {
		t.Fatal(err)
	}
	common := filepath.Join(dir, "k8s.gpu.nvidia.com-driver.json")
	if err := os.Remove(common); err != nil { // it is written each time edits are computed
		t.Fatal(err)
	}
	again := *driver
	again.GPUs = append([]gpu.GPU(nil), driver.GPUs...)
	mig := *again.GPUs[0].MIG
	mig.Enabled = true
	again.GPUs[0].MIG = &mig
	if _, err := s.UpdateDriver(&again, 0, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(common); err == nil {
		t.Error("a GPU's MIG mode made it compute all edits again")
	}
	fewer := again
	fewer.GPUs = again.GPUs[1:]
	if _, err := s.UpdateDriver(&fewer, 0, false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(common); err != nil {
		t.Errorf("another set of GPUs: %v", err)
	}
	if err := s.SetDriver(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.UpdateDriver(driver, 0, false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(devices(t, driver, "claim-1", 0)); err != nil {
		t.Error(err)
	}
}
