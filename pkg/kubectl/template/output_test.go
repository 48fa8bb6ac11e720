package template

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"template-no-node":   {Args: []string{"template", "nodes"}},
		"template-two":       {Args: []string{"template", "node", "-f", "-"}},
		"template-misspelt":  {In: strings.Replace(machine, "gpus", "gpu", 1), Args: []string{"template", "-f", "-"}},
		"template-computer":  {Args: []string{"template", "--machine", "gb10", "--driver-version", "580.95.05"}},
		"template-thor":      {Args: []string{"template", "--machine", "thor,l4", "--driver-version", "580.95.05"}},
		"template-forbidden": {Args: []string{"template", "node"}, Change: func(s *kubectltest.Server) { s.Forbidden = []string{kubectltest.Own + "sharingpolicies"} }},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) { kubectltest.CompareHelp(t, Command, kubectltest.Case{}) }
