package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/holding"
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

// prepared is a device of a claim, with what was made for it.
type prepared struct {
	Device   gpu.Device
	Instance gpu.Instance
	MPS      *client
}

// client has the directories of a device's MPS daemon, and the device's limits.
type client struct {
	gpu.MPSDirs

	ThreadPercentage int
	MemoryMiB        int64
}

// given returns a claim with the devices.
func given(t testing.TB, d *cdi.Driver, claimUID string, all ...prepared) holding.Realized {
	t.Helper()
	claim := holding.Realized{
		Record:    holding.Record{ClaimUID: claimUID},
		Instances: map[gpu.Partition]gpu.Instance{}, Daemons: map[string]gpu.MPSDirs{},
	}
	for _, one := range all {
		g := holding.New(nameOf(t, d, one.Device), one.Device)
		if p, ok := gpu.Base(one.Device).(gpu.Partition); ok {
			claim.Instances[p] = one.Instance
		}
		if c := one.MPS; c != nil {
			g.MPS = &holding.MPS{ThreadPercentage: c.ThreadPercentage, MemoryMiB: c.MemoryMiB}
			claim.Daemons[claim.Daemon(g)] = c.MPSDirs
		}
		claim.Holdings = append(claim.Holdings, g)
	}
	return claim
}

// devices returns a claim with the GPUs of these indexes.
func devices(t testing.TB, d *cdi.Driver, claimUID string, indexes ...int) holding.Realized {
	t.Helper()
	var all []prepared
	for _, i := range indexes {
		all = append(all, prepared{Device: gpu.Whole{GPU: d.GPUs[i].UUID}})
	}
	return given(t, d, claimUID, all...)
}

func nameOf(t testing.TB, d *cdi.Driver, device gpu.Device) gpu.DeviceName {
	t.Helper()
	names, err := gpu.NewNames(d.GPUs)
	if err != nil {
		t.Fatal(err)
	}
	name, ok := names.Name(device)
	if !ok {
		t.Fatalf("%v has no name", device)
	}
	return name
}

// inject returns the spec of a container after the library of container
// runtimes has applied the CDI devices, on the host.
func inject(t *testing.T, dir string, ids []string) *oci.Spec {
	t.Helper()
	return injectInto(t, dir, &oci.Spec{}, ids)
}

// injectInto does the same with a container whose spec the pod has determined.
func injectInto(t *testing.T, dir string, spec *oci.Spec, ids []string) *oci.Spec {
	t.Helper()
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

// goldenClaim is the UID of the claim of golden files.
const goldenClaim = "3dc7fa15-ac4e-49dc-be51-c88a26dafa18"

// checkGolden writes the specification of goldenClaim and compares it with a file.
func checkGolden(t *testing.T, s *cdi.Specs, dir string, claim holding.Realized, golden string) {
	t.Helper()
	if _, err := s.Write(claim); err != nil {
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
