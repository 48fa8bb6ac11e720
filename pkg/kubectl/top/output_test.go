package top

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"top":           {Args: []string{"top"}, Change: kubectltest.Busy},
		"top-namespace": {Args: []string{"top", "-n", "team"}, Change: kubectltest.Busy},
		"top-json":      {Args: []string{"top", "-o", "json", "-n", "lab"}, Change: kubectltest.Busy},
		"top-forbidden": {Args: []string{"top"}, Change: func(s *kubectltest.Server) { kubectltest.Busy(s); s.Forbidden = []string{kubectltest.MetricsPath} }},
		"top-authenticated": {Args: []string{"top"}, Change: func(s *kubectltest.Server) {
			kubectltest.Busy(s)
			s.Metrics = nil
			plugin := s.Items["/api/v1/pods"][0].(corev1.Pod)
			plugin.Spec.Containers[0].Args = []string{"--metrics-authentication"}
		}},
		"top-silent": {Args: []string{"top"}, Change: func(s *kubectltest.Server) { kubectltest.Busy(s); s.Metrics = nil }},
		"top-no-tessera": {Args: []string{"top"}, Change: func(s *kubectltest.Server) {
			s.Items = map[string][]any{kubectltest.Resources + "resourceslices": {}, kubectltest.Resources + "resourceclaims": {}, "/api/v1/pods": {}}
		}},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) {
	kubectltest.CompareHelp(t, Command, kubectltest.Case{Change: kubectltest.Busy})
}
