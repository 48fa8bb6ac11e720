// Package platform describes the platforms that a local cluster can imitate: what their
// nodes look like to programs that run on them, and what their API server admits. A
// platform is data, a file in profiles with the sources of its facts.
//
// The package only reads and checks; package cluster makes clusters of it.
package platform

import (
	"cmp"
	"embed"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

//go:embed profiles/*.yaml
var files embed.FS

// Platform describes one platform. A field left out keeps what ordinary local clusters have.
type Platform struct {
	// Name is that of its file: gke-cos.
	Name string `json:"-"`
	// Title for people: GKE Standard, Container-Optimized OS.
	Title string `json:"title"`
	// Sources of the facts below: documents, files and issues, with what each says.
	Sources []string `json:"sources"`
	// NotImitated is what the platform has and the local cluster hasn't.
	NotImitated []string `json:"notImitated,omitempty"`

	Cluster Cluster `json:"cluster"`
	Node    Node    `json:"node"`
	Use     Use     `json:"use"`
}

// Cluster describes the platform's API server.
type Cluster struct {
	// PodSecurity is the default of Pod Security admission.
	PodSecurity *PodSecurity `json:"podSecurity,omitempty"`
	// LimitCriticalPods limits pods with a priority class system-*-critical to the
	// namespaces that have a ResourceQuota for it, and kube-system.
	LimitCriticalPods bool `json:"limitCriticalPods,omitempty"`
	// Objects are applied as soon as the API server answers: admission policies,
	// mostly.
	Objects string `json:"objects,omitempty"`
}

// PodSecurity has levels of the Pod Security Standards for namespaces without labels.
type PodSecurity struct {
	Enforce string `json:"enforce,omitempty"`
	Warn    string `json:"warn,omitempty"`
	// ExemptNamespaces are namespaces whose pods aren't checked.
	ExemptNamespaces []string `json:"exemptNamespaces,omitempty"`
}

// Node is the part of a platform that its nodes with GPUs have.
type Node struct {
	// NameFormat makes a node's name of its number: gke-pool-1-3f2a91c7-%d.
	NameFormat string            `json:"nameFormat,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Taints     []corev1.Taint    `json:"taints,omitempty"`
	// Links maps the path of a symbolic link to its target; it replaces what is at that path.
	Links map[string]string `json:"links,omitempty"`
	// Mounts are made in this order.
	Mounts  []Mount `json:"mounts,omitempty"`
	Kubelet Kubelet `json:"kubelet"`
	Runtime Runtime `json:"runtime"`
	Driver  Driver  `json:"driver"`
	// DevicePlugin is a device plugin of nvidia.com/gpu that runs as a process of the host.
	DevicePlugin bool `json:"devicePlugin,omitempty"`
}

// Mount is a file system of a node.
type Mount = machine.Mount

// Kubelet of a node.
type Kubelet struct {
	// Root is its --root-dir. Default: /var/lib/kubelet.
	Root string `json:"root,omitempty"`
	// View lists the host directories that the kubelet sees. If set, the kubelet runs in a
	// mount namespace of its own.
	View []string `json:"view,omitempty"`
}

// Runtime is the container runtime of a node.
type Runtime struct {
	// Name is containerd, containerd-1.7 or cri-o. Default: containerd.
	Name string `json:"name,omitempty"`
	// Socket is the one of its API. Default: the runtime's own.
	Socket string `json:"socket,omitempty"`
	// CDIDirs are the directories where it looks for CDI specs. Default: /etc/cdi and
	// /var/run/cdi.
	CDIDirs []string `json:"cdiDirs,omitempty"`
}

// Driver is where the simulated NVIDIA driver has its files.
type Driver struct {
	// Root is the driver root, such as /run/nvidia/driver. Default: /.
	Root string `json:"root,omitempty"`
	// Libraries and Programs are directories in Root. Default: those of Debian.
	Libraries string `json:"libraries,omitempty"`
	Programs  string `json:"programs,omitempty"`
	// LdCache enters the libraries in the node's /etc/ld.so.cache.
	LdCache bool `json:"ldCache,omitempty"`
	// OwnTree is a root with /dev, /proc and /sys of its own, as a driver container's.
	// Otherwise device nodes and the kernel's files are those of the machine.
	OwnTree bool `json:"ownTree,omitempty"`
	// Hardware of a node in the simulator's short form or as a machine file: 2xh100-80gb.
	// Default: none, and no driver.
	Hardware string `json:"hardware,omitempty"`
}

// Use says how Tessera is installed there, and what works.
type Use struct {
	// Values is the chart's values file, in deployments/helm/tessera/platforms.
	// Default: none.
	Values string `json:"values,omitempty"`
	// Before are the commands, one a line, that a user types before helm install.
	Before string `json:"before,omitempty"`
	// Setup prepares the platform itself: node pool, driver, settings. A local cluster can't
	// run it.
	Setup string `json:"setup,omitempty"`
	// Cannot says why Tessera can't work there, in a sentence; empty if it works.
	Cannot string `json:"cannot,omitempty"`
	// Message is a regular expression for the message by which the user learns that Tessera
	// can't work.
	Message string `json:"message,omitempty"`
	// Withheld is how many of the node's GPUs aren't offered.
	Withheld int `json:"withheld,omitempty"`
	// Lacks are the parts of the story (Parts) that the platform can't have, with the reason.
	Lacks map[string]string `json:"lacks,omitempty"`
}

// Names lists all platforms, sorted.
func Names() []string {
	entries, err := files.ReadDir("profiles")
	if err != nil {
		panic(err) // embedded
	}
	var names []string
	for _, entry := range entries {
		names = append(names, strings.TrimSuffix(entry.Name(), ".yaml"))
	}
	return names
}

// Find returns the platform of that name.
func Find(name string) (*Platform, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("there is no platform %q: want one of %s", name, strings.Join(Names(), ", "))
	}
	text, err := files.ReadFile(path.Join("profiles", name+".yaml"))
	if err != nil {
		return nil, err
	}
	p := &Platform{Name: name}
	if err := yaml.UnmarshalStrict(text, p); err != nil {
		return nil, fmt.Errorf("platform %s: %w", name, err)
	}
	if err := p.validate(); err != nil {
		return nil, fmt.Errorf("platform %s: %w", name, err)
	}
	p.Node.Driver.Root = cmp.Or(p.Node.Driver.Root, "/")
	return p, nil
}
