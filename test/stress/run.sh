#!/usr/bin/env bash
# Starts the production programs again and again on a simulated driver, and uses
# the simulator's library from many threads while its process forks: what breaks
# one process in thousands is not found by tests that run for seconds.
#
#   test/stress/run.sh                          # about half an hour on two cores
#   DOCTORS=100 PLUGINS=20 ROUNDS=100 test/stress/run.sh
#   test/stress/run.sh build DIR                # only build the programs, into DIR
#   PROGRAMS=DIR test/stress/run.sh             # on a host without Go: with those programs
#
# It prints one line a program, and ends with 1 if any process failed. Needs root.
set -euo pipefail

doctors=${DOCTORS:-20000}
plugins=${PLUGINS:-2000}
rounds=${ROUNDS:-20000}
at_once=${AT_ONCE:-4}

build() { # DIR
	(
		cd "$(dirname "${BASH_SOURCE[0]}")/../.."
		CGO_ENABLED=0 go build -o "$1/" ./sim/cmd/nvmlsim
		CGO_ENABLED=1 go build -tags netgo,osusergo -o "$1/" ./cmd/kubelet-plugin
		CGO_ENABLED=0 go run ./sim/cmd/nvmlsim/lib "$1/libnvidia-ml.so.1"
		cc -O2 -pthread -o "$1/stress" sim/cmd/nvmlsim/testdata/stress.c -ldl
	)
}

if [ "${1:-}" = build ]; then
	mkdir -p "${2:?the directory for the programs}"
	build "$(realpath "$2")"
	exit
fi

dir=$(mktemp -d)
export dir
trap 'rm -rf "$dir"' EXIT

if [ -n "${PROGRAMS:-}" ]; then
	cp "$PROGRAMS"/{nvmlsim,kubelet-plugin,libnvidia-ml.so.1,stress} "$dir/"
else
	build "$dir"
fi
root=$dir/host/run/nvidia/driver
"$dir/nvmlsim" install --root "$root" --machine 4xh100-80gb,4xa30
"$root/usr/bin/nvidia-smi" -i 0 -mig 1 >/dev/null
"$root/usr/bin/nvidia-smi" mig -i 0 -cgi 19,19,19,19,19,19,19 -C >/dev/null
touch "$dir/hook"
chmod +x "$dir/hook"
cat >"$dir/kubeconfig" <<'END'
apiVersion: v1
kind: Config
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
users: [{name: nobody, user: {}}]
current-context: nowhere
END

# failed records how a process ended, with what it said.
failed() { # NAME RC OUTPUT
	{
		echo "$1 ended with $2"
		cat "$3"
	} >>"$dir/failures"
	echo >>"$dir/failed-$1"
}
export -f failed

doctor() {
	local out=$dir/out-$1 rc=0
	mkdir -p "$dir/host/cdi" "$dir/host/data"
	"$dir/kubelet-plugin" doctor --host-root "$dir/host" --cdi-dir "$dir/host/cdi" --data-dir "$dir/host/data" \
		--driver-root /run/nvidia/driver >"$out" 2>&1 || rc=$?
	[ "$rc" = 0 ] || failed doctor "$rc" "$out"
	rm -f "$out"
}
export -f doctor

# plugin starts one, waits until it has found the driver, and stops it.
plugin() {
	local out=$dir/out-$1 own=$dir/node-$1 rc=0 pid said
	mkdir -p "$own"/{cdi,data,kubelet/plugins,kubelet/plugins_registry}
	mkfifo "$out"
	"$dir/kubelet-plugin" --host-root "$dir/host" --cdi-dir "$own/cdi" --data-dir "$own/data" --kubelet-root "$own/kubelet" \
		--driver-root /run/nvidia/driver --kubeconfig "$dir/kubeconfig" --node-name "n$1" --metrics-address "" \
		--cdi-hook "$dir/hook" -v 2 >"$out" 2>&1 &
	pid=$!
	exec 9<"$out"
	while read -r -t 60 said <&9; do
		echo "$said" >>"$own/log"
		[[ $said != *"Found the NVIDIA driver"* ]] || break
	done
	[[ ${said:-} == *"Found the NVIDIA driver"* ]] || echo "it has not found the driver" >>"$own/log"
	kill -TERM "$pid" 2>/dev/null || true
	cat <&9 >>"$own/log"
	wait "$pid" || rc=$?
	if [ "$rc" != 0 ] || grep -q "has not found the driver" "$own/log"; then
		failed plugin "$rc" "$own/log"
	fi
	exec 9<&-
	rm -rf "$own" "$out"
}
export -f plugin

# times runs a function so often, some at a time.
times() { # NAME COUNT
	local begin=$SECONDS died=0
	seq "$2" | xargs -P "$at_once" -I{} bash -c "$1 {}"
	[ ! -e "$dir/failed-$1" ] || died=$(wc -l <"$dir/failed-$1")
	echo "$1: $2 starts, $died failed, $((SECONDS - begin)) s"
}

times doctor "$doctors"
times plugin "$plugins"
begin=$SECONDS rc=0
"$dir/stress" "$root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1" 32 "$rounds" >"$dir/out" 2>&1 || rc=$?
[ "$rc" = 0 ] || failed stress "$rc" "$dir/out"
echo "library: 32 threads, $rounds rounds each, and $((rounds / 8)) forks, ended with $rc, $((SECONDS - begin)) s"
left=$(pgrep -fc "^nvmlsim-engine $dir/" || true)
echo "engines left: $left"
[ ! -e "$dir/failures" ] || { head -c 20000 "$dir/failures" >&2; exit 1; }
[ "$left" = 0 ]
