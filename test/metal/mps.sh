# shellcheck shell=bash disable=SC2154
# run.sh's phases about MPS and time slices. Sourced by run.sh, whose variables
# it uses, after lib.sh. Clients print their name first in each line
# (client.cu), so that the logs of all pods can be read together.

client=$bundle/client
# Directory of files that clients wait for. It is the node's own: a node doesn't
# see every file that is made in the host's directories later.
go=/run/tessera-metal

title() {
  case $1 in
    whole) echo "a pod with a claim for the whole GPU, and one without a claim" ;;
    xid) echo "programs that go wrong with the whole GPU and on a share: who is told, and what the others see" ;;
    usage) echo "memory and utilization of pods by the plugin's metrics, and as their programs know it" ;;
    shares) echo "two and then eight pods on equal shares, of different users" ;;
    consumable) echo "shares as large as each claim says: 10 GiB and 20 GiB" ;;
    configured) echo "MPS by the claim's own configuration, two containers of one claim" ;;
    escape) echo "what a container on a share can do about its limits" ;;
    fault) echo "a client that writes to an illegal address, and what the others see" ;;
    daemon) echo "supervisor, plugin, server and control daemon killed under a client" ;;
    context) echo "time to the first CUDA context with and without MPS" ;;
    timeslice) echo "time slices by policy and by the claim's configuration" ;;
    throughput) echo "throughput on shares, time-sliced, and in turn" ;;
    torch) echo "the host's PyTorch multiplies matrices in a pod and on four shares, and on the host" ;;
    churn) echo "a busy node: pods of all kinds come and go while plugin and supervisor are killed and replaced" ;;
    pair) echo "all GPUs in one claim reduce over NCCL; one GPU in shares beside whole ones" ;;
  esac
}

# policy PLAN applies a SharingPolicy for the first GPU; PLAN is YAML in one line.
# The host's other GPUs stay whole.
policy() {
  cat <<EOF | k apply -f -
apiVersion: gpu.tessera.dev/v1alpha1
kind: SharingPolicy
metadata: {name: metal}
spec:
  gpuSelector: device.attributes["gpu.nvidia.com"].uuid == "$gpu"
  plan: $1
EOF
}

# devices lists what is offered: name, type, memory and thread percentage.
devices() {
  k get resourceslices -o jsonpath='{range .items[*].spec.devices[*]}{.name} {.attributes.type.string} {.capacity.memory.value} {.capacity.threadPercentage.value}{"\n"}{end}'
}

offers() { [ "$(devices | awk -v t="$1" '$2 == t' | wc -l)" = "$2" ]; }

# planned PLAN TYPE COUNT applies a policy and waits for its devices.
planned() {
  policy "$1"
  if ! await 30 "$3 devices of type $2" offers "$2" "$3"; then
    devices
    return 1
  fi
}

# mib reads a quantity.
mib() {
  case $1 in
    *Gi) echo $((${1%Gi} * 1024)) ;;
    *Mi) echo "${1%Mi}" ;;
    *Ki) echo $((${1%Ki} / 1024)) ;;
    *) echo $(($1 / 1048576)) ;;
  esac
}

# pod NAME TEMPLATE USER COMMAND prints a pod that runs COMMAND and stays. Each
# further argument is the command of another container, which shares the claim.
pod() {
  cat <<EOF
---
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {metal: mps}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  securityContext: {runAsUser: $3, runAsGroup: $3}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: $2}]
  volumes:
  - {name: metal, hostPath: {path: $bundle}}
  - {name: go, hostPath: {path: $go, type: DirectoryOrCreate}}
  containers:
EOF
  shift 3
  local i=0 command
  for command in "$@"; do
    cat <<EOF
  - name: main-$i
    image: localhost/tessera/debian:local
    command: [sh, -c, "$command; exec sleep 1000"]
    resources: {claims: [{name: gpu}]}
    volumeMounts: [{name: metal, mountPath: $bundle, readOnly: true}, {name: go, mountPath: $go, readOnly: true}]
EOF
    i=$((i + 1))
  done
}

# share_of NAME MEMORY [PERCENT] prints a template of claims for so much.
share_of() {
  local percent="${3:+, threadPercentage: $3}"
  cat <<EOF
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: share-$1}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: mps.gpu.nvidia.com
          capacity: {requests: {memory: $2$percent}}
EOF
}

# closed makes clients wait, open lets those go that wait for NAME.
closed() { on_node "mkdir -p $go; rm -f $go/*"; }
open() { on_node "touch $go/$1"; }

logs() { k logs -l metal=mps --all-containers --tail=-1 --max-log-requests=32 --ignore-errors 2>/dev/null || true; }
lines() { logs | grep -cE -- "$1" || true; }
enough() { [ "$(lines "$2")" -ge "$1" ]; }

# said WHAT COUNT PATTERN expects as many lines of the clients.
said() { same "$1" "$(lines "$3")" "$2"; }

# sm_count NAME PERCENT: as many as the share says, give or take a cluster of
# them.
sm_count() {
  local got
  got=$(logs | awk -v n="$1" '$1 == n && $2 == "SMs" {print $3; exit}')
  check "$1 sees ${got:-no} SMs of $sms at $2 %" awk -v g="${got:-0}" -v s="$sms" -v p="$2" 'BEGIN {d = g - s * p / 100; exit !(d < 1 && d > -3)}'
}

on_pipe() { on_node "PATH=\$PATH:/usr/local/nvidia/bin; for d in /run/tessera/mps/d/*/pipe; do export CUDA_MPS_PIPE_DIRECTORY=\$d; echo $1 | nvidia-cuda-mps-control; done"; }
daemon_pid() { on_node 'cat /run/tessera/mps/d/*/pipe/nvidia-cuda-mps-control.pid' 2>/dev/null || true; }
mps_processes() { for p in /proc/[0-9]*; do tr '\0' ' ' 2>/dev/null <"$p/cmdline" || true; echo; done | grep '^[^ ]*nvidia-cuda-mps' || true; }
no_daemon() { on_node '! ls -d /run/tessera/mps/d/*' >/dev/null 2>&1; }

# what_runs shows the daemon's and the driver's view of the clients.
what_runs() {
  mps_processes
  on_pipe ps || true
  nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv || true
}

phase_shares() {
  for n in 2 8; do
    equal_shares $n
  done
}

# equal_shares N: all shares of the GPU taken at once, each used to its limit.
equal_shares() {
  local n=$1 i memory percent start
  note "  -- $n shares"
  planned "{mps: {shares: $n}}" mps "$n"
  devices
  read -r _ _ memory percent < <(devices | awk '$2 == "mps"')
  memory=$(mib "$memory")
  closed
  start=$(now)
  for i in $(seq "$n"); do
    pod "share-$i" share $((1000 + i)) "$client share-$i alloc=$((memory - 512)) alloc=512 wait=$go/go hold=1"
  done | k apply -f -
  await 60 "$n clients" enough "$n" ' alloc 512 MiB: '
  note "  $n pods at their limits in $(since "$start") from creation"
  what_runs
  doctor
  open go
  await 20 "$n clients" enough "$n" ' held '
  logs | sort
  said "clients that got $((memory - 512)) of $memory MiB" "$n" " alloc $((memory - 512)) MiB: no error"
  said "clients that were refused 512 MiB more" "$n" ' alloc 512 MiB: out of memory'
  said "clients that computed while the others held their memory" "$n" ' held .*: no error'
  same "different users" "$(logs | awk '$2 == "user" {print $3}' | sort -u | wc -l)" "$n"
  for i in $(seq "$n"); do
    sm_count "share-$i" "$percent"
  done
  no_pods
  await 10 "the daemon's end" no_daemon
}

phase_consumable() {
  local all
  planned '{mps: {consumable: {memoryStep: 1Gi, maxClients: 16}}}' mps 1
  devices
  all=$(mib "$(devices | awk '$2 == "mps" {print $3}')")
  closed
  {
    share_of 10 10Gi 30
    share_of 20 20Gi 60
    pod c10 share-10 1010 "$client c10 alloc=$((10 * 1024 - 512)) alloc=512 wait=$go/go hold=1"
    pod c20 share-20 1020 "$client c20 alloc=$((20 * 1024 - 512)) alloc=512 wait=$go/go hold=1"
  } | k apply -f -
  await 60 "both clients" enough 2 ' alloc 512 MiB: '
  what_runs
  share_of rest "$((all / 1024 - 20))Gi" | k apply -f -
  pod rest share-rest 1030 "$client rest" | k apply -f -
  await 20 "the third pod found without room" unschedulable rest
  open go
  await 20 "both clients" enough 2 ' held '
  logs | sort
  said "clients that got what they asked for, less 512 MiB" 2 ' alloc (9728|19968) MiB: no error'
  said "clients that were refused 512 MiB more" 2 ' alloc 512 MiB: out of memory'
  said "clients that computed beside each other" 2 ' held .*: no error'
  sm_count c10 30
  sm_count c20 60
  k delete pod c20 --wait
  await 30 "the third client" enough 1 '^rest SMs'
  note "  a third claim, for $((all / 1024 - 20)) of $((all / 1024)) GiB, waited for the second's end"
  no_pods
}

unschedulable() { k get pod "$1" -o jsonpath='{.status.conditions[?(@.type=="PodScheduled")].reason}' | grep -q Unschedulable; }

phase_configured() {
  k delete sharingpolicies --all --wait=true
  await 30 "$gpus whole GPUs" offers gpu "$gpus"
  closed
  pod configured configured 1040 \
    "$client one alloc=7680 alloc=512 wait=$go/go hold=1" "$client two alloc=7680 alloc=512 wait=$go/go hold=1" | k apply -f -
  await 60 "both clients" enough 2 ' alloc 512 MiB: '
  what_runs
  open go
  await 20 "both clients" enough 2 ' held '
  logs | sort
  said "clients that got 7.5 of 8 GiB" 2 ' alloc 7680 MiB: no error'
  said "clients that were refused 512 MiB more" 2 ' alloc 512 MiB: out of memory'
  said "clients that computed beside each other" 2 ' held .*: no error'
  sm_count one 40
  sm_count two 40
  no_pods
  await 10 "the daemon's end" no_daemon
}

in_escape() { k exec escape -c main-0 -- "$@" 2>&1 || true; }

# limited WHAT MIB PERCENT COMMAND... runs a client in the pod, which must find
# the share's limits.
limited() {
  local what=$1 memory=$2 percent=$3 out
  shift 3
  out=$(in_escape "$@" "alloc=$memory")
  note "  $what: $(tr '\n' ';' <<<"$out")"
  check "$what: memory is limited" grep -q "alloc $memory MiB: out of memory" <<<"$out"
  check "$what: threads are limited" awk -v s="$sms" -v p="$percent" '$2 == "SMs" && $3 < s * p / 100 + 1 {found = 1} END {exit !found}' <<<"$out"
}

# phase_escape: what the daemon must refuse, and, told but not judged, what is
# known to be open: a process that names another device's limit, or no daemon.
phase_escape() {
  local daemon memory percent command
  planned '{mps: {shares: 4}}' mps 4
  read -r _ _ memory percent < <(devices | awk '$2 == "mps"')
  memory=$(mib "$memory")
  pod escape share 0 "$client escape" | k apply -f -
  await 60 "the client" enough 1 ' user '
  daemon=$(daemon_pid)
  in_escape ls -la /tmp/nvidia-mps
  limited "environment without limits" "$memory" "$percent" env -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "$client" a
  limited "environment that asks for all" "$memory" "$percent" env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=500G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 "$client" b
  limited "pipe directory not said" "$memory" "$percent" env -u CUDA_MPS_PIPE_DIRECTORY "$client" c
  if [ -e "$bundle/mps-control" ]; then
    for command in get_server_list "set_default_device_pinned_mem_limit 0 500G" quit; do
      note "  root in the container says $command: $(in_escape sh -c "echo '$command' | timeout 5 $bundle/lib/ld-linux-x86-64.so.2 --library-path $bundle/lib $bundle/mps-control" | tr '\n' ';')"
    done
  fi
  sleep 0.5 # what quit would do, it does at once
  same "the control daemon" "$(daemon_pid)" "$daemon"
  limited "after that" "$memory" "$percent" env -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT "$client" d
  note "  known: limit for another device: $(in_escape env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=1=500G "$client" e "alloc=$memory" | tr '\n' ';')"
  note "  known, compute mode unchanged: no daemon named: $(in_escape env CUDA_MPS_PIPE_DIRECTORY=/nonexistent "$client" f "alloc=$memory" | tr '\n' ';')"
  no_pods
}

# again POD runs a client in a pod that is there, until it is under MPS with the
# share's limits again; how long that took and what came before is told.
again() {
  local start out tries=0
  start=$(now)
  while :; do
    out=$(k exec "$1" -c main-0 -- "$client" again alloc=200 2>&1 || true)
    tries=$((tries + 1))
    if awk -v s="$sms" '$2 == "SMs" && $3 < s / 2 {found = 1} END {exit !found}' <<<"$out"; then
      break
    fi
    note "  try $tries in $1: $(tr '\n' ';' <<<"$out")"
    if [ $tries -ge 20 ]; then
      miss "no client in $1 gets its limits any more"
      return 1
    fi
    sleep 0.2
  done
  note "  a new process in $1 has its limits, $(since "$start") after the first try (try $tries): $(grep SMs <<<"$out")"
}

phase_fault() {
  local daemon
  planned '{mps: {shares: 4}}' mps 4
  closed
  {
    pod bystander-1 share 1001 "$client bystander-1 hold=60"
    pod bystander-2 share 1002 "$client bystander-2 hold=60"
    pod faulty share 1003 "$client faulty wait=$go/go fault"
  } | k apply -f -
  await 60 "three clients" enough 3 ' user '
  daemon=$(daemon_pid)
  open go
  await 20 "the fault" enough 1 '^faulty fault'
  await 20 "what the others see" enough 2 'bystander-. held '
  logs | grep -E ' (fault|held)' | sort | while read -r line; do note "  $line"; done
  again bystander-1
  again faulty
  same "the control daemon" "$(daemon_pid)" "$daemon"
  what_runs
  no_pods
}

# ended NAME tells whether a client's hold is over.
ended() { [ "$(lines "^$1 held ")" -ge 1 ]; }

# crash NAME kills every process of that name on the node.
crash() {
  on_node 'for p in /proc/[0-9]*; do [ "$(cat $p/comm 2>/dev/null)" = '"$1"' ] && kill -9 "${p#/proc/}" && echo "killed '"$1"' ${p#/proc/}"; done; true'
}

supervisor_ready() {
  [ "$(k -n tessera-system get pods -l app.kubernetes.io/component=mps -o jsonpath='{.items[*].status.conditions[?(@.type=="Ready")].status}')" = True ]
}

other_daemon() {
  local pid
  pid=$(daemon_pid)
  [ -n "$pid" ] && [ "$pid" != "$1" ]
}

phase_daemon() {
  local daemon start
  planned '{mps: {shares: 4}}' mps 4
  pod holder share 1001 "$client holder hold=120" | k apply -f -
  await 60 "the client" enough 1 '^holder user'
  daemon=$(daemon_pid)

  note "  -- the supervisor killed"
  crash mps-supervisor
  await 60 "the supervisor" supervisor_ready
  pod second share 1002 "$client second alloc=200" | k apply -f -
  await 60 "a share beside" enough 1 '^second alloc'
  same "the control daemon" "$(daemon_pid)" "$daemon"

  note "  -- supervisor and plugin replaced"
  k -n tessera-system delete pods -l app.kubernetes.io/component=mps --wait=true
  k -n tessera-system rollout restart daemonset/tessera-node
  k -n tessera-system rollout status daemonset/tessera-node --timeout=60s
  await 60 "the supervisor" supervisor_ready
  pod third share 1003 "$client third alloc=200" | k apply -f -
  await 120 "a share beside" enough 1 '^third alloc'
  same "the control daemon" "$(daemon_pid)" "$daemon"
  if ended holder; then miss "the first client ended: $(logs | grep '^holder held')"; else note "  the first client never noticed"; fi

  note "  -- the server killed"
  on_node 'for p in /proc/[0-9]*; do tr "\0" " " <$p/cmdline 2>/dev/null | grep -q "^[^ ]*nvidia-cuda-mps-server" && kill -9 "${p#/proc/}" && echo "killed a server"; done; true'
  await 20 "the client's end" ended holder
  note "  $(logs | grep '^holder held')"
  again holder

  note "  -- the control daemon killed"
  pod fourth share 1004 "$client fourth hold=120" | k apply -f -
  await 60 "another client" enough 1 '^fourth user'
  daemon=$(daemon_pid)
  start=$(now)
  on_node "kill -9 $daemon"
  await 60 "another daemon" other_daemon "$daemon"
  note "  another control daemon after $(since "$start")"
  again fourth
  await 20 "the client's end" ended fourth
  note "  $(logs | grep '^fourth held')"
  doctor
  k get gpuinventories -o yaml | grep -A6 'type: MPS' || true
  no_pods
}

# first_context NAME TEMPLATE: eleven processes one after the other in a pod.
first_context() {
  local created
  created=$(date +%s%3N)
  pod "$1" "$2" 1001 "for i in 0 1 2 3 4 5 6 7 8 9 10; do $client $1-\$i; done" | k apply -f -
  await 60 "eleven clients" enough 11 ' ran from '
  logs | awk -v n="$1" -v created="$created" '
    $2 == "context" {ms = $(NF - 1); if ($1 == n "-0") first = ms; else all[++count] = ms}
    $1 == n "-0" && $2 == "ran" {ready = $NF - created}
    END {
      for (i = 1; i <= count; i++) for (j = i + 1; j <= count; j++) if (all[j] < all[i]) {t = all[i]; all[i] = all[j]; all[j] = t}
      printf "  %s: first context of the first process %d ms, of the next %d p50 %d ms (%d to %d); from the creation of the pod to the first context %d ms\n",
        n, first, count, all[int((count + 1) / 2)], all[1], all[count], ready
    }' | while read -r line; do note "  $line"; done
  no_pods
}

phase_context() {
  planned '{mps: {shares: 2}}' mps 2
  first_context with-mps share
  await 10 "the daemon's end" no_daemon
  first_context without-mps whole
}

slice_is() { [ "$(time_slice)" = "$1" ]; }

# first_slice SLICE is the list of time slices with another one for the first GPU.
first_slice() { awk -v s="$1" '{$1 = s; print}' <<<"$slice_before"; }

phase_timeslice() {
  local i
  same "time slice before" "$(time_slice)" "$slice_before"
  planned '{timeSliced: {replicas: 2, interval: Long}}' timeslice 2
  devices
  closed
  for i in 1 2; do
    pod "replica-$i" replica $((1000 + i)) "$client replica-$i wait=$go/go hold=1"
  done | k apply -f -
  await 60 "both clients" enough 2 ' user '
  nvidia-smi compute-policy --list
  same "time slices while replicas of the first GPU are claimed" "$(time_slice)" "$(first_slice Long)"
  doctor
  open go
  await 20 "both clients" enough 2 ' held '
  logs | sort
  said "clients that computed in turns" 2 ' held .*: no error'
  no_pods
  await 10 "the time slice as before" slice_is "$slice_before"
  note "  put back to $slice_before"

  pod short short 1001 "$client short" | k apply -f -
  await 60 "the client" enough 1 ' user '
  same "time slices while a claim with GpuConfig TimeSlicing Short is prepared" "$(time_slice)" "$(first_slice Short)"
  no_pods
  await 10 "the time slice as before" slice_is "$slice_before"
  note "  put back to $slice_before"
}

# side_by_side MODE PLAN TYPE TEMPLATE N: N pods compute at the same time.
side_by_side() {
  local i
  planned "$2" "$3" "$5"
  closed
  for i in $(seq "$5"); do
    pod "$1-$5-$i" "$4" $((1000 + i)) "$client $1-$5-$i wait=$go/small work=small:1.5 wait=$go/full work=full:1.5"
  done | k apply -f -
  await 60 "$5 clients" enough "$5" ' user '
  sleep 0.5 # the kubelet and the runtime come to rest
  open small
  await 20 "$5 clients" enough "$5" ' work small '
  open full
  await 20 "$5 clients" enough "$5" ' work full '
  logs | tee -a "$work/throughput"
  no_pods
}

phase_throughput() {
  local n
  : >"$work/throughput"
  for n in 2 4 8; do
    side_by_side mps "{mps: {shares: $n}}" mps share "$n"
  done
  for n in 2 4 8; do
    side_by_side sliced "{timeSliced: {replicas: $n}}" timeslice replica "$n"
  done
  pod turn whole 1001 "$client alone work=small:2 work=full:2; for n in 2 4 8; do for kind in small full; do for i in \$(seq \$n); do $client turn-\$n-\$kind work=\$kind:0.4; done; done; done; echo turns done" | k apply -f -
  await 90 "the turns" enough 1 '^turns done'
  logs >>"$work/throughput"
  no_pods
  throughput_table <"$work/throughput" | tee -a "$summary"
}

# throughput_table: kernels per second of all clients together. In turn, the
# time from the first process's start to the last one's end counts.
throughput_table() {
  awk '
    $2 == "work" && $5 == "kernels" {
      rate = $9; p50 = $12; p99 = $14
      split($1, part, "-")
      if ($1 == "alone") {alone[$3] = rate; next}
      if (part[1] == "turn") {kernels[part[2], $3] += $4; next}
      key = part[1] SUBSEP part[2] SUBSEP $3
      sum[key] += rate
      clients[key]++
      if (!(key in least) || rate < least[key]) least[key] = rate
      if (rate > most[key]) most[key] = rate
      if (p50 > slow[key]) slow[key] = p50
      if (p99 > slowest[key]) slowest[key] = p99
    }
    $2 == "ran" {
      split($1, part, "-")
      if (part[1] != "turn") next
      key = part[2] SUBSEP part[3]
      if (!(key in from) || $4 < from[key]) from[key] = $4
      if ($6 > to[key]) to[key] = $6
    }
    function side(mode, n, kind,   key) {
      key = mode SUBSEP n SUBSEP kind
      if (clients[key] != n) return "(" clients[key] + 0 " of " n " clients)"
      return sprintf("%.0f (%.0f–%.0f; %.2f, %.2f)", sum[key], least[key], most[key], slow[key], slowest[key])
    }
    END {
      print "| clients | kernel | on MPS shares, kernels/s (least–most of a client; worst p50, p99 in ms) | time-sliced, likewise | in turn, with process starts | one alone |"
      print "| --- | --- | --- | --- | --- | --- |"
      count = split("2 4 8", ns, " ")
      split("small full", kinds, " ")
      for (k = 1; k <= 2; k++) for (i = 1; i <= count; i++) {
        n = ns[i]; kind = kinds[k]; span = to[n, kind] - from[n, kind]
        printf "| %d | %s | %s | %s | %.0f | %.0f |\n", n, kind, side("mps", n, kind), side("sliced", n, kind), (span > 0 ? kernels[n, kind] * 1000 / span : 0), alone[kind]
      }
    }'
}
