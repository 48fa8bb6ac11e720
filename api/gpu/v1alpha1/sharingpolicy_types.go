package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SharingPolicy determines how the GPUs it selects are offered. The admin writes the
// spec, the controller the status.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=shp,categories=tessera
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Priority",type=integer,JSONPath=`.spec.priority`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.nodes`
// +kubebuilder:printcolumn:name="GPUs",type=integer,JSONPath=`.status.gpus`
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Applied",type=string,JSONPath=`.status.conditions[?(@.type=="Applied")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.status=="False")].reason`
// +kubebuilder:printcolumn:name="Waiting",type=integer,priority=1,JSONPath=`.status.waitingDevices`
// +kubebuilder:printcolumn:name="Withheld",type=integer,priority=1,JSONPath=`.status.withheldGPUs`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SharingPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SharingPolicySpec   `json:"spec"`
	Status SharingPolicyStatus `json:"status,omitempty"`
}

// SharingPolicySpec selects GPUs and plans how they are offered.
type SharingPolicySpec struct {
	// priority decides where several policies select one GPU: the highest
	// wins, then the older policy, then the one whose name sorts first.
	// +optional
	// +kubebuilder:default=0
	Priority int32 `json:"priority,omitempty"`
	// nodeSelector selects nodes by their labels. Empty: all nodes.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In', 'NotIn', 'Exists', 'DoesNotExist'])",message="matchExpressions: operator must be In, NotIn, Exists or DoesNotExist"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, (e.operator in ['In', 'NotIn']) == (has(e.values) && size(e.values) > 0))",message="matchExpressions: In and NotIn need values, Exists and DoesNotExist take none"
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`
	// gpuSelector selects GPUs with a CEL expression in the language of
	// DeviceClass selectors, on the attributes that a whole GPU has:
	// device.attributes["gpu.nvidia.com"].productName.startsWith("NVIDIA H100").
	// Empty: all GPUs. The controller compiles it: the condition Accepted says
	// when that fails.
	// +optional
	// +kubebuilder:validation:MaxLength=10240
	GPUSelector string `json:"gpuSelector,omitempty"`
	// plan for the selected GPUs; exactly one of its fields is set.
	Plan Plan `json:"plan"`
	// health says what more is done about selected GPUs that are unhealthy, besides
	// that new claims don't get those that can't be used.
	// +optional
	Health HealthPolicy `json:"health,omitzero"`
}

// HealthPolicy adds to the treatment of unhealthy GPUs. Pods are ended only where the API
// server stores taints of devices.
type HealthPolicy struct {
	// evict ends the pods that use a GPU which is lost, or needs a reset of its bus or a
	// reboot of its node, unless they tolerate the taint gpu.nvidia.com/unhealthy.
	// +optional
	Evict bool `json:"evict,omitempty"`
	// rowRemapPending is what is done while rows of a GPU's memory wait for a reset to be
	// replaced: None only says so, NoSchedule keeps claims for the whole GPU off it: its
	// device has a taint or, where taints aren't used, is withdrawn.
	// +optional
	// +kubebuilder:default=None
	RowRemapPending HealthEffect `json:"rowRemapPending,omitempty"`
	// reset says who resets a GPU whose driver asks for a reset: Never leaves it to an
	// admin, WhenIdle lets the node's plugin reset it once no claim has any of it.
	// +optional
	// +kubebuilder:default=Never
	Reset ResetPolicy `json:"reset,omitempty"`
	// onPrepareFailure is what is done when a claim can't be given the device that it was
	// allocated, because of the device: Taint keeps new claims off it, and off all devices that
	// need the same silicon, for a minute or more. Evict also ends the claim's pods, so that
	// their owner makes others, which get another device: not those of a device that
	// several claims can have, nor those that tolerate the taint gpu.nvidia.com/unhealthy. A
	// pod without an owner isn't made again.
	// +optional
	// +kubebuilder:default=Taint
	OnPrepareFailure PrepareFailurePolicy `json:"onPrepareFailure,omitempty"`
}

// PrepareFailurePolicy says what is done when a claim can't be given its device.
//
// +kubebuilder:validation:Enum=Taint;Evict
type PrepareFailurePolicy string

// EvictOnPrepareFailure also ends the pod of the claim.
const EvictOnPrepareFailure PrepareFailurePolicy = "Evict"

// ResetPolicy says whether a node's plugin resets GPUs.
//
// +kubebuilder:validation:Enum=Never;WhenIdle
type ResetPolicy string

// ResetWhenIdle lets the plugin reset a GPU that no claim has any of.
const ResetWhenIdle ResetPolicy = "WhenIdle"

// HealthEffect is the effect of a taint that a policy chooses.
//
// +kubebuilder:validation:Enum=None;NoSchedule
type HealthEffect string

// NoSchedule keeps new claims off a GPU.
const NoSchedule HealthEffect = "NoSchedule"

// Plan determines the devices that a GPU is offered as. Exactly one field is set.
//
// +kubebuilder:validation:XValidation:rule="[has(self.exclusive), has(self.partitioned), has(self.mps), has(self.timeSliced)].filter(x, x).size() == 1",message="exactly one of exclusive, partitioned, mps, timeSliced must be set"
type Plan struct {
	// exclusive: only as a whole.
	// +optional
	Exclusive *ExclusivePlan `json:"exclusive,omitempty"`
	// partitioned: as a whole, or cut into MIG partitions on demand.
	// +optional
	Partitioned *PartitionedPlan `json:"partitioned,omitempty"`
	// mps: as a whole, or as MPS shares with limits.
	// +optional
	MPS *MPSPlan `json:"mps,omitempty"`
	// timeSliced: as a whole, or as replicas that take turns.
	// +optional
	TimeSliced *TimeSlicedPlan `json:"timeSliced,omitempty"`
}

// ExclusivePlan has no parameters.
type ExclusivePlan struct{}

// PartitionedPlan cuts GPUs into MIG partitions.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.profiles) && size(self.profiles) > 0 && has(self.layout) && size(self.layout) > 0)",message="profiles (cut on demand) and layout (a fixed partitioning) exclude each other"
type PartitionedPlan struct {
	// profiles that are offered, e.g. 1g.10gb, besides the whole GPU. Those that
	// a GPU hasn't are passed over, so that one policy can serve several models.
	// Empty: those without a suffix that make less than the whole of the GPU.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Pattern=`^[1-9][0-9]?g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)*$`
	// +kubebuilder:validation:items:MaxLength=63
	Profiles []string `json:"profiles,omitempty"`
	// layout is a fixed partitioning, e.g. ["3g.40gb", "3g.40gb"]: these
	// partitions are offered, at fixed places, and the GPU is not offered whole.
	// They are made on demand all the same. It needs no shared counters of the
	// API server.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Pattern=`^[1-9][0-9]?g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)*$`
	// +kubebuilder:validation:items:MaxLength=63
	Layout []string `json:"layout,omitempty"`
	// keepWarm is how long an idle partition stays for the next claim of its
	// profile and place, unless its space is needed: 90s, 1h30m. Empty or 0: not
	// at all.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="must be a duration such as 90s or 1h30m, and not negative"
	KeepWarm *metav1.Duration `json:"keepWarm,omitempty"`
	// mps cuts each partition into MPS shares.
	// +optional
	MPS *PartitionMPS `json:"mps,omitempty"`
}

// PartitionMPS cuts a partition into equal MPS shares.
type PartitionMPS struct {
	// shares of each partition.
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=48
	Shares int32 `json:"shares"`
}

// MPSPlan offers MPS shares. Exactly one field is set.
//
// +kubebuilder:validation:XValidation:rule="has(self.shares) != has(self.consumable)",message="exactly one of shares, consumable must be set"
type MPSPlan struct {
	// shares: so many equal ones.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=48
	Shares *int32 `json:"shares,omitempty"`
	// consumable: as large as each claim asks for.
	// +optional
	Consumable *ConsumableMPS `json:"consumable,omitempty"`
}

// ConsumableMPS lets each claim say how much memory it wants.
type ConsumableMPS struct {
	// memoryStep that requests are rounded up to. With servesGPUClass it is the least
	// amount, and requests are rounded up to 1Mi.
	// +optional
	// +kubebuilder:default="1Gi"
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",message="must be a quantity such as 1Gi, and more than 0"
	MemoryStep *resource.Quantity `json:"memoryStep,omitempty"`
	// maxClients at once on one GPU.
	// +optional
	// +kubebuilder:default=16
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=48
	MaxClients *int32 `json:"maxClients,omitempty"`
	// servesGPUClass makes the GPU answer claims of the class gpu.nvidia.com too.
	// A claim that asks for capacity gets a share; one that doesn't gets the whole
	// GPU, also of the class mps.gpu.nvidia.com.
	// +optional
	ServesGPUClass bool `json:"servesGPUClass,omitempty"`
}

// TimeSlicedPlan offers replicas that take turns. Nothing limits what a
// replica uses while it has its turn.
type TimeSlicedPlan struct {
	// replicas of each GPU.
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=64
	Replicas int32 `json:"replicas"`
	// interval of one turn.
	// +optional
	// +kubebuilder:default=Default
	Interval TimeSliceInterval `json:"interval,omitempty"`
}

// TimeSliceInterval is the length of one turn, as nvidia-smi compute-policy
// names it.
//
// +kubebuilder:validation:Enum=Default;Short;Medium;Long
type TimeSliceInterval string

// Time slice intervals.
const (
	DefaultTimeSlice TimeSliceInterval = "Default"
	ShortTimeSlice   TimeSliceInterval = "Short"
	MediumTimeSlice  TimeSliceInterval = "Medium"
	LongTimeSlice    TimeSliceInterval = "Long"
)

// SharingPolicyStatus is the result of the policy. Lists name the
// first few, by name; the numbers count all.
type SharingPolicyStatus struct {
	// observedGeneration of the spec that the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// nodes with at least one GPU under this policy that is published.
	// +optional
	Nodes int32 `json:"nodes"`
	// gpus under this policy that are published: their node's ResourceSlices are
	// there, and say what the policies plan.
	// +optional
	GPUs int32 `json:"gpus"`
	// served are these nodes and GPUs.
	// +optional
	// +listType=map
	// +listMapKey=node
	// +kubebuilder:validation:MaxItems=32
	Served []ServedNode `json:"served,omitempty"`
	// conflicts are policies that won GPUs which this one selects too.
	// +optional
	// +listType=map
	// +listMapKey=policy
	// +kubebuilder:validation:MaxItems=16
	Conflicts []PolicyConflict `json:"conflicts,omitempty"`
	// waitingDevices is how many devices are still offered for the sake of the
	// claims that have them, although this policy's plan wants others.
	// +optional
	WaitingDevices int32 `json:"waitingDevices,omitempty"`
	// waiting are these devices, each once for every claim that has it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Waiting []WaitingDevice `json:"waiting,omitempty"`
	// problems are the parts of the plan that can't be carried out, with remedies.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Problems []PolicyProblem `json:"problems,omitempty"`
	// withheldGPUs is how many GPUs under this policy new claims don't get, or not all that
	// is planned of them, because of a condition of theirs.
	// +optional
	WithheldGPUs int32 `json:"withheldGPUs,omitempty"`
	// withheld lists these GPUs.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Withheld []WithheldGPU `json:"withheld,omitempty"`
	// accepted is the last form of the spec that was accepted. It stays in force
	// while the spec is refused. Absent: no form ever was.
	// +optional
	Accepted *AcceptedForm `json:"accepted,omitempty"`
	// conditions. Accepted: the spec is well-formed. Applied: the spec has GPUs, and
	// all of them are offered as it plans; nothing waits or is withheld, and there is
	// no problem.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AcceptedForm is a spec that was in force.
type AcceptedForm struct {
	// generation of the policy that had this spec.
	Generation int64 `json:"generation"`
	// spec as it was accepted.
	Spec SharingPolicySpec `json:"spec"`
}

// ServedNode is a node with GPUs under a policy.
type ServedNode struct {
	Node string `json:"node"`
	// gpus by their device names, in the order of their indexes.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	GPUs []string `json:"gpus"`
}

// PolicyConflict names a policy that was preferred.
type PolicyConflict struct {
	// policy that won.
	Policy string `json:"policy"`
	// gpus it won.
	GPUs int32 `json:"gpus"`
}

// WaitingDevice is a device that goes when its claims go.
type WaitingDevice struct {
	Node   string `json:"node"`
	Device string `json:"device"`
	// claim that has the device, as namespace/name.
	Claim string `json:"claim"`
}

// PolicyProblem is something of a plan that can't be carried out.
type PolicyProblem struct {
	Message string `json:"message"`
	// gpus that have the problem.
	GPUs int32 `json:"gpus"`
	// example is one of them, as node/device.
	// +optional
	Example string `json:"example,omitempty"`
}

// WithheldGPU is a GPU that new claims don't get, or not all that is planned of it.
type WithheldGPU struct {
	Node string `json:"node"`
	// gpu by its device name, or by its UUID where that names no device.
	GPU string `json:"gpu"`
	// message lists the GPU's conditions that keep new claims off it or parts of it.
	Message string `json:"message"`
}

// Conditions of a SharingPolicy, and their reasons.
const (
	ConditionAccepted = "Accepted"

	ReasonAccepted = "Accepted"
	ReasonInvalid  = "Invalid"

	ConditionApplied = "Applied"

	ReasonApplied = "Applied"
	// ReasonAppliedWithoutWhole: the condition is true. All shares or replicas of the
	// plan are offered, but the whole GPU isn't offered beside them.
	ReasonAppliedWithoutWhole = "AppliedWithoutWholeGPU"
	// ReasonWaiting: claims still have devices that the plan doesn't offer.
	ReasonWaiting = "Waiting"
	// ReasonProblems: a part of the plan can't be carried out.
	ReasonProblems = "Problems"
	// ReasonUnsafeScheduler: less than the plan is offered, because the scheduler
	// of this Kubernetes version would allocate parts of a GPU twice.
	ReasonUnsafeScheduler = "UnsafeScheduler"
	// ReasonNotPublished: GPUs under the policy aren't published, or not yet.
	ReasonNotPublished = "NotPublished"
	// ReasonWithheld: GPUs under the policy are unusable, and new claims don't get them.
	ReasonWithheld = "Withheld"
	// ReasonNoGPUs: no GPU is under the policy.
	ReasonNoGPUs = "NoGPUs"
)

// The most that a SharingPolicy's status lists; the markers repeat them.
const (
	MaxServedNodes    = 32
	MaxServedGPUs     = 16
	MaxConflicts      = 16
	MaxWaitingDevices = 32
	MaxProblems       = 16
	MaxWithheldGPUs   = 16
)

// SharingPolicyList is a list of SharingPolicy.
//
// +kubebuilder:object:root=true
type SharingPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SharingPolicy `json:"items"`
}
