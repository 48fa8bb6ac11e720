package cluster

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	kubelet "k8s.io/kubelet/pkg/apis"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// nodeDirs lists the directories that a node doesn't share with the host. Nodes of a
// platform own /var, /opt and /home entirely, so that mount options there apply to all in
// them.
func (c *Cluster) nodeDirs() []string {
	dirs := volatileDirs()
	if c.options.Platform == "" {
		dirs = append(dirs, "/etc/cdi", "/var/log/pods", "/var/log/containers", "/var/lib/cni")
		dirs = append(dirs, c.runtime().dirs...)
		return append(dirs, "/var/lib/kubelet", "/var/lib/tessera")
	}
	dirs = append(dirs, "/var", "/opt", "/home")
	for _, dir := range append(c.cdiDirs(), c.KubeletRoot()) {
		if !within(dir, dirs) && !within(dir, c.mountedPaths()) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// mountedPaths are those where the platform's nodes have another file system.
func (c *Cluster) mountedPaths() []string {
	var paths []string
	for _, m := range c.platform.Node.Mounts {
		if m.Type != "" {
			paths = append(paths, m.Path)
		}
	}
	return paths
}

func within(path string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") })
}

// writeVar fills the /var of a platform's node, of which the machine shows nothing of the host's.
func writeVar(dir string) error {
	for _, name := range []string{"cache", "lib", "log", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			return fmt.Errorf("make the node's /var: %w", err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky); err != nil {
		return fmt.Errorf("make the node's /var: %w", err)
	}
	for name, target := range map[string]string{"run": "/run", "lock": "/run/lock"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("make the node's /var: %w", err)
		}
	}
	return nil
}

func (c *Cluster) runtimeSocket() string {
	return cmp.Or(c.platform.Node.Runtime.Socket, c.runtime().socket)
}

func (c *Cluster) cdiDirs() []string {
	if dirs := c.platform.Node.Runtime.CDIDirs; len(dirs) > 0 {
		return dirs
	}
	return []string{"/etc/cdi", "/var/run/cdi"}
}

// imitatesGPUNode reports whether a node is one of the platform's GPU nodes.
func (c *Cluster) imitatesGPUNode(node int) bool {
	return c.options.Platform != "" && node < c.options.Nodes
}

func (c *Cluster) nodeSpec(node int) machine.Spec {
	env := []string{"PATH=" + searchPath, "HOME=/root", fewerCollections, fewerThreads()}
	spec := c.newSpec(c.plan.nodes[node], c.nodeBinDir(), c.nodeDirs())
	spec.Sysctls = map[string]string{"net/ipv4/ip_forward": "1"}
	spec.MaskedSysctls = maskedSysctls()
	spec.OnlyMountedControllers = c.options.Runtime == CRIO
	if c.options.Platform == "" {
		spec.HostDirs = hostRunDirs()
	} else {
		imitate(&spec, c.platform.Node)
	}
	if c.imitatesGPUNode(node) {
		spec.Components = append(spec.Components, c.driverComponents(env)...)
	}
	spec.Components = append(spec.Components,
		machine.Component{
			Name: c.RuntimeComponent(), Args: []string{program(c.RuntimeComponent()), "--config", configDir + "/" + c.runtime().configFile()}, Env: env,
		},
		machine.Component{
			Name: "kubelet", Args: c.kubeletArgs(node), Env: env, View: c.platform.Node.Kubelet.View,
			WaitFor: []string{"unix://" + c.runtimeSocket(), c.apiserverDial()},
		})
	return spec
}

// imitate gives a machine the files of a platform's nodes.
func imitate(spec *machine.Spec, node platform.Node) {
	spec.OwnDevices = true
	spec.Links = node.Links
	spec.Mounts = node.Mounts
}

func (c *Cluster) kubeletArgs(node int) []string {
	args := []string{
		program("kubelet"),
		"--config=" + configDir + "/kubelet.yaml",
		"--kubeconfig=" + configDir + "/kubelet.kubeconfig",
		"--hostname-override=" + c.plan.nodes[node],
		"--node-ip=" + c.plan.nodeAddress(node).String(),
	}
	if root := c.platform.Node.Kubelet.Root; root != "" {
		args = append(args, "--root-dir="+root)
	}
	if labels := c.kubeletLabels(node); len(labels) > 0 {
		args = append(args, "--node-labels="+strings.Join(labels, ","))
	}
	return c.withFeatureGates(args, c.options.Kubelet)
}

// kubeletLabels are the labels with which a kubelet registers its node, as KEY=VALUE.
func (c *Cluster) kubeletLabels(node int) []string {
	var labels []string
	if c.imitatesGPUNode(node) {
		for key, value := range c.platform.Node.Labels {
			if kubeletMaySet(key) {
				labels = append(labels, key+"="+value)
			}
		}
	}
	slices.Sort(labels)
	return labels
}

// cloudLabels are the labels that a kubelet doesn't set, which on the platform a cloud's
// controller sets on nodes that have registered. Of these the kubelet sets its own, such as
// the architecture, again when it starts.
func (c *Cluster) cloudLabels() map[string]string {
	labels := map[string]string{}
	for key, value := range c.platform.Node.Labels {
		if !kubeletMaySet(key) {
			labels[key] = value
		}
	}
	return labels
}

// kubeletMaySet reports whether kubelets may register with a label: of Kubernetes' own some only,
// and of these not with another value than they find themselves
// (https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/#noderestriction).
func kubeletMaySet(label string) bool {
	prefix, _, prefixed := strings.Cut(label, "/")
	reserved := prefixed && slices.ContainsFunc([]string{"kubernetes.io", "k8s.io"}, func(domain string) bool {
		return prefix == domain || strings.HasSuffix(prefix, "."+domain)
	})
	own := slices.Contains([]string{corev1.LabelArchStable, corev1.LabelOSStable, corev1.LabelHostname}, label)
	return !reserved || kubelet.IsKubeletLabel(label) && !own
}
