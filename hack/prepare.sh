#!/usr/bin/env bash
# Installs the distribution packages that building and testing Tessera needs
# beyond Go, git and make, and says nothing when they are all there.
#
# One row a package: what must exist for the package to count as present, and
# its name for apt. On a system without apt, or without root, the missing ones
# are named in one error. Idempotent.
set -euo pipefail

# probe|package|why
rows='
cmd:gcc|gcc|cgo: the kubelet plugin loads libnvidia-ml, the simulator is a C library
file:/usr/include/stdlib.h|libc6-dev|cgo: C headers
cmd:pkg-config|pkg-config|runc finds libseccomp with it
file:/usr/include/seccomp.h|libseccomp-dev|runc applies the default seccomp profile
static:busybox|busybox-static|the pause and test images of the local cluster
cmd:make|make|this Makefile
'

present() {
	local kind=${1%%:*} what=${1#*:}
	case $kind in
	cmd) command -v "$what" >/dev/null ;;
	file) [ -e "$what" ] ;;
	static) # a busybox that runs in an empty file system
		local path
		path=$(command -v "$what") && ! ldd "$path" >/dev/null 2>&1
		;;
	esac
}

missing=()
while IFS='|' read -r probe package _; do
	[ -n "$probe" ] || continue
	present "$probe" || missing+=("$package")
done <<<"$rows"

[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
	echo "prepare: missing packages: ${missing[*]}: install them (Debian's names) and try again" >&2
	exit 1
fi

echo "prepare: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >&2
