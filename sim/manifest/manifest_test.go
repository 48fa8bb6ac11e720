package manifest_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/api/resource/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/manifest"
)

const manifests = `# A claim and a pod.
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: gpu}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.nvidia.com, count: 2}
      - name: either
        firstAvailable:
        - {name: large, deviceClassName: gpu.nvidia.com}
---
apiVersion: v1
kind: Pod
metadata: {name: p}   # kept as it is
`

func TestConvert(t *testing.T) {
	for version, want := range map[string]string{
		"v1": manifests,
		"v1beta1": `
apiVersion: resource.k8s.io/v1beta1
kind: ResourceClaimTemplate
metadata:
  name: gpu
spec:
  spec:
    devices:
      requests:
      - count: 2
        deviceClassName: gpu.nvidia.com
        name: gpu
      - firstAvailable:
        - deviceClassName: gpu.nvidia.com
          name: large
        name: either
---
apiVersion: v1
kind: Pod
metadata: {name: p}   # kept as it is
`,
	} {
		got, err := manifest.Convert([]byte(manifests), version)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", version, diff)
		}
	}
}

// The older types take every field of a converted claim.
func TestConvertedIsStrict(t *testing.T) {
	claim := []byte(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: c, allocationMode: All, adminAccess: true, selectors: [{cel: {expression: "true"}}]}
`)
	converted, err := manifest.Convert(claim, "v1beta1")
	if err != nil {
		t.Fatal(err)
	}
	var got v1beta1.ResourceClaim
	if err := yaml.UnmarshalStrict(converted, &got); err != nil {
		t.Fatal(err)
	}
	if r := got.Spec.Devices.Requests[0]; r.DeviceClassName != "c" || r.AllocationMode != "All" || !*r.AdminAccess || len(r.Selectors) != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestConvertSlice(t *testing.T) {
	slice := []byte(`apiVersion: resource.k8s.io/v1
kind: ResourceSlice
spec:
  devices:
  - name: gpu-0
    attributes: {minor: {int: 3}}
    capacity: {memory: {value: 40Gi}}
`)
	for version, capacity := range map[string]string{"v1alpha3": "40Gi", "v1beta1": "{value: 40Gi}"} {
		converted, err := manifest.Convert(slice, version)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf(`{apiVersion: resource.k8s.io/%s, kind: ResourceSlice, spec: {devices: [
			{name: gpu-0, basic: {attributes: {minor: {int: 3}}, capacity: {memory: %s}}}]}}`, version, capacity)
		if diff := cmp.Diff(decoded(t, []byte(want)), decoded(t, converted)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", version, diff)
		}
	}
}

func decoded(t *testing.T, text []byte) (object any) {
	t.Helper()
	if err := yaml.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	return object
}

func TestReadOldSlice(t *testing.T) {
	for version, capacity := range map[string]string{"v1alpha3": `"40Gi"`, "v1beta1": `{"value": "40Gi"}`} {
		old := fmt.Sprintf(`{"apiVersion": "resource.k8s.io/%s", "kind": "ResourceSliceList", "items": [
			{"spec": {"driver": "d", "devices": [{"name": "gpu-0", "basic": {"attributes": {"minor": {"int": 3}}, "capacity": {"memory": %s}}}]}}]}`,
			version, capacity)
		var got resourceapi.ResourceSliceList
		if err := manifest.Read([]byte(old), &got); err != nil {
			t.Errorf("%s: %v", version, err)
			continue
		}
		want := resourceapi.Device{
			Name:       "gpu-0",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"minor": {IntValue: ptr.To[int64](3)}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("40Gi")}},
		}
		if diff := cmp.Diff(want, got.Items[0].Spec.Devices[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", version, diff)
		}
	}
}

func TestVersion(t *testing.T) {
	for kubernetes, want := range map[string]string{"1.31": "v1alpha3", "1.32": "v1beta1", "1.33": "v1beta2", "1.34": "v1", "1.37": "v1"} {
		if got := manifest.Version(kubernetes); got != want {
			t.Errorf("Kubernetes %s: %s, want %s", kubernetes, got, want)
		}
	}
}
