package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

var update = flag.Bool("update", false, "write testdata/*.txt again")

// server is an API server that has some objects, and forbids or lacks some resources.
type server struct {
	// items by the path of their list.
	items     map[string][]any
	forbidden []string
	// objects by their own path.
	objects map[string]any
	// metrics by path.
	metrics map[string]string
	// pages counts requests with a continue token.
	pages atomic.Int32
	// written are the requests that change something.
	written []string
	// conflict, if it isn't nil, is called with each request that replaces an object or
	// deletes one of a version, and says whether to refuse it with a conflict.
	conflict func() bool
	// minor version of Kubernetes.
	minor string
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(v)
	}
	refuse := func(code int, reason metav1.StatusReason) {
		reply(code, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: reason, Code: int32(code), Message: r.URL.Path})
	}
	if slices.Contains(s.forbidden, r.URL.Path) || slices.Contains(s.forbidden, r.Method+" "+r.URL.Path) {
		refuse(http.StatusForbidden, metav1.StatusReasonForbidden)
		return
	}
	if text, ok := s.metrics[r.URL.Path]; ok {
		_, _ = io.WriteString(w, text)
		return
	}
	if object, ok := s.objects[r.URL.Path]; ok && r.Method == http.MethodGet {
		reply(http.StatusOK, object)
		return
	}
	items, ok := s.items[r.URL.Path]
	if name, found := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name="); found {
		items = slices.DeleteFunc(slices.Clone(items), func(x any) bool { return x.(resourceapi.DeviceTaintRule).Name != name })
	}
	switch {
	case s.conflict != nil && ofVersion(r) && s.conflict():
		refuse(http.StatusConflict, metav1.StatusReasonConflict)
	case r.Method != http.MethodGet:
		s.write(w, r, reply)
	case r.URL.Path == "/version":
		reply(http.StatusOK, map[string]string{"major": "1", "gitVersion": "v1." + s.minor + ".1"})
	case !ok:
		refuse(http.StatusNotFound, metav1.StatusReasonNotFound)
	case strings.HasPrefix(r.URL.Path, "/apis/resource.k8s.io/v1alpha3/"):
		reply(http.StatusOK, map[string]any{"apiVersion": "resource.k8s.io/v1alpha3", "kind": "DeviceTaintRuleList", "metadata": map[string]string{}, "items": items})
	case len(items) > 1 && r.URL.Query().Get("limit") != "" && r.URL.Query().Get("continue") == "":
		reply(http.StatusOK, map[string]any{"metadata": map[string]string{"continue": "rest"}, "items": items[:1]})
	case r.URL.Query().Get("continue") != "":
		s.pages.Add(1)
		reply(http.StatusOK, map[string]any{"metadata": map[string]string{}, "items": items[1:]})
	default:
		reply(http.StatusOK, map[string]any{"metadata": map[string]string{}, "items": items})
	}
}

// ofVersion reports whether a request may fail with a conflict.
func ofVersion(r *http.Request) bool {
	if r.Method != http.MethodDelete {
		return r.Method == http.MethodPut
	}
	body, err := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	if err != nil {
		return false
	}
	options, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	o, ok := options.(*metav1.DeleteOptions)
	return err == nil && ok && o.Preconditions != nil && o.Preconditions.UID != nil && o.Preconditions.ResourceVersion != nil
}

// write answers with the object that is written, stores nothing, and remembers the
// request.
func (s *server) write(w http.ResponseWriter, r *http.Request, reply func(int, any)) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if strings.Contains(r.URL.Path, "/v1alpha3/") && bytes.Contains(body, []byte(`"status"`)) {
		http.Error(w, `unknown field "status"`, http.StatusBadRequest)
		return
	}
	var object any = map[string]any{} // of a request without a body
	if json.Valid(body) {
		object = json.RawMessage(body)
	}
	if known, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil); err == nil {
		object = known // it came as protobuf
	}
	if r.URL.Query().Get("dryRun") == "" {
		s.written = append(s.written, r.Method+" "+r.URL.Path)
	}
	reply(http.StatusOK, object)
}

const resources, own = "/apis/resource.k8s.io/v1/", "/apis/gpu.tessera.dev/v1alpha1/"

// cluster has a node of three H100s: one with partitions, one in use as a whole, one
// broken.
func cluster(t *testing.T) *server {
	t.Helper()
	n, err := offertest.Node("h100-80gb", 3)
	if err != nil {
		t.Fatal(err)
	}
	n.GPUs[2].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95: the driver asks for a reset"}}
	inv := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	inventory.SetFacts(&inv.Status, n)
	s := &server{minor: "37", items: map[string][]any{
		own + "gpuinventories": {inv}, own + "sharingpolicies": {}, "/apis/apps/v1/daemonsets": {}, "/api/v1/nodes": {map[string]any{"metadata": map[string]any{"name": n.Name}}},
		resources + "deviceclasses": {class("gpu.nvidia.com", "gpu"), class("mig.nvidia.com", "mig"), class("mps.gpu.nvidia.com", "mps")},
		resources + "resourceclaims": {
			claim("team", "train-gpu", "train-0", "gpu-00000002"), claim("team", "infer-7c9-gpu", "infer-7c9-xk2p1", "gpu-00000001-mig-3g40gb-4"),
			claim("lab", "notebook", "", "gpu-00000001-mig-1g10gb-0"),
		},
	}}
	plan := v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: "u"}
	for _, x := range publish.Pool(owner, offer.Build(n, offertest.OnePlan(n, plan), nil, offer.Server{Counters: true, MaxTainted: 64}), publish.SplitCounters) {
		s.items[resources+"resourceslices"] = append(s.items[resources+"resourceslices"], x)
	}
	return s
}

func class(name, kind string) resourceapi.DeviceClass {
	c := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	c.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.nvidia.com"].type == "` + kind + `"`}}}
	return c
}

func claim(namespace, name, pod, device string) resourceapi.ResourceClaim {
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "u"}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: gpu.DriverName, Pool: "node", Device: device}},
	}}
	if pod != "" {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: "p"}}
	}
	return c
}

func compare(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// execute runs kubectl gpu with the arguments, and returns its output and its error's text
// at the end.
func (s *server) execute(t *testing.T, command func(genericclioptions.IOStreams) *cobra.Command, in string, args ...string) string {
	t.Helper()
	api := httptest.NewServer(s)
	defer api.Close()
	var out bytes.Buffer
	cmd := command(genericclioptions.IOStreams{In: strings.NewReader(in), Out: &out, ErrOut: &out})
	cmd.SetArgs(append(args, "--server", api.URL, "--kubeconfig", kubeconfig(t)))
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		out.WriteString("error: " + err.Error() + "\n")
	}
	return strings.ReplaceAll(out.String(), api.URL, "SERVER")
}

// run runs one command of kubectl gpu; its name is the first argument.
func (s *server) run(t *testing.T, sub func(*options) *cobra.Command, on screen, in string, args ...string) string {
	t.Helper()
	return s.execute(t, func(streams genericclioptions.IOStreams) *cobra.Command {
		o := newOptions(streams, on)
		cmd := &cobra.Command{Use: "kubectl-gpu", SilenceUsage: true, SilenceErrors: true}
		cmd.SetOut(o.Out)
		cmd.SetErr(o.ErrOut)
		o.flags.AddFlags(cmd.PersistentFlags())
		cmd.AddCommand(sub(o))
		return cmd
	}, in, args...)
}

// kubeconfig returns the path of an empty kubeconfig.
func kubeconfig(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Config\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
