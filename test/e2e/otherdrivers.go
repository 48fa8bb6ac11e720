//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

const exampleDriver = "gpu.example.com"

// nics runs a second driver on a node until the story ends: Kubernetes' example driver,
// as it is. It prepares the devices gpu-0, gpu-1, …, and publishes nothing about where
// they are. So nics publishes the first of them in a slice of its own, as network cards: a
// card behind each of the first PCIe roots of the node's GPUs. It prints the roots.
//
//	nics NODE COUNT
func nics(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: nics NODE COUNT")
	}
	node := args[0]
	count, err := strconv.Atoi(args[1])
	ts.Check(err)
	roots, err := pcieRoots(s, node)
	ts.Check(err)
	if len(roots) < count {
		ts.Fatalf("node %s has GPUs behind %v only", node, roots)
	}
	ts.Check(startExampleDriver(ts, s, node))
	_, err = s.Kube().ResourceV1().ResourceSlices().Create(context.Background(), cards(node, roots[:count]), metav1.CreateOptions{})
	ts.Check(err)
	for _, root := range roots[:count] {
		_, err = fmt.Fprintln(ts.Stdout(), root)
		ts.Check(err)
	}
}

// pcieRoots returns those of the node's GPUs, each once, in the order of the GPUs: the
// simulator numbers both by their PCI addresses.
func pcieRoots(s *stack.Stack, node string) ([]string, error) {
	list, err := s.Kube().ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, err
	}
	var roots []string
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			root := valueOf(d.Attributes[deviceattribute.StandardDeviceAttributePCIeRoot])
			if root != "" && !slices.Contains(roots, root) {
				roots = append(roots, root)
			}
		}
	}
	slices.Sort(roots)
	return roots, nil
}

// cards returns a slice of the example driver's first devices. It names no node, because
// the driver deletes slices of its own node that it doesn't know.
func cards(node string, roots []string) *resourcev1.ResourceSlice {
	s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "nics-" + node}}
	s.Spec.Driver = exampleDriver
	s.Spec.Pool = resourcev1.ResourcePool{Name: s.Name, Generation: 1, ResourceSliceCount: 1}
	s.Spec.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}
	for i, root := range roots {
		s.Spec.Devices = append(s.Spec.Devices, resourcev1.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
				"type": {StringValue: new("nic")},
				deviceattribute.StandardDeviceAttributePCIeRoot: {StringValue: &root},
			},
		})
	}
	return s
}

// startExampleDriver runs the driver with the node's own rights. At the end of the story,
// nothing is left of it.
func startExampleDriver(ts *testscript.TestScript, s *stack.Stack, node string) error {
	program, err := cluster.Tool(context.Background(), "dra-example-kubeletplugin", ts.Stderr())
	if err != nil {
		return err
	}
	file, err := os.Open(program)
	if err != nil {
		return err
	}
	defer file.Close()
	ts.Defer(func() {
		if err := endExampleDriver(s, node); err != nil {
			ts.Logf("the story leaves the example driver behind: %v", err)
		}
	})
	const start = `cat > /run/exampledriver && chmod +x /run/exampledriver || exit 1
export NODE_NAME="$1" CDI_ROOT=/var/run/cdi KUBECONFIG=/run/localcluster/config/kubelet.kubeconfig
setsid /run/exampledriver < /dev/null > /run/exampledriver.log 2>&1 &`
	return s.Cluster.Run(context.Background(), node, cluster.Stdio{In: file, Out: ts.Stdout(), Err: ts.Stderr()}, "sh", "-c", start, "sh", node)
}

func endExampleDriver(s *stack.Stack, node string) error {
	const end = `for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = exampledriver ] && kill "${p#/proc/}"
done
rm -rf /run/exampledriver /var/lib/kubelet/plugins/` + exampleDriver + ` /var/run/cdi/k8s.` + exampleDriver + `-*`
	if _, err := s.Cluster.Exec(context.Background(), node, "sh", "-c", end); err != nil {
		return err
	}
	return s.Kube().ResourceV1().ResourceSlices().DeleteCollection(context.Background(), metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.driver=" + exampleDriver})
}

// paired checks that the devices of a pod's claims, of all drivers, are behind one PCIe root.
//
//	paired [NAMESPACE/]POD
func paired(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: paired [NAMESPACE/]POD")
	}
	namespace, pod := address(ts, args[0])
	p, err := s.Kube().CoreV1().Pods(namespace).Get(context.Background(), pod, metav1.GetOptions{})
	ts.Check(err)
	roots := map[string][]string{}
	for _, status := range p.Status.ResourceClaimStatuses {
		c, err := s.Kube().ResourceV1().ResourceClaims(namespace).Get(context.Background(), *status.ResourceClaimName, metav1.GetOptions{})
		ts.Check(err)
		for _, r := range c.Status.Allocation.Devices.Results {
			published, err := publishedAttributes(s, r.Pool, r.Device)
			ts.Check(err)
			root := valueOf(published[deviceattribute.StandardDeviceAttributePCIeRoot])
			roots[root] = append(roots[root], r.Driver+"/"+r.Device)
		}
	}
	if len(roots) != 1 {
		ts.Fatalf("the devices of pod %s are behind several PCIe roots: %v", pod, roots)
	}
	for root, devices := range roots {
		if root == "" || len(devices) < 2 {
			ts.Fatalf("the devices of pod %s are no pair: %v", pod, roots)
		}
	}
}

// kubectlGPU runs kubectl gpu in the story's namespace.
//
//	gpu ARGS...
func kubectlGPU(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	program := filepath.Join(ts.Getenv("WORK"), "kubectl-gpu")
	if _, err := os.Stat(program); err != nil {
		build := exec.Command("go", "build", "-o", program, "../../cmd/kubectl-gpu")
		build.Stderr = ts.Stderr()
		ts.Check(build.Run())
	}
	cmd := exec.Command(program, append(args, "--namespace", ts.Getenv("NS"), "--kubeconfig", s.Cluster.KubeconfigPath())...)
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	if err := cmd.Run(); (err != nil) != neg {
		ts.Fatalf("kubectl gpu %v: %v", args, err)
	}
}

// devicePlugin runs a device plugin on a node until the story ends, or ends the one
// that runs there.
//
//	deviceplugin NODE [RESOURCE COUNT]
func devicePlugin(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 && len(args) != 3 {
		ts.Fatalf("usage: deviceplugin NODE [RESOURCE COUNT]")
	}
	node := args[0]
	end := func() error {
		_, err := s.Cluster.Exec(context.Background(), node, "sh", "-c", `for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = deviceplugin ] && kill "${p#/proc/}"
done; true`)
		return err
	}
	if len(args) == 1 {
		ts.Check(end())
		return
	}
	program := filepath.Join(ts.Getenv("WORK"), "deviceplugin")
	build := exec.Command("go", "build", "-o", program, "../../sim/cmd/deviceplugin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = ts.Stderr()
	ts.Check(build.Run())
	file, err := os.Open(program)
	ts.Check(err)
	defer file.Close()
	ts.Defer(func() {
		if err := end(); err != nil {
			ts.Logf("the story leaves its device plugin behind: %v", err)
		}
	})
	const start = `cat > /run/deviceplugin && chmod +x /run/deviceplugin && { setsid /run/deviceplugin "$@" < /dev/null > /run/deviceplugin.log 2>&1 & }`
	ts.Check(s.Cluster.Run(context.Background(), node, cluster.Stdio{In: file, Out: ts.Stdout(), Err: ts.Stderr()},
		"sh", "-c", start, "sh", args[1], args[2]))
}
