package platform

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// checks collects what is wrong with a platform.
type checks []error

func (c *checks) addf(ok bool, format string, args ...any) {
	if !ok {
		*c = append(*c, fmt.Errorf(format, args...))
	}
}

// oneOf checks the value of a field against those that are known.
func (c *checks) oneOf(field, value string, known ...string) {
	c.addf(slices.Contains(known, value), "%s: %q is none of %s", field, value, strings.Join(slices.DeleteFunc(known, isEmpty), ", "))
}

func (c *checks) absolute(field, value string) {
	c.addf(value == "" || path.IsAbs(value) && path.Clean(value) == value, "%s: %q is no clean absolute path", field, value)
}

func (c *checks) pattern(field, value, pattern string) {
	c.addf(value == "" || regexp.MustCompile("^("+pattern+")$").MatchString(value), "%s: %q doesn't match %s", field, value, pattern)
}

func isEmpty(s string) bool { return s == "" }

func (p *Platform) validate() error {
	var c checks
	c.addf(p.Title != "", "title is missing")
	c.addf(len(p.Sources) > 0, "sources: name where the facts are from")
	p.Cluster.check(&c)
	p.Node.check(&c)
	p.Use.check(&c)
	return errors.Join(c...)
}

func (cl *Cluster) check(c *checks) {
	if s := cl.PodSecurity; s != nil {
		c.addf(s.Enforce != "" || s.Warn != "", "cluster.podSecurity: neither enforce nor warn")
		for field, level := range map[string]string{"enforce": s.Enforce, "warn": s.Warn} {
			c.oneOf("cluster.podSecurity."+field, level, "", "privileged", "baseline", "restricted")
		}
	}
}

func (n *Node) check(c *checks) {
	c.addf(n.NameFormat == "" || strings.Count(n.NameFormat, "%") == 1 && strings.Count(n.NameFormat, "%d") == 1,
		"node.nameFormat: %q needs one %%d", n.NameFormat)
	// Node 100 has the longest name, which is a label's value, too.
	last := strings.ReplaceAll(n.NameFormat, "%d", "100")
	for _, problem := range append(validation.IsDNS1123Subdomain(last), validation.IsValidLabelValue(last)...) {
		c.addf(n.NameFormat == "", "node.nameFormat: %s: %s", last, problem)
	}
	for _, key := range slices.Sorted(maps.Keys(n.Labels)) {
		for _, problem := range slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(n.Labels[key])) {
			c.addf(false, "node.labels[%s]: %s", key, problem)
		}
	}
	for i, t := range n.Taints {
		for _, problem := range append(validation.IsQualifiedName(t.Key), validation.IsValidLabelValue(t.Value)...) {
			c.addf(false, "node.taints[%d]: %s", i, problem)
		}
		c.oneOf(fmt.Sprintf("node.taints[%d].effect", i), string(t.Effect), string(corev1.TaintEffectNoSchedule), string(corev1.TaintEffectNoExecute))
	}
	n.checkFiles(c)
	c.absolute("node.kubelet.root", n.Kubelet.Root)
	for _, dir := range n.Kubelet.View {
		c.absolute("node.kubelet.view", dir)
	}
	c.oneOf("node.runtime.name", n.Runtime.Name, "", "containerd", "containerd-1.7", "cri-o")
	c.absolute("node.runtime.socket", n.Runtime.Socket)
	for _, dir := range n.Runtime.CDIDirs {
		c.absolute("node.runtime.cdiDirs", dir)
	}
	n.Driver.check(c)
}

// checkFiles checks what the node's file systems look like.
func (n *Node) checkFiles(c *checks) {
	for _, link := range slices.Sorted(maps.Keys(n.Links)) {
		c.absolute("node.links", link)
		c.absolute(fmt.Sprintf("node.links[%s]", link), n.Links[link])
	}
	for i, m := range n.Mounts {
		field := fmt.Sprintf("node.mounts[%d]", i)
		c.addf(m.Path != "", "%s.path is missing", field)
		c.absolute(field+".path", m.Path)
		c.oneOf(field+".type", m.Type, "", "tmpfs", "disk", "overlay")
		c.addf(m.Type != "" || len(m.Options) > 0, "%s changes nothing: it has neither type nor options", field)
		for _, o := range m.Options {
			c.oneOf(field+".options", o, "ro", "noexec", "nosuid", "nodev")
		}
	}
}

func (d *Driver) check(c *checks) {
	c.absolute("node.driver.root", d.Root)
	for field, dir := range map[string]string{"libraries": d.Libraries, "programs": d.Programs} {
		c.addf(dir == "" || path.Clean(dir) == dir && !path.IsAbs(dir) && !strings.HasPrefix(dir, ".."),
			"node.driver.%s: %q isn't a directory in the root", field, dir)
	}
	_, err := d.describe()
	c.addf(d.Hardware == "" || err == nil, "node.driver.hardware: %w", err)
	c.addf(!d.OwnTree || d.Root != "" && d.Root != "/", "node.driver.ownTree: the root %q is the node's own", d.Root)
}

func (d *Driver) describe() (nvmlsim.Description, error) {
	spec, err := nvmlsim.ParseSpec([]byte(d.Hardware))
	if err != nil {
		return nvmlsim.Description{}, err
	}
	return nvmlsim.Describe(spec, "node")
}

// GPUs is how many a node has, of a platform that Find returned.
func (d *Driver) GPUs() int {
	hardware, _ := d.describe() // validated before
	return len(hardware.GPUs)
}

func (u *Use) check(c *checks) {
	c.pattern("use.values", u.Values, `[a-z0-9.-]+\.yaml`)
	c.addf((u.Cannot == "") == (u.Message == ""), "use: cannot and message go together")
	_, err := regexp.Compile(u.Message)
	c.addf(err == nil, "use.message: %w", err)
	c.addf(u.Withheld >= 0, "use.withheld: %d", u.Withheld)
	for _, part := range slices.Sorted(maps.Keys(u.Lacks)) {
		c.oneOf("use.lacks", part, Parts()...)
		c.addf(u.Lacks[part] != "", "use.lacks[%s] has no reason", part)
	}
	for _, command := range u.BeforeCommands() {
		c.addf(!strings.HasSuffix(command, `\`), "use.before: %q goes on in the next line: write one command a line", command)
	}
}

// BeforeCommands returns the commands of Before.
func (u *Use) BeforeCommands() []string {
	return slices.DeleteFunc(strings.Split(u.Before, "\n"), isEmpty)
}
