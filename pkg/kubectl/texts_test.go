package kubectl

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// attack is a text with which a node could change what an administrator sees: it sets the
// clipboard, clears the screen, colours what follows, and begins another line.
const attack = "\x1b]52;c;Y3VybA==\x07\x1b[2J\x1b[32m\u009b31m\u202eall is well\r\nnode-9: nothing is wrong\tnothing"

const green = "\x1b[32m"

// run runs a command of all, and returns its output and its error's text at the end.
func run(t *testing.T, s *kubectltest.Server, on terminal.Screen, in string, args ...string) string {
	t.Helper()
	return s.Execute(t, func(streams genericclioptions.IOStreams) *cobra.Command { return New(streams, on, "test") }, in, args...)
}

// hostile adds texts that act on terminals wherever a node can write any.
func hostile(s *kubectltest.Server) {
	kubectltest.Shared(s)
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	inv.Status.DriverVersion = attack
	inv.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "X", Message: attack}}
	for i := range inv.Status.GPUs {
		g := &inv.Status.GPUs[i]
		g.ProductName = attack
		g.Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.ResetRequired), Status: metav1.ConditionTrue, Message: attack}}
	}
	s.Items[kubectltest.Own+"gpuinventories"] = []any{inv}
	for _, x := range s.Items[kubectltest.Resources+"resourceslices"] {
		for _, d := range x.(resourceapi.ResourceSlice).Spec.Devices {
			d.Attributes["productName"] = resourceapi.DeviceAttribute{StringValue: new(attack)}
		}
	}
	for i, x := range s.Items[kubectltest.Own+"sharingpolicies"] {
		p := x.(v1alpha1.SharingPolicy)
		p.Status.Problems = append(p.Status.Problems, v1alpha1.PolicyProblem{Message: attack, Example: attack})
		s.Items[kubectltest.Own+"sharingpolicies"][i] = p
	}
}

// TestTextsOfNodes: no text of a node acts on a terminal, or begins a line, with or
// without colours; JSON and YAML have it as it is.
func TestTextsOfNodes(t *testing.T) {
	for _, args := range [][]string{
		{"map"}, {"get"}, {"get", "-o", "wide"}, {"slots"}, {"top"}, {"doctor"}, {"policy"}, {"policy", "shares"},
		{"fits", "-f", "-"}, {"drain", "node/0", "--dry-run"}, {"policy", "--dry-run", "-f", "-"},
	} {
		for _, on := range []terminal.Screen{{Width: 120}, {Width: 120, Colour: true}} {
			s := kubectltest.New(t)
			kubectltest.Busy(s)
			hostile(s)
			kubectltest.Taint(s)
			in := kubectltest.Shares
			if args[0] == "fits" {
				in = `{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, ` +
					`exactly: {deviceClassName: gpu.nvidia.com, ` +
					`selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].productName == "x"'}}]}}]}}}`
			}
			out := run(t, s, on, in, args...)
			rest := out
			for _, c := range []string{"\x1b[1m", "\x1b[31m", green, "\x1b[0m"} {
				if on.Colour {
					rest = strings.ReplaceAll(rest, c, "")
				}
			}
			acts := func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }
			if i := strings.IndexFunc(rest, acts); i >= 0 || strings.Contains(out, "\nnode-9:") || strings.Contains(out, green+"\u009b") {
				t.Errorf("%v, colours %v: a node's text acts on the terminal, or passes for a line:\n%q", args, on.Colour, out)
			}
		}
	}
}

// TestDocumentsAreExact: JSON and YAML have the texts of nodes as they are.
func TestDocumentsAreExact(t *testing.T) {
	for _, form := range []string{"json", "yaml"} {
		s := kubectltest.New(t)
		hostile(s)
		out := run(t, s, terminal.Screen{}, "", "map", "-o", form)
		if form == "json" && strings.ContainsFunc(out, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }) {
			t.Errorf("%s has characters that a terminal acts on: %q", form, out)
		}
		var c view.Cluster
		decode := json.Unmarshal
		if form == "yaml" {
			decode = func(raw []byte, into any) error { return yaml.Unmarshal(raw, into) }
		}
		document, _, _ := strings.Cut(out, "note: ")
		if err := decode([]byte(document), &c); err != nil {
			t.Fatalf("%s: %v: %q", form, err, out)
		}
		if len(c.Nodes) == 0 || len(c.Nodes[0].GPUs) == 0 || len(c.Nodes[0].GPUs[0].Conditions) == 0 {
			t.Fatalf("%s: %q", form, out)
		}
		if got := c.Nodes[0].GPUs[0].Conditions[0].Message; got != attack {
			t.Errorf("%s: %q, want %q", form, got, attack)
		}
	}
}
