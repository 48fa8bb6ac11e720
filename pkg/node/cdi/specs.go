package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	commonName  = "common"
	commonFile  = gpu.CDIVendor + "-driver.json"
	claimPrefix = gpu.CDIVendor + "-claim_"
	suffix      = ".json"
	tempSuffix  = ".tmp"
)

// ErrNoDriver is the error of Write before SetDriver has succeeded.
var ErrNoDriver = errors.New("this node has no working NVIDIA driver now")

// Host gives access to paths of the node.
type Host interface {
	// Path returns the path for this process of a path of the host.
	Path(hostPath string) string
	// Do calls f with the host's root directory.
	Do(f func() error) error
}

// Config has the paths and functions that Specs needs.
type Config struct {
	// Dir is the CDI directory, as this process sees it. It is created when the
	// first file is written.
	Dir string
	// HookPath is nvidia-cdi-hook on the host.
	HookPath string
	Host     Host
	// Mark, which may be nil, creates a file for a claim, and returns its path on the
	// host and its mount path in the claim's containers (containers.Containers). It
	// is idempotent.
	Mark func(claimUID string) (hostPath, containerPath string, err error)
}

// Specs are the specifications in the CDI directory that belong to this
// driver. Its methods may be called concurrently, for one claim by one caller
// at a time.
type Specs struct {
	cfg Config

	// computing is held while edits are computed and set, so that it is done only
	// once if several goroutines find them stale.
	computing sync.Mutex

	mu     sync.Mutex
	driver *Driver   // nil: none
	edits  *computed // nil: none
}

// New returns the specifications in cfg.Dir, with no driver yet: claims can be
// listed and removed, not written.
func New(cfg Config) *Specs {
	return &Specs{cfg: cfg}
}

// Write writes the claim's specification and returns, for each of its devices,
// the CDI names that a container with the device needs, the device's own first: the
// kubelet identifies the device by it in the pod's status. Devices have names that
// are unique in the claim. When it returns, the file and the common one are
// complete, and every device node, library and directory that they name is on
// the host; otherwise the error names what is missing. Capabilities of a
// partition are read from the driver each time: a partition that was created
// again is another instance. Writing the same again is cheap and changes
// nothing.
func (s *Specs) Write(claimUID string, devices map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName][]string, error) {
	if err := parser.ValidateDeviceName(claimUID); err != nil {
		return nil, fmt.Errorf("write CDI specification of claim %q: %w", claimUID, err)
	}
	driver, edits, err := s.current(devices)
	if err != nil {
		return nil, fmt.Errorf("write CDI specification of claim %s: %w", claimUID, err)
	}
	spec := &specs.Spec{Kind: gpu.CDIClaimKind}
	if spec.ContainerEdits, err = s.markEdits(claimUID); err != nil {
		return nil, fmt.Errorf("write CDI specification of claim %s: %w", claimUID, err)
	}
	ids := make(map[gpu.DeviceName][]string, len(devices))
	for _, name := range sortedNames(devices) {
		device := claimUID + "-" + string(name)
		own, err := s.editsOf(driver, edits, devices[name])
		if err != nil {
			return nil, fmt.Errorf("write CDI specification of claim %s: device %s: %w", claimUID, name, err)
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: device, ContainerEdits: own})
		ids[name] = []string{gpu.CDIClaimKind + "=" + device, gpu.CDICommonKind + "=" + commonName}
	}
	if err := s.writeCommon(edits); err != nil {
		return nil, err
	}
	if err := writeSpec(s.claimPath(claimUID), spec); err != nil {
		return nil, err
	}
	return ids, nil
}

// markEdits returns the edits that mount the claim's mark, once in each
// container with any of the claim's devices.
func (s *Specs) markEdits(claimUID string) (specs.ContainerEdits, error) {
	if s.cfg.Mark == nil {
		return specs.ContainerEdits{}, nil
	}
	host, container, err := s.cfg.Mark(claimUID)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	return specs.ContainerEdits{Mounts: []*specs.Mount{{
		HostPath: host, ContainerPath: container, Options: []string{"ro", "bind", "nosuid", "nodev", "noexec"},
	}}}, nil
}

// editsOf returns the edits of one device of a claim.
func (s *Specs) editsOf(d *Driver, c *computed, given gpu.Prepared) (specs.ContainerEdits, error) {
	edits, err := s.siliconEdits(d, c.devices[given.Device.Parent()], given)
	if err != nil || given.MPS == nil {
		return edits, err
	}
	mps, err := s.mpsEdits(given.MPS)
	edits.Env, edits.Mounts = slices.Concat(edits.Env, mps.Env), slices.Concat(edits.Mounts, mps.Mounts)
	return edits, err
}

// siliconEdits returns the edits that give a container access to the GPU or the
// partition.
func (s *Specs) siliconEdits(d *Driver, dev device, given gpu.Prepared) (specs.ContainerEdits, error) {
	switch of := given.Device.(type) {
	case gpu.Whole, gpu.Replica:
		return dev.edits, nil
	case gpu.Partition:
		return s.partitionEdits(d, dev, given)
	case gpu.Share:
		if _, ok := of.Of.(gpu.Partition); ok {
			return s.partitionEdits(d, dev, given)
		}
		return dev.parent(), nil
	default:
		return specs.ContainerEdits{}, fmt.Errorf("%T is an unknown kind of device", given.Device)
	}
}

// parent returns the edits of the GPU that a part of it needs: its device node.
// Other edits of the GPU are left out; DRM nodes, for example, would give
// access to the whole GPU.
func (d *device) parent() specs.ContainerEdits {
	return specs.ContainerEdits{
		DeviceNodes: slices.DeleteFunc(slices.Clone(d.edits.DeviceNodes), func(n *specs.DeviceNode) bool { return n.Path != d.node }),
	}
}

// Remove deletes the claim's specification. It succeeds if there is none.
func (s *Specs) Remove(claimUID string) error {
	if err := parser.ValidateDeviceName(claimUID); err != nil {
		return fmt.Errorf("remove CDI specification of claim %q: %w", claimUID, err)
	}
	return removeFile(s.claimPath(claimUID))
}

// Claims lists the UIDs of the claims that have a specification on disk.
func (s *Specs) Claims() ([]string, error) {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list CDI specifications: %w", err)
	}
	var claims []string
	for _, e := range entries {
		uid, isClaim := strings.CutPrefix(e.Name(), claimPrefix)
		uid, isSpec := strings.CutSuffix(uid, suffix)
		if isClaim && isSpec {
			claims = append(claims, uid)
		}
	}
	return claims, nil
}

// Tidy removes temporary files of interrupted writes. It is for the start,
// while nothing is written.
func (s *Specs) Tidy() error {
	left, err := filepath.Glob(filepath.Join(s.cfg.Dir, gpu.CDIVendor+"-*"+tempSuffix))
	if err != nil {
		return fmt.Errorf("list temporary CDI files: %w", err)
	}
	for _, path := range left {
		err = errors.Join(err, removeFile(path))
	}
	return err
}

// RemoveCommon deletes the common specification, for a host that this driver
// leaves. Containers that use it can't be restarted afterwards.
func (s *Specs) RemoveCommon() error {
	return removeFile(filepath.Join(s.cfg.Dir, commonFile))
}

func (s *Specs) claimPath(claimUID string) string {
	return filepath.Join(s.cfg.Dir, claimPrefix+claimUID+suffix)
}

func removeFile(path string) error {
	if err := files.RemoveIfThere(path); err != nil {
		return fmt.Errorf("remove CDI specification: %w", err)
	}
	return nil
}

// HookInUse returns the path of the hook program in the common specification on
// disk, "" where there is none or it names no hook.
func (s *Specs) HookInUse() (string, error) {
	data, err := os.ReadFile(filepath.Join(s.cfg.Dir, commonFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the common CDI specification: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return "", nil //nolint:nilerr // it will be written again
	}
	for _, h := range spec.ContainerEdits.Hooks {
		return h.Path, nil
	}
	return "", nil
}

// encode sets the lowest version that has all used fields, so that older
// container runtimes can read the specification too.
func encode(spec *specs.Spec) ([]byte, error) {
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("version of CDI specification %s: %w", spec.Kind, err)
	}
	spec.Version = version
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode CDI specification %s: %w", spec.Kind, err)
	}
	return append(data, '\n'), nil
}

// writeSpec writes the file unless it already has this content: each change
// makes container runtimes read the directory again.
func writeSpec(path string, spec *specs.Spec) error {
	data, err := encode(spec)
	if err != nil {
		return err
	}
	return writeFile(path, data)
}

func writeFile(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create CDI directory: %w", err)
	}
	tmp, err := os.CreateTemp(dir, filepath.Base(path)+".*"+tempSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		// dir exists, because MkdirAll succeeded, but no file can be created in it.
		return fmt.Errorf("write CDI specification: %w: the host's directory was removed while it was mounted here; restart the plugin's pod, and empty the directory instead of removing it", err)
	}
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	err = files.Replace(path, tmp, func(f *os.File) error {
		_, err := f.Write(data)
		return errors.Join(err, f.Chmod(0o644))
	})
	if err != nil {
		return fmt.Errorf("write CDI specification %s: %w", path, err)
	}
	return nil
}
