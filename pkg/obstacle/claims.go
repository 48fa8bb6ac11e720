package obstacle

// claims returns the obstacles to a prepare that lie in the claim or its allocation.
func claims() []Obstacle { //nolint:funlen // a table
	return []Obstacle{
		{
			Texts: []string{": configuration in the "},
			Means: "a `config` for this driver has an unknown field, a wrong value, or asks for what the device can't do; the message names the field and what is allowed",
			Do:    "Correct it in the claim, its template or the DeviceClass, and create the claim again.",
		},
		{
			Clear: true,
			Texts: []string{"a container reaches one MPS daemon only"},
			Means: "one request was allocated shares of two GPUs, or a share and a whole GPU",
			Do:    "Make a request for each, and name one in each container, or have all shares cut from one GPU as the message says.",
		},
		{
			Clear: true,
			Texts: []string{"an MPS daemon reaches one MIG device or several whole GPUs", "one MPS daemon can serve several whole GPUs, or one MIG partition"},
			Means: "a claim with strategy MPS has several partitions, or a partition and a GPU",
			Do:    "Use a claim for each.",
		},
		{
			Clear: true,
			Texts: []string{"have different configurations for MPS"},
			Means: "requests of a claim have different limits for the one MPS daemon that it has",
			Do:    "Use two claims, or one configuration with `defaultPerDevicePinnedMemoryLimit`.",
		},
		{
			Clear: true,
			Texts: []string{
				"have the GPU's SharingPolicy offer it otherwise", "MPS has limits only on GPUs of compute capability", "NVML doesn't say how much memory the GPU has",
				"too little memory for MPS shares",
			},
			Means: "the GPU can't have MPS shares with limits",
			Do:    "Plan it `timeSliced` or `exclusive` in its SharingPolicy, and delete the claim.",
		},
		{
			Clear: true,
			Texts: []string{"the allocation doesn't say how much memory of it is the claim's"},
			Means: "the scheduler has allocated a share without a size: it lacks a feature gate",
			Do:    "Set `DRAConsumableCapacity` on API server and scheduler, and delete the claim so that it is allocated again.",
		},
		{
			Clear: true,
			Texts: []string{"and an MPS share has at least 1Mi"},
			Means: "the claim asks for less memory than a share can have",
			Do:    "Ask for more, and create the claim again.",
		},
		{
			Texts: []string{"of the same claim; "},
			Means: "two requests of the claim have one device, which can't be told apart in containers",
			Do:    "Delete the claim and create it again.",
		},
		{
			Clear: true,
			Texts: []string{"the length of a time slice can't be set on this GPU with this driver"},
			Means: "the GPU is older than Volta, or in a virtual machine that doesn't support it",
			Do:    "Ask for interval `Default`, or for none.",
		},
		{
			Texts: []string{"there is no such MIG device now, and admin access never makes one"},
			Means: "a claim with `adminAccess` was allocated a partition that no claim has",
			Do:    "Narrow its selectors to devices in use, by `parentUUID` and `placement`.",
		},
		{
			Clear: true,
			Texts: []string{"a device is never prepared for two claims"},
			Means: "the scheduler and this node disagree about which claim has the device, which is never prepared for two",
			Do:    "Delete the pods of the claim that the message names, or delete this pod so that its claim is allocated again.",
		},
		{
			Clear: true,
			Texts: []string{" there is for shares "},
			Means: "more memory of shares is allocated than the GPU has, mostly because a pod was force-deleted",
			Do:    "While one of the claims that the message names is being released, the kubelet tries again; otherwise delete their pods, or this one.",
		},
		{
			Texts: []string{"the claim has no device of driver"},
			Means: "the claim was allocated devices of other nodes or drivers only",
			Do:    "Delete the pod so that its claim is allocated again.",
		},
		{
			Texts: []string{"retrying can't help"},
			Means: "the claim asks for what it can't be given; the message says what",
			Do:    "Correct that, and create the claim again.",
		},
	}
}
