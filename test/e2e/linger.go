//go:build e2e

package e2e

import (
	"context"
	"io"

	"github.com/rogpeppe/go-internal/testscript"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

// linger starts a process among the mounts of a pod's container that outlives the
// container, as one does that hangs in the driver. To alone pods it counts as an
// alone pod. Without a pod it ends the process.
//
//	linger NODE [POD]
func linger(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) == 0 || len(args) > 2 {
		ts.Fatalf("usage: linger NODE [POD]")
	}
	script := []string{"sh", "-c", `pkill -xf "sleep 1000001"`}
	if len(args) == 2 {
		p, err := s.Kube().CoreV1().Pods(ts.Getenv("NS")).Get(context.Background(), args[1], metav1.GetOptions{})
		ts.Check(err)
		script = []string{"sh", "-c", lingerScript, "sh", string(p.UID), "/run/e2e-locks/" + ts.Getenv("NS")}
	}
	ts.Check(s.Cluster.Run(context.Background(), args[0], cluster.Stdio{Out: io.Discard, Err: ts.Stderr()}, script...))
}

// lingerScript finds the sleeping process of a pod's container by the pod's UID.
const lingerScript = `for i in $(seq 100); do
  for p in /proc/[0-9]*; do
    grep -qs "$1" $p/cgroup && [ "$(tr '\0' ' ' < $p/cmdline)" = "sleep 1000000 " ] || continue
    setsid nsenter -t "${p#/proc/}" -m sleep 1000001 <> "$2" > /dev/null 2>&1 &
    exit 0
  done
  sleep 0.2
done
echo "the pod has no such process" >&2; exit 1`
