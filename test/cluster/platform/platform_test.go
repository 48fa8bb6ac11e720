package platform

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Every file is complete, has no unknown fields and only values that a cluster can be made of.
func TestProfiles(t *testing.T) {
	if len(Names()) == 0 {
		t.Fatal("there are no platforms")
	}
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			p, err := Find(name)
			if err != nil {
				t.Fatal(err)
			}
			if p.Name != name {
				t.Errorf("it calls itself %q", p.Name)
			}
		})
	}
}

func TestUnknownPlatform(t *testing.T) {
	_, err := Find("no-such-cloud")
	if err == nil || !strings.Contains(err.Error(), `"no-such-cloud"`) || !strings.Contains(err.Error(), "gke-cos") {
		t.Errorf("got %v, want an error with the name and those that exist", err)
	}
}

func TestValidate(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Platform)
		want   string // the field in the error; empty means valid
	}{
		"nothing":               {func(*Platform) {}, ""},
		"no title":              {func(p *Platform) { p.Title = "" }, "title"},
		"no sources":            {func(p *Platform) { p.Sources = nil }, "sources"},
		"level of pod security": {func(p *Platform) { p.Cluster.PodSecurity = &PodSecurity{Enforce: "strict"} }, "cluster.podSecurity.enforce"},
		"name without number":   {func(p *Platform) { p.Node.NameFormat = "node" }, "node.nameFormat"},
		"number not as number":  {func(p *Platform) { p.Node.NameFormat = "node-%s" }, "node.nameFormat"},
		"name in capitals":      {func(p *Platform) { p.Node.NameFormat = "Node-%d" }, "node.nameFormat"},
		"name too long":         {func(p *Platform) { p.Node.NameFormat = strings.Repeat("n", 61) + "%d" }, "node.nameFormat"},
		"name with dots":        {func(p *Platform) { p.Node.NameFormat = "ip-10-0-1-%d.eu-central-1.compute.internal" }, ""},
		"name with zeros":       {func(p *Platform) { p.Node.NameFormat = "aks-gpu-12345678-vmss%06d" }, ""},
		"key of a label":        {func(p *Platform) { p.Node.Labels = map[string]string{"a/b/c": ""} }, "node.labels.a/b/c"},
		"value of a label":      {func(p *Platform) { p.Node.Labels = map[string]string{"a": "b c"} }, "node.labels.a"},
		"effect of a taint":     {func(p *Platform) { p.Node.Taints = []corev1.Taint{{Key: "a", Effect: "Never"}} }, "node.taints[0].effect"},
		"relative mount":        {func(p *Platform) { p.Node.Mounts = []Mount{{Path: "var", Type: "tmpfs"}} }, "node.mounts[0].path"},
		"type of a mount":       {func(p *Platform) { p.Node.Mounts = []Mount{{Path: "/var", Type: "ext4"}} }, "node.mounts[0].type"},
		"option of a mount":     {func(p *Platform) { p.Node.Mounts = []Mount{{Path: "/var", Options: []string{"rw"}}} }, "node.mounts[0].options"},
		"mount of nothing":      {func(p *Platform) { p.Node.Mounts = []Mount{{Path: "/var"}} }, "node.mounts[0]"},
		"relative link":         {func(p *Platform) { p.Node.Links = map[string]string{"usr": "/other"} }, "node.links"},
		"link to nowhere":       {func(p *Platform) { p.Node.Links = map[string]string{"/usr": ""} }, "node.links./usr"},
		"mount through a link": {func(p *Platform) {
			p.Node.Links = map[string]string{"/usr/lib": "/other"}
			p.Node.Mounts = []Mount{{Path: "/usr/lib/nvidia", Type: "disk"}}
		}, "node.mounts[0].path"},
		"umask":                {func(p *Platform) { p.Node.Umask = "0o77" }, "node.umask"},
		"kubelet's root":       {func(p *Platform) { p.Node.Kubelet.Root = "/var/lib/kubelet/" }, "node.kubelet.root"},
		"kubelet's view":       {func(p *Platform) { p.Node.Kubelet.View = []string{"dev"} }, "node.kubelet.view"},
		"containerd's version": {func(p *Platform) { p.Node.Containerd.Version = "1.6" }, "node.containerd.version"},
		"containerd's socket":  {func(p *Platform) { p.Node.Containerd.Socket = "unix:///run/x" }, "node.containerd.socket"},
		"CDI directories":      {func(p *Platform) { p.Node.Containerd.CDIDirs = []string{"cdi"} }, "node.containerd.cdiDirs"},
		"driver's libraries":   {func(p *Platform) { p.Node.Driver.Libraries = "/usr/lib" }, "node.driver.libraries"},
		"driver's programs":    {func(p *Platform) { p.Node.Driver.Programs = "../bin" }, "node.driver.programs"},
		"no hardware":          {func(p *Platform) { p.Node.Driver.Machine = "" }, "node.driver.machine"},
		"unknown hardware":     {func(p *Platform) { p.Node.Driver.Machine = "2xh1000" }, "node.driver.machine"},
		"no driver":            {func(p *Platform) { p.Node.Driver = Driver{None: true} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := &Platform{Title: "t", Sources: []string{"s"}, Node: Node{Driver: Driver{Machine: "2xl4"}}}
			tc.change(p)
			err := p.validate()
			if tc.want == "" && err != nil {
				t.Fatalf("unexpected error: %v", err)
			}
			if tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want+": ")) {
				t.Fatalf("got error %v, want one about %q", err, tc.want)
			}
		})
	}
}
