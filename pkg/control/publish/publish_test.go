package publish

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// A write that reports success although the server stored something else would
// be written again at once, and again.
func TestWriteTellsWhatTheServerChanged(t *testing.T) {
	for name, change := range map[string]func(*resourceapi.ResourceSlice){
		"nothing": nil,
		"spec":    func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Attributes = nil },
		"owner":   func(s *resourceapi.ResourceSlice) { s.OwnerReferences = nil },
		"label":   func(s *resourceapi.ResourceSlice) { delete(s.Labels, ManagedByLabel) },
		"release": func(s *resourceapi.ResourceSlice) { s.Annotations = nil },
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
			p, err := New(draclient.New(server), server.Discovery())
			if err != nil {
				t.Fatal(err)
			}
			p.Release = "tessera"
			err = p.Write(t.Context(), nil, Pool(owner("n"), gpus(2), NoCounters))
			if dropped := (*DroppedFieldsError)(nil); errors.As(err, &dropped) != (change != nil) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestPoolWithoutReleaseIsWhole writes to a server that drops annotations, which no scheduler
// reads.
func TestPoolWithoutReleaseIsWhole(t *testing.T) {
	server := fake.NewClientset()
	drop := func(action clienttesting.Action) (bool, runtime.Object, error) {
		if a, ok := action.(clienttesting.CreateAction); ok { // an update, too
			if s, ok := a.GetObject().(*resourceapi.ResourceSlice); ok {
				s.Annotations = nil
			}
		}
		return false, nil, nil
	}
	server.PrependReactor("create", "resourceslices", drop)
	server.PrependReactor("update", "resourceslices", drop)
	p, err := New(draclient.New(server), server.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	p.Release = "tessera"
	for _, n := range []int{33, 1} {
		want := Pool(owner("n"), cuttable(n), SplitCounters)
		found, err := p.Live(t.Context(), "n")
		if err != nil {
			t.Fatal(err)
		}
		err = p.Write(t.Context(), found.Ours, want)
		if dropped := (*DroppedFieldsError)(nil); !errors.As(err, &dropped) {
			t.Errorf("got %v", err)
		}
		if found, err = p.Live(t.Context(), "n"); err != nil || !Complete(found.Ours) || !Equal(found.Ours, want) {
			t.Errorf("%d slices, want %d; error %v", len(found.Ours), len(want), err)
		}
	}
}

// TestWriteOfAnotherRelease checks that a release that writes the slices of another one keeps
// the pool complete and of its generation, so that schedulers notice nothing.
func TestWriteOfAnotherRelease(t *testing.T) {
	server := fake.NewClientset()
	want := Pool(owner("n"), cuttable(33), SplitCounters)
	for i, release := range []string{"", "first", "second", "second"} {
		p, err := New(draclient.New(server), server.Discovery())
		if err != nil {
			t.Fatal(err)
		}
		p.Release = release
		found, err := p.Live(t.Context(), "n")
		if err != nil || len(found.Ours) > 0 && OfRelease(found.Ours, release) != (i == 3) {
			t.Errorf("%s: slices of %v, error %v", release, found.Ours[0].Annotations, err)
		}
		if err := p.Write(t.Context(), found.Ours, want); err != nil {
			t.Fatal(err)
		}
		found, err = p.Live(t.Context(), "n")
		if err != nil || !Equal(found.Ours, want) || generation(found.Ours) != 1 || !OfRelease(found.Ours, release) {
			t.Errorf("%s: generation %d, slices of %v, error %v", release, generation(found.Ours), found.Ours[0].Annotations, err)
		}
		for _, s := range found.Ours {
			trim(s)
		}
		if !OfRelease(found.Ours, release) {
			t.Errorf("%s: the cache has slices of %v", release, found.Ours[0].Annotations)
		}
	}
}

// TestOffers checks that the cache, which has no devices, knows the names of those that
// are published, and takes no part of a name for one.
func TestOffers(t *testing.T) {
	pool := Pool(owner("n"), gpus(3), SplitCounters)
	p, err := New(draclient.New(fake.NewClientset()), nil)
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

// TestWriteOverUnseenSlices writes pools where the server has one that the caller doesn't
// know of, as after a change of the leader. No device is added to those that are offered.
func TestWriteOverUnseenSlices(t *testing.T) {
	pools := map[string][]resourceapi.ResourceSlice{
		"one slice":       Pool(owner("n"), gpus(2), NoCounters),
		"two slices":      Pool(owner("n"), tainted(gpus(70)), NoCounters),
		"split counters":  Pool(owner("n"), cuttable(33), SplitCounters),
		"joint counters":  Pool(owner("n"), cuttable(33), JointCounters),
		"counters of one": Pool(owner("n"), cuttable(1), SplitCounters),
	}
	for have, before := range pools {
		for name, want := range pools {
			t.Run(name+" over "+have, func(t *testing.T) {
				server := fake.NewClientset()
				p, err := New(draclient.New(server), server.Discovery())
				if err != nil {
					t.Fatal(err)
				}
				if err := p.Write(t.Context(), nil, before); err != nil {
					t.Fatal(err)
				}
				if err := p.Write(t.Context(), nil, want); !apierrors.IsAlreadyExists(err) {
					t.Errorf("got %v, want a conflict", err)
				}
				found, err := p.client.List(t.Context(), metav1.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(deviceSlices(before), deviceSlices(found.Items)); diff != "" {
					t.Errorf("offered (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// deviceSlices returns the names of the slices with devices, and how many each has.
func deviceSlices(all []resourceapi.ResourceSlice) map[string]int {
	out := make(map[string]int)
	for _, s := range all {
		if len(s.Spec.Devices) > 0 {
			out[s.Name] = len(s.Spec.Devices)
		}
	}
	return out
}
