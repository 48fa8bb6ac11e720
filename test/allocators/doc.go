// Package allocators plays claims that come and go over the pools that the
// controller publishes, with the allocators of the schedulers of all supported
// Kubernetes releases, and judges that no silicon is ever allocated twice.
//
// The allocator of the newest release is linked in (Library). Those of all
// releases are programs, one Go module each in the folders beside this file,
// because only one version of a module fits into a program. They speak the
// protocol of the folder protocol, in the version of resource.k8s.io that their
// release has. The folder others has those of Volcano and KAI Scheduler.
//
// Only tests import it.
package allocators
