{{/*
The newest version of resource.k8s.io with the kinds of Dynamic Resource Allocation
that the server has. The release's manifest doesn't depend on it: only an example in
NOTES.txt does, and the refusal to install where there is none. Without a server (helm
template) Helm claims all versions that it knows.
*/}}
{{- define "tessera.resourceAPI" -}}
{{- $has := .Capabilities.APIVersions -}}
{{- if $has.Has "resource.k8s.io/v1" -}}
v1
{{- else if $has.Has "resource.k8s.io/v1beta2" -}}
v1beta2
{{- else if $has.Has "resource.k8s.io/v1beta1" -}}
v1beta1
{{- else if $has.Has "resource.k8s.io/v1alpha3/ResourceSlice" -}}
v1alpha3
{{- end -}}
{{- end -}}

{{/* Fails where Dynamic Resource Allocation is off, and says how it is turned on. */}}
{{- define "tessera.requireDRA" -}}
{{- if not (include "tessera.resourceAPI" .) -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- $everywhere := "--feature-gates=DynamicResourceAllocation=true on kube-apiserver, kube-controller-manager, kube-scheduler and every kubelet" -}}
{{- $how := "" -}}
{{- if semverCompare "<1.32.0-0" $version -}}
{{- $how = printf "Set %s, and --runtime-config=resource.k8s.io/v1alpha3=true on kube-apiserver" $everywhere -}}
{{- else if semverCompare "<1.33.0-0" $version -}}
{{- $how = printf "Set %s, and --runtime-config=resource.k8s.io/v1beta1=true on kube-apiserver" $everywhere -}}
{{- else if semverCompare "<1.34.0-0" $version -}}
{{- $how = printf "Set %s, and --runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true on kube-apiserver" $everywhere -}}
{{- else -}}
{{- $how = "It is on by default in this version: remove DynamicResourceAllocation=false from --feature-gates of kube-apiserver, kube-controller-manager, kube-scheduler and the kubelets, and whatever turns resource.k8s.io/v1 off from --runtime-config of kube-apiserver" -}}
{{- end -}}
{{- $managed := "" -}}
{{- if semverCompare "<1.34.0-0" $version -}}
{{- $managed = ". Where the control plane is managed for you (EKS, AKS, GKE), these flags aren't yours: upgrade the cluster to Kubernetes 1.34 or later, where it is on by default, or see if your provider has a setting for it (GKE, from 1.32: --enable-kubernetes-unstable-apis with the resources of resource.k8s.io/v1beta1)" -}}
{{- end -}}
{{- fail (printf "Dynamic Resource Allocation is off: this cluster (Kubernetes %s) doesn't serve ResourceSlices. %s%s" $version $how $managed) -}}
{{- end -}}
{{- end -}}

{{/* Lists the features that this Kubernetes version lacks or has off by default, for NOTES.txt. */}}
{{- define "tessera.leftOut" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- $off := list -}}
{{- if semverCompare "<1.33.0-0" $version -}}
{{- $off = append $off "MIG partitions on demand (Kubernetes 1.33, feature gate DRAPartitionableDevices); partitions by a SharingPolicy's layout work" -}}
{{- else if semverCompare "<1.36.0-0" $version -}}
{{- $off = append $off "MIG partitions on demand, unless the feature gate DRAPartitionableDevices is on" -}}
{{- end -}}
{{- if semverCompare "<1.36.0-0" $version -}}
{{- $off = append $off "MPS shares by size (Kubernetes 1.36); equal shares work" -}}
{{- end -}}
{{- if .Values.deviceClasses.install -}}
{{- $names := list -}}
{{- with .Values.deviceClasses.extendedResourceName }}{{ $names = append $names . }}{{ end -}}
{{- range .Values.deviceClasses.extra }}{{ with .extendedResourceName }}{{ $names = append $names . }}{{ end }}{{ end -}}
{{- if not $names -}}
{{- else if semverCompare "<1.34.0-0" $version -}}
{{- $off = append $off (printf "%s in resources.limits (Kubernetes 1.34, feature gate DRAExtendedResource)" (join ", " $names)) -}}
{{- else if semverCompare "<1.36.0-0" $version -}}
{{- $off = append $off (printf "%s in resources.limits, unless the feature gate DRAExtendedResource is on" (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- if $off }}

Not available on Kubernetes {{ $version }} as far as its version says; available after an
upgrade of the cluster or with the feature gate, without `helm upgrade`:
{{- range $off }}
- {{ . }}
{{- end }}
{{- end }}
{{- end -}}
