package labels

import (
	"context"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// TestRemoveNodeLabels checks that the command and a controller without the option remove the
// labels that a controller with it wrote, and no other.
func TestRemoveNodeLabels(t *testing.T) {
	nodes := []string{"a", "b", "c"}
	for name, remove := range map[string]func(*testing.T, client.Client){
		"the command": func(t *testing.T, api client.Client) {
			if err := RemoveAll(t.Context(), api); err != nil {
				t.Fatal(err)
			}
		},
		"a controller without the option": func(t *testing.T, api client.Client) {
			l := NewRemover(trimmedReads{api}, undone.New(clock.RealClock{}))
			for _, node := range nodes {
				if _, err := l.Reconcile(t.Context(), request(node)); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			api := controltest.NewAPI(t, slices.Concat(controltest.NodeWith("a", "", controltest.L4(0)), controltest.NodeWith("b", "", controltest.L4(0)), controltest.NodeWith("c", ""))...)
			l := NewLabeler(api, api, clock.RealClock{}, undone.New(clock.RealClock{}))
			label(t, api, "b", "product", "mine")
			label(t, api, "c", "present", "true")
			for _, node := range []string{"a", "b"} {
				if _, err := l.Reconcile(t.Context(), request(node)); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				remove(t, api)
			}
			for node, want := range map[string]map[string]string{"a": {}, "b": {"product": "mine"}, "c": {"present": "true"}} {
				if diff := cmp.Diff(want, labelsOf(t, api, node)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", node, diff)
				}
			}
		})
	}
}

// trimmedReads is a client that reads Nodes as the manager's cache holds them.
type trimmedReads struct{ client.Client }

func (c trimmedReads) Get(ctx context.Context, key client.ObjectKey, obj client.Object, o ...client.GetOption) error {
	if err := c.Client.Get(ctx, key, obj, o...); err != nil {
		return err
	}
	trimmed, err := new(kinds.Trimmer).Trim(obj)
	if err == nil {
		*obj.(*metav1.PartialObjectMetadata) = *trimmed.(*metav1.PartialObjectMetadata)
	}
	return err
}
