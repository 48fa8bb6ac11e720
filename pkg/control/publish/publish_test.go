package publish

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// fakeClient is a server in memory.
type fakeClient struct {
	resourceclient.ResourceSlicesGetter
}

func (fakeClient) IsWatchListSemanticsUnSupported() bool { return true }
func (fakeClient) CurrentAPI() string                    { return "V1" }

// A write that reports success although the server stored something else would
// be written again at once, and again.
func TestWriteTellsWhatTheServerChanged(t *testing.T) {
	for name, change := range map[string]func(*resourceapi.ResourceSlice){
		"nothing": nil,
		"spec":    func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Attributes = nil },
		"owner":   func(s *resourceapi.ResourceSlice) { s.OwnerReferences = nil },
		"label":   func(s *resourceapi.ResourceSlice) { delete(s.Labels, ManagedByLabel) },
	} {
		t.Run(name, func(t *testing.T) {
			server := fake.NewClientset()
			server.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
				s, ok := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
				if !ok || change == nil {
					return false, nil, nil
				}
				s = s.DeepCopy()
				change(s)
				return true, s, nil
			})
			p, err := New(fakeClient{server.ResourceV1()}, server.Discovery())
			if err != nil {
				t.Fatal(err)
			}
			err = p.Write(t.Context(), nil, Pool(owner("n"), gpus(2), NoCounters))
			if dropped := (*DroppedFieldsError)(nil); errors.As(err, &dropped) != (change != nil) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestOffers checks that the cache, which has no devices, knows the names of those that
// are published, and takes no part of a name for one.
func TestOffers(t *testing.T) {
	pool := Pool(owner("n"), gpus(3), SplitCounters)
	p, err := New(fakeClient{fake.NewClientset().ResourceV1()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range pool {
		trim(&pool[i])
		if err := p.Informer().GetIndexer().Add(&pool[i]); err != nil {
			t.Fatal(err)
		}
	}
	const first, third, fourth = "gpu-ffffffff", "gpu-dddddddd", "gpu-cccccccc"
	for _, tc := range []struct {
		node   string
		device gpu.DeviceName
		want   bool
	}{
		{"n", first, true}, {"n", third, true}, {"n", fourth, false},
		{"other", first, false}, {"n", "gpu-ffff", false}, {"n", "", false},
	} {
		if got := p.Offers(tc.node, tc.device); got != tc.want {
			t.Errorf("node %s, device %q: got %v", tc.node, tc.device, got)
		}
	}
}
