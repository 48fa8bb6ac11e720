# shellcheck shell=bash disable=SC2154
# run.sh's phases that use the host's PyTorch, and those about several GPUs.
# Sourced by run.sh, whose variables it uses, after lib.sh and mps.sh.

python=${PYTHON:-python3}
described=$work/pytorch
rounds=10

has_pytorch() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; }

# describe_pytorch writes down what a pod needs of this host to run its PyTorch,
# and copies the libraries among it. It runs before the cluster is up, so that
# the node sees the copies.
describe_pytorch() {
  local kind path
  rm -f "$described"
  has_pytorch || return 0
  if ! "$python" "$bundle/pytorch.py" describe >"$described.part"; then
    note "PyTorch is here but doesn't work"
    return 0
  fi
  mkdir -p "$bundle/pytorch-lib"
  while read -r kind path; do
    [ "$kind" != library ] || cp -L "$path" "$bundle/pytorch-lib/"
  done <"$described.part"
  chmod -R a+rX "$bundle/pytorch-lib"
  mv "$described.part" "$described"
  awk '$1 == "version" {print "PyTorch " $2 ", NCCL " $3}' "$described"
}

# python_pod NAME TEMPLATE ARGUMENTS prints a pod in which pytorch.py serves
# measurements, with the host's Python and this host's C library.
python_pod() {
  local argv0 real path i=0 mounts="" volumes=""
  read -r _ argv0 real <"$described"
  while read -r path; do
    volumes+="
  - {name: python-$i, hostPath: {path: $path}}"
    mounts+="
    - {name: python-$i, mountPath: $path, readOnly: true}"
    i=$((i + 1))
  done < <(awk '$1 == "directory" {print $2}' "$described")
  cat <<END
---
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {metal: mps}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimTemplateName: $2}]
  volumes:
  - {name: metal, hostPath: {path: $bundle}}
  - {name: interpreter, hostPath: {path: $real, type: File}}
  - {name: shm, emptyDir: {medium: Memory}}$volumes
  containers:
  - name: main-0
    image: localhost/tessera/debian:local
    command:
    - sh
    - -c
    - echo "$1 may lock \$(ulimit -l) KiB of memory";
      mkfifo /tmp/in /tmp/out;
      exec $bundle/lib/ld-linux-x86-64.so.2 --library-path $bundle/pytorch-lib:$bundle/lib --argv0 $argv0 /run/python $bundle/pytorch.py $3
    env: [{name: PYTHONDONTWRITEBYTECODE, value: "1"}]
    resources: {claims: [{name: gpu}]}
    volumeMounts:
    - {name: metal, mountPath: $bundle, readOnly: true}
    - {name: interpreter, mountPath: /run/python, readOnly: true}
    - {name: shm, mountPath: /dev/shm}$mounts
END
}

# bare ARGUMENTS starts pytorch.py on the host; the phase's end ends it.
bare() {
  rm -rf "$work/bare"
  mkdir "$work/bare"
  mkfifo "$work/bare/in" "$work/bare/out"
  # shellcheck disable=SC2086 # the arguments are words
  "$python" "$bundle/pytorch.py" $1 &
  # shellcheck disable=SC2064 # this process, not a later one
  trap "kill $! 2>/dev/null || true" EXIT
}

# ask WHERE REQUEST asks the server on the host ("bare") or in a pod.
ask() {
  local dir=/tmp
  local command="until [ -p DIR/in ] && [ -p DIR/out ]; do sleep 0.1; done; echo '$2' >DIR/in; read -r answer <DIR/out; echo \"\$answer\""
  if [ "$1" = bare ]; then
    dir=$work/bare
    timeout 120 sh -c "${command//DIR/$dir}"
  else
    timeout 120 "$kubectl" exec "$1" -c main-0 -- sh -c "${command//DIR/$dir}"
  fi
}

# number WHERE REQUEST asks for a figure, and fails where there is none.
number() {
  local got
  got=$(ask "$1" "$2") || true
  if ! [[ "$got" =~ ^[0-9.]+$ ]]; then
    echo "$1: ${got:-no answer}" >&2
    return 1
  fi
  echo "$got"
}

median() { sort -g | awk '{v[NR] = $1} END {print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2}'; }

# alternate POD SECONDS UNIT LEAST measures in turn on the host and in a pod, and
# compares the medians.
alternate() {
  local round where order got
  : >"$work/figures"
  for round in $(seq "$rounds"); do
    order="bare $1"
    [ $((round % 2)) = 1 ] || order="$1 bare"
    for where in $order; do
      got=$(number "$where" "measure 0 $2")
      echo "$where $got" | tee -a "$work/figures"
    done
  done
  compare "$1" "$3" "$4"
}

# compare POD UNIT LEAST compares the medians of the figures.
compare() {
  local bare pod
  bare=$(awk '$1 == "bare" {print $2}' "$work/figures" | median)
  pod=$(awk -v w="$1" '$1 == w {print $2}' "$work/figures" | median)
  check "$1: $pod $2, bare $bare $2: ratio $(awk -v a="$pod" -v b="$bare" 'BEGIN {printf "%.3f", a / b}'), wanted at least $3 (medians of $rounds alternating runs; $(spread "$1"))" \
    awk -v a="$pod" -v b="$bare" -v least="$3" 'BEGIN {exit !(a / b >= least)}'
}

# spread POD prints the least and the most of both.
spread() {
  awk -v w="$1" '
    !($1 in least) || $2 < least[$1] {least[$1] = $2}
    $2 > most[$1] {most[$1] = $2}
    END {printf "%s to %s, bare %s to %s", least[w], most[w], least["bare"], most["bare"]}' "$work/figures"
}

# whole_only takes policies away and waits for GPUs that are offered whole.
whole_only() {
  k delete sharingpolicies --all --wait=true
  await 30 "$gpus whole GPUs" offers gpu "$gpus"
}

# no_pytorch says that a phase is left out, where the host has no PyTorch.
no_pytorch() {
  [ ! -e "$described" ] || return 1
  note "  $1: left out, $python here has no PyTorch"
}

# phase_torch: a bf16 matrix product in a pod with a whole GPU, and in four pods
# on shares of it, against the same on the host.
phase_torch() {
  local i start
  no_pytorch torch && return
  whole_only
  bare "matmul $work/bare"
  start=$(now)
  python_pod matmul whole "matmul /tmp" | k apply -f -
  k wait --for=condition=Ready pod/matmul --timeout=60s
  note "  bare: $(ask bare info)"
  note "  in the pod: $(ask matmul info), $(since "$start") from creation with Python's start"
  alternate matmul 0.5 TFLOP/s 0.97
  no_pods

  note "  -- four shares"
  planned '{mps: {shares: 4}}' mps 4
  for i in 1 2 3 4; do
    python_pod "share-$i" share "matmul /tmp"
  done | k apply -f -
  k wait --for=condition=Ready pod/share-1 pod/share-2 pod/share-3 pod/share-4 --timeout=60s
  for i in 1 2 3 4; do
    note "  share-$i: $(ask "share-$i" info)"
  done
  shares_against_bare
  doctor
  no_pods
  await 10 "the daemon's end" no_daemon
}

# shares_against_bare: what four shares do together, at the same time, against
# what one program does alone on the host. Of 132 multiprocessors they have 128.
shares_against_bare() {
  local i at got pids rounds=3
  : >"$work/figures"
  for _ in $(seq "$rounds"); do
    got=$(number bare "measure 0 2")
    echo "bare $got" | tee -a "$work/figures"
    at=$(($(date +%s) + 2))
    pids=()
    for i in 1 2 3 4; do
      number "share-$i" "measure $at 2" >"$work/share-$i" &
      pids+=($!)
    done
    wait "${pids[@]}"
    got=$(cat "$work"/share-[1-4])
    echo "shares $(awk '{s += $1} END {print (NR == 4) ? s : 0}' <<<"$got") of" "${got//$'\n'/ }" | tee -a "$work/figures"
  done
  compare shares TFLOP/s 0.8
}

# phase_pair: claims of all GPUs, and of one while another is shared.
phase_pair() {
  if [ "$gpus" = 1 ]; then
    note "  pair: left out, this host has one GPU"
    return
  fi
  all_reduce
  shared_beside_whole
}

# nvlink_domains prints the NVLink domain of each whole GPU that has one.
nvlink_domains() {
  k get resourceslices -o jsonpath='{range .items[*].spec.devices[*]}{.attributes.type.string} {.attributes.nvlinkDomain.string}{"\n"}{end}' | awk '$1 == "gpu" && $2 != "" {print $2}'
}

# check_nvlink: GPUs that nvidia-smi calls linked are published in one domain.
check_nvlink() {
  local matrix domains
  matrix=$(nvidia-smi topo -m || true)
  domains=$(nvlink_domains)
  note "  NVLink domains published: $(sort <<<"$domains" | uniq -c | tr -s ' \n' ' ')"
  if grep -qE '(^|[[:space:]])NV[0-9]+([[:space:]]|$)' <<<"$matrix"; then
    same "GPUs in one NVLink domain" "$(sort <<<"$domains" | uniq -c | awk '$1 > most {most = $1} END {print most + 0}')" "$gpus"
  fi
}

# claim_all prints a template of claims for every GPU of the host, in one NVLink
# domain where they are.
claim_all() {
  local constraints=""
  if [ "$(nvlink_domains | sort | uniq -c | awk '{print $1}')" = "$gpus" ]; then
    constraints="constraints: [{requests: [gpu], matchAttribute: gpu.nvidia.com/nvlinkDomain}]"
  fi
  cat <<END
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: all}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.nvidia.com, count: $gpus}
      $constraints
END
}

# all_reduce: a claim of all GPUs reduces over NVLink as fast as the host does,
# and keeps others waiting.
all_reduce() {
  local start
  note "  -- $gpus GPUs in one claim"
  whole_only
  check_nvlink
  claim_all | k apply -f -
  if no_pytorch "the all-reduce"; then
    pod all all 1001 "$client all; nvidia-smi -L" | k apply -f -
    await 60 "the client" enough 1 ' user '
  else
    bare "allreduce $work/bare $gpus"
    start=$(now)
    python_pod all all "allreduce /tmp $gpus" | k apply -f -
    k wait --for=condition=Ready pod/all --timeout=60s
    note "  bare: $(ask bare info)"
    note "  in the pod: $(ask all info), $(since "$start") from creation with Python's and NCCL's start"
    logs
  fi
  same "GPUs in the pod" "$(k exec all -c main-0 -- nvidia-smi -L | wc -l)" "$gpus"
  pod third any 1002 "$client third" | k apply -f -
  await 20 "another pod found without room" unschedulable third
  note "  another pod for a whole GPU is Pending"
  [ ! -e "$described" ] || alternate all 0 "GB/s of bus bandwidth" 0.98
  k delete pod all --wait
  await 30 "the other pod" enough 1 '^third SMs'
  note "  the other pod ran when the first had gone"
  no_pods
}

# shared_beside_whole: the first GPU in four shares, the others whole, all in use
# at the same time; one pod more for a whole GPU waits for the shares' end.
shared_beside_whole() {
  local i percent
  note "  -- one GPU in four shares, the others whole"
  planned '{mps: {shares: 4}}' mps 4
  devices
  read -r _ _ _ percent < <(devices | awk '$2 == "mps"')
  closed
  for i in 1 2 3 4; do
    pod "share-$i" share $((1000 + i)) "$client share-$i wait=$go/go hold=1"
  done | k apply -f -
  await 60 "4 clients on shares" enough 4 '^share-. user '
  for i in $(seq 2 "$gpus"); do
    pod "whole-$i" any $((1010 + i)) "nvidia-smi -L; $client whole-$i wait=$go/go hold=1"
  done | k apply -f -
  await 60 "clients on whole GPUs" enough $((gpus - 1)) '^whole-.* user '
  pod third any 1020 "$client third" | k apply -f -
  await 20 "another pod found without room" unschedulable third
  note "  another pod for a whole GPU is Pending"
  what_runs
  doctor
  open go
  await 20 "$((gpus + 3)) clients" enough $((gpus + 3)) ' held '
  logs | sort
  said "clients that computed at the same time" $((gpus + 3)) ' held .*: no error'
  said "pods with a whole GPU that see the one in shares" 0 "$gpu"
  for i in 1 2 3 4; do
    sm_count "share-$i" "$percent"
  done
  for i in $(seq 2 "$gpus"); do
    sm_count "whole-$i" 100
  done
  k delete pod share-1 share-2 share-3 share-4 --wait
  await 30 "the other pod" enough 1 '^third SMs'
  sm_count third 100
  note "  the other pod has the shared GPU as a whole, when the shares had gone"
  no_pods
  await 10 "the daemon's end" no_daemon
}
