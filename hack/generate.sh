#!/usr/bin/env bash
# Makes every generated file again: deepcopy functions and custom resource
# definitions from the Go types, the Go code of .proto files, then whatever
# //go:generate lines ask for.
# Run by `make generate`, which builds the tools first.
#
# usage: hack/generate.sh [TREE]   the tree to work on; default: this one
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH="$here/_output/tools:$PATH"
cd "${1:-$here}"

controller-gen object paths=./api/...
controller-gen crd paths=./api/gpu/... output:crd:dir=deployments/helm/tessera/files/crds
protogen pkg/mps/mpspb/mps.proto
go generate ./...
