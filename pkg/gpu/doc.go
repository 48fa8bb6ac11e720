// Package gpu defines the terms of this driver: GPUs, nodes with GPUs,
// allocatable devices and their names.
//
// Its only behaviour is to build and parse names, and rules about devices, such as
// which exclude each other: no clock, no files, no network, no hardware. Every package may import it; it imports only the
// standard library. Facts come from pkg/nvml and pkg/node/report, leave the
// node through pkg/inventory, become devices in pkg/offer, and come back as the
// device names of an allocated claim in pkg/claim.
package gpu
