// Package v1beta1 holds the claim configurations that users write for this
// driver: the opaque parameters of a DeviceClass or a ResourceClaim. Names and
// fields are those of NVIDIA's DRA driver, so that a manifest written for it
// means the same here.
//
// Decode reads a configuration; the kubelet plugin uses it when it prepares a
// claim, which is the first time that a configuration is checked. pkg/claim decides
// whether a node can honour it.
package v1beta1
