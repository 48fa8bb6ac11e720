package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
)

// computer is the machine below a plugin: GPUs that forget at a reboot, a disk, and a
// supervisor of MPS daemons.
type computer struct {
	host    driverroot.Host
	root    driverroot.Root
	machine *nvmlsim.Machine
	hw      *nvmltest.Simulated
	daemons *nodetest.Daemons
	boots   int
	// dir has the plugin's own and the CDI directory, at the same path for programs and for
	// the host. disk, if the computer has one of the test's, is mounted there.
	dir  string
	disk *filestest.Disk
}

// newComputer returns the installed driver's computer with a disk of the test's.
func newComputer(t *testing.T) *computer {
	t.Helper()
	c := newDisklessComputer(t)
	c.disk = filestest.New(t, c.host.Path(c.dir), nil)
	return c
}

// newDisklessComputer returns the installed driver's computer, freshly booted. Tests that
// use it must not run at the same time.
func newDisklessComputer(t *testing.T) *computer {
	t.Helper()
	c := &computer{host: driverroot.NewHost(installed.Host)}
	var err error
	if c.root, err = driverroot.Find(c.host, ""); err != nil {
		t.Fatal(err)
	}
	if c.machine, err = installed.Hardware(); err != nil {
		t.Fatal(err)
	}
	c.hw = nvmltest.OpenSimulated(c.machine)
	outside, err := os.MkdirTemp("", "disk") //nolint:usetesting // the name is the host's, too
	if err != nil {
		t.Fatal(err)
	}
	c.dir = filepath.Join(outside, "d")
	for _, dir := range []string{c.dir, "/proc", "/sys/fs/cgroup"} { // no container runs there
		if err := os.MkdirAll(c.host.Path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink(c.host.Path(c.dir), c.dir)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.reboot(t)
		if err := errors.Join(c.hw.Close(), c.machine.Close(), os.RemoveAll(outside), os.RemoveAll(c.host.Path(outside))); err != nil {
			t.Error(err)
		}
	})
	c.reboot(t)
	return c
}

// reboot ends everything that isn't on a disk.
func (c *computer) reboot(t *testing.T) {
	t.Helper()
	c.boots++
	run := filepath.Join("/run/mps", t.Name())
	c.daemons = nodetest.NewDaemons(c.host.Path("/"), filepath.Join(run, "d"))
	if err := errors.Join(c.machine.Reboot(), os.RemoveAll(c.host.Path(run))); err != nil {
		t.Fatal(err)
	}
}

func (c *computer) bootID() string { return fmt.Sprintf("boot-%d", c.boots) }
func (c *computer) data() string   { return filepath.Join(c.dir, "data") }
func (c *computer) cdi() string    { return filepath.Join(c.dir, "cdi") }

func (c *computer) smi(_ context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	code := smi.Run(args, &out, func() (*nvmlsim.Machine, error) { return nvmlsim.Open(c.machine.StatePath()) })
	if code != 0 {
		return out.String(), fmt.Errorf("exit status %d", code)
	}
	return out.String(), nil
}

// onDisk is a plugin without a kubelet and an API server, whose files are on the
// computer's disk.
type onDisk struct {
	*hardwareParts
	ctx  context.Context
	dir  *datadir.Dir
	ends []func() error
	// unwatch ends the watch of the supervisor's daemons.
	unwatch func()
}

// watchDaemons does what of sharing.Manager's Run the other methods need.
func (p *onDisk) watchDaemons() {
	ctx, cancel := context.WithCancel(p.ctx)
	ended := make(chan struct{})
	go func() { defer close(ended); p.sharing.Watch(ctx) }()
	p.unwatch = func() { cancel(); <-ended }
}

// start does the steps of a start of the plugin up to its registration.
func (c *computer) start() (_ *onDisk, err error) {
	ctx := klog.NewContext(context.Background(), klog.Logger{}) // thousands of starts say the same
	p := &onDisk{ctx: ctx, hardwareParts: &hardwareParts{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.end())
		}
	}()
	if p.dir, err = datadir.Lock(ctx, c.data()); err != nil {
		return p, err
	}
	p.ends = append(p.ends, p.dir.Close)
	hook, _, err := p.dir.InstallHook("/bin/true", c.host)
	if err != nil {
		return p, err
	}
	if p.journal, err = journal.Open(p.dir.Journal(), nil); err != nil {
		return p, err
	}
	p.ends = append(p.ends, p.journal.Close)
	marks, err := containers.New(p.dir.Marks(), c.host)
	if err != nil {
		return p, err
	}
	specs := cdi.New(cdi.Config{Dir: c.cdi(), HookPath: hook, Host: c.host, Mark: marks.Mark})
	if err := errors.Join(p.dir.Check(specs), specs.Tidy(), marks.Recover()); err != nil {
		return p, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- marks.Run(ctx) }()
	p.ends = append(p.ends, func() error { cancel(); return <-ended })
	if err := c.wire(p, specs, marks); err != nil {
		return p, err
	}
	return p, errors.Join(p.sharing.Recover(p.ctx), p.partitions.Recover(p.ctx), p.preparer.Recover(p.ctx))
}

// wire builds the parts that have to do with hardware, and gives it to them.
func (c *computer) wire(p *onDisk, specs *cdi.Specs, marks *containers.Containers) error {
	known := facts.New("node-0")
	known.SawNode(true, "")
	gpus, err := c.hw.GPUs()
	if err != nil {
		return err
	}
	version, err := c.hw.Driver()
	if err != nil {
		return err
	}
	known.Found(gpu.Node{Name: "node-0", GPUs: gpus})
	p.partitions = partition.New(partition.Config{Journal: p.journal, Specs: specs, Facts: known, BootID: c.bootID()})
	prepared, err := specs.Claims()
	if err != nil {
		return err
	}
	p.sharing = sharing.New(sharing.Config{
		Journal: p.journal, BootID: c.bootID(), Prepared: prepared, Daemons: c.daemons, ExclusiveProcess: true,
	})
	w, err := newWriters(known)
	if err != nil {
		return err
	}
	server := claimReader(p.claimInUse)
	p.preparer = prepare.New(prepare.Config{
		Journal: p.journal, Facts: known, Containers: marks, Partitions: p.partitions, Sharing: p.sharing, Specs: specs,
		Events: w.events, Statuses: w.statuses, Reporter: w.reporter, Cluster: server, Version: server,
		Driver: gpu.DriverName, Pool: "node-0", BootID: c.bootID(),
	})
	writing, stop := context.WithCancel(p.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(writing)
	}()
	p.ends = append(p.ends, func() error { stop(); <-ended; return nil })
	p.partitions.SetHardware(c.hw)
	p.sharing.SetHardware(c.hw, c.smi)
	p.sharing.SetTimeSlices(map[gpu.UUID]string{gpus[1].UUID: "Long"})
	p.watchDaemons()
	p.ends = append(p.ends, func() error {
		p.unwatch()
		p.sharing.SetHardware(nil, nil)
		p.partitions.SetHardware(nil)
		return nil
	})
	return specs.SetDriver(&cdi.Driver{
		Version: version.Version, Root: c.root.Path, DevRoot: c.root.DevRoot, ProcRoot: c.root.ProcRoot, GPUs: gpus, Session: c.hw.Session,
	})
}

// end ends the plugin as a crash does: nothing is tidied up.
func (p *onDisk) end() error {
	var errs []error
	for len(p.ends) > 0 {
		errs = append(errs, p.ends[len(p.ends)-1]())
		p.ends = p.ends[:len(p.ends)-1]
	}
	return errors.Join(errs...)
}

// claimInUse is the API server's view of a claim: its pod uses all that it was prepared with.
func (p *onDisk) claimInUse(_ context.Context, name string) (*resourceapi.ResourceClaim, error) {
	r, _ := p.journal.Claim(name)
	var devices []gpu.DeviceName
	for _, h := range r.Holdings {
		devices = append(devices, h.Device)
	}
	return inUse(claimOf(name, devices...)), nil
}

// leaveHost ends everything that no claim needs.
func (p *onDisk) leaveHost() error {
	p.unwatch()
	defer p.watchDaemons()
	return errors.Join(p.sharing.LeaveHost(p.ctx), p.partitions.LeaveHost(p.ctx))
}

func (p *onDisk) prepare(c *resourceapi.ResourceClaim) error {
	_, err := p.preparer.Prepare(p.ctx, c)
	return err
}

func (p *onDisk) unprepare(c *resourceapi.ResourceClaim) error {
	return p.preparer.Unprepare(p.ctx, kubeletplugin.NamespacedObject{UID: c.UID})
}

// refuses checks that the claim's devices aren't prepared for another claim.
func (p *onDisk) refuses(c *resourceapi.ResourceClaim) error {
	rival := c.DeepCopy()
	rival.Name, rival.UID = "rival", "rival"
	if err := p.prepare(rival); err == nil {
		return fmt.Errorf("the devices of %s were prepared for another claim, too", c.Name)
	}
	if p.names()[rival.Name] {
		return fmt.Errorf("a claim that was refused the devices of %s has a record", c.Name)
	}
	return nil
}

// names of the prepared claims.
func (p *onDisk) names() map[string]bool {
	names := map[string]bool{}
	for _, r := range p.journal.Claims().Readable() {
		names[r.ClaimUID] = true
	}
	return names
}

// unread are the files that the plugin has renamed.
func (p *onDisk) unread() []string {
	var paths []string
	for _, u := range p.journal.Claims().Unreadable() {
		paths = append(paths, u.File)
	}
	for _, u := range append(append(p.journal.UnreadableGPUs(), p.journal.UnreadableSettings()...), p.journal.UnreadableHealth()...) {
		paths = append(paths, u.Path)
	}
	return paths
}

// toExamine is the computer for the doctor, without what has to be read of its hardware and
// MPS daemons.
func (c *computer) toExamine() doctor.Node {
	return doctor.Node{
		Journal: datadir.JournalOf(c.data()), CDI: c.cdi(), Host: c.host, BootID: c.bootID(),
		Capabilities: filepath.Join(c.root.ProcRoot, "proc/driver/nvidia/capabilities"),
	}
}

// sharingIn returns the daemons as the doctor sees them. dir is the host's path of their directories.
func sharingIn(host driverroot.Host, dir string, listed mps.Report, away error) *doctor.Sharing {
	return doctor.SharingOf(listed, away, mps.RunDir(filepath.Dir(host.Path(dir))))
}

// doctor returns the doctor's findings, but those of the checks that are excepted.
func (c *computer) doctor(ctx context.Context, except ...string) error {
	n := c.toExamine()
	var err error
	if n.Hardware, err = doctor.ReadHardware(ctx, c.hw.Session, c.smi); err != nil {
		return err
	}
	listed, away := c.daemons.List(ctx)
	n.Sharing = sharingIn(c.host, c.daemons.Dir, listed, away)
	r, err := doctor.Check(n)
	var found []string
	for _, f := range r.Findings {
		if !slices.Contains(except, f.Check) {
			found = append(found, fmt.Sprintf("%s %s: %s", f.Level, f.Check, f.What))
		}
	}
	if err == nil && found != nil {
		err = fmt.Errorf("the doctor finds %s", strings.Join(found, "; "))
	}
	return err
}

// checkFiles checks that only files are on the disk that a plugin without claims has.
func (c *computer) checkFiles() error {
	var left []string
	for path, e := range c.disk.Contents() {
		switch {
		case e.Mode.IsDir():
		case path == "data/lock", path == "data/bin/nvidia-cdi-hook", filepath.Dir(path) == "cdi":
		default:
			left = append(left, path)
		}
	}
	if left != nil {
		return fmt.Errorf("left over: %v", slices.Sorted(slices.Values(left)))
	}
	return nil
}
