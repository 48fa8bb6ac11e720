package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"
)

// Target has the versions after an upgrade.
type Target struct {
	// Kubernetes of the control plane; empty: as it is.
	Kubernetes string
	// Kubelet of the nodes; empty: as it is.
	Kubelet string
}

// Upgrade upgrades a running cluster, in the order that Kubernetes requires: API
// server, controller manager and scheduler, then the kubelets. Pods go on running,
// and stored objects are kept. After an error it can be called again. log gets
// lines for people.
func Upgrade(ctx context.Context, name string, to Target, log io.Writer) error {
	unlock, err := lockDir(filepath.Join(stateRoot, name), log)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := Open(name)
	if err != nil {
		return err
	}
	c.options.Log = log
	if c.options, err = c.options.upgraded(to); err != nil {
		return fmt.Errorf("upgrade cluster %s: %w", name, err)
	}
	if err := c.replace(ctx); err != nil {
		return fmt.Errorf("upgrade cluster %s: %w", name, err)
	}
	return nil
}

// upgraded returns the options of the same cluster with newer versions.
func (o Options) upgraded(to Target) (Options, error) {
	from := o
	if to.Kubernetes != "" {
		o.Kubernetes = to.Kubernetes
	}
	if to.Kubelet != "" {
		o.Kubelet = to.Kubelet
	}
	switch {
	case o.BinDir != "":
		return o, errors.New("it was created with --bin-dir, whose binaries are of one version: create it again with the other directory")
	case minorVersion(o.Kubernetes) < minorVersion(from.Kubernetes) || minorVersion(o.Kubelet) < minorVersion(from.Kubelet):
		return o, fmt.Errorf("it has Kubernetes %s and kubelets %s, and Kubernetes can't be downgraded: run localcluster down, then up", from.Kubernetes, from.Kubelet)
	}
	return o, o.validate()
}

// replace writes programs, arguments and the record of a cluster that runs, and
// starts what follows from them again.
func (c *Cluster) replace(ctx context.Context) error {
	if err := c.fillBinDir(ctx); err != nil {
		return err
	}
	if err := c.writeSpec(c.controlPlaneSpec()); err != nil {
		return err
	}
	for node := range c.plan.nodes {
		if err := errors.Join(c.writeKubeletConfig(node), c.writeSpec(c.nodeSpec(node))); err != nil {
			return err
		}
	}
	if err := c.writeRecord(); err != nil {
		return err
	}
	fmt.Fprintf(c.options.Log, "restarting the control plane as Kubernetes %s\n", c.options.Kubernetes)
	for _, component := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		if err := c.restartSoon(ctx, controlPlane, component); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.options.Log, "restarting the kubelets as %s\n", c.options.Kubelet)
	for _, node := range c.Nodes() {
		if err := c.restartSoon(ctx, node, "kubelet"); err != nil {
			return err
		}
	}
	return c.waitReady(ctx)
}

// restartSoon restarts a component, and kills it if it takes long to stop: an API
// server waits a minute for its clients.
func (c *Cluster) restartSoon(ctx context.Context, machineName, component string) error {
	kill := time.AfterFunc(5*time.Second, func() { _ = c.Kill(machineName, component) }) // fails if it has stopped
	defer kill.Stop()
	if err := c.Stop(ctx, machineName, component); err != nil {
		return err
	}
	kill.Stop()
	return c.Start(ctx, machineName, component)
}

func (c *Cluster) writeKubeletConfig(node int) error {
	name := c.plan.nodes[node]
	o := kubeletOptions{
		kubernetes: c.options.Kubelet, cgroupRoot: "/" + c.machineCgroup(name), socket: c.runtimeSocket(), hasKernelLog: hasKernelLog(),
	}
	if c.imitatesGPUNode(node) {
		o.taints = c.platform.Node.Taints
	}
	return writeFiles(c.machineConfigDir(name), map[string][]byte{"kubelet.yaml": []byte(kubeletConfig(o))})
}
