#!/usr/bin/env bash
# Checks what the ResourceQuota of docs/user/works-with.md refuses, and what it admits.
set -euo pipefail
. test/blocks/testdata/refused.sh
claim() {
	echo "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: $1}, spec: {devices: {requests: [{name: x, exactly: {deviceClassName: $2}}]}}}" |
		kubectl create -n team -f -
}

kubectl wait --for=jsonpath='{.status.hard}' --timeout=1m -n team resourcequota/gpus
refused 'exceeded quota' claim share mps.gpu.nvidia.com
claim one gpu.nvidia.com
claim two gpu.nvidia.com
refused 'exceeded quota' claim three gpu.nvidia.com
refused 'exceeded quota' claim slice timeslice.gpu.nvidia.com
claim part mig.nvidia.com
echo '{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: own.example.com}}' | kubectl create -f -
claim own own.example.com # no line, no limit
kubectl delete deviceclass own.example.com
kubectl delete namespace team
