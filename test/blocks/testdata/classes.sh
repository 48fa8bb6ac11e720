#!/usr/bin/env bash
# Checks what the policy of docs/user/security.md about classes refuses, and what it admits.
set -euo pipefail
. test/blocks/testdata/refused.sh
kubectl create namespace team-b
kubectl label namespace team-b gpu-sharing=none

# create KIND SPEC asks the server whether it would create the object.
create() { echo "{apiVersion: resource.k8s.io/v1, kind: $1, metadata: {name: x}, spec: $2}" | kubectl create -n team-b --dry-run=server -f -; }
claim() { create ResourceClaim "{devices: {requests: [{name: x, $1}]}}"; }
template() { create ResourceClaimTemplate "{spec: {devices: {requests: [{name: x, $1}]}}}"; }
reason='only whole GPUs'

in_force "$reason" claim 'exactly: {deviceClassName: mps.gpu.nvidia.com}'
refused "$reason" claim 'exactly: {deviceClassName: mps.gpu.nvidia.com}'
refused "$reason" template 'exactly: {deviceClassName: mps.gpu.nvidia.com}'
refused "$reason" claim 'firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: timeslice.gpu.nvidia.com}]'
claim 'exactly: {deviceClassName: gpu.nvidia.com}'
claim 'firstAvailable: [{name: a, deviceClassName: mig.nvidia.com}, {name: b, deviceClassName: gpu.nvidia.com}]'
template 'exactly: {deviceClassName: gpu.nvidia.com}'
kubectl delete namespace team-b
