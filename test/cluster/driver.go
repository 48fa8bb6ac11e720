package cluster

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/test/cluster/machine"
	"github.com/tessera-dra/tessera/test/cluster/platform"
)

const (
	// driverComponent is the simulated NVIDIA driver of a platform's node: it is there
	// as long as the component runs.
	driverComponent = "nvidia-driver"
	// devicePluginComponent is a device plugin of nvidia.com/gpu.
	devicePluginComponent = "nvidia-device-plugin"

	driverScript  = "nvidia-driver.sh"
	driverMachine = "nvidia-machine.yaml"
	// driverLoaded is there once the driver has been loaded since the machine was switched on.
	driverLoaded = "/run/nvidia-driver-loaded"

	devicePluginSocket = "/var/lib/kubelet/device-plugins/kubelet.sock" // wherever the kubelet's root is
)

// driverComponents are the components of a platform's node that belong to its GPUs.
func (c *Cluster) driverComponents(env []string) []machine.Component {
	var components []machine.Component
	if c.hasDriver() {
		// Mounts that the driver makes are seen by all, options that it changes by itself only.
		args := []string{"unshare", "--mount", "--propagation=unchanged", "/bin/sh", configDir + "/" + driverScript}
		components = append(components, machine.Component{Name: driverComponent, Args: args, Env: env})
	}
	if c.platform.Node.DevicePlugin {
		components = append(components, machine.Component{
			Name: devicePluginComponent, Args: []string{program("deviceplugin"), "nvidia.com/gpu", strconv.Itoa(c.platform.Node.Driver.GPUs())}, Env: env,
			WaitFor: []string{"unix://" + devicePluginSocket},
		})
	}
	return components
}

// driverFiles are the files of a node's configuration that its driver is started with.
func driverFiles(p platform.Node, node string) map[string][]byte {
	driver := p.Driver
	if driver.None {
		return nil
	}
	files := map[string][]byte{}
	hardware := driver.Machine
	if strings.Contains(hardware, "\n") {
		files[driverMachine] = []byte(hardware)
		hardware = configDir + "/" + driverMachine
	}
	files[driverScript] = []byte("set -e\n" + writable(p.Mounts) + driverCommands(driver, hardware, node))
	return files
}

// writable are the commands that let the driver's files be written where the platform has
// them in its image, which is read-only when it runs.
func writable(mounts []platform.Mount) string {
	var b strings.Builder
	for _, m := range mounts {
		if slices.Contains(m.Options, "ro") {
			fmt.Fprintf(&b, "mount -o remount,bind,rw %s\n", m.Path)
		}
	}
	return b.String()
}

// driverCommands is the shell script of the driver. A machine that was switched off has
// its GPUs' state on disk as it was, and what GPUs forget at a reboot is in it.
func driverCommands(driver platform.Driver, hardware, node string) string {
	flags := fmt.Sprintf("--root=%s --machine=%s --node-name=%s", driver.Root, hardware, node)
	if driver.Libraries != "" {
		flags += " --libraries=" + driver.Libraries
	}
	if driver.Programs != "" {
		flags += " --programs=" + driver.Programs
	}
	if !driver.OwnTree {
		flags += " --kernel=/"
	}
	var b strings.Builder
	fmt.Fprintf(&b, `nvmlsim install %[1]s
if [ ! -e %[3]s ]; then
  nvmlsim reboot --root=%[2]s
fi
`, flags, driver.Root, driverLoaded)
	if driver.LdCache {
		fmt.Fprintf(&b, "mkdir -p /etc/ld.so.conf.d\necho %s > /etc/ld.so.conf.d/nvidia.conf\nldconfig\n", path.Join(driver.Root, driver.Libraries))
	}
	fmt.Fprintf(&b, "touch %s\nexec nvmlsim serve %s\n", driverLoaded, flags)
	return b.String()
}

// hasDriver says that the platform's nodes have a simulated driver.
func (c *Cluster) hasDriver() bool { return c.options.Platform != "" && !c.platform.Node.Driver.None }

// driverReady says that every node that is to have a driver has one.
func (c *Cluster) driverReady(ctx context.Context, _ kubernetes.Interface) bool {
	return !slices.ContainsFunc(c.GPUNodes(), func(node string) bool {
		_, err := c.Exec(ctx, node, "test", "-e", driverLoaded)
		return err != nil
	})
}
