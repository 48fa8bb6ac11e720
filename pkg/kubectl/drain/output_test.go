package drain

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"drain-foreign-rule": {Args: []string{"drain", "node/1", "--yes"}, Change: func(s *kubectltest.Server) {
			mine := drainRule("drain-node-gpu-00000002", "gpu-00000002")
			mine.Labels = nil
			s.Items[kubectltest.Resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-again": {Args: []string{"drain", "node", "--yes"}, Change: func(s *kubectltest.Server) {
			mine := drainRule("drain-node", "")
			mine.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
			s.Items[kubectltest.Resources+"devicetaintrules"] = []any{mine}
		}},
		"drain-dry-run-1.34": {Args: []string{"drain", "node", "--dry-run"}, Change: func(s *kubectltest.Server) {
			s.Minor = "34"
			s.Items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run-json-1.34": {Args: []string{"drain", "node", "--dry-run", "-o", "json"}, Change: func(s *kubectltest.Server) {
			s.Minor = "34"
			s.Items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{}
		}},
		"drain-dry-run":  {Args: []string{"drain", "node/1", "--dry-run"}, Change: kubectltest.Taint},
		"drain-node":     {Args: []string{"drain", "node", "--dry-run"}, Change: kubectltest.Taint},
		"drain-no-rules": {Args: []string{"drain", "node/1", "--dry-run"}},
		"drain-no-gpu":   {Args: []string{"drain", "node/7", "--dry-run"}, Change: kubectltest.Taint},
		"drain-pipe":     {Args: []string{"drain", "node/1"}, Change: kubectltest.Taint},
		"drain-forbidden": {Args: []string{"drain", "node/1", "--yes"}, Change: func(s *kubectltest.Server) {
			kubectltest.Taint(s)
			s.Forbidden = []string{"POST " + kubectltest.Resources + "devicetaintrules"}
		}},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) {
	kubectltest.CompareHelp(t, Command, kubectltest.Case{Change: kubectltest.Taint})
}
