//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"path"
	"strings"

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

// unstarted makes a container like that of a running pod, in the pod's cgroup, and doesn't start
// it. The node's container runtime doesn't know it, as one that it was making when it was killed.
//
//	unstarted NODE POD
func unstarted(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: unstarted NODE POD")
	}
	ctx, node := context.Background(), args[0]
	p, err := s.Kube().CoreV1().Pods(ts.Getenv("NS")).Get(ctx, args[1], metav1.GetOptions{})
	ts.Check(err)
	_, id, found := strings.Cut(p.Status.ContainerStatuses[0].ContainerID, "://")
	if !found {
		ts.Fatalf("pod %s has no container yet", p.Name)
	}
	bundle, err := s.Cluster.Exec(ctx, node, "sh", "-c", findBundle, "sh", id)
	ts.Check(err)
	config, err := s.Cluster.Exec(ctx, node, "cat", path.Join(strings.TrimSpace(string(bundle)), "config.json"))
	ts.Check(err)
	config, err = secondConfig(config, strings.TrimSpace(string(bundle)))
	ts.Check(err)
	dir := "/run/e2e-unstarted/" + string(p.UID)
	ts.Defer(func() { _, _ = s.Cluster.Exec(ctx, node, "sh", "-c", removeUnstarted, "sh", dir) })
	ts.Check(s.Cluster.Run(ctx, node, cluster.Stdio{In: bytes.NewReader(config), Err: ts.Stderr()}, "sh", "-ec", createOnly, "sh", dir))
}

// findBundle prints the directory with the configuration of a container of containerd or CRI-O.
const findBundle = `ls -d /run/containerd/io.containerd.runtime.v2.task/k8s.io/$1 /run/containers/storage/*-containers/$1/userdata 2>/dev/null | grep .`

// createOnly has runc create a container. The container inherits the command's output, whose end
// Run would wait for.
const createOnly = `mkdir -p $1
cat > $1/config.json
runc --root $1/state create --bundle $1 unstarted < /dev/null > $1/log 2>&1 || { cat $1/log >&2; exit 1; }`

// removeUnstarted ends that container, if the plugin hasn't, and removes its files.
const removeUnstarted = `runc --root $1/state delete --force unstarted; rm -rf $1`

// secondConfig returns the configuration of a second container with the same root file system, beside
// the first one in its pod's cgroup.
func secondConfig(config []byte, bundle string) ([]byte, error) {
	var c map[string]any
	decoder := json.NewDecoder(bytes.NewReader(config))
	decoder.UseNumber() // limits don't fit into a float64
	if err := decoder.Decode(&c); err != nil {
		return nil, err
	}
	root, linux := c["root"].(map[string]any), c["linux"].(map[string]any)
	if files := root["path"].(string); !path.IsAbs(files) {
		root["path"] = path.Join(bundle, files)
	}
	linux["cgroupsPath"] = path.Join(path.Dir(linux["cgroupsPath"].(string)), "unstarted")
	return json.Marshal(c)
}
