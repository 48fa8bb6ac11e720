// Package claim decides what an allocated ResourceClaim was given on one node:
// which devices of this driver, for which request, with which configuration, and
// within which limits.
//
// Read returns the same grants on every machine. It knows neither whether the
// devices exist, nor how much of a GPU they are, nor who else holds them, and
// recognizes kinds of devices by their names. It leaves out the results of other
// drivers and of other nodes' pools.
//
// Grant.Place adds what the node has for it, and SetLimits computes from that what
// the claim's processes may use as clients of MPS daemons. pkg/node/prepare acts on
// the result.
//
// Configurations are decoded strictly: an unknown field is an error.
//
// Everybody may import it; it imports the API types and pkg/gpu only.
package claim
