package cdi

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Driver is the input for computing edits. All paths are paths of the host.
type Driver struct {
	// Version as NVML prints it.
	Version string
	// Root, DevRoot and ProcRoot are the root directories of the driver's files,
	// of its device nodes, and of its files in /proc.
	Root, DevRoot, ProcRoot string
	// LibraryDirs to search when the usual directories don't have the
	// libraries; usually empty.
	LibraryDirs []string
	// ProgramDirs to search for programs that aren't in the usual directories of
	// the root, the likeliest first.
	ProgramDirs []string
	// GPUs the node has.
	GPUs []gpu.GPU
	// Session identifies the session that the facts were read in; it is open as long
	// as the driver is set.
	Session *nvml.Session
}

// computed has the edits of one driver at one time.
type computed struct {
	common  specs.ContainerEdits
	file    []byte // the common specification
	devices map[gpu.UUID]device
}

// device has the edits for one GPU.
type device struct {
	edits specs.ContainerEdits
	node  string // its /dev/nvidiaN, path in the container
	err   error  // the reason if there are no edits
}

// SetDriver computes the edits of a driver and writes the common specification,
// so that a prepare has little to do. A nil driver means that there is none. If
// a GPU can't be described, only its own claims fail. Setting the same driver
// again reads the host again; until it is done, prepares use the previous
// edits.
func (s *Specs) SetDriver(d *Driver) error {
	s.computing.Lock()
	defer s.computing.Unlock()
	if d == nil {
		s.set(nil, nil)
		return nil
	}
	return s.compute(d)
}

// UpdateDriver is like SetDriver for a driver that was read after MinorsSet has returned
// since. If SetMinor was called in the meantime, it does nothing and returns false: device
// nodes may have other numbers than those that were read. Unless hostToo, it reads the host
// again only if the driver or its GPUs differ from those that were set: computed edits don't
// depend on a GPU's MIG mode or instances.
func (s *Specs) UpdateDriver(d *Driver, since int64, hostToo bool) (current bool, err error) {
	s.computing.Lock()
	defer s.computing.Unlock()
	if s.minorsSet.Load() != since {
		return false, nil
	}
	if before, edits := s.get(); !hostToo && before != nil && edits != nil && sameEdits(before, d) {
		s.set(d, edits)
		return true, nil
	}
	return true, s.compute(d)
}

// MinorsSet returns how often SetMinor was called.
func (s *Specs) MinorsSet() int64 { return s.minorsSet.Load() }

// SetMinor sets the number of a GPU's device node, which a switch of the MIG mode may have
// changed. It is called after the switch, before a claim gets the GPU or a part of it.
func (s *Specs) SetMinor(uuid gpu.UUID, minor int) error {
	s.computing.Lock()
	defer s.computing.Unlock()
	s.minorsSet.Add(1)
	before, _ := s.get()
	if before == nil {
		return nil // a driver that was read before isn't set any more
	}
	i := slices.IndexFunc(before.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
	if i < 0 || before.GPUs[i].Minor == minor {
		return nil
	}
	d := *before
	d.GPUs = slices.Clone(before.GPUs)
	d.GPUs[i].Minor = minor
	return s.compute(&d)
}

// sameEdits reports whether both drivers give the same edits, if the host has
// not changed.
func sameEdits(a, b *Driver) bool {
	return a.Version == b.Version && a.Root == b.Root && a.DevRoot == b.DevRoot &&
		a.Session == b.Session && slices.Equal(a.LibraryDirs, b.LibraryDirs) && slices.Equal(a.ProgramDirs, b.ProgramDirs) &&
		slices.EqualFunc(a.GPUs, b.GPUs, func(g, h gpu.GPU) bool { return g.UUID == h.UUID && g.Minor == h.Minor && g.PCI == h.PCI })
}

// compute computes the edits; the caller holds computing. After a failure there
// are no edits, and the next Write tries again.
func (s *Specs) compute(d *Driver) error {
	edits, err := compute(s.cfg, d)
	s.set(d, edits)
	if err != nil {
		return fmt.Errorf("compute container edits of driver %s at %s: %w", d.Version, d.Root, err)
	}
	return s.writeCommon(edits)
}

func (s *Specs) set(d *Driver, edits *computed) { s.now.Store(&current{d, edits}) }

func compute(cfg Config, d *Driver) (*computed, error) {
	if cfg.HookError != nil {
		return nil, cfg.HookError
	}
	c := &computed{devices: make(map[gpu.UUID]device, len(d.GPUs))}
	err := cfg.Host.Do(func() error {
		lib, err := nvcdi.New(options(cfg, d)...)
		if err != nil {
			return err
		}
		common, err := lib.GetCommonEdits()
		if err != nil {
			return err
		}
		c.common = *common.ContainerEdits
		dropGraphicsHook(&c.common)
		mergeSymlinkHooks(&c.common)
		mergeHooks(&c.common)
		addPrograms(&c.common, d.ProgramDirs)
		for _, g := range d.GPUs {
			c.devices[g.UUID] = describe(lib, d, g)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := c.encodeCommon(d); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *computed) encodeCommon(d *Driver) error {
	spec := &specs.Spec{
		Kind: gpu.CDICommonKind,
		// A device must edit something; the variable is in the edits of the
		// specification too. It keeps NVIDIA's runtime from injecting GPUs a second
		// time, by its own rules: all of them, if an image requests that. The device
		// nodes determine which GPUs and MIG devices a container sees.
		Devices: []specs.Device{{
			Name:           commonName,
			ContainerEdits: specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		}},
		ContainerEdits: c.common,
	}
	if err := relocate(spec, d.Root); err != nil {
		return err
	}
	c.common = spec.ContainerEdits
	if err := (&cdilib.ContainerEdits{ContainerEdits: &c.common}).Validate(); err != nil {
		return err
	}
	file, err := encode(spec)
	c.file = file
	return err
}

// describe computes the edits of one GPU.
func describe(lib nvcdi.Interface, d *Driver, g gpu.GPU) device {
	dev := device{node: fmt.Sprintf("/dev/nvidia%d", g.Minor)}
	found, err := lib.GetDeviceSpecsByID(string(g.UUID))
	if err != nil {
		dev.err = fmt.Errorf("describe GPU %s: %w", g.UUID, err)
		return dev
	}
	if len(found) == 0 {
		dev.err = fmt.Errorf("describe GPU %s: the driver lists no such GPU", g.UUID)
		return dev
	}
	spec := &specs.Spec{Devices: found[:1]}
	if dev.err = relocate(spec, d.Root); dev.err != nil {
		return dev
	}
	dev.edits = spec.Devices[0].ContainerEdits
	if len(dev.edits.DeviceNodes) > 0 {
		dev.err = (&cdilib.ContainerEdits{ContainerEdits: &dev.edits}).Validate()
	}
	return dev
}

// relocate removes the driver root from container paths: in a container the
// driver's files are at the same paths as on a host.
func relocate(spec *specs.Spec, driverRoot string) error {
	return root.New(
		root.WithRoot(driverRoot),
		root.WithTargetRoot("/"),
		root.WithRelativeTo("container"),
	).Transform(spec)
}
