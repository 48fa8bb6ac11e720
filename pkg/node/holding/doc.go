// Package holding describes what claims hold on a node: which devices, together
// with whom and within which limits, and what was made or changed on GPUs for them.
//
// Its types are those that pkg/node/journal writes to disk: fields may be added, and
// the name of a field in JSON never changes. The package imports pkg/gpu and
// nothing of the node.
package holding
