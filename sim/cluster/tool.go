package cluster

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
)

// KueueModule is the directory of the module that pins Kueue, relative to the repository's
// root.
const KueueModule = "sim/cluster/kueue"

// tools are programs that no cluster is made of. They are built when a test asks for
// them.
func tools() []unit {
	const prometheus, adapter, kueue = "sim/cluster/prometheus", "sim/cluster/prometheus-adapter", KueueModule
	const example = "sim/cluster/dra-example-driver"
	const repository = "github.com/prometheus/prometheus/cmd/"
	return []unit{
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
			name: "kueue", dir: kueue, sources: []string{kueue},
			files: map[string]string{"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
			flags: []string{strip},
			note:  "about 4 minutes on 2 cores",
		},
		{
			name: "dra-example-driver", dir: example, sources: []string{example},
			files: map[string]string{"dra-example-kubeletplugin": "sigs.k8s.io/dra-example-driver/cmd/dra-example-kubeletplugin"},
			flags: []string{strip},
			note:  "about 2 minutes on 2 cores",
		},
	}
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
