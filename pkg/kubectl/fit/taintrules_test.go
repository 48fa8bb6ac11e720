package fit_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// taintRules are rules of all kinds of selectors, most of them for a device.
func taintRules(random *rand.Rand, all []resourceapi.ResourceSlice) (out []resourceapi.DeviceTaintRule) {
	for i := range random.IntN(5) {
		s := all[random.IntN(len(all))]
		selector := &resourceapi.DeviceTaintSelector{}
		if random.IntN(2) == 0 {
			selector.Driver = new([]string{s.Spec.Driver, "other.example.com"}[random.IntN(2)])
		}
		if random.IntN(2) == 0 {
			selector.Pool = &s.Spec.Pool.Name
		}
		if n := len(s.Spec.Devices); n > 0 && random.IntN(8) > 0 {
			selector.Device = &s.Spec.Devices[random.IntN(n)].Name
		}
		if random.IntN(8) == 0 {
			selector = nil
		}
		r := resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("rule-", i)}}
		r.Spec.DeviceSelector = selector
		r.Spec.Taint = resourceapi.DeviceTaint{Key: "example.com/board", Effect: resourceapi.DeviceTaintEffectNoSchedule}
		if random.IntN(4) == 0 {
			r.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNone
		}
		out = append(out, r)
	}
	return out
}

// patched are the slices that Kubernetes' own tracker hands the scheduler, by pool.
func patched(t *testing.T, o fit.Objects) map[string][]*resourceapi.ResourceSlice {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var all []runtime.Object
	for i := range o.Slices {
		all = append(all, &o.Slices[i])
	}
	for i := range o.TaintRules {
		all = append(all, &o.TaintRules[i])
	}
	factory := informers.NewSharedInformerFactory(fake.NewClientset(all...), 0)
	defer factory.Shutdown()
	defer stop()
	known := factory.Resource().V1()
	tr, err := tracker.StartTracker(ctx, tracker.Options{EnableDeviceTaintRules: true, SliceInformer: known.ResourceSlices(), TaintInformer: known.DeviceTaintRules()})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Stop()
	factory.Start(ctx.Done())
	select {
	case <-tr.HasSyncedChecker().Done():
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
	list, err := tr.ListPatchedResourceSlices()
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list, func(a, b *resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	out := make(map[string][]*resourceapi.ResourceSlice)
	for _, s := range list {
		out[s.Spec.Pool.Name] = append(out[s.Spec.Pool.Name], s)
	}
	return out
}
