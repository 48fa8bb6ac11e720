# shellcheck shell=bash disable=SC2154
# run.sh's phase about what the plugin's metrics say of memory and utilization. Sourced by
# run.sh, whose variables it uses, after mps.sh.

# scrape prints the metrics of the plugin.
scrape() {
  local plugin
  plugin=$(k --namespace tessera-system get pods -l app.kubernetes.io/component=node -o jsonpath='{.items[0].metadata.name}')
  k get --raw "/api/v1/namespaces/tessera-system/pods/$plugin:8081/proxy/metrics" | grep '^tessera_'
}

# value NAME LABEL VALUE is the value of the metric's first series with the label.
value() { awk -v n="$1{" -v l="$2=\"$3\"" 'index($1, n) == 1 && index($0, l) {print $NF; exit}' "$work/metrics"; }

# own NAME TOTAL is how many MiB of TOTAL a client said last that it has used: those that
# cudaMemGetInfo doesn't have as free.
own() { logs | awk -v n="$1" -v t="$2" '$1 == n && $2 == "memory" {own = (t > 0 ? t : $6) - $4} END {print own + 0}'; }

# agree NAME PLUGIN OWN expects the plugin's bytes within 5 % of the program's MiB.
agree() {
  local text
  text=$(awk -v p="${2:-0}" -v o="$3" 'BEGIN {p /= 1048576; d = o > 0 ? (p - o) / o * 100 : 100; printf "plugin %.0f MiB, program %.0f MiB, difference %+.2f %%", p, o, d; exit !(d <= 5 && d >= -5)}') &&
    note "  $1: $text" || miss "$1: $text"
}

# settled scrapes twice, so far apart that the second one has readings of its own.
settled() {
  scrape >/dev/null
  sleep 11
  scrape >"$work/metrics"
}

# usage_of_shares N: each pod takes another amount of memory.
usage_of_shares() {
  local n=$1 i memory
  note "  -- $n shares"
  planned "{mps: {shares: $n}}" mps "$n"
  read -r _ _ memory _ < <(devices | awk '$2 == "mps"')
  memory=$(mib "$memory")
  closed
  for i in $(seq "$n"); do
    pod "share-$i" share $((1000 + i)) "$client share-$i alloc=$((1000 * i)) memory wait=$go/go work=full:25"
  done | k apply -f -
  await 60 "$n clients" enough "$n" ' memory free '
  settled
  nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv
  for i in $(seq "$n"); do
    agree "share-$i" "$(value tessera_share_memory_used_bytes pod "share-$i")" "$(own "share-$i" "$memory")"
  done
  note "  GPU: $(awk -v v="$(value tessera_gpu_memory_used_bytes uuid "$gpu")" 'BEGIN {printf "%.0f", v / 1048576}') MiB with the MPS server, idle utilization $(value tessera_gpu_utilization_ratio uuid "$gpu")"
  open go
  settled
  nvidia-smi
  nvidia-smi pmon -c 2 -s um || true
  grep -E '^tessera_(gpu|share)_utilization_ratio' "$work/metrics" || true
  note "  while all compute: utilization of the GPU $(value tessera_gpu_utilization_ratio uuid "$gpu"), of the shares: $(awk '/^tessera_share_utilization_ratio/ {printf "%s%s", sep, $NF; sep = ", "}' "$work/metrics")"
  no_pods
  await 10 "the daemon's end" no_daemon
}

# phase_usage compares what the plugin tells with what the programs know of themselves.
phase_usage() {
  usage_of_shares 2
  usage_of_shares 8
  note "  -- the whole GPU"
  k delete sharingpolicies --all --wait=true --ignore-not-found
  await 30 "$gpus whole GPUs" offers gpu "$gpus"
  closed
  pod owner whole 1001 "$client owner alloc=20000 memory wait=$go/go work=full:25" | k apply -f -
  await 60 "the client" enough 1 ' memory free '
  settled
  agree owner "$(value tessera_gpu_memory_used_bytes uuid "$gpu")" "$(own owner 0)"
  same "pod of the GPU" "$(sed -n "s/^tessera_allocation_info{.*pod=\"\([^\"]*\)\".*uuid=\"$gpu\".*/\1/p" "$work/metrics")" owner
  open go
  settled
  note "  while it computes: utilization $(value tessera_gpu_utilization_ratio uuid "$gpu")"
  no_pods
}
