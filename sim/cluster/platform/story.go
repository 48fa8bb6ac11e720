package platform

import (
	"cmp"
	"slices"
	"strings"
)

// Refused is the only part of the story of a platform where Tessera can't work.
const Refused = "refused"

// Parts returns the names of all parts of the story of a platform where Tessera works, in their
// order. Each needs those before it that are essential.
func Parts() []string {
	return []string{"install", "whole", "share", "timeslice", "partition", "userns", "restart", "reboot", "upgrade", "uninstall"}
}

// Story returns the parts that the platform can have.
func (p *Platform) Story() []string {
	if p.Use.Cannot != "" {
		return []string{Refused}
	}
	return slices.DeleteFunc(Parts(), func(part string) bool { return p.Use.Lacks[part] != "" })
}

// HelmCommand is the command of a user, in a checkout, who installs or upgrades the chart on the
// platform with an image.
func (p *Platform) HelmCommand(verb, image string, flags ...string) string {
	words := []string{"helm", verb, "tessera", "deployments/helm/tessera", "--namespace", "tessera-system"}
	if verb == "install" {
		words = append(words, "--create-namespace")
	}
	if p.Use.Values != "" {
		words = append(words, "-f", "deployments/helm/tessera/platforms/"+p.Use.Values)
	}
	return strings.Join(slices.Concat(words, []string{"--set", "image.repository=" + image}, flags), " ")
}

// KubeletRoot is the kubelet's --root-dir on the platform.
func (p *Platform) KubeletRoot() string { return cmp.Or(p.Node.Kubelet.Root, "/var/lib/kubelet") }
