// Command kubectl-gpu is the kubectl plugin `kubectl gpu`: it shows who has which part
// of which GPU, how much more fits, why a pod waits, and which troubles there are. Only
// drain changes something.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/go-logr/logr/funcr"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/kubectl"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// version is set by the linker.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	as := calledAs(os.Args[0])
	streams := genericclioptions.IOStreams{
		In: os.Stdin, Out: naming{os.Stdout, as}, ErrOut: terminal.Writer{Writer: naming{os.Stderr, as}},
	}
	klog.SetLogger(onlyErrors(streams.ErrOut))
	err := kubectl.New(streams, terminal.ScreenOf(os.Stdout), version).ExecuteContext(ctx)
	stop()
	switch {
	case errors.Is(err, cluster.ErrNo):
		os.Exit(1)
	case errors.Is(err, cluster.ErrWarnings):
		os.Exit(3)
	case err != nil:
		fmt.Fprintln(streams.ErrOut, kubectl.Name+":", err)
		os.Exit(2)
	}
}

// onlyErrors logs errors, and nothing else: the client libraries also log each warning of
// the API server, such as of fields that an older one doesn't know, which the commands ask
// it about on purpose.
func onlyErrors(w io.Writer) klog.Logger {
	return funcr.New(func(_, args string) { fmt.Fprintln(w, args) }, funcr.Options{Verbosity: -1})
}

// calledAs returns how the user calls the program: kubectl runs the file kubectl-NAME,
// which krew makes with another name.
func calledAs(program string) string {
	name := strings.TrimSuffix(filepath.Base(program), ".exe")
	if as, ok := strings.CutPrefix(name, "kubectl-"); ok {
		return "kubectl " + strings.ReplaceAll(as, "_", "-")
	}
	return kubectl.Name
}

// naming writes texts in which the program is called as the user calls it.
type naming struct {
	io.Writer

	as string
}

// Write implements io.Writer. A text that is written in parts has the name in one of them.
func (n naming) Write(p []byte) (int, error) {
	if n.as == kubectl.Name {
		return n.Writer.Write(p)
	}
	if _, err := n.Writer.Write(bytes.ReplaceAll(p, []byte(kubectl.Name), []byte(n.as))); err != nil {
		return 0, err
	}
	return len(p), nil
}
