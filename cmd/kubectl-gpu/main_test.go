package main

import (
	"bytes"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

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
		cmd := kubectl.New(genericclioptions.IOStreams{In: strings.NewReader(""), Out: naming{w, as}, ErrOut: naming{w, as}}, terminal.Screen{}, version)
		cmd.SetArgs([]string{"drain", "--help"})
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	if got := out.String(); got != strings.ReplaceAll(plain.String(), "kubectl gpu", "kubectl tessera") || !strings.Contains(got, "\n  kubectl tessera drain NODE") {
		t.Error(got)
	}
}
