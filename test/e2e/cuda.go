//go:build e2e

package e2e

import (
	"context"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

// cudaProgram is the simulator's CUDA program, as the test image has it. It prints
// its context, multiprocessors and memory, and the result of each allocation.
func cudaProgram(args ...string) []string {
	return append([]string{"nvmlsim", "cuda"}, args...)
}

// inContainer is the command that runs the CUDA program:
//
//	cuda [NAMESPACE/]POD [VARIABLE=VALUE...] [ARGS...]
func inContainer(args []string) []string {
	n := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") })
	if n < 0 {
		n = len(args)
	}
	return slices.Concat([]string{"env"}, args[:n], cudaProgram(args[n:]...))
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
