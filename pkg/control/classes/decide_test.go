package classes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
func stored(t *testing.T, w *Wanted, change func(o *unstructured.Unstructured)) *unstructured.Unstructured {
	t.Helper()
	o, err := w.desired(w.Classes[0], owner(), nil)
	if err != nil {
		t.Fatal(err)
	}
	o.SetAPIVersion("resource.k8s.io/v1")
	o.SetKind(kind)
	data, err := o.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	o = &unstructured.Unstructured{}
	if err := o.UnmarshalJSON(data); err != nil {
		t.Fatal(err)
	}
	o.SetAnnotations(map[string]string{"theirs": "stays"})
	o.SetResourceVersion("7")
	change(o)
	return o
}

func owner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "tessera-controller", UID: "1"}
}

// own makes a class belong to a ClusterRole of an earlier install.
func own(o *unstructured.Unstructured, role string) {
	old := owner()
	old.Name, old.UID = role, "0"
	o.SetOwnerReferences([]metav1.OwnerReference{old})
}

// disown leaves a class with the label alone, as a copy has it.
func disown(o *unstructured.Unstructured) { o.SetOwnerReferences(nil) }

func setSpec(t *testing.T, o *unstructured.Unstructured, value any, path ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(o.Object, value, append([]string{"spec"}, path...)...); err != nil {
		t.Fatal(err)
	}
}

func TestJudge(t *testing.T) {
	w, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	dropped := func(o *unstructured.Unstructured) {
		unstructured.RemoveNestedField(o.Object, "spec", extendedResourceName)
	}
	for name, c := range map[string]struct {
		change   func(o *unstructured.Unstructured)
		lacks    bool
		want     action
		unwanted action // if no such class is wanted
	}{
		"as it should be":         {change: func(*unstructured.Unstructured) {}, want: keep, unwanted: remove},
		"a selector was edited":   {change: func(o *unstructured.Unstructured) { setSpec(t, o, []any{}, "selectors") }, want: update, unwanted: remove},
		"the resource was edited": {change: func(o *unstructured.Unstructured) { setSpec(t, o, "a.com/b", extendedResourceName) }, lacks: true, want: update, unwanted: remove},
		"a label of ours was lost": {change: func(o *unstructured.Unstructured) {
			o.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "tessera"})
		}, want: update, unwanted: remove},
		"our label was lost":                  {change: func(o *unstructured.Unstructured) { o.SetLabels(nil) }, want: update, unwanted: remove},
		"of an earlier install":               {change: func(o *unstructured.Unstructured) { own(o, "tessera-controller") }, want: update, unwanted: remove},
		"being deleted":                       {change: func(o *unstructured.Unstructured) { o.SetDeletionTimestamp(&metav1.Time{}) }, want: keep, unwanted: remove},
		"no resource name":                    {change: dropped, want: update, unwanted: remove},
		"no resource name, as on this server": {change: dropped, lacks: true, want: keep, unwanted: remove},
		"somebody else's, but the same":       {change: disown, want: keep, unwanted: keep},
		"somebody else's, without a resource": {change: func(o *unstructured.Unstructured) { disown(o); dropped(o) }, want: foreign, unwanted: keep},
		"the same, on a server without them":  {change: func(o *unstructured.Unstructured) { disown(o); dropped(o) }, lacks: true, want: keep, unwanted: keep},
		"the same, of another release":        {change: func(o *unstructured.Unstructured) { own(o, "another-controller") }, want: foreign, unwanted: keep},
		"owned by another kind of that name": {change: func(o *unstructured.Unstructured) {
			o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "tessera-controller", UID: "1"}})
		}, want: keep, unwanted: keep},
	} {
		t.Run(name, func(t *testing.T) {
			have := stored(t, w, c.change)
			want, err := w.desired(w.Classes[0], owner(), have)
			if err != nil {
				t.Fatal(err)
			}
			if got := w.decide(have, want, c.lacks); got != c.want {
				t.Errorf("action %d, want %d", got, c.want)
			}
			if got := w.decide(have, nil, c.lacks); got != c.unwanted {
				t.Errorf("not wanted: action %d, want %d", got, c.unwanted)
			}
		})
	}
	want, err := w.desired(w.Classes[0], owner(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.decide(nil, want, false); got != create {
		t.Errorf("action on a missing class: %d, want %d", got, create)
	}
}

// An update must not take from others what they have written beside the spec.
func TestDesiredKeepsTheRest(t *testing.T) {
	w, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	have := stored(t, w, func(o *unstructured.Unstructured) {
		o.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "tessera", "team": "ml"})
	})
	got, err := w.desired(w.Classes[0], owner(), have)
	if err != nil {
		t.Fatal(err)
	}
	if got.GetLabels()["team"] != "ml" || got.GetLabels()["app.kubernetes.io/instance"] != "tessera" ||
		got.GetAnnotations()["theirs"] != "stays" || got.GetResourceVersion() != "7" {
		t.Errorf("desired metadata %v", got.Object["metadata"])
	}
}
