// Package v1alpha1 holds the custom resources of Tessera: GPUInventory, the report
// of a node, and SharingPolicy, an admin's plan for GPUs.
//
// Both are cluster-scoped. A GPUInventory is a conversation between one node's
// plugin and the controller; each field has exactly one writer, named in its
// comment.
//
// +kubebuilder:object:generate=true
// +groupName=gpu.tessera.dev
package v1alpha1
