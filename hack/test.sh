#!/usr/bin/env bash
# Runs levels of the tests, one after the other, and lists the ten slowest tests
# of all. Everything they print is kept in _output/test, as go test -json writes
# it. The first level that fails ends the run.
#
# usage: hack/test.sh [LEVEL...]   unit, integration or e2e; default: all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
go=${GO:-go}
logs=_output/test
mkdir -p "$logs"
"$go" build -o "$logs/testlog" ./hack/testlog

# tests runs go test with arguments of its own, and the level's log.
tests() { # LEVEL ARGS...
	local level=$1
	shift
	"$go" test -json -count 1 "$@" | "$logs/testlog" "$logs/$level.json"
}

# unit runs what needs no cluster; the race detector only where it can find
# something, as it makes tests take several times as long. The package that takes
# longest comes first, so that no processor waits for it in the end.
unit() {
	local race plain
	race=$(hack/concurrent.sh)
	plain=$(hack/concurrent.sh not)
	# shellcheck disable=SC2086 # several packages
	tests unit -timeout 15m $plain
	# shellcheck disable=SC2086
	tests unit -timeout 30m -race ./pkg/nvml $race
}

integration() { tests integration -timeout 30m -tags integration ./test/crash ./pkg/control ./deployments/helm/test ./test/apiserver; }

e2e() { tests e2e -timeout 60m -tags e2e -p 2 ./test/e2e ./test/cluster; }

levels=("$@")
[ ${#levels[@]} -gt 0 ] || levels=(unit integration e2e)
files=()
for level in "${levels[@]}"; do
	began=$SECONDS
	echo "test: $level"
	rm -f "$logs/$level.json"
	files+=("$logs/$level.json")
	"$level"
	echo "test: $level took $((SECONDS - began)) s"
done
echo "test: all of it took $SECONDS s; the slowest:"
"$logs/testlog" -slowest 10 "${files[@]}"
