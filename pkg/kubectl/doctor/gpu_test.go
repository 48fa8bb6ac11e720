package doctor

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestDoctorNamesTheGPU: a finding names a GPU by its UUID where another has its index.
func TestDoctorNamesTheGPU(t *testing.T) {
	s := kubectltest.New(t)
	kubectltest.Healthy(s)
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	broken := []v1alpha1.GPUCondition{{Type: string(gpu.ResetRequired), Status: metav1.ConditionTrue, Message: "broken"}}
	inv.Status.GPUs[0].Index, inv.Status.GPUs[1].Index, inv.Status.GPUs[2].Index = 0, 2, 2
	inv.Status.GPUs[0].Conditions, inv.Status.GPUs[2].Conditions = broken, broken
	s.Items[kubectltest.Own+"gpuinventories"] = []any{inv}
	out := s.Run(t, Command, terminal.Screen{}, "", "doctor")
	for _, want := range []string{"node, GPU 0: ResetRequired: broken", "node, GPU " + inv.Status.GPUs[2].UUID + ": ResetRequired: broken"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor doesn't say %q:\n%s", want, out)
		}
	}
}
