#!/usr/bin/env bash
# Runs checks that take too long for every change. .ci/run runs one of them,
# chosen by the commit's hash; make test-all runs all, with all systems and
# platforms. A new check is a function here and a name in the list.
#
# usage: hack/long-checks.sh list          print the names
#        hack/long-checks.sh of COMMIT     print the name that COMMIT chooses
#        hack/long-checks.sh run NAME...   run these
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(stress bench fuzz allocators upgrade versions release foreign platforms prometheus scaling consumers browser blocks nvidia agreement powerloss races soak faults kubernetes-1.{31,32,33,34,35,36})

# stress is a twentieth of the run that docs/dev/testing.md reports.
stress() { DOCTORS=1000 PLUGINS=100 ROUNDS=1000 test/stress/run.sh; }

# bench leaves out the figures that need minutes of idling, repeats what takes seconds
# a time less often, and has few hollow nodes: it shows that the benchmark works.
bench() { "${GO:-go}" run ./test/bench -idle=0 -handovers 5 -refusals 3 -refused-pods 10 -pods 5 -rounds 50 -storm-nodes 20 -flapping=0 -nodes 20 -scale-idle 5s -packing-one-of 100; }

# fuzz includes random objects in the types of Kubernetes 1.31, a module of its own.
fuzz() { hack/fuzz.sh 10s && (cd pkg/resource/v1alpha3/roundtrip && "${GO:-go}" test -count 1 ./...); }

allocators() { make allocators; }

upgrade() { test/upgrade/run.sh 1.36 1.37; }

# versions also builds the image of the version that it starts from.
versions() { "${GO:-go}" test -tags versions -count 1 -timeout 40m -v ./test/upgrade; }

# prometheus is a module of its own, which is built first.
prometheus() { "${GO:-go}" test -tags prometheus -count 1 -timeout 20m -skip TestScaling ./test/monitoring; }

# scaling also needs prometheus-adapter, which is built first.
scaling() { "${GO:-go}" test -tags prometheus -count 1 -timeout 20m -run TestScaling ./test/monitoring; }

# consumers runs the story of one system that uses the devices, which the commit's hash
# chooses; with EVERY set, all. It is built first: two to six minutes.
consumers() {
	local name
	name=$(chosen ./test/consumers)
	"${GO:-go}" run ./test/consumers -only "$name"
}

# nvidia builds NVIDIA's programs, modules of their own, first.
nvidia() { "${GO:-go}" test -tags nvidia -count 1 -timeout 20m ./test/nvidia; }

# platforms runs the story of one platform, which the commit's hash chooses; with EVERY
# set, all.
platforms() {
	local name
	name=$(chosen ./test/platforms)
	"${GO:-go}" run ./test/platforms -only "$name"
}

# chosen prints the one of the names that a program lists whose turn it is; with EVERY set,
# nothing, which stands for all.
chosen() { # PROGRAM
	local list names hash
	[ -z "${EVERY:-}" ] || return 0
	list=$("${GO:-go}" run "$1" -list) || return
	mapfile -t names < <(cut -f 1 <<<"$list")
	hash=$(git rev-parse HEAD)
	echo "${names[$((16#${hash:7:7} % ${#names[@]}))]}"
}

release() { deployments/release/twice.sh; }

# foreign runs, under qemu-user, the image's programs for the other architecture and the tests of
# the packages that decide. It compiles all of them first: a quarter of an hour with a cold cache.
foreign() {
	local arch=arm64 qemu=qemu-aarch64
	[ "$(uname -m)" = x86_64 ] || { arch=amd64 qemu=qemu-x86_64; }
	hack/prepare.sh foreign
	"${GO:-go}" test -tags foreign -count 1 -timeout 40m -run TestForeignPrograms ./deployments/container/contents
	GOARCH=$arch CGO_ENABLED=0 "${GO:-go}" test -exec "$qemu" -count 1 -timeout 40m ./pkg/gpu ./pkg/allocator ./pkg/cdihook \
		./pkg/claim ./pkg/health ./pkg/inventory ./pkg/offer ./pkg/policy ./pkg/node/holding ./pkg/kubectl/fit ./pkg/kubectl/view
}

browser() { test/browser/run.sh; }

# blocks runs the commands that README and the pages for users show, each page on a fresh cluster.
blocks() { "${GO:-go}" run ./test/blocks; }

# agreement compares kubectl gpu with the running scheduler over 300 pods.
agreement() { "${GO:-go}" test -tags agreement -count 1 -timeout 20m -v ./test/agreement; }

# powerloss cuts the power with all kinds of devices, and loses names and data at random. It
# makes the disk fail with all kinds of devices, too, and ends prepares at each step in all ways.
powerloss() {
	"${GO:-go}" test -count 1 -timeout 60m -run 'TestPowerLoss|TestDiskFaults' ./pkg/node -args -everything
	"${GO:-go}" test -count 1 -timeout 20m -run TestCrash ./pkg/node/prepare -args -everything
}

# races plays 10,000 operations, with the race detector.
races() { "${GO:-go}" test -race -count 1 -timeout 20m -v -run TestRaces ./pkg/node -args -everything; }

# soak is a tenth of an hour.
soak() { "${GO:-go}" run ./test/soak -for 6m; }

# faults takes the API server and its disk away from the controller, and runs the long
# stories.
faults() {
	"${GO:-go}" test -tags integration,faults -count 1 -timeout 20m -run 'TestSlowEtcd|TestPausedLeader|TestPartitionedLeader' ./pkg/control
	"${GO:-go}" test -tags e2e -count 1 -timeout 30m -run TestStories ./test/e2e -long -lanes 2
}

# kubernetes runs the stories of every feature on clusters of an older version, which
# is built first.
kubernetes() { # VERSION
	local gates=all
	case $1 in 1.31 | 1.32) gates=on ;; esac # gates=all adds almost nothing on these
	"${GO:-go}" run ./test/matrix -lanes 3 -only "$1-$gates"
}

# choose prints the check whose turn it is at a commit.
choose() { # COMMIT
	local hash
	hash=$(git rev-parse --verify "$1^{commit}")
	echo "${all[$((16#${hash:0:7} % ${#all[@]}))]}"
}

usage() {
	sed -n 's/^# usage: /usage: /p; s/^#        hack/       hack/p' "${BASH_SOURCE[0]}" >&2
	exit 2
}

case ${1:-} in
list) printf '%s\n' "${all[@]}" ;;
of) choose "${2:?}" ;;
run)
	shift
	for name in "$@"; do
		[[ " ${all[*]} " == *" $name "* ]] || usage
		case $name in
		kubernetes-*) kubernetes "${name#kubernetes-}" ;;
		*) "$name" ;;
		esac
	done
	;;
*) usage ;;
esac
