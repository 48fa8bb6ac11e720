package template

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestTemplateLabels checks that a template has a note if policies may select the new node
// by labels that aren't known, as when the node of the inventory is gone.
func TestTemplateLabels(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*kubectltest.Server)
		args   []string
		noted  bool
	}{
		"node gone":             {func(s *kubectltest.Server) { kubectltest.Shared(s); s.Items["/api/v1/nodes"] = []any{} }, nil, true},
		"node gone, labels":     {func(s *kubectltest.Server) { kubectltest.Shared(s); s.Items["/api/v1/nodes"] = []any{} }, []string{"--labels", "pool=shared"}, false},
		"no policy with labels": {func(s *kubectltest.Server) { s.Items["/api/v1/nodes"] = []any{} }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			tc.change(s)
			out := s.Run(t, Command, terminal.Screen{}, "", append([]string{"template", "node"}, tc.args...)...)
			if !strings.Contains(out, "kind: ResourceSlice") || strings.Contains(out, "note: No labels of the new node are known") != tc.noted {
				t.Error(out)
			}
		})
	}
}
