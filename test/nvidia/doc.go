// Package nvidia runs NVIDIA's own programs on the simulated driver, and compares their
// reports of a machine with Tessera's: the labels of GPU Feature Discovery, and the CDI
// specification of nvidia-ctk. The programs are built from their modules, by
// tools/go.mod. It is the long check "nvidia" of hack/long-checks.sh, and needs root.
package nvidia
