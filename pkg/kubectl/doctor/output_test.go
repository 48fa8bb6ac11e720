package doctor

import (
	"testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"doctor":         {Args: []string{"doctor"}, Change: ill},
		"doctor-healthy": {Args: []string{"doctor"}, Change: kubectltest.Healthy},
		"doctor-forbidden": {Args: []string{"doctor"}, Change: func(s *kubectltest.Server) {
			kubectltest.Healthy(s)
			s.Forbidden = []string{"/api/v1/pods", kubectltest.Own + "sharingpolicies"}
		}},
		"doctor-no-tessera": {Args: []string{"doctor"}, Change: func(s *kubectltest.Server) {
			s.Items = map[string][]any{kubectltest.Resources + "resourceslices": {}, kubectltest.Resources + "resourceclaims": {}, "/api/v1/pods": {}, "/apis/apps/v1/daemonsets": {}}
		}},
		"doctor-pod-security": {Args: []string{"doctor"}, Change: refused},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) {
	kubectltest.CompareHelp(t, Command, kubectltest.Case{Change: broken})
}

// broken has one GPU that needs a reset.
func broken(s *kubectltest.Server) {
	conditions := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory).Status.GPUs[2].Conditions
	kubectltest.Healthy(s)
	s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory).Status.GPUs[2].Conditions = conditions
}
