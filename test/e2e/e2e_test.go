//go:build e2e

// Package e2e runs stories on real clusters: real etcd, API server, controller
// manager, scheduler, kubelet, containerd and runc, the chart installed by the
// real Helm, the production binaries in their image; only the GPUs are
// simulated. A story is a text file in testdata; its commands are documented in
// commands.go. Stories that run at the same time are on different clusters,
// because some of them kill parts that others need; see lane.go.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/tessera-dra/tessera/test/stack"
)

// mixed is the machine of node-1: GPUs without MIG, and one of each kind with
// MIG. An Ampere GPU in MIG mode is as an admin has set it up.
const mixed = `gpus:
- {model: a100-80gb, count: 2}
- {model: l40s, count: 2}
- {model: a100-80gb, migEnabled: true}
- {model: a30, migEnabled: true}
- {model: h200}
- {model: b200}
- {model: rtx-pro-6000}
`

func TestStories(t *testing.T) {
	image, err := stack.BuildImage(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	stories := queue(t)
	var lanes sync.WaitGroup
	for i := range *laneCount {
		l := &lane{name: fmt.Sprintf("%s-%d", *clusters, i), image: image}
		lanes.Go(func() { l.run(t, stories) })
	}
	lanes.Wait()
}

// wholeGPUs prints an x for each whole GPU on offer.
const wholeGPUs = `go-template={{range .items}}{{range .spec.devices}}{{if eq .attributes.type.string "gpu"}}x{{end}}{{end}}{{end}}`

// setup gives each story a namespace of its own, named after its file. It
// removes leftovers of a failed story elsewhere, so that only that story fails.
func setup(env *testscript.Env, s *stack.Stack) error {
	story := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	env.Setenv("NS", story)
	env.Setenv("WHOLE", wholeGPUs)
	env.Setenv("RUNTIME", s.Cluster.RuntimeComponent())
	env.Setenv("AWAY", fmt.Sprint(int(away.Seconds())))
	chart, err := filepath.Abs("../../deployments/helm/tessera")
	if err != nil {
		return err
	}
	env.Setenv("CHART", chart)
	if err := rewriteManifests(env.WorkDir, s.Convert); err != nil {
		return err
	}
	return ownNamespace(env, s, story, func() {
		mend(context.Background(), env.T().(inLane), s)
	})
}

// ownNamespace makes a story's namespace. When the story ends, the state of the cluster is
// printed if it failed, the namespace is deleted with all in it, and then after is called.
func ownNamespace(env *testscript.Env, s *stack.Stack, name string, after func()) error {
	if _, err := s.Kubectl(context.Background(), "create", "namespace", name); err != nil {
		return err
	}
	env.Defer(func() {
		if env.T().(inLane).Failed() {
			env.T().Log(s.Explain(context.Background()))
		}
		if _, err := s.Kubectl(context.Background(), "delete", "namespace", name, "--wait=true", "--timeout=120s"); err != nil {
			env.T().Log("the story leaves its namespace behind:", err)
		}
		after()
	})
	return nil
}

// rewriteManifests changes a story's manifests, for the API that its cluster serves.
func rewriteManifests(dir string, change func([]byte) ([]byte, error)) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if data, err = change(data); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
		if err := os.WriteFile(file, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}
