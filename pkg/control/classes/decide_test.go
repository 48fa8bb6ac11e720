package classes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const file = `
owner: tessera-controller
labels: {app.kubernetes.io/instance: tessera}
classes:
- name: gpu.nvidia.com
  spec:
    selectors: [{cel: {expression: device.driver == 'gpu.nvidia.com'}}]
    config: [{opaque: {driver: gpu.nvidia.com, parameters: {kind: GpuConfig, count: 2}}}]
    extendedResourceName: nvidia.com/gpu
`

func read(t *testing.T, text string) (*Wanted, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "device-classes.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Read(name)
}

func TestReadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no owner":          {"classes: []", "owner is missing"},
		"no name":           {"owner: a\nclasses: [{spec: {}}]", "classes[0] has no name"},
		"a name twice":      {"owner: a\nclasses: [{name: b, spec: {}}, {name: b, spec: {}}]", "two classes have the name b"},
		"an unknown field":  {"owner: a\nclasses: [{name: b, spec: {selector: []}}]", `unknown field "selector"`},
		"something else":    {"- owner", "cannot unmarshal"},
		"a version of spec": {"owner: a\nclasses: [{name: b, apiVersion: v1}]", "apiVersion"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := read(t, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

// stored is the wanted class as a server returns it, after a change by somebody.
func stored(w *Wanted, change func(o *resourceapi.DeviceClass)) *resourceapi.DeviceClass {
	o := w.desired(w.Classes[0], owner(), nil)
	o.Annotations, o.ResourceVersion = map[string]string{"theirs": "stays"}, "7"
	change(o)
	return o
}

func owner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "tessera-controller", UID: "1"}
}

// own makes a class belong to a ClusterRole of an earlier install.
func own(o *resourceapi.DeviceClass, role string) {
	old := owner()
	old.Name, old.UID = role, "0"
	o.OwnerReferences = []metav1.OwnerReference{old}
}

// disown leaves a class with the label alone, as a copy has it.
func disown(o *resourceapi.DeviceClass) { o.OwnerReferences = nil }

func TestJudge(t *testing.T) {
	w, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	dropped := func(o *resourceapi.DeviceClass) { o.Spec.ExtendedResourceName = nil }
	for name, c := range map[string]struct {
		change   func(o *resourceapi.DeviceClass)
		lacks    bool
		want     action
		unwanted action // if no such class is wanted
	}{
		"as it should be":         {change: func(*resourceapi.DeviceClass) {}, want: keep, unwanted: remove},
		"a selector was edited":   {change: func(o *resourceapi.DeviceClass) { o.Spec.Selectors = nil }, want: update, unwanted: remove},
		"the resource was edited": {change: func(o *resourceapi.DeviceClass) { o.Spec.ExtendedResourceName = new("a.com/b") }, lacks: true, want: update, unwanted: remove},
		"a label of ours was lost": {change: func(o *resourceapi.DeviceClass) {
			o.Labels = map[string]string{"app.kubernetes.io/managed-by": "tessera"}
		}, want: update, unwanted: remove},
		"our label was lost":                  {change: func(o *resourceapi.DeviceClass) { o.Labels = nil }, want: update, unwanted: remove},
		"of an earlier install":               {change: func(o *resourceapi.DeviceClass) { own(o, "tessera-controller") }, want: update, unwanted: remove},
		"being deleted":                       {change: func(o *resourceapi.DeviceClass) { o.DeletionTimestamp = &metav1.Time{} }, want: keep, unwanted: remove},
		"no resource name":                    {change: dropped, want: update, unwanted: remove},
		"no resource name, as on this server": {change: dropped, lacks: true, want: keep, unwanted: remove},
		"somebody else's, but the same":       {change: disown, want: keep, unwanted: keep},
		"somebody else's, without a resource": {change: func(o *resourceapi.DeviceClass) { disown(o); dropped(o) }, want: foreign, unwanted: keep},
		"the same, on a server without them":  {change: func(o *resourceapi.DeviceClass) { disown(o); dropped(o) }, lacks: true, want: keep, unwanted: keep},
		"the same, of another release":        {change: func(o *resourceapi.DeviceClass) { own(o, "another-controller") }, want: foreign, unwanted: keep},
		"owned by another kind of that name": {change: func(o *resourceapi.DeviceClass) {
			o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "tessera-controller", UID: "1"}}
		}, want: keep, unwanted: keep},
	} {
		t.Run(name, func(t *testing.T) {
			have := stored(w, c.change)
			want := w.desired(w.Classes[0], owner(), have)
			if got := w.decide(have, want, c.lacks); got != c.want {
				t.Errorf("action %d, want %d", got, c.want)
			}
			if got := w.decide(have, nil, c.lacks); got != c.unwanted {
				t.Errorf("not wanted: action %d, want %d", got, c.unwanted)
			}
		})
	}
	want := w.desired(w.Classes[0], owner(), nil)
	if got := w.decide(nil, want, false); got != create {
		t.Errorf("action on a missing class: %d, want %d", got, create)
	}
}

// An update must not take from others what they have written beside the spec.
// TestParametersInAnotherForm: parameters that say the same are the same.
func TestParametersInAnotherForm(t *testing.T) {
	w, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	for parameters, same := range map[string]bool{
		`{"kind": "GpuConfig", "count": 2}`: true, `{"count":2,"kind":"GpuConfig"}`: true, `{"count":3,"kind":"GpuConfig"}`: false, `{"kind":"GpuConfig"}`: false,
	} {
		have := stored(w, func(o *resourceapi.DeviceClass) { o.Spec.Config[0].Opaque.Parameters.Raw = []byte(parameters) })
		if got := sameSpec(have, w.desired(w.Classes[0], owner(), have), false); got != same {
			t.Errorf("%s is the same: %t", parameters, got)
		}
	}
}

func TestDesiredKeepsTheRest(t *testing.T) {
	w, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	have := stored(w, func(o *resourceapi.DeviceClass) {
		o.Labels = map[string]string{"app.kubernetes.io/managed-by": "tessera", "team": "ml"}
	})
	got := w.desired(w.Classes[0], owner(), have)
	if got.Labels["team"] != "ml" || got.Labels["app.kubernetes.io/instance"] != "tessera" ||
		got.Annotations["theirs"] != "stays" || got.ResourceVersion != "7" {
		t.Errorf("desired metadata %v", got.ObjectMeta)
	}
}
