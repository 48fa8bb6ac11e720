package why

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"why-no-pod": {Args: []string{"why"}},
	})
}
