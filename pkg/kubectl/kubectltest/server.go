// Package kubectltest has an API server with a small cluster, for tests of what commands of
// kubectl gpu print.
package kubectltest

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
	"strconv"
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
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

var update = flag.Bool("update", false, "write testdata/*.txt again")

// Server is an API server that has some objects, and forbids or lacks some resources.
type Server struct {
	// Items by the path of their list.
	Items map[string][]any
	// Forbidden are paths, or a method and a path, for which the user has no rights.
	Forbidden []string
	// Objects by their own path.
	Objects map[string]any
	// Metrics by path.
	Metrics map[string]string
	// Pages counts requests with a continue token.
	Pages atomic.Int32
	// Written are the requests that change something.
	Written []string
	// Conflict, if it isn't nil, is called with each request that replaces an object or
	// deletes one of a version, and says whether to refuse it with a conflict.
	Conflict func() bool
	// Minor version of Kubernetes.
	Minor string
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(v)
	}
	refuse := func(code int, reason metav1.StatusReason) {
		reply(code, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: reason, Code: int32(code), Message: r.URL.Path})
	}
	if slices.Contains(s.Forbidden, r.URL.Path) || slices.Contains(s.Forbidden, r.Method+" "+r.URL.Path) {
		refuse(http.StatusForbidden, metav1.StatusReasonForbidden)
		return
	}
	if text, ok := s.Metrics[r.URL.Path]; ok {
		_, _ = io.WriteString(w, text)
		return
	}
	if object, ok := s.Objects[r.URL.Path]; ok && r.Method == http.MethodGet {
		reply(http.StatusOK, object)
		return
	}
	items, ok := s.Items[r.URL.Path]
	if name, found := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name="); found {
		items = slices.DeleteFunc(slices.Clone(items), func(x any) bool { return x.(resourceapi.DeviceTaintRule).Name != name })
	}
	switch {
	case s.Conflict != nil && ofVersion(r) && s.Conflict():
		refuse(http.StatusConflict, metav1.StatusReasonConflict)
	case r.Method != http.MethodGet:
		s.write(w, r, reply)
	case r.URL.Path == "/version":
		reply(http.StatusOK, map[string]string{"major": "1", "gitVersion": "v1." + s.Minor + ".1"})
	case !ok:
		refuse(http.StatusNotFound, metav1.StatusReasonNotFound)
	case strings.HasPrefix(r.URL.Path, "/apis/resource.k8s.io/v1alpha3/"):
		reply(http.StatusOK, map[string]any{"apiVersion": "resource.k8s.io/v1alpha3", "kind": "DeviceTaintRuleList", "metadata": map[string]string{}, "items": items})
	case len(items) > 1 && r.URL.Query().Get("limit") != "" && r.URL.Query().Get("continue") == "":
		reply(http.StatusOK, map[string]any{"metadata": map[string]string{"continue": "rest"}, "items": items[:1]})
	case r.URL.Query().Get("continue") != "":
		s.Pages.Add(1)
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
func (s *Server) write(w http.ResponseWriter, r *http.Request, reply func(int, any)) {
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
		s.Written = append(s.Written, r.Method+" "+r.URL.Path)
	}
	reply(http.StatusOK, object)
}

// Resources and Own begin the paths of Kubernetes' and Tessera's own kinds.
const Resources, Own = "/apis/resource.k8s.io/v1/", "/apis/gpu.tessera.dev/v1alpha1/"

// New has a node of three H100s: one with partitions, one in use as a whole, one
// broken.
func New(t *testing.T) *Server {
	t.Helper()
	n, err := offertest.Node("h100-80gb", 3)
	if err != nil {
		t.Fatal(err)
	}
	n.GPUs[2].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95: the driver asks for a reset"}}
	inv := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	inventory.SetFacts(&inv.Status, n)
	s := &Server{Minor: "37", Items: map[string][]any{
		Own + "gpuinventories": {inv}, Own + "sharingpolicies": {}, "/apis/apps/v1/daemonsets": {}, "/api/v1/nodes": {map[string]any{"metadata": map[string]any{"name": n.Name}}},
		Resources + "deviceclasses": {Class("gpu.nvidia.com", "gpu"), Class("mig.nvidia.com", "mig"), Class("mps.gpu.nvidia.com", "mps")},
		Resources + "resourceclaims": {
			Claim("team", "train-gpu", "train-0", "gpu-00000002"), Claim("team", "infer-7c9-gpu", "infer-7c9-xk2p1", "gpu-00000001-mig-3g40gb-4"),
			Claim("lab", "notebook", "", "gpu-00000001-mig-1g10gb-0"),
		},
	}}
	plan := v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: "u"}
	for _, x := range publish.Pool(owner, offer.Build(n, offertest.OnePlan(n, plan), nil, offer.Server{Counters: true, MaxTainted: 64}), publish.SplitCounters) {
		s.Items[Resources+"resourceslices"] = append(s.Items[Resources+"resourceslices"], x)
	}
	return s
}

// Class is a DeviceClass that selects devices of a type.
func Class(name, kind string) resourceapi.DeviceClass {
	c := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	c.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.nvidia.com"].type == "` + kind + `"`}}}
	return c
}

// Claim is a claim that has a device of the node, for a pod if there is one.
func Claim(namespace, name, pod, device string) resourceapi.ResourceClaim {
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "u"}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: gpu.DriverName, Pool: "node", Device: device}},
	}}
	if pod != "" {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: "p"}}
	}
	return c
}

// CompareFile compares an output with a file of testdata, or writes the file with -update.
func CompareFile(t *testing.T, name, got string) {
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

// Execute runs kubectl gpu with the arguments, and returns its output and its error's text
// at the end.
func (s *Server) Execute(t *testing.T, command func(genericclioptions.IOStreams) *cobra.Command, in string, args ...string) string {
	t.Helper()
	api := httptest.NewServer(s)
	defer api.Close()
	var out bytes.Buffer
	cmd := command(genericclioptions.IOStreams{In: strings.NewReader(in), Out: &out, ErrOut: &out})
	cmd.SetArgs(append(args, "--server", api.URL, "--kubeconfig", Kubeconfig(t)))
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		out.WriteString("error: " + err.Error() + "\n")
	}
	return strings.ReplaceAll(out.String(), api.URL, "SERVER")
}

// Run runs one command of kubectl gpu; its name is the first argument.
func (s *Server) Run(t *testing.T, sub func(*cluster.Options) *cobra.Command, on terminal.Screen, in string, args ...string) string {
	t.Helper()
	return s.Execute(t, func(streams genericclioptions.IOStreams) *cobra.Command { return Root(streams, on, sub) }, in, args...)
}

// Root returns kubectl gpu with only one command.
func Root(streams genericclioptions.IOStreams, on terminal.Screen, sub func(*cluster.Options) *cobra.Command) *cobra.Command {
	o := cluster.NewOptions(streams, on)
	cmd := &cobra.Command{Use: "kubectl-gpu", SilenceUsage: true, SilenceErrors: true}
	cmd.SetOut(o.Out)
	cmd.SetErr(o.ErrOut)
	o.Flags.AddFlags(cmd.PersistentFlags())
	cmd.AddCommand(sub(o))
	return cmd
}

// Case is a run of a command.
type Case struct {
	Screen terminal.Screen
	In     string
	// Change changes the server, if it isn't nil.
	Change func(*Server)
	Args   []string
}

// Compare compares the output of each run of a command with the file of testdata that has
// the case's name.
func Compare(t *testing.T, sub func(*cluster.Options) *cobra.Command, cases map[string]Case) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := New(t)
			if tc.Change != nil {
				tc.Change(s)
			}
			CompareFile(t, name, s.Run(t, sub, tc.Screen, tc.In, tc.Args...))
		})
	}
}

// CompareHelp compares the run that a command's help shows, of testdata/help.txt, with the
// command's output. The file's first line is the command: "$ kubectl gpu map", or one that
// shows a number of lines, "… | head -n 9".
func CompareHelp(t *testing.T, sub func(*cluster.Options) *cobra.Command, tc Case) {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("testdata", "help.txt"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(file), "\n")
	command, head, short := strings.Cut(first, " | head -n ")
	s := New(t)
	if tc.Change != nil {
		tc.Change(s)
	}
	out := s.Run(t, sub, terminal.Screen{Width: 80}, tc.In, strings.Fields(strings.TrimPrefix(command, "$ kubectl gpu "))...)
	if short {
		n, err := strconv.Atoi(head)
		if err != nil {
			t.Fatal(err)
		}
		out = strings.Join(strings.SplitAfter(out, "\n")[:n], "")
	}
	CompareFile(t, "help", first+"\n"+strings.TrimSuffix(out, "error: no\n")) // main prints no such answer
}

// Kubeconfig returns the path of an empty kubeconfig.
func Kubeconfig(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Config\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
