package classes

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/klog/v2"
)

// cluster has classes, and a scheduler's cache of their extended resource names.
type cluster struct {
	t         *testing.T
	classes   map[string]*unstructured.Unstructured
	scheduler *extendedresourcecache.ExtendedResourceCache
	creations int64
}

// reconcile brings the classes in line, as Reconciler does after each event, and returns
// the number of changes.
func (c *cluster) reconcile(w *Wanted) (n int) {
	c.t.Helper()
	changes, err := w.changes(owner(), c.classes)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, change := range changes {
		switch w.decide(change.have, change.want, false) {
		case create:
			c.creations++
			change.want.SetCreationTimestamp(metav1.Unix(c.creations, 0))
			c.scheduler.OnAdd(c.typed(change.want), false)
			c.classes[change.want.GetName()] = change.want
		case update:
			c.scheduler.OnUpdate(c.typed(change.have), c.typed(change.want))
			c.classes[change.want.GetName()] = change.want
		case remove:
			c.scheduler.OnDelete(c.typed(change.have))
			delete(c.classes, change.have.GetName())
		default:
			continue
		}
		n++
	}
	return n
}

func (c *cluster) typed(o *unstructured.Unstructured) *resourceapi.DeviceClass {
	c.t.Helper()
	class := &resourceapi.DeviceClass{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, class); err != nil {
		c.t.Fatal(err)
	}
	return class
}

// TestNamesMove checks that a scheduler knows each class by its extended resource name
// after the name has moved from one class to another.
func TestNamesMove(t *testing.T) {
	type names map[string]string // resource by class
	for name, steps := range map[string][]names{
		"to a newer class and back": {{"gpu": "x"}, {"gpu": "", "mig": "x"}, {"gpu": "x"}},
		"to an older class":         {{"gpu": "", "mig": "x"}, {"gpu": "x", "mig": ""}},
		"two are swapped":           {{"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": "x", "b": "y"}},
		"another one":               {{"gpu": "x"}, {"gpu": "y"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{t: t, classes: map[string]*unstructured.Unstructured{}, scheduler: extendedresourcecache.NewExtendedResourceCache(klog.Background())}
			for i, step := range steps {
				w := &Wanted{Owner: "tessera-controller"}
				for class, resource := range step {
					spec := resourceapi.DeviceClassSpec{}
					if resource != "" {
						spec.ExtendedResourceName = new("example.com/" + resource)
					}
					w.Classes = append(w.Classes, Class{Name: class, Spec: spec})
				}
				for rounds := 0; c.reconcile(w) > 0; rounds++ {
					if rounds == 3 {
						t.Fatalf("step %d has no end", i)
					}
				}
				for class, resource := range step {
					got := c.scheduler.GetDeviceClass(corev1.ResourceName("example.com/" + resource))
					if resource != "" && (got == nil || got.Name != class) {
						t.Errorf("step %d: the scheduler takes %s for %v, not for %s", i, resource, got, class)
					}
				}
			}
		})
	}
}
