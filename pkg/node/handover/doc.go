// Package handover is how two plugins of a node agree that one takes over from the other:
// the protocol on a socket in the data directory. The lock of that directory decides who
// may use it. The kernel frees the lock when every plugin that has it has ended, so either
// side may die at any point.
//
// The successor connects and sends a Request. The acting plugin refuses it, or ends its work
// and answers with the locked file, so that the lock is never free in between: no third
// plugin can take it. Messages are lines of JSON.
package handover
