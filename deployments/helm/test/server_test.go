//go:build integration

package test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tessera-dra/tessera/pkg/scrapeauth"
	"github.com/tessera-dra/tessera/test/apiserver"
	"github.com/tessera-dra/tessera/test/cluster"
)

// driver is the name under which Tessera publishes devices.
const driver = "gpu.nvidia.com"

// server is a real API server without controllers and nodes: Helm installs into
// it, and nothing runs.
type server struct {
	config *rest.Config
	admin  client.Client
	helm   func(args ...string) (string, error)
}

// startServer starts a server with flags, each as name=value.
func startServer(t *testing.T, flags ...string) *server {
	t.Helper()
	log.SetLogger(klog.Background())
	dir := t.TempDir()
	if err := apiserver.Binaries(t.Context(), dir, os.Stderr); err != nil {
		t.Fatal(err)
	}
	var env envtest.Environment
	// From 1.36 on the server checks before admission who may change which part of
	// a claim's status. Older ones leave it to the chart's policy.
	env.ControlPlane.GetAPIServer().Configure().Append("feature-gates", "DRAResourceClaimGranularStatusAuthorization=false")
	for _, flag := range flags {
		name, value, _ := strings.Cut(flag, "=")
		env.ControlPlane.GetAPIServer().Configure().Append(name, value)
	}
	config, err := apiserver.Start(&env, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Errorf("stop the API server: %v", err)
		}
	})
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, env.KubeConfig, 0o600); err != nil {
		t.Fatal(err)
	}
	program, err := cluster.Tool(t.Context(), "helm", os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{config: config, helm: func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = append(os.Environ(), "HOME="+dir, "KUBECONFIG="+kubeconfig)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}}
	if s.admin, err = client.New(config, client.Options{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *server) mustHelm(t *testing.T, args ...string) {
	t.Helper()
	if out, err := s.helm(args...); err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// install installs or upgrades the release tessera in the namespace tessera.
func (s *server) install(t *testing.T, args ...string) {
	t.Helper()
	s.mustHelm(t, append([]string{
		"upgrade", "--install", "tessera", chart, "--namespace", "tessera", "--create-namespace",
		"--set=image.repository=registry.example.com/tessera",
	}, args...)...)
}

// as is a client with the rights of a ServiceAccount of the chart, on a node if
// that is not empty.
func (s *server) as(t *testing.T, account, node string) client.Client {
	t.Helper()
	config := rest.CopyConfig(s.config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:tessera:tessera-" + account,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:tessera", "system:authenticated"},
	}
	if node != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	c, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestServer is one test because a server takes seconds to start.
func TestServer(t *testing.T) {
	s := startServer(t)
	t.Run("every object is accepted", func(t *testing.T) { acceptsAll(t, s) })
	t.Run("CRDs are kept", func(t *testing.T) { keepsCRDs(t, s) })
	s.install(t)
	t.Run("the controller writes its driver's slices", func(t *testing.T) { controllerSlices(t, s) })
	t.Run("the controller writes its own classes", func(t *testing.T) { controllerClasses(t, s) })
	t.Run("the plugin writes status.devices", func(t *testing.T) { pluginStatuses(t, s) })
	t.Run("the plugin confirms no double allocation", func(t *testing.T) { pluginInventories(t, s) })
	t.Run("the plugin reads nothing that it doesn't need", func(t *testing.T) { pluginReads(t, s) })
	t.Run("a failed removal of labels is repeated", func(t *testing.T) { repeatsLabelRemoval(t, s) })
}

// acceptsAll creates what every golden file has, without leaving any of it. An
// unknown field is an error.
func acceptsAll(t *testing.T, s *server) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "tessera"}}
	if err := s.admin.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	strict := client.WithFieldValidation(s.admin, metav1.FieldValidationStrict)
	files, err := filepath.Glob("testdata/*.golden.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, string(data)) {
			if object.GetKind() == "PodMonitor" {
				continue // not a kind of Kubernetes'
			}
			if err := strict.Create(t.Context(), object, client.DryRunAll); err != nil {
				t.Errorf("%s: %s %s: %v", file, object.GetKind(), object.GetName(), err)
			}
		}
	}
}

func objects(t *testing.T, rendered string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(rendered), 4096); ; {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if object.Object != nil {
			all = append(all, object)
		}
	}
}

// keepsCRDs installs, turns crds.install off and on again, uninstalls, and
// installs again, also under another name. A policy that somebody wrote outlives
// all of it.
func keepsCRDs(t *testing.T, s *server) {
	s.install(t)
	policy := &unstructured.Unstructured{}
	policy.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "SharingPolicy"})
	policy.SetName("mine")
	policy.Object["spec"] = map[string]any{"plan": map[string]any{"exclusive": map[string]any{}}}
	// The server serves a new kind a moment after its definition is there.
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return s.admin.Create(ctx, policy.DeepCopy()) == nil, nil
	})
	if err != nil {
		t.Fatal("no SharingPolicy can be created")
	}
	still := func(after string) {
		t.Helper()
		// A definition that is deleted goes on serving what it has for a moment.
		for _, name := range []string{"gpuinventories.gpu.tessera.dev", "sharingpolicies.gpu.tessera.dev"} {
			definition := &metav1.PartialObjectMetadata{}
			definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
			if err := s.admin.Get(t.Context(), types.NamespacedName{Name: name}, definition); err != nil || definition.DeletionTimestamp != nil {
				t.Fatalf("after %s: %s: deleted at %v, error %v", after, name, definition.DeletionTimestamp, err)
			}
		}
		if err := s.admin.Get(t.Context(), client.ObjectKeyFromObject(policy), policy.DeepCopy()); err != nil {
			t.Fatalf("after %s: %v", after, err)
		}
	}
	s.install(t, "--set=crds.install=false")
	still("an upgrade with crds.install=false")
	s.install(t)
	still("an upgrade with crds.install=true again")
	s.mustHelm(t, "uninstall", "tessera", "--namespace", "tessera")
	still("helm uninstall")
	s.install(t)
	still("the next install")
	s.mustHelm(t, "uninstall", "tessera", "--namespace", "tessera")

	other := []string{"install", "gpus", chart, "--namespace", "gpus", "--create-namespace", "--set=image.repository=registry.example.com/tessera"}
	if out, err := s.helm(other...); err == nil || !strings.Contains(out, "gpuinventories.gpu.tessera.dev") || !strings.Contains(out, "meta.helm.sh/release-name") {
		t.Errorf("an install under another name: error %v, want one that names the CRD and its owner:\n%s", err, out)
	}
	s.mustHelm(t, append(other, "--take-ownership")...)
	still("an install under another name")
	s.mustHelm(t, "uninstall", "gpus", "--namespace", "gpus")
	s.install(t, "--take-ownership", "--set=crds.keep=false")
	s.mustHelm(t, "uninstall", "tessera", "--namespace", "tessera")
	err = wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return s.admin.Get(ctx, client.ObjectKeyFromObject(policy), policy.DeepCopy()) != nil, nil
	})
	if err != nil {
		t.Error("crds.keep=false keeps them all the same")
	}
}

// denied waits until act is forbidden with these words: a policy takes effect a
// moment after it is there.
func denied(t *testing.T, want string, act func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = act(ctx)
		return apierrors.IsForbidden(last) && strings.Contains(last.Error(), want), nil
	})
	if err != nil {
		t.Errorf("got %v, want it forbidden with %q", last, want)
	}
}

func slice(name, of string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: of, NodeName: new("node-a"),
			Pool:    resourceapi.ResourcePool{Name: "node-a", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "device"}},
		},
	}
}

func controllerSlices(t *testing.T, s *server) {
	const only = "the controller may write ResourceSlices of the driver gpu.nvidia.com only"
	ctx, controller := t.Context(), s.as(t, "controller", "")
	theirs := slice("theirs", "gpu.example.com")
	if err := s.admin.Create(ctx, theirs); err != nil {
		t.Fatal(err)
	}
	denied(t, only, func(ctx context.Context) error {
		return controller.Create(ctx, slice("new", "gpu.example.com"), client.DryRunAll)
	})
	denied(t, only, func(ctx context.Context) error {
		change := theirs.DeepCopy()
		change.Spec.Devices = nil
		return controller.Update(ctx, change, client.DryRunAll)
	})
	denied(t, only, func(ctx context.Context) error { return controller.Delete(ctx, theirs.DeepCopy()) })
	ours := slice("ours", driver)
	if err := controller.Create(ctx, ours); err != nil {
		t.Fatalf("create a slice of its own driver: %v", err)
	}
	ours.Spec.Pool.Generation++
	if err := controller.Update(ctx, ours); err != nil {
		t.Errorf("update a slice of its own driver: %v", err)
	}
	if err := controller.Delete(ctx, ours); err != nil {
		t.Errorf("delete a slice of its own driver: %v", err)
	}
}

func controllerClasses(t *testing.T, s *server) {
	const only = "the controller may write only DeviceClasses that its ClusterRole owns"
	ctx, controller := t.Context(), s.as(t, "controller", "")
	class := func(name, role string) *resourceapi.DeviceClass {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "tessera"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: role, UID: "1"}},
		}}
	}
	labelled := class("labelled", "")
	labelled.OwnerReferences = nil
	for _, theirs := range []*resourceapi.DeviceClass{labelled, class("theirs", "another-controller")} {
		denied(t, only, func(ctx context.Context) error { return controller.Create(ctx, theirs.DeepCopy(), client.DryRunAll) })
		if err := s.admin.Create(ctx, theirs); err != nil {
			t.Fatal(err)
		}
		denied(t, only, func(ctx context.Context) error {
			change := theirs.DeepCopy()
			change.OwnerReferences = class("", "tessera-controller").OwnerReferences
			return controller.Update(ctx, change, client.DryRunAll)
		})
		denied(t, only, func(ctx context.Context) error { return controller.Delete(ctx, theirs.DeepCopy()) })
	}
	ours := class("ours", "tessera-controller")
	if err := controller.Create(ctx, ours); err != nil {
		t.Fatalf("create a class of its own: %v", err)
	}
	ours.Annotations = map[string]string{"changed": "true"}
	if err := controller.Update(ctx, ours); err != nil {
		t.Errorf("update a class of its own: %v", err)
	}
	if err := controller.Delete(ctx, ours); err != nil {
		t.Errorf("delete a class of its own: %v", err)
	}
}

// TestMetricsAuthentication has both programs' way to serve metrics ask a real server,
// with the chart's rights.
func TestMetricsAuthentication(t *testing.T) {
	s := startServer(t)
	s.install(t, "--set=metrics.authentication.enabled=true")
	reader, stranger := s.token(t, "reader"), s.token(t, "stranger")
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "tessera-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "reader"}},
	}
	if err := s.admin.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	for _, account := range []string{"node", "controller"} {
		config := rest.CopyConfig(s.config)
		config.Impersonate = rest.ImpersonationConfig{
			UserName: "system:serviceaccount:tessera:tessera-" + account, Groups: []string{"system:serviceaccounts", "system:authenticated"},
		}
		kube, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		h := scrapeauth.Handler(kube, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for name, c := range map[string]struct {
			authorization string
			want          int
		}{
			"no token":              {"", http.StatusUnauthorized},
			"a token of no cluster": {"Bearer x", http.StatusUnauthorized},
			"a token without role":  {"Bearer " + stranger, http.StatusForbidden},
			"a reader's token":      {"Bearer " + reader, http.StatusOK},
		} {
			// The server learns of the binding a moment after it was created.
			err := wait.PollUntilContextTimeout(t.Context(), time.Second, time.Minute, true, func(ctx context.Context) (bool, error) {
				request := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", http.NoBody)
				request.Header.Set("Authorization", c.authorization)
				answer := httptest.NewRecorder()
				h.ServeHTTP(answer, request)
				if answer.Code != c.want {
					t.Logf("%s, %s: status %d, want %d: %s", account, name, answer.Code, c.want, answer.Body)
				}
				return answer.Code == c.want, nil
			})
			if err != nil {
				t.Errorf("%s, %s: %v", account, name, err)
			}
		}
	}
}

// token makes a ServiceAccount in the namespace default, and returns a token of it.
func (s *server) token(t *testing.T, name string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if err := s.admin.Create(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	request := &authenticationv1.TokenRequest{}
	if err := s.admin.SubResource("token").Create(t.Context(), account, request); err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}

// TestRefusedWithoutDRA checks that an install on a server without Dynamic Resource
// Allocation is refused, and says how to turn it on.
func TestRefusedWithoutDRA(t *testing.T) {
	s := startServer(t, "runtime-config=resource.k8s.io/v1=false")
	out, err := s.helm("install", "tessera", chart, "--namespace", "tessera", "--create-namespace", "--set=image.repository=registry.example.com/tessera")
	for _, want := range []string{"Dynamic Resource Allocation is off", "(Kubernetes v1.37.", "remove DynamicResourceAllocation=false", "--runtime-config"} {
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("helm install: error %v, want one with %q:\n%s", err, want, out)
		}
	}
}

// allocated creates a claim that has one device of node-a.
func allocated(t *testing.T, s *server) *resourceapi.ResourceClaim {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver}}}
	if err := s.admin.Create(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: driver, Pool: "node-a", Device: "gpu-0"},
		}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"node-a"}}}},
		}},
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "1"}}
	if err := s.admin.Status().Update(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	return claim
}

func pluginStatuses(t *testing.T, s *server) {
	ctx, claim := t.Context(), allocated(t, s)
	patch := func(c client.Client, status string) error {
		return c.Status().Patch(ctx, claim.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status": `+status+`}`)))
	}
	const device = `{"devices": [{"driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0", "data": {"uuid": "GPU-1"}}]}`
	own, other := s.as(t, "node", "node-a"), s.as(t, "node", "node-b")
	denied(t, `the plugin of node "node-b" may report only devices of its own node`, func(context.Context) error { return patch(other, device) })
	for _, status := range []string{
		`{"reservedFor": null}`,
		`{"reservedFor": [{"resource": "pods", "name": "another", "uid": "2"}]}`,
		`{"allocation": null, "reservedFor": null, "devices": null}`,
	} {
		denied(t, "the plugin may write status.devices only", func(context.Context) error { return patch(own, status) })
	}
	if err := patch(own, device); err != nil {
		t.Errorf("status.devices of its own node: %v", err)
	}
}

// pluginInventories has a plugin report a double allocation, the controller confirm
// it, and the plugin write its status again.
func pluginInventories(t *testing.T, s *server) {
	ctx := t.Context()
	one := map[string]any{"namespace": "default", "name": "a", "uid": "1", "device": "gpu-00000000"}
	double := func(confirmed bool) map[string]any {
		return map[string]any{"holder": one, "refused": one, "refusedAt": "2026-01-01T00:00:00Z", "confirmed": confirmed}
	}
	inv := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "node-a"}}}
	inv.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "GPUInventory"})
	plugin := s.as(t, "node", "node-a")
	if err := plugin.Create(ctx, inv); err != nil {
		t.Fatal(err)
	}
	write := func(change func(status map[string]any)) error {
		if err := s.admin.Get(ctx, client.ObjectKeyFromObject(inv), inv); err != nil {
			t.Fatal(err)
		}
		status, _, _ := unstructured.NestedMap(inv.Object, "status")
		if status == nil {
			status = make(map[string]any)
		}
		change(status)
		inv.Object["status"] = status
		return plugin.Status().Update(ctx, inv)
	}
	reports := func(d any) func(map[string]any) {
		return func(status map[string]any) { status["doubleAllocation"] = d }
	}
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(double(true))) })
	if err := write(reports(double(false))); err != nil {
		t.Fatalf("report one: %v", err)
	}
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(double(true))) })
	confirm := []byte(`{"status": {"doubleAllocation": {"confirmed": true}}}`)
	if err := s.as(t, "controller", "").Status().Patch(ctx, inv, client.RawPatch(types.MergePatchType, confirm)); err != nil {
		t.Fatalf("the controller confirms it: %v", err)
	}
	if err := write(func(status map[string]any) { status["driverVersion"] = "580.1" }); err != nil {
		t.Errorf("write something else beside it: %v", err)
	}
	changed := double(true)
	changed["kubernetes"] = "v1.37.1"
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(changed)) })
	if err := write(reports(double(false))); err != nil {
		t.Errorf("replace it: %v", err)
	}
}

func pluginReads(t *testing.T, s *server) {
	plugin := s.as(t, "node", "node-a")
	for _, kind := range []string{"Pod", "Secret", "ConfigMap", "Node"} {
		object := &unstructured.Unstructured{}
		object.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: kind})
		key := types.NamespacedName{Namespace: "default", Name: "any"}
		if kind == "Node" {
			key.Namespace = ""
		}
		if err := plugin.Get(t.Context(), key, object); !apierrors.IsForbidden(err) {
			t.Errorf("get a %s: %v, want it forbidden", kind, err)
		}
	}
}

// repeatsLabelRemoval turns node labels off while no Job can run. The rights of the
// failed Job must be gone, and the next upgrade must try again.
func repeatsLabelRemoval(t *testing.T, s *server) {
	const name = "tessera-remove-node-labels"
	fails := func(args ...string) {
		t.Helper()
		if out, err := s.helm(args...); err == nil {
			t.Fatalf("helm %s succeeded, and there is nothing that runs Jobs:\n%s", strings.Join(args, " "), out)
		}
		for _, kind := range []string{"ClusterRole", "ClusterRoleBinding"} {
			object := &metav1.PartialObjectMetadata{}
			object.SetGroupVersionKind(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: kind})
			if err := s.admin.Get(t.Context(), types.NamespacedName{Name: name}, object); !apierrors.IsNotFound(err) {
				t.Errorf("after helm %s, get %s %s: %v, want it deleted", args[0], kind, name, err)
			}
		}
	}
	job := func() types.UID {
		t.Helper()
		object := &batchv1.Job{}
		if err := s.admin.Get(t.Context(), types.NamespacedName{Namespace: "tessera", Name: name}, object); err != nil {
			t.Fatal(err)
		}
		return object.UID
	}
	upgrade := []string{"upgrade", "tessera", chart, "--namespace", "tessera", "--set=image.repository=registry.example.com/tessera", "--timeout=1s"}
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	fails(upgrade...)
	first := job()
	fails(upgrade...)
	if job() == first {
		t.Error("the second upgrade didn't try again to remove the labels")
	}
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	fails("uninstall", "tessera", "--namespace", "tessera", "--timeout=1s")
	second := job()
	fails(slices.Insert(slices.Clone(upgrade), 1, "--install")...)
	if job() == second {
		t.Error("the install after an uninstall that failed didn't try to remove the labels")
	}
}
