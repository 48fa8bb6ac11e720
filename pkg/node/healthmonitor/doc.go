// Package healthmonitor watches the health of the node's GPUs: at each event that the
// driver reports, and from time to time, it reads a GPU's vitals, lets pkg/health
// decide, stores the decision in the journal and passes it on to the facts. It also
// looks for GPUs that don't respond, resets GPUs, and ends conditions by hand.
//
// It keeps the times of all that is read of GPUs without an event, as tasks that don't wait
// for each other (tasks.go): a GPU that doesn't answer delays no other. It is one package
// because readings, resets and endings all change what is stored of a GPU.
//
// It is given the hardware by pkg/node/driver. What only driver can do, because NVML has
// to be closed for it or the list of GPUs read, is an Order that driver takes.
package healthmonitor
