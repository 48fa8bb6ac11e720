package cluster

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
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
		// Other processes see the driver's mounts, but not the mount options that it changes.
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
	if driver.Hardware == "" {
		return nil
	}
	files := map[string][]byte{}
	hardware := driver.Hardware
	if strings.Contains(hardware, "\n") {
		files[driverMachine] = []byte(hardware)
		hardware = configDir + "/" + driverMachine
	}
	files[driverScript] = []byte("set -e\n" + remountWritable(p.Mounts) + driverCommands(driver, hardware, node))
	return files
}

// remountWritable returns the commands that make read-only file systems writable for the
// driver script only: on the platform these files are part of the image.
func remountWritable(mounts []platform.Mount) string {
	var b strings.Builder
	for _, m := range mounts {
		if slices.Contains(m.Options, "ro") {
			fmt.Fprintf(&b, "mount -o remount,bind,rw %s\n", m.Path)
		}
	}
	return b.String()
}

// driverCommands returns the driver's shell script. The state file of the GPUs survives a
// power-off, so the script runs `nvmlsim reboot` once for each start of the machine.
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

// hasDriver reports whether the platform's nodes have a simulated driver.
func (c *Cluster) hasDriver() bool {
	return c.options.Platform != "" && c.platform.Node.Driver.Hardware != ""
}

// driverReady reports whether every node that is to have a driver has one.
func (c *Cluster) driverReady(ctx context.Context, _ kubernetes.Interface) bool {
	return !slices.ContainsFunc(c.GPUNodes(), func(node string) bool {
		_, err := c.Exec(ctx, node, "test", "-e", driverLoaded)
		return err != nil
	})
}
