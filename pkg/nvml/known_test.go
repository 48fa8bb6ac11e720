package nvml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Each case has the GPUs that are listed, as "UUID@index condition", after NVML
// has listed first a, b and c and then the GPUs of the case.
func TestGPUsThatDoNotAnswerStayListed(t *testing.T) {
	at := func(index int, uuid gpu.UUID) gpu.GPU { return gpu.GPU{UUID: uuid, Index: index} }
	lost := fmt.Errorf("read: %w", ErrLost)
	for name, tc := range map[string]struct {
		read   []gpu.GPU
		failed map[int]error
		want   []string
		// unidentified are the indexes of GPUs that aren't in want.
		unidentified []int
	}{
		"all there":     {read: []gpu.GPU{at(0, "a"), at(1, "b"), at(2, "c")}, want: []string{"a@0", "b@1", "c@2"}},
		"lost":          {read: []gpu.GPU{at(0, "a"), at(2, "c")}, failed: map[int]error{1: lost}, want: []string{"a@0", "b@1 Lost", "c@2"}},
		"unreadable":    {read: []gpu.GPU{at(0, "a"), at(1, "b")}, failed: map[int]error{2: errors.New("x")}, want: []string{"a@0", "b@1", "c@2 Unreadable"}},
		"last vanished": {read: []gpu.GPU{at(0, "a"), at(1, "b")}, want: []string{"a@0", "b@1", "c@2 Lost"}},
		"first vanished, others moved up": {
			read: []gpu.GPU{at(0, "b"), at(1, "c")}, want: []string{"a@0 Lost", "b@0", "c@1"},
		},
		"first vanished, and what moved up is lost": {
			read: []gpu.GPU{at(0, "b")}, failed: map[int]error{1: lost}, want: []string{"a@0 Lost", "b@0", "c@2 Lost"},
		},
		"exchanged":          {read: []gpu.GPU{at(0, "c"), at(1, "b"), at(2, "a")}, want: []string{"c@0", "b@1", "a@2"}},
		"moved over a lost":  {read: []gpu.GPU{at(0, "a"), at(1, "c")}, failed: map[int]error{2: lost}, want: []string{"a@0", "b@1 Lost", "c@1"}},
		"a new one is lost":  {read: []gpu.GPU{at(0, "a"), at(1, "b"), at(2, "c")}, failed: map[int]error{3: lost}, want: []string{"a@0", "b@1", "c@2"}, unidentified: []int{3}},
		"all have vanished":  {want: []string{"a@0 Lost", "b@1 Lost", "c@2 Lost"}},
		"one joined at zero": {read: []gpu.GPU{at(0, "d"), at(1, "a"), at(2, "b"), at(3, "c")}, want: []string{"d@0", "a@1", "b@2", "c@3"}},
	} {
		t.Run(name, func(t *testing.T) {
			k := known{}
			k.list(nil, []gpu.GPU{at(0, "a"), at(1, "b"), at(2, "c")}, nil)
			var got []string
			gpus, unidentified := k.list(k, tc.read, tc.failed)
			if diff := cmp.Diff(tc.unidentified, slices.Sorted(maps.Keys(unidentified))); diff != "" {
				t.Errorf("unidentified indexes (-want +got):\n%s", diff)
			}
			for _, g := range gpus {
				s := fmt.Sprintf("%s@%d", g.UUID, g.Index)
				for _, c := range g.Conditions {
					s += " " + string(c.Type)
				}
				got = append(got, s)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("listed (-want +got):\n%s", diff)
			}
		})
	}
}

// A MIG switch changes a GPU's minor number while the GPU's facts are being read: the
// number that Minor has read meanwhile is kept, also when the GPU fails after that.
func TestMinorReadDuringAReading(t *testing.T) {
	numbered := func(minor int) []gpu.GPU { return []gpu.GPU{{UUID: "a", Minor: minor}} }
	k := known{}
	k.list(nil, numbered(1), nil)
	before := maps.Clone(k)
	k.setMinor("a", 2)
	check := func(of string, want int, read []gpu.GPU, since known, failed map[int]error) {
		t.Helper()
		gpus, _ := k.list(since, read, failed)
		if len(gpus) != 1 || gpus[0].Minor != want {
			t.Errorf("%s: %+v, want minor number %d", of, gpus, want)
		}
	}
	check("the reading", 2, numbered(1), before, nil)
	check("a GPU that has failed since", 2, nil, maps.Clone(k), map[int]error{0: ErrLost})
	check("the next reading", 3, numbered(3), maps.Clone(k), nil)
}
