// Package doctor checks a node from outside for violations of the rules in
// docs/dev/state.md: it compares the journal, the CDI directory, the MPS daemons and the
// hardware with each other. Every finding says what is wrong, where, and what to do
// about it.
//
// It changes nothing, takes no lock and needs no running plugin, so it can run
// at any time. The unfinished state of a prepare or an unprepare in progress
// looks like a fault for a moment; Examine therefore checks again, and reports
// only findings that stay.
//
// Users run it as `kubelet-plugin doctor`, and tests run it after the failures
// that they cause. It doesn't read Kubernetes objects. Run reads the node's state: the
// files and the processes by itself, the hardware through a session of its own. Check
// compares its parts.
package doctor
