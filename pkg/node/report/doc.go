// Package report keeps the node's GPUInventory object equal to the facts
// (pkg/node/facts), and answers the controller's question whether this node's plugin
// is alive.
//
// It writes only when facts change, so that an idle node writes nothing. Changes that come
// together, such as eight GPUs that fail at once, are one write. While the API server can't
// be reached, it retries without blocking other parts. It watches two objects, the node's
// own inventory and the Node. The Node shows whether a device plugin serves the GPUs, which
// becomes a fact. Requests of policies in the inventory are passed on unchanged.
//
// It decides nothing about what is on offer (the controller does).
package report
