// Package upgrade upgrades Tessera on a running cluster: from an earlier commit to this
// one and back, part by part, while pods with claims of all kinds run, and others come
// and go. run.sh, beside it, upgrades Kubernetes with Tessera installed.
package upgrade
