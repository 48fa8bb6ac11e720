package obstacle

// nodes returns the obstacles to a prepare that lie in the node.
func nodes() []Obstacle { //nolint:funlen // a table
	return []Obstacle{
		{
			Texts: []string{
				"the MPS supervisor of this node does not answer", "wait for the MPS supervisor's report", "wait until the MPS supervisor reports what it has done",
				"an MPS daemon that no claim needs may still be on GPU",
			},
			Means: "the claim waits for the start or the end of an MPS daemon, and the supervisor's pod on the node doesn't exist or isn't ready",
			Do: "See the supervisor's pod: `kubectl get pods -n NAMESPACE -l app.kubernetes.io/component=mps -o wide`; with `mps.enabled=false` there is none. " +
				"Meanwhile pods with shares don't start, and don't end if a daemon has to be stopped.",
		},
		{
			Texts: []string{"this driver installation has no"},
			Means: "a program of the driver is missing, such as nvidia-cuda-mps-control",
			Do:    "Install the package that contains it: for MPS nvidia-cuda-mps on Debian, nvidia-compute-utils-… on Ubuntu.",
		},
		{
			Clear: true,
			Texts: []string{
				"and MPS daemons would end with the container", "or daemons would end with this container",
				"starting a daemon outside this container's cgroup needs Linux 5.7", "MPS daemons can't be watched and ended on this node",
			},
			Means: "the MPS supervisor can't run daemons that survive its own container",
			Do:    "The message says what it needs: a newer kernel, the host's cgroups, or `cgroupsPerQOS: true` in the kubelet's configuration.",
		},
		{
			Clear: true,
			Texts: []string{"free some space there; nothing was lost", "the file system was mounted read-only or became so after an error", "the directory was removed while the plugin uses it"},
			Means: "the journal can't be written; nothing was lost",
			Do:    "Free space in the plugin's data directory (/var/lib/tessera), or do what the message says.",
		},
		{
			Texts: []string{"the host's directory was removed while it was mounted here", "write CDI specification", "create CDI directory", "create the mark of a claim"},
			Means: "what containers are started from can't be written",
			Do:    "Free space, or repair the directory `node.cdiDir` or `node.dataDir` on the node.",
		},
		{
			Clear: true,
			Texts: []string{"the host mounts all directories for it noexec", "choose a directory for the hook program"},
			Means: "the program that the container runtime runs for each container with a GPU couldn't be started",
			Do:    "Choose a `node.dataDir` where programs can be started.",
		},
		{
			Texts: []string{"driver file ", "no longer exists on the host"},
			Means: "files of the driver are being replaced, or were removed",
			Do:    "The claim is prepared when the driver's installation is complete.",
		},
		{
			Texts: []string{
				"no NVIDIA driver on this host", "no NVIDIA driver at the --driver-root", "the NVIDIA driver isn't there now", "this node has no working NVIDIA driver now",
				"NVIDIA kernel driver is not loaded", "NVML library cannot be loaded", "the driver's kernel module is not loaded, or has no MIG",
			},
			Means: "the node has no driver, or it is being replaced",
			Do:    "The node's GPUInventory says what was found: `kubectl get gpuinventory NODE -o yaml`.",
		},
		{
			Clear: true,
			Texts: []string{"the loaded kernel driver has another version than the library"},
			Means: "the driver was updated, and its kernel module is still the old one",
			Do:    "Reload the module, or reboot the node.",
		},
		{
			Texts: []string{"no permission (MIG is root's"},
			Means: "the plugin may not create MIG partitions",
			Do:    "The plugin has to run as root and privileged, as the chart has it.",
		},
		{
			Texts: []string{"no claim is prepared here:", "another DRA driver is alive on this node under the name"},
			Means: "another driver serves the node's GPUs, and came after the claim was allocated",
			Do:    "Remove the other driver from the node, or delete the pod so that its claim is allocated on another one.",
		},
		{
			Texts: []string{"not a name of this driver", "not a name of an MPS share", "not a name of a replica", "is no device this version knows"},
			Means: "the plugin is older than the controller that has offered the device",
			Do:    "Wait until the rollout of the plugin has reached the node.",
		},
		{
			Foreign: true,
			Texts:   []string{"DRA driver gpu.nvidia.com is not registered", "plugin name gpu.nvidia.com not found in the list of registered DRA plugins"},
			Means:   "the node's plugin doesn't run, or the kubelet hasn't registered it",
			Do:      "`kubectl get pods -n NAMESPACE -l app.kubernetes.io/component=node -o wide` shows the plugin's pod. The kubelet tries again by itself.",
		},
	}
}
