#!/usr/bin/env bash
# Checks what docs/user/security.md lets a team do with SharingPolicies.
set -euo pipefail
. test/blocks/testdata/refused.sh
policy() { echo "{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: $1}, spec: {plan: {exclusive: {}}, $2}}"; }
team() { kubectl --as=anna --as-group=team-a "$@"; }
create_everywhere() { policy all '' | team create --dry-run=server -f -; }
reason='only on nodes'
ours='nodeSelector: {matchLabels: {pool: team-a}}'
theirs='nodeSelector: {matchLabels: {pool: team-b}}'

refused no kubectl auth can-i create sharingpolicies --as=anna
in_force "$reason" create_everywhere
policy all "$theirs" | refused "$reason" team create --dry-run=server -f -
policy ours "$ours" | team create -f -
policy theirs "$theirs" | kubectl create -f -
policy theirs "$ours" | refused "$reason" team apply -f -
refused "$reason" team delete sharingpolicy theirs
team delete sharingpolicy ours
kubectl delete sharingpolicy theirs
