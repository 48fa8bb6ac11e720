package cdi

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// A driver that is loaded again has other device numbers.
func TestCapabilityNodeOnTheHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dev, mode := t.TempDir(), fs.FileMode(0o444)
	path := filepath.Join(dev, "nvidia-caps/nvidia-cap102")
	for _, major := range []int64{509, 509, 241} {
		if err := makeNode(dev, &specs.DeviceNode{Path: "/dev/nvidia-caps/nvidia-cap102", Type: "c", Major: major, Minor: 102, FileMode: &mode}); err != nil {
			t.Fatal(err)
		}
		var got unix.Stat_t
		if err := unix.Lstat(path, &got); err != nil {
			t.Fatal(err)
		}
		if got.Mode != unix.S_IFCHR|0o444 || int64(unix.Major(got.Rdev)) != major || unix.Minor(got.Rdev) != 102 {
			t.Errorf("%s has mode %o and numbers %d:%d, want those of %d:102", path, got.Mode, unix.Major(got.Rdev), unix.Minor(got.Rdev), major)
		}
	}
}
