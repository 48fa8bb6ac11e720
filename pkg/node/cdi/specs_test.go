package cdi_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var installed nodetest.Driver

func TestMain(m *testing.M) {
	os.Exit(nodetest.Run(m, "4xh100-80gb", func(d nodetest.Driver) { installed = d }))
}

const hook = "/var/lib/tessera/bin/nvidia-cdi-hook"

// setUp returns specifications of the simulated driver, in an empty directory.
func setUp(t testing.TB) (*cdi.Specs, *cdi.Driver, string) {
	t.Helper()
	host := driverroot.NewHost(installed.Host)
	root, err := driverroot.Find(host, "")
	if err != nil {
		t.Fatal(err)
	}
	session, err := nvml.Open(host.Path(root.Library))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	gpus, err := session.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	version, err := session.Driver()
	if err != nil {
		t.Fatal(err)
	}
	run, err := os.MkdirTemp(filepath.Join(installed.Host, "run"), "") //nolint:usetesting // it must lie in the host's root
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	dir := filepath.Join(run, "cdi")
	return cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: host}), &cdi.Driver{
		Version: version.Version, Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot, GPUs: gpus, Session: session,
	}, dir
}

// devices returns the GPUs with the given indexes, by name.
func devices(t testing.TB, d *cdi.Driver, indexes ...int) map[gpu.DeviceName]gpu.Prepared {
	t.Helper()
	names, err := gpu.NewNames(d.GPUs)
	if err != nil {
		t.Fatal(err)
	}
	devices := make(map[gpu.DeviceName]gpu.Prepared)
	for _, i := range indexes {
		whole := gpu.Whole{GPU: d.GPUs[i].UUID}
		name, _ := names.Name(whole)
		devices[name] = gpu.Prepared{Device: whole}
	}
	return devices
}

// inject returns the spec of a container after the library of container
// runtimes has applied the CDI devices, on the host.
func inject(t *testing.T, dir string, ids []string) *oci.Spec {
	t.Helper()
	spec := &oci.Spec{}
	err := driverroot.NewHost(installed.Host).Do(func() error {
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(strings.TrimPrefix(dir, installed.Host)), cdilib.WithAutoRefresh(false))
		if err != nil {
			return err
		}
		for _, errs := range cache.GetErrors() {
			return errors.Join(errs...)
		}
		_, err = cache.InjectDevices(spec, ids...)
		return err
	})
	if err != nil {
		t.Fatalf("inject %v: %v", ids, err)
	}
	return spec
}

func paths(s *oci.Spec) []string {
	var paths []string
	for _, d := range s.Linux.Devices {
		paths = append(paths, d.Path)
	}
	slices.Sort(paths)
	return paths
}

func TestContainerGetsItsGPUsOnly(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	claimed := devices(t, driver, 1, 3)
	ids, err := s.Write("claim-1", claimed)
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

	one := inject(t, dir, ids[slices.Sorted(maps.Keys(claimed))[0]])
	if n := len(paths(one)); n != 5 {
		t.Errorf("a container that uses one of the claim's two devices got %v", paths(one))
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
	checkGolden(t, s, dir, devices(t, driver, 0), "testdata/claim.json")
}

// checkGolden writes a claim's specification and compares it with a file.
func checkGolden(t *testing.T, s *cdi.Specs, dir string, devices map[gpu.DeviceName]gpu.Prepared, golden string) {
	t.Helper()
	if _, err := s.Write("3dc7fa15-ac4e-49dc-be51-c88a26dafa18", devices); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "k8s.gpu.nvidia.com-claim_3dc7fa15-ac4e-49dc-be51-c88a26dafa18.json"))
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("specification of a claim (-want +got), UPDATE_GOLDEN=1 accepts it:\n%s", diff)
	}
}

func TestMissingDeviceNode(t *testing.T) {
	for name, node := range map[string]string{
		"of the GPU":     "nvidia0",
		"unified memory": "nvidia-uvm",
		"control":        "nvidiactl",
	} {
		t.Run(name, func(t *testing.T) {
			s, driver, _ := setUp(t)
			path := filepath.Join(installed.Host, installed.Root, "dev", node)
			aside := path + ".aside"
			if err := os.Rename(path, aside); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Rename(aside, path) })
			if err := s.SetDriver(driver); err != nil {
				t.Fatal(err)
			}
			_, err := s.Write("claim-1", devices(t, driver, 0))
			if want := filepath.Join(installed.Root, "dev", node); err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("without %s: got %v, want an error that names it", want, err)
			}
			if claims, _ := s.Claims(); len(claims) != 0 {
				t.Errorf("a failed write left specifications of %v", claims)
			}
			if err := os.Rename(aside, path); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Write("claim-1", devices(t, driver, 0)); err != nil {
				t.Errorf("with the node there: %v", err)
			}
		})
	}
}

func TestNodeThatVanishedAfterwards(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "dev/nvidia2")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	if _, err := s.Write("claim-1", devices(t, driver, 2)); err == nil {
		t.Error("the GPU without a device node was given")
	}
	if _, err := s.Write("claim-2", devices(t, driver, 1)); err != nil {
		t.Errorf("the other GPUs suffer: %v", err)
	}
}

func TestDriverReloadedWithOtherMajor(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "dev/nvidia-uvm")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(511, 0))); err != nil {
		t.Fatal(err)
	}
	ids, err := s.Write("claim-1", devices(t, driver, 0))
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range ids {
		for _, d := range inject(t, dir, of).Linux.Devices {
			if d.Path == "/dev/nvidia-uvm" && d.Major != 511 {
				t.Errorf("a container would get %s %d:%d", d.Path, d.Major, d.Minor)
			}
		}
	}
}

func TestDriverFileGone(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.580.159.04")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	// The library is optional: the files are searched again.
	if _, err := s.Write("claim-1", devices(t, driver, 0)); err != nil {
		t.Errorf("an optional library that went away: %v", err)
	}
}

func TestUnknownGPU(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	unknown := gpu.UUID("GPU-00000000-0000-0000-0000-000000000000")
	_, err := s.Write("claim-1", map[gpu.DeviceName]gpu.Prepared{"gpu-00000000": {Device: gpu.Whole{GPU: unknown}}})
	if err == nil || !strings.Contains(err.Error(), string(unknown)) {
		t.Errorf("got %v, want an error that names the GPU", err)
	}
}

func TestRemoveAndList(t *testing.T) {
	s, driver, dir := setUp(t)
	if claims, err := s.Claims(); err != nil || len(claims) != 0 {
		t.Errorf("without a directory: %v, %v", claims, err)
	}
	if err := s.Remove("claim-1"); err != nil {
		t.Errorf("remove what isn't there: %v", err)
	}
	if _, err := s.Write("claim-1", nil); err == nil {
		t.Error("wrote without a driver")
	}
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"claim-1", "claim-2"} {
		if _, err := s.Write(uid, devices(t, driver, 0)); err != nil {
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
	if _, err := s.Write("claim-1", devices(t, driver, 0)); err != nil {
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
	ids, err := s.Write("claim-1", devices(t, driver, 0))
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
				if _, err := s.Write(uid, devices(t, driver, i)); err != nil {
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
	d := devices(b, driver, 0)
	for b.Loop() {
		if _, err := s.Write("claim-1", d); err != nil {
			b.Fatal(err)
		}
		if err := s.Remove("claim-1"); err != nil {
			b.Fatal(err)
		}
	}
}

// TestMinorMoves checks that a container gets the GPU's current device node.
func TestMinorMoves(t *testing.T) {
	s, d, dir := setUp(t)
	if err := s.SetDriver(d); err != nil {
		t.Fatal(err)
	}
	first, second := d.GPUs[0], d.GPUs[1]
	if err := s.SetMinor(first.UUID, second.Minor); err != nil {
		t.Fatal(err)
	}
	ids, err := s.Write("moved", devices(t, d, 0))
	if err != nil {
		t.Fatal(err)
	}
	for name := range ids {
		got := paths(inject(t, dir, ids[name]))
		if !slices.Contains(got, fmt.Sprintf("/dev/nvidia%d", second.Minor)) || slices.Contains(got, fmt.Sprintf("/dev/nvidia%d", first.Minor)) {
			t.Errorf("%s: %v, want /dev/nvidia%d", name, got, second.Minor)
		}
	}
}
