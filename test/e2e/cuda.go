//go:build e2e

package e2e

import (
	"context"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

// cudaProgram is the simulator's CUDA program, as it is in a container that was
// given a GPU. It prints what a context, its multiprocessors and its memory are
// like, and how each allocation ends.
func cudaProgram() []string { return []string{"nvmlsim", "cuda"} }

// inContainer is the command that runs the CUDA program:
//
//	cuda [NAMESPACE/]POD [VARIABLE=VALUE...] [ARGS...]
func inContainer(args []string) []string {
	var env []string
	for len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		env, args = append(env, args[0]), args[1:]
	}
	command := append(cudaProgram(), args...)
	if len(env) > 0 {
		command = append(append([]string{"env"}, env...), command...)
	}
	return command
}

// listDaemons prints a line for each MPS daemon's directory and for each process
// of MPS, sorted; nothing where nothing is left of MPS.
//
//	daemons NODE
const listDaemons = `cd /run/tessera/mps/d 2>/dev/null && ls -A
for p in /proc/[0-9]*; do
  name=$(tr '\0' '\n' <$p/cmdline 2>/dev/null | head -n 1)
  case ${name##*/} in nvidia-cuda-mps-*) echo "${name##*/} ${p#/proc/}" ;; esac
done | sort`

// namespace makes namespaces that go when the story ends.
//
//	namespace NAME...
func namespace(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: namespace NAME...")
	}
	ctx := context.Background()
	ts.Defer(func() {
		if _, err := s.Kubectl(ctx, append([]string{"delete", "namespace", "--wait=true", "--timeout=120s"}, args...)...); err != nil {
			ts.Logf("the story leaves namespaces behind: %v", err)
		}
	})
	for _, name := range args {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := s.Kube().CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
		ts.Check(err)
	}
}
