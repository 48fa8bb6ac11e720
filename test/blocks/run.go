package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

const (
	// blockTime is how long a block may take: one of them builds all programs.
	blockTime = 5 * time.Minute
	// publicImage is the image of the pages' pods. The nodes have one that stands in for it.
	publicImage = "docker.io/library/debian:stable-slim"
	machine     = "4xh100-80gb,4xl40s" // the models that the pages name
)

// runner counts the blocks.
type runner struct {
	cluster              string
	list, keep           bool
	ran, failed, leftOut int
}

// onCluster runs the blocks of a page on a cluster of its own.
func (r *runner) onCluster(ctx context.Context, file string, blocks []block) (err error) {
	began := time.Now()
	scratch, err := os.MkdirTemp("", "blocks-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	failedBefore := r.failed
	defer func() { // also of a cluster that didn't come up
		if !r.keep || r.failed == failedBefore {
			err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx), r.cluster, os.Stderr))
		}
	}()
	c, err := up(ctx, r.cluster, blocks)
	if err != nil {
		return err
	}
	bin := filepath.Join(scratch, "bin")
	if err := programs(ctx, c, bin); err != nil {
		return err
	}
	env := append(os.Environ(), "KUBECONFIG="+c.KubeconfigPath(), "PATH="+bin+":"+os.Getenv("PATH"), "SCRATCH="+scratch, "CLUSTER="+r.cluster)
	for _, b := range blocks {
		out, err := b.run(ctx, env)
		r.ran++
		if err != nil {
			r.failed++
			fmt.Printf("%s:%d: FAILED: %v\n%s\n", file, b.Line, err, indent(b.Script+"\n--\n"+out))
		} else {
			fmt.Printf("%s:%d: ok\n%s\n", file, b.Line, indent(out))
		}
	}
	fmt.Printf("%s: took %s\n", file, time.Since(began).Round(time.Second))
	return nil
}

// indent sets a text apart, of which it leaves out the middle if it is long.
func indent(text string) string {
	const half = 15
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if len(lines) > 2*half {
		lines = slices.Concat(lines[:half], []string{"…"}, lines[len(lines)-half:])
	}
	return "    " + strings.Join(lines, "\n    ")
}

// up brings up the cluster of a page, with the chart unless the page installs it.
func up(ctx context.Context, name string, blocks []block) (*cluster.Cluster, error) {
	begin := installed
	if slices.ContainsFunc(blocks, func(b block) bool { return strings.Contains(b.Script, "helm install tessera ") }) {
		begin = bare
	}
	c, err := begin(ctx, name)
	if err != nil {
		return nil, err
	}
	for _, node := range c.Nodes() {
		if out, err := c.Exec(ctx, node, "ctr", "--namespace=k8s.io", "images", "tag", stack.TestImage, publicImage); err != nil {
			return nil, fmt.Errorf("name an image: %w: %s", err, out)
		}
	}
	return c, nil
}

// installed brings up a cluster with the chart.
func installed(ctx context.Context, name string) (*cluster.Cluster, error) {
	s, err := stack.Up(ctx, stack.Options{Name: name, Machines: []string{machine}, Out: os.Stderr})
	if err != nil {
		return nil, err
	}
	return s.Cluster, nil
}

// bare brings up a cluster without the chart, whose nodes have the image of this checkout.
func bare(ctx context.Context, name string) (*cluster.Cluster, error) {
	image, err := stack.BuildImage(ctx, os.Stderr)
	if err != nil {
		return nil, err
	}
	c, err := cluster.Up(ctx, cluster.Options{Name: name, Nodes: 1, Log: os.Stderr})
	if err != nil {
		return nil, err
	}
	return c, c.LoadImage(ctx, image)
}

// programs puts the programs that the blocks call into a directory.
func programs(ctx context.Context, c *cluster.Cluster, bin string) error {
	if err := os.Mkdir(bin, 0o755); err != nil {
		return err
	}
	links := map[string]string{"kubectl": c.Binary("kubectl"), "helm": c.Binary("helm")}
	for _, name := range []string{"docker", "kind"} {
		file, err := filepath.Abs("test/blocks/standin/" + name)
		if err != nil {
			return err
		}
		links[name] = file
	}
	for name, file := range links {
		if err := os.Symlink(file, filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	build := exec.CommandContext(ctx, cmp.Or(os.Getenv("GO"), "go"), "build", "-trimpath", "-o", filepath.Join(bin, "kubectl-gpu"), "./cmd/kubectl-gpu")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build kubectl-gpu: %w: %s", err, out)
	}
	return nil
}

var errSilent = errors.New("it printed nothing")

// run runs the block, and returns what it printed.
func (b block) run(ctx context.Context, env []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(b.Ends, blockTime))
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", b.First+"\n"+b.Script+"\n"+b.Then)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the signal reaches all of its programs
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	raw, err := cmd.CombinedOutput()
	out := string(raw)
	if b.Ends > 0 && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = nil // as it should
		if out == "" {
			err = errSilent
		}
	}
	return out, err
}
