//go:build e2e

// Package e2e tells stories on a real cluster: real etcd, apiserver,
// controller-manager, scheduler, kubelet, containerd and runc, the chart
// installed by the real Helm, the production binaries in their image; only the
// GPUs are simulated. A story is a text file in testdata; what its commands
// mean stands in commands.go. Stories run one after the other, because some of
// them kill what others need.
package e2e

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/tessera-dra/tessera/test/stack"
)

var keep = flag.Bool("keep", false, "leave the cluster up afterwards, to look around")

// mixed is the machine of node-1: what has no MIG, and one of each kind that has.
// A GPU of Ampere's in MIG mode is as an admin has set it up.
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
	s, err := stack.Up(t.Context(), stack.Options{
		Name:     "e2e",
		Machines: []string{"8xh100-80gb", mixed},
		Out:      os.Stderr,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !*keep {
		t.Cleanup(func() {
			if err := s.Down(context.WithoutCancel(t.Context())); err != nil {
				t.Errorf("take the cluster down: %v", err)
			}
		})
	}
	t.Run("churn", func(t *testing.T) { churn(t, s) })
	testscript.RunT(serial{t}, testscript.Params{
		Dir:      "testdata",
		Deadline: time.Now().Add(45 * time.Minute),
		Setup:    func(env *testscript.Env) error { return setup(env, s) },
		Cmds:     commands(s),
	})
}

// wholeGPUs prints an x for each whole GPU on offer.
const wholeGPUs = `go-template={{range .items}}{{range .spec.devices}}{{if eq .attributes.type.string "gpu"}}x{{end}}{{end}}{{end}}`

// setup gives each story a namespace of its own, named after its file. What a
// story that failed leaves elsewhere is taken away, so that only it fails.
func setup(env *testscript.Env, s *stack.Stack) error {
	story := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	env.Setenv("NS", story)
	env.Setenv("WHOLE", wholeGPUs)
	if _, err := s.Kubectl(context.Background(), "create", "namespace", story); err != nil {
		return err
	}
	env.Defer(func() {
		_, err := s.Kubectl(context.Background(), "delete", "namespace", story, "--wait=true", "--timeout=120s")
		if err != nil {
			env.T().Log("the story leaves its namespace behind:", err)
		}
		if _, err := s.Kubectl(context.Background(), "delete", "sharingpolicies", "--all"); err != nil {
			env.T().Log("the story leaves its policies behind:", err)
		}
		for _, node := range s.Cluster.Nodes() {
			if _, err := s.Cluster.Exec(context.Background(), node, simulator([]string{"fault", "--clear"})...); err != nil {
				env.T().Log("the story leaves the faults of its hardware behind:", err)
			}
		}
		if err := healthy(context.Background(), s); err != nil {
			env.T().(serial).Errorf("the story leaves something behind: %v", err)
		}
	})
	return nil
}

// serial runs stories one after the other.
type serial struct{ *testing.T }

func (serial) Parallel() {}

func (s serial) Run(name string, f func(testscript.T)) {
	s.T.Run(name, func(t *testing.T) { f(serial{t}) })
}

func (s serial) Verbose() bool { return testing.Verbose() }
