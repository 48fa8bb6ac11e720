# shellcheck shell=bash disable=SC2154
# run.sh's phase about errors of programs. Sourced by run.sh, whose variables it
# uses, after mps.sh.

# told POD CODE tells whether the pod has an event about the XID.
told() { k get events --field-selector "involvedObject.name=$1" -o jsonpath='{.items[*].message}' | grep -q "XID $2"; }

# unharmed: nothing is wrong with the GPU, and all its devices can be allocated.
unharmed() {
  same "conditions of the GPU" "$(k get gpuinventories -o jsonpath='{.items[*].status.gpus[*].conditions}')" ""
  same "taints of its devices" "$(k get resourceslices -o jsonpath='{.items[*].spec.devices[*].taints}')" ""
}

# rate NAME is how many kernels a second a client computed last.
rate() { logs | awk -v n="$1" '$1 == n && $2 == "work" && $5 == "kernels" {r = $9} END {print r + 0}'; }

# phase_xid: the program that goes wrong ends, its pod is told why, and the GPU
# stays as it is for everybody else.
phase_xid() {
  k delete sharingpolicies --all --wait=true --ignore-not-found
  await 30 "$gpus whole GPUs" offers gpu "$gpus"
  pod owner whole 1001 "$client owner fault; $client owner misaligned; $client owner work=small:2" | k apply -f -
  await 60 "the faults of the pod with the whole GPU" enough 1 '^owner work '
  await 10 "an event about XID 31" told owner 31
  await 10 "an event about XID 13" told owner 13
  k get events --field-selector involvedObject.name=owner | grep -i xid || true
  note "  after two faults in the pod with the whole GPU: $(rate owner) kernels/s"
  unharmed
  no_pods

  planned '{mps: {shares: 4}}' mps 4
  closed
  {
    pod neighbour share 1001 "$client neighbour work=small:3; $client neighbour wait=$go/go work=small:6; $client neighbour work=small:3"
    pod faulty share 1002 "$client faulty wait=$go/go hold=1 fault"
  } | k apply -f -
  await 60 "the neighbour's first figure" enough 1 '^neighbour work '
  note "  the neighbour on a share, before: $(rate neighbour) kernels/s"
  open go
  await 20 "the fault on a share" enough 1 '^faulty fault'
  await 10 "an event about XID 31" told faulty 31
  await 10 "one on the neighbour, which MPS ended too" told neighbour 31
  await 30 "the neighbour's last figure" enough 3 '^neighbour work '
  logs | grep -E '^(neighbour work|faulty fault)' | while read -r line; do note "  $line"; done
  note "  after: $(rate neighbour) kernels/s"
  unharmed
  k get events | grep -i xid || true
  no_pods
}
