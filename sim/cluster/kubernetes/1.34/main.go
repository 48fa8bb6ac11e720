// Command kubernetes holds the Kubernetes components of one release in one
// binary, which shares most of their size and one link step. The name it is
// called by (a symbolic link), or else its first argument, says which
// component runs. kubectl isn't among them: it is started thousands of times, and
// the initialization of all components takes more processor time than its own work.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // CronJob time zones, as in the upstream components

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // JSON log format
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // version metric
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	if name == "kubernetes" && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	var component *cobra.Command
	switch name {
	case "kube-apiserver":
		component = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		component = controllermanager.NewControllerManagerCommand()
	case "kube-scheduler":
		component = scheduler.NewSchedulerCommand()
	case "kubelet":
		component = kubeletCommand(kubelet.NewKubeletCommand)
	default:
		fmt.Fprintln(os.Stderr, "usage: kubernetes kube-apiserver|kube-controller-manager|kube-scheduler|kubelet [flags]")
		os.Exit(2)
	}
	os.Exit(cli.Run(component))
}

// kubeletCommand calls the constructor of the kubelet's command, which takes a
// context from Kubernetes 1.34 on.
func kubeletCommand(constructor any) *cobra.Command {
	if newCommand, ok := constructor.(func() *cobra.Command); ok {
		return newCommand()
	}
	return constructor.(func(context.Context) *cobra.Command)(context.Background())
}
