package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// run runs the command, and returns its output and its error's text at the end.
func run(t *testing.T, s *kubectltest.Server, on terminal.Screen, in string, args ...string) string {
	t.Helper()
	return s.Execute(t, func(streams genericclioptions.IOStreams) *cobra.Command { return command(streams, on) }, in, args...)
}

// TestOutput compares the output of commands with testdata.
func TestOutput(t *testing.T) {
	for name, tc := range map[string]struct {
		screen terminal.Screen
		in     string
		change func(*kubectltest.Server)
		args   []string
	}{} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			if tc.change != nil {
				tc.change(s)
			}
			kubectltest.CompareFile(t, name, run(t, s, tc.screen, tc.in, tc.args...))
		})
	}
}

// TestCalledAs: texts name the program as the user calls it.
func TestCalledAs(t *testing.T) {
	for program, want := range map[string]string{
		"/usr/local/bin/kubectl-gpu": "kubectl gpu", "/home/me/.krew/bin/kubectl-tessera": "kubectl tessera",
		"kubectl-tessera.exe": "kubectl tessera", "bin/kubectl-my_gpus": "kubectl my-gpus", "/tmp/gpu": "kubectl gpu",
	} {
		if got := calledAs(program); got != want {
			t.Errorf("%s: %s, want %s", program, got, want)
		}
	}
	var plain, out bytes.Buffer
	for w, as := range map[*bytes.Buffer]string{&plain: "kubectl gpu", &out: "kubectl tessera"} {
		cmd := command(genericclioptions.IOStreams{In: strings.NewReader(""), Out: naming{w, as}, ErrOut: naming{w, as}}, terminal.Screen{})
		cmd.SetArgs([]string{"drain", "--help"})
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	if got := out.String(); got != strings.ReplaceAll(plain.String(), "kubectl gpu", "kubectl tessera") || !strings.Contains(got, "\n  kubectl tessera drain NODE") {
		t.Error(got)
	}
}
