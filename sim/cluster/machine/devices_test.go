package machine

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOwnDevices(t *testing.T) {
	m := startMachine(t, Spec{OwnDevices: true, Mounts: []Mount{{Path: "/", Options: []string{"ro"}}}})
	other := startMachine(t, Spec{OwnDevices: true})
	for _, step := range []struct{ what, script string }{
		{"nodes of the host", "echo x >/dev/null; head -c 1 /dev/zero; test -c /dev/full; test -d /dev/net; test -L /dev/stdin"},
		{"a new node", "mknod /dev/nvidia0 c 1 3 && echo x >/dev/nvidia0"},
		{"a terminal", "script -qec 'test -t 0' /dev/null </dev/null"},
		{"shared memory", "echo x >/dev/shm/x; test $(stat -c %a /dev/shm) = 1777"},
		{"a driver", "mkdir -p /proc/driver/nvidia/gpus; echo x >/proc/driver/nvidia/version"},
		{"a major number", "echo '195 nvidia' >>/proc/devices; grep -q 'mem$' /proc/devices; grep nvidia /proc/devices"},
		{"a module", "mkdir /sys/module/nvidia; echo 580 >/sys/module/nvidia/version"},
		{"a PCI device", "mkdir -p /sys/devices/pci0000:c0/0000:c1:00.0; echo 0x10de >/sys/devices/pci0000:c0/0000:c1:00.0/vendor"},
		{"a PCI device's link", "ln -s ../../../devices/pci0000:c0/0000:c1:00.0 /sys/bus/pci/devices/0000:c1:00.0; grep 10de /sys/bus/pci/devices/0000:c1:00.0/vendor"},
		{"devices of the host", "ls /sys/devices/system/cpu/cpu0 /sys/module/*/parameters"},
		{"a network device, gone", "test ! -e /sys/class/net/later"},
		{"a network device, now", "ip link add later type bridge; cat /sys/class/net/later/address"},
		{"the settings of the host", "cat /proc/sys/kernel/osrelease /proc/cpuinfo"},
	} {
		if out, err := m.try("set -e\n" + step.script); err != nil {
			t.Errorf("%s: %v: %s", step.what, err, out)
		}
	}
	const made = "/dev/nvidia0 /dev/shm/x /proc/driver/nvidia /sys/module/nvidia /sys/devices/pci0000:c0 /sys/bus/pci/devices/0000:c1:00.0"
	if out, _ := other.try("ls -d " + made + " 2>/dev/null; grep nvidia /proc/devices"); out != "" {
		t.Errorf("another machine sees %s", out)
	}
	for path := range strings.FieldsSeq(made) {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("the host sees %s", path)
		}
	}
	m.off()
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	if out, _ := m.try("ls -d " + made + " 2>/dev/null"); out != "" {
		t.Errorf("after a power cut there are %s", out)
	}
}

// Device nodes of the driver and links to them stay out.
func TestCopyDevices(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	from, to := t.TempDir(), t.TempDir()
	for _, dir := range []string{"mapper", "nvidia-caps", "char"} {
		if err := os.Mkdir(from+"/"+dir, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	for path, target := range map[string]string{"fd": "/proc/self/fd", "char/1:3": "../null", "char/195:0": "../nvidia0"} {
		if err := os.Symlink(target, from+"/"+path); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(from+"/file", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	mknod(t, from+"/mapper/control", 0o600)
	mknod(t, from+"/null", 0o666)
	mknod(t, from+"/nvidia0", 0o666)
	if err := copyDevices(from, to); err != nil {
		t.Fatal(err)
	}
	want := "dir drwxr-x--- char\nlink char/1:3 -> ../null\nlink fd -> /proc/self/fd\ndir drwxr-x--- mapper\n" +
		"node Dcrw------- 1:3 mapper/control\nnode Dcrw-rw-rw- 1:3 null\n"
	if got := list(t, to); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// mknod makes a node of the null device.
func mknod(t *testing.T, path string, mode uint32) {
	t.Helper()
	if err := unix.Mknod(path, unix.S_IFCHR|mode, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// list returns what is in a directory and below, a line each.
func list(t *testing.T, dir string) string {
	t.Helper()
	var lines strings.Builder
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		switch {
		case entry.IsDir():
			fmt.Fprintf(&lines, "dir %s %s\n", info.Mode(), path)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(dir + "/" + path)
			fmt.Fprintf(&lines, "link %s -> %s\n", path, target)
			return err
		default:
			device := info.Sys().(*syscall.Stat_t).Rdev
			fmt.Fprintf(&lines, "node %s %d:%d %s\n", info.Mode(), unix.Major(device), unix.Minor(device), path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines.String()
}
