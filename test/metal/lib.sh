# shellcheck shell=bash disable=SC2154
# What run.sh's phases are made of, and the phases that MPS has no part in.
# Sourced by run.sh, whose variables it uses.

failed=""
missed=0
broken=""
k() { "$kubectl" "$@"; }
on_node() { "$localcluster" exec --name metal node-0 -- sh -c "$1"; }

# phase NAME TITLE runs phase_NAME. What fails in it is told and remembered, and
# the next phase runs all the same.
phase() {
  local start rc
  start=$(now)
  say "== $1: $2"
  set +e
  (
    set -e
    missed=0
    "phase_$1"
    exit $missed
  )
  rc=$?
  set -e
  if [ $rc = 0 ]; then
    note "$1: ok, $(since "$start")"
  else
    failed="$failed $1"
    note "$1: FAILED, $(since "$start")"
    diagnose
    [ ! -e "$work/up" ] || no_pods || true
  fi
}

# note tells something that the summary repeats.
note() { printf 'metal: %s\n' "$*" | tee -a "$summary"; }

# miss tells what isn't as it should be; the phase goes on and fails at its end.
miss() {
  missed=1
  note "  MISSED: $*"
}

# check WHAT COMMAND... expects that COMMAND succeeds.
check() {
  local what=$1
  shift
  if "$@"; then note "  $what"; else miss "$what"; fi
}

# same WHAT GOT WANT.
same() { if [ "$2" = "$3" ]; then note "  $1: $2"; else miss "$1: $2, want $3"; fi; }

# await SECONDS WHAT COMMAND... polls until COMMAND succeeds.
await() {
  local end=$(($(date +%s) + $1)) what=$2
  shift 2
  until "$@"; do
    if [ "$(date +%s)" -ge "$end" ]; then
      miss "$what: not in time"
      return 1
    fi
    sleep 0.1
  done
}

# seconds DURATION reads 300, 300s or 5m.
seconds() {
  case $1 in
    *m) echo $((${1%m} * 60)) ;;
    *) echo "${1%s}" ;;
  esac
}

# gpu_memory prints how much memory of each GPU is in use, in MiB.
gpu_memory() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | tr '\n' ' '; }

no_pods() { k delete pods --all --ignore-not-found --wait --timeout=60s; }

diagnose() {
  [ -e "$work/up" ] || return 0
  logs
  k get pods -A -o wide || true
  k get events -A --sort-by=.lastTimestamp | tail -n 20 || true
  k -n tessera-system logs -l app.kubernetes.io/name=tessera --all-containers --tail 40 --prefix --max-log-requests 20 || true
  k get sharingpolicies -o yaml | sed -n '/^  *status:/,$p' || true
  k get gpuinventories -o jsonpath='{range .items[*]}{.status.conditions}{"\n"}{range .status.gpus[*]}{.conditions}{"\n"}{end}{end}' || true
  on_node 'for f in /run/tessera/mps/d/*/log/*.log; do echo "$f"; tail -n 15 "$f"; done' || true
}

# build_cuda compiles the CUDA programs. They bring this host's C library along,
# at the same path here and in the pods, since that of the pods' image may be
# older.
build_cuda() {
  if ! command -v nvcc >/dev/null; then
    PATH=$PATH:/usr/local/cuda/bin
  fi
  if ! command -v nvcc >/dev/null; then
    [ -x "$bundle/vectoradd" ] && [ -x "$bundle/client" ] || fail "nvcc isn't here, and the bundle has no CUDA programs built elsewhere"
    return
  fi
  local l program capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
  mkdir -p "$bundle/lib"
  for l in ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0; do
    cp -L "$(ldconfig -p | awk -v l="$l" '$1 == l && /x86-64/ {print $NF; exit}')" "$bundle/lib/"
  done
  for program in vectoradd client; do
    nvcc -O2 -arch="sm_${capability/./}" -cudart static -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc \
      -Xlinker --dynamic-linker="$bundle/lib/ld-linux-x86-64.so.2" -Xlinker -rpath="$bundle/lib" \
      -o "$bundle/$program" "$bundle/$program.cu" || fail "nvcc can't compile $program.cu"
  done
  # What a container could bring along to talk to an MPS daemon.
  cp -L "$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control)" "$bundle/mps-control" || true
  chmod -R a+rX "$work"
}

# time_slice is how long each GPU's turns are, in the order of the GPUs: Default,
# Short, Medium, Long; nothing where the driver doesn't tell.
time_slice() { nvidia-smi compute-policy --list 2>/dev/null | awk '/Timeslice/ {printf "%s%s", sep, $(NF-1); sep = " "}' || true; }

# restore_time_slice SLICES sets time slices that time_slice printed before.
restore_time_slice() {
  local id=0 i name slice
  [ "$(time_slice)" != "$1" ] || return 0
  for slice in $1; do
    i=0
    for name in Default Short Medium Long; do
      if [ "$name" = "$slice" ]; then
        nvidia-smi compute-policy -i $id --set-timeslice $i
      fi
      i=$((i + 1))
    done
    id=$((id + 1))
  done
}

# cluster_up brings up what the phases run on, once.
cluster_up() {
  [ ! -e "$work/up" ] || return 0
  local start
  start=$(now)
  "$localcluster" up --name metal
  note "cluster up in $(since "$start")"
  "$localcluster" load-image --name metal "$bundle/tessera.tar"
  start=$(now)
  touch "$work/up"
  # The compute mode is a setting of other people's hardware.
  if ! "$helm" install tessera "$bundle/chart" --namespace tessera-system --create-namespace \
    --set image.repository=localhost/tessera --set node.mpsComputeMode=unchanged --wait --timeout 2m; then
    diagnose
    note "the chart isn't ready: only the phase whole makes sense"
    failed="$failed install"
    broken=1
  fi
  note "chart installed in $(since "$start")"
  await 20 "$gpus GPUs offered" offers gpu "$gpus" || diagnose
  k get gpuinventories
  sed "s/FIRST_GPU/$gpu/" "$bundle/templates.yaml" | k apply -f -
}

no_slices() { [ -z "$(k get resourceslices -o name)" ]; }
no_classes() { [ -z "$(k get deviceclasses -o name)" ]; }

phase_contract() {
  local library
  library=$(ldconfig -p | awk '/libnvidia-ml.so.1 .*x86-64/ {print $NF; exit}')
  "$bundle/contract.test" -test.run '^TestContract$' -test.v -nvml.library "${library:-/usr/lib/libnvidia-ml.so.1}"
}

both_done() { k logs with-claim | grep -q 'done$' && k logs without-claim | grep -q 'done$'; }

# phase_whole: a pod with a claim computes, one without can't.
phase_whole() {
  local start refused uuid metadata
  k get resourceslices -o yaml
  start=$(now)
  k apply -f "$bundle/pods.yaml"
  k wait --for=condition=Ready pod/with-claim pod/without-claim --timeout=60s
  note "  both pods ready in $(since "$start")"
  await 30 "both pods' ends" both_done
  k logs with-claim
  check "the pod with the claim computes" grep -q 'vectorAdd: ok' <(k logs with-claim)
  check "nvidia-smi works in the pod with the claim" grep -q 'GPU 0: NVIDIA' <(k logs with-claim)
  uuid=$(k logs with-claim | sed -n 's/^GPU 0: .*(UUID: \(GPU-[^)]*\)).*/\1/p')
  metadata=$(k exec with-claim -- sh -c 'cat /var/run/kubernetes.io/dra-device-attributes/*/*/*/*' || true)
  say "what the container reads of its device"
  printf '%s\n' "$metadata"
  check "the container's device metadata has its GPU's UUID, ${uuid:-none}" grep -qF "${uuid:-no UUID in the log}" <<<"$metadata"
  say "the pod without a claim says:"
  k logs without-claim
  check "the pod without a claim sees no device node" lacks nvidia without-claim
  check "the pod without a claim can't compute" lacks 'vectorAdd: ok' without-claim
  say "the CDI spec of the claim"
  on_node 'for f in /var/run/cdi/*; do echo "$f"; head -c 3000 "$f"; echo; done'
  refused=$(k exec without-claim -- sh -c 'mknod /tmp/nvidiactl c 195 255; cat /tmp/nvidiactl 2>&1' || true)
  check "the device cgroup keeps it from the GPU: $refused" test "${refused/not permitted/}" != "$refused"
  doctor
  k delete -f "$bundle/pods.yaml" --wait=true
}

lacks() { ! k logs "$2" | grep -q "$1"; }

# doctor asks whether what is recorded, running and set agrees.
doctor() {
  local out
  out=$(k exec --namespace tessera-system daemonset/tessera-node -- kubelet-plugin doctor 2>&1 || true)
  check "the doctor: $out" grep -q 'nothing is wrong' <<<"$out"
}

phase_uninstall() {
  no_pods
  k delete sharingpolicies --all --wait=true
  doctor
  "$helm" uninstall tessera --namespace tessera-system --wait
  await 60 "slices gone" no_slices
  await 60 "classes gone" no_classes
  same "MPS processes left" "$(mps_processes)" "$mps_before"
}

phase_prepare() { "$bundle/bench" -bundle "$bundle" -real -only journal,prepare,mps | summarised; }
phase_bench() {
  "$bundle/bench" -bundle "$bundle" -real -idle 0 -pods "${PODS:-20}" -rollouts "${ROLLOUTS:-10}" ${FIGURES:+-only "$FIGURES"} | summarised
}
phase_simulated() {
  "$bundle/bench" -bundle "$bundle" -idle "${IDLE:-60s}" -pods "${PODS:-20}" ${FIGURES:+-only "$FIGURES"} | summarised
}

# summarised copies figures to the summary.
summarised() { tee >(grep '^bench:' >>"$summary"); }

# phase_clean: as if nothing had been here.
phase_clean() {
  local left
  same "the GPU's settings" "$(settings)" "$before"
  same "its time slice" "$(time_slice)" "$slice_before"
  left=$(for p in /proc/[0-9]*; do tr '\0' ' ' 2>/dev/null <"$p/cmdline" || true; echo; done | grep -E '^[^ ]*(kube-apiserver|containerd|kubelet|machine-init)' || true)
  same "processes left" "$left" ""
  same "MPS processes left" "$(mps_processes)" "$mps_before"
  same "mounts left" "$(grep -E 'localcluster|tessera' /proc/mounts || true)" ""
}
