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
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
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
	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/apiserver"
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
	if !slices.ContainsFunc(flags, func(flag string) bool { return strings.HasPrefix(flag, "feature-gates=") }) {
		env.ControlPlane.GetAPIServer().Configure().Append("feature-gates", "DRAResourceClaimGranularStatusAuthorization=false")
	}
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
	c, err := client.New(s.configAs(account, node), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *server) configAs(account, node string) *rest.Config {
	config := rest.CopyConfig(s.config)
	config.QPS = -1
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:tessera:tessera-" + account,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:tessera", "system:authenticated"},
	}
	if node != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	return config
}

// TestServer is one test because a server takes seconds to start.
func TestServer(t *testing.T) {
	s := startServer(t)
	t.Run("every object is accepted", func(t *testing.T) { acceptsAll(t, s) })
	t.Run("notes say that Pod Security admits no plugin", func(t *testing.T) { notesOnPodSecurity(t, s) })
	t.Run("CRDs are kept", func(t *testing.T) { keepsCRDs(t, s) })
	s.install(t)
	populate(t, s)
	t.Run("a node's token changes nothing of others", func(t *testing.T) { nodeToken(t, s) })
	t.Run("the controller writes its driver's slices", func(t *testing.T) { controllerSlices(t, s) })
	t.Run("the controller writes its own classes", func(t *testing.T) { controllerClasses(t, s) })
	t.Run("the plugin writes status.devices", func(t *testing.T) { pluginStatuses(t, s) })
	t.Run("records of double allocations of earlier releases go", func(t *testing.T) { pluginInventories(t, s) })
	t.Run("a tenant gets no admin access and nothing of others", func(t *testing.T) { tenant(t, s) })
	t.Run("strict pods of all examples are admitted", func(t *testing.T) { strictExamples(t, s) })
	t.Run("the plugin reads nothing that it doesn't need", func(t *testing.T) { pluginReads(t, s) })
	t.Run("the controller only removes its own labels of nodes", func(t *testing.T) { removesLabels(t, s) })
	t.Run("the controller writes no taints but its own", func(t *testing.T) { controllerTaints(t, s, false, false) })
	s.install(t, "--set=packing.ranks=true")
	t.Run("the controller writes no taints but its own, with ranks", func(t *testing.T) { controllerTaints(t, s, true, false) })
	s.install(t, "--set=packing.ranks=true,packing.reserve.hard=2")
	t.Run("the controller writes no taints but its own, with a hard reserve", func(t *testing.T) { controllerTaints(t, s, true, true) })
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	t.Run("the controller's token changes nothing of others", func(t *testing.T) { controllerToken(t, s) })
	t.Run("notes say how labels of nodes are removed", func(t *testing.T) { notesOnLabels(t, s) })
	t.Run("a failed removal of labels leaves no rights", func(t *testing.T) { failsToRemoveLabels(t, s) })
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

// notesOnPodSecurity checks that the notes begin with the level of Pod Security that a namespace
// enforces, and with the command that changes it, where that level refuses the plugin's pods.
func notesOnPodSecurity(t *testing.T, s *server) {
	const begin = "NOTES:\n"
	notes := func(namespace string) string {
		t.Helper()
		out, err := s.helm("install", "tessera", chart, "--namespace", namespace, "--dry-run=server", "--set=image.repository=registry.example.com/tessera")
		_, notes, found := strings.Cut(out, begin)
		if err != nil || !found {
			t.Fatalf("helm install --dry-run=server: %v\n%s", err, out)
		}
		return notes
	}
	const installed = "Tessera 0.1.0 is installed"
	for level, want := range map[string]string{
		"restricted": "NO PLUGIN WILL BE ADMITTED, because the namespace guarded-restricted enforces",
		"baseline":   "NO PLUGIN WILL BE ADMITTED, because the namespace guarded-baseline enforces",
		"privileged": installed, "": installed,
	} {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: strings.TrimSuffix("guarded-"+level, "-")}}
		const label = "pod-security.kubernetes.io/enforce"
		if level != "" {
			namespace.Labels = map[string]string{label: level}
		}
		if err := s.admin.Create(t.Context(), namespace); err != nil {
			t.Fatal(err)
		}
		got := notes(namespace.Name)
		if !strings.HasPrefix(got, want) {
			t.Errorf("with the level %q the notes don't begin with %q:\n%s", level, want, got)
		}
		command := "kubectl label --overwrite namespace " + namespace.Name + " " + label + "=privileged\n"
		if strings.Contains(got, command) != (want != installed) {
			t.Errorf("with the level %q, should the notes have %q?\n%s", level, command, got)
		}
	}
	if got := notes("is-made-later"); !strings.HasPrefix(got, installed) {
		t.Errorf("without a namespace the notes begin otherwise:\n%s", got)
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
