// Package usage has the metrics of the use of devices: the claims, pods and containers of
// each GPU, partition, share and replica, the limits of shares, the partitions that still
// fit on each GPU, and the GPUs' health.
//
// All of it is computed when Prometheus asks, from the plugin's state in memory, with what
// pkg/node/healthmonitor has read of the GPUs, and one call of the kubelet's PodResources API. The
// API server isn't asked.
package usage
