package cluster

import (
	"context"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
)

// tools are programs that no cluster is made of. They are built when a test asks for
// them.
func tools() []unit {
	const prometheus, adapter = "sim/cluster/prometheus", "sim/cluster/prometheus-adapter"
	const example = "sim/cluster/dra-example-driver"
	const repository = "github.com/prometheus/prometheus/cmd/"
	tools := []unit{
		{
			name: "prometheus", dir: prometheus, sources: []string{prometheus},
			files: map[string]string{"prometheus": repository + "prometheus", "promtool": repository + "promtool"},
			// Of the ways to find targets it needs one.
			flags: []string{"-tags=remove_all_sd,enable_kubernetes_sd", strip},
			note:  "about 2 minutes on 2 cores",
		},
		{
			name: "prometheus-adapter", dir: adapter, sources: []string{adapter},
			files: map[string]string{"prometheus-adapter": "sigs.k8s.io/prometheus-adapter/cmd/adapter"},
			flags: []string{strip},
			note:  "about 3 minutes on 2 cores",
		},
		{
			name: "dra-example-driver", dir: example, sources: []string{example},
			files: map[string]string{"dra-example-kubeletplugin": "sigs.k8s.io/dra-example-driver/cmd/dra-example-kubeletplugin"},
			flags: []string{strip},
			note:  "about 2 minutes on 2 cores",
		},
	}
	for _, name := range slices.Sorted(maps.Keys(consumers())) {
		unit := moduleUnit(name, consumers()[name])
		unit.note = "2 to 6 minutes on 2 cores"
		tools = append(tools, unit)
	}
	return tools
}

// consumers are programs of others that use the devices of a driver, as they are built for
// test/consumers: by the directory of the module, the program's name and its package.
func consumers() map[string]map[string]string {
	const volcano, kai = "volcano.sh/volcano/cmd/", "github.com/NVIDIA/KAI-scheduler/cmd/"
	return map[string]map[string]string{
		"kueue":   {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
		"jobset":  {"jobset": "sigs.k8s.io/jobset"},
		"lws":     {"lws": "sigs.k8s.io/lws/cmd"},
		"kuberay": {"kuberay-operator": "github.com/ray-project/kuberay/ray-operator"},
		"volcano": {"vc-scheduler": volcano + "scheduler", "vc-controller-manager": volcano + "controller-manager"},
		"kai": {
			"kai-operator": kai + "operator", "kai-scheduler": kai + "scheduler", "podgrouper": kai + "podgrouper", "kai-binder": kai + "binder",
			"kai-podgroupcontroller": kai + "podgroupcontroller", "kai-queuecontroller": kai + "queuecontroller", "kai-admission": kai + "admission",
		},
	}
}

// ModuleDir returns where the module is that a directory of sim/cluster pins: it has
// manifests too.
func ModuleDir(ctx context.Context, dir, module string) (string, error) {
	root, err := repositoryRoot()
	if err != nil {
		return "", err
	}
	u := moduleUnit(dir, nil)
	return u.modulePath(ctx, root, module)
}

// Tool returns the path of one program that clusters are made of or worked
// with, such as helm or prometheus, and builds it into the cache first if it isn't there. It
// needs no cluster and no root. Programs whose source depends on the Kubernetes
// version, kubectl among them, are not to be had here.
func Tool(ctx context.Context, name string, log io.Writer) (string, error) {
	b, err := newBuilder(ctx, log)
	if err != nil {
		return "", err
	}
	for _, u := range append(units(Versions{}, ""), tools()...) {
		if _, found := u.files[name]; !found || u.links != nil {
			continue
		}
		dir, err := b.ensure(ctx, &u, "")
		if err != nil {
			return "", err
		}
		return filepath.Join(dir, name), nil
	}
	return "", fmt.Errorf("%s is not among the programs that are built without a Kubernetes version", name)
}
