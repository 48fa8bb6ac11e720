// Package health decides which conditions a GPU has, and when they end.
//
// It is pure. pkg/node/healthmonitor reads the driver, keeps a State for each GPU, stores
// it, and passes its conditions on.
//
// An XID is only a trigger: the driver's recovery action decides. Where the driver
// has none (NVML's field 230 can't be read), NVIDIA's catalog of XIDs decides. A State
// has all open causes, each with its own way to end, so the last event never hides a
// worse one before it.
package health

//go:generate go run ./gen
