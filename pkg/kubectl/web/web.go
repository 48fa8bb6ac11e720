// Package web is kubectl gpu web: the map as a page in a browser of this machine.
package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/page"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
	"github.com/tessera-dra/tessera/pkg/kubectl/why"
)

// Command returns kubectl gpu web.
func Command(o *cluster.Options) *cobra.Command {
	var port int
	var open bool
	var label string
	cmd := &cobra.Command{
		Use:   "web",
		Short: "Serve the map as a page for a browser on this machine, until interrupted",
		Long: `Serve the map as a page for a browser on this machine, and print its address. The
page follows the cluster by watches with your own rights; nothing is installed there.
It ends with this command.

Only who has the printed address with its token can open the page, and only on this
machine. For a browser on another machine, forward the port with ssh -L, with the same
number on both sides (--port).

Nodes are grouped by the labels by which platforms name node pools, or else by the
models of their GPUs.`,
		Example: `  kubectl gpu web
  kubectl gpu web --open                                      # opens the browser, too
  kubectl gpu web --pool-label topology.kubernetes.io/zone    # a group for each zone` + terminal.Shown("$ kubectl gpu web\n"+served("http://127.0.0.1:41237/?token=KZPWLUF7T5QYRFKD2OWKQNWNEL")),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			labels := view.PoolLabels()
			if label != "" {
				labels = []string{label}
			}
			return serveWeb(cmd.Context(), o, port, open, labels)
		},
	}
	cmd.Flags().IntVar(&port, "port", 0, "port of 127.0.0.1 to listen on; 0 for a free one")
	cmd.Flags().BoolVar(&open, "open", false, "open the page in the browser; other users of this machine may see its address while the browser starts")
	cmd.Flags().StringVar(&label, "pool-label", "", "label of nodes by which to group them")
	return cmd
}

// served says where the page is.
func served(at string) string { return "The map is at " + at + "\nPress Ctrl-C to end it." }

func serveWeb(ctx context.Context, o *cluster.Options, port int, open bool, labels []string) error {
	r, err := o.Reader(cluster.Missing{
		cluster.SlicesName: cluster.NoOffers, cluster.ClaimsName: cluster.NoHolders, cluster.RulesName: cluster.NoRules, cluster.InventoriesName: cluster.NoConditions, cluster.PoliciesName: cluster.NoPolicies,
		cluster.NodesName: "nodes are grouped by the models of their GPUs, not by their pools", cluster.PodsName: "which pods wait isn't known",
	})
	if err != nil {
		return err
	}
	var notes cluster.NotePrinter
	source, err := feed.NewSource(r.Resources(), feed.SourceOptions{
		Cluster: o.ClusterName(), Namespace: o.CurrentNamespace(), PoolLabels: labels,
		OnNotes: func(all []feed.Note) { notes.Print(o.ErrOut, all) },
	})
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen: %w; --port 0 takes a free port", err)
	}
	handler, err := page.NewServer(listener.Addr(), source, func(ctx context.Context, namespace, pod string) (any, error) {
		return why.Now(ctx, o, namespace, pod)
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(o.Out, served(handler.URL()))
	if open {
		if err := openBrowser(ctx, handler.URL()); err != nil {
			fmt.Fprintf(o.ErrOut, "note: no browser could be started (%v): open the address yourself.\n", err)
		}
	}
	return serve(ctx, listener, handler, source)
}

// serve serves until the context ends.
func serve(ctx context.Context, listener net.Listener, handler http.Handler, source *feed.Source) error {
	ctx, cancel := context.WithCancel(ctx)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		source.Run(ctx)
		_ = server.Close()
	}()
	err := server.Serve(listener)
	cancel()
	<-ended
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve the page: %w", err)
}

// openBrowser starts the user's browser, which may run longer than this program.
func openBrowser(ctx context.Context, url string) error {
	program, args := "xdg-open", []string{url}
	switch runtime.GOOS {
	case "darwin":
		program = "open"
	case "windows":
		program, args = "rundll32", []string{"url.dll,FileProtocolHandler", url}
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // else its process stays as a zombie
	return nil
}
