// Command controller publishes the GPUs of all nodes as ResourceSlices.
package main

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/tessera-dra/tessera/pkg/control"
)

// version is set by the linker.
var version = "unknown"

func main() {
	debug.SetGCPercent(50) // less memory on large clusters, for 6 % more processor time in a first publication
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "controller:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	c, kubeconfig, logs := control.Config{}, "", logsapi.NewLoggingConfiguration()
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Publish the GPUs of all nodes as ResourceSlices",
		Long: `Reads the GPUInventory that the kubelet plugin of each node reports, and the
SharingPolicies, and keeps each node's ResourceSlices in line with them: as few
slices as the devices fit into, and those that shared counters need. Devices that
claims have stay on offer until the claims are gone, whatever the policies say now.
It also keeps the DeviceClasses of a file in the cluster, in the version of the API
that the server has.
Any number may run: the holder of the Lease tessera-controller works, the others wait.

/metrics is served on the metrics address, /healthz and /readyz on the health address.`,
		Example: `  # in a pod of the cluster
  controller
  # on a desk
  controller --kubeconfig ~/.kube/config --namespace default -v 4`,
		Version: version, Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if err := logsapi.ValidateAndApply(logs, nil); err != nil {
			return err
		}
		if c.REST, err = control.RESTConfig(kubeconfig); err != nil {
			return err
		}
		// Near the container's limit the garbage collector runs more often, where otherwise
		// the kernel would end the container.
		if _, err := memlimit.Set(); err != nil {
			klog.Background().Error(err, "The garbage collector doesn't know the container's memory limit")
		}
		return control.Run(klog.NewContext(cmd.Context(), klog.Background()), c)
	}
	flags := cmd.PersistentFlags()
	flags.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig `file` of the cluster; default: the cluster of this pod")
	logsapi.AddFlags(logs, flags)
	flags = cmd.Flags()
	flags.StringVar(&c.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "`namespace` of the Lease; default: $POD_NAMESPACE")
	flags.BoolVar(&c.LeaderElect, "leader-elect", true, "work only while holding the Lease; set to false only if no other instance can run")
	flags.StringVar(&c.MetricsAddress, "metrics-address", ":8080", "`address` for metrics; 0 disables them")
	flags.BoolVar(&c.MetricsAuthentication, "metrics-authentication", false,
		"serve metrics over TLS, to bearers of tokens that may get /metrics from the API server")
	flags.StringVar(&c.HealthAddress, "health-address", "0", "`address` for /healthz and /readyz; 0 disables them")
	flags.BoolVar(&c.NodeLabels, "node-labels", false, "write the labels of GPU Feature Discovery to nodes with GPUs")
	flags.BoolVar(&c.Ranks, "ranks", false, "taint nodes so that schedulers prefer those that are in use")
	flags.IntVar(&c.Packing.Hard, "ranks-reserve-hard", 0, "how many unused nodes to keep for pods that tolerate gpu.tessera.dev/reserve, in each pool")
	flags.StringVar(&c.Packing.PoolLabel, "ranks-pool-label", "", "`label` of nodes whose values are pools; default: all nodes are one pool")
	flags.DurationVar(&c.Packing.Pause, "ranks-pause", time.Second, "how long a higher rank must have been wanted before it is written")
	flags.StringVar(&c.DeviceClasses, "device-classes", "", "`file` of the DeviceClasses to keep in the cluster; default: none is touched")
	cmd.AddCommand(removals(&c, &kubeconfig, logs)...)
	return cmd
}

// removals are the commands that remove what controllers wrote to nodes.
func removals(c *control.Config, kubeconfig *string, logs *logsapi.LoggingConfiguration) []*cobra.Command {
	withCluster := func(remove func(context.Context, control.Config) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, _ []string) (err error) {
			if err := logsapi.ValidateAndApply(logs, nil); err != nil {
				return err
			}
			if c.REST, err = control.RESTConfig(*kubeconfig); err != nil {
				return err
			}
			return remove(klog.NewContext(cmd.Context(), klog.Background()), *c)
		}
	}
	return []*cobra.Command{{
		Use:   "remove-node-labels",
		Short: "Remove the labels that --node-labels has written, from all nodes",
		Long: `Removes from all nodes the labels that controllers with --node-labels have
written, and none that others wrote. No such controller may be running.`,
		Args: cobra.NoArgs,
		RunE: withCluster(control.RemoveNodeLabels),
	}, {
		Use:   "remove-node-taints",
		Short: "Remove the taints that --ranks has written, from all nodes",
		Long: `Removes from all nodes the taints that controllers with --ranks have written, and
no others. No such controller may be running.`,
		Args: cobra.NoArgs,
		RunE: withCluster(control.RemoveRanks),
	}}
}
