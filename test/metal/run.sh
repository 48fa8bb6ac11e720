#!/usr/bin/env bash
# Runs Tessera on this host's real GPU: unpacks the bundle that lies beside it
# (made by `make metal-bundle`), brings a whole Kubernetes up, installs the
# chart, proves and measures what it is asked to, and takes everything down
# again. It needs root and an NVIDIA driver; no Go, network or registry.
#
# It changes no setting of the GPU, save its time slice, which it puts back: not
# the compute mode, MIG mode or clocks, and it resets nothing.
#
#   ./run.sh                       everything
#   ONLY=mps ./run.sh              MPS and time slices, in less than six minutes
#   ONLY=torch,pair ./run.sh       the host's PyTorch in pods, and several GPUs
#   ONLY=shares,daemon ./run.sh    these phases; a phase that fails doesn't keep
#                                  the others from running
#   ./run.sh phases                what phases there are
#
# A host may have any number of GPUs: phases about one use the first. FOR=5m is how
# long the phase churn lasts. FIGURES, PODS, ROLLOUTS and IDLE are passed to the
# benchmark (-only, -pods, -rollouts, -idle). PYTHON is an interpreter that has
# PyTorch, python3 if it isn't set.
set -euo pipefail
parts=$(cd "$(dirname "$0")" && pwd)
work=/var/tmp/tessera-metal
bundle=$work/bundle
summary=$work/summary

on_cluster="whole xid usage shares consumable configured escape fault daemon context timeslice throughput torch pair churn"
mps="shares consumable configured escape fault daemon context timeslice throughput prepare"
phases="contract $on_cluster prepare bench simulated"

say() { printf '\nmetal: %s\n' "$*"; }
fail() { printf '\nmetal: FAILED: %s\n' "$*" >&2; exit 1; }
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN {printf "%.1f s", b - a}'; }

if [ "${1:-}" = phases ]; then
  printf 'phases: %s\nmps stands for: %s\n' "$phases" "$mps"
  exit
fi
[ "$(id -u)" = 0 ] || fail "run this as root"
chosen=" ${ONLY:-$phases} "
chosen=${chosen//,/ }
chosen=${chosen// mps / $mps }
for p in $chosen; do
  [[ " $phases " == *" $p "* ]] || fail "ONLY: there is no phase $p, but: $phases mps"
done
wanted() { [[ "$chosen" == *" $1 "* ]]; }

say "unpacking"
mkdir -p "$work"
(cd "$parts" && sha256sum -c --quiet SHA256SUMS)
cat "$parts"/metal.tar.xz.* | tar -C "$work" -xJ
: >"$summary"
rm -f "$work/up"
localcluster=$bundle/localcluster
export TESSERA_BIN_DIR=$bundle/bin KUBECONFIG=/var/lib/localcluster/metal/kubeconfig
kubectl=$bundle/bin/kubectl
helm=$bundle/bin/helm
# shellcheck source=lib.sh
. "$bundle/lib.sh"
# shellcheck source=mps.sh
. "$bundle/mps.sh"
# shellcheck source=churn.sh
. "$bundle/churn.sh"
# shellcheck source=health.sh
. "$bundle/health.sh"
# shellcheck source=usage.sh
. "$bundle/usage.sh"
# shellcheck source=pytorch.sh
. "$bundle/pytorch.sh"

say "the host"
uname -sr
nproc
cat /proc/driver/nvidia/version
nvidia-smi -L
nvidia-smi -q | grep -E 'Addressing Mode|Fabric|CliqueId|ClusterUUID' | sort | uniq -c || true
nvidia-smi topo -m || true
nvidia-smi nvlink -R | head -n 24 || true
gpus=$(nvidia-smi -L | wc -l)
gpu=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -1)
settings() { nvidia-smi --query-gpu=uuid,compute_mode,mig.mode.current,persistence_mode --format=csv,noheader; }
before=$(settings)
slice_before=$(time_slice)
mps_before=$(mps_processes)
echo "$before, time slice $slice_before"

# end takes down what an interrupted run left, and puts the time slice back.
end() {
  status=$?
  "$localcluster" down --name metal || true
  "$localcluster" down --name bench || true
  restore_time_slice "$slice_before" || true
  exit $status
}
trap end EXIT

say "CUDA programs"
build_cuda
"$bundle/vectoradd"
"$bundle/client" host | tee "$work/host"
sms=$(awk '$2 == "SMs" {print $3}' "$work/host")
if wanted torch || wanted pair; then
  describe_pytorch
fi

if wanted contract; then
  phase contract "the hardware port's contract on this GPU"
fi
for p in $on_cluster; do
  wanted "$p" || continue
  cluster_up
  if [ -n "$broken" ] && [ "$p" != whole ]; then
    note "$p: left out"
    continue
  fi
  phase "$p" "$(title "$p")"
done
if [ -e "$work/up" ]; then
  phase uninstall "the doctor, and everything uninstalled"
  rm -f "$work/up"
  "$localcluster" down --name metal || failed="$failed down"
fi
if wanted bench; then
  phase bench "figures with the real GPU"
elif wanted prepare; then
  phase prepare "prepares with the real GPU, over the plugin's socket"
fi
if wanted simulated; then
  phase simulated "figures with simulated GPUs on this host"
fi
phase clean "nothing is left, and the GPU's settings are as before"
restore_time_slice "$slice_before" || true

say "summary ($(date -u +%F), $gpus × $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1), $(uname -r), $(nproc) cores)"
cat "$summary"
trap - EXIT
[ -z "$failed" ] || fail "phases that failed:$failed"
say "ok"
