package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

// writeConfig writes everything that the machines and the administrator read:
// keys, certificates, kubeconfigs, component configuration, machine specs.
func (c *Cluster) writeConfig() error {
	ca, err := newAuthority("localcluster-" + c.plan.name)
	if err != nil {
		return err
	}
	if err := c.writeAdmin(ca); err != nil {
		return err
	}
	if err := c.writeControlPlane(ca); err != nil {
		return err
	}
	for node := range c.plan.nodes {
		if err := c.writeNode(ca, node); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) writeAdmin(ca *authority) error {
	admin, err := ca.client("localcluster-admin", "system:masters")
	if err != nil {
		return err
	}
	config := kubeconfig("localcluster-"+c.plan.name, c.Server(), ca.pem, admin)
	return writeFiles(c.Dir(), map[string][]byte{"kubeconfig": []byte(config)})
}

func (c *Cluster) machineConfigDir(name string) string {
	return filepath.Join(c.machineDir(name), "config")
}

func (c *Cluster) writeControlPlane(ca *authority) error {
	dir := c.machineConfigDir(controlPlane)
	if err := c.writeServerCertificate(ca); err != nil {
		return err
	}
	kubeletClient, err := ca.client("kube-apiserver-kubelet-client", "system:masters")
	if err != nil {
		return err
	}
	if err := writeCredentials(dir, "kubelet-client", kubeletClient); err != nil {
		return err
	}
	if err := c.writeFrontProxy(dir); err != nil {
		return err
	}
	for name, user := range map[string]string{"controller-manager": "system:kube-controller-manager", "scheduler": "system:kube-scheduler"} {
		if err := c.writeKubeconfig(ca, dir, name, user); err != nil {
			return err
		}
	}
	public, private, err := newServiceAccountKey()
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"ca.crt": ca.pem, "ca.key": ca.keyPEM, rootAuthorities: ca.pem,
		"service-account.pub": public, "service-account.key": private,
		"audit-policy.yaml": []byte(auditPolicy),
	}
	if config := admissionConfig(c.platform.Cluster); config != nil {
		files[admissionFile] = config
	}
	if err := writeFiles(dir, files); err != nil {
		return err
	}
	return c.writeSpec(c.controlPlaneSpec())
}

// writeServerCertificate writes the certificate by which clients know the API server.
func (c *Cluster) writeServerCertificate(ca *authority) error {
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost", controlPlane}
	server, err := ca.server("kube-apiserver", names, c.plan.apiserverAddresses()...)
	if err != nil {
		return err
	}
	return writeCredentials(c.machineConfigDir(controlPlane), "apiserver", server)
}

// writeFrontProxy writes the API server's credentials for aggregated API servers.
func (c *Cluster) writeFrontProxy(dir string) error {
	ca, err := newAuthority("localcluster-front-proxy-" + c.plan.name)
	if err != nil {
		return err
	}
	client, err := ca.client(frontProxy)
	if err != nil {
		return err
	}
	if err := writeCredentials(dir, "front-proxy", client); err != nil {
		return err
	}
	return writeFiles(dir, map[string][]byte{"front-proxy-ca.crt": ca.pem})
}

func (c *Cluster) writeKubeconfig(ca *authority, dir, name, user string, groups ...string) error {
	client, err := ca.client(user, groups...)
	if err != nil {
		return err
	}
	return writeFiles(dir, map[string][]byte{name + ".kubeconfig": []byte(kubeconfig(user, c.Server(), ca.pem, client))})
}

func (c *Cluster) writeNode(ca *authority, node int) error {
	name := c.plan.nodes[node]
	dir := c.machineConfigDir(name)
	server, err := ca.server("system:node:"+name, []string{name}, net.IP(c.plan.nodeAddress(node).AsSlice()))
	if err != nil {
		return err
	}
	if err := writeCredentials(dir, "kubelet", server); err != nil {
		return err
	}
	if err := c.writeKubeconfig(ca, dir, "kubelet", "system:node:"+name, "system:nodes"); err != nil {
		return err
	}
	files := map[string][]byte{
		"ca.crt":       ca.pem,
		crioPolicyFile: []byte(crioPolicy),
		"crictl.yaml":  []byte("runtime-endpoint: unix://" + c.runtimeSocket() + "\n"),
	}
	if c.imitatesGPUNode(node) {
		maps.Copy(files, driverFiles(c.platform.Node, name))
	}
	if err := writeFiles(dir, files); err != nil {
		return err
	}
	if err := c.writeRuntime(node); err != nil {
		return err
	}
	if c.options.Platform != "" {
		if err := writeVar(filepath.Join(c.NodeDir(name), "var")); err != nil {
			return err
		}
	}
	return errors.Join(c.writeKubeletConfig(node), c.writeSpec(c.nodeSpec(node)))
}

// writeRuntime writes the configuration of a node's container runtime and of its pod network.
func (c *Cluster) writeRuntime(node int) error {
	name := c.plan.nodes[node]
	overlay, err := c.canOverlay(name)
	if err != nil {
		return err
	}
	config := c.runtime().config(runtimeOptions{overlay: overlay, socket: c.runtimeSocket(), cdiDirs: c.cdiDirs()})
	dir := c.machineConfigDir(name)
	if err := writeFiles(dir, map[string][]byte{c.runtime().configFile(): []byte(config)}); err != nil {
		return err
	}
	network := cniConfig(c.plan.podCIDR(node).String())
	return writeFiles(filepath.Join(dir, filepath.Base(cniDir)), map[string][]byte{"10-localcluster.conflist": []byte(network)})
}

func (c *Cluster) writeSpec(spec machine.Spec) error {
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the machine %s: %w", spec.Name, err)
	}
	dir := c.machineDir(spec.Name)
	if err := os.MkdirAll(filepath.Join(dir, machine.LogDir), 0o755); err != nil {
		return fmt.Errorf("make the log directory: %w", err)
	}
	return writeFiles(dir, map[string][]byte{machine.SpecFile: data})
}

func hasKernelLog() bool {
	f, err := os.Open("/dev/kmsg")
	if err != nil {
		return false
	}
	_ = f.Close()
	return true
}

// canOverlay reports whether the state directory's file system can carry overlays. An overlay
// itself, as in a container, can't.
func (c *Cluster) canOverlay(machineName string) (bool, error) {
	dir := filepath.Join(c.machineDir(machineName), "overlay-probe")
	defer os.RemoveAll(dir)
	for _, part := range []string{"lower", "upper", "work", "merged"} {
		if err := os.MkdirAll(filepath.Join(dir, part), 0o755); err != nil {
			return false, fmt.Errorf("probe overlayfs: %w", err)
		}
	}
	merged := filepath.Join(dir, "merged")
	options := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", dir)
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		return false, nil // the error is the answer
	}
	if err := unix.Unmount(merged, unix.MNT_DETACH); err != nil {
		return false, fmt.Errorf("unmount the overlayfs probe: %w", err)
	}
	return true, nil
}
