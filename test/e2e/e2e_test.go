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

func TestStories(t *testing.T) {
	s, err := stack.Up(t.Context(), stack.Options{
		Name:     "e2e",
		Machines: []string{"8xh100-80gb", "2xa100-80gb,2xl40s"},
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
		Deadline: time.Now().Add(40 * time.Minute),
		Setup:    func(env *testscript.Env) error { return setup(env, s) },
		Cmds:     commands(s),
	})
}

// setup gives each story a namespace of its own, named after its file.
func setup(env *testscript.Env, s *stack.Stack) error {
	story := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	env.Setenv("NS", story)
	if _, err := s.Kubectl(context.Background(), "create", "namespace", story); err != nil {
		return err
	}
	env.Defer(func() {
		_, err := s.Kubectl(context.Background(), "delete", "namespace", story, "--wait=true", "--timeout=120s")
		if err != nil {
			env.T().Log("the story leaves its namespace behind:", err)
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
