package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// daemonDir creates a directory of an MPS daemon on the host, for the test.
func daemonDir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join("/run/tessera/mps/d", name)
	if err := os.MkdirAll(filepath.Join(installed.Host, dir), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(filepath.Join(installed.Host, "run/tessera")) })
	return dir
}

// shared returns specifications with computed edits, for tests of shares.
func shared(t *testing.T) (*cdi.Specs, *cdi.Driver, string) {
	t.Helper()
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	return s, driver, dir
}

func TestSharedSpecifications(t *testing.T) {
	whole := func(d *cdi.Driver, n int) gpu.Device { return gpu.Whole{GPU: d.GPUs[n].UUID} }
	for golden, build := range map[string]func(*testing.T, *cdi.Driver) []prepared{
		"share": func(t *testing.T, d *cdi.Driver) []prepared {
			return []prepared{{
				Device: gpu.Share{Of: whole(d, 0), Count: 4, Number: 2},
				MPS:    &client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "gpu/pipe"), ShmDir: daemonDir(t, "gpu/shm")}, ThreadPercentage: 25, MemoryMiB: 20000},
			}}
		},
		"share-in-partition": func(t *testing.T, d *cdi.Driver) []prepared {
			p := partition(t, d, 1, 0)
			return []prepared{{
				Device: gpu.Share{Of: p.Device}, Instance: p.Instance,
				MPS: &client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "mig/pipe")}, ThreadPercentage: 100, MemoryMiB: 4000},
			}}
		},
		"mps-two-gpus": func(t *testing.T, d *cdi.Driver) []prepared {
			dirs := gpu.MPSDirs{PipeDir: daemonDir(t, "claim/pipe")}
			return []prepared{
				{Device: whole(d, 0), MPS: &client{MPSDirs: dirs, ThreadPercentage: 40, MemoryMiB: 1024}},
				{Device: whole(d, 3), MPS: &client{MPSDirs: dirs, ThreadPercentage: 40, MemoryMiB: 2048}},
			}
		},
		"mps-no-limits": func(t *testing.T, d *cdi.Driver) []prepared {
			return []prepared{{Device: whole(d, 0), MPS: &client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "claim/pipe")}, MemoryMiB: 0}}}
		},
		"replica": func(_ *testing.T, d *cdi.Driver) []prepared {
			return []prepared{{Device: gpu.Replica{GPU: d.GPUs[2].UUID, Count: 4, Number: 1}}}
		},
	} {
		t.Run(golden, func(t *testing.T) {
			s, driver, dir := shared(t)
			checkGolden(t, s, dir, given(t, driver, goldenClaim, build(t, driver)...), filepath.Join("testdata", golden+".json"))
		})
	}
	t.Run("time slices change nothing in a container", func(t *testing.T) {
		s, driver, dir := shared(t)
		checkGolden(t, s, dir, devices(t, driver, goldenClaim, 0), "testdata/claim.json")
	})
}

// TestContainerOfAShare checks that a container gets only the GPU's node, its
// limits, and one mount, also with two shares of the same daemon.
func TestContainerOfAShare(t *testing.T) {
	s, driver, dir := shared(t)
	half := &client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "gpu/pipe")}, ThreadPercentage: 50, MemoryMiB: 40000}
	share := func(n int) prepared {
		return prepared{Device: gpu.Share{Of: gpu.Whole{GPU: driver.GPUs[1].UUID}, Count: 4, Number: n}, MPS: half}
	}
	ids, err := s.Write(given(t, driver, "claim-1", share(0), share(3)))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, of := range ids {
		all = append(all, of...)
	}
	spec := inject(t, dir, all)
	if diff := cmp.Diff([]string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidiactl"}, paths(spec)); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	for _, want := range []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40000M"} {
		if !slices.Contains(spec.Process.Env, want) {
			t.Errorf("environment %v lacks %s", spec.Process.Env, want)
		}
	}
	mounts := 0
	for _, m := range spec.Mounts {
		if m.Destination == "/tmp/nvidia-mps" || m.Destination == "/dev/shm" {
			mounts++
		}
	}
	if mounts != 1 {
		t.Errorf("%d mounts of the daemon's directories, want 1", mounts)
	}
}

// TestLimitsInThePodsEnvironment checks that the limits of a share replace those in the
// pod's own environment, smaller ones too, and that the others stay (docs/user/sharing.md).
func TestLimitsInThePodsEnvironment(t *testing.T) {
	const threads, memory = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="
	for name, tc := range map[string]struct {
		client client
		want   []string
	}{
		"both limits":           {client{ThreadPercentage: 50, MemoryMiB: 40000}, []string{threads + "50", memory + "0=40000M"}},
		"all multiprocessors":   {client{ThreadPercentage: 100, MemoryMiB: 40000}, []string{threads + "10", memory + "0=40000M"}},
		"a claim's own, no one": {client{MemoryMiB: 0}, []string{threads + "10", memory + "0=1G"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, driver, dir := shared(t)
			tc.client.PipeDir = daemonDir(t, "gpu/pipe")
			spec := &oci.Spec{Process: &oci.Process{Env: []string{threads + "10", memory + "0=1G"}}}
			injectInto(t, dir, spec, shareOf(t, s, driver, "claim-1", 0, tc.client))
			got := slices.DeleteFunc(spec.Process.Env, func(v string) bool { return !strings.HasPrefix(v, threads) && !strings.HasPrefix(v, memory) })
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("limits (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPodsOwnVolumes checks what the claim's mounts replace: the pod's volume at the
// daemon's directory, and, where MPS keeps files there, the one at /dev/shm
// (docs/user/sharing.md).
func TestPodsOwnVolumes(t *testing.T) {
	for name, withShm := range map[string]bool{"driver 580 and later": false, "earlier drivers": true} {
		t.Run(name, func(t *testing.T) {
			s, driver, dir := shared(t)
			own := client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "gpu/pipe")}}
			want := map[string]string{"/tmp": "/pod/tmp", "/tmp/nvidia-mps": own.PipeDir, "/dev/shm": "/pod/shm"}
			if withShm {
				own.ShmDir = daemonDir(t, "gpu/shm")
				want["/dev/shm"] = own.ShmDir
			}
			spec := &oci.Spec{Mounts: []oci.Mount{
				{Destination: "/tmp/nvidia-mps", Source: "/pod/mps"}, {Destination: "/tmp", Source: "/pod/tmp"}, {Destination: "/dev/shm", Source: "/pod/shm"},
			}}
			injectInto(t, dir, spec, shareOf(t, s, driver, "claim-1", 0, own))
			got, order := map[string]string{}, []string{}
			for _, m := range spec.Mounts {
				if _, ours := want[m.Destination]; ours {
					got[m.Destination] = m.Source
					order = append(order, m.Destination)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" || len(order) != len(want) {
				t.Errorf("%d mounts (-want +got):\n%s", len(order), diff)
			}
			if slices.Index(order, "/tmp") > slices.Index(order, "/tmp/nvidia-mps") {
				t.Errorf("order %v: the pod's volume hides the daemon's directory", order)
			}
		})
	}
}

// TestTwoDaemonsInOneContainer checks that a container with two claims that have MPS gets
// both GPUs' nodes, and the directory and limits of the claim that comes last
// (docs/user/sharing.md).
func TestTwoDaemonsInOneContainer(t *testing.T) {
	s, driver, dir := shared(t)
	first, second := daemonDir(t, "first/pipe"), daemonDir(t, "second/pipe")
	ids := slices.Concat(
		shareOf(t, s, driver, "claim-1", 0, client{MPSDirs: gpu.MPSDirs{PipeDir: first}, ThreadPercentage: 25, MemoryMiB: 1024}),
		shareOf(t, s, driver, "claim-2", 1, client{MPSDirs: gpu.MPSDirs{PipeDir: second}, ThreadPercentage: 50, MemoryMiB: 2048}))
	spec := inject(t, dir, ids)
	for _, node := range []string{"/dev/nvidia0", "/dev/nvidia1"} {
		if !slices.Contains(paths(spec), node) {
			t.Errorf("device nodes %v lack %s", paths(spec), node)
		}
	}
	for _, want := range []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M"} {
		if !slices.Contains(spec.Process.Env, want) {
			t.Errorf("environment %v lacks %s", spec.Process.Env, want)
		}
	}
	var pipes []string
	for _, m := range spec.Mounts {
		if m.Destination == "/tmp/nvidia-mps" {
			pipes = append(pipes, m.Source)
		}
	}
	if diff := cmp.Diff([]string{second}, pipes); diff != "" {
		t.Errorf("mounts of MPS directories (-want +got):\n%s", diff)
	}
}

// shareOf writes the specification of a claim with a share of the n-th GPU, and returns the
// CDI devices of a container with that claim.
func shareOf(t *testing.T, s *cdi.Specs, driver *cdi.Driver, claimUID string, n int, c client) []string {
	t.Helper()
	ids, err := s.Write(given(t, driver, claimUID, prepared{Device: gpu.Share{Of: gpu.Whole{GPU: driver.GPUs[n].UUID}, Count: 4}, MPS: &c}))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, of := range ids {
		all = append(all, of...)
	}
	return all
}

// TestMountsAreOnlyTheDriversAndTheClaims checks that nothing is mounted into containers
// but read-only files of the driver, and the directories of the claim's own daemon.
func TestMountsAreOnlyTheDriversAndTheClaims(t *testing.T) {
	s, driver, dir := shared(t)
	pipe := daemonDir(t, "gpu/pipe")
	ids, err := s.Write(given(t, driver, "claim-1", prepared{
		Device: gpu.Share{Of: gpu.Whole{GPU: driver.GPUs[1].UUID}, Count: 4}, MPS: &client{MPSDirs: gpu.MPSDirs{PipeDir: pipe}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, of := range ids {
		for _, m := range inject(t, dir, of).Mounts {
			if !slices.Contains(m.Options, "ro") || !slices.Contains(m.Options, "nosuid") || !slices.Contains(m.Options, "nodev") {
				t.Errorf("%s at %s: %v", m.Source, m.Destination, m.Options)
			}
			if m.Source == pipe {
				continue
			}
			files++
			if !strings.HasPrefix(m.Source, driver.Root+"/") {
				t.Errorf("%s isn't the driver's, which is at %s", m.Source, driver.Root)
			}
		}
	}
	if files < 5 {
		t.Errorf("only %d files of the driver", files)
	}
}

func TestDaemonsDirectoryIsMissing(t *testing.T) {
	s, driver, _ := shared(t)
	there := daemonDir(t, "gpu/pipe")
	for name, dirs := range map[string]gpu.MPSDirs{
		"pipe":                 {PipeDir: "/run/tessera/mps/d/gone/pipe"},
		"shared memory":        {PipeDir: there, ShmDir: "/run/tessera/mps/d/gone/shm"},
		"pipe that isn't said": {},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Write(given(t, driver, "claim-1", prepared{Device: gpu.Share{Of: gpu.Whole{GPU: driver.GPUs[0].UUID}}, MPS: &client{MPSDirs: dirs}}))
			if name != "pipe that isn't said" && (err == nil || !strings.Contains(err.Error(), "/run/tessera/mps/d/gone")) || err == nil {
				t.Errorf("got %v, want an error that names the directory", err)
			}
			if claims, _ := s.Claims(); len(claims) != 0 {
				t.Errorf("a failed write left specifications of %v", claims)
			}
		})
	}
}
