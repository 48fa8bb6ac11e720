package browser_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/test/apiserver"
)

// realServer starts an API server and etcd, and returns a client and a kubeconfig.
func realServer(t *testing.T) (c client.Client, kubeconfig []byte) {
	t.Helper()
	log.SetLogger(logr.Discard()) // of the client and of envtest
	dir := t.TempDir()
	if err := apiserver.Binaries(t.Context(), dir, t.Output()); err != nil {
		t.Fatal(err)
	}
	env := &envtest.Environment{CRDDirectoryPaths: []string{"../../deployments/helm/tessera/files/crds"}, ErrorIfCRDPathMissing: true}
	config, err := apiserver.Start(env, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = env.Stop() })
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	if c, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	return c, env.KubeConfig
}

// create creates an object with its status.
func create(t *testing.T, c client.Client, obj client.Object) {
	t.Helper()
	obj.SetResourceVersion("")
	status, ok := obj.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T has no metadata", obj)
	}
	if err := c.Create(t.Context(), obj); err != nil {
		t.Fatal(err)
	}
	if _, ok := obj.(*resourceapi.ResourceSlice); ok {
		return
	}
	status.SetResourceVersion(obj.GetResourceVersion())
	status.SetUID(obj.GetUID())
	if err := c.Status().Update(t.Context(), status); err != nil {
		t.Fatalf("status of %T %s: %v", obj, obj.GetName(), err)
	}
}

// program starts kubectl-gpu web, and returns the address that it prints.
func program(t *testing.T, kubeconfig []byte) string {
	t.Helper()
	dir := t.TempDir()
	file, binary := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "kubectl-gpu")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/kubectl-gpu")
	build.Dir, build.Stderr = "../..", t.Output()
	if err := build.Run(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "web", "--kubeconfig", file)
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if _, address, ok := strings.Cut(lines.Text(), "The map is at "); ok {
			return address
		}
	}
	t.Fatal("kubectl-gpu web ended without an address")
	return ""
}

// TestServer: the program itself, on a real API server.
func TestServer(t *testing.T) {
	api, kubeconfig := realServer(t)
	fake := made(t, feedtest.Mixed)
	o := fake.Objects()
	namespaces := make(map[string]bool)
	for i := range o.Claims {
		if name := o.Claims[i].Namespace; !namespaces[name] {
			namespaces[name] = true
			if err := api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range o.Inventories {
		create(t, api, &o.Inventories[i])
	}
	for i := range o.Slices {
		create(t, api, &o.Slices[i])
	}
	p := open(t, program(t, kubeconfig))
	p.drawn()
	for i := range o.Claims { // while the page is open
		create(t, api, o.Claims[i].DeepCopy())
	}
	want := wanted(fake)
	parts := 0
	for _, g := range want {
		parts += len(g.Uses)
	}
	p.until(fmt.Sprintf(`document.querySelectorAll("#map .seg").length === %d`, parts))
	if diff := cmp.Diff(want, eval[map[string]gpu](p, drawnGPUs), cmp.Comparer(near)); diff != "" {
		t.Errorf("the page differs from the model (-model +page):\n%s", diff)
	}
}
