package fits

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	const misspelt = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClasName: gpu.nvidia.com}]}}}`
	const old = `{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, deviceClassName: gpu.nvidia.com}]}}}`
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"fits-taint-rule": {Args: []string{"fits", "3g.40gb"}, Change: kubectltest.Taint},
		"fits":            {Args: []string{"fits", "3g.40gb"}},
		"fits-memory":     {Args: []string{"fits", "--memory", "20Gi"}},
		"fits-file":       {In: old, Args: []string{"fits", "-f", "-"}},
		"fits-misspelt":   {In: misspelt, Args: []string{"fits", "-f", "-"}},
		"fits-forbidden":  {Args: []string{"fits", "3g.40gb"}, Change: func(s *kubectltest.Server) { s.Forbidden = []string{kubectltest.Resources + "deviceclasses"} }},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) { kubectltest.CompareHelp(t, Command, kubectltest.Case{}) }
