#!/usr/bin/env bash
# Installs the C compiler that cgo needs (the kubelet plugin loads
# libnvidia-ml) and that the simulator's library is built with, and xz, which
# packs `make metal-bundle`, where they are missing, and says nothing where they
# aren't. With the word cross, it also installs the C compiler for the other
# architecture that `make release` builds for; with the word foreign, also the emulator
# that runs such programs. What the local cluster needs beyond that,
# sim/cmd/localcluster installs itself. Idempotent.
#
# usage: hack/prepare.sh [cross|foreign]
set -euo pipefail

missing=()
command -v gcc >/dev/null || missing+=(gcc)
[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
command -v xz >/dev/null || missing+=(xz-utils)
if [ -n "${1:-}" ]; then
	case $(uname -m) in
	x86_64) triple=aarch64-linux-gnu architecture=arm64 ;;
	*) triple=x86_64-linux-gnu architecture=amd64 ;;
	esac
	[ "$1" != foreign ] || command -v "qemu-${triple%%-*}" >/dev/null || missing+=(qemu-user)
	command -v $triple-gcc >/dev/null || missing+=("gcc-${triple//_/-}")
	[ -e /usr/$triple/include/stdlib.h ] || missing+=("libc6-dev-$architecture-cross")
fi
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
	echo "missing packages: ${missing[*]} (Debian's names): install them and try again" >&2
	exit 1
fi
echo "installing ${missing[*]} with apt-get" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >&2
