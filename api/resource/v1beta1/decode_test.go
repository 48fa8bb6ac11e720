package v1beta1

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

func TestDecode(t *testing.T) {
	meta := func(kind string) metav1.TypeMeta { return metav1.TypeMeta{APIVersion: APIVersion, Kind: kind} }
	for name, tc := range map[string]struct {
		in   string
		want Config
	}{
		"nothing asked for": {
			in:   `{kind: GpuConfig}`,
			want: &GpuConfig{TypeMeta: meta(GpuConfigKind)},
		},
		"time-slicing without an interval": {
			in:   `{kind: GpuConfig, sharing: {strategy: TimeSlicing}}`,
			want: &GpuConfig{TypeMeta: meta(GpuConfigKind), Sharing: &GpuSharing{Strategy: TimeSlicingStrategy}},
		},
		"time-slicing on MIG, which has no effect": {
			in:   `{kind: MigDeviceConfig, sharing: {strategy: TimeSlicing}}`,
			want: &MigDeviceConfig{TypeMeta: meta(MigDeviceConfigKind), Sharing: &MigDeviceSharing{Strategy: TimeSlicingStrategy}},
		},
		"time-slicing on MIG, with what is for MPS": {
			in: `{kind: MigDeviceConfig, sharing: {strategy: TimeSlicing, mpsConfig: {defaultActiveThreadPercentage: 101}}}`,
			want: &MigDeviceConfig{TypeMeta: meta(MigDeviceConfigKind), Sharing: &MigDeviceSharing{
				Strategy: TimeSlicingStrategy, MpsConfig: &MpsConfig{DefaultActiveThreadPercentage: new(101)},
			}},
		},
		"MPS without limits": {
			in:   `{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {}}}`,
			want: &GpuConfig{TypeMeta: meta(GpuConfigKind), Sharing: &GpuSharing{Strategy: MPSStrategy, MpsConfig: &MpsConfig{}}},
		},
		"MPS on MIG without limits": {
			in:   `{kind: MigDeviceConfig, sharing: {strategy: MPS, mpsConfig: {}}}`,
			want: &MigDeviceConfig{TypeMeta: meta(MigDeviceConfigKind), Sharing: &MigDeviceSharing{Strategy: MPSStrategy, MpsConfig: &MpsConfig{}}},
		},
		"passthrough, which is for no device here": {
			in:   `{kind: VfioDeviceConfig, iommu: {backendPolicy: LegacyOnly}}`,
			want: &VfioDeviceConfig{TypeMeta: meta(VfioDeviceConfigKind), Iommu: map[string]any{"backendPolicy": "LegacyOnly"}},
		},
		"time-slicing as NVIDIA's examples write it": {
			in: `{kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}`,
			want: &GpuConfig{TypeMeta: meta(GpuConfigKind), Sharing: &GpuSharing{
				Strategy:          TimeSlicingStrategy,
				TimeSlicingConfig: &TimeSlicingConfig{Interval: new(LongTimeSlice)},
			}},
		},
		"MPS as NVIDIA's examples write it": {
			in: `{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50,
			      defaultPinnedDeviceMemoryLimit: 10Gi, defaultPerDevicePinnedMemoryLimit: {"0": 5Gi}}}}`,
			want: &GpuConfig{TypeMeta: meta(GpuConfigKind), Sharing: &GpuSharing{
				Strategy: MPSStrategy,
				MpsConfig: &MpsConfig{
					DefaultActiveThreadPercentage:     new(50),
					DefaultPinnedDeviceMemoryLimit:    new(resource.MustParse("10Gi")),
					DefaultPerDevicePinnedMemoryLimit: map[string]resource.Quantity{"0": resource.MustParse("5Gi")},
				},
			}},
		},
		"MPS on MIG": {
			in: `{kind: MigDeviceConfig, sharing: {strategy: MPS, mpsConfig: {multiUser: true}}}`,
			want: &MigDeviceConfig{TypeMeta: meta(MigDeviceConfigKind), Sharing: &MigDeviceSharing{
				Strategy: MPSStrategy, MpsConfig: &MpsConfig{MultiUser: new(true)},
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Decode(document(t, tc.in))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if errs := got.Validate(); len(errs) > 0 {
				t.Error(errs.ToAggregate())
			}
		})
	}
}

// TestDecodeRefuses has configurations that can't be read, or whose values aren't valid.
func TestDecodeRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string // YAML without apiVersion, or raw where it starts with !
		want string // is in the error
	}{
		"nothing":                   {`!`, "unexpected end of JSON input"},
		"null":                      {`!null`, `apiVersion is ""`},
		"a list":                    {`![]`, "is a JSON array, want an object"},
		"a string":                  {`!"GpuConfig"`, "is a JSON string, want an object"},
		"two documents":             {`!{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"} {}`, "after top-level value"},
		"a field twice":             {`!{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","kind":"GpuConfig"}`, `duplicate field "kind"`},
		"another version":           {`{apiVersion: resource.nvidia.com/v1, kind: GpuConfig}`, `apiVersion is "resource.nvidia.com/v1", this driver knows resource.nvidia.com/v1beta1`},
		"another kind":              {`{kind: ComputeDomainChannelConfig}`, `kind is "ComputeDomainChannelConfig", this driver knows GpuConfig and MigDeviceConfig`},
		"no kind":                   {`{}`, `kind is ""`},
		"unknown field":             {`{kind: GpuConfig, sharing: {strategy: MPS, mpsconfig: {}}}`, `unknown field "sharing.mpsconfig"`},
		"wrong type":                {`{kind: GpuConfig, sharing: {strategy: 4}}`, "sharing.strategy: a JSON number doesn't fit here"},
		"wrong type of a part":      {`{kind: GpuConfig, sharing: MPS}`, "sharing: a JSON string doesn't fit here"},
		"empty sharing":             {`{kind: GpuConfig, sharing: {}}`, "sharing.strategy: Required value"},
		"empty time-slicing":        {`{kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}}`, "sharing.timeSlicingConfig.interval: Required value"},
		"misspelt strategy":         {`{kind: GpuConfig, sharing: {strategy: mps}}`, `sharing.strategy: Unsupported value: "mps": supported values: "TimeSlicing", "MPS"`},
		"unknown strategy on MIG":   {`{kind: MigDeviceConfig, sharing: {strategy: timeSlicing}}`, `sharing.strategy: Unsupported value: "timeSlicing": supported values: "TimeSlicing", "MPS"`},
		"unknown strategy":          {`{kind: GpuConfig, sharing: {strategy: Magic}}`, `sharing.strategy: Unsupported value: "Magic": supported values: "TimeSlicing", "MPS"`},
		"unknown interval":          {`{kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: 10s}}}`, `sharing.timeSlicingConfig.interval: Unsupported value: "10s"`},
		"parameters of the other":   {`{kind: GpuConfig, sharing: {strategy: MPS, timeSlicingConfig: {interval: Long}}}`, "sharing.timeSlicingConfig: Forbidden: goes with strategy TimeSlicing only"},
		"percentage":                {`{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}}`, "sharing.mpsConfig.defaultActiveThreadPercentage: Invalid value: 101: must be 0 to 100"},
		"no quantity":               {`{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: much}}}`, `sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: Invalid value: "much": must be a quantity`},
		"no quantity for a device":  {`{kind: MigDeviceConfig, sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"0": much}}}}`, `sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[0]: Invalid value: "much"`},
		"negative limit":            {`{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: -1Gi}}}`, "must be at least 1Mi"},
		"limit of no device":        {`{kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {gpu-1: 1Gi}}}}`, "defaultPerDevicePinnedMemoryLimit[gpu-1]: Invalid value"},
		"time-slicing field on MIG": {`{kind: MigDeviceConfig, sharing: {strategy: MPS, timeSlicingConfig: {interval: Long}}}`, `unknown field "sharing.timeSlicingConfig"`},
	} {
		t.Run(name, func(t *testing.T) {
			raw, isRaw := strings.CutPrefix(tc.in, "!")
			if !isRaw {
				raw = string(document(t, tc.in))
			}
			got, err := Decode([]byte(raw))
			if err == nil {
				err = got.Validate().ToAggregate()
			}
			if err == nil {
				t.Fatalf("accepted: %+v", got)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %q\nwant %q in it", err, tc.want)
			}
		})
	}
}

// FuzzDecode checks that Decode never panics, and that an accepted configuration, written
// out again, is accepted with the same meaning.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1Gi","defaultPerDevicePinnedMemoryLimit":{"0":"2Gi"}}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":10,"multiUser":false}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":{}}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"TimeSlicing","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{}}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"enableAPIDevice":true}}`,
		`null`, `[`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Decode(raw)
		if err != nil {
			return
		}
		out, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Decode(out)
		if err != nil {
			t.Fatalf("%s was accepted, but as %s: %v", raw, out, err)
		}
		if diff := cmp.Diff(c, again, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-first +again):\n%s", raw, diff)
		}
	})
}

func document(t *testing.T, in string) []byte {
	t.Helper()
	var doc map[string]any
	if err := yaml.Unmarshal([]byte(in), &doc); err != nil {
		t.Fatal(err)
	}
	if _, ok := doc["apiVersion"]; !ok {
		doc["apiVersion"] = APIVersion
	}
	raw, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}
