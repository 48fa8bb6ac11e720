// Package gpu holds the words of this driver: what a GPU is, what a node
// with GPUs is, what can be allocated, and how allocatable devices are named.
//
// It has no behaviour beyond making and reading names: no clock, no files, no
// network, no hardware. Everybody may import it; it imports the standard
// library only. Facts enter it through pkg/nvml and pkg/node/report, leave the
// node through pkg/inventory, become devices in pkg/offer, and come back as
// the device names of an allocated claim in pkg/claim.
package gpu
