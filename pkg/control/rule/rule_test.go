package rule_test

import (
	"encoding/json"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/rule"
)

// FuzzNew reads any JSON as a policy. One that is taken can be asked about any device.
func FuzzNew(f *testing.F) {
	f.Add([]byte(`{"plan":{"mps":{"shares":4}},"gpuSelector":"device.attributes[\"gpu.nvidia.com\"].productName.startsWith(\"NVIDIA L40S\")"}`))
	f.Add([]byte(`{"plan":{"partitioned":{"profiles":["1g.10gb"],"keepWarm":"5m"}},"nodeSelector":{"matchExpressions":[{"key":"a","operator":"In","values":["b"]}]}}`))
	f.Add([]byte(`{"plan":{"mps":{"consumable":{"memoryStep":"1Gi","maxClients":16}}},"priority":7}`))
	f.Add([]byte(`{"plan":{"timeSliced":{"replicas":64,"interval":"Long"}},"health":{"reset":"WhenIdle"},"gpuSelector":"1/0==1"}`))
	product := "NVIDIA L40S"
	device := resourceapi.Device{Name: "gpu-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"productName": {StringValue: &product}}}
	f.Fuzz(func(t *testing.T, data []byte) {
		s := &v1alpha1.SharingPolicy{}
		if json.Unmarshal(data, &s.Spec) != nil {
			return
		}
		s.Spec.SetDefaults()
		r, err := rule.New(s, v1alpha1.AcceptedForm{Spec: s.Spec}, nil)
		if err != nil {
			return
		}
		if ask := r.Ask(t.Context()); ask.GPUs != nil {
			_, _ = ask.GPUs(device)
		}
		again, err := json.Marshal(s.Spec)
		if err != nil {
			t.Fatal(err)
		}
		stored := &v1alpha1.SharingPolicy{}
		if err := json.Unmarshal(again, &stored.Spec); err != nil {
			t.Fatal(err)
		}
		if _, err := rule.New(stored, v1alpha1.AcceptedForm{Spec: stored.Spec}, nil); err != nil {
			t.Errorf("the policy is taken, and not as it is stored, %s: %v", again, err)
		}
	})
}
