package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

const about = `Run real Kubernetes clusters on this machine: etcd, API server, controller
manager, scheduler, and nodes with kubelet, containerd or CRI-O, and runc, all
built from Go modules. No registry, systemd, Docker or network is needed once the binaries
are built.

Each node is a set of Linux namespaces in which the usual paths are real, so
that Helm charts run unchanged. "down" leaves nothing behind.

A first session:

  localcluster up
  export KUBECONFIG=$(localcluster kubeconfig)
  kubectl=$(localcluster binary kubectl)
  $kubectl run hello --image localhost/tessera/busybox:local -- sleep 1000
  $kubectl exec hello -- hostname
  localcluster exec node-0 -- crictl ps
  localcluster logs kubelet
  localcluster down

Images come from archives ("load-image"); localhost/tessera/busybox:local and
localhost/tessera/debian:local (with the C library) are there. The first "up"
builds Kubernetes, which takes about 15 minutes on 2 cores; later ones take
seconds. Binaries are kept in $TESSERA_CACHE, by default ~/.cache/tessera.`

// settings has the flags that all commands share.
type settings struct {
	options cluster.Options
}

func newCommand() *cobra.Command {
	s := &settings{}
	root := &cobra.Command{
		Use: "localcluster", Short: "Run real Kubernetes clusters on this machine", Long: about,
		SilenceUsage: true, SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&s.options.Name, "name", cluster.DefaultName, "the cluster's name")
	root.AddCommand(
		s.up(), platforms(), s.upgrade(), s.down(), s.status(), s.kubeconfig(), s.logs(), s.loadImage(), s.build(), s.exec(), s.binary(), s.gates(), s.convert(), s.power(), s.component(),
	)
	return root
}

func (s *settings) open() (*cluster.Cluster, error) { return cluster.Open(s.options.Name) }

func (s *settings) up() *cobra.Command {
	var gates map[string]string
	cmd := &cobra.Command{
		Use: "up", Args: cobra.NoArgs,
		Short: "Bring the cluster up, or repair it",
		Long: `Bring the cluster up and wait until its nodes are ready for pods. A cluster that
is up already is checked, and machines of it that died are switched on again.

With --platform the cluster imitates a platform, such as a cloud's: the mounts and
paths of its nodes, their names, labels and taints, where the NVIDIA driver is (a
simulated one), and what the API server admits. "localcluster platforms" lists
them. Beside the nodes with GPUs there is then one without, system-0.`,
		Example: `  localcluster up --nodes 2
  localcluster up --platform gke-cos`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			begin := time.Now()
			if s.options.Nodes < 1 {
				return fmt.Errorf("--nodes=%d: a cluster has at least one node", s.options.Nodes)
			}
			var err error
			if s.options.FeatureGates, err = parseGates(gates); err != nil {
				return err
			}
			s.options.Log = cmd.ErrOrStderr()
			c, err := cluster.Up(cmd.Context(), s.options)
			if err != nil {
				return s.withAdvice(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), `cluster %[1]s is up (%[2]s): Kubernetes %[3]s, nodes %[4]s
  export KUBECONFIG=%[5]s
  %[6]s get nodes
look around with: localcluster exec %[7]s -- crictl ps
remove it with:   localcluster down --name %[1]s
`, c.Name(), time.Since(begin).Round(100*time.Millisecond), c.Kubernetes(), strings.Join(c.Nodes(), ", "), c.KubeconfigPath(), c.Binary("kubectl"), c.Nodes()[0])
			return nil
		},
	}
	s.platformFlag(cmd)
	cmd.Flags().StringVar(&s.options.Kubernetes, "kubernetes", "", "the Kubernetes version, a directory of sim/cluster/kubernetes (default: the platform's, or "+cluster.DefaultKubernetes+")")
	cmd.Flags().IntVar(&s.options.Nodes, "nodes", 1, "number of nodes of the cluster")
	cmd.Flags().StringVar(&s.options.Kubelet, "kubelet", "", "the version of the nodes' kubelets, if it is older than that of the control plane")
	cmd.Flags().StringVar(&s.options.Runtime, "runtime", "", "the nodes' container runtime: "+strings.Join(cluster.Runtimes(), ", ")+" (default: the platform's, or "+cluster.DefaultRuntime+")")
	cmd.Flags().StringVar((*string)(&s.options.DRA), "dra", string(cluster.DRAOn), `how much of Dynamic Resource Allocation is on: default is what the version
turns on by itself, on adds what claims need, all adds every feature gate of it`)
	cmd.Flags().StringToStringVar(&gates, "feature-gates", nil, "feature gates for all components, as Gate=true,Other=false, besides those of --dra")
	cmd.Flags().StringVar(&s.options.BinDir, "bin-dir", "", "use the binaries in this directory (written by build --output) instead of building; also $TESSERA_BIN_DIR")
	return cmd
}

func (s *settings) upgrade() *cobra.Command {
	var to cluster.Target
	cmd := &cobra.Command{
		Use: "upgrade", Args: cobra.NoArgs,
		Short: "Upgrade Kubernetes in a running cluster",
		Long: `Upgrade Kubernetes in a running cluster: the control plane, then the kubelets.
Pods go on running. With one of the flags only, the other part stays as it is.`,
		Example: `  localcluster up --kubernetes 1.33
  localcluster upgrade --kubernetes 1.34
  localcluster upgrade --kubelet 1.34`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if to == (cluster.Target{}) {
				return errors.New("say to which version: --kubernetes for the control plane, --kubelet for the nodes, or both")
			}
			if err := cluster.Upgrade(cmd.Context(), s.options.Name, to, cmd.ErrOrStderr()); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "cluster %s is upgraded\n", s.options.Name)
			return nil
		},
	}
	cmd.Flags().StringVar(&to.Kubernetes, "kubernetes", "", "the new version of the control plane")
	cmd.Flags().StringVar(&to.Kubelet, "kubelet", "", "the new version of the nodes' kubelets")
	return cmd
}

// withAdvice adds to the error how to inspect and remove a cluster that did not
// come up, if parts of it exist.
func (s *settings) withAdvice(err error) error {
	if _, openErr := s.open(); openErr != nil {
		return err
	}
	return fmt.Errorf("%w\nits logs: localcluster logs --name %[2]s; to remove it: localcluster down --name %[2]s", err, s.options.Name)
}

func (s *settings) platformFlag(cmd *cobra.Command) {
	const name = "platform"
	cmd.Flags().StringVar(&s.options.Platform, name, "", "imitate this platform; localcluster platforms lists them")
	complete := cobra.FixedCompletions(platform.Names(), cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc(name, complete); err != nil {
		panic(err) // the flag is there
	}
}

func parseGates(texts map[string]string) (map[string]bool, error) {
	gates := map[string]bool{}
	for gate, text := range texts {
		on, err := strconv.ParseBool(text)
		if err != nil {
			return nil, fmt.Errorf("--feature-gates: %s=%s: want true or false", gate, text)
		}
		gates[gate] = on
	}
	return gates, nil
}

func (s *settings) down() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "down", Args: cobra.NoArgs,
		Short: "Remove the cluster and all its files on this machine",
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := []string{s.options.Name}
			if all {
				var err error
				if names, err = cluster.List(); err != nil {
					return err
				}
			}
			for _, name := range names {
				if err := cluster.Down(cmd.Context(), name, cmd.ErrOrStderr()); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "removed cluster %s\n", name)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove every cluster on this machine")
	return cmd
}

func (s *settings) status() *cobra.Command {
	return &cobra.Command{
		Use: "status", Args: cobra.NoArgs,
		Short: "Show the clusters on this machine and their components",
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := cluster.List()
			if err != nil {
				return err
			}
			if len(names) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no cluster is up")
				return nil
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "CLUSTER\tMACHINE\tCOMPONENT\tSTATE\tRESTARTS\tLAST EXIT")
			for _, name := range names {
				c, err := cluster.Open(name)
				if err != nil {
					fmt.Fprintf(w, "%s\t-\t-\tbeing created, or left by a failed up\t\t\n", name)
					continue
				}
				printStatus(w, c)
			}
			return w.Flush()
		},
	}
}

func printStatus(w io.Writer, c *cluster.Cluster) {
	for _, name := range c.Machines() {
		components, err := c.Status(name)
		if err != nil {
			fmt.Fprintf(w, "%s\t%s\t-\toff\t\t\n", c.Name(), name)
		}
		for _, component := range components {
			state := "running"
			switch {
			case component.Stopped:
				state = "stopped"
			case component.PID == 0:
				state = "down"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\n", c.Name(), name, component.Name, state, component.Restarts, component.LastExit)
		}
	}
}

func (s *settings) gates() *cobra.Command {
	return &cobra.Command{
		Use: "gates", Args: cobra.NoArgs,
		Short: "Print the feature gates of Dynamic Resource Allocation that are on",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			for _, gate := range c.Gates() {
				fmt.Fprintln(cmd.OutOrStdout(), gate)
			}
			return nil
		},
	}
}

func (s *settings) build() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use: "build", Args: cobra.NoArgs,
		Short: "Build the binaries and base images into the cache, without starting anything",
		Long: `Build the binaries and base images into the cache, without starting anything.
With --output, a directory is filled that works on any Linux host of this
architecture with "up --bin-dir", without Go, packages or network.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir := output
			if dir == "" {
				var err error
				if dir, err = os.MkdirTemp("", "localcluster-build-"); err != nil {
					return fmt.Errorf("create a temporary directory: %w", err)
				}
				defer os.RemoveAll(dir)
			}
			if err := cluster.Build(cmd.Context(), cluster.Versions{Kubernetes: s.options.Kubernetes, Runtime: s.options.Runtime}, dir, cmd.ErrOrStderr()); err != nil {
				return err
			}
			if output != "" {
				fmt.Fprintln(cmd.OutOrStdout(), output)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&s.options.Kubernetes, "kubernetes", cluster.DefaultKubernetes, "the Kubernetes version, a directory of sim/cluster/kubernetes")
	cmd.Flags().StringVar(&s.options.Runtime, "runtime", cluster.DefaultRuntime, "the container runtime: "+strings.Join(cluster.Runtimes(), ", "))
	cmd.Flags().StringVarP(&output, "output", "o", "", "also copy the binaries to this directory")
	return cmd
}
