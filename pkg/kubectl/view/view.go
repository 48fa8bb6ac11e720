// Package view is the model of the use of a cluster's GPUs: which claim and pods have
// which part of which GPU, its conditions and taints, and which devices still fit.
//
// It is pure: the same objects give the same model. It reads objects of
// resource.k8s.io/v1; clients translate those of older servers. `kubectl gpu` draws
// from it, and `-o json` prints its JSON: fields are added, never renamed.
package view

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Cluster has the nodes with GPUs, by name.
type Cluster struct {
	Nodes []Node `json:"nodes"`
}

// Node has the GPUs of one node, by index.
type Node struct {
	Name string `json:"name"`
	// DriverVersion is NVIDIA's, empty where the node's plugin reported none.
	DriverVersion string `json:"driverVersion,omitempty"`
	// Rank is how little the scheduler should like the node: "rank 1", "rank 2", "rank 4", "reserve" or
	// "hard reserve"; absent for a node without such taints, and where Nodes can't be read.
	Rank string `json:"rank,omitempty"`
	// Problems are sentences about the node: why it offers nothing, say.
	Problems []string `json:"problems,omitempty"`
	GPUs     []GPU    `json:"gpus"`
}

// GPU is one physical GPU.
type GPU struct {
	UUID string `json:"uuid,omitempty"`
	// Device is the name of the whole GPU's device; all names of its parts begin with it.
	Device string `json:"device"`
	// Index is NVML's.
	Index int `json:"index"`
	// Model is the product's name as NVML prints it.
	Model       string `json:"model,omitempty"`
	MemoryBytes int64  `json:"memoryBytes,omitempty"`
	// MemorySlices is how many parts MIG divides the memory into; 0 without MIG.
	MemorySlices int `json:"memorySlices,omitempty"`
	// Policy is the SharingPolicy whose status lists the GPU. A status lists 16 GPUs of
	// each of 32 nodes.
	Policy string `json:"policy,omitempty"`
	// Offered: devices of the GPU are published. Where they aren't, nothing of it can
	// be allocated.
	Offered bool `json:"offered"`
	// Conditions are what is wrong with the GPU.
	Conditions []Condition `json:"conditions,omitempty"`
	// Taints of the GPU's devices, each once.
	Taints []Taint `json:"taints,omitempty"`
	// Instances are MIG instances that others than this driver made.
	Instances []Instance `json:"instances,omitempty"`
	// Uses are what claims have of the GPU, by placement, device and claim.
	Uses []Use `json:"uses"`
	// Fits counts the claims that still fit, by kind of device: the whole GPU first, then
	// by size. Kinds of which none fits are listed with 0.
	Fits []Fit `json:"fits"`
}

// Condition is something wrong with a GPU, as its GPUInventory says.
type Condition struct {
	Type    string       `json:"type"`
	Since   *metav1.Time `json:"since,omitempty"`
	Message string       `json:"message,omitempty"`
}

// Taint of a device.
type Taint struct {
	Key    string       `json:"key"`
	Value  string       `json:"value,omitempty"`
	Effect string       `json:"effect"`
	Since  *metav1.Time `json:"since,omitempty"`
}

// Placement is a range of memory slices: [Start, Start+Size).
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Instance is a MIG instance that others made.
type Instance struct {
	UUID      string    `json:"uuid,omitempty"`
	Profile   string    `json:"profile"`
	Placement Placement `json:"placement"`
}

// Use is a device, or a part of one, that a claim has.
type Use struct {
	Device string `json:"device"`
	// Type is gpu, mig, mps or timeslice.
	Type string `json:"type"`
	// Profile of the partition that the device is, or is a share of.
	Profile string `json:"profile,omitempty"`
	// Placement of that partition; absent for the whole GPU, its shares and replicas, and
	// where it isn't known.
	Placement *Placement `json:"placement,omitempty"`
	// Count is among how many equal shares or replicas this is one, and Number which,
	// from 0; Count is 0 where each claim chooses a size.
	Count  int `json:"count,omitempty"`
	Number int `json:"number,omitempty"`
	// MemoryBytes is the limit of an MPS share, the memory of other devices; 0 where it
	// isn't known.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// ThreadPercentage is the limit of an MPS share; 0 where there is none.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// ShareID distinguishes the allocations of a device that has several.
	ShareID string `json:"shareID,omitempty"`
	// AdminAccess: the claim watches the device, and others can have it too.
	AdminAccess bool `json:"adminAccess,omitempty"`
	// Leftover: the SharingPolicy doesn't offer such a device any more; it goes with the
	// claim.
	Leftover bool  `json:"leftover,omitempty"`
	Claim    Claim `json:"claim"`
	// Pods that use the claim, by name: those for which it is reserved, and those of its
	// PodGroups, as far as they are known.
	Pods []Pod `json:"pods,omitempty"`
	// PodGroups for which the claim is reserved.
	PodGroups []string `json:"podGroups,omitempty"`
}

// Users names those who use the claim: its pods, or the PodGroups if no pod is known; none
// while no pod uses it.
func (u *Use) Users() []string {
	var out []string
	for _, p := range u.Pods {
		out = append(out, p.Name)
	}
	if len(out) == 0 {
		for _, g := range u.PodGroups {
			out = append(out, "podgroup/"+g)
		}
	}
	return out
}

// Claim is a ResourceClaim.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// Pod is a pod that uses a claim.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
	// Phase is empty where the pod wasn't found.
	Phase string `json:"phase,omitempty"`
}

// Fit is how many more claims for a kind of device the GPU has room for.
type Fit struct {
	// Type is gpu, mig, mps or timeslice.
	Type string `json:"type"`
	// Profile of a partition, or of the partition that a share is of.
	Profile string `json:"profile,omitempty"`
	// MemoryBytes that each claim gets; of a share whose size claims choose, the size of
	// a claim that doesn't say. 0 where it isn't limited.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// MaxMemoryBytes is the largest share that a claim can choose now; absent where
	// claims don't choose.
	MaxMemoryBytes int64 `json:"maxMemoryBytes,omitempty"`
	// Count is how many claims, each for one such device and nothing else, the
	// scheduler would find room for one after the other.
	Count int `json:"count"`
}
