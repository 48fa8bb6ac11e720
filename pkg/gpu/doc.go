// Package gpu defines the terms of this driver: GPUs, nodes with GPUs,
// allocatable devices and their names.
//
// Its only behaviour is to build and parse names, and to apply rules about devices,
// such as which exclude each other. It uses no clock, files, network or hardware.
// Every package may import it; it imports only the standard library. Facts are read by
// pkg/nvml and pkg/node/driver, leave the node through pkg/inventory, become devices in
// pkg/offer, and come back as the device names of an allocated claim in pkg/claim.
package gpu
