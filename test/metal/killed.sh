#!/usr/bin/env bash
# Kills CUDA programs in the middle of their kernels, and says how often that ended a program
# beside them: first on one MPS daemon, then in time slices. It needs an NVIDIA driver, nvcc and
# four minutes, but neither Tessera nor Kubernetes, and changes no setting of the GPU, which must
# be in compute mode Default, without a daemon.
#
#   ./killed.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export CUDA_VISIBLE_DEVICES=0 CUDA_MPS_PIPE_DIRECTORY=$work CUDA_MPS_LOG_DIRECTORY=$work
neighbour= daemon=
leave() {
	[ -z "$neighbour" ] || kill -9 "$neighbour" 2>/dev/null || true
	[ -z "$daemon" ] || echo quit | nvidia-cuda-mps-control || true
	rm -rf "$work"
}
trap leave EXIT
nvcc -O2 -arch=native -o "$work/killed" "$here/killed.cu"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader -i 0

# begin starts the neighbour. After a fatal fault the server refuses clients for a moment.
begin() {
	for _ in {1..20}; do
		"$work/killed" neighbour 2 >"$work/neighbour" 2>&1 &
		neighbour=$!
		sleep 0.7
		! kill -0 "$neighbour" 2>/dev/null || return 0
	done
	echo "the neighbour doesn't start: $(cat "$work/neighbour")" >&2
	exit 1
}

# kills starts victims one after the other, kills each, and prints how many neighbours that
# ended. With terminate it has the MPS daemon end each victim's work first.
kills() { # WHAT TIMES SIGNAL MILLISECONDS QUEUE [terminate]
	local what=$1 times=$2 signal=$3 milliseconds=$4 queue=$5 terminate=${6:-} ended=0 victim server
	begin
	for ((i = 0; i < times; i++)); do
		"$work/killed" victim "$milliseconds" "$queue" >"$work/victim" 2>&1 &
		victim=$!
		until grep -q ready "$work/victim"; do
			kill -0 "$victim" || exit 1
			sleep 0.02
		done
		sleep "0.$((RANDOM % 400 + 200))"
		if [ "$terminate" ]; then
			server=$(echo get_server_list | nvidia-cuda-mps-control)
			echo "terminate_client $server $victim" | nvidia-cuda-mps-control >/dev/null
		fi
		kill "-$signal" "$victim" 2>/dev/null || true
		wait "$victim" 2>/dev/null || true
		sleep 0.6
		if ! kill -0 "$neighbour" 2>/dev/null; then
			ended=$((ended + 1))
			begin
		fi
	done
	kill -9 "$neighbour"
	wait "$neighbour" 2>/dev/null || true
	echo "$what: $ended of $times"
}

nvidia-cuda-mps-control -d
daemon=1
for milliseconds in 5 10 20 50 100 200; do
	kills "SIGKILL, kernels of $milliseconds ms" 12 KILL "$milliseconds" 1
done
kills "SIGKILL, 2000 kernels of 1 ms in the queue" 8 KILL 1 2000
kills "SIGTERM without a handler, 400 ms" 4 TERM 400 1
HANDLER=exit kills "SIGTERM, exit() in the handler, 400 ms" 8 TERM 400 1
HANDLER=finish kills "SIGTERM, returns after its kernel, 400 ms" 8 TERM 400 1
kills "terminate_client, then SIGKILL, 400 ms" 12 KILL 400 1 terminate
kills "terminate_client, then SIGKILL, 5 s" 6 KILL 5000 1 terminate
echo quit | nvidia-cuda-mps-control
daemon=
export CUDA_MPS_PIPE_DIRECTORY=$work/none
kills "time slices: SIGKILL, 400 ms" 12 KILL 400 1
