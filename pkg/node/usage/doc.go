// Package usage has the metrics that say who has which device: the claims, pods and
// containers of each GPU, partition, share and replica, the limits of shares, what
// else fits on each GPU, and the GPUs' health.
//
// All of it is computed when Prometheus asks, from what the plugin has in memory and
// one call of the kubelet's PodResources API. The API server isn't asked.
package usage
