#!/usr/bin/env bash
# Counts the files of ours that a prepare runs through, from the kubelet's call to
# the CDI file: of a whole GPU, and of an MPS share. It reads the coverage of one
# call each and fails where there are more than allowed. The call to the MPS
# supervisor ends at a stand-in for pkg/mps/client.go and wire.go. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

# count NAME SUFFIX-OF-THE-DEVICE FILES PACKAGES
count() {
  local list="$work/$1.txt" files packages
  mkdir "$work/$1"
  GOCOVERDIR="$work" "$work/preparefiles" "$work/$1" "$2"
  go tool covdata textfmt -i="$work/$1" -o="$work/$1.cov"
  # Doubles and other helpers of tests aren't the plugin's.
  awk 'NR > 1 && $NF > 0 { sub(/:.*/, "", $1); print $1 }' "$work/$1.cov" | grep -v -e "test/" -e "/hack/" | sort -u |
    sed 's|^github.com/tessera-dra/tessera/||' > "$list"
  files=$(wc -l < "$list")
  packages=$(xargs -n1 dirname < "$list" | sort -u | wc -l)
  echo "$1: $files files of $packages packages (at most $3 of $4)"
  sed 's/^/  /' "$list"
  (( files <= $3 && packages <= $4 )) || failed=1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
go build -cover -covermode atomic -coverpkg ./pkg/...,./hack/preparefiles -o "$work/preparefiles" ./hack/preparefiles
# The aim was 15 files of 9 packages, and 22. These eleven are above it for a whole GPU:
# - pkg/node/kubelet/gate.go and pkg/notify: a call may be the next plugin's already
# - pkg/agenda, pkg/node/partition (manager, visit) and pkg/nvml (call, mig): the MIG mode
#   is read from the hardware. The facts may be a minute old, and a container that gets a
#   GPU whose mode somebody has switched on since then starts and can't use it. A change of
#   the GPU and that reading exclude each other: pkg/nvml/guard.go.
# - pkg/node/prepare/events.go: whether the pod is to be told something about its devices
# - pkg/keylock and pkg/driverroot/host.go: a lock, and one line that joins two paths
# A share has two more: pkg/node/sharing/reports.go, which stores the daemon's state, and
# pkg/mps/daemon.go, the daemon's description. The rest of what a share adds to a whole GPU
# is the plan, the settings and the limits.
count whole "" 26 17
count share "-mps4-0" 35 18
exit "$failed"
