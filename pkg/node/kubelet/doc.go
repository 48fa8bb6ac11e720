// Package kubelet is the plugin's interface to the kubelet: it serves the DRA
// gRPC API (v1 and v1beta1) and plugin registration through the kubeletplugin
// helper, and passes each claim to Claims.
//
// It adds to the helper: the claims of one call are handled concurrently and
// fail separately; a prepare is announced before the helper reads the claim
// from the API server, so that an unprepare that arrives in the meantime
// prevails; OnRegistered reports every registration, including those after a
// kubelet's restart; and another running driver with the same name is detected
// before this plugin replaces its sockets.
//
// It also reports the health of the devices that claims hold, from which the kubelet
// makes allocatedResourcesStatus of the pods.
//
// It publishes nothing: the controller writes ResourceSlices. Only pkg/node
// imports it.
package kubelet
