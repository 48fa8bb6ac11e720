// Package classes keeps the DeviceClasses of a release in the cluster, in the
// version of resource.k8s.io that the API server has at the time. Helm can't: a
// manifest with an object of a version that the server no longer has can be neither
// upgraded nor uninstalled.
package classes
