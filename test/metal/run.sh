#!/usr/bin/env bash
# Runs Tessera on this host's real GPU: unpacks the bundle that lies beside it
# (made by `make metal-bundle`), brings a whole Kubernetes up, installs the
# chart, runs CUDA in a pod that claimed the GPU, checks that a pod without a
# claim sees none, measures, and takes everything down again. It needs root and
# an NVIDIA driver; no Go, network or registry. It never changes a setting of
# the GPU. PODS, IDLE and ONLY are passed on to the benchmark with simulated GPUs.
set -euo pipefail
parts=$(cd "$(dirname "$0")" && pwd)
work=/var/tmp/tessera-metal
bundle=$work/bundle

say() { printf '\nmetal: %s\n' "$*"; }
fail() { printf '\nmetal: FAILED: %s\n' "$*" >&2; exit 1; }
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN {printf "%.1f s", b - a}'; }

[ "$(id -u)" = 0 ] || fail "run this as root"
say "unpacking"
mkdir -p "$work"
(cd "$parts" && sha256sum -c --quiet SHA256SUMS)
cat "$parts"/metal.tar.xz.* | tar -C "$work" -xJ
localcluster=$bundle/localcluster
export TESSERA_BIN_DIR=$bundle/bin KUBECONFIG=/var/lib/localcluster/metal/kubeconfig
kubectl=$bundle/bin/kubectl
helm=$bundle/bin/helm

down() {
  status=$?
  if [ $status != 0 ]; then
    "$kubectl" get pods -A -o wide || true
    "$kubectl" get events -A --sort-by=.lastTimestamp | tail -n 30 || true
    "$kubectl" -n tessera-system logs -l app.kubernetes.io/name=tessera --tail 60 --prefix || true
    "$kubectl" get gpuinventories -o yaml || true
  fi
  "$localcluster" down --name metal || true
  exit $status
}
trap down EXIT

say "the host"
uname -sr
cat /proc/driver/nvidia/version
nvidia-smi -L
before=$(nvidia-smi --query-gpu=uuid,compute_mode,mig.mode.current,persistence_mode --format=csv,noheader)

say "the hardware port's contract on this GPU"
library=$(ldconfig -p | awk '/libnvidia-ml.so.1 .*x86-64/ {print $NF; exit}')
"$bundle/contract.test" -test.run '^TestContract$' -test.v -nvml.library "${library:-/usr/lib/libnvidia-ml.so.1}"

say "CUDA program"
if command -v nvcc >/dev/null; then
  # It brings this host's C library along, at the same path here and in the
  # pods, since that of the pods' image may be older.
  mkdir -p "$bundle/lib"
  for l in ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0; do
    cp -L "$(ldconfig -p | awk -v l="$l" '$1 == l && /x86-64/ {print $NF; exit}')" "$bundle/lib/"
  done
  nvcc -O2 -cudart static -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc \
    -Xlinker --dynamic-linker="$bundle/lib/ld-linux-x86-64.so.2" -Xlinker -rpath="$bundle/lib" \
    -o "$bundle/vectoradd" "$bundle/vectoradd.cu"
elif [ ! -x "$bundle/vectoradd" ]; then
  fail "nvcc isn't here, and the bundle has no vectoradd built elsewhere"
fi
"$bundle/vectoradd"

start=$(now)
"$localcluster" up --name metal
say "cluster up in $(since "$start")"
"$localcluster" load-image --name metal "$bundle/tessera.tar"
start=$(now)
"$helm" install tessera "$bundle/chart" --namespace tessera-system --create-namespace --wait --timeout 2m
say "chart installed in $(since "$start")"
for _ in $(seq 100); do
  [ -n "$("$kubectl" get resourceslices -o name)" ] && break
  sleep 0.1
done
"$kubectl" get gpuinventories
"$kubectl" get resourceslices -o yaml

say "a pod with a claim, and one without"
start=$(now)
"$kubectl" apply -f "$bundle/pods.yaml"
"$kubectl" wait --for=condition=Ready pod/with-claim pod/without-claim --timeout=60s
say "both pods ready in $(since "$start")"
for _ in $(seq 300); do
  "$kubectl" logs with-claim | grep -q 'done$' && "$kubectl" logs without-claim | grep -q 'done$' && break
  sleep 0.1
done
"$kubectl" logs with-claim
"$kubectl" logs with-claim | grep -q 'vectorAdd: ok' || fail "the pod with the claim could not compute"
"$kubectl" logs with-claim | grep -q 'GPU 0: NVIDIA' || fail "nvidia-smi doesn't work in the pod with the claim"
say "the pod without a claim says:"
"$kubectl" logs without-claim
"$kubectl" logs without-claim | grep -q nvidia && fail "the pod without a claim sees device nodes of the driver"
"$kubectl" logs without-claim | grep -q 'vectorAdd: ok' && fail "the pod without a claim could compute"
say "the CDI spec of the claim"
"$localcluster" exec --name metal node-0 -- sh -c 'for f in /var/run/cdi/*; do echo "$f"; head -c 3000 "$f"; echo; done'
say "the device cgroup keeps a container without a claim away from the GPU"
refused=$("$kubectl" exec without-claim -- sh -c 'mknod /tmp/nvidiactl c 195 255; cat /tmp/nvidiactl 2>&1' || true)
echo "$refused"
[[ $refused == *"not permitted"* ]] || fail "the container without a claim opened /dev/nvidiactl"

say "the doctor says"
"$kubectl" exec --namespace tessera-system daemonset/tessera-node -- kubelet-plugin doctor

say "uninstalling"
"$kubectl" delete -f "$bundle/pods.yaml" --wait=true
"$helm" uninstall tessera --namespace tessera-system --wait
for _ in $(seq 600); do
  [ -z "$("$kubectl" get resourceslices -o name)" ] && break
  sleep 0.1
done
[ -z "$("$kubectl" get resourceslices,deviceclasses -o name)" ] || fail "helm uninstall left slices or classes"
"$localcluster" down --name metal
trap - EXIT

say "figures with the real GPU"
"$bundle/bench" -bundle "$bundle" -real -idle 0 -pods "${PODS:-20}"
say "figures with 120 simulated GPUs on this host"
"$bundle/bench" -bundle "$bundle" -idle "${IDLE:-60s}" -pods "${PODS:-20}" ${ONLY:+-only "$ONLY"}

after=$(nvidia-smi --query-gpu=uuid,compute_mode,mig.mode.current,persistence_mode --format=csv,noheader)
[ "$before" = "$after" ] || fail "the GPU's settings changed: $before -> $after"
left=$(for p in /proc/[0-9]*; do tr '\0' ' ' <"$p/cmdline" 2>/dev/null; echo; done | grep -E '^[^ ]*(kube-apiserver|containerd|kubelet|machine-init)' || true)
[ -z "$left" ] || fail "processes are left: $left"
if grep -E 'localcluster|tessera' /proc/mounts; then fail "mounts are left"; fi
say "ok"
