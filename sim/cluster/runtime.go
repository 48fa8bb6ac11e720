package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// Container runtimes of Options.
const (
	// Containerd is containerd 2.
	Containerd = "containerd"
	// OldContainerd is containerd 1.7.
	OldContainerd = "containerd-1.7"
	// CRIO is CRI-O, with runc and the host's conmon.
	CRIO = "cri-o"
)

// runtimeOptions is what the configurations of a container runtime differ in.
type runtimeOptions struct {
	// overlay: the file system of the machine's state can have overlays.
	overlay bool
	socket  string
	cdiDirs []string
}

// containerRuntime is how nodes run a container runtime.
type containerRuntime struct {
	// component is the name of the component, and of its program.
	component string
	// socket of its API, where the platform says no other.
	socket string
	// dirs are directories that each node has of its own.
	dirs []string
	// config renders its configuration.
	config func(runtimeOptions) string
	// units are what its programs are built from.
	units []unit
	// packages are the Debian packages that it needs on the host.
	packages []need
	// importing is the command that imports the image archive that is its standard input.
	importing func(overlay bool) []string
}

func containerRuntimes() map[string]containerRuntime {
	containerd := containerRuntime{
		component: "containerd", socket: "/run/containerd/containerd.sock", dirs: []string{"/var/lib/containerd"},
		config: containerdConfig, units: containerdUnits("containerd", "github.com/containerd/containerd/v2/cmd/"),
		importing: func(bool) []string { return []string{"ctr", "--namespace=k8s.io", "images", "import", "-"} },
	}
	old := containerd
	old.config, old.units = oldContainerdConfig, containerdUnits("containerd-1.7", "github.com/containerd/containerd/cmd/")
	return map[string]containerRuntime{Containerd: containerd, OldContainerd: old, CRIO: crio()}
}

// Runtimes names the container runtimes that nodes can have, sorted.
func Runtimes() []string { return slices.Sorted(maps.Keys(containerRuntimes())) }

func (c *Cluster) runtime() containerRuntime { return containerRuntimes()[c.options.Runtime] }

// RuntimeComponent is the name of the nodes' component that is their container runtime.
func (c *Cluster) RuntimeComponent() string { return c.runtime().component }

// configFile is the name of the runtime's configuration.
func (r containerRuntime) configFile() string { return r.component + ".toml" }

// imageNames returns the names of the images that a node has.
func (c *Cluster) imageNames(ctx context.Context, node string) ([]string, error) {
	out, err := c.Exec(ctx, node, "crictl", "images", "--output=json")
	if err != nil {
		return nil, fmt.Errorf("list the images of %s: %w", node, err)
	}
	var list struct {
		Images []struct{ RepoTags []string }
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("list the images of %s: %w", node, err)
	}
	var names []string
	for _, image := range list.Images {
		names = append(names, image.RepoTags...)
	}
	return names, nil
}
