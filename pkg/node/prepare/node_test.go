package prepare_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
)

// The host on which the driver is installed, for all nodes: what differs between them is in
// directories below shared, which have the same path here and on the host.
var (
	installed nodetest.Driver
	host      driverroot.Host
	root      driverroot.Root
	shared    string
	nodes     atomic.Int32 // for directories that differ
)

// hookPath is where the host has the hook program.
const hookPath = "/usr/bin/nvidia-cdi-hook"

func TestMain(m *testing.M) {
	// Most of the time after a crash is the two seconds in which clients of a daemon that was
	// started again find it.
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	outside, err := os.MkdirTemp("", "prepare")
	if err != nil {
		panic(err)
	}
	code := nodetest.Run(m, "8xh100-80gb", func(d nodetest.Driver) {
		if err := setUp(d, outside); err != nil {
			panic(err)
		}
	})
	if err := os.RemoveAll(outside); err != nil {
		panic(err)
	}
	os.Exit(code)
}

func setUp(d nodetest.Driver, outside string) (err error) {
	installed, host, shared = d, driverroot.NewHost(d.Host), filepath.Join(outside, "d")
	if root, err = driverroot.Find(host, ""); err != nil {
		return err
	}
	for _, dir := range []string{shared, filepath.Dir(hookPath)} {
		if err := os.MkdirAll(host.Path(dir), 0o755); err != nil {
			return err
		}
	}
	gpu0, gpu1 = string(gpuName(0)), string(gpuName(1))
	return errors.Join(os.Symlink(host.Path(shared), shared), os.WriteFile(host.Path(hookPath), nil, 0o755))
}

// gpu0 and gpu1 are the names of the first two GPUs.
var gpu0, gpu1 string

// uuidOf is the UUID of each node's n-th GPU.
func uuidOf(n int) gpu.UUID { return gpu.UUID(installed.Machine.GPUs[n].UUID) }

// gpuName is the name of each node's n-th GPU.
func gpuName(n int) gpu.DeviceName { return installed.Names()[n] }

// partitionName is the name of a partition of the n-th GPU: profile 1g.10gb at 0 to 6, 3g.40gb
// at 0 or 4, 7g.80gb at 0.
func partitionName(n int, profile string, start int) gpu.DeviceName {
	return gpuName(n) + gpu.DeviceName(fmt.Sprintf("-mig-%s-%d", strings.ReplaceAll(profile, ".", ""), start))
}

// node is what outlives a plugin: a simulated machine, the MPS supervisor's daemons, and the
// plugin's directories.
type node struct {
	// root is the directory with the host's /proc and /sys. The others are the plugin's.
	root, journal, cdi, marks string
	bootID                    string
	machine                   *nvmlsim.Machine
	sim                       *nvmltest.Simulated
	gpus                      []gpu.GPU // as the plugin reads them first
	daemons                   *nodetest.Daemons
	server                    *server
	// working, which may be nil, is called before a partition is created or destroyed; an
	// error is the hardware's answer.
	working func(gpu.Partition) error
	// step of the last plugin, which may be nil.
	step func(string)
}

// newNode makes a node with the first of the installed GPUs.
func newNode(t testing.TB, gpus int) *node {
	t.Helper()
	d := installed.Machine
	d.GPUs = d.GPUs[:gpus]
	return newNodeOf(t, d)
}

func newNodeOf(t testing.TB, d nvmlsim.Description) *node {
	t.Helper()
	state, err := nvmlsim.NewState(d)
	if err != nil {
		t.Fatal(err)
	}
	n := boot(t, state)
	if n.gpus, err = n.sim.GPUs(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{n.journal, n.cdi, n.marks, filepath.Join(n.root, "proc"), filepath.Join(n.root, "sys/fs/cgroup")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// boot opens a machine in this state, beside empty directories.
func boot(t testing.TB, state nvmlsim.State) *node {
	t.Helper()
	dir := filepath.Join(shared, fmt.Sprint(nodes.Add(1)))
	n := &node{
		server: newServer(),
		root:   filepath.Join(dir, "root"), journal: filepath.Join(dir, "journal"), cdi: filepath.Join(dir, "cdi"), marks: filepath.Join(dir, "marks"),
		daemons: nodetest.NewDaemons(host.Path("/"), filepath.Join(dir, "mps/d")),
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "state")
	store, err := nvmlsim.CreateStore(path, state)
	if err != nil {
		t.Fatal(err)
	}
	if n.machine, err = nvmlsim.Open(path); err != nil {
		t.Fatal(err)
	}
	n.sim = nvmltest.OpenSimulated(n.machine)
	t.Cleanup(func() {
		if err := errors.Join(n.sim.Close(), n.machine.Close(), store.Close(), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	return n
}

// crash returns the node as it would be found if everything had stopped now: a copy, with the
// partitions, settings and daemons there are.
func (n *node) crash(t testing.TB) *node {
	t.Helper()
	c := boot(t, *n.machine.State())
	c.gpus, c.bootID = n.gpus, n.bootID
	for from, to := range map[string]string{n.root: c.root, n.journal: c.journal, n.cdi: c.cdi, n.marks: c.marks, n.marks + aside: c.marks + aside} {
		if err := os.CopyFS(to, os.DirFS(from)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	if err := n.daemons.CopyTo(c.daemons); err != nil {
		t.Fatal(err)
	}
	return c
}

// aside is added to the name of the marks' directory to make CDI specifications fail.
const aside = ".aside"

// failSpecs has no CDI specification be written until the returned function is called.
func (n *node) failSpecs(t testing.TB) (end func()) {
	t.Helper()
	if err := os.Rename(n.marks, n.marks+aside); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Rename(n.marks+aside, n.marks); err != nil {
			t.Fatal(err)
		}
	}
}

// hardware is a plugin's session with the machine.
type hardware struct {
	*nvml.Session
	n *node
}

func (h hardware) CreateInstance(p gpu.Partition) (gpu.Instance, error) {
	if err := h.n.work(p); err != nil {
		return gpu.Instance{}, err
	}
	return h.Session.CreateInstance(p)
}

func (h hardware) DestroyInstance(uuid gpu.UUID, want gpu.Instance) error {
	if err := h.n.work(gpu.Partition{GPU: uuid, Profile: want.Profile, Placement: want.Placement}); err != nil {
		return err
	}
	return h.Session.DestroyInstance(uuid, want)
}

func (n *node) work(p gpu.Partition) error {
	if n.working == nil {
		return nil
	}
	return n.working(p)
}

// smi is the host's nvidia-smi.
func (n *node) smi(_ context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	code := smi.Run(args, &out, func() (*nvmlsim.Machine, error) { return nvmlsim.Open(n.machine.StatePath()) })
	if code != 0 {
		return out.String(), fmt.Errorf("exit status %d", code)
	}
	return out.String(), nil
}

// hideDeviceNode takes the device node of the n-th GPU away until the returned function is called.
func hideDeviceNode(t testing.TB, n int) (show func()) {
	t.Helper()
	path := host.Path(filepath.Join(root.DevRoot, fmt.Sprintf("dev/nvidia%d", n)))
	if err := os.Rename(path, path+aside); err != nil {
		t.Fatal(err)
	}
	show = sync.OnceFunc(func() {
		if err := os.Rename(path+aside, path); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(show)
	return show
}

// fail has calls of the hardware fail until the returned function is called.
func (n *node) fail(t testing.TB, call string, code nvmlsim.Return) (end func()) {
	t.Helper()
	if err := n.machine.Fault(nvmlsim.Fault{Call: call, GPU: nvmlsim.AnyGPU, Code: code}); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := n.machine.ClearFaults(); err != nil {
			t.Error(err)
		}
	}
}

// destroy takes a partition away, as somebody else might.
func (n *node) destroy(t testing.TB, p gpu.Partition) {
	t.Helper()
	mig, err := n.sim.MIG(p.GPU)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range mig.Instances {
		if i.Profile == p.Profile && i.Placement == p.Placement {
			if err := n.sim.DestroyInstance(p.GPU, i); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("%v isn't there", p)
}

// reboot takes all partitions, MPS daemons and settings away.
func (n *node) reboot(t testing.TB) {
	t.Helper()
	if err := errors.Join(n.machine.Reboot(), n.daemons.Reboot()); err != nil {
		t.Fatal(err)
	}
}

// instances are the partitions that exist, by GPU and place.
func (n *node) instances(t testing.TB) []gpu.Partition {
	t.Helper()
	var all []gpu.Partition
	for _, g := range n.gpus {
		if g.MIG == nil {
			continue
		}
		mig, err := n.sim.MIG(g.UUID)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range mig.Instances {
			all = append(all, gpu.Partition{GPU: g.UUID, Profile: i.Profile, Placement: i.Placement})
		}
	}
	sortPartitions(all)
	return all
}

func sortPartitions(partitions []gpu.Partition) {
	index := func(p gpu.Partition) int {
		return slices.IndexFunc(installed.Machine.GPUs, func(g nvmlsim.Identity) bool { return g.UUID == string(p.GPU) })
	}
	slices.SortFunc(partitions, func(a, b gpu.Partition) int {
		return cmp.Or(cmp.Compare(index(a), index(b)), cmp.Compare(a.Placement.Start, b.Placement.Start))
	})
}

// runningDaemons are the MPS daemons, with their devices.
func (n *node) runningDaemons(t testing.TB) map[string][]gpu.UUID {
	t.Helper()
	report, err := n.daemons.List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]gpu.UUID{}
	for _, s := range report.Daemons {
		all[s.Name] = s.Devices
	}
	return all
}

// examine has the doctor compare the records with everything else on the node.
func (n *node) examine() (doctor.Report, error) {
	hw, err := doctor.ReadHardware(context.Background(), n.sim.Session, n.smi)
	if err != nil {
		return doctor.Report{}, err
	}
	listed, away := n.daemons.List(context.Background())
	return doctor.Check(doctor.Node{
		Journal: n.journal, CDI: n.cdi, Host: host, BootID: n.bootID, Hardware: hw,
		Capabilities: filepath.Join(root.ProcRoot, "proc/driver/nvidia/capabilities"),
		Sharing:      doctor.SharingOf(listed, away, mps.RunDir(host.Path(filepath.Dir(n.daemons.Dir)))),
	})
}
