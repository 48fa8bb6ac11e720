package obstacle

// daemons returns what keeps programs of started containers waiting and lies in the device.
func daemons() []Obstacle {
	return []Obstacle{
		{
			Texts: []string{
				"MPSDaemonFailed", "the MPS server ended as soon as it had started: another process may have the GPU",
				"the control daemon has no MPS server and starts none", "takes no clients yet, it is",
			},
			Means: "event of a ResourceClaim, condition of a GPU: an MPS daemon doesn't stay up, doesn't answer, or has no server, so that programs wait or fail",
			Do:    "The supervisor starts it again. If it lasts, `nvidia-smi` on the node shows whether another process has the GPU; the supervisor's log says more. If the daemon doesn't answer, delete the pods that share the GPU.",
		},
	}
}

// runtimes returns what keeps the containers of prepared claims from starting and lies in the
// node.
func runtimes() []Obstacle {
	return []Obstacle{
		{
			Foreign: true,
			Texts:   []string{"unresolvable CDI devices"},
			Means:   "the container runtime doesn't read the directory where the plugin writes CDI specifications, or CDI is off",
			Do:      "`node.cdiDir` must be one of the runtime's CDI directories. In containerd 1.7, `enable_cdi = true` switches CDI on; from 2.0 on it is on.",
		},
		{
			Foreign: true,
			Texts:   []string{"nvidia-cdi-hook", "error running createContainer hook", "error running hook"},
			Means:   "the program that prepares the driver's libraries in containers failed, or can't be started",
			Do:      "The message ends with what it said. `kubelet-plugin doctor` in the plugin's pod says whether the host mounts its directory noexec (`cdi-hook-noexec`); look for denials of SELinux or AppArmor, too. `permission denied` in a pod with `hostUsers: false`: a directory above the program isn't open to every user.",
		},
		{
			Foreign: true,
			Texts: []string{
				"Node didn't have enough resource: nvidia.com/", "cannot allocate unregistered device nvidia.com/", "cannot allocate unhealthy devices nvidia.com/",
			},
			Means: "the pod asks for `nvidia.com/gpu` or the like in its limits, and the kubelet looks for the node's device plugin, which has gone or isn't back after a boot; or it was allocated a device by DRA, and the kubelet lacks the feature gate DRAExtendedResource",
			Do:    "Delete the pod, which has failed (`OutOfnvidia.com/gpu`, `UnexpectedAdmissionError`), and see docs/user/install.md#extended-resources.",
		},
		{
			Foreign: true,
			Texts:   []string{"endpoint not found in cache for a registered resource"},
			Means:   "the pod asks for `nvidia.com/gpu` or the like in its limits and got a device by DRA, and the kubelet still looks for the device plugin that the node had (`CreateContainerConfigError`)",
			Do:      "Use a pod with a claim of its own, or repair the node: docs/user/migrate.md#kubelets-that-had-a-device-plugin.",
		},
		{
			Foreign: true,
			Texts:   []string{"failed to stat CDI host device", "error gathering device information", "failed to fulfil mount request"},
			Means:   "a device node or a file of the driver that the claim was prepared with is gone",
			Do: "While the driver is being replaced, it comes back. `kubelet-plugin doctor` in the plugin's pod names what is missing (`cdi-path-missing`). " +
				"If it lasts, delete the pod.",
		},
	}
}

// pods returns what keeps containers from starting and lies in the pod.
func pods() []Obstacle {
	return []Obstacle{
		{
			Foreign: true,
			Texts:   []string{"/tmp/nvidia-mps"},
			Means:   "the pod mounts a volume read-only at /tmp, where the directory of the MPS daemon belongs",
			Do:      "Mount it writable, an `emptyDir` for example; a read-only root file system doesn't matter.",
		},
		{
			Foreign: true,
			Texts:   []string{"error creating device nodes: mount src=/dev/"},
			Means:   "the pod has a user namespace (`hostUsers: false`), and the device node that the message names isn't in the host's /dev",
			Do:      "Leave `hostUsers` out, or make the node on the host, as docs/user/security.md#user-namespaces says.",
		},
	}
}
