package cluster

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// imitating returns a cluster with two nodes of a platform.
func imitating(t *testing.T, name string) *Cluster {
	t.Helper()
	return mustCluster(t, Options{Name: "t", Platform: name, Nodes: 2}.withDefaults())
}

// with returns a cluster with two nodes of a platform that is no file.
func with(t *testing.T, p platform.Platform) *Cluster {
	t.Helper()
	c := imitating(t, "gke-cos")
	c.platform = p
	return c
}

func TestPlatformNode(t *testing.T) {
	c := imitating(t, "gke-cos")
	for file, node := range map[string]int{"node-gke-cos.json": 0, "node-gke-cos-plain.json": 2} {
		text, err := json.MarshalIndent(c.nodeSpec(node), "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, file, strings.ReplaceAll(string(text), fewerThreads(), "GOMAXPROCS=N")+"\n")
	}
}

// A cluster of each platform can be made.
func TestPlatformClusters(t *testing.T) {
	for _, name := range platform.Names() {
		t.Run(name, func(t *testing.T) {
			options := Options{Platform: name}.withDefaults()
			if err := options.validate(); err != nil {
				t.Fatal(err)
			}
			c := mustCluster(t, options)
			if diff := cmp.Diff([]string{c.GPUNodes()[0], "system-0"}, c.Nodes()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestPlatformDecidesDefaults(t *testing.T) {
	for name, tc := range map[string]struct {
		options Options
		want    string // in the options' text
	}{
		"platform": {Options{Platform: "gke-cos"}, "platform gke-cos, Kubernetes " + DefaultKubernetes},
		"override": {Options{Platform: "gke-cos", Kubernetes: "1.36"}, "platform gke-cos, Kubernetes 1.36, kubelets 1.36"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.options.withDefaults().String(); !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestLongNames(t *testing.T) {
	c := imitating(t, "gke-cos")
	c.plan.name, c.plan.nodes = strings.Repeat("n", 32), nodeNames(1, "ip-10-0-1-%d.eu-central-1.compute.internal", true)
	if err := c.validateSockets(); err == nil || !strings.Contains(err.Error(), "node.nameFormat") {
		t.Errorf("got %v, want an error that names the field", err)
	}
}

// What lies in a file system of the platform's has none of its own.
func TestPlatformDirs(t *testing.T) {
	for name, tc := range map[string]struct {
		node platform.Node
		want []string
	}{
		"nothing":         {platform.Node{}, []string{"/run", "/tmp", "/var", "/opt", "/home", "/etc/cdi"}},
		"overlay on /etc": {platform.Node{Mounts: []platform.Mount{{Path: "/etc", Type: "overlay"}}}, []string{"/run", "/tmp", "/var", "/opt", "/home"}},
		"options of /etc": {platform.Node{Mounts: []platform.Mount{{Path: "/etc", Options: []string{"ro"}}}}, []string{"/run", "/tmp", "/var", "/opt", "/home", "/etc/cdi"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, with(t, platform.Platform{Node: tc.node}).nodeDirs()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func component(spec machine.Spec, name string) machine.Component {
	for _, component := range spec.Components {
		if component.Name == name {
			return component
		}
	}
	return machine.Component{}
}

func TestPlatformKubelet(t *testing.T) {
	c := with(t, platform.Platform{Node: platform.Node{
		Labels: map[string]string{
			"kubernetes.io/arch": "arm64", "feature.node.kubernetes.io/pci-10de.present": "true", "accelerator": "nvidia",
			"node-role.kubernetes.io/worker": "", "run.k8s.io/x": "y",
		},
		Kubelet:      platform.Kubelet{Root: "/mnt/kubelet", View: []string{"/mnt/kubelet", "/dev"}},
		Runtime:      platform.Runtime{Socket: "/run/k3s/containerd/containerd.sock", CDIDirs: []string{"/run/cdi"}},
		DevicePlugin: true,
		Driver:       platform.Driver{Hardware: "8xl4"},
	}})
	spec := c.nodeSpec(0)
	kubelet := component(spec, "kubelet")
	for flag, want := range map[string]string{
		"--root-dir":    "=/mnt/kubelet",
		"--node-labels": "=accelerator=nvidia,feature.node.kubernetes.io/pci-10de.present=true",
	} {
		if diff := cmp.Diff([]string{flag + want}, matching(kubelet.Args, flag)); diff != "" {
			t.Error(diff)
		}
	}
	if diff := cmp.Diff(map[string]string{"kubernetes.io/arch": "arm64", "node-role.kubernetes.io/worker": "", "run.k8s.io/x": "y"}, c.cloudLabels()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"/run", "/tmp", "/var", "/opt", "/home", "/mnt/kubelet"}, spec.Dirs); diff != "" {
		t.Error(diff)
	}
	if kubelet.WaitFor[0] != "unix:///run/k3s/containerd/containerd.sock" || len(kubelet.View) != 2 {
		t.Errorf("%+v", kubelet)
	}
	plugin := component(spec, devicePluginComponent)
	if diff := cmp.Diff([]string{"/opt/localcluster/bin/deviceplugin", "nvidia.com/gpu", "8"}, plugin.Args); diff != "" {
		t.Error(diff)
	}
	if component(c.nodeSpec(2), devicePluginComponent).Name != "" {
		t.Error("a device plugin runs on the plain node")
	}
	if labels := matching(component(c.nodeSpec(2), "kubelet").Args, "--node-labels"); labels != nil {
		t.Errorf("labels of the plain node: %v", labels)
	}
}

func matching(args []string, prefix string) (found []string) {
	for _, arg := range args {
		if strings.HasPrefix(arg, prefix) {
			found = append(found, arg)
		}
	}
	return found
}

func TestPlatformConfig(t *testing.T) {
	golden(t, "kubelet-taints.yaml", registerWithTaints([]corev1.Taint{
		{Key: "nvidia.com/gpu", Value: "present", Effect: corev1.TaintEffectNoSchedule}, {Key: "sku", Effect: corev1.TaintEffectNoExecute},
	}))
	o := runtimeOptions{socket: "/run/k3s/x.sock", cdiDirs: []string{"/run/cdi"}}
	for name, config := range map[string]string{"2": containerdConfig(o), "1.7": oldContainerdConfig(o)} {
		for _, want := range []string{"enable_cdi = true\n", "cdi_spec_dirs = [\"/run/cdi\"]\n", "address = \"/run/k3s/x.sock\"\n"} {
			if !strings.Contains(config, want) {
				t.Errorf("containerd %s: no %q in\n%s", name, want, config)
			}
		}
	}
}

func TestAdmission(t *testing.T) {
	if config := admissionConfig(platform.Cluster{}); config != nil {
		t.Errorf("of no platform: %s", config)
	}
	all := platform.Cluster{
		PodSecurity:       &platform.PodSecurity{Enforce: "baseline", Warn: "restricted", ExemptNamespaces: []string{"kube-system"}},
		LimitCriticalPods: true,
		Objects:           "kind: ValidatingAdmissionPolicy\n",
	}
	golden(t, "admission.yaml", string(admissionConfig(all)))
	golden(t, "objects.yaml", objects(all))
	c := imitating(t, "gke-cos")
	if flag := matching(c.apiserverArgs(), "--admission-control-config-file"); len(flag) != 1 {
		t.Errorf("the API server is started with %v", flag)
	}
}

func TestDriver(t *testing.T) {
	gke, err := platform.Find("gke-cos")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "nvidia-driver-gke-cos.sh", string(driverFiles(gke.Node, "n")[driverScript]))
	own := platform.Driver{OwnTree: true, Root: "/run/nvidia/driver", LdCache: true, Libraries: "usr/lib64", Hardware: "gpus:\n- {model: a30}\n"}
	files := driverFiles(platform.Node{Driver: own}, "n")
	golden(t, "nvidia-driver-own-tree.sh", string(files[driverScript]))
	if string(files[driverMachine]) != own.Hardware {
		t.Errorf("the machine's file: %q", files[driverMachine])
	}
	if files := driverFiles(platform.Node{}, "n"); files != nil {
		t.Errorf("of no driver: %v", files)
	}
}

// Prebuilt binaries may lack what a platform needs.
func TestPlatformWithoutItsPrograms(t *testing.T) {
	c := imitating(t, "gke-cos")
	c.options.BinDir = t.TempDir()
	err := c.buildPlatformPrograms(t.Context())
	for _, want := range []string{c.options.BinDir, "nvmlsim", "libnvidia-ml.so.1", "platform gke-cos"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestVar(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "var")
	if err := writeVar(dir); err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(filepath.Join(dir, "run")); err != nil || target != "/run" {
		t.Errorf("/var/run leads to %q, %v", target, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "tmp")); err != nil || info.Mode()&(os.ModeSticky|0o777) != os.ModeSticky|0o777 {
		t.Errorf("/var/tmp: %v, %v", info, err)
	}
}
