// Package crash kills the real kubelet plugin at every step of its operations,
// on a simulated driver and a real API server, and checks the rules of
// docs/dev/state.md after it has started again. It has tests only, behind the build
// tag integration.
package crash
