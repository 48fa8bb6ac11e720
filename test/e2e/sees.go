//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/test/stack"
)

const driver = "gpu.nvidia.com"

// sees checks that a container has exactly the GPUs that its claims were
// allocated: by its device nodes, by what nvidia-smi lists, and by what the
// device cgroup lets it open.
//
//	sees POD CONTAINER
func sees(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: sees POD CONTAINER")
	}
	pod, container := args[0], args[1]
	want, err := allocated(s.Kube(), ts.Getenv("NS"), pod, container)
	ts.Check(err)
	in := func(script string) string {
		out, err := s.Command(context.Background(), "kubectl", "-n", ts.Getenv("NS"), "exec", pod, "-c", container, "--", "sh", "-c", script).CombinedOutput()
		if err != nil {
			ts.Fatalf("in %s/%s: %s: %v\n%s", pod, container, script, err, out)
		}
		return string(out)
	}
	var uuids, nodes []string
	for _, g := range want {
		uuids = append(uuids, g.uuid)
		nodes = append(nodes, fmt.Sprintf("/dev/nvidia%d", g.minor))
	}
	slices.Sort(uuids)
	slices.Sort(nodes)
	ts.Logf("%s/%s holds %v", pod, container, nodes)
	if diff := cmp.Diff(nodes, sortedFields(in("ls -d /dev/nvidia[0-9]* 2>/dev/null || true"))); diff != "" {
		ts.Fatalf("device nodes (-allocated +seen):\n%s", diff)
	}
	for _, control := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
		in("test -c /dev/" + control)
	}
	listed := regexp.MustCompile(`UUID: (GPU-[0-9a-f-]+)`).FindAllStringSubmatch(in("nvidia-smi -L"), -1)
	var seen []string
	for _, m := range listed {
		seen = append(seen, m[1])
	}
	slices.Sort(seen)
	if diff := cmp.Diff(uuids, seen); diff != "" {
		ts.Fatalf("nvidia-smi -L (-allocated +seen):\n%s", diff)
	}
	checkCgroup(ts, in, want)
}

// checkCgroup opens device nodes of its own making: a GPU that isn't the
// container's must be refused by the device cgroup, its own only by the
// missing hardware.
func checkCgroup(ts *testscript.TestScript, in func(string) string, want []allocatedGPU) {
	open := func(minor int) string {
		return in(fmt.Sprintf("rm -f /tmp/probe; mknod /tmp/probe c 195 %d && (cat /tmp/probe 2>&1 || true)", minor))
	}
	minors := map[int]bool{}
	for _, g := range want {
		minors[g.minor] = true
		if out := open(g.minor); strings.Contains(out, "not permitted") {
			ts.Fatalf("the device cgroup refuses the claimed GPU %d: %s", g.minor, out)
		}
	}
	for other := range 9 {
		if out := open(other); !minors[other] && !strings.Contains(out, "not permitted") {
			ts.Fatalf("the device cgroup lets the container open GPU %d, which isn't its own: %q", other, out)
		}
	}
}

func sortedFields(s string) []string {
	f := strings.Fields(s)
	slices.Sort(f)
	return f
}

type allocatedGPU struct {
	uuid  string
	minor int
}

// allocated reads from the API what the container's claims were given.
func allocated(kube kubernetes.Interface, namespace, pod, container string) ([]allocatedGPU, error) {
	ctx := context.Background()
	p, err := kube.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get pod %s: %w", pod, err)
	}
	devices, err := devicesByName(ctx, kube)
	if err != nil {
		return nil, err
	}
	var got []allocatedGPU
	for _, use := range usesOf(p, container) {
		claim, err := kube.ResourceV1().ResourceClaims(namespace).Get(ctx, claimName(p, use.Name), metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("get claim of pod %s: %w", pod, err)
		}
		if claim.Status.Allocation == nil {
			return nil, fmt.Errorf("claim %s is not allocated", claim.Name)
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			request, _, _ := strings.Cut(r.Request, "/")
			if r.Driver != driver || (use.Request != "" && use.Request != request) {
				continue
			}
			d, ok := devices[r.Pool+"/"+r.Device]
			if !ok {
				return nil, fmt.Errorf("claim %s was given %s/%s, which no slice lists", claim.Name, r.Pool, r.Device)
			}
			got = append(got, d)
		}
	}
	return got, nil
}

func usesOf(p *corev1.Pod, container string) []corev1.ResourceClaim {
	for _, c := range p.Spec.Containers {
		if c.Name == container {
			return c.Resources.Claims
		}
	}
	return nil
}

func claimName(p *corev1.Pod, name string) string {
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.Name == name && s.ResourceClaimName != nil {
			return *s.ResourceClaimName
		}
	}
	for _, c := range p.Spec.ResourceClaims {
		if c.Name == name && c.ResourceClaimName != nil {
			return *c.ResourceClaimName
		}
	}
	return "none-for-" + name
}

// devicesByName reads all slices: "pool/device" to identity.
func devicesByName(ctx context.Context, kube kubernetes.Interface) (map[string]allocatedGPU, error) {
	list, err := kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	devices := map[string]allocatedGPU{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			minor, err := strconv.Atoi(attribute(d, "minor"))
			if s.Spec.Driver != driver || err != nil {
				continue
			}
			devices[s.Spec.Pool.Name+"/"+d.Name] = allocatedGPU{uuid: attribute(d, "uuid"), minor: minor}
		}
	}
	return devices, nil
}

func attribute(d resourcev1.Device, name string) string {
	a := d.Attributes[resourcev1.QualifiedName(name)]
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return strconv.FormatInt(*a.IntValue, 10)
	default:
		return ""
	}
}
