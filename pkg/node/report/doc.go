// Package report keeps the node's GPUInventory object equal to the facts
// (pkg/node/facts), and answers the controller's question whether this node's plugin
// is alive.
//
// It writes on change only, so that an idle node writes nothing; changes that come
// together, such as eight GPUs that fail at once, once; and again and again while the
// API server is away, without anybody waiting for it. It watches two
// objects, the node's own inventory and the Node. From the Node it learns whether a
// device plugin serves the GPUs, and from the first inventory what the previous
// plugin has reported; both become facts. What policies ask for in the inventory is
// passed on as it is.
//
// It decides nothing about what is on offer (the controller does).
package report
