package obstacle

// moments returns the obstacles to a prepare that end by themselves.
func moments() []Obstacle { //nolint:funlen // a table
	return []Obstacle{
		{
			Texts: []string{"which is on its way out", "and the kubelet did not unprepare it within"},
			Means: "an ended pod's claim has the device until its last container on the node has ended",
			Do:    "The kubelet tries again. If it lasts, look for a pod that is stuck in Terminating, and for the event `DevicesStillInUse`.",
		},
		{
			Texts: []string{"its GPUs were lost when the kubelet unprepared it, and containers that have its devices still run"},
			Means: "the GPU was lost for a moment, and processes of the claim that had it are left; the message names them",
			Do:    "It ends with these processes, or when the driver is loaded again: see `DevicesStillInUse`.",
		},
		{
			Texts: []string{"ask the API server about it", "its journal record can't be read"},
			Means: "another claim has the device, and whether it still needs it isn't known",
			Do:    "It ends when the API server answers. After `can't be read`, the GPU's condition `StateUnreadable` says how.",
		},
		{
			Clear: true,
			Texts: []string{"the GPU is divided for another claim", " is in the way, and ", "delete that claim's pods, or delete this pod so that its claim is allocated again", "which may be leaving"},
			Means: "another claim has a partition of the GPU where this claim's device belongs, or engines that it needs",
			Do:    "If that claim isn't being released, delete its pods, or this one so that its claim is allocated again.",
		},
		{
			Texts: []string{"the claim was allocated again"},
			Means: "the claim was deallocated while the kubelet had it prepared",
			Do:    "Delete the pod; the claim can be prepared when the kubelet has unprepared it.",
		},
		{
			Clear: true,
			Texts: []string{"the claim was unprepared while it was being prepared"},
			Means: "the pod was deleted meanwhile",
			Do:    "Nothing.",
		},
		{
			Texts: []string{
				"wait for another operation on", "wait until the driver can be used", "GPU is being changed", "wait for the end of what claims shared the GPU through",
				"wait until claims that shared the GPU have left it as it was", "MPS daemons that no claim needs still run",
				"wait until programs that didn't find MPS daemon",
			},
			Means: "another claim of the GPU is being prepared or released, or the GPU is being reset",
			Do:    "If it lasts for minutes, the plugin's log says what is in progress.",
		},
		{
			Texts: []string{"of the MPS daemon doesn't exist on the host", "which MIG device ", "no claim needs MPS daemon"},
			Means: "an MPS daemon or a partition of the claim has gone just now",
			Do:    "The next try starts or creates it again.",
		},
		{
			Texts: []string{" now, was "},
			Means: "the driver was loaded again just now, and its device nodes have other numbers",
			Do:    "The next try uses the new ones.",
		},
		{
			Texts: []string{"no claim is prepared before the API server has shown Node", "the GPUs of this node have not been read yet"},
			Means: "the plugin has just started",
			Do:    "If it lasts, the plugin can't reach the API server or the driver: see its log.",
		},
		{
			Texts: []string{"the claim is not allocated: the scheduler has to give it devices first"},
			Means: "the claim was deallocated meanwhile",
			Do:    "If it lasts, delete the pod.",
		},
		{
			Foreign: true,
			Texts:   []string{"retrieve claim ", "fetch ResourceClaim "},
			Means:   "the plugin or the kubelet can't read the claim from the API server, or it is gone",
			Do:      "It ends when the API server answers. If the claim is gone, delete the pod.",
		},
		{
			Foreign: true,
			Texts:   []string{" got replaced", "old ResourceClaim with same name ", " is being unprepared"},
			Means:   "an earlier claim of the same name isn't released yet, perhaps because its pod was force-deleted",
			Do:      "It ends when that claim is released.",
		},
		{
			Foreign: true,
			Texts:   []string{" is not allowed to use ResourceClaim "},
			Means:   "the claim isn't reserved for the pod: it was allocated for another one",
			Do:      "Delete the pod; a new one is scheduled with its claim.",
		},
		{
			Foreign: true,
			Texts:   []string{"context deadline exceeded", "DeadlineExceeded"},
			Means:   "the plugin had no answer within the kubelet's 45 seconds",
			Do:      "If it lasts, the plugin's log says for what it waits; `nvidia-smi` on the node shows whether the driver hangs.",
		},
		{
			Foreign: true,
			Texts:   []string{"code = Unavailable"},
			Means:   "the plugin is being restarted",
			Do:      "If it lasts, see the plugin's pod and log.",
		},
	}
}
