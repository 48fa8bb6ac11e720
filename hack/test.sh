#!/usr/bin/env bash
# Runs levels of the tests one after the other, and lists the ten slowest tests of all. Two at
# the same time need as long together, as each uses all processors, and API servers time out.
# Every level runs to its end; the output of one that has failed is shown again at the end.
# Everything that tests print is kept in _output/test: LEVEL.json as go test
# -json writes it, LEVEL.out as it is shown.
#
# usage: hack/test.sh [LEVEL...]   unit, integration or e2e; default: all of these
#        hack/test.sh reliability  only the tests that docs/dev/reliability.md counts, of all levels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
go=${GO:-go}
logs=_output/test
# Tests, and the programs that build them, collect garbage less often than by default:
# it takes a tenth of their processor time, and memory isn't short.
export GOGC=400
# They link programs without what debuggers need, which takes little more than half as long.
[[ ${GOFLAGS:-} == *-ldflags=* ]] || export GOFLAGS="${GOFLAGS:-} '-ldflags=-s -w'"

# tests runs go test with arguments of its own, and the level's log. It doesn't vet: make verify does.
tests() { # LEVEL ARGS...
	local level=$1
	shift
	"${inMemory[@]}" "$go" test -json -count 1 -vet=off "$@" | "$logs/testlog" "$logs/$level.json"
}

# kept runs tests as go test -json -count 1 does, from binaries that stay in _output/test:
# go test links each of them again each time, which takes 1.5 seconds of processor for each;
# go test -c leaves a binary alone whose inputs haven't changed. It doesn't vet either.
# Twice as many packages as processors run at a time, because many tests wait.
kept() { # LEVEL NAME PACKAGES FLAGS...
	local level=$1 kept=$PWD/$logs/binaries/$2 packages=$3 round of
	shift 3
	mkdir -p "$kept"
	# go test -c takes no two packages of one name: the second of a name is in round 2.
	# shellcheck disable=SC2086 # several packages
	printf '%s\n' $packages | awk -F/ '{ print ++round[$NF], $NF, $0 }' >"$kept/list"
	for round in $(cut -d' ' -f1 "$kept/list" | sort -u); do
		of=$(awk -v round="$round" '$1 == round { print $3 }' "$kept/list")
		mkdir -p "$kept/$round"
		# shellcheck disable=SC2086
		"$go" test -c -vet=off "$@" -o "$kept/$round/" $of || return
	done
	awk -v kept="$kept" '{ print kept "/" $1 "/" $2 ".test", $3 }' "$kept/list" |
		"${inMemory[@]}" xargs -P $((2 * $(nproc))) -n 2 hack/test.sh --binary | "$logs/testlog" "$logs/$level.json"
}

# sequential are tests of pkg/node that run without the race detector: they do one thing at
# a time, and take three times as much processor time with the detector.
sequential='^(TestPowerLoss|TestDiskFaults)$'

# binary runs the tests of a package, and then prints their events in one piece.
binary() { # FILE PACKAGE
	local file=$1 package=$2 events failed=0 selection=-test.run=.
	case "$package $file" in
	*"/pkg/node "*/binaries/race/*) selection=-test.skip=$sequential ;;
	*"/pkg/node "*) selection=-test.run=$sequential ;;
	esac
	events=$(mktemp)
	cd "./${package#github.com/tessera-dra/tessera}"
	"$go" tool test2json -t -p "$package" "$file" -test.v=test2json -test.paniconexit0 -test.timeout=30m "$selection" >"$events" 2>&1 || failed=$?
	flock 9
	cat "$events"
	rm "$events"
	return "$failed"
} 9>>"$logs/.lock"

# memory has go test keep temporary files in memory, in a mount of its own that goes with
# it: tests sync many small files, which takes half of some tests' time on a disk.
inMemory=()
memory() {
	local dir
	[[ $(id -u) -eq 0 ]] && unshare --mount true 2>/dev/null || return 0
	dir=$(mktemp -d /tmp/t.XXX)
	# shellcheck disable=SC2064 # this directory
	trap "rmdir '$dir'" EXIT
	# shellcheck disable=SC2016 # the arguments of that shell
	inMemory=(unshare --mount sh -c 'mount -t tmpfs tmpfs "$0" && TMPDIR=$0 exec "$@"' "$dir")
}

# unit runs what needs no cluster; the race detector only where it can find
# something, as it makes tests take several times as long. The packages that take
# longest come first, so that no processor waits for them in the end.
unit() {
	local race plain failed=0
	memory
	# pkg/node is in both lists: its sequential tests run without the race detector, and the
	# others with it (see binary).
	plain=$("$go" list ./pkg/node && hack/concurrent.sh not)
	race=$(hack/concurrent.sh | awk '/\/pkg\/nvml$/ { first = $0; next } { rest = rest $0 "\n" } END { print first "\n" rest }')
	kept unit plain "$plain" || failed=$?
	kept unit race "$race" -race || failed=$?
	return $failed
}

# integration also counts what a prepare runs through, which may only go down.
integration() {
	memory
	"$go" run ./hack/joints -prepare && tests integration -timeout 30m -tags integration ./test/crash ./pkg/control ./deployments/helm/test ./test/apiserver
}

reliability() {
	local arguments
	memory
	arguments=$("$go" run ./test/reliability -tests)
	# shellcheck disable=SC2086 # several arguments
	tests reliability -p 1 -timeout 30m -tags integration $arguments
}

e2e() { tests e2e -timeout 60m -tags e2e -p 2 ./test/e2e ./sim/cluster; }

# beat says every half minute for how long a level has run, as some packages take minutes. It
# ends with this script, and doesn't hold its output open.
beat() { # LEVEL
	local began=$SECONDS
	while sleep 30 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
		echo "test: $1: $((SECONDS - began)) s so far"
	done
}

case ${1:-} in
--only)
	"$2"
	exit
	;;
--binary)
	shift
	binary "$@"
	exit
	;;
esac

levels=("$@") failed=() files=()
[ ${#levels[@]} -gt 0 ] || levels=(unit integration e2e)
mkdir -p "$logs"
"$go" build -o "$logs/testlog" ./hack/testlog
for level in "${levels[@]}"; do
	began=$SECONDS verdict=took
	echo "test: $level"
	rm -f "$logs/$level.json"
	beat "$level" &
	hack/test.sh --only "$level" 2>&1 | tee "$logs/$level.out" || { verdict="FAILED after"; failed+=("$level"); }
	kill $!
	echo "test: $level $verdict $((SECONDS - began)) s"
	[ ! -e "$logs/$level.json" ] || files+=("$logs/$level.json")
done
echo "test: all of it took $SECONDS s; the slowest:"
[ ${#files[@]} -eq 0 ] || "$logs/testlog" -slowest 10 "${files[@]}"
for level in "${failed[@]}"; do
	printf '%s\n' "test: $level FAILED" "$(<"$logs/$level.out")"
done
[ ${#failed[@]} -eq 0 ] || { echo "test: FAILED: ${failed[*]}"; exit 1; }
