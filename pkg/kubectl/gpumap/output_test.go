package gpumap

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"map-80":        {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}},
		"map-120":       {Screen: terminal.Screen{Width: 120}, Args: []string{"map"}},
		"map-namespace": {Screen: terminal.Screen{Width: 80}, Args: []string{"map", "-n", "team"}},
		"map-no-tessera": {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: func(s *kubectltest.Server) {
			s.Items = map[string][]any{kubectltest.Resources + "resourceslices": {}, kubectltest.Resources + "resourceclaims": {}}
		}},
		"map-no-dra": {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: func(s *kubectltest.Server) { s.Items = nil }},
		"map-no-claims": {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: func(s *kubectltest.Server) {
			s.Forbidden = []string{kubectltest.Resources + "resourceclaims", kubectltest.Resources + "namespaces/default/resourceclaims"}
		}},
		"map-forbidden": {Screen: terminal.Screen{Width: 80}, Args: []string{"map", "-n", "team"}, Change: func(s *kubectltest.Server) {
			s.Forbidden = []string{kubectltest.Resources + "resourceclaims", kubectltest.Resources + "devicetaintrules", kubectltest.Own + "gpuinventories"}
			s.Items[kubectltest.Resources+"namespaces/team/resourceclaims"] = s.Items[kubectltest.Resources+"resourceclaims"][:1]
		}},
		"map-prepare-failed":  {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: prepareFailed},
		"map-taint-rule":      {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: kubectltest.Taint},
		"map-taint-rule-1.34": {Screen: terminal.Screen{Width: 80}, Args: []string{"map"}, Change: oldTaint},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) { kubectltest.CompareHelp(t, Command, kubectltest.Case{}) }
