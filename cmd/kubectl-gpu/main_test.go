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
	corev1 "k8s.io/api/core/v1"
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

// run runs the command, and returns its output and its error's text at the end.
func run(t *testing.T, s *server, on screen, in string, args ...string) string {
	t.Helper()
	api := httptest.NewServer(s)
	defer api.Close()
	var out bytes.Buffer
	cmd := command(genericclioptions.IOStreams{In: strings.NewReader(in), Out: &out, ErrOut: &out}, on)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("apiVersion: v1\nkind: Config\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd.SetArgs(append(args, "--server", api.URL, "--kubeconfig", kubeconfig))
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		out.WriteString("error: " + err.Error() + "\n")
	}
	return strings.ReplaceAll(out.String(), api.URL, "SERVER")
}

// TestOutput compares the output of commands with testdata.
func TestOutput(t *testing.T) {
	const misspelt = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClasName: gpu.nvidia.com}]}}}`
	const old = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClassName: gpu.nvidia.com}]}}}`
	for name, tc := range map[string]struct {
		screen screen
		in     string
		change func(*server)
		args   []string
	}{
		"map-80":        {screen: screen{width: 80}, args: []string{"map"}},
		"map-120":       {screen: screen{width: 120}, args: []string{"map"}},
		"map-namespace": {screen: screen{width: 80}, args: []string{"map", "-n", "team"}},
		"map-no-tessera": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}}
		}},
		"map-no-dra": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) { s.items = nil }},
		"why-no-pod": {args: []string{"why"}},
		"map-no-claims": {screen: screen{width: 80}, args: []string{"map"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "namespaces/default/resourceclaims"}
		}},
		"map-forbidden": {screen: screen{width: 80}, args: []string{"map", "-n", "team"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "devicetaintrules", own + "gpuinventories"}
			s.items[resources+"namespaces/team/resourceclaims"] = s.items[resources+"resourceclaims"][:1]
		}},
		"map-taint-rule":      {screen: screen{width: 80}, args: []string{"map"}, change: taint},
		"map-taint-rule-1.34": {screen: screen{width: 80}, args: []string{"map"}, change: oldTaint},
		"fits-taint-rule":     {args: []string{"fits", "3g.40gb"}, change: taint},
		"slots":               {args: []string{"slots"}},
		"slots-namespace":     {args: []string{"slots", "-n", "team", "-o", "json"}},
		"get":                 {args: []string{"get"}},
		"fits":                {args: []string{"fits", "3g.40gb"}},
		"fits-memory":         {args: []string{"fits", "--memory", "20Gi"}},
		"fits-file":           {in: old, args: []string{"fits", "-f", "-"}},
		"fits-misspelt":       {in: misspelt, args: []string{"fits", "-f", "-"}},
		"fits-forbidden":      {args: []string{"fits", "3g.40gb"}, change: func(s *server) { s.forbidden = []string{resources + "deviceclasses"} }},
		"doctor":              {args: []string{"doctor"}, change: ill},
		"doctor-healthy":      {args: []string{"doctor"}, change: healthy},
		"doctor-forbidden": {args: []string{"doctor"}, change: func(s *server) {
			healthy(s)
			s.forbidden = []string{"/api/v1/pods", own + "sharingpolicies"}
		}},
		"doctor-no-tessera": {args: []string{"doctor"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}, "/api/v1/pods": {}, "/apis/apps/v1/daemonsets": {}}
		}},
		"doctor-pod-security":     {args: []string{"doctor"}, change: refused},
		"policy":                  {args: []string{"policy"}, change: shared},
		"policy-one":              {args: []string{"policy", "shares"}, change: shared},
		"policy-none":             {args: []string{"policy", "shares"}},
		"policy-forbidden":        {args: []string{"policy"}, change: func(s *server) { shared(s); s.forbidden = []string{own + "sharingpolicies"} }},
		"policy-dry-run":          {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-lost":     {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: shared},
		"policy-dry-run-misspelt": {in: strings.Replace(shares, "shares: 4", "share: 4", 1), args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-selector": {in: strings.Replace(shares, "index < 2", "indx(2)", 1), args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-forbidden": {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: func(s *server) {
			s.forbidden = []string{"POST " + own + "sharingpolicies", "POST " + resources + "resourceslices"}
		}},
		"policy-dry-run-claims": {in: shares, args: []string{"policy", "--dry-run", "-f", "-"}, change: func(s *server) {
			s.forbidden = []string{resources + "resourceclaims", resources + "namespaces/default/resourceclaims"}
		}},
		"template-no-node":   {args: []string{"template", "nodes"}},
		"template-two":       {args: []string{"template", "node", "-f", "-"}},
		"template-misspelt":  {in: strings.Replace(machine, "gpus", "gpu", 1), args: []string{"template", "-f", "-"}},
		"template-computer":  {args: []string{"template", "--machine", "gb10", "--driver-version", "580.95.05"}},
		"template-thor":      {args: []string{"template", "--machine", "thor,l4", "--driver-version", "580.95.05"}},
		"template-forbidden": {args: []string{"template", "node"}, change: func(s *server) { s.forbidden = []string{own + "sharingpolicies"} }},
		"top":                {args: []string{"top"}, change: busy},
		"top-namespace":      {args: []string{"top", "-n", "team"}, change: busy},
		"top-json":           {args: []string{"top", "-o", "json", "-n", "lab"}, change: busy},
		"top-forbidden":      {args: []string{"top"}, change: func(s *server) { busy(s); s.forbidden = []string{metricsPath} }},
		"top-authenticated": {args: []string{"top"}, change: func(s *server) {
			busy(s)
			s.metrics = nil
			plugin := s.items["/api/v1/pods"][0].(corev1.Pod)
			plugin.Spec.Containers[0].Args = []string{"--metrics-authentication"}
		}},
		"top-silent": {args: []string{"top"}, change: func(s *server) { busy(s); s.metrics = nil }},
		"top-no-tessera": {args: []string{"top"}, change: func(s *server) {
			s.items = map[string][]any{resources + "resourceslices": {}, resources + "resourceclaims": {}, "/api/v1/pods": {}}
		}},
		"drain-foreign-rule": {args: []string{"drain", "node/1", "--yes"}, change: func(s *server) {
			mine := drainRule("drain-node-gpu-00000002", "gpu-00000002")
			mine.Labels = nil
			s.items[resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-again": {args: []string{"drain", "node", "--yes"}, change: func(s *server) {
			mine := drainRule("drain-node", "")
			mine.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
			s.items[resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-dry-run-1.34": {args: []string{"drain", "node", "--dry-run"}, change: func(s *server) {
			s.minor = "34"
			s.items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run-json-1.34": {args: []string{"drain", "node", "--dry-run", "-o", "json"}, change: func(s *server) {
			s.minor = "34"
			s.items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run":   {args: []string{"drain", "node/1", "--dry-run"}, change: taint},
		"drain-node":      {args: []string{"drain", "node", "--dry-run"}, change: taint},
		"drain-no-rules":  {args: []string{"drain", "node/1", "--dry-run"}},
		"drain-no-gpu":    {args: []string{"drain", "node/7", "--dry-run"}, change: taint},
		"drain-pipe":      {args: []string{"drain", "node/1"}, change: taint},
		"drain-forbidden": {args: []string{"drain", "node/1", "--yes"}, change: func(s *server) { taint(s); s.forbidden = []string{"POST " + resources + "devicetaintrules"} }},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			if tc.change != nil {
				tc.change(s)
			}
			compare(t, name, run(t, s, tc.screen, tc.in, tc.args...))
		})
	}
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

// TestColours: a terminal gets the same text with colours, and nothing else does.
func TestColours(t *testing.T) {
	plain := run(t, cluster(t), screen{width: 80}, "", "map")
	coloured := run(t, cluster(t), screen{width: 80, colour: true}, "", "map")
	if strings.Contains(plain, "\x1b") || !strings.Contains(coloured, "\x1b[31m") {
		t.Errorf("plain %q, coloured %q", plain, coloured)
	}
	for _, c := range []string{bold, red, green, "\x1b[0m"} {
		coloured = strings.ReplaceAll(coloured, c, "")
	}
	if coloured != plain {
		t.Error(cmp.Diff(plain, coloured))
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	if s := screenOf(file); s.colour {
		t.Error("a file has colours")
	}
}

// TestPages: lists are read page by page.
func TestPages(t *testing.T) {
	s := cluster(t)
	run(t, s, screen{width: 80}, "", "map")
	if n := s.pages.Load(); n < 2 {
		t.Errorf("%d further pages were asked for, want those of slices and claims", n)
	}
}

// TestTemplateLabels checks that a template has a note if policies may select the new node
// by labels that aren't known, as when the node of the inventory is gone.
func TestTemplateLabels(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*server)
		args   []string
		noted  bool
	}{
		"node gone":             {func(s *server) { shared(s); s.items["/api/v1/nodes"] = []any{} }, nil, true},
		"node gone, labels":     {func(s *server) { shared(s); s.items["/api/v1/nodes"] = []any{} }, []string{"--labels", "pool=shared"}, false},
		"no policy with labels": {func(s *server) { s.items["/api/v1/nodes"] = []any{} }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			tc.change(s)
			out := run(t, s, screen{}, "", append([]string{"template", "node"}, tc.args...)...)
			if !strings.Contains(out, "kind: ResourceSlice") || strings.Contains(out, "note: No labels of the new node are known") != tc.noted {
				t.Error(out)
			}
		})
	}
}

// TestCalledAs: texts name the program as the user calls it.
func TestCalledAs(t *testing.T) {
	for program, want := range map[string]string{
		"/usr/local/bin/kubectl-gpu": "kubectl gpu", "/home/me/.krew/bin/kubectl-tessera": "kubectl tessera",
		"kubectl-tessera.exe": "kubectl tessera", "bin/kubectl-my_gpus": "kubectl my-gpus", "/tmp/gpu": "kubectl gpu",
	} {
		if got := calledAs(program); got != want {
			t.Errorf("%s: %s, want %s", program, got, want)
		}
	}
	var plain, out bytes.Buffer
	for w, as := range map[*bytes.Buffer]string{&plain: "kubectl gpu", &out: "kubectl tessera"} {
		cmd := command(genericclioptions.IOStreams{In: strings.NewReader(""), Out: naming{w, as}, ErrOut: naming{w, as}}, screen{})
		cmd.SetArgs([]string{"drain", "--help"})
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	if got := out.String(); got != strings.ReplaceAll(plain.String(), "kubectl gpu", "kubectl tessera") || !strings.Contains(got, "\n  kubectl tessera drain NODE") {
		t.Error(got)
	}
}
