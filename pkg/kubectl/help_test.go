package kubectl

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestHelp: each command's help shows examples and one run, and leaves the flags that all
// commands have to options; only -n is everywhere.
func TestHelp(t *testing.T) {
	s := kubectltest.New(t)
	connection := []string{"--kubeconfig", "--as-group", "--certificate-authority", "--request-timeout"}
	for _, c := range New(genericclioptions.IOStreams{}, terminal.Screen{}, "test").Commands() {
		name := c.Name()
		help := run(t, s, terminal.Screen{Width: 80}, "", name, "--help")
		if !strings.Contains(help, "\n  -n, --namespace string ") || !strings.Contains(help, "kubectl gpu options") {
			t.Errorf("%s --help lacks -n, or where the other flags are:\n%s", name, help)
		}
		for _, flag := range connection {
			if strings.Contains(help, flag) {
				t.Errorf("%s --help has %s", name, flag)
			}
		}
		if own(c) && !strings.Contains(help, "\n  $ kubectl gpu "+name) {
			t.Errorf("%s --help shows no run:\n%s", name, help)
		}
	}
	all := run(t, s, terminal.Screen{Width: 80}, "", "options")
	for _, flag := range append(connection, "--namespace") {
		if !strings.Contains(all, flag) {
			t.Errorf("options lacks %s:\n%s", flag, all)
		}
	}
	root := New(genericclioptions.IOStreams{Out: io.Discard, ErrOut: io.Discard}, terminal.Screen{}, "test")
	root.SetArgs([]string{"map", "--help"})
	if err := root.Execute(); err != nil || root.PersistentFlags().Lookup("request-timeout").Hidden {
		t.Errorf("%v; or shells don't complete a flag after a help that leaves it out", err)
	}
}

// own reports whether a command is Tessera's, and not one that every program has.
func own(c *cobra.Command) bool {
	return c.Name() != "help" && c.Name() != "completion" && c.Name() != "options"
}
