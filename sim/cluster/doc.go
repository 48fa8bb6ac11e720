// Package cluster runs real Kubernetes clusters on one Linux machine, from Go
// modules alone: etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
// kubelet, containerd or CRI-O, and runc, without a registry, systemd, iptables or
// network access once the binaries are built.
//
// A cluster is one control-plane machine and a few node machines. Each machine
// is a process tree in namespaces of its own (package machine), in which the
// usual paths (/var/lib/kubelet, /run/containerd, /etc/cdi …) are real, so that
// Helm charts run unchanged and clusters don't meet. Down only has to kill pid
// 1 of each machine and to remove cgroups and files.
//
// There is no kube-proxy and no DNS: only the kubernetes service has a cluster
// IP that works, and pods reach each other by address.
//
// It is a tool for tests, the demo and the benchmarks. The product never
// imports it. Everything needs root.
//
// It is one package because its files are parts of one Cluster: what its binaries,
// certificates, networks and configuration look like follows from the same plan.
package cluster
