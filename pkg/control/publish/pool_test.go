package publish

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

func gpus(n int) []offer.GPU {
	var out []offer.GPU
	for i := range n {
		name := gpu.DeviceName("gpu-" + strings.Repeat(string(rune('f'-i%6)), 8))
		out = append(out, offer.GPU{Name: name, Index: i, Devices: []resourceapi.Device{{
			Name:       string(name),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"index": {IntValue: new(int64(i))}},
		}}})
	}
	return out
}

func owner(node string) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node, UID: "1", Controller: new(true)}
}

// stored is a pool as a server has it.
func stored(want []resourceapi.ResourceSlice, generation int64) []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	for i := range want {
		s := want[i].DeepCopy()
		s.Spec.Pool.Generation = generation
		s.ResourceVersion, s.UID = "7", "u"
		s.Labels["added"] = "by somebody"
		out = append(out, s)
	}
	return out
}

func TestSliceNamesAreInTheOrderOfIndexes(t *testing.T) {
	long := strings.Repeat("very-long.", 25) + "1"
	for _, node := range []string{"n", "node-1.example.com", long} {
		pool := Pool(owner(node), cuttable(128), SplitCounters)
		pool = slices.DeleteFunc(pool, func(s resourceapi.ResourceSlice) bool { return len(s.Spec.Devices) == 0 })
		var indexes []int64
		for _, s := range pool {
			for _, d := range s.Spec.Devices {
				if i := d.Attributes["index"].IntValue; i != nil {
					indexes = append(indexes, *i)
				}
			}
		}
		if len(indexes) != 128 || !slices.IsSorted(indexes) {
			t.Errorf("node %s: the GPUs are not in order: %v", node, indexes)
		}
		if !slices.IsSortedFunc(pool, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) }) {
			t.Errorf("node %s: the names are not in order", node)
		}
		for _, s := range pool {
			if errs := validation.IsDNS1123Subdomain(s.Name); len(errs) > 0 {
				t.Errorf("%s: %v", s.Name, errs)
			}
		}
	}
}

// tainted puts a taint on the first GPU.
func tainted(gpus []offer.GPU) []offer.GPU {
	gpus[0].Devices[0].Taints = []resourceapi.DeviceTaint{{Key: gpu.TaintKey, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	return gpus
}

// cuttable are GPUs of two devices that consume counters.
func cuttable(n int) []offer.GPU {
	out := gpus(n)
	one := map[string]resourceapi.Counter{"slice": {Value: resource.MustParse("1")}}
	for i := range out {
		out[i].Counters = &resourceapi.CounterSet{Name: string(out[i].Name), Counters: one}
		part := resourceapi.Device{Name: string(out[i].Name) + "-mig-1g10gb-0"}
		for _, d := range []*resourceapi.Device{&out[i].Devices[0], &part} {
			d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: string(out[i].Name), Counters: one}}
		}
		out[i].Devices = append(out[i].Devices, part)
	}
	return out
}

func TestPoolLaysCountersOutAsTheServerWants(t *testing.T) {
	// mixed are 17 GPUs that can be cut, one that can't, and one that has nothing
	// to offer.
	mixed := append(append(cuttable(17), gpus(18)[17:]...), offer.GPU{Name: "gpu-empty", Index: 18})
	for name, tc := range map[string]struct {
		gpus []offer.GPU
		form Counters
		want []string // "<counter sets>+<devices>" of each slice
	}{
		"split":          {mixed, SplitCounters, []string{"8+0", "8+0", "1+0", "0+35"}},
		"split, 33 GPUs": {cuttable(33), SplitCounters, []string{"8+0", "8+0", "8+0", "8+0", "1+0", "0+34", "0+32"}},
		"split, uncut":   {gpus(128), SplitCounters, []string{"0+128"}},
		"joint":          {mixed, JointCounters, []string{"17+35"}},
		"joint, 33 GPUs": {cuttable(33), JointCounters, []string{"17+34", "16+32"}},
		"none":           {gpus(3), NoCounters, []string{"0+3"}},
		"none, tainted":  {tainted(gpus(70)), NoCounters, []string{"0+35", "0+35"}},
		"joint, tainted": {tainted(gpus(70)), JointCounters, []string{"0+70"}},
		"nothing at all": {mixed[18:], SplitCounters, nil},
	} {
		t.Run(name, func(t *testing.T) {
			pool := Pool(owner("n"), tc.gpus, tc.form)
			var got []string
			names := make(map[string]bool)
			for _, s := range pool {
				got = append(got, fmt.Sprintf("%d+%d", len(s.Spec.SharedCounters), len(s.Spec.Devices)))
				names[s.Name] = true
				if s.Spec.Pool.ResourceSliceCount != int64(len(pool)) {
					t.Errorf("%s speaks of %d slices, there are %d", s.Name, s.Spec.Pool.ResourceSliceCount, len(pool))
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(names) != len(pool) {
				t.Errorf("%d names for %d slices", len(names), len(pool))
			}
			if !Equal(stored(pool, 3), pool) || len(pool) > 0 && !Complete(stored(pool, 3)) {
				t.Error("as stored, the pool isn't what is wanted")
			}
			if len(pool) > 0 && Complete(stored(pool, 3)[1:]) {
				t.Error("without its first slice the pool is complete")
			}
		})
	}
}

func TestLongNodeNamesDoNotCollide(t *testing.T) {
	common := strings.Repeat("x", 250)
	a, b := Pool(owner(common+"-a"), gpus(1), NoCounters), Pool(owner(common+"-b"), gpus(1), NoCounters)
	if a[0].Name == b[0].Name {
		t.Errorf("two nodes have a slice %s", a[0].Name)
	}
}

// fullSlices is a pool of so many slices.
func fullSlices(n int) []resourceapi.ResourceSlice {
	return Pool(owner("n"), gpus(n*resourceapi.ResourceSliceMaxDevices), NoCounters)
}

func TestComplete(t *testing.T) {
	pool := stored(fullSlices(3), 2)
	for name, tc := range map[string]struct {
		current []*resourceapi.ResourceSlice
		want    bool
	}{
		"whole":                         {pool, true},
		"one was deleted":               {pool[1:], false},
		"all were deleted":              {nil, false},
		"leftovers of before":           {append(stored(fullSlices(6), 1)[3:], pool...), true},
		"an update that was cut short":  {append(stored(fullSlices(2), 3)[:1], pool[1:]...), false},
		"a deletion and then an update": {stored(fullSlices(3), 3)[:2], false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Complete(tc.current); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestEqual(t *testing.T) {
	want := fullSlices(3)
	changed := func(change func(*resourceapi.ResourceSlice)) []*resourceapi.ResourceSlice {
		pool := stored(want, 4)
		change(pool[1])
		return pool
	}
	for name, tc := range map[string]struct {
		current []*resourceapi.ResourceSlice
		want    bool
	}{
		"in any order":      {[]*resourceapi.ResourceSlice{stored(want, 4)[2], stored(want, 4)[0], stored(want, 4)[1]}, true},
		"none":              {nil, false},
		"one less":          {stored(want, 4)[1:], false},
		"one more":          {stored(fullSlices(4), 4), false},
		"mixed generations": {changed(func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation = 3 }), false},
		"another attribute": {changed(func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].Attributes["index"] = resourceapi.DeviceAttribute{}
		}), false},
		"another owner": {changed(func(s *resourceapi.ResourceSlice) { s.OwnerReferences = nil }), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Equal(tc.current, want); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
			for _, s := range tc.current {
				trim(s)
			}
			if got := Equal(tc.current, want); got != tc.want {
				t.Errorf("from the cache: got %v, want %v", got, tc.want)
			}
			if got := Fingerprint(tc.current) == Fingerprint(stored(want, 7)); got != tc.want {
				t.Errorf("fingerprints are equal: %v, want %v", got, tc.want)
			}
		})
	}
	if !Equal(nil, nil) {
		t.Error("nothing is not equal to nothing")
	}
}

// The cache holds every slice of a cluster: of devices, only the names.
func TestTrim(t *testing.T) {
	s := stored(Pool(owner("n"), gpus(1), SplitCounters), 1)[0]
	trim(s)
	if trim(s); !Equal([]*resourceapi.ResourceSlice{s}, Pool(owner("n"), gpus(1), SplitCounters)) {
		t.Error("trimmed twice, it is another one") // informers ask transformations to bear that
	}
	if len(s.Spec.Devices)+len(s.Spec.SharedCounters) > 0 {
		t.Errorf("devices %v and counters %v are left", s.Spec.Devices, s.Spec.SharedCounters)
	}
}
