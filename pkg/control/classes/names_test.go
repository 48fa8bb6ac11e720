package classes

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/klog/v2"
)

// cluster has classes, and a scheduler's cache of their extended resource names.
type cluster struct {
	classes   map[string]*resourceapi.DeviceClass
	scheduler *extendedresourcecache.ExtendedResourceCache
	creations int64
}

// reconcile brings the classes in line, as Reconciler does after each event, and returns
// the number of changes.
func (c *cluster) reconcile(w *Wanted) (n int) {
	for _, change := range w.changes(owner(), c.classes) {
		switch w.decide(change.have, change.want, false) {
		case create:
			c.creations++
			change.want.CreationTimestamp = metav1.Unix(c.creations, 0)
			c.scheduler.OnAdd(change.want, false)
			c.classes[change.want.Name] = change.want
		case update:
			c.scheduler.OnUpdate(change.have, change.want)
			c.classes[change.want.Name] = change.want
		case remove:
			c.scheduler.OnDelete(change.have)
			delete(c.classes, change.have.Name)
		default:
			continue
		}
		n++
	}
	return n
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
			c := &cluster{classes: map[string]*resourceapi.DeviceClass{}, scheduler: extendedresourcecache.NewExtendedResourceCache(klog.Background())}
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
