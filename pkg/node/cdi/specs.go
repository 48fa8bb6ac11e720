package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	commonName  = "common"
	commonFile  = gpu.CDIVendor + "-driver.json"
	claimPrefix = gpu.CDIVendor + "-claim_"
	suffix      = ".json"
	tempSuffix  = ".tmp"
)

// ErrNoDriver is the error of Write before SetDriver has succeeded.
var ErrNoDriver = errors.New("this node has no working NVIDIA driver now; it is tried again when there is one")

// Config has the paths and functions that Specs needs.
type Config struct {
	// Dir is the CDI directory, as this process sees it. It is created when the
	// first file is written.
	Dir string
	// HookPath is nvidia-cdi-hook on the host.
	HookPath string
	// HookError is why container runtimes can't start it, nil if they can. No
	// specification is written then: its containers wouldn't start.
	HookError error
	Host      driverroot.Host
	// DevDir is the host's /dev, as this process sees it. Where the driver has its device nodes
	// there, those of the capabilities of partitions are made there. Empty: they aren't.
	DevDir string
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
	// minorsSet is how often SetMinor was called. It grows while computing is held.
	minorsSet atomic.Int64

	// now is the driver with its edits; nil: none was set.
	now atomic.Pointer[current]
}

// current is a driver, and its edits; nil: none.
type current struct {
	driver *Driver
	edits  *computed
}

// New returns the specifications in cfg.Dir, with no driver yet: claims can be
// listed and removed, not written.
func New(cfg Config) *Specs {
	return &Specs{cfg: cfg}
}

// Write writes the claim's specification and returns, for each of its devices,
// the CDI names that a container with the device needs, the device's own first: the
// kubelet identifies the device by it in the pod's status. Devices have the names of
// holding.Record.CDIDevices. When it returns, the file and the common one are
// complete, and every device node, library and directory that they name is on
// the host; otherwise the error names what is missing, and is a gpu.RefusedError if that is
// something of the device's GPU alone. Capabilities of a
// partition are read from the driver each time: a partition that was created
// again is another instance. Writing the same again is cheap and changes
// nothing.
func (s *Specs) Write(claim holding.Realized) (map[gpu.DeviceName][]string, error) {
	claimUID, devices := claim.ClaimUID, claim.CDIDevices()
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
		own, err := s.editsOf(driver, edits, claim, devices[name])
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

// current returns edits whose nodes and files for the devices all exist on the
// host. If some are stale or missing, it computes the edits once more: device
// nodes appear late on a fresh node, and a reloaded driver has different ones.
func (s *Specs) current(devices map[gpu.DeviceName]holding.Holding) (*Driver, *computed, error) {
	driver, edits := s.get()
	if driver == nil {
		return nil, nil, ErrNoDriver
	}
	if edits != nil && edits.check(s.cfg.Host, driver, devices) == nil {
		return driver, edits, nil
	}
	s.computing.Lock()
	defer s.computing.Unlock()
	if d, now := s.get(); d != nil && now == edits { // no other goroutine has computed them in the meantime
		if err := s.compute(d); err != nil {
			return nil, nil, err
		}
	}
	driver, edits = s.get()
	if driver == nil || edits == nil {
		return nil, nil, ErrNoDriver
	}
	return driver, edits, edits.check(s.cfg.Host, driver, devices)
}

func (s *Specs) get() (*Driver, *computed) {
	if now := s.now.Load(); now != nil {
		return now.driver, now.edits
	}
	return nil, nil
}

func sortedNames(devices map[gpu.DeviceName]holding.Holding) []gpu.DeviceName {
	return slices.Sorted(maps.Keys(devices))
}

// check returns an error if a path in the edits isn't on the host.
func (c *computed) check(h driverroot.Host, d *Driver, devices map[gpu.DeviceName]holding.Holding) error {
	return h.Do(func() error {
		if err := checkEdits(d, &c.common, "/dev/nvidiactl", "/dev/nvidia-uvm"); err != nil {
			return err
		}
		for _, name := range sortedNames(devices) {
			if err := c.checkDevice(d, devices[name]); err != nil {
				return fmt.Errorf("device %s: %w", name, refused(devices[name].Base(), err))
			}
		}
		return nil
	})
}

// refused returns the error as a refusal of the silicon.
func refused(silicon gpu.Device, err error) error {
	action := "be given to containers"
	if p, ok := silicon.(gpu.Partition); ok {
		action = fmt.Sprintf("give its %s partition to containers", p.Profile)
	}
	return &gpu.RefusedError{Silicon: []gpu.Device{silicon}, Action: action, Err: err}
}

// checkDevice returns an error if a path in a device's edits isn't on the host.
// The paths of partitions are read when their edits are computed. It runs inside
// Host.Do, where / is the host's root.
func (c *computed) checkDevice(d *Driver, g holding.Holding) error {
	dev, ok := c.devices[g.GPU]
	if !ok {
		return fmt.Errorf("the driver lists no GPU %s now", g.GPU)
	}
	if dev.err != nil {
		return dev.err
	}
	edits := dev.edits
	if g.Share != nil || g.Partition != (holding.Partition{}) {
		edits = dev.parent()
	}
	return checkEdits(d, &edits, dev.node)
}

// checkEdits returns an error if a required node isn't in the edits, or if the
// edits differ from the host. It runs inside Host.Do, where / is the host's root.
func checkEdits(d *Driver, edits *specs.ContainerEdits, required ...string) error {
	for _, path := range required {
		if !slices.ContainsFunc(edits.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == path }) {
			return missingNode(filepath.Join(d.DevRoot, path))
		}
	}
	for _, n := range edits.DeviceNodes {
		if err := checkNode(n); err != nil {
			return err
		}
	}
	for _, m := range edits.Mounts {
		if _, err := os.Lstat(m.HostPath); err != nil {
			return fmt.Errorf("driver file %s no longer exists on the host: %w", m.HostPath, err)
		}
	}
	return nil
}

func checkNode(n *specs.DeviceNode) error {
	path := n.HostPath
	if path == "" {
		path = n.Path
	}
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return missingNode(path)
	case err != nil:
		return fmt.Errorf("device node %s: %w", path, err)
	case st.Mode&unix.S_IFMT != unix.S_IFCHR:
		return fmt.Errorf("%s is not a character device: remove it from the host, and nvidia-modprobe -c0 creates the device node", path)
	case int64(unix.Major(st.Rdev)) != n.Major || int64(unix.Minor(st.Rdev)) != n.Minor:
		return fmt.Errorf("device node %s is %d:%d now, was %d:%d: the driver was loaded again just now, and the next try uses these numbers", path,
			unix.Major(st.Rdev), unix.Minor(st.Rdev), n.Major, n.Minor)
	}
	return nil
}

// missingNode returns an error that says how to create the node.
func missingNode(path string) error {
	how := "nvidia-modprobe -c0, or nvidia-smi, creates it"
	if strings.Contains(path, "uvm") {
		how = "nvidia-modprobe -u -c0 loads the module and creates it"
	}
	return fmt.Errorf("device node %s doesn't exist on the host: the driver may not be fully loaded yet (%s); the claim is prepared when the node exists", path, how)
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
func (s *Specs) editsOf(d *Driver, c *computed, claim holding.Realized, g holding.Holding) (specs.ContainerEdits, error) {
	edits, err := s.siliconEdits(d, c.devices[g.GPU], claim, g)
	daemon := claim.Daemon(g)
	if err != nil || daemon == "" {
		return edits, err
	}
	mps, err := s.mpsEdits(claim.Daemons[daemon], g.MPS.ThreadPercentage, claim.MemoryLimits(g))
	edits.Env, edits.Mounts = slices.Concat(edits.Env, mps.Env), slices.Concat(edits.Mounts, mps.Mounts)
	return edits, err
}

// siliconEdits returns the edits that give a container access to the GPU or the
// partition.
func (s *Specs) siliconEdits(d *Driver, dev device, claim holding.Realized, g holding.Holding) (specs.ContainerEdits, error) {
	if p, ok := g.Base().(gpu.Partition); ok {
		return s.partitionEdits(d, dev, p, claim.Instances[p])
	}
	if g.Share != nil {
		return dev.parent(), nil
	}
	return dev.edits, nil
}

// parent returns the edits of the GPU that a part of it needs: its device node, and
// its group if others may not open it. Other edits of the GPU are left out; DRM nodes,
// for example, would give access to the whole GPU.
func (d *device) parent() specs.ContainerEdits {
	var edits specs.ContainerEdits
	for _, n := range d.edits.DeviceNodes {
		if n.Path != d.node {
			continue
		}
		edits.DeviceNodes = append(edits.DeviceNodes, n)
		if n.GID != nil && slices.Contains(d.edits.AdditionalGIDs, *n.GID) {
			edits.AdditionalGIDs = append(edits.AdditionalGIDs, *n.GID)
		}
	}
	return edits
}

func (s *Specs) claimPath(claimUID string) string {
	return filepath.Join(s.cfg.Dir, claimPrefix+claimUID+suffix)
}

func (s *Specs) writeCommon(edits *computed) error {
	return writeFile(filepath.Join(s.cfg.Dir, commonFile), edits.file)
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
	_, err = tmp.Write(data)
	if err := files.Replace(path, tmp, errors.Join(err, tmp.Chmod(0o644))); err != nil {
		return fmt.Errorf("write CDI specification %s: %w", path, err)
	}
	return nil
}
