package get

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"get": {Args: []string{"get"}},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) { kubectltest.CompareHelp(t, Command, kubectltest.Case{}) }
