#!/usr/bin/env bash
# The demo: a real Kubernetes on this machine, two nodes with simulated GPUs,
# Tessera installed by Helm, and the everyday ways to claim a GPU, each checked
# against what the scheduler allocated.
#
#   demo/run.sh          run everything and remove it again
#   KEEP=1 demo/run.sh   leave it up, to look around
#   demo/run.sh down     remove what KEEP=1 left
#
# Other settings: CLUSTER (name, default demo), KUBERNETES (version, default 1.37),
# IMAGE (the pods' image, for clusters that don't have the one in the manifests).
#
# Needs Linux, Go, git and root. The first run builds Kubernetes: some 15
# minutes on 2 cores.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
cluster=${CLUSTER:-demo}
namespace=tessera-system
KEEP=${KEEP:-0}
KUBERNETES=${KUBERNETES:-1.37}
IMAGE=${IMAGE:-localhost/tessera/debian:local}

work=$root/_output/demo
localcluster=$work/localcluster
watcher=

say() { printf '\n== %s\n' "$*"; }
fail() {
	printf 'demo: %s\n' "$*" >&2
	exit 1
}

stop_watcher() {
	[ -z "$watcher" ] || { kill "$watcher" && wait "$watcher"; } 2>/dev/null || true
	watcher=
}

build_localcluster() {
	mkdir -p "$(dirname "$localcluster")"
	go build -trimpath -o "$localcluster" ./sim/cmd/localcluster
}

down() {
	build_localcluster
	"$localcluster" down --name "$cluster"
}

# explain prints what is needed to see why something failed.
explain() {
	set +e
	say "what the cluster looks like"
	kubectl get nodes,gpuinventories,resourceslices,deviceclasses -o wide
	kubectl get pods,resourceclaims -A -o wide
	kubectl get events -A --sort-by=.lastTimestamp | tail -n 40
	for part in controller node mps simulator; do
		say "log of the $part"
		kubectl logs -n "$namespace" -l app.kubernetes.io/component="$part" --prefix --tail=60
		kubectl logs -n "$namespace" -l app.kubernetes.io/component="$part" --prefix --tail=20 --previous 2>/dev/null
	done
}

leave() {
	local rc=$?
	trap - EXIT
	exec >&3 # a signal finds standard output wherever it is just redirected to
	stop_watcher
	if [ $rc -ne 0 ] && [ $rc -lt 128 ] && [ -n "${KUBECONFIG:-}" ]; then
		explain
	fi
	if [ "$KEEP" = 1 ]; then
		look_around
	elif [ -x "$localcluster" ]; then
		say "removing the cluster"
		"$localcluster" down --name "$cluster" || rc=1
		echo "To look around in it: make demo KEEP=1, which also says how. Then, to remove it: make demo-down."
	fi
	if [ $rc -eq 0 ]; then
		echo "demo: ok ($SECONDS s)"
	else
		echo "demo: FAILED" >&2
	fi
	exit $rc
}

look_around() {
	cat <<-END

		The cluster is up. To look around:

		  export KUBECONFIG=${KUBECONFIG:-}
		  alias kubectl=$(program kubectl)
		  kubectl get gpuinventories
		  kubectl get resourceslices
		  kubectl apply -f demo/smi-job
		  kubectl wait --for=condition=Complete job/smi
		  kubectl logs job/smi

		To remove it: make demo-down
	END
}

program() { "$localcluster" binary "$1" --name "$cluster"; }
kubectl() { "$kubectl" "$@"; }

up() {
	say "a cluster: Kubernetes $KUBERNETES, two nodes"
	build_localcluster
	"$localcluster" up --name "$cluster" --kubernetes "$KUBERNETES" --nodes 2
	KUBECONFIG=$("$localcluster" kubeconfig --name "$cluster")
	export KUBECONFIG
	kubectl=$(program kubectl)
	helm=$(program helm)
	gates=$("$localcluster" gates --name "$cluster" | tr '\n' ' ')
}

install() {
	say "Tessera's image"
	go run ./deployments/container/build
	"$localcluster" load-image --name "$cluster" _output/images/tessera.tar

	say "helm install"
	# A second run on a cluster that was kept: install again.
	if "$helm" status tessera --namespace "$namespace" >/dev/null 2>&1; then
		"$helm" uninstall tessera --namespace "$namespace" --wait
		until_devices 0
	fi
	everything >"$work/before"
	"$helm" install tessera deployments/helm/tessera --namespace "$namespace" --create-namespace \
		--values demo/values.yaml --wait --timeout 120s --hide-notes
	until_devices 13
	kubectl get gpuinventories
	kubectl get resourceslices
}

# until_devices waits until this many whole GPUs are published.
until_devices() {
	local want=$1 have=0 end=$((SECONDS + 60))
	while :; do
		have=$(devices | grep -c ' gpu ' || true)
		[ "$have" -ne "$want" ] || return 0
		[ $SECONDS -lt $end ] || fail "$have GPUs are published after 60 s, not $want"
		sleep 0.2
	done
}

# devices prints "POOL/DEVICE TYPE UUID PROFILE MEMORY THREADS PRODUCT NAME"
# for every published device; UUID is the whole GPU's; PROFILE, of a MIG partition
# or a share of one, MEMORY and THREADS (of an MPS share) are - where there is none.
# Up to 1.32, attributes and capacities are in "basic"; in 1.31 a capacity is a
# quantity, and has no field "value".
devices() {
	local value=.value
	[ "$KUBERNETES" != 1.31 ] || value=
	kubectl get resourceslices -o go-template='
{{- range .items}}{{$pool := .spec.pool.name}}{{range .spec.devices}}{{$d := .}}{{with .basic}}{{$d = .}}{{end}}{{$a := $d.attributes}}{{$c := $d.capacity -}}
{{$pool}}/{{.name}} {{$a.type.string}} {{if $a.parentUUID}}{{$a.parentUUID.string}}{{else}}{{$a.uuid.string}}{{end}} {{if $a.profile}}{{$a.profile.string}}{{else}}-{{end}} {{$c.memory'$value'}} {{if $c.threadPercentage}}{{$c.threadPercentage'$value'}}{{else}}-{{end}} {{$a.productName.string}}
{{end}}{{end}}'
}

# minors prints "UUID MINOR" for every GPU.
minors() {
	kubectl get gpuinventories -o go-template='{{range .items}}{{range .status.gpus}}{{.uuid}} {{.minor}}{{"\n"}}{{end}}{{end}}'
}

# watch_grants prints "CLAIM REQUEST POOL/DEVICE MEMORY THREADS" for every device
# that is allocated while it runs (MEMORY and THREADS are what the claim takes of a
# device that others take of too, and - of all others), and "= POOL/DEVICE UUID" for
# every MIG partition when its claim's status tells which MIG device it is.
# (Afterwards is too late: when a pod has ended, Kubernetes removes the claim that
# was made for it.) CLAIM is NAMESPACE/NAME, or, for one that was made for a pod,
# NAMESPACE/POD/NAME with the name that it has in the pod's spec, or
# NAMESPACE/POD/nvidia.com where the spec names none.
watch_grants() {
	exec "$kubectl" get resourceclaims -A --watch -o go-template='
{{- $claim := printf "%s/%s" .metadata.namespace .metadata.name}}
{{- with .metadata.ownerReferences}}{{$pod := printf "%s/%s" $.metadata.namespace (index . 0).name}}
{{- with index $.metadata.annotations "resource.kubernetes.io/pod-claim-name"}}{{$claim = printf "%s/%s" $pod .}}
{{- else}}{{$claim = printf "%s/nvidia.com" $pod}}{{end}}{{end}}
{{- with .status}}{{with .allocation}}{{range .devices.results -}}
{{$claim}} {{.request}} {{.pool}}/{{.device}} {{with .consumedCapacity}}{{.memory}} {{.threadPercentage}}{{else}}- -{{end}}
{{end}}{{end}}{{range $given := .devices}}{{with .data}}{{if .uuid -}}
= {{$given.pool}}/{{$given.device}} {{.uuid}}
{{end}}{{end}}{{end}}{{end}}'
}

# wishes prints "POD CONTAINER CLAIM REQUEST" for every claim that a container of a
# namespace uses; POD is NAMESPACE/POD; CLAIM as above; REQUEST is * where the
# container uses the whole claim.
wishes() {
	kubectl get pods -n "$1" -o go-template='
{{- range .items}}{{$pod := .}}{{$ns := .metadata.namespace}}{{range .spec.containers}}{{$container := .}}
{{- range .resources.claims}}{{$wish := .}}
{{- range $pod.spec.resourceClaims}}{{if eq .name $wish.name -}}
{{$ns}}/{{$pod.metadata.name}} {{$container.name}} {{$ns}}/{{if .resourceClaimName}}{{.resourceClaimName}}{{else}}{{$pod.metadata.name}}/{{.name}}{{end}} {{or $wish.request "*"}}
{{end}}{{end}}{{end}}
{{- with $pod.status.extendedResourceClaimStatus}}
{{- range .requestMappings}}{{if eq .containerName $container.name -}}
{{$ns}}/{{$pod.metadata.name}} {{$container.name}} {{$ns}}/{{$pod.metadata.name}}/nvidia.com {{.requestName}}
{{end}}{{end}}{{end}}{{end}}{{end}}'
}

# mig_uuid prints the UUID of the MIG device that a partition became.
# Where the server doesn't store that, it is only "MIG".
mig_uuid() {
	has DRAResourceClaimDeviceStatus || {
		echo MIG
		return
	}
	local end=$((SECONDS + 10))
	until awk -v device="$1" '$1 == "=" && $2 == device { print $3; found = 1; exit } END { exit !found }' "$work/grants"; do
		[ $SECONDS -lt $end ] || fail "no claim's status tells the UUID of $1"
		sleep 0.2
	done
}

# seen prints what of a log matches, each once; nothing is no error.
seen() { grep -Eo "$1" | sed 's/UUID: //' | sort -u || true; }

# limits compares the limits of an MPS share with those in a container's
# environment. Arguments: the container, its log, memory (a quantity), threads.
limits() {
	local who=$1 log=$2 mib threads=$4
	mib=$(($(numfmt --from=auto "$3") / 1048576))
	echo "    with $mib MiB and $threads % of the multiprocessors"
	grep -qx 'CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps' <<<"$log" || fail "$who has no MPS daemon"
	grep -qx "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=${mib}M" <<<"$log" || fail "$who has another memory limit than ${mib}M"
	[ "$threads" = 100 ] || grep -qx "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$threads" <<<"$log" || fail "$who has another limit of threads than $threads %"
}

# check compares what every container of a scenario sees with what its claims
# were allocated. Arguments: the scenario, how many containers it has, how many
# different devices (GPUs, MIG partitions, shares) they have together, and a model
# that every one must be ("" for any). Its namespaces are in $spaces.
check() {
	local scenario=$1 containers=$2 devices=$3 model=$4
	local -A kind=() minor=() uuid=() profile=() memory=() threads=() product=() want=() all=()
	local device type number id slice size part name pod container claim request given granted space
	while read -r id number; do
		minor[$id]=$number
	done < <(minors)
	while read -r device type id slice size part name; do
		kind[$device]=$type uuid[$device]=$id profile[$device]=$slice product[$device]=$name
		memory[$device]=$size threads[$device]=$part
	done < <(devices)
	granted=$(grep -v '^=' "$work/grants" | sort -u)
	while read -r pod container claim request; do
		while read -r given name device size part; do
			[ "$given" = "$claim" ] || continue
			[ "$request" = "*" ] || [ "$name" = "$request" ] || [ "${name%%/*}" = "$request" ] || continue
			want["$pod $container"]+="$device $size $part"$'\n'
		done <<<"$granted"
	done < <(for space in $spaces; do wishes "$space"; done)
	[ "${#want[@]}" -eq "$containers" ] || fail "$scenario: ${#want[@]} containers have a GPU, not $containers"

	for name in "${!want[@]}"; do
		read -r pod container <<<"$name"
		local log mig want_nodes="" want_ids="" caps=0
		log=$(kubectl logs -n "${pod%%/*}" "${pod#*/}" -c "$container")
		printf '\npod %s, container %s sees:\n' "$pod" "$container"
		sed 's/^/  | /' <<<"$log"
		while read -r device size part; do
			[ -n "$device" ] || continue
			want_nodes+="/dev/nvidia${minor[${uuid[$device]}]}"$'\n' want_ids+="${uuid[$device]}"$'\n'
			all[$device]=1
			case ${product[$device]} in *"$model"*) ;; *) fail "$scenario: $device is not a $model" ;; esac
			if [ "${profile[$device]}" != - ]; then
				mig=$(mig_uuid "$device")
				want_ids+="$mig"$'\n' caps=$((caps + 2))
				echo "  its claim was given $device: ${kind[$device]}, ${profile[$device]} of ${product[$device]}, $mig, on ${uuid[$device]}, /dev/nvidia${minor[${uuid[$device]}]}"
			else
				echo "  its claim was given $device: ${kind[$device]}, ${product[$device]}, ${uuid[$device]}, /dev/nvidia${minor[${uuid[$device]}]}"
			fi
			[ "$size" != - ] || size=${memory[$device]} part=${threads[$device]}
			[ "${kind[$device]}" != mps ] || limits "$pod/$container" "$log" "$size" "$part"
		done <<<"${want[$name]}"
		local nodes ids
		nodes=$(seen '/dev/nvidia[0-9]+' <<<"$log")
		ids=$(seen 'UUID: (GPU|MIG)-[0-9a-f-]+' <<<"$log")
		has DRAResourceClaimDeviceStatus || ids=$(sed 's/^MIG-.*/MIG/' <<<"$ids")
		[ "$nodes" = "$(sort -u <<<"${want_nodes%$'\n'}")" ] || fail "$scenario: $pod/$container has the device nodes ${nodes//$'\n'/ }, which is not what its claim was given"
		[ "$ids" = "$(sort -u <<<"${want_ids%$'\n'}")" ] || fail "$scenario: nvidia-smi in $pod/$container lists ${ids//$'\n'/ }, which is not what its claim was given"
		[ "$(seen '/dev/nvidia-caps/nvidia-cap[0-9]+' <<<"$log" | grep -c .)" -eq $caps ] || fail "$scenario: $pod/$container has other than two capabilities for each MIG partition"
		grep -q '/dev/nvidiactl' <<<"$log" || fail "$scenario: $pod/$container has no /dev/nvidiactl"
	done
	[ "${#all[@]}" -eq "$devices" ] || fail "$scenario: ${#all[@]} different devices are in use, not $devices"
	echo "  ok: exactly those"
}

# begin gives a scenario a namespace of its own and watches what is given there.
begin() {
	local name=$1 ns=demo-${1//\//-}
	began=$SECONDS spaces=$ns
	say "$name: $(sed -n '1s/^# //p' "demo/$name/README.md") (demo/$name)"
	kubectl delete namespace "$ns" --ignore-not-found --timeout=60s >/dev/null # of a run that was kept
	kubectl create namespace "$ns" >/dev/null
	watch_grants >"$work/grants" &
	watcher=$!
}

# apply applies manifests of a scenario. Arguments: the scenario, files.
apply() {
	local ns=demo-${1//\//-}
	shift
	manifests "$@" | kubectl apply -n "$ns" -f -
}

# manifests prints files, in the version of resource.k8s.io that the cluster serves
# and with the image that is wanted.
manifests() {
	"$localcluster" convert --name "$cluster" "$@" | sed "s#image: localhost/tessera/debian:local#image: $IMAGE#"
}

# await is kubectl wait in a scenario's namespace. Arguments: the scenario, what
# to wait for, in one word.
await() {
	# shellcheck disable=SC2086 # several arguments
	kubectl wait -n "demo-${1//\//-}" --timeout=90s $2 >/dev/null || fail "$1: still waiting for $2"
}

# apply_all applies a scenario's manifests. Its SharingPolicy comes first: what it
# says has to be on offer before anybody asks for it.
apply_all() {
	local file
	if [ -e "demo/$1/policy.yaml" ]; then
		apply "$1" "demo/$1/policy.yaml"
		await "$1" "--for=condition=Applied -f demo/$1/policy.yaml"
	fi
	for file in "demo/$1"/*.yaml; do
		[ "${file##*/}" = policy.yaml ] || apply "$1" "$file"
	done
}

# finish removes a scenario. (A SharingPolicy is in no namespace.) Of those that
# share GPUs it waits until nothing is left, for the next one to begin without.
finish() {
	stop_watcher
	[ ! -e "demo/$1/policy.yaml" ] || kubectl delete -f "demo/$1/policy.yaml" >/dev/null
	# shellcheck disable=SC2086 # several namespaces
	kubectl delete namespace $spaces --wait=false >/dev/null
	case $1 in mps/* | timeslicing/*) unshared node-0 && unshared node-1 ;; esac
	echo "  ($((SECONDS - began)) s)"
}

# has says whether a feature gate of Dynamic Resource Allocation is on.
has() { [[ " $gates " == *" $1 "* ]]; }

# with runs a scenario if the feature gate it needs is on.
with() { # GATE COMMAND [SCENARIO ...]
	local gate=$1
	shift
	if has "$gate"; then
		"$@"
	else
		printf '\n== %s: left out, it needs the feature gate %s, which Kubernetes %s has off by default or lacks\n' "${2:-$1}" "$gate" "$KUBERNETES"
	fi
}

# scenario applies the manifests of one folder in a namespace of its own, waits
# for what they make, checks, and removes it all. Arguments: folder, what to
# wait for (kubectl wait's arguments in one word), then check's.
scenario() {
	local name=$1 wait=$2
	shift 2
	begin "$name"
	apply_all "$name"
	await "$name" "$wait"
	check "$name" "$@"
	case $name in mps/* | timeslicing/*) look ;; esac
	finish "$name"
}

# whole_gpu_waits is the one scenario that happens in steps.
whole_gpu_waits() {
	local name=mig/whole-gpu-waits
	begin "$name"
	apply "$name" "demo/$name/partitions.yaml"
	await "$name" "--for=condition=Ready pod/first pod/second"
	apply "$name" "demo/$name/whole.yaml"
	await "$name" "--for=condition=PodScheduled=False pod/whole"
	echo "  the whole GPU has to wait: $(kubectl get pod whole -n "demo-${name//\//-}" -o jsonpath='{.status.conditions[?(@.type=="PodScheduled")].message}')"
	await "$name" "--for=condition=Ready pod/whole"
	check "$name" 3 3 "H100"
	finish "$name"
}

# two_namespaces is equal shares for strangers.
two_namespaces() {
	local name=mps/equal-shares
	begin "$name"
	spaces="$spaces demo-mps-neighbours"
	kubectl delete namespace demo-mps-neighbours --ignore-not-found --timeout=60s >/dev/null
	kubectl create namespace demo-mps-neighbours >/dev/null
	apply_all "$name"
	manifests "demo/$name/deployment.yaml" | kubectl apply -n demo-mps-neighbours -f -
	await "$name" "--for=condition=Available deployment/small-model"
	kubectl wait -n demo-mps-neighbours --timeout=90s --for=condition=Available deployment/small-model >/dev/null || fail "$name: the neighbours don't run"
	check "$name" 4 4 "L40S"
	look
	finish "$name"
}

# mps_whole_gpu is the scenario whose limits the claim itself says.
mps_whole_gpu() {
	local name=mps/whole-gpu container
	begin "$name"
	apply_all "$name"
	await "$name" "--for=condition=Ready pod/two-in-one"
	check "$name" 2 1 "H100"
	for container in first second; do
		echo "  container $container"
		limits "$container" "$(kubectl logs -n "$spaces" two-in-one -c "$container")" 20Gi 50
	done
	look
	finish "$name"
}

# look shows what sharing has set up on the nodes.
look() {
	local node found
	for node in node-0 node-1; do
		found=$(shared "$node")
		[ -z "$found" ] || printf '  on %s:\n%s\n' "$node" "$(sed 's/^/  | /' <<<"$found")"
	done
}

# shared lists what isn't as it is without sharing on a node: compute modes, time
# slices, MPS daemons with their processes.
shared() {
	smi "$1" --query-gpu=index,name,compute_mode --format=csv,noheader | grep -v 'Default$' || true
	smi "$1" compute-policy --list | sed -nE 's/^\|( +[0-9]+ .*(Short|Medium|Long)) *\|$/\1/p'
	daemons "$1"
}

# daemons lists the MPS daemons of a node and their processes.
daemons() {
	"$localcluster" exec --name "$cluster" "$1" -- sh -c '
		ls /run/tessera/mps/d 2>/dev/null
		for p in /proc/[0-9]*; do
			name=$({ tr "\0" " " <"$p/cmdline"; } 2>/dev/null) || continue
			case ${name%% *} in *nvidia-cuda-mps-*) echo "$name" ;; esac
		done'
}

# settle waits until nothing of the scenarios is left.
# (grep reads to the end: a pipe that it closes early would count as a failure.)
settle() {
	local end=$((SECONDS + 60))
	while kubectl get namespaces -o name | grep '^namespace/demo-' >/dev/null; do
		[ $SECONDS -lt $end ] || fail "the scenarios' namespaces are not gone after 60 s"
		sleep 0.5
	done
}

# smi is nvidia-smi on a node.
smi() {
	local node=$1
	shift
	"$localcluster" exec --name "$cluster" "$node" -- /var/lib/tessera-simulator/driver/usr/bin/nvidia-smi "$@"
}

# unpartitioned waits until the GPUs of a node are as they were: no MIG instance
# is left, and MIG mode is off.
unpartitioned() {
	local end=$((SECONDS + 30))
	while smi "$1" -L | grep MIG >/dev/null || smi "$1" --query-gpu=mig.mode.current --format=csv,noheader | grep Enabled >/dev/null; do
		[ $SECONDS -lt $end ] || fail "after 30 s $1 still has MIG instances or MIG mode:"$'\n'"$(smi "$1" -L)"
		sleep 0.5
	done
	echo "$1 has no MIG instance left, and MIG mode is off again"
}

# unshared waits until nothing of MPS and time slices is there on a node.
unshared() {
	local end=$((SECONDS + 30)) left
	while left=$(shared "$1") || fail "can't look at $1" && [ -n "$left" ]; do
		[ $SECONDS -lt $end ] || fail "after 30 s $1 still has"$'\n'"$left"
		sleep 0.5
	done
	echo "  $1 has no MPS daemon, and compute modes and time slices are as before"
}

# everything lists every object in the cluster but those that come and go by
# themselves.
everything() {
	local kinds
	kinds=$(kubectl api-resources --verbs=list -o name | grep -vE '^(events|leases|leasecandidates|pods|endpoints|endpointslices|componentstatuses)(\.|$)' | paste -sd,)
	kubectl get "$kinds" -A --ignore-not-found \
		-o go-template='{{range .items}}{{.kind}} {{with .metadata.namespace}}{{.}}/{{end}}{{.metadata.name}}{{"\n"}}{{end}}' |
		grep -v "^Namespace $namespace\$\| $namespace/\(kube-root-ca.crt\|default\)\$" | sort
}

# files lists what Tessera has on a node.
files() {
	"$localcluster" exec --name "$cluster" "$1" -- \
		find /run/tessera /var/lib/tessera /var/lib/tessera-simulator /var/run/cdi /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry ! -type d
}

# uninstall removes the release and shows that the cluster is as it was.
uninstall() {
	say "helm uninstall leaves the cluster as it was"
	"$helm" uninstall tessera --namespace "$namespace" --wait --timeout 60s
	local end=$((SECONDS + 60)) left
	while :; do
		everything >"$work/after"
		left=$(diff "$work/before" "$work/after") && break
		[ $SECONDS -lt $end ] || fail "differences 60 s after helm uninstall:"$'\n'"$left"
		sleep 1
	done
	kubectl get leases -n "$namespace" -o name | grep . && fail "leases are left"
	local node
	for node in node-0 node-1; do
		while left=$(files "$node" | grep .); do
			[ $SECONDS -lt $end ] || fail "files on $node 60 s after helm uninstall:"$'\n'"$left"
			sleep 0.5
		done
	done
	echo "nothing is left of it, in the cluster or on its nodes"
}

# show_map shows who has which part of which GPU.
show_map() {
	say "kubectl gpu map: who has which part of which GPU, and what else fits"
	began=$SECONDS spaces=demo-map
	go build -trimpath -o _output/demo/kubectl-gpu ./cmd/kubectl-gpu
	kubectl delete namespace "$spaces" --ignore-not-found --timeout=60s >/dev/null # of a run that was kept
	kubectl create namespace "$spaces" >/dev/null
	manifests demo/deployment/*.yaml | kubectl apply -n "$spaces" -f - >/dev/null
	if has DRAPartitionableDevices; then
		manifests demo/mig/mix/*.yaml | kubectl apply -n "$spaces" -f - >/dev/null
		await map "--for=condition=Ready pod/small pod/large pod/pair"
	fi
	await map "--for=condition=Available deployment/inference"
	_output/demo/kubectl-gpu map
	kubectl delete namespace "$spaces" --wait=false >/dev/null
	echo "  ($((SECONDS - began)) s)"
}

case ${1:-run} in
down)
	down
	exit
	;;
run) ;;
*) fail "unknown argument $1: want none, or down" ;;
esac
[ "$(id -u)" -eq 0 ] || fail "the local cluster needs root: run this with sudo"

hack/prepare.sh
exec 3>&1
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
up
install
scenario smi-job "--for=condition=Complete job/smi" 1 1 ""
scenario device-check "--for=jsonpath={.status.phase}=Succeeded pod/device-check" 1 1 ""
scenario deployment "--for=condition=Available deployment/inference" 3 3 ""
scenario shared-claim "--for=condition=Ready pod/pair pod/guest" 3 1 ""
scenario by-class "--for=jsonpath={.status.phase}=Succeeded pod/by-class" 1 1 "L40S"
scenario by-cel "--for=jsonpath={.status.phase}=Succeeded pod/by-cel" 1 1 "A100"
scenario several-gpus "--for=jsonpath={.status.phase}=Succeeded pod/several-gpus" 1 4 "H100"
scenario nvlink-pair "--for=jsonpath={.status.phase}=Succeeded pod/nvlink-pair" 1 2 ""
with DRAPrioritizedList scenario first-available "--for=jsonpath={.status.phase}=Succeeded pod/first-available" 1 1 "H100"
if [ "$KUBERNETES" = 1.31 ]; then
	say "all-gpus: left out, because the scheduler of Kubernetes 1.31 ignores the class of a claim for all devices"
else
	scenario all-gpus "--for=jsonpath={.status.phase}=Succeeded pod/all-gpus" 1 2 "L40S"
fi
with DRAExtendedResource scenario extended-resource "--for=jsonpath={.status.phase}=Succeeded pod/extended-resource" 1 1 ""
with DRAPartitionableDevices scenario mig/single-profile "--for=condition=Ready pod/by-claim pod/by-resource" 2 2 "H100"
with DRAPartitionableDevices scenario mig/mix "--for=condition=Ready pod/small pod/large pod/pair" 4 4 "H100"
with DRAPartitionableDevices scenario mig/fill-a-gpu "--for=condition=Available deployment/seven" 7 7 "H100"
with DRAPartitionableDevices whole_gpu_waits mig/whole-gpu-waits
scenario mig/by-layout "--for=condition=Ready pod/left pod/right" 2 2 "H100"
two_namespaces
with DRAConsumableCapacity scenario mps/by-size "--for=condition=Ready pod/five pod/ten pod/twenty" 3 1 "H100"
with DRAConsumableCapacity scenario mps/in-a-partition "--for=condition=Ready pod/left pod/right" 2 1 "H100"
mps_whole_gpu
scenario timeslicing/replicas "--for=condition=Available deployment/notebooks" 3 3 "T4"
scenario timeslicing/whole-gpu "--for=condition=Ready pod/taking-turns" 2 1 "H100"
show_map
settle
unpartitioned node-0
[ "$KEEP" = 1 ] || uninstall
