// Package doctor looks at a node from outside and says what isn't as it must
// always be (docs/state.md): the journal, the CDI directory, the MPS daemons and the
// hardware are compared with each other, each way. Every finding says what it is, where,
// and what to do about it.
//
// It changes nothing, takes no lock and needs no running plugin, so it can be
// asked at any time. What a prepare or an unprepare under way has done by half
// looks like a fault for a moment; Examine looks again until the same is found
// every time.
//
// `kubelet-plugin doctor` is this package for people, and the tests that break
// things ask it afterwards. It knows nothing of Kubernetes objects. It may
// import journal and none of the other packages under node.
package doctor
