package publish

import (
	"errors"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	fakediscovery "k8s.io/client-go/discovery/fake"
	clientgotesting "k8s.io/client-go/testing"
)

func TestFindServer(t *testing.T) {
	slices := []metav1.APIResource{{Name: "resourceslices"}}
	for name, tc := range map[string]struct {
		serves map[string][]metav1.APIResource
		want   string
		err    error
	}{
		"newest":             {map[string][]metav1.APIResource{"v1": slices, "v1beta2": slices}, "v1", nil},
		"1.33":               {map[string][]metav1.APIResource{"v1beta2": slices, "v1beta1": slices}, "v1beta2", nil},
		"1.32":               {map[string][]metav1.APIResource{"v1beta1": slices}, "v1beta1", nil},
		"version for others": {map[string][]metav1.APIResource{"v1beta2": {{Name: "devicetaintrules"}}, "v1beta1": slices}, "v1beta1", nil},
		"1.31":               {map[string][]metav1.APIResource{"v1alpha3": slices}, "", ErrNoResourceAPI},
		"without DRA":        {nil, "", ErrNoResourceAPI},
	} {
		t.Run(name, func(t *testing.T) {
			fake := &fakediscovery.FakeDiscovery{Fake: &clientgotesting.Fake{}}
			for version, resources := range tc.serves {
				fake.Resources = append(fake.Resources, &metav1.APIResourceList{GroupVersion: "resource.k8s.io/" + version, APIResources: resources})
			}
			got, err := FindServer(fake)
			if got.Version != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %q, %v, want %q, %v", got.Version, err, tc.want, tc.err)
			}
		})
	}
}
