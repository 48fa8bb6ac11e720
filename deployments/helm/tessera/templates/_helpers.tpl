{{/* Prefix of object names: the release's name, with the chart's where it isn't in there already. */}}
{{- define "tessera.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "tessera.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels that select one component's pods; call with (dict "root" $ "component" NAME). */}}
{{- define "tessera.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tessera.image" -}}
{{- with .Values.image -}}
{{- if not .repository -}}
{{- fail "image.repository is not set: there are no published images, so build one from deployments/container, push it to a registry that your nodes can reach, and give its name: --set image.repository=REGISTRY/tessera --set image.tag=TAG (or image.digest=sha256:...)" -}}
{{- end -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* --metrics-address for a port; call with (dict "root" $ "port" PORT "off" WHAT-TURNS-IT-OFF). */}}
{{- define "tessera.metricsAddress" -}}
{{- with .root.Values.metrics -}}
{{- if .enabled -}}
{{ ternary (printf "[%s]" .bindAddress) .bindAddress (contains ":" .bindAddress) }}:{{ $.port }}
{{- else -}}
{{ $.off }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A DaemonSet's update strategy. The chart's rollingUpdate means nothing beside OnDelete. */}}
{{- define "tessera.updateStrategy" -}}
{{- if eq .type "OnDelete" -}}
type: OnDelete
{{- else -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/*
The plugin's update strategy. From Kubernetes 1.33 a new plugin is started beside the
running one and takes over from it, on as many nodes at a time as maxUnavailable says.
*/}}
{{- define "tessera.nodeUpdateStrategy" -}}
{{- $strategy := .Values.node.updateStrategy -}}
{{- if or (eq $strategy.type "OnDelete") (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- include "tessera.updateStrategy" $strategy -}}
{{- else -}}
type: RollingUpdate
rollingUpdate: {maxSurge: {{ ($strategy.rollingUpdate | default dict).maxUnavailable | default 1 }}, maxUnavailable: 0}
{{- end -}}
{{- end -}}

{{/*
Matches all nodes but those whose driver is being replaced: the GPU Operator's driver
manager sets this value after it has evicted the pods with GPUs, waits until nothing uses
the driver, and resets it when the next one is there. An admin may do the same.
*/}}
{{- define "tessera.driverStays" -}}
- {key: nvidia.com/gpu.deploy.dra-driver, operator: NotIn, values: [paused-for-driver-upgrade]}
{{- end -}}

{{/*
The affinity of pods that work with a node's GPUs. The chart's own leaves out nodes
on which Node Feature Discovery looked and found no NVIDIA device, and no others: a
cluster without it has no label to go by. Each term is one reason to run on a node.
*/}}
{{- define "tessera.affinity" -}}
{{- if .Values.node.affinity -}}
{{- toYaml .Values.node.affinity -}}
{{- else -}}
{{- $stays := include "tessera.driverStays" . -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
    {{- if .Values.simulator.enabled }}
    - matchExpressions:
      {{- $stays | nindent 6 }}
    {{- else }}
    # Node Feature Discovery hasn't looked at the node.
    - matchExpressions:
      - {key: feature.node.kubernetes.io/kernel-version.full, operator: DoesNotExist}
      {{- $stays | nindent 6 }}
    # It found an NVIDIA device: by vendor, as NVIDIA's own charts configure it, or by
    # class and vendor, its default (VGA controller, 3D controller).
    - matchExpressions:
      - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
      {{- $stays | nindent 6 }}
    - matchExpressions:
      - {key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}
      {{- $stays | nindent 6 }}
    - matchExpressions:
      - {key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}
      {{- $stays | nindent 6 }}
    # It found a processor of NVIDIA, as in some computers with Tegra: NVIDIA's own charts
    # (dra-driver-nvidia-gpu, k8s-device-plugin) accept this label too.
    - matchExpressions:
      - {key: feature.node.kubernetes.io/cpu-model.vendor_id, operator: In, values: [NVIDIA]}
      {{- $stays | nindent 6 }}
    # Somebody says so: GPU Operator, GPU Feature Discovery, an admin.
    - matchExpressions:
      - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
      {{- $stays | nindent 6 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/*
The tolerations of pods that may run on nodes in the hard reserve of ranks, whatever the values
say: those that a node must have, and those that remove the taint; call with lists of tolerations,
which may be missing.
*/}}
{{- define "tessera.tolerations" -}}
{{- $tolerations := list -}}
{{- range . -}}
{{- $tolerations = concat $tolerations (. | default list) -}}
{{- end -}}
{{- append $tolerations (dict "key" "gpu.tessera.dev/reserve" "operator" "Exists") | uniq | toYaml -}}
{{- end -}}

{{/*
The values of packing, as YAML, with the defaults of values.yaml for what is missing: with helm
upgrade --reuse-values a release from before them has none, or only what --set names.
*/}}
{{- define "tessera.packing" -}}
{{- $packing := .Values.packing | default dict -}}
ranks: {{ $packing.ranks | default false }}
poolLabel: {{ $packing.poolLabel | default "" | quote }}
reserve: {hard: {{ int ($packing.reserve | default dict).hard }}}
{{- end -}}

{{/* Where the driver is on the node. */}}
{{- define "tessera.driverRoot" -}}
{{- if and .Values.simulator.enabled .Values.node.driverRoot -}}
{{- fail (printf "simulator.enabled and node.driverRoot (%s) exclude each other: with the simulator the driver is at simulator.root" .Values.node.driverRoot) -}}
{{- end -}}
{{- if .Values.simulator.enabled -}}
{{- .Values.simulator.root -}}
{{- else -}}
{{- .Values.node.driverRoot -}}
{{- end -}}
{{- end -}}
