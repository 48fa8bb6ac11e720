//go:build integration

package crash_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/test/apiserver"
)

const (
	driver = "gpu.nvidia.com"
	// patience is how long a plugin may take to register or to die.
	patience = 60 * time.Second
	// atOnce is how many tests run at a time: most of the time they wait.
	atOnce = "6"
)

// world has the parts that all tests share: a real API server, the real plugin
// built with failpoints, the real MPS supervisor, and the simulator's library.
type world struct {
	api        kubernetes.Interface
	objects    client.Client // for this driver's own kinds
	kubeconfig string
	program    string
	supervisor string
	library    string
}

var shared world

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	stop, err := prepareWorld(dir)
	if err != nil {
		return fail(err)
	}
	defer stop()
	if err := flag.Set("test.parallel", atOnce); err != nil {
		return fail(err)
	}
	return m.Run()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "crash tests:", err)
	return 1
}

func prepareWorld(dir string) (stop func(), err error) {
	shared.program, shared.supervisor = filepath.Join(dir, "kubelet-plugin"), filepath.Join(dir, "mps-supervisor")
	build := exec.Command("go", "build", "-tags", "failpoints", "-o", dir, "../../cmd/kubelet-plugin", "../../cmd/mps-supervisor")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	if shared.library, err = nodetest.Build(dir); err != nil {
		return nil, err
	}
	return startAPI(dir)
}

// startAPI starts etcd and kube-apiserver.
func startAPI(dir string) (stop func(), _ error) {
	binaries := filepath.Join(dir, "bin")
	if err := errors.Join(os.Mkdir(binaries, 0o755), apiserver.Binaries(context.Background(), binaries, os.Stderr)); err != nil {
		return nil, fmt.Errorf("get kube-apiserver and etcd: %w", err)
	}
	env := envtest.Environment{
		CRDDirectoryPaths:     []string{"../../deployments/helm/tessera/files/crds"},
		ErrorIfCRDPathMissing: true,
	}
	log.SetLogger(klog.Background())
	config, err := apiserver.Start(&env, binaries)
	if err != nil {
		return nil, err
	}
	stop = func() { _ = env.Stop() }
	config.QPS = -1
	shared.kubeconfig = filepath.Join(dir, "kubeconfig")
	err = os.WriteFile(shared.kubeconfig, env.KubeConfig, 0o600)
	var apiErr, objectsErr error
	shared.api, apiErr = kubernetes.NewForConfig(config)
	scheme := runtime.NewScheme()
	schemeErr := v1alpha1.AddToScheme(scheme)
	shared.objects, objectsErr = client.New(config, client.Options{Scheme: scheme})
	if err = errors.Join(err, apiErr, schemeErr, objectsErr); err != nil {
		stop()
	}
	return stop, err
}
