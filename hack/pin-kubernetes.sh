#!/usr/bin/env bash
# Pins the Kubernetes release that local clusters of a minor version are made of:
# writes go.mod and go.sum in sim/cluster/kubernetes/MINOR. The program there is
# the same for every version, and is copied from the newest.
#
# usage: hack/pin-kubernetes.sh RELEASE     such as 1.33.13
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../sim/cluster/kubernetes"

release=${1:-}
[[ $release =~ ^1\.[0-9]+\.[0-9]+$ ]] || {
	sed -n 's/^# usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
	exit 2
}
minor=${release%.*} newest=$(printf '%s\n' 1.* | sort -V | tail -1)
upstream=$(go mod download -json "k8s.io/kubernetes@v$release" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
[ -r "$upstream" ] || {
	echo "k8s.io/kubernetes v$release isn't on the module proxy" >&2
	exit 1
}

# published prints the module's version of this release, or of the last patch
# release before it that the module proxy has: it misses a few.
published() { # MODULE
	local patch
	for ((patch = ${release##*.}; patch >= 0; patch--)); do
		if go mod download "$1@v0.${minor#1.}.$patch" 2>/dev/null; then
			echo "v0.${minor#1.}.$patch"
			return
		fi
	done
	echo "no version of $1 for $minor is on the module proxy" >&2
	return 1
}

mkdir -p "$minor"
[ "$minor" = "$newest" ] || cp "$newest"/*.go "$minor"
{
	echo "module github.com/tessera-dra/tessera/sim/cluster/kubernetes/$minor"
	# The release's own go line: it decides the defaults of GODEBUG.
	grep '^go ' "$upstream"
	grep '^godebug ' "$upstream" || true
	echo "tool k8s.io/kubernetes/cmd/kubectl"
	echo "require k8s.io/kubernetes v$release"
	# Kubernetes requires its own modules as v0.0.0 and replaces them by directories.
	for module in $(sed -n 's/^\t\(k8s\.io\/[a-z-]*\) v0\.0\.0\( .*\)\?$/\1/p' "$upstream" | sort -u); do
		echo "replace $module => $module $(published "$module")"
	done
} >"$minor/go.mod"
rm -f "$minor/go.sum"
cd "$minor"
go mod tidy
