package cluster

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// stateRoot holds one directory per cluster. Its path is short because unix
// sockets lie below it.
const stateRoot = "/var/lib/localcluster"

// Cluster is a handle on a cluster; it holds nothing open.
type Cluster struct {
	options Options
	// platform that is imitated; the zero value if none is.
	platform platform.Platform
	plan     plan
}

func newCluster(options Options, slot int) (*Cluster, error) {
	imitated, err := options.platform()
	if err != nil {
		return nil, err
	}
	nodes := nodeNames(options.Nodes, imitated.Node.NameFormat, options.Platform != "")
	return &Cluster{options: options, platform: imitated, plan: plan{name: options.Name, slot: slot, nodes: nodes}}, nil
}

// record is the stored data of a cluster, written after all its files.
type record struct {
	Options Options `json:"options"`
	Slot    int     `json:"slot"`
}

const recordFile = "cluster.json"

var errNotRoot = errors.New("local clusters need root: run this with sudo")

// Up brings a cluster up and returns when its nodes are ready for pods. A
// cluster that is up already is checked, and machines of it that are gone are
// switched on again; one with other options is refused. After an error, started
// machines stay, so that their logs can be read, and Down removes them.
func Up(ctx context.Context, options Options) (*Cluster, error) {
	options = options.withDefaults()
	if err := options.validate(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errNotRoot
	}
	unlock, err := lockDir(filepath.Join(stateRoot, options.Name), options.Log)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := allowInotify(inotifyInstancesPath, options.Log); err != nil {
		return nil, err
	}
	c, err := openOrCreate(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("bring up cluster %s: %w", options.Name, errors.Join(err, removeUnmade(options)))
	}
	if err := c.switchOn(ctx); err != nil {
		return nil, fmt.Errorf("bring up cluster %s: %w", c.Name(), err)
	}
	if err := c.waitReady(ctx); err != nil {
		return nil, fmt.Errorf("bring up cluster %s: %w", c.Name(), err)
	}
	return c, nil
}

// removeUnmade removes the directory of a cluster that has no record, for a
// failure before anything was started.
func removeUnmade(options Options) error {
	dir := filepath.Join(stateRoot, options.Name)
	if _, err := os.Stat(filepath.Join(dir, recordFile)); err == nil {
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove what was begun: %w", err)
	}
	return removeShared(options.Log)
}

func openOrCreate(ctx context.Context, options Options) (*Cluster, error) {
	c, err := Open(options.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return create(ctx, options)
	}
	if err != nil {
		return nil, err
	}
	c.options.Log = options.Log
	if !sameCluster(c.options, options) {
		return nil, fmt.Errorf("it is there already with other options (%v): run localcluster down first, or upgrade for another version", c.options)
	}
	return c, nil
}

// create writes all files of a new cluster. The record comes last: a cluster
// without one is started from scratch.
func create(ctx context.Context, options Options) (*Cluster, error) {
	c, err := newCluster(options, 0)
	if err != nil {
		return nil, err
	}
	if err := checkSpace(stateRoot, clusterSpace); err != nil {
		return nil, err
	}
	if err := c.clear(ctx); err != nil {
		return nil, err
	}
	if err := c.fillBinDir(ctx); err != nil {
		return nil, err
	}
	unlock, err := lockDir(stateRoot, options.Log)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := c.chooseSlot(); err != nil {
		return nil, err
	}
	if err := c.writeConfig(); err != nil {
		return nil, err
	}
	return c, c.writeRecord()
}

func (c *Cluster) writeRecord() error {
	data, err := json.MarshalIndent(record{Options: c.options, Slot: c.plan.slot}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the cluster's record: %w", err)
	}
	return writeFiles(c.Dir(), map[string][]byte{recordFile: data})
}

func (c *Cluster) fillBinDir(ctx context.Context) error {
	if c.options.BinDir == "" {
		if err := Build(ctx, Versions{Kubernetes: c.options.Kubernetes, Runtime: c.options.Runtime}, c.binDir(), c.options.Log); err != nil {
			return err
		}
		if err := Build(ctx, Versions{Kubernetes: c.options.Kubelet, Runtime: c.options.Runtime}, c.nodeBinDir(), c.options.Log); err != nil {
			return err
		}
		return c.buildPlatformPrograms(ctx)
	}
	for _, name := range []string{"machine-init", "kubernetes", "kubectl", "etcd", c.RuntimeComponent(), baseImages} {
		if _, err := os.Stat(filepath.Join(c.options.BinDir, name)); err != nil {
			return fmt.Errorf("%s is no directory of built binaries: %w (make one with localcluster build --output)", c.options.BinDir, err)
		}
	}
	return errors.Join(linkAll(c.options.BinDir, c.binDir()), linkAll(c.options.BinDir, c.nodeBinDir()), c.buildPlatformPrograms(ctx))
}

func (c *Cluster) chooseSlot() error {
	names, err := List()
	if err != nil {
		return err
	}
	taken := map[int]bool{}
	for _, name := range names {
		// The slot of a cluster without a readable record shows in the host's
		// addresses, if it runs at all.
		if other, err := Open(name); err == nil {
			taken[other.plan.slot] = true
		}
	}
	addresses, err := hostAddresses()
	if err != nil {
		return err
	}
	c.plan.slot, err = freeSlot(taken, addresses)
	return err
}

// List names the clusters on this host, half-made ones included, which Open
// may refuse and Down removes.
func List() ([]string, error) {
	entries, err := os.ReadDir(stateRoot)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the clusters: %w", err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, nil
}

// Open returns a handle on a cluster that was brought up before. The error
// wraps fs.ErrNotExist when there is none of that name.
func Open(name string) (*Cluster, error) {
	data, err := os.ReadFile(filepath.Join(stateRoot, name, recordFile))
	if err != nil {
		return nil, fmt.Errorf("open cluster %s (is it up?): %w", name, err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("open cluster %s: %s is unreadable: %w (localcluster down removes it)", name, recordFile, err)
	}
	r.Options.Log = io.Discard
	c, err := newCluster(r.Options, r.Slot)
	if err != nil {
		return nil, fmt.Errorf("open cluster %s: %w (localcluster down removes it)", name, err)
	}
	return c, nil
}

// Down removes a cluster: processes, mounts, network links, cgroups and files.
// It also removes what is left of one whose Up failed or whose processes were
// killed, and succeeds when there is none.
func Down(ctx context.Context, name string, log io.Writer) error {
	if !clusterName.MatchString(name) {
		return Options{Name: name}.validate()
	}
	if os.Geteuid() != 0 {
		return errNotRoot
	}
	unlock, err := lockDir(filepath.Join(stateRoot, name), log)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := Open(name)
	if err != nil {
		// Without a readable record the slot is unknown; the link goes with
		// the control plane.
		c = &Cluster{options: Options{Name: name}, plan: plan{name: name, slot: -1}}
	}
	if err := c.clear(ctx); err != nil {
		return fmt.Errorf("take down cluster %s: %w", name, err)
	}
	if err := os.Remove(c.Dir()); err != nil {
		return fmt.Errorf("take down cluster %s: %w", name, err)
	}
	return removeShared(log)
}

// Down removes the cluster; see the function Down.
func (c *Cluster) Down(ctx context.Context) error { return Down(ctx, c.Name(), c.options.Log) }

// clear ends whatever runs of the cluster and removes its files, but not its
// directory, which is the lock.
func (c *Cluster) clear(ctx context.Context) error {
	if err := emptyCgroup(ctx, c.cgroup()); err != nil {
		return err
	}
	if err := removeCgroup(c.cgroup()); err != nil {
		return err
	}
	if c.plan.slot >= 0 {
		if _, err := os.Stat(filepath.Join(c.Dir(), recordFile)); err == nil {
			if err := c.plan.removeHostLink(); err != nil {
				return err
			}
		}
	}
	// The record goes last: it holds the slot.
	names := entryNames(c.Dir())
	slices.SortFunc(names, func(a, b string) int { return boolOrder(a == recordFile) - boolOrder(b == recordFile) })
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(c.Dir(), name)); err != nil {
			return fmt.Errorf("remove the cluster's files: %w", err)
		}
	}
	return nil
}

func boolOrder(b bool) int {
	if b {
		return 1
	}
	return 0
}

// removeShared removes what clusters share, when no cluster is left.
func removeShared(log io.Writer) error {
	unlock, err := lockDir(stateRoot, log)
	if err != nil {
		return err
	}
	defer unlock()
	if len(entryNames(stateRoot)) > 0 {
		return nil
	}
	if err := removeCgroup(cgroupTop); err != nil {
		return err
	}
	if err := restoreRoot(); err != nil {
		return err
	}
	if err := os.Remove(stateRoot); err != nil {
		return fmt.Errorf("remove the state directory: %w", err)
	}
	return nil
}

// Name is the cluster's name.
func (c *Cluster) Name() string { return c.plan.name }

// Kubernetes is the minor version of the control plane, such as "1.37".
func (c *Cluster) Kubernetes() string { return c.options.Kubernetes }

// Gates returns the feature gates of Dynamic Resource Allocation that are on in
// the control plane, sorted.
func (c *Cluster) Gates() []string {
	on := slices.DeleteFunc(Gates(c.options.Kubernetes, c.options.DRA), func(gate string) bool {
		asked, found := c.options.FeatureGates[gate]
		return found && !asked
	})
	for gate, asked := range c.options.FeatureGates {
		if asked && !slices.Contains(on, gate) {
			on = append(on, gate)
		}
	}
	slices.Sort(on)
	return on
}

// Has reports whether a feature gate is one of Gates.
func (c *Cluster) Has(gate string) bool { return slices.Contains(c.Gates(), gate) }

// Nodes names the node machines, which are also the Kubernetes nodes. Those with the
// platform's GPUs come first.
func (c *Cluster) Nodes() []string { return slices.Clone(c.plan.nodes) }

// GPUNodes names those of Nodes that were asked for: all but the one without GPUs that the
// cluster of a platform has besides.
func (c *Cluster) GPUNodes() []string { return c.Nodes()[:c.options.Nodes] }

// Platform is the name of the platform that the cluster imitates; empty if none.
func (c *Cluster) Platform() string { return c.options.Platform }

// KubeletRoot is the root directory of the kubelets.
func (c *Cluster) KubeletRoot() string { return c.platform.KubeletRoot() }

// Machines names all machines, "control-plane" first.
func (c *Cluster) Machines() []string { return c.plan.machineNames() }

// Dir is the host's directory with everything of the cluster.
func (c *Cluster) Dir() string { return filepath.Join(stateRoot, c.plan.name) }

// KubeconfigPath is the host's path of an administrator's kubeconfig.
func (c *Cluster) KubeconfigPath() string { return filepath.Join(c.Dir(), "kubeconfig") }

// Server is the API server's URL as seen from the host and the machines.
func (c *Cluster) Server() string { return c.plan.serverURL() }

// HostAddress is this host's address as seen from the machines.
func (c *Cluster) HostAddress() string { return c.plan.hostAddress().String() }

// Binary is the host's path of one of the cluster's programs, such as kubectl,
// helm or ctr.
func (c *Cluster) Binary(name string) string { return filepath.Join(c.binDir(), name) }

// NodeDir is the host's path under which a machine's own directories lie with
// their usual paths: NodeDir(node)+c.KubeletRoot(), "/run", "/etc/cdi" …. What a platform
// mounts in them isn't there.
func (c *Cluster) NodeDir(machineName string) string {
	return filepath.Join(c.machineDir(machineName), machine.FilesDir)
}

// LogPath is the host's path of a component's log. The component "init" is the
// machine itself.
func (c *Cluster) LogPath(machineName, component string) string {
	return filepath.Join(c.machineDir(machineName), machine.LogDir, component+".log")
}

// AuditLog is the host's path of the API server's audit log: one JSON object a
// line for every completed write, at level Metadata.
func (c *Cluster) AuditLog() string {
	return filepath.Join(c.machineDir(controlPlane), machine.LogDir, auditLogName)
}

// binDir has the programs of the control plane, and those for the host.
func (c *Cluster) binDir() string { return filepath.Join(c.Dir(), "bin") }

// nodeBinDir has the programs of the nodes, whose kubelets may be older.
func (c *Cluster) nodeBinDir() string { return filepath.Join(c.Dir(), "bin-nodes") }

func (c *Cluster) machineDir(name string) string { return filepath.Join(c.Dir(), "machines", name) }

func (c *Cluster) controlSocket(machineName string) string {
	return filepath.Join(c.machineDir(machineName), machine.SocketFile)
}

func (c *Cluster) cgroup() string { return cgroupTop + "/" + c.plan.name }

func (c *Cluster) machineCgroup(name string) string { return c.cgroup() + "/" + name }

func base64Text(data []byte) string { return base64.StdEncoding.EncodeToString(data) }
