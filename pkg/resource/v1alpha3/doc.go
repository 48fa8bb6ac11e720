// Package v1alpha3 lets clients of resource.k8s.io/v1beta1 work with API servers
// of Kubernetes 1.31, which serve resource.k8s.io/v1alpha3 only.
//
// The two versions differ in little, so that Transport translates requests and
// responses under way: paths, apiVersion, the capacity of devices, and the mark of
// admin access. Clients of all kinds work unchanged: typed, informers, discovery,
// server-side apply. Fields that v1alpha3 doesn't have are dropped by the server, as
// servers of later versions drop fields whose feature gate is off. An allocation by
// a control plane controller (classic DRA) has no devices.
//
// Nothing but the lines that install Transport, in pkg/control, pkg/node and
// pkg/kubectl/cluster, depends on this package: delete it when support of Kubernetes 1.31 ends.
package v1alpha3
