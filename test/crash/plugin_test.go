//go:build integration

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tessera-dra/tessera/pkg/failpoint"
)

// plugin is one process.
type plugin struct {
	cmd   *exec.Cmd
	log   string
	steps string        // file with the steps it has come to
	done  chan struct{} // closed when it is dead
	pod   types.UID     // empty: it can't take over from another, nor hand over
	dra   drapbv1.DRAPluginClient
}

// start starts a plugin that dies after the step, or never if it is empty.
func (n *node) start(t *testing.T, step string) *plugin {
	t.Helper()
	return n.startPod(t, "", step)
}

// startPod is start for a plugin of a pod with that UID.
func (n *node) startPod(t *testing.T, pod types.UID, step string) *plugin {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	p := &plugin{log: out.Name(), steps: out.Name() + ".steps", done: make(chan struct{}), pod: pod}
	p.cmd = n.command("--node-name", n.name, "--kubeconfig", n.kubeconfig,
		"--pod-uid", string(pod), "--kubelet-root", n.kubelet, "--cdi-hook", "/bin/true", "--metrics-address", "", "-v", "4")
	p.cmd.Env = append(os.Environ(), failpoint.Variable+"="+step, failpoint.RecordVariable+"="+p.steps)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("the plugin that dies after %q:\n%s", step, p.said())
		}
		out.Close()
	})
	return p
}

// serve starts a plugin that isn't killed at a step, and registers it.
func (n *node) serve(t *testing.T) *plugin {
	t.Helper()
	p := n.start(t, "")
	n.register(t, p)
	return p
}

// withAll does the same with all claims at the same time.
func withAll(claims []*resourceapi.ResourceClaim, do func(*resourceapi.ResourceClaim)) {
	var wg sync.WaitGroup
	for _, c := range claims {
		wg.Go(func() { do(c) })
	}
	wg.Wait()
}

// ran returns the steps that the plugin has come to, each as failpoint has it:
// the second time as "step#2".
func (p *plugin) ran(t *testing.T) []string {
	t.Helper()
	return readSteps(t, p.steps)
}

func readSteps(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	times := map[string]int{}
	var steps []string
	for step := range strings.FieldsSeq(string(data)) {
		if times[step]++; times[step] > 1 {
			step = fmt.Sprintf("%s#%d", step, times[step])
		}
		steps = append(steps, step)
	}
	return steps
}

// said is the plugin's log, without what it has to say on each file of a
// driver.
func (p *plugin) said() string {
	data, _ := os.ReadFile(p.log)
	var b strings.Builder
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, `logger="nvcdi"`) && !strings.Contains(line, "Feature gate default state") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func (p *plugin) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// waitLog waits until the plugin has said something.
func (p *plugin) waitLog(t *testing.T, what string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		out, err := os.ReadFile(p.log)
		return strings.Contains(string(out), what), err
	})
	if err != nil {
		t.Fatalf("the plugin never said %q: %v", what, err)
	}
}

// waitDead waits until the plugin has killed itself.
func (p *plugin) waitDead(t *testing.T) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("the plugin did not come to the step")
	}
	if s, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || s.Signal() != syscall.SIGKILL {
		t.Fatalf("the plugin ended with %v, not at the step", p.cmd.ProcessState)
	}
}

// register does what the kubelet does when the plugin's socket appears.
func (n *node) register(t *testing.T, p *plugin) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	registry, name := filepath.Join(n.kubelet, "plugins_registry"), driver+"-reg.sock"
	if p.pod != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(registry, driver, p.pod)
	}
	c := registerapi.NewRegistrationClient(dial(t, filepath.Join(registry, name)))
	info, err := c.GetInfo(ctx, &registerapi.InfoRequest{})
	if err == nil {
		_, err = c.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	}
	if err != nil {
		select {
		case <-p.done:
			t.Fatalf("the plugin ended with %v before it was registered", p.cmd.ProcessState)
		default:
			t.Fatalf("register the plugin: %v", err)
		}
	}
	p.dra = drapbv1.NewDRAPluginClient(dial(t, info.GetEndpoint()))
}

func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	backoff := grpc.ConnectParams{MinConnectTimeout: time.Second}
	backoff.Backoff.BaseDelay, backoff.Backoff.MaxDelay, backoff.Backoff.Multiplier = 20*time.Millisecond, 100*time.Millisecond, 1.5
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(backoff), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// prepare returns the names of the devices.
func (p *plugin) prepare(t *testing.T, c *resourceapi.ResourceClaim) ([]string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := p.dra.NodePrepareResources(ctx, &drapbv1.NodePrepareResourcesRequest{Claims: reference(c)}, grpc.WaitForReady(false))
	if err != nil {
		return nil, err
	}
	one := resp.GetClaims()[string(c.UID)]
	if one.GetError() != "" {
		return nil, errors.New(one.GetError())
	}
	var names []string
	for _, d := range one.GetDevices() {
		names = append(names, d.GetDeviceName())
	}
	return names, nil
}

func (p *plugin) unprepare(t *testing.T, c *resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := p.dra.NodeUnprepareResources(ctx, &drapbv1.NodeUnprepareResourcesRequest{Claims: reference(c)}, grpc.WaitForReady(false))
	if err == nil && resp.GetClaims()[string(c.UID)].GetError() != "" {
		err = errors.New(resp.GetClaims()[string(c.UID)].GetError())
	}
	return err
}

func (p *plugin) mustPrepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	names, err := p.prepare(t, c)
	if err != nil {
		t.Fatalf("prepare: %v", err)
	}
	var want []string
	for _, r := range c.Status.Allocation.Devices.Results {
		want = append(want, r.Device)
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("prepared devices (-want +got):\n%s", diff)
	}
}

func (p *plugin) mustUnprepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := p.unprepare(t, c); err != nil {
		t.Fatalf("unprepare: %v", err)
	}
}
