// Package claim decides what an allocated ResourceClaim was given on one node:
// which devices of this driver, for which request, with which configuration.
//
// Read is pure: the same claim gives the same grants on every machine. It
// neither knows whether the devices exist, nor how much of a GPU they are, nor
// who else holds them; that is for pkg/node/prepare, which acts on the grants.
// Kinds of devices it tells by their names. Results of other drivers,
// and of other nodes' pools, are not this node's business and are left out.
//
// Configurations are decoded strictly: a field that isn't known is an error, not
// a wish that is passed over.
//
// Everybody may import it; it imports the API types and pkg/gpu only.
package claim
