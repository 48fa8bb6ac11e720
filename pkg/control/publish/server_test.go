package publish

import (
	"errors"
	"slices"
	"strings"
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
	draclient "k8s.io/dynamic-resource-allocation/client"
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
	untainted := func(s *resourceapi.ResourceSlice) error {
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].Taints = nil
		}
		return nil
	}
	withoutNone := func(s *resourceapi.ResourceSlice) error {
		if d := s.Spec.Devices; len(d) > 0 && len(d[0].Taints) > 0 && d[0].Taints[0].Effect == resourceapi.DeviceTaintEffectNone {
			return invalid
		}
		return nil
	}
	bare := func(s *resourceapi.ResourceSlice) error { return errors.Join(drop(s), single(s), untainted(s)) }
	forbids := func(what func(*resourceapi.ResourceSlice) bool) func(*resourceapi.ResourceSlice) error {
		return func(s *resourceapi.ResourceSlice) error {
			if what(s) {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "tessera-probe-x7k2d", errors.New("policy p"))
			}
			return nil
		}
	}
	all := func(*resourceapi.ResourceSlice) bool { return true }
	for name, tc := range map[string]struct {
		server  func(*resourceapi.ResourceSlice) error
		version string
		want    Abilities
		doubt   string // what Doubt contains
		err     bool
	}{
		"1.37":               {split, "v1.37.1", Abilities{SplitCounters, Yes, Yes, Yes, true, "v1.37.1", "V1", ""}, "", false},
		"1.36.2":             {split, "v1.36.2", Abilities{SplitCounters, Yes, Yes, Yes, true, "v1.36.2", "V1", ""}, "", false},
		"1.36.1":             {split, "v1.36.1", Abilities{SplitCounters, Yes, Yes, Yes, false, "v1.36.1", "V1", ""}, "", false},
		"1.35 with gates":    {split, "v1.35.10", Abilities{SplitCounters, Yes, Yes, Yes, false, "v1.35.10", "V1", ""}, "", false},
		"version isn't told": {split, "", Abilities{SplitCounters, Yes, Yes, Yes, false, "", "V1", ""}, "", false},
		"1.34 with gates": {func(s *resourceapi.ResourceSlice) error {
			return errors.Join(joint(s), withoutNone(s))
		}, "v1.34.13", Abilities{JointCounters, Yes, Yes, No, false, "v1.34.13", "V1", ""}, "", false},
		"consumable capacity off": {func(s *resourceapi.ResourceSlice) error {
			return errors.Join(split(s), single(s))
		}, "v1.37.1", Abilities{SplitCounters, No, Yes, Yes, true, "v1.37.1", "V1", ""}, "", false},
		"gates off, or 1.32":       {bare, "v1.32.0", Abilities{NoCounters, No, No, No, false, "v1.32.0", "V1", ""}, "", false},
		"only consumable capacity": {drop, "v1.36.1", Abilities{NoCounters, Yes, Yes, Yes, false, "v1.36.1", "V1", ""}, "", false},
		// Admission policies that have an opinion about slices.
		"refuses any": {func(*resourceapi.ResourceSlice) error { return invalid }, "v1.37.1", Abilities{Version: "v1.37.1", Charged: true, API: "V1"}, "webhooks and policies", false},
		"changes any": {func(s *resourceapi.ResourceSlice) error { s.Spec.Devices = nil; return nil }, "v1.37.1", Abilities{Version: "v1.37.1", Charged: true, API: "V1"}, "webhooks and policies", false},
		"forbids any": {forbids(all), "v1.37.1", Abilities{Version: "v1.37.1", Charged: true, API: "V1"}, "policy p", false},
		"forbids several": {forbids(func(s *resourceapi.ResourceSlice) bool {
			return s.Spec.Devices != nil && s.Spec.Devices[0].Capacity != nil
		}), "v1.34.0", Abilities{Counters: SplitCounters, Version: "v1.34.0", API: "V1"}, "tessera-probe-", false},
		"no answer":  {func(*resourceapi.ResourceSlice) error { return errors.New("connection refused") }, "v1.37.1", Abilities{}, "", true},
		"busy":       {func(*resourceapi.ResourceSlice) error { return apierrors.NewTooManyRequestsError("later") }, "v1.37.1", Abilities{}, "", true},
		"in trouble": {func(*resourceapi.ResourceSlice) error { return apierrors.NewInternalError(errors.New("x")) }, "v1.37.1", Abilities{}, "", true},
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
			p, err := New(draclient.New(server), server.Discovery())
			if err != nil {
				t.Fatal(err)
			}
			got, err := p.Probe(t.Context())
			if strings.Contains(got.Doubt, "x7k2d") || !strings.Contains(got.Doubt, tc.doubt) || (got.Doubt == "") != (tc.doubt == "") {
				t.Errorf("the doubt is %q, want %q in it, and no generated name", got.Doubt, tc.doubt)
			}
			got.Doubt = ""
			if got != tc.want || (err != nil) != tc.err {
				t.Errorf("got %+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
}
