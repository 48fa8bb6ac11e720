package cdi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// partitionEdits returns the node of the GPU and the two capabilities that a
// process needs to use a GPU in MIG mode: one of the GPU instance, one of its
// compute instance.
func (s *Specs) partitionEdits(d *Driver, dev device, p gpu.Partition, i gpu.Instance) (specs.ContainerEdits, error) {
	if i.UUID == "" || i.ComputeInstanceID == gpu.NoComputeInstance {
		return specs.ContainerEdits{}, refused(p, fmt.Errorf("GPU instance %d of GPU %s is not a MIG device: it has no compute instance that takes all of it",
			i.GPUInstanceID, p.GPU))
	}
	minor, err := minorOf(d, p.GPU)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	major, err := s.capabilityMajor(d)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	edits := dev.parent()
	instance := fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", minor, i.GPUInstanceID)
	for _, access := range []string{
		filepath.Join(instance, "access"),
		filepath.Join(instance, fmt.Sprintf("ci%d", i.ComputeInstanceID), "access"),
	} {
		node, err := s.capability(filepath.Join(d.ProcRoot, access), major)
		if err != nil {
			return specs.ContainerEdits{}, refused(p, err)
		}
		if d.DevRoot == "/" && s.cfg.DevDir != "" {
			// If it can't be made, pods without a user namespace work all the same.
			_ = makeNode(s.cfg.DevDir, node)
		}
		edits.DeviceNodes = append(edits.DeviceNodes, node)
	}
	return edits, nil
}

func minorOf(d *Driver, uuid gpu.UUID) (int, error) {
	for _, g := range d.GPUs {
		if g.UUID == uuid {
			return g.Minor, nil
		}
	}
	return 0, fmt.Errorf("the driver lists no GPU %s now", uuid)
}

// capabilityMajor returns the major number of the devices for capabilities,
// which differs each time the driver is loaded.
func (s *Specs) capabilityMajor(d *Driver) (int64, error) {
	const name = "nvidia-caps"
	path := filepath.Join(d.ProcRoot, "proc/devices")
	data, err := os.ReadFile(s.cfg.Host.Path(path))
	if err != nil {
		return 0, fmt.Errorf("find the device number of %s: %w", name, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		if f := strings.Fields(lines.Text()); len(f) == 2 && f[1] == name {
			return number(path, f[0])
		}
	}
	return 0, fmt.Errorf("%s of the host lists no %s: the driver's kernel module is not loaded, or has no MIG", path, name)
}

// capability returns the device node that gives access to a capability, as the
// driver lists it. The node has its numbers, so that the runtime can create it
// in the container even if it doesn't exist on the host.
func (s *Specs) capability(path string, major int64) (*specs.DeviceNode, error) {
	data, err := os.ReadFile(s.cfg.Host.Path(path))
	if err != nil {
		return nil, fmt.Errorf("find the capability of a MIG instance that was just created: %w", err)
	}
	minor, err := field(path, data, "DeviceFileMinor")
	if err != nil {
		return nil, err
	}
	bits, err := field(path, data, "DeviceFileMode")
	if err != nil {
		return nil, err
	}
	mode := fs.FileMode(bits).Perm()
	return &specs.DeviceNode{
		Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), Type: "c", Major: major, Minor: minor,
		FileMode: &mode, Permissions: "rw",
	}, nil
}

// makeNode makes the device node on the host, as nvidia-modprobe does. Container runtimes make
// their own, but not in user namespaces: there they mount the host's.
func makeNode(devDir string, node *specs.DeviceNode) error {
	path := filepath.Join(devDir, strings.TrimPrefix(node.Path, "/dev/"))
	mode, number := unix.S_IFCHR|uint32(*node.FileMode), unix.Mkdev(uint32(node.Major), uint32(node.Minor))
	var now unix.Stat_t
	if err := unix.Lstat(path, &now); err == nil {
		if now.Mode == mode && now.Rdev == number {
			return nil
		}
		if err := os.Remove(path); err != nil { // an earlier load of the driver had other numbers
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := unix.Mknod(path, mode, int(number)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the device node %s: %w", path, err)
	}
	return os.Chmod(path, *node.FileMode) // in spite of the umask
}

// field reads a line such as "DeviceFileMinor: 5".
func field(path string, data []byte, name string) (int64, error) {
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			return number(path, strings.TrimSpace(value))
		}
	}
	return 0, fmt.Errorf("%s of the host has no %s", path, name)
}

func number(path, text string) (int64, error) {
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%s of the host: %w", path, err)
	}
	return int64(n), nil
}
