// Package holding describes what claims hold on a node (Record), what was created or
// changed on GPUs for them (GPURecord, Settings), and decides what a claim keeps from
// others (Claim), also one whose record can't be read or that is being unprepared.
//
// The record types are those that pkg/node/journal writes to disk: fields may be added, and
// the name of a field in JSON never changes. The package imports
// pkg/gpu and pkg/health, whose types are parts of records, and nothing of the node.
package holding
