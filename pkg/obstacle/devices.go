package obstacle

// devices returns the obstacles to a prepare that lie in the allocated device.
func devices() []Obstacle { //nolint:funlen // a table
	return []Obstacle{
		{
			Texts: []string{"insufficient resources", "another instance, or missing engines, leave no room"},
			Means: "the hardware refuses to create a MIG partition that should fit",
			Do: "The message lists what is there: compare it with `nvidia-smi mig -lgi` on the node. " +
				"An instance that isn't in both has to be destroyed; if there is none, reset the GPU.",
		},
		{
			Texts: []string{
				"create MIG instance", "the driver made a GPU instance of profile", "shows no MIG device", "no compute instance profile takes all of the GPU instance",
				"the GPU has no such profile", "the profile has no placement",
			},
			Means: "the driver doesn't create a partition that it says it can",
			Do:    "Reset the GPU or reboot the node. If it comes back, try another version of the driver.",
		},
		{
			Clear: true,
			Texts: []string{"which Tessera didn't create, is in the way", "it is divided by others than Tessera"},
			Means: "somebody else has created a MIG instance where the claim's device belongs, just before the claim was prepared",
			Do:    "Destroy it as the message says; the kubelet tries again.",
		},
		{
			Clear: true,
			Texts: []string{"a change of the GPU's MIG mode is pending", "is already pending; reset the GPU or reboot the node"},
			Means: "somebody has changed the MIG mode, which takes effect at the next reset",
			Do:    "Reset the GPU, reboot the node, or undo the change as the message says.",
		},
		{
			Clear: true,
			Texts: []string{"MIG mode is off, and Tessera may not switch it on this GPU", "MIG mode can't be switched here", "an administrator can switch it with nvidia-smi -mig"},
			Means: "the mode was switched off after partitions had been offered",
			Do:    "Switch it on again as the message says; the kubelet tries again.",
		},
		{
			Clear: true,
			Texts: []string{"MIG mode is on, and Tessera didn't switch it on"},
			Means: "somebody has switched the mode on after the whole GPU had been offered",
			Do:    "Switch it off as the message says; the kubelet tries again.",
		},
		{
			Texts: []string{"the driver reported success, but the mode is"},
			Means: "the driver doesn't switch the MIG mode",
			Do:    "Reset the GPU or reboot the node.",
		},
		{
			Texts: []string{" by process ", "NVML lists no process, but a monitor such as DCGM may hold it", " GPU instances, the first "},
			Means: "the driver doesn't change the GPU while a process uses it. The same keeps an ended pod in Terminating",
			Do:    "End the process that the message names, or stop the monitor.",
		},
		{
			Texts: []string{"is not a MIG device: it has no compute instance that takes all of it"},
			Means: "somebody has destroyed a part of the claim's partition",
			Do:    "The next try creates the partition again.",
		},
		{
			Clear: true,
			Texts: []string{"so it isn't known which MIG instances Tessera made"},
			Means: "the journal's file about the GPU can't be read: condition `StateUnreadable`",
			Do:    "It ends when the GPU has no instances: end the pods that use it, and destroy the instances as the message says.",
		},
		{
			Clear: true,
			Texts: []string{"doesn't exist on the host: the driver may not be fully loaded yet"},
			Means: "a device node that containers need is missing: condition `DeviceNodeMissing`",
			Do:    "Run on the node what the message names, or load the module nvidia-uvm at boot.",
		},
		{
			Clear: true,
			Texts: []string{"is not a character device"},
			Means: "something else is in the place of a device node, such as a file that a program wrote there before the driver was loaded",
			Do:    "Remove it on the node; `nvidia-modprobe -c0` creates the device node.",
		},
		{
			Texts: []string{"compute container edits of driver", "describe GPU", "the driver lists no GPU", "the driver lists no such GPU"},
			Means: "what containers need of the driver can't be found out",
			Do:    "If it lasts: `nvidia-smi` on the node, and the GPU's conditions (`kubectl gpu map`).",
		},
		{
			Texts: []string{"find the capability of a MIG instance that was just created", "of the host has no "},
			Means: "the driver doesn't show the device numbers of a MIG partition in /proc/driver/nvidia/capabilities",
			Do:    "If it lasts, reload the driver or reboot the node.",
		},
		{
			Texts: []string{"the claim can be prepared when the GPU answers again", "GPU is lost", "GPU does not respond"},
			Means: "the GPU doesn't answer: condition `Lost`, `NotResponding` or `Unreadable`",
			Do:    "The condition's message says what to do (`kubectl gpu map`).",
		},
		{
			Texts: []string{"this node has no such GPU now", "this node has no GPU"},
			Means: "the claim was allocated a GPU that is gone",
			Do:    "It ends only if the GPU comes back.",
		},
		{
			Texts: []string{" has no MIG", "has no MPS shares", "has no replicas"},
			Means: "the GPU can't be divided any more as when the claim was allocated, perhaps since a driver update",
			Do:    "Trying again doesn't help.",
		},
		{
			Clear: true,
			Texts: []string{"the compute mode of the GPU is"},
			Means: "somebody has set the compute mode in which no process can use the GPU",
			Do:    "Set another as the message says: `nvidia-smi -i UUID -c DEFAULT`.",
		},
		{
			Texts: []string{"nvidia-smi compute-policy"},
			Means: "nvidia-smi can't read or set the time slice that the claim or the policy asks for",
			Do:    "Try the command on the node, or ask for no time slice.",
		},
		{
			Texts: []string{
				"refused to start for", "started and left no pid file", "it ended as soon as it had started",
				"and its log is empty: are the devices there", "the MPS control daemon does not answer", "the MPS control daemon didn't take the limits",
				"start the MPS daemon",
			},
			Means: "an MPS control daemon doesn't start on the device, or doesn't work",
			Do:    "`nvidia-smi` on the node shows whether another process has the GPU; the MPS supervisor's log says more.",
		},
		{
			Texts: []string{"nvmlDevice", "nvmlGpuInstance", "nvmlComputeInstance", "is not a UUID"},
			Means: "a call of NVML failed; the message has the call and NVML's answer",
			Do:    "`nvidia-smi -i UUID` and `dmesg` on the node say more. If it lasts, reset the GPU or reboot the node.",
		},
	}
}
