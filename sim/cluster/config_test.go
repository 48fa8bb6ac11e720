package cluster

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden compares text with a file of testdata. Set UPDATE_GOLDEN=1 to write
// the files again, and read the difference before committing it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func testCluster(t *testing.T) *Cluster {
	t.Helper()
	options := Options{Name: "t", Nodes: 2, FeatureGates: map[string]bool{"B": false, "A": true}}.withDefaults()
	return mustCluster(t, options)
}

func mustCluster(t *testing.T, options Options) *Cluster {
	t.Helper()
	c, err := newCluster(options, 3)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestKubeletConfig(t *testing.T) {
	o := kubeletOptions{kubernetes: "1.37", cgroupRoot: "/localcluster/t/node-0", socket: "/run/containerd/containerd.sock", hasKernelLog: true}
	golden(t, "kubelet-1.37.yaml", kubeletConfig(o))
	o.kubernetes, o.hasKernelLog = "1.31", false
	golden(t, "kubelet-1.31-no-kernel-log.yaml", kubeletConfig(o))
}

func TestContainerdConfig(t *testing.T) {
	o := runtimeOptions{overlay: true, socket: "/run/containerd/containerd.sock", cdiDirs: []string{"/etc/cdi", "/var/run/cdi"}}
	golden(t, "containerd.toml", containerdConfig(o))
	golden(t, "containerd-1.7.toml", oldContainerdConfig(o))
}

func TestCRIOConfig(t *testing.T) {
	golden(t, "crio.toml", crioConfig(runtimeOptions{overlay: true, socket: "/var/run/crio/crio.sock", cdiDirs: []string{"/etc/cdi", "/var/run/cdi"}}))
}

func TestCNIConfig(t *testing.T) { golden(t, "cni.conflist", cniConfig("10.244.1.0/24")) }

func TestKubeconfig(t *testing.T) {
	golden(t, "kubeconfig.yaml", kubeconfig("u", "https://198.18.0.2", []byte("CA"), credentials{[]byte("CRT"), []byte("KEY")}))
}

func TestMachineSpecs(t *testing.T) {
	c := testCluster(t)
	for name, spec := range map[string]any{"control-plane.json": c.controlPlaneSpec(), "node.json": c.nodeSpec(1)} {
		text, err := json.MarshalIndent(spec, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		// The number of processors is this machine's.
		golden(t, name, strings.ReplaceAll(string(text), fewerThreads(), "GOMAXPROCS=N")+"\n")
	}
}

func TestSameCluster(t *testing.T) {
	base := Options{}.withDefaults()
	for name, tc := range map[string]struct {
		change func(*Options)
		want   bool
	}{
		"nothing":       {func(*Options) {}, true},
		"empty gates":   {func(o *Options) { o.FeatureGates = map[string]bool{} }, true},
		"binaries":      {func(o *Options) { o.BinDir = "/elsewhere" }, true},
		"nodes":         {func(o *Options) { o.Nodes = 2 }, false},
		"platform":      {func(o *Options) { o.Platform = "gke-cos" }, false},
		"Kubernetes":    {func(o *Options) { o.Kubernetes = "1.36" }, false},
		"feature gates": {func(o *Options) { o.FeatureGates = map[string]bool{"A": true} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			other := base
			tc.change(&other)
			if got := sameCluster(base, other); got != tc.want {
				t.Errorf("got %t, want %t", got, tc.want)
			}
		})
	}
}

func TestOpenUnknownCluster(t *testing.T) {
	_, err := Open("no-such-cluster")
	if err == nil || !strings.Contains(err.Error(), "is it up?") {
		t.Errorf("got %v, want a hint that it isn't up", err)
	}
}
