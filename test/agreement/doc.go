// Package agreement compares `kubectl gpu` with a running scheduler: for hundreds of
// pods with random claims, on GPUs under policies of every kind, the command says where
// each pod's claims fit, and then the scheduler decides. It is the long check
// "agreement" of hack/long-checks.sh.
//
// Claims that get devices change the answer for the next pod, so pods are judged and
// scheduled one at a time. The nodes' kubelets are stopped once Tessera has published
// its devices: allocation needs none, and without containers hundreds of pods take
// minutes only. At the end come single pods of shapes that are no matter of chance: with
// claims of their own that have devices already, with claims that are being deleted or
// that a quota refuses, of PodGroups, and for a node with a device plugin.
package agreement
