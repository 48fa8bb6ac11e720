package publish

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	clientgotesting "k8s.io/client-go/testing"
)

func TestFindAPIVersion(t *testing.T) {
	resource := []metav1.APIResource{{Name: "resourceslices"}}
	for name, tc := range map[string]struct {
		serves map[string][]metav1.APIResource
		want   string
		err    error
	}{
		"newest":             {map[string][]metav1.APIResource{"v1": resource, "v1beta2": resource}, "v1", nil},
		"1.33":               {map[string][]metav1.APIResource{"v1beta2": resource, "v1beta1": resource}, "v1beta2", nil},
		"1.32":               {map[string][]metav1.APIResource{"v1beta1": resource}, "v1beta1", nil},
		"version for others": {map[string][]metav1.APIResource{"v1beta2": {{Name: "devicetaintrules"}}, "v1beta1": resource}, "v1beta1", nil},
		"1.31":               {map[string][]metav1.APIResource{"v1alpha3": resource}, "", ErrNoResourceAPI},
		"without DRA":        {nil, "", ErrNoResourceAPI},
	} {
		t.Run(name, func(t *testing.T) {
			server := &fakediscovery.FakeDiscovery{Fake: &clientgotesting.Fake{}}
			for version, resources := range tc.serves {
				server.Resources = append(server.Resources, &metav1.APIResourceList{GroupVersion: "resource.k8s.io/" + version, APIResources: resources})
			}
			got, err := FindAPIVersion(server)
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %q, %v, want %q, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

// TestProbe uses fake servers that treat slices as in the sources of
// Kubernetes: they drop fields, and refuse slices in validation.
func TestProbe(t *testing.T) {
	invalid := apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceSlice").GroupKind(), "x", nil)
	drop := func(s *resourceapi.ResourceSlice) error {
		s.Spec.SharedCounters = nil
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].ConsumesCounters = nil
		}
		return nil
	}
	single := func(s *resourceapi.ResourceSlice) error {
		for i, d := range s.Spec.Devices {
			s.Spec.Devices[i].AllowMultipleAllocations = nil
			for name, c := range d.Capacity {
				c.RequestPolicy = nil
				d.Capacity[name] = c
			}
		}
		return nil
	}
	split := func(s *resourceapi.ResourceSlice) error {
		if s.Spec.SharedCounters != nil && s.Spec.Devices != nil {
			return invalid
		}
		return nil
	}
	joint := func(s *resourceapi.ResourceSlice) error {
		if len(s.Spec.Devices) > 0 && s.Spec.Devices[0].ConsumesCounters != nil && len(s.Spec.SharedCounters) == 0 {
			return invalid // a device consumes from a set that isn't in its slice
		}
		return nil
	}
	for name, tc := range map[string]struct {
		server  func(*resourceapi.ResourceSlice) error
		version string
		want    Abilities
		err     bool
	}{
		"1.37":               {split, "v1.37.1", Abilities{SplitCounters, true, true, "v1.37.1"}, false},
		"1.36.2":             {split, "v1.36.2", Abilities{SplitCounters, true, true, "v1.36.2"}, false},
		"1.36.1":             {split, "v1.36.1", Abilities{SplitCounters, true, false, "v1.36.1"}, false},
		"1.36.0":             {split, "v1.36.0", Abilities{SplitCounters, true, false, "v1.36.0"}, false},
		"1.35":               {split, "v1.35.10", Abilities{SplitCounters, true, false, "v1.35.10"}, false},
		"1.34":               {joint, "v1.34.13", Abilities{JointCounters, true, false, "v1.34.13"}, false},
		"version isn't told": {split, "", Abilities{SplitCounters, true, false, ""}, false},
		"consumable capacity off": {func(s *resourceapi.ResourceSlice) error {
			return errors.Join(split(s), single(s))
		}, "v1.37.1", Abilities{SplitCounters, false, true, "v1.37.1"}, false},
		"gate off, or 1.32":        {func(s *resourceapi.ResourceSlice) error { return errors.Join(drop(s), single(s)) }, "v1.32.0", Abilities{Version: "v1.32.0"}, false},
		"only consumable capacity": {drop, "v1.36.1", Abilities{NoCounters, true, false, "v1.36.1"}, false},
		// An admission policy, say, that has an opinion about slices.
		"refuses any": {func(*resourceapi.ResourceSlice) error { return invalid }, "v1.37.1", Abilities{NoCounters, false, true, "v1.37.1"}, true},
		"changes any": {func(s *resourceapi.ResourceSlice) error { s.Spec.Devices = nil; return nil }, "v1.37.1", Abilities{NoCounters, false, true, "v1.37.1"}, true},
		"no answer":   {func(*resourceapi.ResourceSlice) error { return errors.New("connection refused") }, "v1.37.1", Abilities{NoCounters, false, true, "v1.37.1"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			server := fake.NewClientset()
			server.PrependReactor("create", "resourceslices", func(action clientgotesting.Action) (bool, runtime.Object, error) {
				create, ok := action.(clientgotesting.CreateActionImpl)
				if !ok || !slices.Equal(create.CreateOptions.DryRun, []string{metav1.DryRunAll}) {
					t.Errorf("not a dry run: %v", action)
				}
				s := create.Object.DeepCopyObject().(*resourceapi.ResourceSlice)
				if s.Name != "" {
					t.Errorf("a slice %s may exist already", s.Name)
				}
				return true, s, tc.server(s)
			})
			server.PrependReactor("get", "version", func(clientgotesting.Action) (bool, runtime.Object, error) {
				if tc.version == "" {
					return true, nil, apierrors.NewForbidden(schema.GroupResource{}, "version", nil)
				}
				return false, nil, nil
			})
			server.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: tc.version}
			p, err := New(fakeClient{server.ResourceV1()}, server.Discovery())
			if err != nil {
				t.Fatal(err)
			}
			got, err := p.Probe(t.Context())
			if got != tc.want || (err != nil) != tc.err {
				t.Errorf("got %v, %v, want %v", got, err, tc.want)
			}
		})
	}
}
