// Package crash kills the real kubelet plugin at every step of what it does,
// on a simulated driver and a real API server, and asserts what must always be
// true (docs/state.md) when it has started again. It has tests only, behind
// the build tag integration.
package crash
