// Command consumers runs real queues, schedulers and operators of others, each built from its
// module, on a cluster with simulated GPUs, lets them use Tessera's devices, and writes
// the outcomes to docs/user/consumers.md. The stories are this package's tests with the build tag
// consumers, one test for each system. It is the long check "consumers" of
// hack/long-checks.sh.
package main
