package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// Defaults of Options.
const (
	DefaultName       = "tessera"
	DefaultKubernetes = "1.37"
	DefaultRuntime    = Containerd
)

// Options say what cluster is wanted. The zero value of a field means its
// default.
type Options struct {
	// Name distinguishes clusters on one host. Default: "tessera".
	Name string
	// Platform is the name of the platform that the cluster imitates, see package
	// platform. It decides what other options don't say. Default: none.
	Platform string `json:"platform,omitempty"`
	// Kubernetes is a minor version, the name of a directory in
	// sim/cluster/kubernetes. Default: "1.37".
	Kubernetes string
	// Kubelet is the minor version of the nodes' kubelets, up to three older than
	// Kubernetes. Default: the same as Kubernetes.
	Kubelet string
	// Runtime is the container runtime of the nodes, one of Runtimes. Default: what the
	// platform has, or Containerd.
	Runtime string
	// DRA says how much of Dynamic Resource Allocation is on. Default: DRAOn.
	DRA DRA
	// Nodes is the number of node machines. The cluster of a platform has one more,
	// which is the last and has no GPUs. Default: 1.
	Nodes int
	// FeatureGates are passed to all Kubernetes components, besides those of DRA.
	FeatureGates map[string]bool
	// BinDir is a directory of binaries made by Build. With it, nothing is
	// built and Go isn't needed. Default: $TESSERA_BIN_DIR, or build.
	BinDir string
	// Log gets lines for people about what is going on. Default: nowhere.
	Log io.Writer `json:"-"`
}

func (o Options) withDefaults() Options {
	imitated, err := o.platform()
	if err != nil {
		imitated = platform.Platform{} // validate reports it
	}
	o.Name = cmp.Or(o.Name, DefaultName)
	o.Kubernetes = cmp.Or(o.Kubernetes, DefaultKubernetes)
	o.Kubelet = cmp.Or(o.Kubelet, o.Kubernetes)
	o.Runtime = cmp.Or(o.Runtime, imitated.Node.Runtime.Name, DefaultRuntime)
	o.DRA = cmp.Or(o.DRA, DRAOn)
	o.Nodes = cmp.Or(o.Nodes, 1)
	if o.BinDir == "" {
		o.BinDir = os.Getenv("TESSERA_BIN_DIR")
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	return o
}

var clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

var kubernetesVersion = regexp.MustCompile(`^1\.[0-9]+$`)

func (o Options) validate() error {
	switch {
	case !clusterName.MatchString(o.Name):
		return fmt.Errorf("cluster name %q: use 1 to 32 lower-case letters, digits and hyphens", o.Name)
	case !kubernetesVersion.MatchString(o.Kubernetes):
		return fmt.Errorf("the Kubernetes version %q: write it as 1.37, without the patch release", o.Kubernetes)
	case !kubernetesVersion.MatchString(o.Kubelet):
		return fmt.Errorf("the kubelets' version %q: write it as 1.37, without the patch release", o.Kubelet)
	case minorVersion(o.Kubelet) > minorVersion(o.Kubernetes) || minorVersion(o.Kubelet) < minorVersion(o.Kubernetes)-kubeletSkew:
		return fmt.Errorf("kubelets of %s with a control plane of %s: Kubernetes supports kubelets that are as new, or up to %d minor versions older",
			o.Kubelet, o.Kubernetes, kubeletSkew)
	case !slices.Contains(Runtimes(), o.Runtime):
		return fmt.Errorf("the container runtime %q: there are %s", o.Runtime, strings.Join(Runtimes(), ", "))
	case o.BinDir != "" && o.Kubelet != o.Kubernetes:
		return errors.New("prebuilt binaries are of one Kubernetes version: leave out the kubelets' version")
	case o.Nodes < 1 || o.Nodes > maxNodes:
		return fmt.Errorf("%d nodes: a cluster has 1 to %d", o.Nodes, maxNodes)
	}
	return errors.Join(o.validateDRA(), o.validatePlatform())
}

func (o Options) validatePlatform() error {
	c, err := newCluster(o, 0)
	if err != nil {
		return err
	}
	return c.validateSockets()
}

// validateSockets checks the paths of the machines' control sockets, which have the
// cluster's and the node's name in them.
func (c *Cluster) validateSockets() error {
	for _, name := range c.Machines() {
		if path := c.controlSocket(name); len(path) > maxSocketPath {
			return fmt.Errorf("cluster name %q: choose one that is %d letters shorter, since platform %s has long names of nodes (node.nameFormat)",
				c.Name(), len(path)-maxSocketPath, c.Platform())
		}
	}
	return nil
}

// maxSocketPath is the length of the kernel's sun_path, without the byte that ends it.
const maxSocketPath = 107

// platform is the one that the cluster imitates, or nothing special.
func (o Options) platform() (platform.Platform, error) {
	if o.Platform == "" {
		return platform.Platform{}, nil
	}
	p, err := platform.Find(o.Platform)
	if err != nil {
		return platform.Platform{}, err
	}
	return *p, nil
}

// kubeletSkew is how many minor versions older than the API server a kubelet may
// be (https://kubernetes.io/releases/version-skew-policy/).
const kubeletSkew = 3

func minorVersion(kubernetes string) int {
	_, minor, _ := strings.Cut(kubernetes, ".")
	n, _ := strconv.Atoi(minor) // validated before
	return n
}

// String shows the options by which clusters differ.
func (o Options) String() string {
	imitated := ""
	if o.Platform != "" {
		imitated = "platform " + o.Platform + ", "
	}
	return imitated + fmt.Sprintf("Kubernetes %s, kubelets %s, %s, %d nodes, Dynamic Resource Allocation %s, feature gates %v",
		o.Kubernetes, o.Kubelet, o.Runtime, o.Nodes, o.DRA, o.FeatureGates)
}

func sameCluster(a, b Options) bool {
	return a.Platform == b.Platform && a.Kubernetes == b.Kubernetes && a.Kubelet == b.Kubelet && a.Runtime == b.Runtime && a.DRA == b.DRA && a.Nodes == b.Nodes &&
		(len(a.FeatureGates) == 0 && len(b.FeatureGates) == 0 || reflect.DeepEqual(a.FeatureGates, b.FeatureGates))
}
