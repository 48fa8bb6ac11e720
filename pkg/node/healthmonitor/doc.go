// Package healthmonitor watches the health of the node's GPUs: at each event that the
// driver reports, and from time to time, it reads a GPU's vitals, lets pkg/health
// decide, stores the decision in the journal and passes it on to the facts.
//
// Each GPU has a goroutine of its own, so one that doesn't answer delays no other.
package healthmonitor
