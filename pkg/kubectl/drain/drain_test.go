package drain

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// drainRule is one of drain's for a device, or for "" one of the node.
func drainRule(name, device string) resourceapi.DeviceTaintRule {
	pool := "node"
	r := resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{drainKey: ""}}}
	r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Pool: &pool}
	if device != "" {
		r.Spec.DeviceSelector.Device = &device
	}
	r.Spec.Taint = resourceapi.DeviceTaint{Key: drainKey, Effect: resourceapi.DeviceTaintEffectNone}
	return r
}

// TestDrain: a drain without questions makes the rules of one GPU that are missing, sets
// the effect of those that have another one and, undone, deletes them; those of other
// GPUs, of other drivers and of admins stay. The same on a server that has v1alpha3 only.
func TestDrain(t *testing.T) {
	for name, path := range map[string]string{"v1": kubectltest.Resources, "v1alpha3": "/apis/resource.k8s.io/v1alpha3/"} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			kubectltest.Taint(s)
			admins := s.Items[kubectltest.Resources+"devicetaintrules"][0]
			delete(s.Items, kubectltest.Resources+"devicetaintrules")
			s.Items[path+"devicetaintrules"] = []any{admins}
			s.Run(t, Command, terminal.Screen{}, "", "drain", "node/0", "--yes")
			if made := s.Written; len(made) == 0 || slices.ContainsFunc(made, func(w string) bool { return w != "POST "+path+"devicetaintrules" }) {
				t.Errorf("written: %v", made)
			}
			other := drainRule("other-driver", "gpu-00000001")
			other.Spec.DeviceSelector.Driver = new("gpu.example.com")
			forced := drainRule("forced", "gpu-00000001-mig-1g10gb-1")
			forced.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
			s.Items[path+"devicetaintrules"] = []any{
				drainRule("mine", "gpu-00000001-mig-1g10gb-0"), drainRule("whole", "gpu-00000001"), forced, drainRule("other", "gpu-00000002"), drainRule("node", ""), other, admins,
			}
			s.Written = nil
			s.Run(t, Command, terminal.Screen{}, "", "drain", "node/0", "--yes")
			updated := slices.DeleteFunc(s.Written, func(w string) bool { return !strings.HasPrefix(w, http.MethodPut) })
			s.Written = nil
			s.Run(t, Command, terminal.Screen{}, "", "drain", "node/0", "--undo")
			rules := path + "devicetaintrules/"
			if diff := cmp.Diff([]string{"PUT " + rules + "mine", "PUT " + rules + "whole"}, updated); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"DELETE " + rules + "mine", "DELETE " + rules + "whole", "DELETE " + rules + "forced"}, s.Written); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestDrainConflict: a rule that has changed since drain read it is changed only if it is
// still drain's own.
func TestDrainConflict(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*resourceapi.DeviceTaintRule)
		// deleted: there is no rule any more.
		deleted bool
		// says is in the output; a PUT follows the conflict where it is empty.
		says string
	}{
		"new version":   {change: func(r *resourceapi.DeviceTaintRule) { r.ResourceVersion = "2" }},
		"another label": {change: func(r *resourceapi.DeviceTaintRule) { r.Labels = nil }, says: "DeviceTaintRule whole is another one now: drain again"},
		"another taint": {change: func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.Key = "example.com/x" }, says: "DeviceTaintRule whole is another one now: drain again"},
		"another GPU":   {change: func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Device = new("gpu-00000002") }, says: "DeviceTaintRule whole is another one now: drain again"},
		"deleted":       {deleted: true, says: "DeviceTaintRule whole is gone: drain again"},
	} {
		t.Run(name, func(t *testing.T) {
			const path = kubectltest.Resources + "devicetaintrules"
			s := kubectltest.New(t)
			rules := []any{drainRule("other", "gpu-00000002"), drainRule("whole", "gpu-00000001")}
			s.Items[path] = rules
			conflicts := 0
			s.Conflict = func() bool {
				conflicts++
				// The first request is the dry run.
				if conflicts == 2 && tc.deleted {
					s.Items[path] = rules[:1]
				} else if conflicts == 2 {
					r := drainRule("whole", "gpu-00000001")
					tc.change(&r)
					s.Items[path] = []any{rules[0], r}
				}
				return conflicts == 2
			}
			out := s.Run(t, Command, terminal.Screen{}, "", "drain", "node/0", "--yes")
			put := slices.Contains(s.Written, "PUT "+path+"/whole")
			if put != (tc.says == "") || !strings.Contains(out, tc.says) {
				t.Errorf("written %v; it says:\n%s", s.Written, out)
			}
		})
	}
}

// TestUndoConflict: a rule that has changed since drain read it is deleted only if it is
// still drain's own.
func TestUndoConflict(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*resourceapi.DeviceTaintRule)
		gone    bool // there is no rule any more
		deleted bool // by drain
		says    string
	}{
		"new version":   {change: func(r *resourceapi.DeviceTaintRule) { r.ResourceVersion = "2" }, deleted: true, says: "1 DeviceTaintRule deleted"},
		"another label": {change: func(r *resourceapi.DeviceTaintRule) { r.Labels = nil }, says: "DeviceTaintRule whole is another one now, and was left alone"},
		"another GPU":   {change: func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Device = new("gpu-00000002") }, says: "is another one now"},
		"gone":          {gone: true, says: "1 DeviceTaintRule deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			const path = kubectltest.Resources + "devicetaintrules"
			s := kubectltest.New(t)
			s.Items[path] = []any{drainRule("whole", "gpu-00000001")}
			conflicts := 0
			s.Conflict = func() bool {
				if conflicts++; conflicts > 1 {
					return false
				}
				s.Items[path] = []any{}
				if !tc.gone {
					r := drainRule("whole", "gpu-00000001")
					tc.change(&r)
					s.Items[path] = []any{r}
				}
				return true
			}
			out := s.Run(t, Command, terminal.Screen{}, "", "drain", "node/0", "--undo")
			if deleted := slices.Contains(s.Written, "DELETE "+path+"/whole"); deleted != tc.deleted || !strings.Contains(out, tc.says) {
				t.Errorf("written %v; it says:\n%s", s.Written, out)
			}
		})
	}
}

// TestDrainAsks: an interrupt or a no leaves everything as it is; a yes doesn't, unless
// something else would be done by then: that is asked about again.
func TestDrainAsks(t *testing.T) {
	pod := func(s *kubectltest.Server) {
		s.Items[kubectltest.Resources+"resourceclaims"] = append(s.Items[kubectltest.Resources+"resourceclaims"], kubectltest.Claim("team", "late-gpu", "late-0", "gpu-00000001-mig-1g10gb-1"))
	}
	rule := func(s *kubectltest.Server) {
		s.Items[kubectltest.Resources+"devicetaintrules"] = append(s.Items[kubectltest.Resources+"devicetaintrules"], drainRule("drain-node-gpu-00000001", "gpu-00000001"))
	}
	gone := func(s *kubectltest.Server) {
		s.Items[kubectltest.Resources+"resourceslices"], s.Items[kubectltest.Own+"gpuinventories"] = nil, nil
	}
	for name, tc := range map[string]struct {
		// answers to the questions; without one the user interrupts.
		answers []string
		// meanwhile changes the server while the first question is asked.
		meanwhile func(*kubectltest.Server)
		changed   bool
		says      string
	}{
		"interrupted": {says: "Nothing was changed."}, "no": {answers: []string{"n"}, says: "Nothing was changed."}, "empty": {answers: []string{""}, says: "Nothing was changed."},
		"yes":                {answers: []string{"y"}, changed: true, says: " in force: new claims"},
		"pod comes, then no": {answers: []string{"y", "n"}, meanwhile: pod, says: "team/late-0 (claim late-gpu"},
		"pod comes":          {answers: []string{"y", "y"}, meanwhile: pod, changed: true, says: "team/late-0 (claim late-gpu"},
		"rule comes":         {answers: []string{"y", "n"}, meanwhile: rule, says: "Not done yet: the pods or DeviceTaintRules have changed since you were asked. This is the new plan:"},
		"GPU goes":           {answers: []string{"y"}, meanwhile: gone},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			kubectltest.Taint(s)
			api := httptest.NewServer(s)
			defer api.Close()
			file := kubectltest.Kubeconfig(t)
			ctx, interrupt := context.WithCancel(t.Context())
			in, typed := io.Pipe()
			defer typed.Close()
			asked := 0
			out := &prompt{then: func() {
				if asked++; asked > len(tc.answers) {
					interrupt()
					return
				}
				if asked == 1 && tc.meanwhile != nil {
					tc.meanwhile(s)
				}
				go func() { _, _ = io.WriteString(typed, tc.answers[asked-1]+"\n") }()
			}}
			o := &cluster.Options{IOStreams: genericclioptions.IOStreams{In: in, Out: out, ErrOut: out}, Flags: genericclioptions.NewConfigFlags(true)}
			o.Flags.APIServer, o.Flags.KubeConfig = &api.URL, &file
			d, err := newDrainer(ctx, o, "node/0")
			if err != nil {
				t.Fatal(err)
			}
			if err := d.run(ctx, false); (err == nil) != tc.changed || (len(s.Written) > 0) != tc.changed || asked < len(tc.answers) {
				t.Errorf("%d questions, error %v, written %v", asked, err, s.Written)
			}
			if !strings.Contains(out.String(), tc.says) {
				t.Errorf("%s", out)
			}
		})
	}
}

// prompt calls then when a question is asked.
type prompt struct {
	bytes.Buffer

	then func()
}

// Write implements io.Writer.
func (p *prompt) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("[y/N]")) {
		p.then()
	}
	return p.Buffer.Write(b)
}
