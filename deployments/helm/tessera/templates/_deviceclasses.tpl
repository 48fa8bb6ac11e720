{{/* The file of DeviceClasses that the controller reads (pkg/control/classes). */}}
{{- define "tessera.deviceClasses" -}}
owner: {{ include "tessera.fullname" . }}-controller
labels:
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
  app.kubernetes.io/name: {{ .Chart.Name }}
  app.kubernetes.io/instance: {{ .Release.Name }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- if not .Values.deviceClasses.install }}
classes: []
{{- else }}
classes:
- name: gpu.nvidia.com
  spec:
    selectors:
    - cel:
        expression: device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'
    {{- with .Values.deviceClasses.extendedResourceName }}
    extendedResourceName: {{ . }}
    {{- end }}
# MIG partitions: of any profile, made when a claim is given one, or made by
# somebody else before. A claim picks the profile by its attribute "profile".
- name: mig.nvidia.com
  spec:
    selectors:
    - cel:
        expression: device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'
# MPS shares, of whole GPUs and of MIG partitions: equal ones, or as large as a
# claim says. What enforces their limits is in the attributes memoryEnforcement
# and computeEnforcement.
- name: mps.gpu.nvidia.com
  spec:
    selectors:
    - cel:
        # The second kind is what a SharingPolicy with servesGPUClass makes of a GPU.
        expression: >-
          device.driver == 'gpu.nvidia.com' && (device.attributes['gpu.nvidia.com'].type == 'mps' ||
          device.attributes['gpu.nvidia.com'].type == 'gpu' && device.attributes['gpu.nvidia.com'].?memoryEnforcement.orValue('') == 'perProcess')
# Time-sliced replicas: a GPU that several claims use in turn, without any limit.
- name: timeslice.gpu.nvidia.com
  spec:
    selectors:
    - cel:
        expression: device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'timeslice'
{{- range $name, $class := .Values.deviceClasses.extra }}
- name: {{ $name }}
  spec:
    selectors:
    - cel:
        expression: device.driver == 'gpu.nvidia.com'
    - cel:
        expression: {{ $class.expression | trim | quote }}
    {{- with $class.extendedResourceName }}
    extendedResourceName: {{ . }}
    {{- end }}
    {{- with $class.config }}
    config:
    {{- range . }}
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          {{- toYaml . | nindent 10 }}
    {{- end }}
    {{- end }}
{{- end }}
{{- end }}
{{- end -}}
