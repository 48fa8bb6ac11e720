//go:build integration

package crash_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// node is one node: its hardware, its kubelet's side of the sockets, and its
// Node object. Plugins come and go on it.
type node struct {
	name               string
	host               nodetest.Driver
	hardware           *nvmlsim.Machine
	kubelet, data, cdi string
	// run is the MPS supervisor's directory.
	run        string
	kubeconfig string
	// passing are claims that an operation has prepared and unprepared again.
	passing []*resourceapi.ResourceClaim
	// runs is a claim that keeps its device all the time.
	runs *resourceapi.ResourceClaim
	// bootID, if not empty, is a file that stands for the kernel's.
	bootID string
}

var nodes atomic.Int32

// newNode makes a node with two GPUs, or with the machine if one is given.
func newNode(t *testing.T, machine ...string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") //nolint:usetesting // t.TempDir has the test's name in it, too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{
		name: fmt.Sprintf("node-%d", nodes.Add(1)), kubeconfig: shared.kubeconfig,
		kubelet: filepath.Join(dir, "kubelet"), data: filepath.Join(dir, "data"), cdi: filepath.Join(dir, "cdi"),
		run: filepath.Join(dir, "run"),
	}
	if len(machine) == 0 {
		machine = []string{"2xh100-80gb"}
	}
	if n.host, err = nodetest.Install(filepath.Join(dir, "host"), shared.library, machine[0], n.name); err != nil {
		t.Fatal(err)
	}
	if n.hardware, err = n.host.Hardware(); err != nil {
		t.Fatal(err)
	}
	if err := n.layRun(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.hardware.Close() })
	if err := n.layData(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{filepath.Join(n.kubelet, "plugins_registry"), n.cdi} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if object, err = shared.api.CoreV1().Nodes().Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	object.Status.NodeInfo.KubeletVersion = "v1.37.1"
	if _, err := shared.api.CoreV1().Nodes().UpdateStatus(t.Context(), object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return n
}

// layData makes the data directory, which has the same path on the host, the CDI
// hook in it, and the host's directories that show processes and cgroups. No
// container runs on the node.
func (n *node) layData() error {
	data := filepath.Join(n.host.Host, n.data)
	hook := filepath.Join(data, "bin", "nvidia-cdi-hook")
	for _, d := range []string{filepath.Dir(hook), filepath.Join(n.host.Host, "proc"), filepath.Join(n.host.Host, "sys/fs/cgroup")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink(data, n.data); err != nil {
		return err
	}
	return os.WriteFile(hook, nil, 0o755)
}

// journal is the directory of claims' records; GPUs' are in gpus, below it.
func (n *node) journal() string { return filepath.Join(n.data, "claims") }

// command runs a program of the plugin's on the node.
func (n *node) command(args ...string) *exec.Cmd {
	all := append([]string{shared.program}, args...)
	if n.bootID != "" {
		const script = `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
		all = append([]string{"unshare", "--mount", "sh", "-c", script, n.bootID}, all...)
	}
	cmd := exec.Command(all[0], all[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // it must not outlive a killed test
	cmd.Args = append(cmd.Args, "--host-root", n.host.Host, "--driver-root", n.host.Root, "--data-dir", n.data, "--cdi-dir", n.cdi, "--mps-socket", n.socket())
	return cmd
}

// reboot stops the time of this boot: hardware forgets, and the kernel's boot
// ID is another one. The CDI directory, in memory, is empty.
func (n *node) reboot(t *testing.T) {
	t.Helper()
	if err := n.hardware.Reboot(); err != nil {
		t.Fatal(err)
	}
	n.bootID = filepath.Join(t.TempDir(), "boot_id")
	if err := os.WriteFile(n.bootID, []byte(string(uuid.NewUUID())+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.wipeCDI(t)
}

// whole is the name of the node's i-th GPU.
func (n *node) whole(i int) string {
	return "gpu-" + strings.TrimPrefix(n.host.Machine.GPUs[i].UUID, "GPU-")[:8]
}

// part is the name of a partition of the node's i-th GPU: "1g10gb-4".
func (n *node) part(i int, profile string) string { return n.whole(i) + "-mig-" + profile }

// newClaim is a claim that the scheduler has given the devices.
func (n *node) newClaim(t *testing.T, devices ...string) *resourceapi.ResourceClaim {
	t.Helper()
	return n.newConfigured(t, "", devices...)
}

// newConfigured is a claim with a configuration, if that isn't empty.
func (n *node) newConfigured(t *testing.T, config string, devices ...string) *resourceapi.ResourceClaim {
	t.Helper()
	claims := shared.api.ResourceV1().ResourceClaims("default")
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{GenerateName: "claim-"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(len(devices)),
	}}}
	c, err := claims.Create(t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: n.name, Device: d}
		consume(&result)
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
	}
	if config != "" {
		c.Status.Allocation.Devices.Config = configured(config)
	}
	if c, err = claims.UpdateStatus(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return c
}

func reference(c *resourceapi.ResourceClaim) []*drapbv1.Claim {
	return []*drapbv1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

// doctor asks `kubelet-plugin doctor` how the node is.
func (n *node) doctor(t *testing.T, args ...string) doctor.Report {
	t.Helper()
	cmd := n.command(append([]string{"doctor", "-o", "json"}, args...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	var r doctor.Report
	if jsonErr := json.Unmarshal(out, &r); jsonErr != nil {
		t.Fatalf("ask the doctor: %v, %v\n%s%s", err, jsonErr, out, errs.String())
	}
	if r.Healthy != (err == nil) {
		t.Errorf("the doctor says healthy: %t, and ends with %v", r.Healthy, err)
	}
	return r
}

// check wants the doctor to find no trouble.
func (n *node) check(t *testing.T, when string) {
	t.Helper()
	if r := n.doctor(t, "--pause", "300ms"); !r.Healthy {
		t.Errorf("%s the doctor finds %s", when, findings(r))
	}
}

func findings(r doctor.Report) string {
	text, _ := json.MarshalIndent(r.Findings, "", "  ")
	return string(text)
}

// finds wants the doctor to find trouble of this kind, and no other.
func (n *node) finds(t *testing.T, kinds ...string) {
	t.Helper()
	r := n.doctor(t, "--pause", "300ms")
	if r.Healthy {
		t.Errorf("the doctor doesn't find %v", kinds)
	}
	for _, f := range r.Findings {
		if f.Level == doctor.Trouble && !slices.Contains(kinds, f.Check) {
			t.Errorf("the doctor finds more than %v: %s", kinds, findings(r))
		}
	}
}

// rests wants nothing half done, and nothing left over some seconds later.
func (n *node) rests(t *testing.T) {
	t.Helper()
	if r := n.doctor(t, "--strict", "--looks", "30", "--pause", "1s"); !r.Healthy {
		t.Errorf("at rest the doctor finds %s", findings(r))
	}
}

// checkEmpty wants nothing of any claim left, some seconds after the last: no
// file, no instance, and MIG mode off.
func (n *node) checkEmpty(t *testing.T) {
	t.Helper()
	if r := n.doctor(t, "--strict", "--looks", "30", "--pause", "1s"); !r.Healthy || len(r.Findings) > 0 {
		t.Errorf("at the end the doctor finds %s", findings(r))
	}
	for _, pattern := range []string{"claims/*.json", "claims/gpus/*", "claims/settings/*", "claims/*.corrupt"} {
		if left, _ := filepath.Glob(filepath.Join(n.data, pattern)); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(n.cdi, "*claim_*")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
	n.checkUnshared(t)
	for i, g := range n.hardware.State().GPUs {
		if len(g.Instances) > 0 || g.MIGCurrent || g.MIGPending {
			t.Errorf("GPU %d has instances %+v, its MIG mode is %t", i, g.Instances, g.MIGCurrent)
		}
	}
}

func (n *node) wipeCDI(t *testing.T) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(n.cdi), os.Mkdir(n.cdi, 0o755)); err != nil {
		t.Fatal(err)
	}
}
