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
)

//go:embed profiles/*.yaml
var files embed.FS

// Platform is one of them. The zero value of a field is what the local cluster's own
// nodes have.
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

// Cluster is the part of a platform that its API server has.
type Cluster struct {
	// Kubernetes is the minor version; the default of local clusters.
	Kubernetes string `json:"kubernetes,omitempty"`
	// PodSecurity is the default of Pod Security admission.
	PodSecurity *PodSecurity `json:"podSecurity,omitempty"`
	// CriticalPriority limits pods with a priority class system-*-critical to the
	// namespaces that have a ResourceQuota for it, and kube-system.
	CriticalPriority bool `json:"criticalPriority,omitempty"`
	// Objects are applied as soon as the API server answers: admission policies,
	// mostly.
	Objects string `json:"objects,omitempty"`
}

// PodSecurity has levels of the Pod Security Standards for namespaces without labels.
type PodSecurity struct {
	Enforce string `json:"enforce,omitempty"`
	Warn    string `json:"warn,omitempty"`
	// ExemptNamespaces are not looked at.
	ExemptNamespaces []string `json:"exemptNamespaces,omitempty"`
}

// Node is the part of a platform that its nodes with GPUs have.
type Node struct {
	// NameFormat makes a node's name of its number: gke-pool-1-3f2a91c7-%d.
	NameFormat string            `json:"nameFormat,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Taints     []corev1.Taint    `json:"taints,omitempty"`
	// Links are symbolic links, by their path, in place of what is there else.
	Links map[string]string `json:"links,omitempty"`
	// Mounts are made in this order.
	Mounts     []Mount    `json:"mounts,omitempty"`
	Kubelet    Kubelet    `json:"kubelet"`
	Containerd Containerd `json:"containerd"`
	Driver     Driver     `json:"driver"`
	// Umask of all programs of the node, in octal; 022.
	Umask string `json:"umask,omitempty"`
	// DevicePlugin is a device plugin of nvidia.com/gpu that runs as a process of the host.
	DevicePlugin bool `json:"devicePlugin,omitempty"`
}

// Mount is a file system of a node.
type Mount struct {
	Path string `json:"path"`
	// Type: "" changes the options of what is there; tmpfs is an empty file system that
	// goes with the machine; disk is an empty directory that stays; overlay takes all writes
	// in a layer that goes with the machine.
	Type string `json:"type,omitempty"`
	// Options: ro, noexec, nosuid, nodev.
	Options []string `json:"options,omitempty"`
}

// Kubelet of a node.
type Kubelet struct {
	// Root is its --root-dir; /var/lib/kubelet.
	Root string `json:"root,omitempty"`
	// View are the directories of the host that it sees; it runs in a mount namespace
	// of its own if there are any.
	View []string `json:"view,omitempty"`
}

// Containerd of a node.
type Containerd struct {
	// Version is 2 or 1.7.
	Version string `json:"version,omitempty"`
	// Socket; /run/containerd/containerd.sock.
	Socket string `json:"socket,omitempty"`
	// CDIDirs; /etc/cdi and /var/run/cdi.
	CDIDirs []string `json:"cdiDirs,omitempty"`
	// DisableCDI turns the Container Device Interface off.
	DisableCDI bool `json:"disableCDI,omitempty"`
}

// Driver is where the simulated NVIDIA driver has its files.
type Driver struct {
	// Root is the driver root, such as /run/nvidia/driver; /.
	Root string `json:"root,omitempty"`
	// Libraries and Programs are directories in Root. Default: those of Debian.
	Libraries string `json:"libraries,omitempty"`
	Programs  string `json:"programs,omitempty"`
	// LdCache enters the libraries in the node's /etc/ld.so.cache.
	LdCache bool `json:"ldCache,omitempty"`
	// OwnTree is a root with /dev, /proc and /sys of its own, as a driver container's.
	// Otherwise device nodes and the kernel's files are those of the machine.
	OwnTree bool `json:"ownTree,omitempty"`
	// None leaves the driver out.
	None bool `json:"none,omitempty"`
	// Machine is the hardware of a node in the simulator's short form or as a machine
	// file: 2xh100-80gb.
	Machine string `json:"machine,omitempty"`
}

// Use says how Tessera is installed there, and what works.
type Use struct {
	// Values is the chart's values file, in deployments/helm/tessera/platforms; none if empty.
	Values string `json:"values,omitempty"`
	// Before are the commands, one a line, that a user types before helm install.
	Before string `json:"before,omitempty"`
	// Cloud are commands and settings of the provider that can't run on a local cluster.
	Cloud string `json:"cloud,omitempty"`
	// Cannot says why Tessera can't work there, in a sentence; empty if it works.
	Cannot string `json:"cannot,omitempty"`
	// Refused is a regular expression for what the user reads where Tessera can't work.
	Refused string `json:"refused,omitempty"`
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
