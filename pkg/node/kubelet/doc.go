// Package kubelet is the plugin's door to the kubelet: it serves the DRA
// gRPC API (v1 and v1beta1) and plugin registration through the kubeletplugin
// helper, and passes each claim on to what prepares it.
//
// It adds what the helper leaves to drivers: the claims of one call are
// handled side by side and fail one by one; a prepare is announced before
// the helper reads the claim from the API server, so that an unprepare which
// arrives meanwhile can win over it; the wiring hears of every registration,
// a kubelet's restart included; and another driver that is alive under the
// same name is found before its sockets are taken away from it.
//
// It publishes nothing: ResourceSlices are the controller's. Only what wires
// the plugin imports it.
package kubelet
