#!/usr/bin/env bash
# Makes a release of HEAD twice, in two directories and with two build caches, and
# compares every file. The second one compiles all from the start: about ten
# minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=0.0.0-twice
commit=$(git rev-parse HEAD)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for n in one two; do
	git clone -q . "$work/$n"
	git -C "$work/$n" checkout -q --detach "$commit" # HEAD may move in the minutes between the two
	echo "release twice: $n"
	[ "$n" = one ] || export GOCACHE=$work/cache
	make -C "$work/$n" release VERSION=$version
done
if ! diff -r "$work/one/_output/release/$version" "$work/two/_output/release/$version"; then
	echo "release twice: one commit gave two releases" >&2
	exit 1
fi
echo "release twice: ok, the same files:"
cat "$work/one/_output/release/$version/SHA256SUMS"
