package policy

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"policy":      {Args: []string{"policy"}, Change: kubectltest.Shared},
		"policy-one":  {Args: []string{"policy", "shares"}, Change: kubectltest.Shared},
		"policy-none": {Args: []string{"policy", "shares"}},
		"policy-forbidden": {Args: []string{"policy"}, Change: func(s *kubectltest.Server) {
			kubectltest.Shared(s)
			s.Forbidden = []string{kubectltest.Own + "sharingpolicies"}
		}},
		"policy-dry-run":          {In: kubectltest.Shares, Args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-lost":     {In: kubectltest.Shares, Args: []string{"policy", "--dry-run", "-f", "-"}, Change: kubectltest.Shared},
		"policy-dry-run-misspelt": {In: strings.Replace(kubectltest.Shares, "shares: 4", "share: 4", 1), Args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-selector": {In: strings.Replace(kubectltest.Shares, "index < 2", "indx(2)", 1), Args: []string{"policy", "--dry-run", "-f", "-"}},
		"policy-dry-run-forbidden": {In: kubectltest.Shares, Args: []string{"policy", "--dry-run", "-f", "-"}, Change: func(s *kubectltest.Server) {
			s.Forbidden = []string{"POST " + kubectltest.Own + "sharingpolicies", "POST " + kubectltest.Resources + "resourceslices"}
		}},
		"policy-dry-run-claims": {In: kubectltest.Shares, Args: []string{"policy", "--dry-run", "-f", "-"}, Change: func(s *kubectltest.Server) {
			s.Forbidden = []string{kubectltest.Resources + "resourceclaims", kubectltest.Resources + "namespaces/default/resourceclaims"}
		}},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) {
	kubectltest.CompareHelp(t, Command, kubectltest.Case{Change: kubectltest.Shared})
}
