#!/usr/bin/env bash
# A cluster is upgraded with the release installed, one minor version at a time:
# control plane first, then the kubelets. After each step the controller must keep
# the DeviceClasses, and helm upgrade, helm uninstall and helm install must work.
#
#   test/upgrade/run.sh                    1.32 to 1.37
#   test/upgrade/run.sh 1.36 1.37          these versions
#   CHART=DIR test/upgrade/run.sh ...      the first release is of another chart,
#                                          an earlier one
#
# Needs Linux, Go and root. Versions that aren't in the cache are built, each in
# some 10 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

versions=("$@")
[ $# -gt 0 ] || versions=(1.32 1.33 1.34 1.35 1.36 1.37)
cluster=${CLUSTER:-upgrade}
namespace=tessera-system
image=_output/images/tessera.tar
work=$(mktemp -d)
localcluster=$work/localcluster

say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
fail() {
	printf 'upgrade: %s\n' "$*" >&2
	exit 1
}
leave() {
	local rc=$?
	trap - EXIT
	if [ $rc -ne 0 ]; then
		kubectl get deviceclasses,pods,resourceslices -A || true
		kubectl logs -n $namespace -l app.kubernetes.io/component=controller --tail=40 || true
	fi
	"$localcluster" down --name "$cluster" || true
	rm -rf "$work"
	[ $rc -eq 0 ] && echo "upgrade: ok ($SECONDS s)" || echo "upgrade: FAILED"
	exit $rc
}
program() { "$localcluster" binary "$1" --name "$cluster"; }
kubectl() { "$(program kubectl)" "$@"; }
helm() { "$(program helm)" "$@"; }

# await runs a command until it succeeds. Arguments: what is awaited, the command.
await() {
	local what=$1 end=$((SECONDS + 90))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || fail "after 90 s still no $what"
		sleep 0.5
	done
}

apply() { # the release, from a chart
	helm upgrade --install tessera "$1" --namespace $namespace --create-namespace --values demo/values.yaml \
		--wait --timeout 180s --hide-notes >/dev/null
}

classes() { kubectl get deviceclasses -l app.kubernetes.io/managed-by=tessera -o name | wc -l; }
has_classes() { [ "$(classes)" -eq "$1" ]; }
no_objects() { [ -z "$(kubectl get deviceclasses,clusterroles -l app.kubernetes.io/name=tessera -o name)" ]; }

resource_name() { [ "$(kubectl get deviceclass gpu.nvidia.com -o jsonpath='{.spec.extendedResourceName}')" = nvidia.com/gpu ]; }

not_stored=(events -n default --field-selector=reason=ExtendedResourceNotStored)
told() { kubectl get "${not_stored[@]}" -o name | grep .; }

# asked shows that the controller has asked the server whether it stores extended
# resource names: the class has its name, or an event says that it can't.
# forget_events comes before the step after which it has to ask.
forget_events() { kubectl delete "${not_stored[@]}" >/dev/null; }
asked() {
	case $1 in
	1.36 | 1.37) await "extended resource name" resource_name ;;
	*) await "event about the extended resource name" told ;;
	esac
}

# kept shows that the controller puts back a class that is changed and one that is
# deleted.
kept() {
	await "DeviceClasses" has_classes 6
	kubectl patch deviceclass mig.nvidia.com --type=merge -p '{"spec": {"selectors": []}}' >/dev/null
	await "selector of mig.nvidia.com" eval '[ -n "$(kubectl get deviceclass mig.nvidia.com -o jsonpath={.spec.selectors})" ]'
	kubectl delete deviceclass timeslice.gpu.nvidia.com >/dev/null
	await "deleted class again" kubectl get deviceclass timeslice.gpu.nvidia.com
	kubectl get deviceclasses -o custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName
}

offered() { [ "$(kubectl get resourceslices -o jsonpath='{range .items[*]}{.spec.nodeName}{"\n"}{end}' | sort -u | wc -l)" -eq 2 ]; }

# runs starts a pod with a claim, in the version of the API that the server has. The
# slices come first: the scheduler of 1.31 looks at a pod again only after minutes.
runs() {
	local file
	await "slices of both nodes" offered
	case $1 in
	1.31) file=v1alpha3 ;;
	1.32) file=v1beta1 ;;
	1.33) file=v1beta2 ;;
	*) file=v1 ;;
	esac
	kubectl apply -f "demo/api-versions/$file.yaml" >/dev/null
	await "pod with a GPU" kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/api-versions --timeout=1s
	kubectl logs api-versions | grep 'UUID: GPU-'
	kubectl delete -f "demo/api-versions/$file.yaml" --wait >/dev/null
}

go build -o "$localcluster" ./sim/cmd/localcluster
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$localcluster" up --name "$cluster" --kubernetes "${versions[0]}" --nodes 2
KUBECONFIG=$("$localcluster" kubeconfig --name "$cluster")
export KUBECONFIG
# kubectl and Helm believe for minutes what they have seen of the API.
export KUBECACHEDIR=$work/kubecache
go run ./deployments/container/build -output $image
"$localcluster" load-image --name "$cluster" $image

say "install on ${versions[0]}"
apply "${CHART:-deployments/helm/tessera}"
if [ -n "${CHART:-}" ]; then
	say "upgrade of the release from ${CHART}"
	apply deployments/helm/tessera
fi
asked "${versions[0]}"
kept
runs "${versions[0]}"
for version in "${versions[@]:1}"; do
	say "control plane $version"
	forget_events
	"$localcluster" upgrade --name "$cluster" --kubernetes "$version"
	rm -rf "$KUBECACHEDIR"
	asked "$version"
	kept
	say "kubelets $version"
	"$localcluster" upgrade --name "$cluster" --kubelet "$version"
	kept
	runs "$version"
	say "helm upgrade, uninstall and install on $version"
	apply deployments/helm/tessera
	helm uninstall tessera --namespace $namespace --wait --timeout 90s >/dev/null
	await "end of the release's objects" no_objects
	forget_events
	apply deployments/helm/tessera
	asked "$version"
	kept
	runs "$version"
done
helm uninstall tessera --namespace $namespace --wait --timeout 90s >/dev/null
await "end of the release's objects" no_objects
