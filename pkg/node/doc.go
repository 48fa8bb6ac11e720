// Package node is the kubelet plugin: it wires the packages below it and runs
// them on a node. It knows what each needs, and the order things must happen
// in when the plugin starts and stops; what they do is theirs.
//
// Start: lock the data directory, open the journal, install the hook program,
// look for the driver, recover MPS daemons, MIG partitions and what was prepared, report, and
// only then register with the kubelet. None of this waits for a driver: without one, the
// plugin refuses to prepare, and still unprepares. Registration waits for the
// first report, for a while, and as long as another driver serves the GPUs.
//
// Goroutines, all started by Run and ended before it returns:
//
//	hardware    looks for the driver, reads the facts, mends what prepared claims
//	            have lost; owns the NVML session
//	  events    waits in NVML for events, wakes hardware
//	  nodes     waits for device nodes to come and go, wakes hardware
//	partitions  destroys idle MIG partitions in time
//	sharing     follows the MPS daemons, tries again what failed
//	statuses    tells in claims' statuses which MIG devices they have
//	report      writes the GPUInventory
//	  watches   of the GPUInventory and the Node, one each
//	kubelet     registers, serves the kubelet's calls (one goroutine a call)
//	http        serves metrics and probes
package node
