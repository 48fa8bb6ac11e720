//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/test/stack"
)

const driver = "gpu.nvidia.com"

// sees checks that a container has exactly the GPUs and MIG partitions that its
// claims were allocated: by its device nodes, by the output of nvidia-smi, and
// by the devices that the device cgroup lets it open. A container with a share
// or a replica sees all of the GPU or the partition. A strict container is not
// root and can't make device nodes, so it opens those that it has.
//
//	sees [NAMESPACE/]POD CONTAINER [strict]
func sees(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	strict := len(args) == 3 && args[2] == "strict"
	if neg || len(args) != 2 && !strict {
		ts.Fatalf("usage: sees [NAMESPACE/]POD CONTAINER [strict]")
	}
	namespace, pod := address(ts, args[0])
	container := args[1]
	have, err := allocated(s, namespace, pod, container)
	ts.Check(err)
	want := expect(have)
	ts.Logf("%s/%s holds %v", pod, container, want.nodes)
	probes := probesFor(want)
	if strict {
		probes = ownNodes(want)
	}
	cmd := s.Command(context.Background(), "kubectl", "-n", namespace, "exec", pod, "-c", container, "--", "sh", "-c", lookAround(probes))
	var errs strings.Builder
	cmd.Stderr = &errs // kubectl of 1.33 sometimes prints "Unknown stream id" there
	out, err := cmd.Output()
	if err != nil {
		ts.Fatalf("look around in %s/%s: %v\n%s%s", pod, container, err, out, errs.String())
	}
	nodes, rest, _ := strings.Cut(string(out), separator)
	gpus, opened, _ := strings.Cut(rest, separator)
	seen := listed(gpus)
	want.fillIn(seen)
	if diff := cmp.Diff(want.nodes, sortedFields(nodes)); diff != "" {
		ts.Fatalf("device nodes (-allocated +seen):\n%s", diff)
	}
	if diff := cmp.Diff(want.uuids, seen); diff != "" {
		ts.Fatalf("nvidia-smi -L (-allocated +seen):\n%s", diff)
	}
	checkCgroup(ts, probes, strings.Split(opened, separator))
}

// separator separates the parts of lookAround's output.
const separator = "\n----\n"

// lookAround is the script that a container runs: it prints the GPUs' device
// nodes, the output of nvidia-smi, and the result of opening each probe. It
// fails if a control node is missing.
func lookAround(probes []probe) string {
	var b strings.Builder
	fmt.Fprintf(&b, `set -e
next() { printf '%[1]s'; }
make() { rm -f /tmp/probe; mknod /tmp/probe c "$1" "$2"; open /tmp/probe; }
open() { cat "$1" 2>&1 || true; }
for control in nvidiactl nvidia-uvm nvidia-uvm-tools; do test -c /dev/$control || { echo "no /dev/$control"; exit 1; }; done
ls -d /dev/nvidia[0-9]* /dev/nvidia-caps/* 2>/dev/null || true
next
nvidia-smi -L
`, strings.ReplaceAll(separator, "\n", `\n`))
	for _, p := range probes {
		if p.node != "" {
			fmt.Fprintf(&b, "next\nopen %s\n", p.node)
		} else {
			fmt.Fprintf(&b, "next\nmake %d %d\n", p.major, p.minor)
		}
	}
	return b.String()
}

// expected has the devices that a container should see, sorted.
type expected struct {
	nodes, uuids []string
	// minors of GPUs and of capabilities.
	minors, caps map[int]bool
}

func expect(have []allocatedDevice) expected {
	e := expected{minors: map[int]bool{}, caps: map[int]bool{}}
	for _, d := range have {
		e.minors[d.minor] = true
		e.uuids = append(e.uuids, d.gpu)
		e.nodes = append(e.nodes, fmt.Sprintf("/dev/nvidia%d", d.minor))
		if d.mig == nil {
			continue
		}
		if d.mig.UUID == "" {
			d.mig.UUID = fmt.Sprintf("%s %d of GPU %d", unknownMIG, d.mig.GPUInstanceID, d.minor)
		}
		e.uuids = append(e.uuids, d.mig.UUID)
		gi, ci := nvmlsim.CapabilityMinors(d.minor, d.mig.GPUInstanceID, d.mig.ComputeInstanceID)
		for _, c := range []int{gi, ci} {
			e.caps[c] = true
			e.nodes = append(e.nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", c))
		}
	}
	slices.Sort(e.nodes)
	slices.Sort(e.uuids)
	// Partitions of one GPU have its node, and its line, in common.
	e.nodes, e.uuids = slices.Compact(e.nodes), slices.Compact(e.uuids)
	return e
}

// unknownMIG begins what stands for the UUID of a MIG device that the API doesn't
// tell.
const unknownMIG = "the MIG device of instance"

// fillIn takes the UUIDs of MIG devices that the API doesn't tell from those that
// the container sees: their number and their capabilities are checked then.
func (e *expected) fillIn(seen []string) {
	next := slices.IndexFunc(seen, func(uuid string) bool { return strings.HasPrefix(uuid, "MIG-") })
	for i := range e.uuids {
		if strings.HasPrefix(e.uuids[i], unknownMIG) && next >= 0 && next < len(seen) {
			e.uuids[i] = seen[next]
			next++
		}
	}
	slices.Sort(e.uuids)
}

// listed are the UUIDs that nvidia-smi -L has printed, sorted.
func listed(out string) []string {
	var uuids []string
	for _, m := range regexp.MustCompile(`UUID: ((?:GPU|MIG)-[0-9a-f-]+)`).FindAllStringSubmatch(out, -1) {
		uuids = append(uuids, m[1])
	}
	slices.Sort(uuids)
	return uuids
}

// probe is a device node that a container opens: one that it has, or one that it
// makes itself.
type probe struct {
	node         string // the path of one that it has
	what         string
	major, minor int // of one that it makes
	own          bool
}

// ownNodes lists the device nodes that a container must be able to open.
func ownNodes(want expected) []probe {
	var probes []probe
	for _, node := range slices.Concat(want.nodes, []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}) {
		probes = append(probes, probe{node: node, what: node, own: true})
	}
	return probes
}

// probesFor lists what a container tries to open: GPUs and MIG capabilities,
// its own and others.
func probesFor(want expected) []probe {
	const gpuMajor, capsMajor = 195, 509 // as the simulator has them
	var probes []probe
	for minor := range 9 {
		probes = append(probes, probe{what: "GPU", major: gpuMajor, minor: minor, own: want.minors[minor]})
	}
	others := 0
	for c := 1; others < 3; c++ { // MIG's configuration and monitoring first
		if !want.caps[c] {
			probes = append(probes, probe{what: "capability", major: capsMajor, minor: c})
			others++
		}
	}
	for c := range want.caps {
		probes = append(probes, probe{what: "capability", major: capsMajor, minor: c, own: true})
		if !want.caps[c+2] { // a neighbour's
			probes = append(probes, probe{what: "capability", major: capsMajor, minor: c + 2})
		}
	}
	return probes
}

// checkCgroup checks the results of opening the probes: the device cgroup must
// refuse devices of others; the container's own may fail only because the
// hardware is missing, and not by their permissions either.
func checkCgroup(ts *testscript.TestScript, probes []probe, opened []string) {
	if len(opened) != len(probes) {
		ts.Fatalf("%d device nodes were to be opened, there are %d results: %q", len(probes), len(opened), opened)
	}
	for i, p := range probes {
		denied := strings.Contains(opened[i], "denied")
		if refused := strings.Contains(opened[i], "not permitted"); refused == p.own || denied {
			ts.Fatalf("%s %d, the container's own: %v; opening it: %q", p.what, p.minor, p.own, opened[i])
		}
	}
}

func sortedFields(s string) []string {
	f := strings.Fields(s)
	slices.Sort(f)
	return f
}

// allocatedDevice is a whole GPU, or a MIG partition of one.
type allocatedDevice struct {
	gpu     string // UUID
	minor   int
	profile string // of a partition
	start   int    // of a partition: its placement
	mig     *migStatus
}

// migStatus is the data of a partition in status.devices of a claim. The UUID is
// empty where the server doesn't store that.
type migStatus struct {
	UUID              string `json:"uuid"`
	ParentUUID        string `json:"parentUUID"`
	Profile           string `json:"profile"`
	GPUInstanceID     uint32 `json:"gpuInstanceID"`
	ComputeInstanceID uint32 `json:"computeInstanceID"`
}

// allocated reads the devices of the container's claims from the API. It waits
// some seconds until the claims' status has the MIG devices of partitions.
func allocated(s *stack.Stack, namespace, pod, container string) ([]allocatedDevice, error) {
	ctx := context.Background()
	p, err := s.Kube().CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get pod %s: %w", pod, err)
	}
	devices, err := devicesByName(ctx, s)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(pause) {
		got, err := given(ctx, s, p, container, devices)
		if !errors.Is(err, errNoStatus) || time.Now().After(deadline) {
			return got, err
		}
	}
}

var errNoStatus = errors.New("the claim's status doesn't tell which MIG device it is")

func given(ctx context.Context, s *stack.Stack, p *corev1.Pod, container string, devices map[string]allocatedDevice) ([]allocatedDevice, error) {
	var got []allocatedDevice
	for _, use := range usesOf(p, container) {
		claim, err := s.Claim(ctx, p.Namespace, claimName(p, use.Name))
		if err != nil {
			return nil, fmt.Errorf("get claim of pod %s: %w", p.Name, err)
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
			if d.profile != "" {
				if d.mig, err = partitionOf(ctx, s, claim, r, d, p.Spec.NodeName); err != nil {
					return nil, fmt.Errorf("claim %s, %s/%s, a %s: %w", claim.Name, r.Pool, r.Device, d.profile, err)
				}
				if d.mig.ParentUUID != d.gpu || d.mig.Profile != d.profile {
					return nil, fmt.Errorf("claim %s was given a %s of %s, but its status tells of %+v", claim.Name, d.profile, d.gpu, *d.mig)
				}
			}
			got = append(got, d)
		}
	}
	return got, nil
}

// partitionOf returns the MIG device that the claim's status names. A server that
// doesn't store the status leaves the UUID unknown; the rest is then the simulated
// hardware's.
func partitionOf(ctx context.Context, s *stack.Stack, claim *resourcev1.ResourceClaim, r resourcev1.DeviceRequestAllocationResult,
	d allocatedDevice, node string,
) (*migStatus, error) {
	if s.Has("DRAResourceClaimDeviceStatus") {
		return statusOf(claim, r.Pool, r.Device)
	}
	instance, err := s.Instance(ctx, node, d.minor, d.start)
	if err != nil {
		return nil, err
	}
	return &migStatus{ParentUUID: d.gpu, Profile: d.profile, GPUInstanceID: instance.ID, ComputeInstanceID: instance.Compute[0].ID}, nil
}

func statusOf(claim *resourcev1.ResourceClaim, pool, device string) (*migStatus, error) {
	for _, d := range claim.Status.Devices {
		if d.Driver == driver && d.Pool == pool && d.Device == device && d.Data != nil {
			var m migStatus
			if err := json.Unmarshal(d.Data.Raw, &m); err != nil {
				return nil, fmt.Errorf("%s: %w", d.Data.Raw, err)
			}
			return &m, nil
		}
	}
	return nil, errNoStatus
}

// usesOf lists the claims of a container, those that the scheduler has made for
// extended resources too.
func usesOf(p *corev1.Pod, container string) []corev1.ResourceClaim {
	var uses []corev1.ResourceClaim
	for _, c := range p.Spec.Containers {
		if c.Name == container {
			uses = append(uses, c.Resources.Claims...)
		}
	}
	if extended := p.Status.ExtendedResourceClaimStatus; extended != nil {
		for _, m := range extended.RequestMappings {
			if m.ContainerName == container {
				uses = append(uses, corev1.ResourceClaim{Name: forExtendedResources, Request: m.RequestName})
			}
		}
	}
	return uses
}

// forExtendedResources stands for the name that the scheduler's claim doesn't have
// in the pod's spec.
const forExtendedResources = "extended resources"

func claimName(p *corev1.Pod, name string) string {
	if name == forExtendedResources {
		return p.Status.ExtendedResourceClaimStatus.ResourceClaimName
	}
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

// devicesByName reads all slices and the GPUs' minor numbers: "pool/device" to identity.
func devicesByName(ctx context.Context, s *stack.Stack) (map[string]allocatedDevice, error) {
	list, err := s.Slices(ctx)
	if err != nil {
		return nil, err
	}
	minors, err := s.Minors(ctx)
	if err != nil {
		return nil, err
	}
	devices := map[string]allocatedDevice{}
	for _, s := range list {
		for _, d := range s.Spec.Devices {
			gpu := attribute(d, "uuid")
			if parent := attribute(d, "parentUUID"); parent != "" {
				gpu = parent
			}
			minor, ok := minors[gpu]
			if s.Spec.Driver != driver || !ok {
				continue
			}
			place, _, _ := strings.Cut(attribute(d, "placement"), ":")
			start, _ := strconv.Atoi(place) // 0 if it isn't a partition
			devices[s.Spec.Pool.Name+"/"+d.Name] = allocatedDevice{gpu: gpu, minor: minor, profile: attribute(d, "profile"), start: start}
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
