package cdi

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// FuzzCapability reads any text as the driver's files about a capability. The node has
// numbers that a kernel can have, or there is an error.
func FuzzCapability(f *testing.F) {
	f.Add("Character devices:\n195 nvidia\n237 nvidia-caps\n\nBlock devices:\n  8 sd\n", "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
	f.Add("-1 nvidia-caps\n", "DeviceFileMinor: -7\nDeviceFileMode: -1\n")
	f.Fuzz(func(t *testing.T, devices, access string) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "proc"), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{"proc/devices": devices, "access": access} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s := New(Config{Host: driverroot.NewHost("/")})
		major, err := s.capabilityMajor(&Driver{ProcRoot: dir})
		if err != nil {
			return
		}
		node, err := s.capability(filepath.Join(dir, "access"), major)
		if err != nil {
			return
		}
		if node.Major < 0 || node.Minor < 0 || filepath.Dir(node.Path) != "/dev/nvidia-caps" {
			t.Errorf("node %+v", *node)
		}
	})
}
