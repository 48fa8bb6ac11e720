package cdi_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

func TestContainerGetsItsGPUsOnly(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	claimed := devices(t, driver, "claim-1", 1, 3)
	ids, err := s.Write(claimed)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, of := range ids {
		all = append(all, of...)
	}
	spec := inject(t, dir, all)
	want := []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidia3", "/dev/nvidiactl"}
	if diff := cmp.Diff(want, paths(spec)); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	allowed := 0
	for _, c := range spec.Linux.Resources.Devices {
		if !c.Allow || c.Major == nil || c.Minor == nil {
			t.Errorf("device cgroup: %+v is no rule for one device", c)
		}
		allowed++
	}
	if allowed != len(want) {
		t.Errorf("device cgroup has %d rules for %d devices", allowed, len(want))
	}
	if !slices.Contains(spec.Process.Env, "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("environment %v lets NVIDIA's runtime inject GPUs too", spec.Process.Env)
	}

	one := inject(t, dir, ids[slices.Sorted(maps.Keys(claimed.CDIDevices()))[0]])
	if n := len(paths(one)); n != 5 {
		t.Errorf("a container that uses one of the claim's two devices got %v", paths(one))
	}
}

// TestFirstNamesDiffer checks the first CDI names of a claim's devices, by which the
// kubelet distinguishes them in the pod's status. Kubernetes refuses a status in which
// two are the same.
func TestFirstNamesDiffer(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	first := map[string]bool{}
	for _, claim := range []string{"claim-1", "claim-2"} {
		ids, err := s.Write(devices(t, driver, claim, 0, 1))
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range ids {
			first[of[0]] = true
		}
	}
	if len(first) != 4 {
		t.Errorf("the first names of two devices in two claims are %v, want 4", slices.Collect(maps.Keys(first)))
	}
}

func TestContainerGetsTheDriver(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "k8s.gpu.nvidia.com-driver.json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	mounts := make(map[string]string)
	for _, m := range spec.ContainerEdits.Mounts {
		mounts[m.ContainerPath] = m.HostPath
	}
	for _, path := range []string{
		"/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
		"/usr/bin/nvidia-smi",
	} {
		if want := filepath.Join(installed.Root, path); mounts[path] != want {
			t.Errorf("%s in a container comes from %q, want %q", path, mounts[path], want)
		}
	}
	for _, h := range spec.ContainerEdits.Hooks {
		if h.Path != hook {
			t.Errorf("hook %v runs %s, want %s", h.Args, h.Path, hook)
		}
	}
	if strings.Contains(string(data), installed.Host) {
		t.Errorf("the specification has paths of this process, not of the host:\n%s", data)
	}
}

func TestClaimSpecification(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	checkGolden(t, s, dir, devices(t, driver, goldenClaim, 0), "testdata/claim.json")
}

func TestRemoveAndList(t *testing.T) {
	s, driver, dir := setUp(t)
	if claims, err := s.Claims(); err != nil || len(claims) != 0 {
		t.Errorf("without a directory: %v, %v", claims, err)
	}
	if err := s.Remove("claim-1"); err != nil {
		t.Errorf("remove what isn't there: %v", err)
	}
	if _, err := s.Write(holding.Realized{Record: holding.Record{ClaimUID: "claim-1"}}); err == nil {
		t.Error("wrote without a driver")
	}
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"claim-1", "claim-2"} {
		if _, err := s.Write(devices(t, driver, uid, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.SetDriver(nil); err != nil {
		t.Fatal(err)
	}
	// Without a driver, existing specifications can still be removed.
	if err := s.Remove("claim-1"); err != nil {
		t.Fatal(err)
	}
	claims, err := s.Claims()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"claim-2"}, claims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	for _, uid := range []string{"../etc", "a/b", ""} {
		if err := s.Remove(uid); err == nil {
			t.Errorf("accepted %q for a claim's UID", uid)
		}
	}
	if err := s.Remove("claim-2"); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveCommon(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestTidy(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.Tidy(); err != nil {
		t.Errorf("without a directory: %v", err)
	}
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(devices(t, driver, "claim-1", 0)); err != nil {
		t.Fatal(err)
	}
	const foreign = "example.com-x.json.1.tmp"
	for _, name := range []string{"k8s.gpu.nvidia.com-claim_claim-1.json.12.tmp", "k8s.gpu.nvidia.com-driver.json.3.tmp", foreign} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Tidy(); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if diff := cmp.Diff([]string{foreign, "k8s.gpu.nvidia.com-claim_claim-1.json", "k8s.gpu.nvidia.com-driver.json"}, left); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

func TestWipedDirectory(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	ids, err := s.Write(devices(t, driver, "claim-1", 0))
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range ids {
		inject(t, dir, of)
	}
}

// A mount stays when the mounted directory is removed; so does an open file.
func TestRemovedMountedDirectory(t *testing.T) {
	_, driver, dir := setUp(t)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	mounted, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer mounted.Close()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	s := cdi.New(cdi.Config{Dir: fmt.Sprintf("/proc/self/fd/%d", mounted.Fd()), HookPath: hook, Host: driverroot.NewHost(installed.Host)})
	if err := s.SetDriver(driver); err == nil || !strings.Contains(err.Error(), "restart") {
		t.Errorf("got %v, want an error that says to restart the plugin", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			uid := "claim-" + string(rune('a'+i))
			for range 20 {
				if _, err := s.Write(devices(t, driver, uid, i)); err != nil {
					t.Error(err)
				}
				if err := s.Remove(uid); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 3 {
		if err := s.SetDriver(driver); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func BenchmarkWrite(b *testing.B) {
	s, driver, _ := setUp(b)
	if err := s.SetDriver(driver); err != nil {
		b.Fatal(err)
	}
	d := devices(b, driver, "claim-1", 0)
	for b.Loop() {
		if _, err := s.Write(d); err != nil {
			b.Fatal(err)
		}
		if err := s.Remove("claim-1"); err != nil {
			b.Fatal(err)
		}
	}
}
