{{/*
"true" if Helm itself installs the chart. Where it only renders it (helm template, Argo CD,
Kustomize), it can't look up any object, and whoever applies the result may create hooks like
all other objects: then the chart has none. Every cluster has this ClusterRole, and who
installs the chart may read ClusterRoles.
*/}}
{{- define "tessera.runsHooks" -}}
{{- if lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "cluster-admin" -}}
true
{{- end -}}
{{- end -}}
