#!/usr/bin/env bash
# Runs every native fuzz target of the module for a while, one after the other.
#
# usage: hack/fuzz.sh DURATION   e.g. 10s, as go test -fuzztime takes it
set -euo pipefail

duration=${1:?usage: hack/fuzz.sh DURATION}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# run runs a target. Before Go 1.27, go test sometimes reports the end of the duration as a
# failure (golang/go#75804): the line after "--- FAIL" is "context deadline exceeded". After a
# real failure that line names the target again, and the next ones the test file and the input.
run() { # PACKAGE NAME
	# By default each input that reaches new code is made smaller for up to a minute, which leaves no time to try others.
	"${GO:-go}" test -run '^$' -fuzz "^$2\$" -fuzztime "$duration" -fuzzminimizetime 100x "$1" | tee "$log" && return
	if [ "$(sed -n "/^--- FAIL: $2 /,\$ p" "$log" | sed -n 2p)" != "    context deadline exceeded" ]; then
		return 1
	fi
	echo "fuzz: $2 ran for $duration without a failure"
}

targets=0
while IFS=: read -r file name; do
	echo "fuzz: $(dirname "$file") $name for $duration"
	run "./$(dirname "$file")" "$name"
	targets=$((targets + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' |
	xargs grep -oHE '^func Fuzz[A-Za-z0-9_]+' | sed 's/:func /:/')
if [ "$targets" -eq 0 ]; then
	echo "fuzz: no targets found" >&2
	exit 1
fi
echo "fuzz: $targets targets passed"
