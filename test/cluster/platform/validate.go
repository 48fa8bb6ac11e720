package platform

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// maxNodeName is the length of a label's value: a node has its name as a label.
const maxNodeName = validation.LabelValueMaxLength

// problems collects what is wrong with a platform, by field.
type problems []error

func (p *problems) add(field, format string, args ...any) {
	*p = append(*p, fmt.Errorf("%s: %w", field, fmt.Errorf(format, args...)))
}

func (p *problems) oneOf(field, value string, values ...string) {
	if !slices.Contains(values, value) {
		p.add(field, "%q is none of %s", value, strings.Join(values, ", "))
	}
}

// absolute wants clean absolute paths. Empty ones are left to the default.
func (p *problems) absolute(field string, paths ...string) {
	for _, s := range paths {
		if s != "" && (!path.IsAbs(s) || path.Clean(s) != s) {
			p.add(field, "%q isn't an absolute path in its shortest form", s)
		}
	}
}

func (p *Platform) validate() error {
	var found problems
	if p.Title == "" {
		found.add("title", "is missing")
	}
	if len(p.Sources) == 0 {
		found.add("sources", "name where the facts are from")
	}
	for _, part := range slices.Sorted(maps.Keys(p.Use.Lacks)) {
		found.oneOf("use.lacks", part, parts...)
	}
	p.Cluster.check(&found)
	p.Node.check(&found)
	return errors.Join(found...)
}

func (c *Cluster) check(found *problems) {
	if s := c.PodSecurity; s != nil {
		levels := []string{"", "privileged", "baseline", "restricted"}
		found.oneOf("cluster.podSecurity.enforce", s.Enforce, levels...)
		found.oneOf("cluster.podSecurity.warn", s.Warn, levels...)
	}
}

func (n *Node) check(found *problems) {
	n.checkName(found)
	for _, key := range slices.Sorted(maps.Keys(n.Labels)) {
		for _, problem := range append(validation.IsQualifiedName(key), validation.IsValidLabelValue(n.Labels[key])...) {
			found.add("node.labels."+key, "%s", problem)
		}
	}
	for i, t := range n.Taints {
		field := fmt.Sprintf("node.taints[%d]", i)
		for _, problem := range append(validation.IsQualifiedName(t.Key), validation.IsValidLabelValue(t.Value)...) {
			found.add(field, "%s", problem)
		}
		found.oneOf(field+".effect", string(t.Effect),
			string(corev1.TaintEffectNoSchedule), string(corev1.TaintEffectPreferNoSchedule), string(corev1.TaintEffectNoExecute))
	}
	n.checkFiles(found)
	if _, err := strconv.ParseUint(n.Umask, 8, 9); n.Umask != "" && err != nil {
		found.add("node.umask", "%q is no octal number such as 077", n.Umask)
	}
	found.absolute("node.kubelet.root", n.Kubelet.Root)
	found.absolute("node.kubelet.view", n.Kubelet.View...)
	found.oneOf("node.containerd.version", n.Containerd.Version, "", "2", "1.7")
	found.absolute("node.containerd.socket", n.Containerd.Socket)
	found.absolute("node.containerd.cdiDirs", n.Containerd.CDIDirs...)
	n.Driver.check(found)
}

func (n *Node) checkName(found *problems) {
	if n.NameFormat == "" {
		return
	}
	// Node 100 has the longest name.
	first, last := fmt.Sprintf(n.NameFormat, 0), fmt.Sprintf(n.NameFormat, 100)
	for _, problem := range validation.IsDNS1123Subdomain(last) {
		found.add("node.nameFormat", "%s: %s", last, problem)
	}
	if first == last || strings.Contains(last, "%!") {
		found.add("node.nameFormat", "%q has no place for a number: %%d", n.NameFormat)
	}
	if len(last) > maxNodeName {
		found.add("node.nameFormat", "%s has more than %d letters", last, maxNodeName)
	}
}

func (n *Node) checkFiles(found *problems) {
	for _, link := range slices.Sorted(maps.Keys(n.Links)) {
		found.absolute("node.links", link)
		if n.Links[link] == "" {
			found.add("node.links."+link, "leads nowhere")
		}
	}
	for i, m := range n.Mounts {
		field := fmt.Sprintf("node.mounts[%d]", i)
		if m.Path == "" {
			found.add(field+".path", "is missing")
		}
		found.absolute(field+".path", m.Path)
		for link := range n.Links {
			if m.Path == link || strings.HasPrefix(m.Path, link+"/") {
				found.add(field+".path", "%s leads through the link %s (node.links)", m.Path, link)
			}
		}
		found.oneOf(field+".type", m.Type, "", "tmpfs", "disk", "overlay")
		for _, option := range m.Options {
			found.oneOf(field+".options", option, "ro", "noexec", "nosuid", "nodev")
		}
		if m.Type == "" && len(m.Options) == 0 {
			found.add(field, "changes nothing: it has neither a type nor options")
		}
	}
}

func (d *Driver) check(found *problems) {
	found.absolute("node.driver.root", d.Root)
	for field, dir := range map[string]string{"node.driver.libraries": d.Libraries, "node.driver.programs": d.Programs} {
		if path.IsAbs(dir) || path.Clean("/"+dir) != "/"+dir && dir != "" {
			found.add(field, "%q is no path in node.driver.root", dir)
		}
	}
	switch _, err := d.hardware(); {
	case d.Machine == "" && !d.None:
		found.add("node.driver.machine", "name the hardware, or leave the driver out with none")
	case d.Machine != "" && err != nil:
		found.add("node.driver.machine", "%w", err)
	}
}

func (d *Driver) hardware() (nvmlsim.Description, error) {
	spec, err := nvmlsim.ParseSpec([]byte(d.Machine))
	if err != nil {
		return nvmlsim.Description{}, err
	}
	return nvmlsim.Describe(spec, "node")
}

// GPUs is how many a node has, of a platform that Find returned.
func (d *Driver) GPUs() int {
	hardware, _ := d.hardware() // validated before
	return len(hardware.GPUs)
}
