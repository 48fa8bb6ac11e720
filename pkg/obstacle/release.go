package obstacle

// releases returns what keeps devices of ended pods from the next ones.
func releases() []Obstacle {
	return []Obstacle{
		{
			Texts: []string{"DevicesStillInUse", "still run on this node"},
			Means: "event of a ResourceClaim: its pod has ended, and a process of its containers hasn't; the message names it. Until then no other claim gets the devices",
			Do: "Look at the process on the node (`ps -o pid,stat,wchan PID`): one in state D hangs in the driver, and `nvidia-smi` or `dmesg` says more. " +
				"If it never ends, reboot the node. Where the GPUs are lost, a reload of the driver ends the wait, too.",
		},
		{
			Class: Device,
			Texts: []string{"destroy MIG instance"},
			Means: "the partition of an ended pod can't be destroyed",
			Do:    "End what uses it, as the message says.",
		},
		{
			Class: Node,
			Texts: []string{"stop what the claim shared", "stop the MPS daemon", "keep coming back", "doesn't end though it was killed"},
			Means: "the MPS daemon of ended pods doesn't end",
			Do:    "The supervisor has to answer. A process that can't be killed hangs in the driver: `dmesg` on the node, and reboot it.",
		},
		{
			Class: Node,
			Texts: []string{"remove the CDI spec of the claim", "delete the mark of the claim", "remove the journal record of"},
			Means: "a file of the claim can't be removed",
			Do:    "Repair the file system of `node.dataDir` or `node.cdiDir` on the node.",
		},
		{
			Class: Device,
			Texts: []string{"may still hold the GPU"},
			Means: "condition `StateUnreadable` of a GPU: the journal's file of a claim can't be read",
			Do:    "It ends when the kubelet unprepares the claim: delete the claim's pods.",
		},
	}
}
