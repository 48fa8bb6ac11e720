//go:build integration

package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	resourcev1beta2 "k8s.io/api/resource/v1beta2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
	"github.com/tessera-dra/tessera/test/apiserver"
)

// TestMain runs the stories on a real API server and etcd, with the real
// controller program as a process of its own. KUBEBUILDER_ASSETS names a
// directory with the two, RESOURCE_API the version of resource.k8s.io that the
// server has, if it isn't to be v1.
func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "control stories:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "control-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binaries = filepath.Join(dir, "bin")
	if err := errors.Join(os.Mkdir(binaries, 0o755), apiserver.Binaries(context.Background(), binaries, os.Stderr)); err != nil {
		return 0, fmt.Errorf("get kube-apiserver and etcd: %w", err)
	}
	program = filepath.Join(dir, "controller")
	if out, err := exec.Command("go", "build", "-o", program, "../../cmd/controller").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the controller: %w\n%s", err, out)
	}
	if err := v1alpha1.AddToScheme(scheme.Scheme); err != nil {
		return 0, err
	}
	env, err := serve(dir, binaries, runtimeConfigFor(os.Getenv("RESOURCE_API")))
	if err != nil {
		return 0, err
	}
	defer func() { _ = env.Stop() }()
	return m.Run(), nil
}

// runtimeConfigFor is the flag for a server that has only this version of
// resource.k8s.io, or, if it is empty, v1 and whatever is on by default.
func runtimeConfigFor(version string) (flag string) {
	if version == "" || version == "v1" {
		return ""
	}
	return "runtime-config=resource.k8s.io/v1=false,resource.k8s.io/" + version + "=true"
}

// serve starts an API server with flags, each as name=value. From now on stories
// are told to it.
func serve(dir, binaries string, flags ...string) (*envtest.Environment, error) {
	env := &envtest.Environment{
		CRDDirectoryPaths:     []string{"../../deployments/helm/tessera/files/crds"},
		ErrorIfCRDPathMissing: true,
	}
	args := env.ControlPlane.GetAPIServer().Configure()
	for _, flag := range flags {
		if name, value, _ := strings.Cut(flag, "="); value != "" {
			args.Append(name, value)
		}
	}
	config, err := apiserver.Start(env, binaries)
	if err != nil {
		return nil, err
	}
	if err := connect(dir, env.KubeConfig, config); err != nil {
		return nil, errors.Join(err, env.Stop())
	}
	return env, nil
}

// connect makes the clients that stories use.
func connect(dir string, file []byte, config *rest.Config) (err error) {
	config.Wrap(v1alpha3.Transport)
	kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, file, 0o600); err != nil {
		return err
	}
	if api, err = client.NewWithWatch(config, client.Options{Scheme: scheme.Scheme}); err != nil {
		return err
	}
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	resource := draclient.New(clientset)
	slices = resource.ResourceSlices()
	claims = claimClient{resource.ResourceClaims("default"), resource}
	return nil
}

// serverConfig returns how a story's own client reaches the API server.
func serverConfig(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// claimClient can change a claim's status on a server of Kubernetes 1.33, too: there the
// client in it panics, up to k8s.io/dynamic-resource-allocation 0.37.1
// (https://github.com/kubernetes/kubernetes/pull/141106).
type claimClient struct {
	resourceclient.ResourceClaimInterface
	resource *draclient.Client
}

func (c claimClient) UpdateStatus(ctx context.Context, claim *resourceapi.ResourceClaim, o metav1.UpdateOptions) (*resourceapi.ResourceClaim, error) {
	if c.resource.CurrentAPI() != "V1beta2" {
		return c.ResourceClaimInterface.UpdateStatus(ctx, claim, o)
	}
	// The fields that stories write have the same JSON in both versions.
	var older resourcev1beta2.ResourceClaim
	data, err := json.Marshal(claim)
	if err == nil {
		err = json.Unmarshal(data, &older)
	}
	if err == nil {
		err = api.Status().Update(ctx, &older)
	}
	if err != nil {
		return nil, err
	}
	return c.Get(ctx, claim.Name, metav1.GetOptions{})
}

// anotherServer runs the rest of this story with another API server.
func anotherServer(t *testing.T, binaries string, flags ...string) *envtest.Environment {
	t.Helper()
	api0, slices0, claims0, kubeconfig0 := api, slices, claims, kubeconfig
	env, err := serve(t.TempDir(), binaries, flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = env.Stop()
		api, slices, claims, kubeconfig = api0, slices0, claims0, kubeconfig0
	})
	return env
}

// safeBuffer can be read while it is written to.
type safeBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// startController runs the program until stop, which is also how it ends with
// the test: by SIGTERM, without an error.
func startController(t *testing.T, flags ...string) (stop func()) {
	t.Helper()
	p := launch(t, kubeconfig, flags...)
	controllerLog = p.log.String
	stop = sync.OnceFunc(func() {
		t.Logf("the controller holds %s", residentMemory(p.cmd.Process.Pid))
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("stop the controller: %v", err)
		}
		if <-p.ended; p.err != nil {
			t.Errorf("the controller ended with %v", p.err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// process is a running controller.
type process struct {
	cmd   *exec.Cmd
	log   *safeBuffer
	ended chan struct{} // closed when it has ended
	err   error         // how, after that
}

// launch starts the program. It ends with the test, and releases its Lease, unless it is
// paused or hangs.
func launch(t *testing.T, kubeconfig string, flags ...string) *process {
	t.Helper()
	p := &process{log: &safeBuffer{}, ended: make(chan struct{})}
	p.cmd = exec.Command(program, append([]string{"--kubeconfig", kubeconfig, "--namespace", "default", "--metrics-address", "0", "-v", "2"}, flags...)...)
	p.cmd.Stdout, p.cmd.Stderr = io.Discard, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.err = p.cmd.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(10*time.Second, func() { _ = p.cmd.Process.Kill() })
		<-p.ended
		kill.Stop()
		if t.Failed() {
			t.Logf("controller:\n%s", p.log)
		}
	})
	return p
}

func residentMemory(pid int) string {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s: %s", patience, what)
		}
		select {
		case <-t.Context().Done():
			t.FailNow()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// patience is the time limit for expected events. Durations are in the log and
// not checked. Watches that end often start again after up to 30 s.
const patience = time.Minute

var (
	api        client.WithWatch
	slices     resourceclient.ResourceSliceInterface
	claims     resourceclient.ResourceClaimInterface
	program    string
	binaries   string // directory of kube-apiserver and etcd
	kubeconfig string
)
