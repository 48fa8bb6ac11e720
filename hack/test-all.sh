#!/usr/bin/env bash
# Runs every level of the tests and every longer check. What has passed is
# marked in _output/passed, under a hash of the files of the tree: after a
# failure, or an interruption, the next run goes on with the rest.
#
# usage: hack/test-all.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A file that is deleted but still in the index gives no line.
tree=$({ git ls-files -co --exclude-standard -z | xargs -0 sha1sum 2>/dev/null || true; } | sha1sum | cut -c1-12)
marks=_output/passed/$tree
mkdir -p "$marks"

step() { # NAME COMMAND...
	local name=$1 began=$SECONDS
	shift
	if [ -e "$marks/$name" ]; then
		echo "test-all: $name has passed: $(cat "$marks/$name")"
		return
	fi
	echo "test-all: $name"
	"$@"
	date -u +"%F %T UTC, $((SECONDS - began)) s" >"$marks/$name"
}

for level in unit integration e2e; do
	step "$level" hack/test.sh "$level"
done
for check in $(hack/long-checks.sh list); do
	EVERY=1 step "$check" hack/long-checks.sh run "$check"
done
echo "test-all: everything has passed"
