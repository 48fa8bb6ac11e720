// Package kueue runs the real Kueue on a cluster with simulated GPUs, and checks that its
// quota counts whole GPUs, MIG partitions and MPS shares by their memory, as docs/user/works-with.md
// says. It is the long check "kueue" of hack/long-checks.sh.
package kueue
