// Package stack brings up everything a user would have: a local cluster, the
// product's image on its nodes, and the chart installed by Helm, with simulated
// GPUs. The end-to-end tests and the benchmarks start from it.
package stack

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

const (
	// Namespace the chart is installed in.
	Namespace = "tessera-system"
	// TestImage is on every node: a shell, glibc and ldconfig.
	TestImage = cluster.GlibcImage
	// DriverRoot is where the chart's simulated driver is on a node.
	DriverRoot = "/var/lib/tessera-simulator/driver"

	// ImageRepository is the name that deployments/container/build gives the image.
	ImageRepository = "localhost/tessera"
)

// Options say what stack is wanted.
type Options struct {
	// Name of the cluster.
	Name string
	// Kubernetes, Kubelet, Runtime, DRA and FeatureGates are those of cluster.Options.
	Kubernetes, Kubelet, Runtime string
	DRA                          cluster.DRA
	FeatureGates                 map[string]bool
	// Platform that the cluster imitates, by name. Its nodes have a driver, so that none
	// comes with the chart, which isn't installed yet: see Shell.
	Platform string
	// Machines simulated on the nodes, "8xh100-80gb" for example: node-0 has
	// the first. There are as many nodes as machines. With none there is one
	// node, with the GPUs that this host really has.
	Machines []string
	// Values of the chart that aren't the default, each in the form that helm
	// --set takes: node.logVerbosity=4.
	Values []string
	// Image is the archive of the image, as BuildImage returns it. Empty: build
	// it from this checkout.
	Image string
	// Chart is the chart's directory. Empty: that of this checkout.
	Chart string
	// Bundle is a directory with everything prebuilt, as test/metal/bundle.sh
	// makes it, for hosts without Go. Empty: build from this checkout.
	Bundle string
	// Out gets progress for people.
	Out io.Writer
}

// Stack is a running stack.
type Stack struct {
	Cluster *cluster.Cluster
	// DriverRoot is where the simulated driver is on a node, and SMI its nvidia-smi.
	DriverRoot, SMI string

	kube kubernetes.Interface
	out  io.Writer
}

// Up brings a stack up, or repairs one that is up already. It returns when all
// parts of the chart are ready; slices may take a moment longer.
func Up(ctx context.Context, o Options) (*Stack, error) {
	p, err := findParts(ctx, o)
	if err != nil {
		return nil, err
	}
	c, err := cluster.Up(ctx, cluster.Options{
		Name: o.Name, Kubernetes: o.Kubernetes, Kubelet: o.Kubelet, Runtime: o.Runtime, DRA: o.DRA, FeatureGates: o.FeatureGates,
		Platform: o.Platform, Nodes: max(len(o.Machines), 1), BinDir: p.binDir, Log: o.Out,
	})
	if err != nil {
		return nil, err
	}
	s := &Stack{Cluster: c, DriverRoot: DriverRoot, SMI: DriverRoot + "/usr/bin/nvidia-smi", out: o.Out}
	if s.kube, err = c.Client(); err != nil {
		return nil, err
	}
	if err := c.LoadImage(ctx, p.image); err != nil {
		return nil, err
	}
	if o.Platform != "" {
		return s, s.findDriver(o.Platform)
	}
	return s, s.install(ctx, p.chart, o)
}

// findDriver sets where a platform has the driver.
func (s *Stack) findDriver(name string) error {
	p, err := platform.Find(name)
	if err != nil {
		return err
	}
	s.DriverRoot = p.Node.Driver.Root
	s.SMI = filepath.Join(s.DriverRoot, cmp.Or(p.Node.Driver.Programs, "usr/bin"), "nvidia-smi")
	return nil
}

// parts are the files a stack is made of.
type parts struct {
	image, chart string
	binDir       string // empty: built as needed
}

func findParts(ctx context.Context, o Options) (parts, error) {
	if o.Bundle != "" {
		return parts{
			image:  filepath.Join(o.Bundle, "tessera.tar"),
			chart:  filepath.Join(o.Bundle, "chart"),
			binDir: filepath.Join(o.Bundle, "bin"),
		}, nil
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return parts{}, err
	}
	p := parts{image: o.Image, chart: o.Chart}
	if p.chart == "" {
		p.chart = filepath.Join(root, "deployments/helm/tessera")
	}
	if p.image == "" {
		p.image, err = BuildImage(ctx, o.Out)
	}
	return p, err
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the checkout with go env: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// BuildImage builds the image from this checkout and returns its archive, for
// several stacks to use.
func BuildImage(ctx context.Context, out io.Writer) (string, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	archive := filepath.Join(root, "_output/images/tessera.tar")
	cmd := exec.CommandContext(ctx, "go", "run", "./deployments/container/build", "-output", archive)
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, out, out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("build the image: %w", err)
	}
	return archive, nil
}

func (s *Stack) install(ctx context.Context, chart string, o Options) error {
	args := []string{
		"upgrade", "--install", "tessera", chart, "--namespace", Namespace, "--create-namespace",
		"--set", "image.repository=" + ImageRepository, "--set", fmt.Sprintf("simulator.enabled=%t", len(o.Machines) > 0), "--wait", "--timeout", "3m",
	}
	for _, v := range o.Values {
		args = append(args, "--set", v)
	}
	for i, m := range o.Machines {
		args = append(args, "--set-literal", fmt.Sprintf("simulator.nodes.%s=%s", s.Cluster.Nodes()[i], m))
	}
	cmd := s.Command(ctx, "helm", args...)
	cmd.Stdout, cmd.Stderr = s.out, s.out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("install the chart: %w", err)
	}
	return nil
}

// Down removes the stack and its cluster.
func (s *Stack) Down(ctx context.Context) error { return s.Cluster.Down(ctx) }

// Kube is an administrator's client.
func (s *Stack) Kube() kubernetes.Interface { return s.kube }

// Reconnect makes the administrator's client again, from a kubeconfig that has changed.
func (s *Stack) Reconnect() (err error) {
	s.kube, err = s.Cluster.Client()
	return err
}

// Command is one of the cluster's programs (kubectl, helm), as administrator.
func (s *Stack) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return s.Cluster.Command(ctx, name, args...)
}

// Kubectl runs kubectl and returns what it printed, also with an error.
func (s *Stack) Kubectl(ctx context.Context, args ...string) (string, error) {
	out, err := s.Command(ctx, "kubectl", args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %v: %w: %s", args, err, out)
	}
	return string(out), nil
}

// Shell runs commands as an administrator of the cluster types them in a checkout, and returns
// their output, also with an error.
func (s *Stack) Shell(ctx context.Context, commands string) (string, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	admin := s.Command(ctx, "kubectl")
	cmd := exec.CommandContext(ctx, "sh", "-ec", commands)
	cmd.Dir = root
	cmd.Env = append(admin.Environ(), "PATH="+filepath.Dir(admin.Path)+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", commands, err, out)
	}
	return string(out), err
}

// Crash kills every process of that name on a node, or on all nodes where node
// is "all", with SIGKILL. It fails if there is none.
func (s *Stack) Crash(ctx context.Context, node, name string) (string, error) {
	if node != "all" {
		return s.crashOn(ctx, node, name)
	}
	var all strings.Builder
	var last error
	for _, n := range s.Cluster.Nodes() {
		out, err := s.crashOn(ctx, n, name)
		all.WriteString(out)
		if err != nil {
			last = err
		}
	}
	if strings.Contains(all.String(), "killed") {
		return all.String(), nil
	}
	return all.String(), last
}

func (s *Stack) crashOn(ctx context.Context, node, name string) (string, error) {
	const script = `for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = "$1" ] && kill -9 "${p#/proc/}" && echo "killed ${p#/proc/}" && found=1
done
[ -n "$found" ] || { echo "no process $1"; exit 1; }`
	out, err := s.Cluster.Exec(ctx, node, "sh", "-c", script, "sh", name)
	return string(out), err
}

// Simulator runs a command of the simulator's program (nvmlsim fault, latency
// …) on the simulated machine of a node.
func (s *Stack) Simulator(ctx context.Context, node string, stdio cluster.Stdio, args ...string) error {
	return s.Cluster.Run(ctx, node, stdio, s.SimulatorCommand(args...)...)
}

// SimulatorCommand is the command that does it, on the node.
func (s *Stack) SimulatorCommand(args ...string) []string {
	const script = `for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = nvmlsim ] && exec $p/exe "$@"
done
echo "no simulator runs here" >&2; exit 1`
	return append([]string{"sh", "-c", script, "sh"}, append(args, "--root", s.DriverRoot)...)
}
