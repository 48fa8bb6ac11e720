package publish

import (
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// ManagedByLabel and ManagedBy mark the slices that are ours.
const (
	ManagedByLabel = "app.kubernetes.io/managed-by"
	ManagedBy      = "tessera"
)

// ReleaseAnnotation has the identity of the release that wrote a slice: the namespace of the
// Lease by which its controllers elect their leader. The controllers of one namespace are
// never at work at the same time; those of two are, and would write the same slices.
const ReleaseAnnotation = "gpu.tessera.dev/published-by"

// FieldManager is the field manager of what the controller writes, which the API server derives
// from the user agent, and the reporter of its events, which the chart's admission policy knows.
// The Lease may have another name.
const FieldManager = "tessera-controller"

// maxName is how long an object's name may be.
const maxName = 253

// Counters is the form in which a server stores shared counters, by which
// devices that are cut from one GPU exclude each other.
type Counters int

const (
	// UnknownCounters: it couldn't be found out.
	UnknownCounters Counters = iota
	// NoCounters: it doesn't store them.
	NoCounters
	// JointCounters: in the slice of the devices that consume them, as
	// Kubernetes 1.33 and 1.34 want it.
	JointCounters
	// SplitCounters: in slices of their own, as later ones want it.
	SplitCounters
)

// String is how logs name it.
func (c Counters) String() string { return [...]string{"unknown", "none", "joint", "split"}[c] }

// Pool returns the slices of one node's offer: as few as the devices of its GPUs fit
// into, in the order of the GPUs' indexes, and as many for the counters as the
// server's form wants. A GPU's devices are in one slice. Few slices matter: an
// allocator takes the first device that fits in a slice, but only that of Kubernetes
// 1.36 and later, with its default feature gates, takes slices by name; to the others
// they come in any order, and partitions spread over as many GPUs as there are slices.
//
// Counters come first, so that a device is never stored before the counters that it
// consumes. The pool's generation is left 0; Write sets it. A GPU without devices is
// left out; an empty offer makes no slice.
//
// The offer must fit the form: no counters if it is NoCounters or UnknownCounters, and a GPU
// with taints has at most MaxTainted devices.
func Pool(node metav1.OwnerReference, gpus []offer.GPU, form Counters) []resourceapi.ResourceSlice {
	gpus = slices.DeleteFunc(slices.Clone(gpus), func(g offer.GPU) bool { return len(g.Devices) == 0 })
	var out []resourceapi.ResourceSlice
	if form == SplitCounters {
		n := 0
		for sets := range slices.Chunk(counterSets(gpus), resourceapi.ResourceSliceMaxCounterSets) {
			out = append(out, slice(node, fmt.Sprintf("-counters-%02d", n), nil, sets))
			n++
		}
	}
	for i, group := range groups(gpus, form) {
		var devices []resourceapi.Device
		for _, g := range group {
			devices = append(devices, g.Devices...)
		}
		var sets []resourceapi.CounterSet
		if form == JointCounters {
			sets = counterSets(group)
		}
		out = append(out, slice(node, fmt.Sprintf("-%03d", i), devices, sets))
	}
	for i := range out {
		out[i].Spec.Pool.ResourceSliceCount = int64(len(out))
	}
	return out
}

// maxJointCounters is how many counters a slice has room for in the joint form.
const maxJointCounters = 32

// groups assigns GPUs to slices: as few slices as possible, of similar size. Similar
// size matters on 1.34 with DRAConsumableCapacity: its allocator looks up the n-th
// device of a request as the n-th device of a slice, and crashes if the slice has
// fewer (kubernetes/kubernetes#133705). No request has more than 32.
func groups(gpus []offer.GPU, form Counters) [][]offer.GPU {
	most := resourceapi.ResourceSliceMaxDevices
	if slices.ContainsFunc(gpus, advanced) {
		most = form.MaxTainted()
	}
	fewest := fill(gpus, form, most)
	for n := 1; n < most; n++ {
		if even := fill(gpus, form, n); len(even) <= len(fewest) {
			return even
		}
	}
	return fewest
}

// MaxTainted is how many devices a slice with taints or counters has room for: servers of
// the joint form don't allow fewer for them.
func (c Counters) MaxTainted() int {
	if c == JointCounters {
		return resourceapi.ResourceSliceMaxDevices
	}
	return resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
}

// advanced reports whether slices with the GPU have room for fewer devices.
func advanced(g offer.GPU) bool {
	return g.Counters != nil || slices.ContainsFunc(g.Devices, func(d resourceapi.Device) bool { return len(d.Taints) > 0 })
}

// fill puts GPUs into groups, in order, of at most so many devices each; a GPU that
// has more is alone.
func fill(gpus []offer.GPU, form Counters, most int) [][]offer.GPU {
	var out [][]offer.GPU
	devices, counters := 0, 0
	for _, g := range gpus {
		d, c := len(g.Devices), 0
		if form == JointCounters && g.Counters != nil {
			c = len(g.Counters.Counters)
		}
		if out == nil || devices+d > most || counters+c > maxJointCounters {
			out, devices, counters = append(out, nil), 0, 0
		}
		last := len(out) - 1
		out[last], devices, counters = append(out[last], g), devices+d, counters+c
	}
	return out
}

func counterSets(gpus []offer.GPU) []resourceapi.CounterSet {
	var out []resourceapi.CounterSet
	for _, g := range gpus {
		if g.Counters != nil {
			out = append(out, *g.Counters)
		}
	}
	return out
}

func slice(node metav1.OwnerReference, tail string, devices []resourceapi.Device, counters []resourceapi.CounterSet) resourceapi.ResourceSlice {
	return resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:            sliceName(node.Name, tail),
			Labels:          map[string]string{ManagedByLabel: ManagedBy},
			OwnerReferences: []metav1.OwnerReference{node},
		},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:         gpu.DriverName,
			Pool:           resourceapi.ResourcePool{Name: node.Name},
			NodeName:       &node.Name,
			Devices:        devices,
			SharedCounters: counters,
		},
	}
}

// sliceName is "<node>-<n>" or "<node>-counters-<n>": readable, the same after every
// restart, and in the order of the GPUs' indexes. A node name that is too long is cut,
// and a hash of the whole name makes it unique.
func sliceName(node, tail string) string {
	if len(node)+len(tail) > maxName {
		hash := fmt.Sprintf("%x", sha256.Sum256([]byte(node)))[:16]
		node = strings.TrimRight(node[:maxName-len(tail)-len(hash)-1], "-.") + "-" + hash
	}
	return node + tail
}

// Complete reports whether a node's slices are a whole pool: as many of the
// newest generation as they say there are. A pool from which somebody deleted
// a slice isn't complete, nor is one that isn't there.
func Complete(current []*resourceapi.ResourceSlice) bool {
	newest := generation(current)
	var have, want int64
	for _, s := range current {
		if s.Spec.Pool.Generation == newest {
			have++
			want = s.Spec.Pool.ResourceSliceCount
		}
	}
	return have > 0 && have == want
}

// Equal reports whether the current slices equal the wanted ones, apart from the generation.
func Equal(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) bool {
	if len(current) != len(want) {
		return false
	}
	have := byName(current)
	newest := generation(current)
	for i := range want {
		s, ok := have[want[i].Name]
		if !ok || s.Spec.Pool.Generation != newest || !same(s, &want[i]) {
			return false
		}
	}
	return true
}

// OfRelease reports whether a release has written all of the slices.
func OfRelease(all []*resourceapi.ResourceSlice, release string) bool {
	return !slices.ContainsFunc(all, func(s *resourceapi.ResourceSlice) bool { return s.Annotations[ReleaseAnnotation] != release })
}

// same compares what Pool decides. A server's own additions to the object's
// metadata don't count.
func same(have, want *resourceapi.ResourceSlice) bool {
	if have.Labels[ManagedByLabel] != want.Labels[ManagedByLabel] ||
		!equality.Semantic.DeepEqual(have.OwnerReferences, want.OwnerReferences) {
		return false
	}
	if trimmed, ok := have.Annotations[digestKey]; ok {
		return trimmed == digest(want.Spec)
	}
	spec := have.Spec
	spec.Pool.Generation = want.Spec.Pool.Generation
	return digest(spec) == digest(want.Spec) || equality.Semantic.DeepEqual(spec, want.Spec)
}

// Annotations of a trimmed slice, with keys that no server stores.
const (
	digestKey  = "digest of what was trimmed"
	devicesKey = "hashes of the devices' names"
	shownKey   = "abilities of the server that it shows"
)

// trim replaces the large parts of a slice, and its annotations but for ReleaseAnnotation, by a
// digest of its spec, hashes of its devices' names and the abilities that it shows, because
// the cache has every slice of the cluster.
func trim(s *resourceapi.ResourceSlice) {
	if _, done := s.Annotations[digestKey]; done {
		return
	}
	shown, release, hashes := textOfShown(s), s.Annotations[ReleaseAnnotation], make([]byte, 0, len(s.Spec.Devices)*hashSize)
	for _, d := range s.Spec.Devices {
		hashes = append(hashes, nameHash(d.Name)...)
	}
	s.Annotations = map[string]string{digestKey: digest(s.Spec), devicesKey: string(hashes)}
	for key, value := range map[string]string{shownKey: shown, ReleaseAnnotation: release} {
		if value != "" {
			s.Annotations[key] = value
		}
	}
	s.ManagedFields, s.Spec.SharedCounters, s.Spec.Devices = nil, nil, nil
}

// hashSize is the length of a nameHash. It makes a collision between the thousands of names
// in a cluster very unlikely.
const hashSize = 8

// nameHash stands for a device's name, at a third of its length.
func nameHash(name string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	return string(h.Sum(nil))
}

// offers reports whether a trimmed slice has a device.
func offers(trimmed *resourceapi.ResourceSlice, name string) bool {
	hash, all := nameHash(name), trimmed.Annotations[devicesKey]
	for ; len(all) >= hashSize; all = all[hashSize:] {
		if all[:hashSize] == hash {
			return true
		}
	}
	return false
}

// digest of a spec, its generation apart. Specs that differ in nothing but empty
// lists being there or not may have different ones.
func digest(spec resourceapi.ResourceSliceSpec) string {
	spec.Pool.Generation = 0
	data, err := spec.Marshal()
	if err != nil {
		return err.Error() // never: it is marshalled to be sent as well
	}
	sum := sha256.Sum256(data)
	return string(sum[:])
}

// Fingerprint identifies what a node's slices say, with their owners, generation apart:
// those that Pool returns and those that Write made of them have the same. It is empty
// for slices of different generations, and for none.
func Fingerprint(all []*resourceapi.ResourceSlice) string {
	var lines []string
	for _, s := range all {
		if s.Spec.Pool.Generation != all[0].Spec.Pool.Generation {
			return ""
		}
		sum, trimmed := s.Annotations[digestKey]
		if !trimmed {
			sum = digest(s.Spec)
		}
		lines = append(lines, s.Name+" "+sum+" "+(&metav1.ObjectMeta{OwnerReferences: s.OwnerReferences}).String())
	}
	if lines == nil {
		return ""
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return string(sum[:])
}

// Pointers returns a pool in the form in which slices of the server are read.
func Pointers(pool []resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	all := make([]*resourceapi.ResourceSlice, len(pool))
	for i := range pool {
		all[i] = &pool[i]
	}
	return all
}

func generation(current []*resourceapi.ResourceSlice) int64 {
	var newest int64
	for _, s := range current {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	return newest
}

func byName(current []*resourceapi.ResourceSlice) map[string]*resourceapi.ResourceSlice {
	return maps.Collect(func(yield func(string, *resourceapi.ResourceSlice) bool) {
		for _, s := range current {
			if !yield(s.Name, s) {
				return
			}
		}
	})
}

// Superseded returns how many of the current slices Write deletes for the wanted ones.
func Superseded(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) int {
	return len(superseded(current, want))
}

// superseded returns the current slices whose names aren't in want.
func superseded(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	return slices.DeleteFunc(slices.Clone(current), func(s *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(want, func(w resourceapi.ResourceSlice) bool { return w.Name == s.Name })
	})
}
