# shellcheck shell=bash disable=SC2154
# run.sh's phase churn. Sourced by run.sh, whose variables it uses, after mps.sh.

# GPU i is offered as churn_kinds[i mod 4], and one entry further in each quarter of the run:
# each GPU is offered in all ways.
churn_kinds=(equal size slices whole)

# churn_policy INDEX UUID KIND offers a GPU in that way.
churn_policy() {
  local plan
  case $3 in
    equal) plan='{mps: {shares: 4}}' ;;
    size) plan='{mps: {consumable: {memoryStep: 1Gi, maxClients: 16}}}' ;;
    slices) plan='{timeSliced: {replicas: 4}}' ;;
    whole) k delete sharingpolicy "churn-$1" --ignore-not-found && return ;;
  esac
  cat <<YAML | k apply -f -
apiVersion: gpu.tessera.dev/v1alpha1
kind: SharingPolicy
metadata: {name: churn-$1}
spec:
  gpuSelector: device.attributes["gpu.nvidia.com"].uuid == "$2"
  plan: $plan
YAML
}

# churn_template INDEX UUID KIND prints the claims of the GPU's pods.
churn_template() {
  local class capacity="" attribute=parentUUID
  case $3 in
    equal) class=mps.gpu.nvidia.com ;;
    size) class=mps.gpu.nvidia.com capacity='capacity: {requests: {memory: 4Gi, threadPercentage: 25}}' ;;
    slices) class=timeslice.gpu.nvidia.com ;;
    whole) class=gpu.nvidia.com attribute=uuid ;;
  esac
  cat <<YAML
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: churn-$1}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: $class
          selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].$attribute == "$2"'}}]
          $capacity
YAML
}

# churn_pod NAME TEMPLATE USER prints a pod that computes for two seconds and ends.
churn_pod() {
  cat <<YAML
---
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {metal: churn}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  securityContext: {runAsUser: $3, runAsGroup: $3}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: $2}]
  volumes: [{name: metal, hostPath: {path: $bundle}}]
  containers:
  - name: main
    image: localhost/tessera/debian:local
    command: [$client, $1, alloc=200, hold=2]
    resources: {claims: [{name: gpu}]}
    volumeMounts: [{name: metal, mountPath: $bundle, readOnly: true}]
YAML
}

# churn_kind INDEX QUARTER.
churn_kind() { echo "${churn_kinds[($1 + $2) % 4]}"; }

# churn_plan QUARTER offers all GPUs as in that quarter.
churn_plan() {
  local i=0 uuid
  for uuid in $churn_uuids; do
    churn_policy "$i" "$uuid" "$(churn_kind $i "$1")"
    i=$((i + 1))
  done
  await 60 "the plan of quarter $1" churn_offered "$1"
  i=0
  for uuid in $churn_uuids; do
    k delete resourceclaimtemplate "churn-$i" --ignore-not-found >/dev/null
    churn_template "$i" "$uuid" "$(churn_kind $i "$1")"
    i=$((i + 1))
  done | k apply -f - >/dev/null
}

# churn_offered QUARTER: each GPU is offered as the plan says.
churn_offered() {
  local i=0 uuid want
  k get resourceslices -o jsonpath='{range .items[*].spec.devices[*]}{.attributes.parentUUID.string} {.attributes.type.string}{"\n"}{end}' >"$work/offered" || return
  for uuid in $churn_uuids; do
    case $(churn_kind $i "$1") in
      equal) want="4 mps" ;;
      size) want="1 mps" ;;
      slices) want="4 timeslice" ;;
      whole) want="0 mps" ;;
    esac
    i=$((i + 1))
    [ "$(grep -c "^$uuid ${want#* }$" "$work/offered")" = "${want% *}" ] || return
    # Nothing else is offered of it.
    [ "$(grep -c "^$uuid " "$work/offered")" = "${want% *}" ] || return
  done
}

# churn_disturb WAVE does what users and upgrades do to a busy node.
churn_disturb() {
  case $(($1 % 4)) in
    0) crash kubelet-plugin ;;
    1) k -n tessera-system rollout restart daemonset/tessera-node ;;
    2) crash mps-supervisor ;;
    3) crash kubelet-plugin && crash mps-supervisor ;;
  esac
}

# churn_wave WAVE QUARTER: as many pods as fit on every GPU; something is disturbed, and one
# pod deleted by force, before they have all started.
churn_wave() {
  local i j n names="" victim="w$1-0-0"
  for i in $(seq 0 $((gpus - 1))); do
    n=4
    [ "$(churn_kind "$i" "$2")" != whole ] || n=1
    for j in $(seq 0 $((n - 1))); do
      names="$names w$1-$i-$j"
      churn_pod "w$1-$i-$j" "churn-$i" $((1000 + j)) >>"$work/wave.yaml"
    done
  done
  # A wave of one pod has none to spare.
  [ "$(wc -w <<<"$names")" -gt 1 ] || victim=""
  k apply -f "$work/wave.yaml" >/dev/null
  rm "$work/wave.yaml"
  churn_disturb "$1"
  if [ -n "$victim" ]; then
    k delete pod "$victim" --force --grace-period=0 --wait=false 2>/dev/null || true
    names=${names/ $victim/}
  fi
  churn_pods=$((churn_pods + $(wc -w <<<"$names")))
  await 120 "the ends of the pods of wave $1" churn_ended || true
  for i in $names; do
    if ! k logs "$i" 2>/dev/null | grep -q ' held .*: no error'; then
      churn_errors=$((churn_errors + 1))
      miss "$i: $(k get pod "$i" -o jsonpath='{.status.phase} {.status.message}'): $(k logs "$i" 2>&1 | tail -n 2)"
    fi
  done
  k delete pods -l metal=churn --wait --timeout=60s >/dev/null
}

churn_ended() {
  local pods
  pods=$(k get pods -l metal=churn --no-headers 2>/dev/null) && ! grep -vE ' (Completed|Error) ' <<<"$pods" | grep -q .
}

# churn_footprint prints open files and resident memory (MiB) of the node's programs, and the
# number of their processes.
churn_footprint() {
  local p name
  for name in kubelet-plugin mps-supervisor kubelet containerd; do
    for p in $(pgrep -x "$name"); do
      echo "$name files $(find "/proc/$p/fd" 2>/dev/null | wc -l) MiB $(awk '/VmRSS/ {print int($2 / 1024)}' "/proc/$p/status")"
    done
  done
}

# churn_bounded: the same programs run as after the first waves, with at most ten open files and
# 30 MiB more.
churn_bounded() {
  paste -d ' ' "$work/footprint" "$work/footprint.end" |
    awk '$1 != $6 || $8 > $3 + 10 || $10 > $5 + 30 {bad = 1} END {exit bad || !NR}'
}

phase_churn() {
  local quarter wave=0 end memory start
  churn_uuids=$(nvidia-smi --query-gpu=uuid --format=csv,noheader)
  churn_pods=0 churn_errors=0
  k delete sharingpolicies --all --wait=true # of other phases
  start=$(date +%s)
  memory=$(gpu_memory)
  for quarter in 0 1 2 3; do
    churn_plan $quarter
    end=$((start + (quarter + 1) * $(seconds "${FOR:-5m}") / 4))
    # One wave at least.
    while :; do
      churn_wave $wave $quarter
      wave=$((wave + 1))
      if [ $wave = 4 ]; then churn_footprint | tee "$work/footprint"; fi
      [ "$(date +%s)" -lt $end ] || break
    done
  done
  note "  $churn_pods pods in $wave waves in $(($(date +%s) - start)) s, $churn_errors errors; one more in each wave of several was deleted by force"
  k delete sharingpolicies --all --wait=true
  k -n tessera-system rollout status daemonset/tessera-node --timeout=60s
  # Killed often, the supervisor may wait for minutes until it is started again.
  k -n tessera-system wait --for=condition=Ready pod -l app.kubernetes.io/component=mps --timeout=330s
  await 60 "the daemons' end" no_daemon
  await 30 "$gpus whole GPUs" offers gpu "$gpus"
  same "GPU memory in use (MiB)" "$(gpu_memory)" "$memory"
  same "time slices" "$(time_slice)" "$slice_before"
  same "settings" "$(settings)" "$before"
  same "MPS processes" "$(mps_processes)" "$mps_before"
  doctor
  churn_footprint >"$work/footprint.end"
  note "  after the first waves: $(tr '\n' ';' <"$work/footprint")"
  note "  at the end: $(tr '\n' ';' <"$work/footprint.end")"
  check "open files and memory didn't grow" churn_bounded
}
