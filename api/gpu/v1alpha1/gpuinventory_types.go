package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// GPUInventory lists the GPUs of one node and their health. It is named
// after its Node and owned by it. The node's plugin creates it and writes its
// status, only on change; the controller reads it, and writes the spec.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=gpuinv,categories=tessera
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="GPUs",type=integer,JSONPath=`.status.gpuCount`
// +kubebuilder:printcolumn:name="Model",type=string,JSONPath=`.status.models`
// +kubebuilder:printcolumn:name="Driver",type=string,JSONPath=`.status.driverVersion`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GPUInventory struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GPUInventorySpec   `json:"spec,omitempty"`
	Status GPUInventoryStatus `json:"status,omitempty"`
}

// GPUInventorySpec is the controller's side of the conversation.
type GPUInventorySpec struct {
	// publishRequest is raised by the controller before it publishes this node's
	// ResourceSlices for the first time (unless it saw the first registeredAt being
	// written just before), when they were deleted by somebody else (the kubelet
	// does so when it starts, and when the plugin's socket is gone for about 30 s),
	// and before it deletes the slices of another driver. The slices are written
	// once status.publishResponse has caught up: only a living plugin that is
	// registered with its kubelet can answer.
	// +optional
	// +kubebuilder:validation:Minimum=0
	PublishRequest int64 `json:"publishRequest,omitempty"`
	// gpus has the settings of single GPUs that SharingPolicies ask for.
	// +optional
	// +listType=map
	// +listMapKey=uuid
	// +kubebuilder:validation:MaxItems=128
	GPUs []GPUSpec `json:"gpus,omitempty"`
}

// GPUSpec has the settings of one GPU that a SharingPolicy asks for.
type GPUSpec struct {
	// uuid of the GPU.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^GPU-[0-9A-Fa-f-]+$`
	UUID string `json:"uuid"`
	// keepWarm is how long an idle partition stays for the next claim of its
	// profile.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="must be a duration such as 90s or 1h30m, and not negative"
	KeepWarm *metav1.Duration `json:"keepWarm,omitempty"`
	// timeSlice is the interval of one turn while claims have replicas of the GPU.
	// Absent: the plugin doesn't change the GPU's time slice.
	// +optional
	TimeSlice TimeSliceInterval `json:"timeSlice,omitempty"`
	// reset lets the plugin reset the GPU when its driver asks for that and no claim has
	// any of it. Absent: never.
	// +optional
	Reset ResetPolicy `json:"reset,omitempty"`
}

// GPUInventoryStatus is the plugin's side.
type GPUInventoryStatus struct {
	// publishResponse is the publishRequest that a registered plugin last saw.
	// +optional
	PublishResponse int64 `json:"publishResponse,omitempty"`
	// registeredAt is when the kubelet last registered the plugin. Until it is
	// set, the controller publishes nothing for the node.
	// +optional
	RegisteredAt *metav1.MicroTime `json:"registeredAt,omitempty"`
	// bootID of the kernel when the report was made
	// (/proc/sys/kernel/random/boot_id).
	// +optional
	BootID string `json:"bootID,omitempty"`
	// pluginVersion that made the report.
	// +optional
	PluginVersion string `json:"pluginVersion,omitempty"`
	// driverVersion as NVML prints it, e.g. 580.159.04.
	// +optional
	DriverVersion string `json:"driverVersion,omitempty"`
	// cudaDriverVersion is the newest CUDA the driver serves, e.g. 13.0.
	// +optional
	CUDADriverVersion string `json:"cudaDriverVersion,omitempty"`
	// gpuCount is the length of gpus.
	// +optional
	GPUCount int32 `json:"gpuCount"`
	// models summarizes gpus for people, e.g. "8×NVIDIA H100 80GB HBM3".
	// +optional
	Models string `json:"models,omitempty"`
	// gpus of the node, by index.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=128
	GPUs []GPU `json:"gpus,omitempty"`
	// conditions of the node's GPUs as a whole. Ready: the plugin has a driver
	// and is registered; the controller sets it to False when the plugin doesn't
	// answer a publishRequest. Conflicting: another driver serves the same GPUs.
	// UnidentifiedGPUs, present only while it is True: NVML lists GPUs that can't be
	// identified, and that gpus therefore lacks.
	// DoubleAllocation: the plugin refused a claim whose devices overlap those of
	// another one. Nothing of the node that needs shared counters is offered until the
	// API server's version, which is the reason, is another one; then the controller
	// sets it to False.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// GPU is one physical GPU.
type GPU struct {
	// uuid as NVML prints it: GPU- and 32 hexadecimal digits. A GPU with another UUID isn't
	// offered.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9A-Za-z-]+$`
	UUID string `json:"uuid"`
	// index in NVML's order; it may move on reboot.
	Index int32 `json:"index"`
	// minor is N of /dev/nvidiaN; -1 where NVML doesn't report it.
	Minor int32 `json:"minor"`
	// pciAddress as sysfs spells it, e.g. 0000:07:00.0.
	PCIAddress string `json:"pciAddress"`
	// pcieRoot is the PCIe root complex, e.g. pci0000:00.
	// +optional
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// numaNode, where the host tells.
	// +optional
	NUMANode *int32 `json:"numaNode,omitempty"`
	// productName as NVML prints it.
	ProductName string `json:"productName"`
	// brand as NVML names it.
	// +optional
	Brand string `json:"brand,omitempty"`
	// architecture, e.g. Hopper.
	// +optional
	Architecture string `json:"architecture,omitempty"`
	// cudaComputeCapability, e.g. 9.0.
	// +optional
	CUDAComputeCapability string `json:"cudaComputeCapability,omitempty"`
	// memory in all, as NVML counts it; 0 for a GPU without memory of its own.
	Memory resource.Quantity `json:"memory"`
	// memoryReserved of it the driver keeps for itself; absent where NVML doesn't
	// tell.
	// +optional
	MemoryReserved *resource.Quantity `json:"memoryReserved,omitempty"`
	// eccEnabled is absent on GPUs without ECC.
	// +optional
	ECCEnabled *bool `json:"eccEnabled,omitempty"`
	// virtualizationMode, where NVML tells: none, passthrough, vgpu, host-vgpu,
	// host-vsga.
	// +optional
	VirtualizationMode string `json:"virtualizationMode,omitempty"`
	// fabric the GPU is part of.
	// +optional
	Fabric *Fabric `json:"fabric,omitempty"`
	// nvlink is absent where no NVLink of the GPU has been active.
	// +optional
	NVLink *NVLink `json:"nvlink,omitempty"`
	// addressingMode, where NVML tells: HMM, ATS, None.
	// +optional
	AddressingMode string `json:"addressingMode,omitempty"`
	// mig is absent on GPUs without MIG.
	// +optional
	MIG *MIG `json:"mig,omitempty"`
	// conditions are the problems of this GPU; none means healthy.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []GPUCondition `json:"conditions,omitempty"`
}

// Fabric places a GPU in an NVLink fabric.
type Fabric struct {
	ClusterUUID string `json:"clusterUUID"`
	CliqueID    int32  `json:"cliqueID"`
}

// NVLink says how a GPU is linked to others. A link that goes down for a while
// still counts.
type NVLink struct {
	// links that have been active since the plugin started.
	Links int32 `json:"links"`
	// domain is the same for the GPUs of the node that reach each other over NVLink:
	// nvswitch, or the UUID of one of them. Absent where the links lead to no GPU of
	// the node.
	// +optional
	Domain string `json:"domain,omitempty"`
}

// GPUCondition is one thing wrong with a GPU.
type GPUCondition struct {
	Type string `json:"type"`
	// status is True while the GPU has the condition. The plugin removes a condition
	// that has ended.
	// +optional
	// +kubebuilder:default="True"
	// +kubebuilder:validation:Enum="True";"False";Unknown
	Status metav1.ConditionStatus `json:"status,omitempty"`
	// lastTransitionTime is when the plugin first reported the condition.
	// +optional
	LastTransitionTime *metav1.Time `json:"lastTransitionTime,omitempty"`
	// +optional
	Message string `json:"message,omitempty"`
	// refused are the devices that claims were allocated and could not be given, with the
	// condition PrepareFailed. Devices that need the same silicon are kept from new claims.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=128
	// +kubebuilder:validation:items:MaxLength=63
	Refused []string `json:"refused,omitempty"`
	// retryAt is when the first of the refused devices is offered again, so that one claim
	// tries it. The controller compares it with its own clock.
	// +optional
	RetryAt *metav1.Time `json:"retryAt,omitempty"`
}

// MIG is the Multi-Instance GPU side of a GPU.
type MIG struct {
	// enabled is the current mode. A mode that this driver switched on for a
	// claim, and will switch off after it, counts as off: an inventory doesn't
	// change with claims.
	Enabled bool `json:"enabled"`
	// pending is the mode after the next reset.
	Pending bool `json:"pending"`
	// switchable says that this driver may switch the mode for a claim: never on
	// Ampere, where that needs a reset, nor in guests.
	// +optional
	Switchable bool `json:"switchable,omitempty"`
	// profiles the GPU can be cut into.
	// +optional
	// +listType=map
	// +listMapKey=name
	Profiles []MIGProfile `json:"profiles,omitempty"`
	// instances that others than this driver made. They are never destroyed, and
	// the space that they take isn't offered; each that is a MIG device is offered
	// as it is.
	// +optional
	// +listType=map
	// +listMapKey=gpuInstanceID
	Instances []MIGInstance `json:"instances,omitempty"`
}

// MIGProfile is one way to cut a GPU.
type MIGProfile struct {
	// name, e.g. 1g.18gb.
	Name string `json:"name"`
	// id that NVML's calls take.
	ID           int32             `json:"id"`
	MaxInstances int32             `json:"maxInstances"`
	Memory       resource.Quantity `json:"memory"`
	// +optional
	Multiprocessors int32 `json:"multiprocessors,omitempty"`
	// +optional
	CopyEngines int32 `json:"copyEngines,omitempty"`
	// +optional
	Decoders int32 `json:"decoders,omitempty"`
	// +optional
	Encoders int32 `json:"encoders,omitempty"`
	// +optional
	JPEGEngines int32 `json:"jpegEngines,omitempty"`
	// +optional
	OFAEngines int32 `json:"ofaEngines,omitempty"`
	// placements as ranges of memory slices.
	// +optional
	// +listType=atomic
	Placements []MIGPlacement `json:"placements,omitempty"`
}

// MIGPlacement is the range of memory slices [start, start+size).
type MIGPlacement struct {
	Start int32 `json:"start"`
	Size  int32 `json:"size"`
}

// MIGInstance is a GPU instance that exists.
type MIGInstance struct {
	// uuid of the MIG device; empty where the GPU instance is none, because it
	// has no compute instance, or several.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^(MIG-[0-9A-Za-z/-]+)?$`
	UUID          string       `json:"uuid,omitempty"`
	Profile       string       `json:"profile"`
	Placement     MIGPlacement `json:"placement"`
	GPUInstanceID int32        `json:"gpuInstanceID"`
	// computeInstanceID is absent where the GPU instance is no MIG device.
	// +optional
	ComputeInstanceID *int32 `json:"computeInstanceID,omitempty"`
}

// AnnotationEndCondition of a GPUInventory ends a condition of a GPU by hand: "GPU
// CONDITION TIME USER REASON", with the GPU's index or UUID, and the user who sets it.
// Causes that begin after the time, 2006-01-02T15:04:05Z, aren't ended. The node's plugin
// removes it and writes an event about the result.
const AnnotationEndCondition = "gpu.tessera.dev/end-condition"

// Condition types of a GPUInventory.
const (
	// ConditionReady: the plugin has a driver, has read the GPUs and is
	// registered with the kubelet.
	ConditionReady = "Ready"
	// ConditionConflicting: another driver serves this node's GPUs.
	ConditionConflicting = "Conflicting"
	// ConditionUnidentifiedGPUs: NVML lists GPUs that can't be identified, and that are
	// not in status.gpus. It is absent where all are identified.
	ConditionUnidentifiedGPUs = "UnidentifiedGPUs"
	// ConditionDoubleAllocation: the scheduler allocated overlapping devices of this
	// node, which only shared counters keep apart, to two claims. Its reason is
	// DoubleAllocationReason.
	ConditionDoubleAllocation = "DoubleAllocation"
	// ConditionOverwritten: somebody else undoes the controller's writes of this node: of
	// its ResourceSlices, of the GPUInventory's spec, or of the Node's labels. The controller
	// sets it to True and to False.
	ConditionOverwritten = "Overwritten"
)

// Reasons of conditions that controller and plugin both know.
const (
	// ReasonPluginSilent of Ready: the plugin doesn't answer the controller, which
	// sets this. The plugin takes it back.
	ReasonPluginSilent = "PluginSilent"
	// ReasonNVMLError of Ready: the node's driver is there and doesn't work.
	ReasonNVMLError = "NVMLError"
	// ReasonForeignSlices of Conflicting: another driver writes ResourceSlices of
	// this node again and again. The controller sets it and takes it back.
	ReasonForeignSlices = "ForeignSlices"
	// ReasonOtherRelease of Overwritten: another release of Tessera undoes the writes.
	ReasonOtherRelease = "OtherRelease"
	// ReasonOtherWriter of Overwritten: another program, or a person, undoes them.
	ReasonOtherWriter = "OtherWriter"
	// ReasonUndisturbed of Overwritten: none has been undone for a while.
	ReasonUndisturbed = "Undisturbed"
	// ReasonNoOtherDriver of Conflicting: there is none.
	ReasonNoOtherDriver = "NoOtherDriver"
	// ReasonNewVersion of DoubleAllocation: the API server has another version now. The
	// controller sets it.
	ReasonNewVersion = "NewVersion"
)

// GPUInventoryList is a list of GPUInventory.
//
// +kubebuilder:object:root=true
type GPUInventoryList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GPUInventory `json:"items"`
}
