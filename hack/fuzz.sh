#!/usr/bin/env bash
# Runs every native fuzz target of the module for a while, one after the other.
#
# usage: hack/fuzz.sh DURATION   e.g. 10s, as go test -fuzztime takes it
set -euo pipefail

duration=${1:?usage: hack/fuzz.sh DURATION}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=0
while IFS=: read -r file name; do
	echo "fuzz: $(dirname "$file") $name for $duration"
	# By default each input that reaches new code is made smaller for up to a minute, which leaves no time to try others.
	"${GO:-go}" test -run '^$' -fuzz "^$name\$" -fuzztime "$duration" -fuzzminimizetime 100x "./$(dirname "$file")"
	targets=$((targets + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' |
	xargs grep -oHE '^func Fuzz[A-Za-z0-9_]+' | sed 's/:func /:/')
if [ "$targets" -eq 0 ]; then
	echo "fuzz: no targets found" >&2
	exit 1
fi
echo "fuzz: $targets targets passed"
