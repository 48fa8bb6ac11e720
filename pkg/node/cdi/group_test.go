package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestDeviceNodesOfAGroup checks that the user of a container, who isn't root, is in the
// group of the device nodes where the driver is configured to give access to one group
// only (NVreg_DeviceFileGID, NVreg_DeviceFileMode).
func TestDeviceNodesOfAGroup(t *testing.T) {
	const group = 4711
	for _, name := range []string{"nvidia1", "nvidia2"} {
		path := filepath.Join(installed.Host, installed.Root, "dev", name)
		t.Cleanup(func() {
			if err := os.Chown(path, 0, 0); err != nil {
				t.Error(err)
			}
			if err := os.Chmod(path, 0o666); err != nil {
				t.Error(err)
			}
		})
		if err := os.Chown(path, 0, group); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o660); err != nil {
			t.Fatal(err)
		}
	}
	s, driver, dir := shared(t)
	whole := gpu.Whole{GPU: driver.GPUs[2].UUID}
	for name, tc := range map[string]struct {
		given prepared
		want  bool
	}{
		"whole":          {prepared{Device: whole}, true},
		"another's node": {prepared{Device: gpu.Whole{GPU: driver.GPUs[0].UUID}}, false},
		"replica":        {prepared{Device: gpu.Replica{GPU: whole.GPU, Count: 2}}, true},
		"partition":      {partition(t, driver, 1, 0), true},
		"share": {prepared{
			Device: gpu.Share{Of: whole, Count: 2}, MPS: &client{MPSDirs: gpu.MPSDirs{PipeDir: daemonDir(t, "gpu/pipe")}},
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			ids, err := s.Write(given(t, driver, "claim-1", tc.given))
			if err != nil {
				t.Fatal(err)
			}
			for _, of := range ids {
				spec := inject(t, dir, of)
				if got := spec.Process != nil && slices.Contains(spec.Process.User.AdditionalGids, group); got != tc.want {
					t.Errorf("the user of the container is in the group: %t, want %t", got, tc.want)
				}
			}
		})
	}
}
